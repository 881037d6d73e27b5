"""What each feature makes of a build: the fields, the options, the notes, and the refusals by name."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compile.checkpoints import drafting, engine, llama
from tests.compile.test_build_config import plan, plugins
from tests.runtime.checkpoints import tiny_llama
from tests.runtime.eagle_networks import write_network
from tests.runtime.test_medusa import write_heads
from trtforge.compile.stage import CompileOptions, compile_engine, engine_plan_for
from trtforge.compile.tensorrt_llm import commands
from trtforge.compile.torch import TorchPlan
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.errors import ForgeError
from trtforge.core.parallel import Parallel
from trtforge.core.recipe import EngineConfig
from trtforge.engine_process.requests import GenerationRequest
from trtforge.formats.medusa import MEDUSA_FILE
from trtforge.formats.trtllm import CheckpointConfig
from trtforge.runtime.engine import Engine
from trtforge.runtime.generate import generate_with

FLOAT16 = llama(dtype="float16")


def options(checkpoint: CheckpointConfig, version: str = "1.2.1", **features: Any) -> str:
    found = plan(version, checkpoint, engine(max_batch_size=8, features=features))
    (command,) = commands(Path("/c"), Path("/o"), found, world_size=1, workers=1)
    return " ".join(command.argv)


def built(checkpoint: CheckpointConfig, version: str = "1.2.1", **features: Any) -> dict[str, Any]:
    values: dict[str, Any] = plan(version, checkpoint, engine(max_batch_size=8, features=features)).to_json()
    return values


@pytest.mark.parametrize("version", ["0.17.0", "0.20.0", "1.0.0", "1.1.0", "1.2.1"])
def test_lora(version: str) -> None:
    lora = {"max_rank": 16, "modules": ["attn_dense", "mlp_gate"]}
    values = built(FLOAT16, version, lora=lora)
    assert values["plugin_config"]["lora_plugin"] == "auto"
    assert values["lora_config"]["max_lora_rank"] == 16
    assert values["lora_config"]["lora_target_modules"] == ["attn_dense", "mlp_gate"]
    assert values["lora_config"]["lora_dir"] == []
    words = options(FLOAT16, version, lora=lora)
    assert "--lora_plugin auto" in words
    assert "--lora_target_modules attn_dense mlp_gate --max_lora_rank 16 --workers" in words
    assert "lora" not in options(FLOAT16, version)


def test_query_key_and_value_take_lora_together() -> None:
    found = plan("1.2.1", FLOAT16, engine(features={"lora": {"modules": ["attn_q"]}}))
    assert found.lora_settings["lora_target_modules"] == ["attn_q", "attn_k", "attn_v"]
    assert "attn_k and attn_v: added, because LoRA applies to query, key and value together." in found.notes


@pytest.mark.parametrize(
    ("features", "mode", "number", "tokens"),
    [
        ({"draft": {"tokens": 7}}, "draft_tokens_external", 2, 7),
        ({"lookahead": {"window": 7, "ngram": 7, "verification": 7}}, "lookahead_decoding", 8, 83),
        ({"medusa": True}, "medusa", 4, 63),
        ({"eagle": True}, "eagle", 32, 63),
    ],
)
@pytest.mark.parametrize("version", ["0.20.0", "1.2.1"])
def test_speculation(version: str, features: dict[str, Any], mode: str, number: int, tokens: int) -> None:
    (name,) = features
    checkpoint = drafting(name) if name in ("medusa", "eagle") else FLOAT16
    values = built(checkpoint, version, **features)
    assert (values["speculative_decoding_mode"], values["max_draft_len"]) == (number, tokens)
    assert values["plugin_config"]["use_paged_context_fmha"] is True
    assert f"--max_draft_len {tokens} --speculative_decoding_mode {mode} " in options(checkpoint, version, **features)


def test_a_step_holds_every_draft_token() -> None:
    """`build()` would lift max_num_tokens and max_seq_len with no more than a line in its log."""
    values = engine(max_batch_size=256, max_seq_len=4096, features={"eagle": True})
    found = plan("1.2.1", drafting("eagle"), values)
    assert found.limits.max_num_tokens == 256 * 64
    assert found.limits.max_seq_len == 4096
    assert found.limits.spare_tokens == 63 + 4
    assert found.notes[:2] == (
        "trtllm-build adds 63 to max_seq_len for draft tokens and 4 for EAGLE's layers; requests are not affected.",
        "max_num_tokens is 16384: with eagle an iteration verifies 64 tokens for each of 256 requests.",
    )
    with pytest.raises(ForgeError, match=r"an iteration needs 16384 tokens \(max_batch_size x \(draft tokens \+ 1\)\)"):
        plan("1.2.1", drafting("eagle"), values.model_copy(update={"max_num_tokens": 8192}))


def test_eagle_turns_paged_context_on_by_itself() -> None:
    off = {"kv_reuse": False, "chunked_context": False}
    found = plan("1.2.1", drafting("eagle"), engine(features={"eagle": True, **off}))
    assert found.plugins.use_paged_context_fmha is True
    assert "use_paged_context_fmha is on: EAGLE requires it." in found.notes
    assert plugins("1.2.1", drafting("medusa"), features={"medusa": True, **off})["use_paged_context_fmha"] is False


def test_multiple_profiles_and_streamed_weights() -> None:
    values = built(FLOAT16, multiple_profiles=True, weights_on_gpu=0.3)
    assert values["plugin_config"]["multiple_profiles"] is True
    assert values["opt_num_tokens"] is None
    assert values["weight_streaming"] is True
    assert values["plugin_config"]["gemm_plugin"] is None
    words = options(FLOAT16, multiple_profiles=True, weights_on_gpu=0.3)
    assert "--weight_streaming --gpt_attention_plugin" in words
    assert "--multiple_profiles enable" in words
    assert "--gemm_plugin disable" in words
    notes = plan("1.2.1", FLOAT16, engine(features={"multiple_profiles": True, "weights_on_gpu": 0})).notes
    assert "gemm_plugin is off: plugins do not support weight streaming." in notes
    assert "opt_num_tokens is not set: with multiple_profiles each profile has its own." in notes


def test_prompt_tables_are_rows_of_all_requests_together() -> None:
    assert "--max_prompt_embedding_table_size 800" in options(FLOAT16, max_prompt_embedding_table_size=800)
    assert built(FLOAT16, max_prompt_embedding_table_size=800)["max_prompt_embedding_table_size"] == 800
    assert "max_prompt_embedding_table_size" not in options(FLOAT16)
    with pytest.raises(ForgeError, match="max_prompt_embedding_table_size is 7, which is less than max_batch_size 8"):
        options(FLOAT16, max_prompt_embedding_table_size=7)


def test_logits_are_switches_without_a_value() -> None:
    words = options(FLOAT16, context_logits=True, generation_logits=True)
    assert "--gather_context_logits --gather_generation_logits --gpt_attention_plugin" in words
    assert "gather" not in options(FLOAT16)
    values = built(FLOAT16, context_logits=True)
    assert (values["gather_context_logits"], values["gather_generation_logits"]) == (True, False)


def parallel(**sizes: int) -> dict[str, int]:
    return dict(Parallel(**sizes).mapping())


MOE = {"num_experts": 8, "top_k": 2}


@pytest.mark.parametrize(
    ("checkpoint", "values", "message", "hint"),
    [
        (FLOAT16, {"max_beam_width": 2, "features": {"lookahead": True}}, "not support beam search", "max_beam_width"),
        (
            FLOAT16,
            {"features": {"draft": True, "context_logits": True}},
            "cannot return context logits",
            "context_logits: false",
        ),
        (
            FLOAT16,
            {"features": {"draft": True, "kv_reuse": False}},
            "needs KV cache reuse",
            "kv_reuse: true",
        ),
        (llama(kv_cache="INT8"), {"features": {"draft": True}}, "needs paged context FMHA", "kv_cache: none"),
        (drafting("eagle"), {"max_batch_size": 513, "features": {"eagle": True}}, "exceeds EAGLE's 512", "512"),
        (drafting("eagle", mapping=parallel(pp=2)), {"features": {"eagle": True}}, "pp is 2", "tp instead"),
        (FLOAT16, {"target": {"gpu": "t4"}, "features": {"draft": True}}, "t4 has 7.5", "another GPU"),
        (llama(), {"features": {"medusa": True}}, "LlamaForCausalLM checkpoint has no medusa", "--medusa DIRECTORY"),
        (
            drafting("medusa"),
            {"features": {"lookahead": True}},
            "is MedusaForCausalLM, but engine.features",
            r"Set engine\.features\.medusa alone, or convert the model without",
        ),
        (drafting("eagle"), {}, "is EagleForCausalLM, but engine.features", r"Set engine\.features\.eagle alone"),
        (
            drafting("medusa"),
            {"features": {"medusa": {"heads": 3}}},
            "medusa.heads is 3, but the checkpoint's num_medusa_heads is 4",
            "Leave heads out",
        ),
        (
            drafting("medusa", max_draft_len=2),
            {"features": {"medusa": {"choices": [[0], [0, 0], [1]]}}},
            "choices has 3 nodes, more than the 2 draft tokens",
            "least likely",
        ),
        (
            drafting("eagle"),
            {"features": {"eagle": {"choices": [[0], [0, 0]]}}},
            "choices are 2 tokens deep, but the checkpoint has 4 EAGLE layers",
            "depth 4",
        ),
        (llama("FP8_PER_CHANNEL_PER_TOKEN"), {"features": {"lora": True}}, "layers do not support LoRA", "format: fp8"),
        (llama(moe=MOE), {"features": {"lora": {"modules": ["mlp_gate"]}}}, "is part of the experts", "attention"),
        (FLOAT16, {"features": {"lora": {"modules": ["attn_qkv", "attn_q"]}}}, "already contains attn_q", "either"),
        (llama("W4A16_AWQ"), {"features": {"weights_on_gpu": 0.5}}, "cannot stream them", "format: none or fp8"),
    ],
)
def test_what_does_not_go_together_is_refused(
    checkpoint: CheckpointConfig, values: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(ForgeError, match=message) as caught:
        plan("1.2.1", checkpoint, engine(**values))
    assert re.search(hint, caught.value.hint)


@pytest.mark.parametrize(
    ("checkpoint", "features", "warning"),
    [
        (llama("NVFP4", dtype="float16"), {"lora": True}, "is untested with NVFP4 layers"),
        (
            llama(dtype="float16", architecture="FalconForCausalLM"),
            {"lora": True},
            "may not be supported by TensorRT-LLM's F",
        ),
        (llama(mapping=parallel(pp=2)), {"lookahead": True}, "pp is 2"),
        (llama("W4A16_AWQ"), {"draft": True}, "support matrix does not list W4A16_AWQ"),
        (llama(head_size=96), {"lookahead": True}, "may have no kernels for draft tokens at head size 96"),
        (llama(moe=MOE), {"weights_on_gpu": 0.5}, "experts are inside a plugin and stay on the GPU"),
    ],
)
def test_what_only_speaks_against_a_feature_warns(
    checkpoint: CheckpointConfig, features: dict[str, Any], warning: str
) -> None:
    assert any(warning in text for text in plan("1.2.1", checkpoint, engine(features=features)).warnings)


def test_a_release_that_lacks_a_feature_is_named_with_the_first_that_has_it() -> None:
    with pytest.raises(ForgeError) as caught:
        plan("0.17.0", FLOAT16, engine(features={"lookahead": True}))
    assert caught.value.message == (
        "engine.features.lookahead: TensorRT-LLM 0.17.0: config.pbtxt: lookahead_window_size was added in 0.19.0"
    )
    assert caught.value.hint == "Target 0.19.0."
    assert plan("0.19.0", FLOAT16, engine(features={"lookahead": True})).warnings == ()


def test_what_an_engine_keeps_of_its_features_names_no_place(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"r": 8, "target_modules": ["q_proj"]}')
    lora = {"adapters": [str(tmp_path)]}
    found = plan("1.2.1", FLOAT16, engine(features={"lora": lora, "draft": {"model": str(tmp_path)}}))
    assert str(tmp_path) not in found.features.model_dump_json()
    assert found.features.lora is not None
    assert found.features.lora.max_rank == 8


def test_adapters_that_requests_cannot_bring_are_refused(tmp_path: Path) -> None:
    """TensorRT-LLM's hf_lora_convert.py does not convert them."""
    (tmp_path / "adapter_config.json").write_text('{"r": 8, "target_modules": ["c_attn"]}')
    with pytest.raises(
        ForgeError, match="changes c_attn, of which only the embedded engine applies adapters"
    ) as caught:
        plan("1.2.1", FLOAT16, engine(features={"lora": {"adapters": [str(tmp_path)]}}))
    assert caught.value.hint == "Use engine.backend: torch, or build a merged model (`merge_and_unload` of PEFT)."


