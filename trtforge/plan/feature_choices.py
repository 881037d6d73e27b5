"""Candidate changes for problems with features: first changes of the settings that a feature excludes.

A feature itself is dropped only if no other change helps: features that a backend lacks, and streamed weights.
"""

from collections.abc import Iterator
from pathlib import Path

from trtforge.core.dtypes import dtype_named
from trtforge.core.features import OF_ENGINES, OF_THE_LLM_API
from trtforge.formats.adapter import read_adapter
from trtforge.plan.evaluation import Evaluation
from trtforge.plan.lora import adapter_bytes, embedded_bytes
from trtforge.plan.model import Model
from trtforge.plan.request import Change, Request
from trtforge.plan.speculation import EAGLE_MOST_REQUESTS, speculation_of

_FEATURES = "engine.features"
_SHARES = (0.1, 0.2, 0.4, 0.6, 0.8)


def paging(model: Model, evaluation: Evaluation) -> Iterator[tuple[Change, ...]]:
    """Without KV reuse and chunked context, which the KV cache format may not support."""
    given = evaluation.request.engine.features.model_fields_set
    names = [name for name in ("kv_reuse", "chunked_context") if name in given]
    yield tuple(_set(f"{_FEATURES}.{name}", "false") for name in names)


def none_beyond_paging(model: Model, evaluation: Evaluation) -> Iterator[tuple[Change, ...]]:
    """Only the features that the backend has."""
    features, backend = evaluation.request.engine.features, evaluation.request.engine.backend
    dropped = {"llmapi": OF_ENGINES, "torch": features.unsupported_by_torch}.get(backend, OF_THE_LLM_API)
    defaults = {name: field.default for name, field in type(features).model_fields.items()}
    yield tuple(
        _set(f"{_FEATURES}.{name}", "null" if defaults[name] is None else str(defaults[name]).lower())
        for name in features.beyond_paging
        if name in dropped
    )


def without_moe(model: Model, evaluation: Evaluation) -> Iterator[tuple[Change, ...]]:
    """A dense model without settings for experts."""
    yield (_set(f"{_FEATURES}.moe", "null"),)


def without_attention_dp(model: Model, evaluation: Evaluation) -> Iterator[tuple[Change, ...]]:
    """Attention split by heads; the same as data-parallel attention on one GPU."""
    yield (_set(f"{_FEATURES}.attention_dp", "null"),)


def speculation(model: Model, evaluation: Evaluation) -> Iterator[tuple[Change, ...]]:
    """Settings that speculative decoding requires."""
    found = speculation_of(evaluation.request.engine.features)
    yield from ((change,) for change in _beside_speculation(evaluation.request, found.method if found else None))


def _beside_speculation(request: Request, method: str | None) -> Iterator[Change]:
    engine = request.engine
    if engine.max_beam_width > 1:
        yield _set("engine.max_beam_width", "1")
    if engine.features.context_logits:
        yield _set(f"{_FEATURES}.context_logits", "false")
    if not engine.features.kv_reuse:
        yield _set(f"{_FEATURES}.kv_reuse", "true")
    if method == "eagle" and engine.max_batch_size > EAGLE_MOST_REQUESTS:
        asked = request.concurrency is not None  # concurrency sets max_batch_size
        most = str(EAGLE_MOST_REQUESTS)
        yield Change("--concurrency", most) if asked else _set("engine.max_batch_size", most)


def one_stage(model: Model, evaluation: Evaluation) -> Iterator[tuple[Change, ...]]:
    """The same GPUs with tensor parallelism only, then without the further pipeline stages."""
    request = evaluation.request
    if request.pp > 1:
        yield Change("--tp", str(request.tp * request.pp)), Change("--pp", "1")
        yield (Change("--pp", "1"),)


def lora_modules(model: Model, evaluation: Evaluation) -> Iterator[tuple[Change, ...]]:
    """Only the attention layers, each once, if the recipe's adapters change no others."""
    lora = evaluation.request.engine.features.lora
    modules = lora.modules if lora is not None else ()
    needed = {name for each in (lora.adapters if lora else ()) for name in read_adapter(Path(each)).modules}
    attention = [name for name in modules if not name.startswith("mlp_")]
    single = [name for name in attention if name != "attn_qkv"]
    for names in (attention, [name for name in modules if name != "attn_qkv"], single):
        if names and tuple(names) != modules and needed <= set(names):
            yield (_set(f"{_FEATURES}.lora.modules", f"[{','.join(names)}]"),)


def lora_cache(model: Model, evaluation: Evaluation) -> Iterator[tuple[Change, ...]]:
    """Caches for one adapter on the host and on the GPU."""
    request, lora = evaluation.request, evaluation.request.engine.features.lora
    if lora is None or evaluation.memory is None:
        return
    sizes, parallel, embedded = model.facts.sizes, evaluation.memory.parallel, evaluation.embedded
    if embedded is None:
        least = adapter_bytes(sizes, parallel, lora, dtype_named(request.dtype).size)
    else:
        least = embedded_bytes(model.family, sizes, parallel, lora, dtype_named(embedded.compute_dtype).size)
    if lora.host_memory < least:
        yield (_set(f"{_FEATURES}.lora.host_memory", str(least)),)
    for share in _SHARES:
        if share > lora.gpu_fraction:
            yield (_set(f"{_FEATURES}.lora.gpu_fraction", f"{share:g}"),)


def all_on_gpu(model: Model, evaluation: Evaluation) -> Iterator[tuple[Change, ...]]:
    """All weights on the GPU, none streamed."""
    if evaluation.request.engine.features.weights_on_gpu < 1:
        yield (_set(f"{_FEATURES}.weights_on_gpu", "1"),)


def _set(key: str, value: str) -> Change:
    return Change("--set", f"{key}={value}")
