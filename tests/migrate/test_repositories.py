"""Model repositories as NVIDIA's templates lay them out, and values that somebody wrote into them."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.migrate.test_migration import foreign_engine, migrated, reason, repository
from trtforge.cli.app import app
from trtforge.core.errors import ForgeError
from trtforge.migrate.sources import read_settings
from trtforge.pipeline.migration import MigrateOptions, run_migration


def add_model(source: Path, name: str, inputs: str, path: str, backend: str = "python") -> None:
    """A model with the engine's path among its parameters, as the templates for preprocessing have it since 0.15."""
    text = f'name: "{name}"\nbackend: "{backend}"\ninput {{ name: "{inputs}" data_type: TYPE_STRING dims: 1 }}\n'
    text += f'parameters {{ key: "gpt_model_path" value {{ string_value: "{path}" }} }}\n'
    (source / name / "1").mkdir(parents=True)
    (source / name / "config.pbtxt").write_text(text)


@pytest.mark.parametrize("backend", ["tensorrtllm", "python"])
def test_preprocessing_with_the_engines_path_serves_no_engine(tmp_path: Path, backend: str) -> None:
    path = str(foreign_engine(tmp_path / "engine"))
    add_model(tmp_path / "r", "preprocessing", "QUERY", path)
    add_model(tmp_path / "r", "tensorrt_llm", "input_ids", path, backend)
    found = read_settings(tmp_path / "r")
    assert found.model is not None
    assert found.model.name == "tensorrt_llm"
    assert found.engine["build_config.max_batch_size"] == 32


def test_other_models_need_not_be_readable(tmp_path: Path) -> None:
    source = repository(tmp_path / "r", {"sink_token_length": "4"})
    (source / "tensorrt_llm_bls").mkdir()
    (source / "tensorrt_llm_bls" / "config.pbtxt").write_text("instance_group [ { count: ${bls_instance_count} } ]")
    for name in (None, "tensorrt_llm"):
        found = read_settings(source, name=name)
        assert found.model is not None
        assert found.model.parameters == {"sink_token_length": "4"}
    with pytest.raises(ForgeError, match=r"tensorrt_llm_bls/config\.pbtxt, line 1"):
        read_settings(source, name="tensorrt_llm_bls")
    (source / "tensorrt_llm" / "config.pbtxt").unlink()
    with pytest.raises(ForgeError, match=r"tensorrt_llm_bls/config\.pbtxt, line 1"):
        read_settings(source)


@pytest.mark.parametrize(("policy", "batch"), [("", 64), ("version_policy { specific { versions: [ 3 ] } }", 16)])
def test_the_engine_is_that_of_the_version_that_triton_serves(tmp_path: Path, policy: str, batch: int) -> None:
    source = repository(tmp_path / "r", {}, policy)
    shutil.rmtree(source / "tensorrt_llm" / "1")
    foreign_engine(source / "tensorrt_llm" / "3", max_batch_size=16)
    foreign_engine(source / "tensorrt_llm" / "12", max_batch_size=64)
    assert migrated(source).args.max_batch_size == batch


@pytest.mark.parametrize("value", [4.5, True, 10**30])
def test_a_number_that_is_no_whole_number_of_64_bits_is_refused(tmp_path: Path, value: object) -> None:
    source = foreign_engine(tmp_path / "engine", opt_batch_size=value, max_num_tokens=value)
    with pytest.raises(ForgeError, match=r"build_config\.max_num_tokens is .*, which is "):
        migrated(source)


@pytest.mark.parametrize("key", ["max_tokens_in_paged_kv_cache", "max_attention_window_size"])
def test_so_are_digits_in_a_repository(tmp_path: Path, key: str) -> None:
    source = repository(tmp_path / "r", {key: "9" * 50})
    with pytest.raises(ForgeError, match=f"{key} is '9+', which is not valid for it"):
        run_migration(MigrateOptions(source, "1.3.0"), tmp_path / "out")
    assert not list(tmp_path.glob(".out*"))


def test_an_argument_that_the_target_release_lacks_is_left_out(tmp_path: Path) -> None:
    source = foreign_engine(tmp_path / "engine")
    key, lacking = "build_config.plugin_config.tokens_per_block", "kv_cache_config.tokens_per_block"
    found, _ = run_migration(MigrateOptions(source, "1.0.0"), tmp_path / "old")
    assert reason(found.attention, key) == f"TensorRT-LLM 1.0.0 has no LLM argument {lacking}"
    assert key not in {entry.key for entry in found.carried}
    assert found.args.kv_cache_config.tokens_per_block is None
    assert run_migration(MigrateOptions(source, "1.1.0"), tmp_path / "new")[0].args.kv_cache_config.tokens_per_block


def test_the_next_command_has_the_options_that_this_one_needed(tmp_path: Path) -> None:
    source = repository(tmp_path / "r", {"sink_token_length": "4"}, name="a")
    repository(source, {}, name="b")
    words = ["--engine", str(foreign_engine(tmp_path / "engine")), "--model", "a", "--target-version", "1.3.0"]
    done = CliRunner().invoke(app, ["migrate", str(source), str(tmp_path / "out"), *words, "--json"])
    assert json.loads(done.stdout)["next"].endswith(" ".join(["--checkpoint", "DIR", *words]))


def test_control_characters_of_a_repository_do_not_reach_the_terminal(tmp_path: Path) -> None:
    source = repository(tmp_path / "r", {"unknown": r"a\033[31mb\nc", "gpt_model_path": r"/\033[2J"})
    done = CliRunner().invoke(app, ["migrate", str(source), str(tmp_path / "out"), "--all"])
    assert "\033" not in done.stdout
    assert "  unknown = a?[31mb?c: unknown setting\n" in done.stdout
