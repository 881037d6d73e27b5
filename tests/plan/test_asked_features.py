"""Features of a recipe judged from metadata: by the model, the draft model, the backend and the release."""

from pathlib import Path
from typing import Any

import pytest

from tests.plan.models import LLAMA_8B, LLAMA_70B, MIXTRAL, asked, known
from tests.plan.small_models import small
from trtforge.core.errors import ForgeError
from trtforge.machine.memory import Memory as MachineMemory
from trtforge.plan import feature_memory
from trtforge.plan.evaluate import evaluate
from trtforge.plan.evaluation import Evaluation
from trtforge.plan.fixes import fixes
from trtforge.plan.peaks import build_gpu_peak, build_host_peak

LLAMA_2 = "meta-llama/Llama-2-7b-hf"


def judged(hub_id: str, features: dict[str, Any], backend: str = "tensorrt_llm", **options: Any) -> Evaluation:
    model = known(hub_id)
    engine = {"backend": backend, "max_seq_len": 4096, "features": features}
    return evaluate(model, asked(model, recipe={"engine": engine}, dtype="float16", **options))


def test_draft_and_target_share_a_vocabulary() -> None:
    (problem,) = judged(LLAMA_70B, {"draft": {"model": LLAMA_2}}).problems
    assert problem.rule == "draft"
    assert problem.message == (f"the draft model {LLAMA_2} has 32000 tokens in its vocabulary, the target 128256")
    assert judged(LLAMA_70B, {"draft": {"model": LLAMA_8B}}).legal


def test_the_draft_model_is_split_as_the_target_is() -> None:
    found = judged("Qwen/Qwen2.5-7B", {"draft": {"model": "Qwen/Qwen2.5-7B-Instruct"}}, tp=4)
    assert found.legal
    (problem,) = judged("Qwen/Qwen1.5-7B", {"draft": {"model": "Qwen/Qwen2.5-0.5B"}}, tp=4).problems
    assert "14 heads over tp 4, 24 layers over pp 1" in problem.message


@pytest.mark.parametrize(
    ("hub_id", "feature", "legal"),
    [
        (LLAMA_8B, "medusa", True),
        ("Qwen/Qwen2.5-7B", "medusa", True),
        ("google/gemma-2-9b", "medusa", False),
        (LLAMA_8B, "eagle", True),
        ("Qwen/Qwen2.5-7B", "eagle", False),
        ("google/gemma-2-9b", "lookahead", True),
    ],
)
def test_heads_and_networks_exist_for_some_architectures(hub_id: str, feature: str, legal: bool) -> None:
    found = judged(hub_id, {feature: True})
    assert found.legal is legal
    if legal and feature != "lookahead":
        assert any(f"Set engine.features.{feature}.model" in text for text in found.warnings)
    if not legal:
        assert f"TensorRT-LLM has {feature} for LlamaForCausalLM" in found.problems[0].message
        assert "lookahead" in found.problems[0].fix


def test_the_embedded_engine_has_few_of_them() -> None:
    found = judged(LLAMA_8B, {"medusa": True, "lora": True, "multiple_profiles": True}, backend="torch")
    assert [problem.message for problem in found.problems] == [
        "engine.features.medusa: not supported by the torch backend",
        "engine.features.multiple_profiles: not supported by the torch backend",
    ]
    assert judged(LLAMA_8B, {"kv_reuse": False}, backend="torch").legal


def test_the_embedded_engine_has_adapters_of_some_layers() -> None:
    every = {"lora": {"max_rank": 8, "modules": ["attn_q", "attn_k", "attn_v", "mlp_h_to_4h"]}}
    assert judged(LLAMA_8B, every, backend="torch").legal
    (problem,) = judged(MIXTRAL, every, backend="torch").problems
    assert problem.rule == "lora"
    assert problem.message == (
        "engine.features.lora.modules: mlp_h_to_4h is part of the experts, which do not support LoRA"
    )
    assert judged(MIXTRAL, {"lora": True}, backend="torch").legal
    for latent_or_linear in ("deepseek-ai/DeepSeek-V3", "Qwen/Qwen3-Next-80B-A3B-Instruct"):
        found = judged(latent_or_linear, {"lora": True}, backend="torch").problems
        assert [problem.message for problem in found if problem.rule == "lora"] == [
            "engine.features.lora.modules: attn_q: this model's attention does not support LoRA"
        ]


