"""The program as a user types it: statuses, streams, messages."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import DEMO_MODEL, MakeHf
from tests.patience import PATIENCE
from trtforge import __version__
from trtforge.cli.gate import parse_gate
from trtforge.core.errors import ForgeError, UsageError
from trtforge.core.manifest import read_manifest


def trtforge(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trtforge", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)


def test_version_is_json() -> None:
    done = trtforge("version", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["trtforge"] == __version__ == "0.2.5"


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (("convert", "--tp"), "Option '--tp' requires an argument.", "Add --help after the command"),
        (("calibrate", "a", "b"), "Missing option '--quant'.", " calibrate --help`."),
        (
            ("compile", "a", "b", "--feasure", "x"),
            "No such option: --feasure",
            "Run `trtforge compile a b --feature x`.",
        ),
        (("build", "demo-fp32", "-o", "d"), "No such option: -o", "Run `trtforge build demo-fp32 --out d`."),
        (("build", "--bogus", "--json", "--quiet"), "No such option: --bogus\n", "see `trtforge build --help`."),
        (("compile", "X", "Y", "--quant", "x"), "No such option: --quant\n", "see `trtforge compile --help`."),
        (("compile", "X", "Y", "--quie", "x"), "No such option: --quie\n", "Did you mean --quiet?\n"),
        (
            ("build", "demo-fp32", "--quantization", "fp8"),
            "No such option: --quantization\n",
            "Run `trtforge build demo-fp32 --quant fp8`.",
        ),
        (("bulid",), "No such command 'bulid'.", "Did you mean build?\n"),
        (("build", "demo-fp32", "-l", "d"), "No such option: -l", " build --help`."),
        (
            ("generate", "e", "--prompt", "x"),
            "No such option: --prompt",
            "ENGINE PROMPT; see `trtforge generate --help`.",
        ),
        (("cache", "prune", "--older-than", "-1"), "Invalid value for '--older-than'", " cache prune --help"),
        (("nonsense",), "No such command 'nonsense'.", " --help`."),
        (("build", "demo-fp32", "--from", "none"), "Invalid value for --from: none is not a stage", " build --help`."),
    ],
)
def test_command_lines_that_cannot_be_read_get_an_error_and_the_usage(
    run: Any, words: tuple[str, ...], error: str, hint: str
) -> None:
    status, printed, errors = run(*words)
    assert status == 2
    assert bool(printed) == ("--json" in words)
    said, usage = errors.splitlines(keepends=True)
    assert said.startswith(f"error: {error}")
    assert usage.startswith("hint: ")
    assert hint in usage


def test_a_program_without_a_command_shows_its_help() -> None:
    done = trtforge()
    assert (done.returncode, done.stderr) == (2, "")
    assert "Usage: trtforge [OPTIONS] COMMAND" in done.stdout


def test_help_is_status_0(run: Any) -> None:
    assert run("--help")[0] == 0


def test_failure_is_status_1_with_error_and_hint(tmp_path: Path) -> None:
    done = trtforge("convert", tmp_path / "none", tmp_path / "out")
    assert done.returncode == 1
    assert done.stdout == ""
    error, hint = done.stderr.splitlines()
    assert error.startswith(f"error: {tmp_path / 'none'}: no such directory")
    assert hint.startswith("hint: Give a checkpoint directory")
    assert "Traceback" not in done.stderr


def test_verbose_adds_the_trace(run: Any, tmp_path: Path) -> None:
    errors = run("convert", tmp_path / "none", tmp_path / "out", "--verbose")[2]
    assert "Traceback" in errors
    assert "error: " in errors


def test_convert_reports_and_names_the_next_command(make_hf: MakeHf, run: Any, tmp_path: Path) -> None:
    source = make_hf()
    words = ("convert", source, tmp_path / "out", "--tp", "2", "--json")
    status, printed, _ = run(*words)
    result = json.loads(printed)
    assert status == 0
    assert result["stage"] == "checkpoint"
    assert result["cached"] is False
    assert result["next"] == f"trtforge verify {tmp_path / 'out'} --against {source}"
    assert json.loads(run(*words)[1])["cached"] is True


@pytest.mark.parametrize(
    ("words", "replaced"),
    [
        ((), None),
        (("--force",), "the same checkpoint, which was made again"),
        (("--tp", "2"), "an earlier checkpoint with tp 1 instead of 2"),
        (
            ("--tp", "2", "--pp", "2", "--quant", "int8_wo", "--parallel-embedding"),
            "an earlier checkpoint with tp 1 instead of 2, pp 1 instead of 2, quant none instead of int8_wo and 1 more",
        ),
    ],
)
def test_a_conversion_says_what_it_replaces(
    make_hf: MakeHf, run: Any, tmp_path: Path, words: tuple[str, ...], replaced: str | None
) -> None:
    source, out = make_hf(), tmp_path / "out"
    assert "replaced" not in run("convert", source, out)[1]
    kept = read_manifest(out)
    assert kept is not None
    shutil.copytree(out, tmp_path / "other")
    printed = run("convert", source, out, *words)[1].splitlines()
    assert [line for line in printed if "replaced" in line] == ([f"replaced: {replaced}"] if replaced else [])
    as_json = json.loads(run("convert", source, tmp_path / "other", *words, "--json")[1])
    assert as_json["replaced"] == (kept.digest if replaced else None)


def test_a_conversion_by_another_version_says_so(make_hf: MakeHf, run: Any, tmp_path: Path) -> None:
    source, out = make_hf(), tmp_path / "out"
    run("convert", source, out)
    manifest = read_manifest(out)
    assert manifest is not None
    older = manifest.identity.model_copy(update={"versions": dict.fromkeys(manifest.identity.versions, "0.0.1")})
    manifest.model_copy(update={"identity": older}).write(out)
    printed = run("convert", source, out)[1]
    assert "replaced: an earlier checkpoint with the same settings, made by other versions\n" in printed


def test_a_conversion_of_another_model_says_so(make_hf: MakeHf, run: Any, tmp_path: Path) -> None:
    run("convert", make_hf("one"), tmp_path / "out")
    printed = run("convert", make_hf("two", rms_norm_eps=0.5), tmp_path / "out")[1]
    assert "replaced: an earlier checkpoint with the same settings, of other input\n" in printed


def test_unknown_format_is_named(make_hf: MakeHf, run: Any, tmp_path: Path) -> None:
    status, _, errors = run("convert", make_hf(), tmp_path / "out", "--quant", "fp6")
    assert status == 2
    assert "--quant: Input should be 'none', 'fp8', 'fp8_rowwise', 'int4_awq'" in errors


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("calibrate", "a", "b", "--quant", "int3"), "error: calibrate: --quant: Input should be 'none', 'fp8',"),
        (("calibrate", "a", "b", "--quant", "int8_wo"), "error: --quant int8_wo needs no calibration\nhint: Run `trtf"),
        (
            ("calibrate", "a", "b", "--quant", "int8_wo", "--kv-cache", "fp8"),
            "error: --quant int8_wo needs no calibration\n"
            "hint: Run `trtforge convert a CHECKPOINT --quant int8_wo --kv-cache fp8`.",
        ),
        (
            ("calibrate", "a", "b", "--quant", "int8_wo", "--kv-cache", "int8"),
            "error: --quant int8_wo needs no calibration, and --kv-cache int8 one of its own\n"
            "hint: Run `trtforge calibrate a CALIBRATION --quant none --kv-cache int8`, then `trtforge convert a "
            "CHECKPOINT --quant int8_wo --kv-cache int8 --calibration CALIBRATION`.",
        ),
        (("calibrate", "a", "b", "--quant", "none"), "error: --quant none without --kv-cache: nothing needs a cali"),
        (("calibrate", "a", "b", "--quant", "fp8", "--awq-clip"), "error: --awq-clip applies only to AWQ formats"),
        (
            ("calibrate", "a", "b", "--quant", "fp8", "--rounding", "compensated"),
            "error: rounding compensated is not available for fp8, only for int4_awq and w4a8_awq",
        ),
        (("calibrate", "a", "b", "--quant", "fp8", "--group-size", "64"), "error: --group-size applies only to AWQ"),
        (("verify", "a", "--against", "b", "--gate", "perplexity_increas=1"), "error: --gate: unknown key perplexity_"),
        (("verify", "a", "--against", "b", "--gate", "top1_agreement=93"), "error: --gate: top1_agreement: Input sh"),
        (("verify", "a", "--against", "b", "--gate", "samples=2"), "error: --gate samples=2: sets no limit\nhint: Set"),
        (("build", "demo-fp32", "--set", "foo"), "error: --set foo: not KEY=VALUE"),
        (("build", "demo-fp32", "--set", "parallel.tp=0"), "error: --set parallel.tp=0: Input should be greater"),
        (("build", DEMO_MODEL, "--set", "parallel.tp=0"), "error: --set parallel.tp=0: Input should be greater"),
        (("build", "demo-fp32", "--quant", "fp"), "error: --quant fp: quantization.format: Input should be 'none'"),
        (("package", "a", "b", "--set", "serving.strea=1"), "error: --set serving.strea=1: unknown key serving.strea"),
        (("package", "a", "b", "--set", "kv_reuse=1"), "error: --set kv_reuse=1: not serving.KEY=VALUE"),
        (("compile", "a", "b", "--feature", "eagle", "--feature", "lookahead"), "error: compile: --feature: eagle and"),
        (("calibrate", "a", "b", "--quant", "fp8", "--memory", "lots"), "error: calibrate: --memory: not a size"),
        (("calibrate", "a", "b", "--quant", "fp8", "--memory", "0GB"), "error: calibrate: --memory: Input should be"),
        (("compile", "a", "b", "--feature", "lora.max_rank=0"), "error: compile: --feature lora.max_rank: Input"),
        (("package", "a", "b", "--feature", "kv_reuse=maybe"), "error: --feature: kv_reuse: Input should be"),
        (
            ("package", "a", "b", "--feature", "kv_reus"),
            "error: --feature: unknown key kv_reus\nhint: Did you",
        ),
    ],
)
def test_what_an_option_cannot_be_is_said_of_the_option(run: Any, words: tuple[str, ...], error: str) -> None:
    status, printed, errors = run(*words)
    assert (status, printed) == (2, "")
    assert errors.startswith(error)


def test_a_value_that_is_nearly_right_gets_the_right_one(run: Any) -> None:
    errors = run("calibrate", "a", "b", "--quant", "int4-awq")[2]
    assert (
        errors.splitlines()[1]
        == "hint: Got 'int4-awq'; did you mean int4_awq? Run `trtforge calibrate a b --quant int4_awq`."
    )
    errors = run("build", "demo-int4awq", "--set", "gate.perplexity_increase=2.5%", "--dry-run")[2]
    assert errors.splitlines()[1] == (
        "hint: Got '2.5%'; did you mean 0.025? "
        "Run `trtforge build demo-int4awq --set gate.perplexity_increase=0.025 --dry-run`."
    )


def test_a_recipes_gate_finds_its_data_wherever_one_is(make_hf: MakeHf, tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "text.txt").write_text("Return the number of items.")
    (tmp_path / "recipe" / "mine.yaml").write_text("gate: {perplexity_increase: 0.1, data: text.txt}")
    gate = parse_gate(str(tmp_path / "recipe" / "mine.yaml"), {"data": "other.txt", "samples": 3})
    assert (gate.data, gate.samples) == (str(tmp_path / "recipe" / "text.txt"), 3)
    (tmp_path / "recipe" / "mine.yaml").write_text("perplexity_increase: 0.1")
    assert parse_gate(str(tmp_path / "recipe" / "mine.yaml"), {"data": "other.txt"}).data == "other.txt"
    with pytest.raises(ForgeError, match=r"--gate 'none\.yaml': No such file"):
        parse_gate("none.yaml", {})
    held_out = parse_gate("kl_mean=0.1,data=a, b/h #1.txt,samples=3", {})
    assert (held_out.kl_mean, held_out.data, held_out.samples) == (0.1, "a, b/h #1.txt", 3)
    with pytest.raises(UsageError, match="Input should be a finite number"):
        parse_gate("kl_mean=.inf", {})


def test_inspect_says_what_a_directory_is(make_hf: MakeHf, run: Any, tmp_path: Path) -> None:
    source = make_hf()
    found = json.loads(run("inspect", source, "--json")[1])
    assert found["family"] == "llama"
    run("convert", source, tmp_path / "out", "--tp", "2")
    found = json.loads(run("inspect", tmp_path / "out", "--tensors", "--json")[1])
    assert (found["kind"], found["tp"], found["dtype"]) == ("checkpoint", 2, "float16")
    name = "transformer.layers.0.attention.qkv.weight"
    shapes = [t["shape"] for t in found["tensors"] if t["name"] == name]
    assert shapes == [[64, 64], [64, 64]]
    assert run("inspect", tmp_path / "none")[0] == 1


@pytest.mark.parametrize("recipe", ["demo-int4awq", "demo-tp2"])
def test_dry_run_plans_every_stage_and_writes_nothing(run: Any, recipe: str, tmp_path: Path) -> None:
    status, printed, errors = run("build", recipe, "--out", tmp_path / "build", "--dry-run", "--json")
    assert status == 0, errors
    stages = json.loads(printed)["stages"]
    assert list(stages)[-4:] == ["convert", "verify", "compile", "package"]
    assert stages["compile"]["build_config"]["max_batch_size"] == 32
    assert stages["compile"]["build_config"]["kv_cache_type"] == "PAGED"
    assert len(stages["convert"]["ranks"]) == (2 if recipe == "demo-tp2" else 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        ("build", "demo-fp32", "--set", "engine.max_batch_size=["),
        ("build", "demo-fp32", "--from", "package", "--to", "convert"),
        ("package", "engine", "out", "--set", "serving.streaming={"),
        ("verify", "checkpoint", "--against", str(DEMO_MODEL), "--gate", "kl_mean={"),
        ("convert", str(DEMO_MODEL), "out", "--embedding-sharding-dim", "1"),
    ],
)
def test_values_that_are_none_are_wrong_usage(run: Any, words: tuple[str, ...]) -> None:
    status, _, errors = run(*words)
    assert status == 2
    assert errors.startswith("error: ")
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    "words",
    [
        ("probe", "live", "--timeout"),
        ("serve", "repository", "--ready-timeout"),
        ("serve", "repository", "--drain-timeout"),
        ("gateway", "--drain-timeout"),
    ],
)
@pytest.mark.parametrize("seconds", ["inf", "1e30", "nan"])
def test_a_time_limit_that_no_clock_holds_is_wrong_usage(run: Any, words: tuple[str, ...], seconds: str) -> None:
    status, _, errors = run(*words, seconds)
    assert (status, errors.split(": ")[:2]) == (2, ["error", f"Invalid value for '{words[-1]}'"])


def test_a_wrong_address_or_model_names_the_option_that_has_it(run: Any) -> None:
    status, _, errors = run("gateway", "--backend", "x")
    assert status == 2
    assert errors.startswith("error: gateway: --backend: 'x' is not HOST:PORT")
    status, _, errors = run("gateway", "--model", "")
    assert status == 2
    assert errors.splitlines()[-1] == "hint: Got ''; correct --model."


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--adapter", "sql"], "--adapter 'sql' is not NAME:TASK"),
        (["--adapter", f"sql:{2**64}"], f"--adapter 'sql:{2**64}' is not NAME:TASK"),
        (["--adapter", "sql:1", "--adapter", "sql:2"], "--adapter 'sql:2': sql is the name of another adapter, too"),
        (["--adapter", "a:1", "--served-model-name", "a"], "--adapter 'a:1': a is the name of a model, too"),
        (["--adapter", "a:1", "--model", "a"], "--adapter 'a:1': a is the name of a model, too"),
    ],
)
def test_the_name_of_an_adapter_is_its_own(run: Any, words: list[str], message: str) -> None:
    """Clients who ask for an adapter by it would get another one, or the model without."""
    status, _, errors = run("gateway", *words)
    assert status == 2
    assert errors.startswith(f"error: {message}\nhint: Give ")


def test_a_number_of_tokens_that_no_tensor_holds_is_wrong_usage(run: Any) -> None:
    status, _, errors = run("bench", "build", "--max-tokens", str(2**31))
    assert (status, errors.split(": ")[:2]) == (2, ["error", "Invalid value for '--max-tokens'"])


def test_verify_refuses_another_model(make_hf: MakeHf, run: Any, tmp_path: Path) -> None:
    run("convert", make_hf("one"), tmp_path / "out")
    status, _, errors = run("verify", tmp_path / "out", "--against", make_hf("other", rms_norm_eps=1e-3))
    assert status == 1
    assert "is not the model that the candidate was made from: config.json differs" in errors


def test_a_gateway_that_looks_at_no_host_warns_of_names(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtforge.gateway.server.run", lambda config, on_listening: None)
    words = ("gateway", "--backend", "127.0.0.1:1", "--allow-host", "llm.example")
    assert run(*words) == (0, "", "")
    said = (
        "warning: --allow-host has no effect: on 0.0.0.0, which other machines reach, clients may use every host name"
    )
    assert run(*words, "--host", "0.0.0.0") == (0, "", f"{said}\n")
