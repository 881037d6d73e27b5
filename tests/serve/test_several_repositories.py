"""Several models in one Triton server: each packaged with a prefix of its own, each from its own repository."""

import os
import subprocess
from contextlib import suppress
from pathlib import Path

from tests.patience import PATIENCE, eventually
from tests.ports import free_ports
from tests.serve.conftest import package_with_fake_engine
from trtforge.package.config import PackageConfig
from trtforge.serve.client import Sampling, generate
from trtforge.serve.installation import find_installation


def test_repositories_with_other_prefixes_share_a_server(tmp_path: Path) -> None:
    repositories = [
        package_with_fake_engine(tmp_path / name, PackageConfig(name_prefix=f"{name}-")) for name in ("small", "large")
    ]
    installation = find_installation(tmp_path / "runtime")
    installation.prepare()
    ports = free_ports(3)
    http, grpc = (f"127.0.0.1:{port}" for port in ports[:2])
    command = [
        str(installation.program),
        *(f"--model-repository={repository}" for repository in repositories),
        *(f"--{name}-port={port}" for name, port in zip(("http", "grpc", "metrics"), ports, strict=True)),
        "--disable-auto-complete-config",
        f"--backend-config=python,shm-region-prefix-name=trtforge-several-{os.getpid()}_",
        *installation.arguments,
    ]
    own = {"TRTFORGE_GRPC_URL": grpc, "TRTFORGE_RUNTIME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(command, env={**os.environ, **installation.environment, **own}, stderr=log)
    try:
        assert eventually(lambda: _ready(http), PATIENCE), (tmp_path / "log").read_text()
        for prefix in ("small-", "large-"):
            for model in ("ensemble", "tensorrt_llm_bls"):
                assert generate(http, f"{prefix}{model}", "one two", Sampling(max_tokens=2), protocol="http").text
    finally:
        server.terminate()
        server.wait(PATIENCE)


def _ready(http: str) -> bool:
    import httpx

    with suppress(httpx.HTTPError):
        return httpx.get(f"http://{http}/v2/health/ready", timeout=2).status_code == 200
    return False