def test_the_embedded_engine_keeps_memory_for_adapters() -> None:
    plain, adapted = (
        judged(LLAMA_8B, each, backend="torch").memory for each in ({}, {"lora": {"host_memory": 3 << 30}})
    )
    assert plain is not None
    assert adapted is not None
    assert adapted.over_all("lora") == 3 << 30
    assert adapted.over_all("total") == plain.over_all("total") + (3 << 30)
    found = judged(LLAMA_8B, {"lora": {"max_rank": 64, "host_memory": 1000}}, backend="torch")
    (problem,) = found.problems
    assert problem.rule == "lora_cache"
    least = 64 * 32 * (3 * 4096 + 4096 + 2 * 1024) * 4  # queries, keys and values of each layer in float32
    assert least == 150_994_944
    assert problem.message == ("the host's adapter cache of 1 kB is too small: an adapter of rank 64 takes 151 MB")
    assert judged(LLAMA_8B, {"lora": {"max_rank": 64, "host_memory": least}}, backend="torch").legal
    assert not judged(LLAMA_8B, {"lora": {"max_rank": 64, "host_memory": least - 1}}, backend="torch").legal
    assert fixes(known(LLAMA_8B), found)[0].text.startswith("Use --set engine.features.lora.host_memory=")


def test_adapters_that_this_machine_cannot_keep_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_memory, "read_memory", lambda host: MachineMemory(1 << 40, 1 << 40, None))
    found = judged(LLAMA_8B, {"lora": {"host_memory": 1 << 40}}, backend="torch")
    assert found.legal
    assert found.memory is not None
    needed = found.memory.over_all("total")
    assert (
        f"engine.features.lora.host_memory: with all its adapters the engine needs {needed:,} bytes of memory, this "
        "machine has 1,099,511,627,776. Lower it, or serve on a machine with more."
    ) in found.warnings
    assert not any("lora" in text for text in judged(LLAMA_8B, {"lora": True}, backend="torch").warnings)


def test_a_release_without_a_feature_is_mended_by_another() -> None:
    model, found = known(LLAMA_8B), judged(LLAMA_8B, {"lookahead": True}, target_version="0.17.0")
    assert "lookahead_window_size was added in 0.19.0" in found.problems[0].message
    assert fixes(model, found)[0].text == "Use --target-version 1.2.1."


def test_pipelines_are_no_place_for_eagle() -> None:
    (problem,) = judged(LLAMA_8B, {"eagle": True}, pp=2).problems
    assert "pp is 2" in problem.message
    assert judged(LLAMA_8B, {"medusa": True}, pp=2).legal


def test_adapters_are_read_for_the_plan(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match=r"adapter_config\.json: No such file"):
        judged(LLAMA_8B, {"lora": {"adapters": [str(tmp_path)]}})
    (tmp_path / "adapter_config.json").write_text('{"r": 128, "target_modules": ["q_proj", "v_proj"]}')
    lora = judged(LLAMA_8B, {"lora": {"adapters": [str(tmp_path)]}}).request.engine.features.lora
    assert lora is not None
    assert (lora.max_rank, lora.modules) == (128, ("attn_q", "attn_k", "attn_v"))


def test_adapters_of_a_plan_are_those_that_the_backend_loads(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"r": 128, "target_modules": ["query_key_value"]}')
    falcon = small("falcon_7b")

    def planned(backend: str, gpu: str | None = None, **lora: object) -> Evaluation:
        recipe = {"engine": {"backend": backend, "features": {"lora": lora}}}
        return evaluate(falcon, asked(falcon, recipe=recipe, gpu=gpu))

    for backend, gpu in (("tensorrt_llm", None), ("llmapi", None), ("auto", "h100")):  # auto with a GPU: TensorRT-LLM
        with pytest.raises(ForgeError, match="changes query_key_value, of which only the embedded engine"):
            planned(backend, gpu, adapters=[str(tmp_path)])
    for backend in ("torch", "auto"):
        assert planned(backend, adapters=[str(tmp_path)]).legal
    (problem,) = planned("torch", modules=["mlp_gate"]).problems
    assert problem.message.endswith("mlp_gate: this model's MLP does not have it as a layer of its own")


def test_estimates_say_what_they_leave_out() -> None:
    found = judged(LLAMA_8B, {"lookahead": True, "weights_on_gpu": 0.5})
    assert any("Times are estimated without lookahead" in text for text in found.warnings)
    assert any("Times are estimated with all weights on the GPU" in text for text in found.warnings)


def test_a_step_that_is_too_small_for_its_drafts_is_mended() -> None:
    model = known(LLAMA_8B)
    engine = {"backend": "tensorrt_llm", "max_num_tokens": 64, "features": {"draft": {"tokens": 7}}}
    request = asked(model, recipe={"engine": engine})
    assert fixes(model, evaluate(model, request))[0].text == "Use --max-num-tokens 512."


