"""Compatibility of features with one another, and with formats, layouts and releases.

`trtllm-build` refuses some combinations and silently disables others; the runtime refuses the rest when the server
starts. Here each is reported with its reason; the rules name their sources.
"""

from collections.abc import Iterator, Mapping

from trtforge.core.features import EMBEDDED, OF_THE_LLM_API, Drafting, LoraFeature
from trtforge.core.recipe import EngineConfig
from trtforge.formats.known_issues import known_issues
from trtforge.formats.releases import Problem as ReleaseProblem
from trtforge.formats.releases import Release, Section
from trtforge.formats.triton import parameter_problem
from trtforge.formats.trtllm import CheckpointConfig
from trtforge.plan.draft_tree_rules import too_many_nodes
from trtforge.plan.gpus import gpu_named
from trtforge.plan.legality import Problem
from trtforge.plan.paged_context import has_paged_context
from trtforge.plan.runtime_keys import runtime_keys
from trtforge.plan.speculation import (
    DRAFTING_ARCHITECTURES,
    EAGLE_MOST_DRAFT_TOKENS,
    EAGLE_MOST_REQUESTS,
    Speculation,
    speculation_of,
    stored,
)

_STREAMED = frozenset({None, "FP8"})
_NO_LORA = frozenset(
    {
        "FP8_PER_CHANNEL_PER_TOKEN",
        "W8A8_SQ_PER_TENSOR_PLUGIN",
        "W8A8_SQ_PER_TENSOR_PER_TOKEN_PLUGIN",
        "W8A8_SQ_PER_CHANNEL_PER_TENSOR_PLUGIN",
        "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN",
    }
)
_LORA_SEEN = frozenset({None, "FP8", "W8A16", "W4A16_AWQ", "W8A8_SQ_PER_CHANNEL"})
"""Formats that tests/integration/defs/examples/test_llama.py tests with LoRA (1.x, `test_llm_llama_v2_lora_1gpu`)."""

_SPECULATION_SEEN = {
    "draft": frozenset({None, "FP8"}),
    "lookahead": frozenset({None, "FP8"}),
    "medusa": frozenset({None}),
    "eagle": frozenset({None}),
}
_SPECULATION_SM = 80
_SPECULATION_HEADS = (64, 128, 256)
"""Head sizes of the precompiled XQA kernels, which verify draft tokens (0.16's release notes).

examples/lookahead/README.md warns about other sizes.
"""

_MEDUSA_FIELDS = {"draft_tokens": "max_draft_len", "heads": "num_medusa_heads", "layers": "num_medusa_layers"}
_EAGLE_FIELDS = {"draft_tokens": "max_draft_len", "depth": "num_eagle_layers"}
_LORA_ARCHITECTURES = (
    "LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "QWenForCausalLM", "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "GemmaForCausalLM", "Gemma2ForCausalLM",
    "Gemma3ForCausalLM", "Phi3ForCausalLM", "GPTForCausalLM", "CohereForCausalLM", "GraniteForCausalLM",
)  # fmt: skip
"""Classes that override `use_lora` (tensorrt_llm/models/*/model.py); the base class raises."""


def feature_problems(checkpoint: CheckpointConfig, engine: EngineConfig, release: Release) -> Iterator[Problem]:
    """Errors and warnings for the features of a TensorRT engine."""
    others = [name for name in OF_THE_LLM_API if getattr(engine.features, name) is not None]
    for name in others:
        backends = "llmapi or torch" if name in EMBEDDED else "llmapi"
        message = f"engine.features.{name}: not supported by TensorRT engines"
        yield Problem("backend", message, f"Leave it out, or use engine.backend: {backends}.")
    if others:
        return
    speculation = speculation_of(engine.features, checkpoint)
    yield from _lacking(engine, speculation, release)
    if speculation is not None:
        yield from _speculation_problems(checkpoint, engine, speculation)
    yield from _lora_problems(checkpoint, engine)
    yield from _streaming_problems(checkpoint, engine)


def drafting_problems(checkpoint: CheckpointConfig, engine: EngineConfig) -> Iterator[Problem]:
    """Problems if the Medusa heads or EAGLE networks in the checkpoint and the features do not agree."""
    features = engine.features
    for name, architecture in DRAFTING_ARCHITECTURES.items():
        asked, there = getattr(features, name) is not None, checkpoint.architecture == architecture
        if asked and not there:
            converter = f"`trtforge convert HF_DIR CHECKPOINT --{name} DIRECTORY`"
            yield Problem(
                name,
                f"engine.features.{name}: the {checkpoint.architecture} checkpoint has no {name} weights",
                f"Convert model and {name} weights with {converter}, and compile that; or use "
                "engine.features.lookahead, which needs no weights.",
            )
        if there and not asked:
            message = f"the checkpoint is {architecture}, but engine.features.{name} is not set"
            yield Problem(name, message, f"Set engine.features.{name} alone, or convert the model without {name}.")
    for name, fields, asked_for in (
        ("medusa", _MEDUSA_FIELDS, features.medusa),
        ("eagle", _EAGLE_FIELDS, features.eagle),
    ):
        if asked_for is not None:
            yield from _stored_problems(checkpoint, name, asked_for, fields)