@pytest.mark.parametrize(
    "features",
    [
        {"draft": True},
        {"medusa": True},
        {"eagle": True},
        {"multiple_profiles": True},
        {"weights_on_gpu": 0.5},
    ],
    ids=lambda features: next(iter(features)),
)
def test_the_embedded_engine_refuses_what_it_lacks(features: dict[str, Any]) -> None:
    (name,) = features
    for backend in ("torch", "auto"):
        config = engine(backend=backend, device="cpu", features=features)
        with pytest.raises(ForgeError, match=f"engine.features.{name}: not supported by the torch backend") as caught:
            engine_plan_for(llama(), config, Path("c"), Path("o"), CompileOptions())
        assert "the tensorrt_llm backend" in caught.value.hint


def test_features_of_the_llm_api_are_refused_with_the_backend_that_has_them() -> None:
    for features in ({"mtp": True}, {"moe": {"backend": "CUTLASS"}}, {"cuda_graphs": False}, {"attention_dp": True}):
        config = engine(backend="torch", device="cpu", features=features)
        with pytest.raises(ForgeError, match="not supported by the torch backend") as caught:
            engine_plan_for(llama(), config, Path("c"), Path("o"), CompileOptions())
        assert caught.value.hint == "Leave it out, or use the llmapi backend."


