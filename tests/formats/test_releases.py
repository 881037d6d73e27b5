import json
import subprocess
import sys
from typing import get_args

import pytest

from trtforge.core.errors import ForgeError
from trtforge.formats.releases import Section, containers_of, read_release_data, release

ALL = ("0.17.0", "0.18.2", "0.19.0", "0.20.0", "0.21.0", "1.0.0", "1.1.0", "1.2.1")


@pytest.mark.parametrize(
    ("version", "tokens_per_block", "paged_context", "fp8_context"),
    [
        ("0.17.0", 64, False, False),
        ("0.18.2", 64, False, False),
        ("0.19.0", 32, True, True),
        ("0.20.0", 32, True, True),
        ("1.0.0", 32, True, True),
        ("1.1.0", 32, True, True),
        ("1.2.1", 32, True, True),
    ],
)
def test_plugin_defaults_changed_with_0_19(
    version: str, tokens_per_block: int, paged_context: bool, fp8_context: bool
) -> None:
    plugins = release(version).fields("plugin_config")
    assert plugins["tokens_per_block"].default == tokens_per_block
    assert plugins["use_paged_context_fmha"].default is paged_context
    assert plugins["use_fp8_context_fmha"].default is fp8_context


def test_releases_are_ordered_and_1_2_0_is_1_2_1() -> None:
    assert [release(version).order for version in ALL] == list(range(8))
    assert release("1.2.0").order == release("1.2.1").order
    assert release("1.2.0").fields("build_config") == release("1.2.1").fields("build_config")
    assert release("0.17.0.post1").line == "0.17.0"


@pytest.mark.parametrize(
    ("minor", "version"), [("0.17", "0.17.0"), ("0.18", "0.18.2"), ("1.0", "1.0.0"), ("1.2", "1.2.1")]
)
def test_two_numbers_are_the_newest_of_their_line(minor: str, version: str) -> None:
    assert release(minor) == release(version)


def test_an_unknown_release_names_the_known_ones() -> None:
    with pytest.raises(ForgeError, match=r"0\.16\.0 is not a known release") as caught:
        release("0.16.0")
    assert "0.17.0, 0.18.x, 0.19.0, 0.20.0, 0.21.0, 1.0.0, 1.1.0, 1.2.1" in caught.value.hint


@pytest.mark.parametrize("version", ["1.3.0", "1.3.0rc15", "2.0"])
def test_a_release_without_engines_names_the_other_route(version: str) -> None:
    with pytest.raises(ForgeError, match=r"has no TensorRT engines: the engine backend ends with 1\.2\.1") as caught:
        release(version)
    assert "llmapi" in caught.value.hint


@pytest.mark.parametrize("version", ["1.2.1+cu130", "1.2.1.post1"])
def test_another_build_of_the_last_release_is_not_called_later(version: str) -> None:
    with pytest.raises(ForgeError, match="is not a known release"):
        release(version)


@pytest.mark.parametrize(
    ("version", "count"),
    [("0.17.0", 24), ("0.19.0", 28), ("0.20.0", 28), ("1.2.1", 28)],
)
def test_number_of_plugin_options(version: str, count: int) -> None:
    plugins = release(version).fields("plugin_config").values()
    assert sum(field.flag is not None for field in plugins) == count


def test_fields_come_and_go() -> None:
    assert "dora_plugin" not in release("0.17.0").fields("plugin_config")
    assert "dora_plugin" in release("0.19.0").fields("plugin_config")
    assert "auto_parallel_config" in release("1.1.0").fields("build_config")
    assert [gone.name for gone in release("1.2.1").gone("build_config")] == ["auto_parallel_config"]
    assert [gone.name for gone in release("1.2.1").gone("mapping")] == ["auto_parallel"]
    assert "--auto_parallel" in release("1.1.0").flags()
    assert "--auto_parallel" not in release("1.2.1").flags()
    assert release("1.2.1").gone("plugin_config")[0].last == "1.1.0"


def test_confidence_is_per_release() -> None:
    assert release("0.17.0").field("plugin_config", "tokens_per_block").confidence == "verified"
    assert release("0.21.0").field("plugin_config", "tokens_per_block").confidence == "secondary"
    assert release("0.19.0").field("plugin_config", "tokens_per_block").confidence == "inferred"


def test_a_default_that_nobody_saw_is_marked() -> None:
    assert release("0.21.0").field("lora_config", "max_loras").default == 4
    assert not release("1.0.0").field("lora_config", "max_loras").default_known
    unseen = release("1.2.1").field("lora_config", "max_loras")
    assert (unseen.default, unseen.default_known) == (None, True)


