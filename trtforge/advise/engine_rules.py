"""Rules about the limits of an engine, from its gauges."""

from collections.abc import Collection, Iterator
from http import HTTPStatus

from trtforge.advise.advice import Advice, Confidence, Found, Missing
from trtforge.advise.readings import FEW_REQUESTS, EngineObserved, Observation
from trtforge.core.api_keys import KEY_VARIABLE

_OFTEN, _ALMOST_ALWAYS = 0.5, 0.8  # of the readings
_KV_FULL = 0.9  # of the blocks
_FEW_DRAFTS = 200
_LOW_ACCEPTANCE = 0.3
_FULL_STEP = 0.9  # of max_num_tokens
_LOW_GPU = 0.5


def batch(engine: EngineObserved, seen: Observation) -> Iterator[Found]:
    """Requests wait while all places in the batch are taken and KV blocks are free."""
    kv = engine.mean(lambda each: each.blocks_share)
    often = engine.share(lambda each: bool(each.waiting) and each.full)
    if often < _OFTEN or kv is None or kv >= _KV_FULL:
        return
    most = engine.seen[-1].requests_max or 0
    change, setting = "Compile the engine for more requests in flight.", "engine.max_batch_size"
    if engine.settings is None:
        change, setting = f"{change[:-1]}, if serving does not lower that.", f"serving.max_batch_size, {setting}"
    elif "max_batch_size" in engine.settings:
        change, setting = "Raise the lowered limit, or leave it out.", "serving.max_batch_size"
    yield Advice(
        rule="batch",
        limit=f"{engine.name}: all places in the batch are taken",
        evidence=f"requests waited while {most:.0f} of {most:.0f} ran in {_percent(often)} of the readings "
        f"({_waiting(engine)} waiting on average), and {_percent(kv)} of the KV blocks were in use",
        change=change,
        setting=setting,
        effect="more tokens per second and a shorter wait for the first token; each token takes a little longer",
        confidence=_sure(often),
    )


def kv_full(engine: EngineObserved, seen: Observation) -> Iterator[Found]:
    """Requests wait while KV blocks are used up."""
    often = engine.share(lambda each: bool(each.waiting) and (each.blocks_share or 0) >= _KV_FULL)
    if often < _OFTEN:
        return
    kv = engine.mean(lambda each: each.blocks_share) or 0
    yield Advice(
        rule="kv_full",
        limit=f"{engine.name}: the KV cache is full",
        evidence=f"requests waited while at least {_percent(_KV_FULL)} of the KV blocks were in use, in "
        f"{_percent(often)} of the readings ({_percent(kv)} on average)",
        change="Give the KV cache more memory, or make its tokens smaller: an FP8 KV cache holds twice as many, a "
        "shorter max_seq_len reserves fewer, more GPUs (tp) have more memory.",
        setting="serving.kv_cache_fraction, serving.kv_cache_tokens, quantization.kv_cache, engine.max_seq_len",
        effect="more requests at once, so more tokens per second and a shorter wait",
        confidence=_sure(often) if engine.seen[-1].counts_since_start else "likely",  # others may count reusable blocks
    )


def kv_reserved(engine: EngineObserved, seen: Observation) -> Iterator[Found]:
    """`guaranteed_no_evict` lets a request wait until its longest answer fits, which no gauge of used blocks shows."""
    often = engine.share(
        lambda each: bool(each.waiting) and not each.full and _KV_FULL > (each.blocks_share or 0) > _OFTEN / 2
    )
    policy = (engine.settings or {}).get("batch_scheduler_policy")
    if often < _OFTEN or policy == "max_utilization":
        return
    kv = engine.mean(lambda each: each.blocks_share) or 0
    yield Advice(
        rule="kv_reserved",
        limit=f"{engine.name}: requests wait for KV blocks that are reserved for longer answers",
        evidence=f"requests waited with places in the batch free in {_percent(often)} of the readings, while "
        f"{_percent(kv)} of the KV blocks were in use; guaranteed_no_evict reserves those of the longest answer",
        change="Let clients ask for no more max_tokens than they need, or give the KV cache more memory; "
        "max_utilization starts them at once, and pauses some if blocks run out.",
        setting="max_tokens of the requests, serving.kv_cache_fraction, serving.scheduler",
        effect="more requests at once; with max_utilization at the cost of pauses",
        confidence="likely" if policy else "possible",
    )


def paused(engine: EngineObserved, seen: Observation) -> Iterator[Found]:
    """`max_utilization` pauses requests when blocks run out."""
    if engine.seen[-1].paused_requests is None:
        return
    if engine.seen[-1].counts_since_start:
        pauses = engine.growth(lambda each: each.paused_requests) or 0
        evidence = f"{pauses:.0f} pauses in {seen.seconds:.0f} s"
    else:
        often = engine.share(lambda each: bool(each.paused_requests))
        pauses = often
        evidence = f"requests were paused in {_percent(often)} of the readings"
    if pauses:
        yield Advice(
            rule="paused",
            limit=f"{engine.name}: running requests are paused, because KV blocks run out",
            evidence=f"{evidence}: their tokens are computed again later",
            change="Give the KV cache more memory, or admit fewer: guaranteed_no_evict never pauses.",
            setting="serving.scheduler=guaranteed_no_evict, serving.kv_cache_fraction, serving.max_batch_size",
            effect="no gaps within answers, and no tokens computed twice; new requests wait longer",
            confidence="certain",
        )