def test_the_embedded_engine_looks_up_n_grams() -> None:
    config = engine(backend="torch", device="cpu", features={"ngram": {"draft_tokens": 4}})
    found = engine_plan_for(llama(), config, Path("c"), Path("o"), CompileOptions())
    assert isinstance(found, TorchPlan)
    assert found.forge()["features"]["ngram"] == {"draft_tokens": 4, "matching": 2, "max_requests": None}
    assert found.build_config()["max_draft_len"] == 4


def test_the_embedded_engine_takes_adapters_that_come_with_requests() -> None:
    config = engine(backend="torch", device="cpu", features={"lora": {"max_rank": 4, "modules": ["attn_dense"]}})
    found = engine_plan_for(llama(), config, Path("c"), Path("o"), CompileOptions())
    assert isinstance(found, TorchPlan)
    lora = found.forge()["features"]["lora"]
    assert (lora["adapters"], lora["max_rank"], lora["modules"]) == ([], 4, ["attn_dense"])
    assert found.build_config()["lora_config"] == {"max_lora_rank": 4, "lora_target_modules": ["attn_dense"]}


def test_the_embedded_engine_looks_ahead() -> None:
    config = engine(backend="torch", device="cpu", features={"lookahead": {"window": 7, "ngram": 4}})
    found = engine_plan_for(llama(), config, Path("c"), Path("o"), CompileOptions())
    assert isinstance(found, TorchPlan)
    assert found.forge()["features"]["lookahead"] == {"window": 7, "ngram": 4, "verification": 4}
    assert found.build_config()["max_draft_len"] == 32