def test_a_problem_refuses_only_where_the_release_was_seen() -> None:
    removed = release("1.2.1").key_problem("mapping", "auto_parallel")
    assert removed is not None
    assert removed.message == "TensorRT-LLM 1.2.1: mapping: auto_parallel was removed after 1.1.0"
    assert not removed.refuses
    late = release("0.17.0").key_problem("quant_algo", "W4A16_MXFP4")
    assert late is not None
    assert late.refuses
    assert "was added in 1.0.0" in late.message
    unknown = release("0.17.0").key_problem("quantization", "typo")
    assert unknown is not None
    assert unknown.refuses
    assert "quant_algo, kv_cache_quant_algo" in unknown.hint
    assert release("1.2.1").key_problem("mapping", "tp_size") is None


def test_a_value_outside_the_list() -> None:
    verified = release("0.17.0")
    problem = verified.value_problem(verified.field("plugin_config", "gemm_plugin"), "int4")
    assert problem is not None
    assert problem.refuses
    assert problem.message == "TensorRT-LLM 0.17.0: gemm_plugin cannot be int4"
    assert problem.hint == "It takes auto, float16, float32, bfloat16, int32, fp8, nvfp4, none."
    assert verified.value_problem(verified.field("plugin_config", "gemm_plugin"), None) is None
    inferred = release("1.0.0")
    problem = inferred.value_problem(inferred.flags()["--logits_dtype"], "bfloat16")
    assert problem is not None
    assert not problem.refuses


@pytest.mark.parametrize(
    ("version", "tags", "tensorrt", "cuda"),
    [
        ("0.17.0", ["25.01"], "10.8.0.43", "12.8.0.038"),
        ("0.17.0.post1", ["25.02"], "10.8.0.43", "12.8.0.038"),
        ("0.20.0", ["25.07", "25.06"], "10.10.0.31", "12.9.0.036"),
        ("1.0.0", ["25.10", "25.09"], "10.11.0.33", "12.9.1.010"),
        ("1.1.0", ["26.02", "26.01", "25.12"], "10.13.3.9", "13.0.2.006"),
        ("1.2.0", ["26.03"], "10.14.1.48", "13.1.0.036"),
        ("1.2.1", ["26.07", "26.06", "26.05", "26.04"], "10.14.1.48", "13.1.0.036"),
    ],
)
def test_containers_of_a_release(version: str, tags: list[str], tensorrt: str, cuda: str) -> None:
    containers = containers_of(release(version))
    assert [container.triton for container in containers] == tags
    assert {container.tensorrt for container in containers} == {tensorrt}
    assert {container.cuda for container in containers} == {cuda}
    assert containers[0].image.endswith(f"/tritonserver:{tags[0]}-trtllm-python-py3")


def test_a_patch_release_without_a_container_takes_its_line() -> None:
    assert [container.triton for container in containers_of(release("0.18.1"))] == ["25.04", "25.03"]
    assert [container.triton for container in containers_of(release("1.0.1"))] == ["25.10", "25.09", "25.11"]


def test_every_entry_of_the_data_is_well_formed() -> None:
    for version in ALL:
        found = release(version)
        for section in get_args(Section):
            assert found.fields(section), (version, section)
            for field in found.fields(section).values():
                if field.choices is not None and field.default_known:
                    assert field.default in field.choices, (version, section, field.name)
        for flag in found.flags():
            assert flag.startswith("--")


def test_the_ranges_of_the_triton_data_name_known_releases() -> None:
    def ranges(value: object) -> set[str]:
        if isinstance(value, dict):
            own = {value[key] for key in ("since", "until") if value.get(key) is not None}
            return own.union(*(ranges(part) for part in value.values()))
        return set().union(*(ranges(part) for part in value)) if isinstance(value, list) else set()

    found = ranges(json.loads(json.dumps(dict(read_release_data("triton-model-config")))))
    assert found == {"0.17.0", "0.18.2", "0.19.0", "0.20.0", "1.0.0", "1.1.0", "1.2.1"}
    assert {release(version).order for version in found} == {0, 1, 2, 3, 5, 6, 7}
    assert release("0.18.0").within("0.17.0", "0.18.2")
    assert not release("0.19.0").within("0.17.0", "0.18.2")


def test_the_module_loads_nothing_heavy() -> None:
    script = "import sys, trtforge.formats.releases; print(*{'torch', 'numpy', 'transformers'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
