"""The recipes that ship for real models: legal where their headers say, as many requests, as long."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.recipes.shipped import AS_PUBLISHED, FOR_THE_LLM_API, SHIPPED, WITHOUT_SHARED_BLOCKS
from trtforge.core.recipe import Recipe, load_recipe
from trtforge.formats.hub_data import HubData
from trtforge.plan.gpus import GPUS_PER_SERVER
from trtforge.plan.known import known_config
from trtforge.plan.model import find_model
from trtforge.plan.planner import Plan, plan
from trtforge.plan.request import request_of

REQUESTS = re.compile(r"# ([\d,]+) requests at once, each of up to ([\d,]+) tokens of prompt and ([\d,]+) of answer\.")
LATENT = re.compile(r"1 KV heads at tp (\d): each is stored \1 times\.")
"""DeepSeek's latent attention has one compressed head, which every rank holds."""
MEMORY = re.compile(r"# Calibration takes ([\d.]+) GB of GPU memory, verification ([\d.]+) GB of host memory")


@dataclass(frozen=True)
class Command:
    """A line of a header: what to type, and the GPUs that it says."""

    name: str
    overrides: tuple[str, ...]
    gpus: int
    gpu: str


def header(path: Path) -> str:
    return "\n".join(line for line in path.read_text().splitlines() if line.startswith("#"))


def commands(path: Path) -> list[Command]:
    found = []
    for words, gpus, gpu in re.findall(r"^# trtforge build (.+?) {8}(\d+) x (\S+)$", header(path), re.MULTILINE):
        name, *rest = words.split()
        assert rest[::2] == ["--set"] * (len(rest) // 2)
        found.append(Command(name, tuple(rest[1::2]), int(gpus), gpu))
    return found


def planned(recipe: Recipe) -> Plan:
    model = find_model(recipe.model.source)
    return plan(model, request_of(recipe, model, {}), "throughput")


def number(text: str) -> int:
    return int(text.replace(",", ""))


def test_the_models_that_people_ask_for_are_there() -> None:
    def asked(name: str) -> tuple[str, str, int, int]:
        recipe = load_recipe(SHIPPED[name])
        return recipe.model.source, recipe.quantization.format, recipe.parallel.tp, recipe.parallel.pp

    assert {name: asked(name) for name in SHIPPED} == {
        "llama-3.1-8b-fp8": ("meta-llama/Llama-3.1-8B-Instruct", "fp8", 1, 1),
        "llama-3.1-8b-int4-awq": ("meta-llama/Llama-3.1-8B-Instruct", "int4_awq", 1, 1),
        "llama-3.1-70b-fp8": ("meta-llama/Llama-3.1-70B-Instruct", "fp8", 4, 1),
        "llama-3.1-70b-int4-awq": ("meta-llama/Llama-3.1-70B-Instruct", "int4_awq", 2, 1),
        "llama-3.1-405b-fp8": ("meta-llama/Llama-3.1-405B-Instruct", "fp8", 8, 2),
        "mistral-7b-fp8": ("mistralai/Mistral-7B-Instruct-v0.3", "fp8", 1, 1),
        "mixtral-8x7b-fp8": ("mistralai/Mixtral-8x7B-Instruct-v0.1", "fp8", 2, 1),
        "qwen2.5-7b-fp8": ("Qwen/Qwen2.5-7B-Instruct", "fp8", 1, 1),
        "qwen2.5-72b-fp8": ("Qwen/Qwen2.5-72B-Instruct", "fp8", 4, 1),
        "qwen3-8b-fp8": ("Qwen/Qwen3-8B", "fp8", 1, 1),
        "gemma-2-9b-fp8": ("google/gemma-2-9b-it", "fp8", 1, 1),
        "phi-4-fp8": ("microsoft/phi-4", "fp8", 1, 1),
        "llama-3.3-70b-fp8": ("meta-llama/Llama-3.3-70B-Instruct", "fp8", 4, 1),
        "llama-3.3-70b-nvfp4": ("meta-llama/Llama-3.3-70B-Instruct", "nvfp4", 1, 1),
        "qwen3-32b-fp8": ("Qwen/Qwen3-32B", "fp8", 2, 1),
        "qwen3-30b-a3b-fp8": ("Qwen/Qwen3-30B-A3B", "fp8", 1, 1),
        "mistral-small-3-fp8": ("mistralai/Mistral-Small-24B-Instruct-2501", "fp8", 1, 1),
        "glm-4.5-air-fp8": ("zai-org/GLM-4.5-Air", "fp8", 4, 1),
        "gemma-3-27b-fp8": ("google/gemma-3-27b-it", "fp8", 1, 1),
        "phi-4-mini-fp8": ("microsoft/Phi-4-mini-instruct", "fp8", 1, 1),
        "deepseek-r1-fp8": ("deepseek-ai/DeepSeek-R1", "fp8", 8, 1),
        "llama-4-scout-fp8": ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "fp8", 4, 1),
        "llama-4-scout-nvfp4": ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "nvfp4", 1, 1),
        "qwen3-next-80b-fp8": ("Qwen/Qwen3-Next-80B-A3B-Instruct", "fp8", 2, 1),
        "qwen3-next-80b-nvfp4": ("Qwen/Qwen3-Next-80B-A3B-Instruct", "nvfp4", 1, 1),
        "gpt-oss-20b-mxfp4": ("openai/gpt-oss-20b", "none", 1, 1),
        "gpt-oss-120b-mxfp4": ("openai/gpt-oss-120b", "none", 2, 1),
        "deepseek-r1-nvfp4": ("deepseek-ai/DeepSeek-R1", "nvfp4", 8, 1),
    }


