import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.compile.checkpoints import engine, llama
from tests.compile.test_build_config import MODELS, VERSIONS, plan
from trtforge.compile.tensorrt_llm import commands, image_for, in_container
from trtforge.core.errors import ForgeError
from trtforge.formats.releases import Section, release

CHECKPOINT, OUT = Path("/models/checkpoint"), Path("/models/engine")


def test_the_command_for_llama_fp8_with_1_2_1() -> None:
    found = plan("1.2.1", llama("FP8", "FP8"), engine(max_input_len=4096, max_seq_len=5120))
    (command,) = commands(CHECKPOINT, OUT, found, world_size=1, workers=1)
    assert " ".join(command.argv) == (
        "trtllm-build --checkpoint_dir /models/checkpoint --output_dir /models/engine --max_batch_size 64 "
        "--max_input_len 4096 --max_seq_len 5120 --max_num_tokens 8192 --max_beam_width 1 --kv_cache_type paged "
        "--gpt_attention_plugin auto --gemm_plugin disable --context_fmha enable --remove_input_padding enable "
        "--tokens_per_block 32 --use_paged_context_fmha enable --use_fp8_context_fmha enable --use_fused_mlp enable "
        "--workers 1"
    )
    assert command.writes == ("rank0.engine", "config.json")


def test_the_command_for_llama_int4_awq_with_0_17() -> None:
    (command,) = commands(CHECKPOINT, OUT, plan("0.17.0", MODELS["int4_awq"]), world_size=1, workers=1)
    options = dict(zip(command.argv[1::2], command.argv[2::2], strict=True))
    assert options["--tokens_per_block"] == "64"
    assert options["--gemm_plugin"] == "auto"
    assert options["--use_fused_mlp"] == "disable"
    assert options["--use_fp8_context_fmha"] == "disable"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", MODELS)
def test_the_options_say_what_the_configuration_says(version: str, name: str) -> None:
    """Reads the command as trtllm-build does, over the release's defaults, and compares with the JSON."""
    target, found = release(version), plan(version, MODELS[name])
    (command,) = commands(CHECKPOINT, OUT, found, world_size=1, workers=1)
    options = dict(zip(command.argv[1::2], command.argv[2::2], strict=True))
    assert options.keys() <= target.flags().keys()
    expected = found.to_json()
    sections: tuple[tuple[Section, Any], ...] = (
        ("build_config", expected),
        ("plugin_config", expected["plugin_config"]),
    )
    # The model's dtype, what kv_cache_type says already, and the number of the default mode.
    by_the_builder = {"dtype": MODELS[name].dtype, "paged_kv_cache": True, "speculative_decoding_mode": 1}
    for section, values in sections:
        for key, value in values.items():
            field = target.field(section, key)
            if field.flag in options:
                assert options[field.flag] == spelled(value), key
            elif key in by_the_builder:
                assert value == by_the_builder[key], key
            elif key not in ("plugin_config", "lora_config"):
                assert value == field.default, key


def spelled(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "enable" if value else "disable"
    return "paged" if value == "PAGED" else str(value)


def test_one_run_builds_every_rank() -> None:
    ranks = commands(CHECKPOINT, OUT, plan("1.2.1", llama()), world_size=4, workers=8)
    assert [command.rank for command in ranks] == [0, 1, 2, 3]
    assert len({command.argv for command in ranks}) == 1
    assert ranks[0].argv[-2:] == ("--workers", "4")
    assert [command.writes for command in ranks] == [
        ("rank0.engine", "config.json"),
        ("rank1.engine",),
        ("rank2.engine",),
        ("rank3.engine",),
    ]


def test_no_workers_is_an_error() -> None:
    with pytest.raises(ForgeError, match="--workers must be at least 1, not 0"):
        commands(CHECKPOINT, OUT, plan("1.2.1", llama()), world_size=1, workers=0)


@pytest.mark.parametrize(("version", "tag"), [("0.17.0", "25.01"), ("0.20.0", "25.07"), ("1.2.1", "26.07")])
def test_the_container_form_mounts_both_directories_where_they_are(version: str, tag: str) -> None:
    found = plan(version, llama())
    (command,) = commands(CHECKPOINT, OUT, found, world_size=1, workers=1)
    argv = in_container(command, CHECKPOINT, OUT, image_for(found.release))
    assert argv[:3] == ("docker", "run", "--rm")
    assert argv[argv.index("--user") + 1] == f"{os.getuid()}:{os.getgid()}"
    assert argv[argv.index("--gpus") + 1] == "all"
    assert "type=bind,source=/models/checkpoint,target=/models/checkpoint,readonly" in argv
    assert "type=bind,source=/models/engine,target=/models/engine" in argv
    image = argv.index(image_for(found.release))
    assert argv[image].endswith(f"/tritonserver:{tag}-trtllm-python-py3")
    assert argv[image + 1 :] == command.argv


def test_docker_cannot_mount_a_comma() -> None:
    (command,) = commands(CHECKPOINT, OUT, plan("1.2.1", llama()), world_size=1, workers=1)
    with pytest.raises(ForgeError, match="cannot mount a path with a comma"):
        in_container(command, Path("/models/a,b"), OUT, "image")


def test_planning_loads_nothing_heavy() -> None:
    heavy = "{'torch', 'numpy', 'transformers', 'tensorrt_llm'}"
    script = f"import sys, trtforge.compile.stage; print(*{heavy} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