def _stored_problems(
    checkpoint: CheckpointConfig, name: str, asked_for: Drafting, fields: Mapping[str, str]
) -> Iterator[Problem]:
    """Problems of values that differ from the checkpoint's.

    EAGLE's choices must be as deep as it has layers (examples/eagle/README.md), and a tree has at most as many nodes as
    draft tokens.
    """
    where = f"engine.features.{name}"
    for field, key in fields.items():
        said, held = getattr(asked_for, field), stored(checkpoint, key)
        if said is not None and held is not None and said != held:
            message = f"{where}.{field} is {said}, but the checkpoint's {key} is {held}"
            yield Problem(name, message, f"Leave {field} out, or convert the checkpoint again.")
    most, nodes = stored(checkpoint, "max_draft_len") or asked_for.draft_tokens, len(asked_for.choices or ())
    if most is not None and nodes > most:
        yield too_many_nodes(name, f"{where}.choices", nodes, most)
    layers, deep = stored(checkpoint, "num_eagle_layers"), asked_for.tree_depth
    if layers is not None and deep is not None and deep != layers:
        message = f"{where}.choices are {deep} tokens deep, but the checkpoint has {layers} EAGLE layers"
        yield Problem(name, message, f"Use choices of depth {layers}, or leave them out.")


def _lacking(engine: EngineConfig, speculation: Speculation | None, release: Release) -> Iterator[Problem]:
    """Build fields and Triton backend keys that the features set but the release does not have."""
    wanted: list[tuple[Section, str, str]] = []
    features = engine.features
    if speculation is not None:
        wanted.append(("speculative_decoding_mode", speculation.mode, speculation.method))
    if features.lora is not None:
        wanted += [("plugin_config", "lora_plugin", "lora"), ("lora_config", "max_lora_rank", "lora")]
    if features.multiple_profiles:
        wanted.append(("plugin_config", "multiple_profiles", "multiple_profiles"))
    if features.weights_on_gpu < 1:
        wanted.append(("build_config", "weight_streaming", "weights_on_gpu"))
    wanted += [
        ("build_config", f"gather_{name}", name)
        for name in ("context_logits", "generation_logits")
        if getattr(features, name)
    ]
    if features.max_prompt_embedding_table_size:
        wanted.append(("build_config", "max_prompt_embedding_table_size", "max_prompt_embedding_table_size"))
    for section, key, feature in wanted:
        yield from _of_release(release.key_problem(section, key), feature)
    for runtime_key in runtime_keys(features):
        yield from _of_release(parameter_problem(runtime_key.key, release), runtime_key.feature)
    for name in features.beyond_paging:
        for issue in known_issues(name, release):
            message = f"engine.features.{name}: TensorRT-LLM {release.version}: {issue.says} ({issue.source})"
            yield Problem("release", message, "Test it before relying on it, or target another release.", refuses=False)


def _of_release(problem: ReleaseProblem | None, feature: str) -> Iterator[Problem]:
    if problem is not None:
        doubt = "" if problem.refuses else " (inferred from its neighbours)"
        yield Problem(
            "release", f"engine.features.{feature}: {problem.message}{doubt}", problem.hint, refuses=problem.refuses
        )


def _speculation_problems(
    checkpoint: CheckpointConfig, engine: EngineConfig, speculation: Speculation
) -> Iterator[Problem]:
    """Limits of speculative decoding.

    Sources: `verifyRequests` in trtGptModelInflightBatching.cpp (beams), commands/build.py (logits), `build()` and
    examples/eagle/README.md (EAGLE, pipelines), examples/draft_target_model/README.md (KV reuse), and the support
    matrices of the READMEs (formats).
    """
    method, features, parallel = speculation.method, engine.features, checkpoint.parallel
    name = f"engine.features.{method}"
    if engine.max_beam_width > 1:
        message = f"{name} does not support beam search, and engine.max_beam_width is {engine.max_beam_width}"
        yield Problem("speculation", message, "Use engine.max_beam_width: 1.")
    if features.context_logits:
        message = f"{name}: an engine that verifies draft tokens cannot return context logits"
        yield Problem("speculation", message, "Set engine.features.context_logits: false.")
    paged = has_paged_context(checkpoint.quantization)
    if method in ("draft", "eagle") and not paged:
        message = f"{name} needs paged context FMHA, which this KV cache format does not support"
        yield Problem("speculation", message, "Use quantization.kv_cache: none, or fp8 with format: fp8.")
    if method == "draft" and not features.kv_reuse:
        message = f"{name} needs KV cache reuse: the target reuses the KV blocks of accepted tokens"
        yield Problem("speculation", message, "Set engine.features.kv_reuse: true.")
    if method == "eagle":
        yield from _eagle_problems(engine, speculation)
    if parallel.pp > 1:
        message = f"{name}: TensorRT-LLM's {method} supports tensor parallelism only; pp is {parallel.pp}"
        yield Problem("speculation", message, "Use tp instead of pp.", refuses=method == "eagle")
    gpu = gpu_named(engine.target.gpu) if engine.target.gpu is not None else None
    if gpu is not None and gpu.sm < _SPECULATION_SM:
        message = f"{name} needs compute capability 8.0 (Ampere or later); {gpu.name} has {gpu.capability}"
        yield Problem("speculation", message, f"Choose another GPU, or remove {name}.")
    if checkpoint.head_size not in _SPECULATION_HEADS:
        message = f"{name}: TensorRT-LLM may have no kernels for draft tokens at head size {checkpoint.head_size}"
        fix = "If so, the server reports it when it starts (TensorRT-LLM issue #2879)."
        yield Problem("speculation", message, fix, refuses=False)
    algorithm = checkpoint.quantization.quant_algo
    if algorithm not in _SPECULATION_SEEN[method]:
        message = f"{name}: TensorRT-LLM's support matrix does not list {algorithm}"
        yield Problem("speculation", message, "Compare speed and answers with and without it.", refuses=False)


