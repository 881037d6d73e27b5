"""Checks of a request's features before conversion: against the model, the draft model and the backend."""

from collections.abc import Iterator

from trtforge.core.features import OF_THE_LLM_API, SPECULATION, LoraFeature
from trtforge.formats.checkpoint_keys import integer
from trtforge.formats.releases import Release
from trtforge.formats.trtllm import CheckpointConfig
from trtforge.plan.draft_tree_rules import tree_problems
from trtforge.plan.feature_rules import adapted_experts, feature_problems
from trtforge.plan.kv import is_latent
from trtforge.plan.legality import Problem
from trtforge.plan.llm_api_arguments import LlmApiModel, llm_api_problems
from trtforge.plan.model import Model
from trtforge.plan.request import Request
from trtforge.plan.speculation import BASES, DRAFTING_ARCHITECTURES, stored


def asked_features(model: Model, request: Request, checkpoint: CheckpointConfig, release: Release) -> Iterator[Problem]:
    """Problems that the request's backend has with the features."""
    if request.engine.backend == "llmapi":
        yield from _of_llm_api(model, request, checkpoint)
    elif request.for_tensorrt is False:
        yield from _of_embedded(model, request, checkpoint)
    elif request.engine.features.beyond_paging:
        yield from _of_tensorrt(model, request, checkpoint, release)


def _of_llm_api(model: Model, request: Request, checkpoint: CheckpointConfig) -> Iterator[Problem]:
    facts = LlmApiModel(
        request.tp,
        checkpoint.experts > 0,
        stored(checkpoint, "num_nextn_predict_layers") or 0,
        checkpoint.architecture,
        integer(checkpoint, "attention_chunk_size"),
        request.pp,
    )
    yield from llm_api_problems(request.engine, facts)
    yield from _estimate_problems(request)
    if request.draft is not None:
        yield from _draft_problems(model, request.draft, request)


def _of_embedded(model: Model, request: Request, checkpoint: CheckpointConfig) -> Iterator[Problem]:
    features = request.engine.features
    for name in features.unsupported_by_torch:
        message = f"engine.features.{name}: not supported by the {request.engine.backend} backend"
        having = "llmapi" if name in OF_THE_LLM_API else "tensorrt_llm"
        yield Problem("backend", message, f"Leave it out, or use engine.backend: {having}.")
    if features.lora is not None:
        yield from _adapter_problems(features.lora, model, checkpoint)
    yield from tree_problems(features, checkpoint, states=bool(model.facts.sizes.linear_layers))
    if model.facts.sizes.linear_layers and request.engine.max_beam_width > 1:
        yield beams_with_states(request.engine.max_beam_width)
    if model.facts.sizes.linear_layers and request.serving.kv_cache_host_memory_bytes is not None:
        message = (
            "serving.kv_cache_host_memory_bytes: not supported with linear attention, whose states are not in KV blocks"
        )
        yield Problem("serving", message, "Leave it out of serving.")
    if features.draft is not None and features.draft.engine is None:
        message = "engine.features.draft: the torch backend needs the draft model's engine"
        yield Problem("draft", message, "Compile it, and set engine.features.draft.engine.")


def _adapter_problems(lora: LoraFeature, model: Model, checkpoint: CheckpointConfig) -> Iterator[Problem]:
    """Layers of the model whose adapters the embedded engine does not have."""
    yield from adapted_experts(checkpoint, lora)
    of_attention = [name for name in lora.modules if name.startswith("attn_")]
    if of_attention and (model.facts.sizes.linear_layers or is_latent(model.facts.sizes)):
        message = f"engine.features.lora.modules: {of_attention[0]}: this model's attention does not support LoRA"
        yield Problem("lora", message, "Leave it out, or merge the adapters into the model.")
    gated = any(row.target == "mlp.gate" for row in model.family.linears)
    if "mlp_gate" in lora.modules and not gated and not checkpoint.experts:
        message = "engine.features.lora.modules: mlp_gate: this model's MLP does not have it as a layer of its own"
        yield Problem("lora", message, "Use mlp_h_to_4h, leave it out, or merge the adapters into the model.")


def _of_tensorrt(model: Model, request: Request, checkpoint: CheckpointConfig, release: Release) -> Iterator[Problem]:
    yield from feature_problems(checkpoint, request.engine, release)
    yield from _estimate_problems(request)
    for name, bases in BASES.items():
        if getattr(request.engine.features, name) is None:
            continue
        if model.config.architecture not in bases:
            message = f"engine.features.{name}: TensorRT-LLM has {name} for {', '.join(bases)}, not for "
            fix = "Use engine.features.lookahead, which needs no heads."
            yield Problem("speculation", message + model.config.architecture, fix)
        elif checkpoint.architecture != DRAFTING_ARCHITECTURES[name]:
            message = f"engine.features.{name}: the engine needs {name} weights, but their directory is not given"
            yield Problem("speculation", message, f"Set engine.features.{name}.model.", refuses=False)
    if request.draft is not None:
        yield from _draft_problems(model, request.draft, request)


def beams_with_states(width: int) -> Problem:
    """The embedded engine has no beam search for models with linear attention."""
    message = f"max_beam_width {width}: not supported with linear attention, whose states beams cannot share"
    return Problem("limits", message, "Use max_beam_width 1.")


def _estimate_problems(request: Request) -> Iterator[Problem]:
    """Warnings about effects that the time estimates leave out."""
    features = request.engine.features
    method = next((name for name in SPECULATION if getattr(features, name) is not None), None)
    if method is not None:
        message = f"Times are estimated without {method}: the acceptance rate of draft tokens depends on the text"
        yield Problem("estimate", message, "Measure with and without it.", refuses=False)
    if features.weights_on_gpu < 1:
        message = "Times are estimated with all weights on the GPU: streamed weights cross the host's link every step"
        yield Problem("estimate", message, "Expect far lower throughput.", refuses=False)


def _draft_problems(model: Model, draft: Model, request: Request) -> Iterator[Problem]:
    """Target and draft share a vocabulary (docs/source/advanced/speculative-decoding.md); both are split alike."""
    own, other = model.facts.sizes, draft.facts.sizes
    if own.vocab != other.vocab:
        message = f"the draft model {draft.name} has {other.vocab} tokens in its vocabulary, the target {own.vocab}"
        yield Problem("draft", message, "Draft with a smaller model of the same family.")
    if other.num_heads % request.tp or other.num_layers % request.pp:
        message = (
            f"the draft model {draft.name} cannot be split like the target: {other.num_heads} heads over tp "
            f"{request.tp}, {other.num_layers} layers over pp {request.pp}"
        )
        yield Problem("draft", message, "Draft with another model, or split the target less.")