def test_a_draft_models_engine_is_checked_and_becomes_part_of_the_engine(tmp_path: Path) -> None:
    def checkpoint(name: str, **changes: int) -> Path:
        tiny_llama(**changes).save_pretrained(tmp_path / f"{name}-hf")
        return convert(ConvertConfig(dtype="float32"), tmp_path / f"{name}-hf", tmp_path / name).path

    def asked(directory: Path | None) -> EngineConfig:
        draft = {"draft": {"engine": str(directory), "model": "hub/id", "tokens": 3}} if directory else {}
        return engine(backend="torch", device="cpu", max_batch_size=4, features=draft)

    target = checkpoint("target")
    compile_engine(asked(None), checkpoint("small", num_hidden_layers=2), tmp_path / "draft")
    compile_engine(asked(None), checkpoint("other", vocab_size=99), tmp_path / "vocabulary")
    compile_engine(asked(tmp_path / "draft"), target, tmp_path / "engine")
    with Engine.load(tmp_path / "engine") as loaded:
        (made,) = generate_with(loaded, [GenerationRequest("", (1, 2, 3), 12)])
    assert (len(made.tokens), made.drafted_tokens > 0) == (12, True)
    found = json.loads((tmp_path / "engine" / "config.json").read_text())
    assert found["forge"]["features"]["draft"] == {"engine": None, "model": None, "tokens": 3}
    assert found["build_config"]["max_draft_len"] == 3
    refusals = {
        "vocabulary": "its vocabulary has 99 tokens, the model's 131",
        "target": "not an engine",
        "nowhere": "nowhere is not an engine",
        "engine": "is not a torch engine, or has a draft model",
    }
    for name, message in refusals.items():
        with pytest.raises(ForgeError, match=message):
            compile_engine(asked(tmp_path / name), target, tmp_path / "refused")