def _eagle_problems(engine: EngineConfig, speculation: Speculation) -> Iterator[Problem]:
    if engine.max_batch_size > EAGLE_MOST_REQUESTS:
        message = f"engine.features.eagle: max_batch_size {engine.max_batch_size} exceeds EAGLE's {EAGLE_MOST_REQUESTS}"
        yield Problem("speculation", message, f"Use engine.max_batch_size: {EAGLE_MOST_REQUESTS}.")
    if speculation.draft_tokens > EAGLE_MOST_DRAFT_TOKENS:
        drafted = f"{speculation.draft_tokens} draft tokens exceed EAGLE's {EAGLE_MOST_DRAFT_TOKENS}"
        yield Problem("speculation", f"engine.features.eagle: {drafted}", "Convert the checkpoint with fewer.")


def _lora_problems(checkpoint: CheckpointConfig, engine: EngineConfig) -> Iterator[Problem]:
    """Limits of LoRA.

    Sources: formats: quantization/layers.py asserts that `Fp8Rowwise*` and the plugin `SmoothQuant*` modules have no
    LoRA (TensorRT-LLM issue #2603); experts: unsupported in cpp/tensorrt_llm/runtime/loraModule.cpp; dtype of the
    weights: `loraValidateRequestTensors` in cpp/tensorrt_llm/runtime/loraUtils.cpp, the template's TYPE_FP16, and
    TensorRT-LLM issue #2434.
    """
    lora = engine.features.lora
    if lora is None:
        return
    algorithm, architecture = checkpoint.quantization.quant_algo, checkpoint.architecture
    if algorithm in _NO_LORA:
        message = f"engine.features.lora: TensorRT-LLM's {algorithm} layers do not support LoRA"
        yield Problem("lora", message, "Use quantization.format: fp8, int4_awq, int8_wo, int8_sq or none.")
    elif algorithm not in _LORA_SEEN:
        message = f"engine.features.lora is untested with {algorithm} layers"
        yield Problem("lora", message, "Compare an adapter's answers with those of PEFT.", refuses=False)
    if architecture not in _LORA_ARCHITECTURES:
        message = f"engine.features.lora may not be supported by TensorRT-LLM's {architecture}"
        yield Problem("lora", message, "If so, trtllm-build raises NotImplementedError.", refuses=False)
    yield from adapted_experts(checkpoint, lora)
    if "attn_qkv" in lora.modules and "attn_q" in lora.modules:
        message = "engine.features.lora.modules: attn_qkv already contains attn_q, attn_k and attn_v"
        yield Problem("lora", message, "Use either attn_qkv or the single modules, as the adapters were trained.")


def adapted_experts(checkpoint: CheckpointConfig, lora: LoraFeature) -> Iterator[Problem]:
    """The problem of adapters of experts, which neither TensorRT-LLM nor the embedded engine has."""
    modules = [name for name in lora.modules if name.startswith("mlp_")]
    if modules and checkpoint.experts:
        message = f"engine.features.lora.modules: {modules[0]} is part of the experts, which do not support LoRA"
        yield Problem("lora", message, "Use attention modules only, or merge the adapters into the model.")


def _streaming_problems(checkpoint: CheckpointConfig, engine: EngineConfig) -> Iterator[Problem]:
    """Weights inside plugins cannot be streamed (docs/source/advanced/weight-streaming.md)."""
    if engine.features.weights_on_gpu == 1:
        return
    algorithm = checkpoint.quantization.quant_algo
    if algorithm not in _STREAMED:
        message = f"engine.features.weights_on_gpu: {algorithm} weights are inside plugins, which cannot stream them"
        yield Problem("weights_on_gpu", message, "Use quantization.format: none or fp8, or set weights_on_gpu: 1.")
    if checkpoint.experts:
        message = "engine.features.weights_on_gpu: experts are inside a plugin and stay on the GPU"
        yield Problem("weights_on_gpu", message, "Only attention weights are streamed.", refuses=False)