def test_the_build_holds_the_weights_that_will_stream() -> None:
    whole, streamed = (judged(LLAMA_8B, {"weights_on_gpu": share}).memory for share in (1, 0.1))
    assert whole is not None
    assert streamed is not None
    assert build_gpu_peak(whole) == build_gpu_peak(streamed)
    assert build_host_peak(whole) == build_host_peak(streamed)


def test_n_grams_are_for_the_embedded_engine_and_the_llm_api() -> None:
    assert judged(LLAMA_8B, {"ngram": True}, backend="torch").legal
    assert judged(LLAMA_8B, {"lookahead": True}, backend="torch").legal
    assert judged(LLAMA_8B, {"lookahead": True}).legal
    assert not judged(LLAMA_8B, {"lookahead": True}, backend="llmapi").legal
    assert not judged(LLAMA_8B, {"ngram": True}).legal


def test_medusa_heads_are_converted_for_a_tensorrt_engine_and_copied_for_the_embedded_one() -> None:
    heads = {"medusa": {"model": "heads"}}
    beside = judged(LLAMA_8B, heads, backend="torch")
    assert beside.legal
    assert beside.limits is not None
    assert beside.limits.verified_tokens == 5
    assert not judged(LLAMA_8B, heads, backend="llmapi").legal
    converted = judged(LLAMA_8B, heads, backend="tensorrt_llm")
    assert converted.legal
    assert converted.limits is not None
    assert converted.limits.verified_tokens == 64
    assert not any("heads" in text for text in converted.warnings)
    assert not judged("google/gemma-2-9b", heads, backend="tensorrt_llm").legal


def test_trees_of_drafts_that_the_embedded_engine_cannot_verify_are_refused_by_the_plan() -> None:
    tree = {"medusa": {"model": "heads", "choices": [[0], [0, 0], [1]]}}
    planned = judged(LLAMA_8B, tree, backend="torch")
    assert planned.legal
    assert planned.limits is not None
    assert planned.limits.verified_tokens == 4
    (problem,) = judged("google/gemma-2-9b", tree, backend="torch").problems
    assert problem.message == (
        "engine.features.medusa.choices: not supported by the torch backend for models with sliding windows"
    )
    assert problem.fix == "Leave choices out, or use the tensorrt_llm backend."
    wide = {"eagle": {"model": "network", "choices": [[rank] for rank in range(64)]}}
    assert [each.message for each in judged(LLAMA_8B, wide, backend="torch").problems] == [
        "engine.features.eagle.choices has 64 nodes, the torch backend supports at most 63"
    ]
    for feature, said in (
        ({"medusa": {"model": "heads", "heads": 2, "choices": [[0], [0, 0], [0, 0, 0]]}}, "3 tokens deep, and 2 heads"),
        ({"eagle": {"model": "network", "depth": 1, "choices": [[0], [0, 0]]}}, "2 tokens deep, and depth is 1"),
        ({"eagle": {"model": "network", "draft_tokens": 1, "choices": [[0], [1]]}}, "2 nodes, more than the 1 draft"),
    ):
        (problem,) = judged(LLAMA_8B, feature, backend="torch").problems
        assert said in problem.message
    states = judged("Qwen/Qwen3-Next-80B-A3B-Instruct", tree, backend="torch", gpu="h200", tp=4)
    assert any("with linear attention" in problem.message for problem in states.problems)


def test_eagle_networks_are_converted_for_a_tensorrt_engine_and_copied_for_the_embedded_one() -> None:
    network = {"eagle": {"model": "network"}}
    assert judged(LLAMA_8B, network, backend="torch").legal
    assert not judged(LLAMA_8B, network, backend="llmapi").legal
    assert not judged(LLAMA_8B, {"eagle": True}, backend="torch").legal
    converted = judged(LLAMA_8B, network, backend="tensorrt_llm")
    assert converted.legal
    assert converted.limits is not None
    assert (converted.limits.verified_tokens, converted.limits.spare_tokens) == (64, 67)
    assert not judged("Qwen/Qwen2.5-7B", network, backend="tensorrt_llm").legal
    assert judged(LLAMA_8B, {"eagle3": {"model": "network"}}, backend="torch").legal
    (problem,) = judged(LLAMA_8B, {"eagle3": {"model": "network"}}, backend="tensorrt_llm").problems
    assert problem.fix == "Leave it out, or use engine.backend: llmapi or torch."
