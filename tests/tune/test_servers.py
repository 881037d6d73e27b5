"""Variants of a repository with the demo model are served by the real server, and nothing is left behind."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import DEMO_MODEL
from tests.package.engines import tensorrt_engine, torch_engine
from trtforge.compile.stage import compile_engine
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.errors import ForgeError
from trtforge.core.recipe import EngineConfig
from trtforge.core.serving import ServingConfig
from trtforge.formats.prometheus import parse_metrics
from trtforge.package.config import PackageConfig
from trtforge.package.stage import package
from trtforge.serve.plain_http import get
from trtforge.serve.speed import Load, Meter
from trtforge.tune.servers import Packaged, kv_tokens, workplace
from trtforge.tune.variants import Variant


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The demo model in float32, with a KV cache of 600 tokens."""
    place = tmp_path_factory.mktemp("demo")
    checkpoint = convert(ConvertConfig(dtype="float32"), DEMO_MODEL, place / "checkpoint").path
    config = EngineConfig(backend="torch", device="cpu", max_batch_size=8, max_seq_len=256, tokens_per_block=16)
    engine = compile_engine(config, checkpoint, place / "engine").path
    serving = ServingConfig(kv_cache_tokens=608)
    out = package(PackageConfig(serving=serving, name_prefix="my-"), engine, None, place / "build" / "repository").path
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in out.rglob("*")}
    yield out
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in out.rglob("*")} == before


def test_a_variant_is_served_with_its_settings(repository: Path) -> None:
    packaged = Packaged.open(repository)
    packaged.require_runnable()
    assert packaged.config.serving.model_fields_set == {"kv_cache_tokens"}
    assert packaged.is_of(repository.parent.parent / "engine")
    assert not packaged.is_of(repository)
    engine = packaged.limits(Load(prompt_tokens=255))
    assert (engine.backend, engine.max_batch_size, engine.chunked_context) == ("torch", 8, True)
    with pytest.raises(ForgeError, match="--prompt-tokens 256: the engine takes prompts of up to 255 tokens"):
        packaged.limits(Load(prompt_tokens=256))
    with workplace(packaged) as place:
        (left,) = set(repository.parent.iterdir()) - {repository, place.directory}
        assert left == place.directory.with_name(f"{place.directory.name}.lock")
        with place.served(Variant(changes={"max_batch_size": 2, "max_num_tokens": 64})) as server:
            assert kv_tokens(server) == 608
            load = Load(concurrency=(6,), requests=6, prompt_tokens=24, max_tokens=4)
            answers = Meter(server.grpc, place.model, load, place.tokenizer).answers(6)
            assert answers is not None
            assert answers.output_tokens == (4,) * 6
            assert answers.input_tokens == (24,) * 6
            samples = parse_metrics(get(server.metrics, "/metrics", 5, longest=1 << 20).text, "metrics")
        limits = {s.labels["request_type"]: s.value for s in samples if s.name == "nv_trt_llm_request_metrics"}
        assert limits["max"] == 2
        served = place.directory / "repository" / "my-tensorrt_llm" / "1" / "engine" / "rank0.safetensors"
        assert served.stat().st_nlink > 1  # not a copy
    assert list(repository.parent.iterdir()) == [repository]


def test_what_a_killed_run_left_is_removed(repository: Path) -> None:
    left = repository.parent / ".trtforge-tune-abc"
    left.mkdir()
    (repository.parent / f"{left.name}.lock").touch()
    foreign = repository.parent / ".trtforge-tune-other"
    foreign.mkdir()
    with workplace(Packaged.open(repository)) as place:
        assert place.directory.parent == repository.parent
        assert not left.exists()
    assert sorted(repository.parent.iterdir()) == [foreign, repository]
    foreign.rmdir()


def test_elsewhere_if_the_place_is_read_only(repository: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make = tempfile.mkdtemp

    def refuse(prefix: str, dir: Path) -> str:
        if dir == repository.parent:
            raise OSError(30, "Read-only file system", str(dir))
        return make(prefix=prefix, dir=dir)

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with workplace(Packaged.open(repository)) as place:
        assert place.directory.parent == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_an_engine_that_cannot_run_here_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tensorrt_engine(tmp_path / "engine")
    packaged = Packaged.open(package(PackageConfig(), engine, DEMO_MODEL, tmp_path / "repository").path)
    monkeypatch.setattr("trtforge.tune.servers.visible_gpus", lambda load, chosen: ())
    with pytest.raises(ForgeError, match="backend tensorrt_llm needs an NVIDIA GPU, and this machine has none"):
        packaged.require_runnable()
    monkeypatch.setattr("trtforge.tune.servers.visible_gpus", lambda load, chosen: None)  # nobody tells: it may
    packaged.require_runnable()


def test_an_adopted_repository_has_no_settings_to_change(tmp_path: Path) -> None:
    from trtforge.core.artifact import produce
    from trtforge.core.manifest import Identity, read_manifest

    made = package(PackageConfig(), torch_engine(tmp_path / "engine"), DEMO_MODEL, tmp_path / "repository").path
    manifest = read_manifest(made)
    assert manifest is not None
    identity = Identity(stage="repository", config={"repository": manifest.identity.config["repository"]})
    adopted = produce(tmp_path / "adopted", identity, lambda directory: {}).path
    with pytest.raises(ForgeError, match="its settings are not recorded"):
        Packaged.open(adopted)


def test_a_setting_that_was_given_counts_also_if_it_is_the_default(tmp_path: Path) -> None:
    """An engine of the LLM API keeps its own values of settings that were not given."""
    config = EngineConfig.parse({"backend": "llmapi", "target": {"tensorrt_llm": "1.2.1"}}, "test")
    engine = compile_engine(config, DEMO_MODEL, tmp_path / "engine").path
    for serving in (ServingConfig(), ServingConfig(kv_cache_fraction=0.9), ServingConfig(max_batch_size=None)):
        made = package(PackageConfig(serving=serving), engine, None, tmp_path / "repository").path
        given = Packaged.open(made).config.serving
        assert given.model_fields_set == serving.model_fields_set
        assert given == serving