def test_medusa_heads_are_checked_and_become_part_of_the_engine(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "hf")
    checkpoint = convert(ConvertConfig(dtype="float32"), tmp_path / "hf", tmp_path / "checkpoint").path
    heads = write_heads(tmp_path / "heads")

    def asked(**medusa: Any) -> EngineConfig:
        features = {"medusa": {"model": str(heads), **medusa}}
        return engine(backend="torch", device="cpu", max_batch_size=4, features=features)

    compile_engine(asked(choices=[[0], [1], [1, 0]]), checkpoint, tmp_path / "trees")
    found = json.loads((tmp_path / "trees" / "config.json").read_text())
    assert found["forge"]["features"]["medusa"]["choices"] == [[0], [1], [1, 0]]
    assert found["build_config"]["max_draft_len"] == 3
    with Engine.load(tmp_path / "trees") as loaded:
        (made,) = generate_with(loaded, [GenerationRequest("", (1, 2, 3), 12)])
        steps = loaded.statistics().iterations
    assert made.drafted_tokens >= 3 * (steps - 4)  # near the end fewer fit
    compile_engine(asked(heads=3), checkpoint, tmp_path / "engine")
    with Engine.load(tmp_path / "engine") as loaded:
        (made,) = generate_with(loaded, [GenerationRequest("", (1, 2, 3), 12)])
    assert (len(made.tokens), made.drafted_tokens > 0) == (12, True)
    found = json.loads((tmp_path / "engine" / "config.json").read_text())
    assert found["forge"]["features"]["medusa"]["model"] is None
    assert found["build_config"]["max_draft_len"] == 3
    assert (tmp_path / "engine" / "medusa" / MEDUSA_FILE).is_file()
    for medusa, message in (
        ({"model": str(tmp_path)}, f"has no {MEDUSA_FILE}"),
        ({"heads": 5}, r"features\.medusa\.heads is 5, .* has 4"),
        ({"layers": 2}, r"features\.medusa\.layers is 2, .* has 1"),
        ({"choices": [[0], [0, 0], [131]]}, r"medusa\.choices has rank 131, but the vocabulary has 131 tokens"),
        ({"choices": [[0] * length for length in range(1, 6)]}, "choices are 5 tokens deep, and 4 heads are used"),
        ({"choices": [[rank] for rank in range(64)]}, r"choices has 64 nodes, the torch backend supports at most 63"),
    ):
        with pytest.raises(ForgeError, match=message):
            compile_engine(asked(**medusa), checkpoint, tmp_path / "refused")
    with pytest.raises(ForgeError, match="the heads read the last layer's output: pp must be 1, not 2"):
        engine_plan_for(llama(mapping=parallel(pp=2)), asked(), Path("c"), Path("o"), CompileOptions())