def reuse(engine: EngineObserved, seen: Observation) -> Iterator[Found]:
    """No KV block of an earlier prompt is used."""
    reused = engine.growth(lambda each: each.blocks_reused)
    if reused is None:
        yield Missing(rule="reuse", lacks=f"{engine.name}: the gauge of reused KV blocks")
        return
    answered = max((seen.model(name).count for name in seen.readings[-1].models), default=0.0)
    if reused or answered < FEW_REQUESTS:
        return
    known = (engine.settings or {}).get("enable_kv_cache_reuse")
    if known == "true":
        return  # prompts differ
    yield Advice(
        rule="reuse",
        limit=f"{engine.name}: prompts that begin alike are computed each time, if there are any",
        evidence=f"no KV block was reused by {answered:.0f} requests in {seen.seconds:.0f} s"
        + ("; KV reuse is off" if known == "false" else "; whether KV reuse is on is not known"),
        change="Turn KV reuse on if prompts share a system prompt, documents or the turns of a chat.",
        setting="engine.features.kv_reuse",
        effect="a shorter wait for the first token of such requests, in proportion to what they share",
        confidence="likely" if known == "false" else "possible",
    )


def drafts(engine: EngineObserved, seen: Observation) -> Iterator[Found]:
    """Few draft tokens are accepted."""
    drafted = engine.growth(lambda each: each.drafted) or 0
    accepted = engine.growth(lambda each: each.accepted) or 0
    if drafted < _FEW_DRAFTS or accepted / drafted >= _LOW_ACCEPTANCE:
        return
    yield Advice(
        rule="drafts",
        limit=f"{engine.name}: most draft tokens are computed in vain",
        evidence=f"{accepted:.0f} of {drafted:.0f} draft tokens were accepted ({_percent(accepted / drafted)})",
        change="Draft fewer tokens at a time, compile without speculation, or use a draft model that is nearer.",
        setting="engine.features (draft, ngram, lookahead, eagle, medusa)",
        effect="shorter steps; most with many requests at once",
        confidence="certain",
    )


def tokens_of_a_step(engine: EngineObserved, seen: Observation) -> Iterator[Found]:
    """Steps are full of prompt tokens."""
    text = (engine.settings or {}).get("max_num_tokens", "")
    if not text.isdecimal():
        told = "has none" if engine.settings is not None else _closed(seen.refusals.get(engine.name, ()))
        yield Missing(rule="tokens", lacks=f"{engine.name}: max_num_tokens, as its model configuration {told}")
        return
    most, context = int(text), _context_of_a_step(engine)
    if context is None or context < _FULL_STEP * most or not engine.mean(lambda each: each.waiting):
        return
    yield Advice(
        rule="tokens",
        limit=f"{engine.name}: steps are full of prompt tokens",
        evidence=f"a step computed {context:.0f} prompt tokens on average, and takes {most}; requests waited",
        change="Allow more tokens in a step.",
        setting="serving.max_num_tokens, engine.max_num_tokens",
        effect="prompts are computed in fewer steps; running answers wait longer for each of them",
        confidence="likely",
    )


def gpu(engine: EngineObserved, seen: Observation) -> Iterator[Found]:
    """The GPUs are mostly idle while requests run. Triton reports all visible GPUs, also unused ones."""
    used = [max(reading.gpus) for reading in seen.readings if reading.gpus]
    busy = engine.share(lambda each: bool(each.requests_scheduled))
    if not used or busy < _ALMOST_ALWAYS or sum(used) / len(used) >= _LOW_GPU:
        return
    yield Advice(
        rule="gpu",
        limit=f"{engine.name}: the GPUs wait for the host",
        evidence=f"requests ran in {_percent(busy)} of the readings, "
        f"the busiest GPU was used {_percent(sum(used) / len(used))} of the time",
        change="Use CUDA graphs, give the server more processor cores, or send more requests at once.",
        setting="serving.cuda_graph_mode (TensorRT engines), processors of the container",
        effect="shorter steps with few requests in flight",
        confidence="possible",
    )


def _closed(refusals: Collection[int]) -> str:
    """Why a configuration is unknown. Several addresses may have refused it, and it is unknown which one has the
    engine."""
    if HTTPStatus.UNAUTHORIZED not in refusals:
        return "is closed"
    key = f"needs an API key ({KEY_VARIABLE})"
    return key if set(refusals) == {HTTPStatus.UNAUTHORIZED} else f"is closed or {key}"


def _context_of_a_step(engine: EngineObserved) -> float | None:
    if not engine.seen[-1].counts_since_start:
        return engine.mean(lambda each: each.total_context_tokens)
    steps = engine.growth(lambda each: each.iteration_counter)
    tokens = engine.growth(lambda each: each.total_context_tokens)
    return tokens / steps if steps and tokens is not None else None


def _sure(often: float) -> Confidence:
    return "certain" if often >= _ALMOST_ALWAYS else "likely"


def _percent(value: float) -> str:
    return f"{value:.0%}"


def _waiting(engine: EngineObserved) -> str:
    return f"{engine.mean(lambda each: each.waiting) or 0:.1f}"
