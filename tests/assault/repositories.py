"""The repositories that are attacked: the demo model in float32 and INT4-AWQ, with and without KV reuse."""

import json
import subprocess
import sys
from pathlib import Path

from tests.assault.server import AssaultError

ROOT = Path(__file__).parents[2]
DEFAULT = ROOT / "build" / "assault"


def build(recipe: str, out: Path = DEFAULT, *settings: str) -> Path:
    """The build of a recipe that ships, made once; without the verification. Its repository is below it."""
    name = "-".join([recipe, *(setting.replace("=", "-") for setting in settings)])
    directory = out / name
    options = [word for setting in settings for word in ("--set", setting)]
    for first, last in (("calibrate", "convert"), ("compile", "package")):
        if first == "calibrate" and recipe == "demo-fp32":
            first = "convert"
        trtforge("build", recipe, "--out", str(directory), "--from", first, "--to", last, "--quiet", *options)
    return directory / "repository"


def without_reuse(repository: Path, out: Path) -> Path:
    """The repository of the same engine that shares no KV blocks between requests."""
    engine = repository / "tensorrt_llm" / "1" / "engine"
    trtforge("package", str(engine), str(out), "--feature", "kv_reuse=false", "--quiet")
    return out


def is_exact(repository: Path) -> bool:
    """Whether an answer does not depend on what else is in the batch: float32 weights, arithmetic and KV cache."""
    values = json.loads((repository / "tensorrt_llm" / "1" / "engine" / "config.json").read_text())
    config = values["pretrained_config"]
    quantization = config["quantization"]
    plain = quantization["quant_algo"] is None and quantization["kv_cache_quant_algo"] is None
    return bool(plain and config["dtype"] == "float32")


def trtforge(*words: str) -> None:
    """Run a command. Raises AssaultError with what it said."""
    done = subprocess.run(
        [sys.executable, "-m", "trtforge", *words], capture_output=True, text=True, check=False, timeout=600
    )
    if done.returncode != 0:
        raise AssaultError(f"trtforge {' '.join(words)}: {done.stderr.strip()}")