def test_eagle_networks_are_checked_and_become_part_of_the_engine(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "hf")
    checkpoint = convert(ConvertConfig(dtype="float32"), tmp_path / "hf", tmp_path / "checkpoint").path

    def asked(kind: str, **changes: Any) -> EngineConfig:
        features = {kind: {"model": str(tmp_path / kind), **changes}}
        return engine(backend="torch", device="cpu", max_batch_size=4, features=features)

    for kind, tokens, asked_tokens in (("eagle", 4, {"depth": 4}), ("eagle3", 2, {"draft_tokens": 2})):
        write_network(tmp_path / kind, kind)
        out = tmp_path / f"{kind}-engine"
        compile_engine(asked(kind, **asked_tokens), checkpoint, out)
        with Engine.load(out) as loaded:
            (made,) = generate_with(loaded, [GenerationRequest("", (1, 2, 3), 12)])
        assert (len(made.tokens), made.drafted_tokens > 0) == (12, True)
        found = json.loads((out / "config.json").read_text())
        assert found["forge"]["features"][kind]["model"] == "eagle"
        assert found["build_config"]["max_draft_len"] == tokens
        assert sorted(path.name for path in (out / "eagle").iterdir()) == ["config.json", "model.safetensors"]
        with pytest.raises(ForgeError, match=rf"features\.{kind}: .* hidden states of all layers: pp must be 1, not 2"):
            engine_plan_for(llama(mapping=parallel(pp=2)), asked(kind), Path("c"), Path("o"), CompileOptions())
    with pytest.raises(ForgeError, match=rf"^{tmp_path} has no config.json"):
        compile_engine(asked("eagle3", model=str(tmp_path)), checkpoint, tmp_path / "refused")
    compile_engine(asked("eagle", choices=[[0], [1], [1, 0]]), checkpoint, tmp_path / "trees")
    assert json.loads((tmp_path / "trees" / "config.json").read_text())["build_config"]["max_draft_len"] == 3
    with pytest.raises(ForgeError, match=r"eagle\.choices has rank 140, but the vocabulary has 131 tokens"):
        compile_engine(asked("eagle", choices=[[140]]), checkpoint, tmp_path / "refused")
    write_network(tmp_path / "eagle3", d2t=torch.full((50,), 90))
    with pytest.raises(ForgeError, match="d2t maps token 41 to 131, the model has 131"):
        compile_engine(asked("eagle3"), checkpoint, tmp_path / "refused")


def test_a_network_beside_several_ranks_needs_what_they_split(tmp_path: Path) -> None:
    """Rank 0 runs the network alone."""
    hf = tmp_path / "hf"
    tiny_llama().save_pretrained(hf)
    for split in (False, True):
        config = ConvertConfig(dtype="float32", tp=2, parallel_embedding=split)
        checkpoint = convert(config, hf, tmp_path / f"checkpoint-{split}").path
        for kind, lacks in (("eagle", "LM head"), ("eagle3", "embedding" if split else None)):
            directory = write_network(tmp_path / kind, kind)
            asked = engine(backend="torch", device="cpu", features={kind: {"model": str(directory)}})
            if lacks is None:
                compile_engine(asked, checkpoint, tmp_path / "engine")
                continue
            with pytest.raises(ForgeError, match=f"the network has no {lacks} of its own, .* split over 2 ranks"):
                compile_engine(asked, checkpoint, tmp_path / "refused")


def test_the_embedded_engine_searches_beams_without_speculation() -> None:
    def planned(**limits: Any) -> Any:
        config = engine(backend="torch", device="cpu", **limits)
        return engine_plan_for(llama(), config, Path("c"), Path("o"), CompileOptions())

    assert planned(max_beam_width=4, max_batch_size=8).build_config()["max_beam_width"] == 4
    with pytest.raises(ForgeError, match=r"features\.ngram does not support beam search, and max_beam_width is 2"):
        planned(max_beam_width=2, features={"ngram": True})
    with pytest.raises(ForgeError, match="max_beam_width 4 is more than max_batch_size 2"):
        planned(max_beam_width=4, max_batch_size=2)