@pytest.mark.parametrize("name", SHIPPED)
def test_every_command_of_the_header_is_legal_on_the_gpus_that_it_says(name: str) -> None:
    found = commands(SHIPPED[name])
    assert found
    assert found[0].overrides == ()
    for command in found:
        assert command.name == name
        recipe = load_recipe(SHIPPED[name], command.overrides)
        assert recipe.engine.target.gpu == command.gpu
        assert recipe.parallel.tp * recipe.parallel.pp == command.gpus
        evaluation = planned(recipe).evaluation
        assert evaluation.problems == ()
        if name.startswith("deepseek-"):
            assert [LATENT.fullmatch(warning) is not None for warning in evaluation.warnings] == [True]
        else:
            assert evaluation.warnings == ()
        assert (evaluation.full_length_requests or 0) >= recipe.engine.max_batch_size


@pytest.mark.parametrize("name", SHIPPED)
def test_requests_are_as_many_and_as_long_as_the_header_says(name: str) -> None:
    said = REQUESTS.search(header(SHIPPED[name]))
    assert said is not None
    batch, prompt, answer = map(number, said.groups())
    evaluation = planned(load_recipe(SHIPPED[name])).evaluation
    assert evaluation.limits is not None
    assert evaluation.limits.max_batch_size == batch
    assert evaluation.limits.max_input_len == prompt
    assert evaluation.limits.max_seq_len == prompt + answer
    assert evaluation.longest_prompt == prompt + answer - 1
    assert (evaluation.full_length_requests or 0) >= batch


@pytest.mark.parametrize("name", [name for name in SHIPPED if name not in AS_PUBLISHED])
def test_the_memory_of_the_build_is_what_the_header_says(name: str) -> None:
    said = MEMORY.search(header(SHIPPED[name]))
    assert said is not None
    peaks = planned(load_recipe(SHIPPED[name])).peaks
    assert peaks.calibration_gpu is not None
    assert said.groups() == (f"{peaks.calibration_gpu / 1e9:.1f}", f"{peaks.verify_host / 1e9:.1f}")


@pytest.mark.parametrize("name", AS_PUBLISHED)
def test_published_weights_are_not_calibrated(name: str) -> None:
    recipe = load_recipe(SHIPPED[name])
    assert "Nothing is calibrated, converted or verified" in header(SHIPPED[name])
    assert planned(recipe).peaks.calibration_gpu is None
    assert recipe.engine.backend == "llmapi"


@pytest.mark.parametrize("name", [name for name in SHIPPED if name not in AS_PUBLISHED])
def test_calibration_gate_and_features_are_set(name: str) -> None:
    recipe = load_recipe(SHIPPED[name])
    calibration, gate = recipe.quantization.calibration, recipe.gate
    assert known_config(recipe.model.source) is not None
    measured, checked = HubData.parse(calibration.data), HubData.parse(gate.data)
    assert (measured.name, checked.name) == ("abisee/cnn_dailymail", "abisee/cnn_dailymail")
    assert measured.split != checked.split
    assert calibration.samples >= 512
    assert gate.perplexity_increase is not None
    assert gate.top1_agreement is not None
    assert recipe.engine.features.kv_reuse is (name not in WITHOUT_SHARED_BLOCKS)
    assert recipe.engine.features.chunked_context
    assert recipe.engine.backend == ("llmapi" if name in FOR_THE_LLM_API else "tensorrt_llm")


@pytest.mark.parametrize("name", SHIPPED)
def test_how_ranks_of_several_servers_start_is_told(name: str) -> None:
    recipe, said = load_recipe(SHIPPED[name]), header(SHIPPED[name])
    several = recipe.parallel.tp * recipe.parallel.pp > GPUS_PER_SERVER
    assert ("mpirun" in said) == (f"trtforge build {name} --workers {GPUS_PER_SERVER}" in said) == several
