"""What metrics say limits a server: a table of rules, each a function of an observation."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from trtforge.advise.readings import EngineObserved, Observation
from trtforge.core.config_model import Config

Confidence = Literal["certain", "likely", "possible"]
_OFTEN, _ALMOST_ALWAYS = 0.5, 0.8  # of the readings
_KV_FULL = 0.9  # of the blocks
_FEW_REQUESTS = 10  # too few to judge by
_FEW_DRAFTS = 200
_LOW_ACCEPTANCE = 0.3
_LONG_QUEUE_MS = 20.0
_FULL_STEP = 0.9  # of max_num_tokens
_LOW_GPU = 0.5
_LEAVING = 0.05  # of the requests


class Advice(Config):
    """What limits, the figures that show it, what to change, and the effect to expect.

    `rule`: for programs. `setting`: a recipe's key or a server's option; empty if nothing is to be set.
    """

    rule: str
    limit: str
    evidence: str
    change: str
    setting: str
    effect: str
    confidence: Confidence


class Missing(Config):
    """A rule that could not be judged, and what it lacks."""

    rule: str
    lacks: str


Found = Advice | Missing
Judge = Callable[[Observation], Iterator[Found]]
OfEngine = Callable[[EngineObserved, Observation], Iterator[Found]]


@dataclass(frozen=True)
class Rule:
    """A rule by its name, and what it looks at in words."""

    name: str
    looks_at: str
    judge: Judge


def _each(judge: OfEngine) -> Judge:
    def judged(seen: Observation) -> Iterator[Found]:
        for engine in seen.engines:
            yield from judge(engine, seen)

    return judged


def _sure(often: float) -> Confidence:
    return "certain" if often >= _ALMOST_ALWAYS else "likely"


def _idle(seen: Observation) -> Iterator[Found]:
    """Probes of an idle server compute no prompt."""
    busy = any(
        engine.share(lambda each: bool(each.requests_active or each.requests_scheduled)) for engine in seen.engines
    )
    prompts = [engine.growth(lambda each: each.total_context_tokens) for engine in seen.engines]
    served = sum(seen.model(name).count for name in seen.readings[-1].models)
    if any(prompts) if all(engine.seen[-1].counts_since_start for engine in seen.engines) and prompts else served:
        busy = True
    if not busy and not any((seen.gateway or {}).values()):
        yield Advice(
            rule="idle",
            limit="nothing: the server was idle",
            evidence=f"no request ran or ended in {seen.seconds:.0f} s",
            change="Run this again while clients send their usual requests, or measure with `trtforge bench`.",
            setting="",
            effect="advice by figures under load",
            confidence="certain",
        )


def _batch(engine: EngineObserved, seen: Observation) -> Iterator[Found]:
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


def _kv_full(engine: EngineObserved, seen: Observation) -> Iterator[Found]:
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
        confidence=_sure(often) if engine.seen[-1].counts_since_start else "likely",  # others may count reusable ones
    )


def _kv_reserved(engine: EngineObserved, seen: Observation) -> Iterator[Found]:
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


def _paused(engine: EngineObserved, seen: Observation) -> Iterator[Found]:
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


def _reuse(engine: EngineObserved, seen: Observation) -> Iterator[Found]:
    reused = engine.growth(lambda each: each.blocks_reused)
    if reused is None:
        yield Missing(rule="reuse", lacks=f"{engine.name}: the gauge of reused KV blocks")
        return
    answered = max((seen.model(name).count for name in seen.readings[-1].models), default=0.0)
    if reused or answered < _FEW_REQUESTS:
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


def _drafts(engine: EngineObserved, seen: Observation) -> Iterator[Found]:
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


def _tokens(engine: EngineObserved, seen: Observation) -> Iterator[Found]:
    text = (engine.settings or {}).get("max_num_tokens", "")
    if not text.isdecimal():
        yield Missing(
            rule="tokens", lacks=f"{engine.name}: max_num_tokens, which its model configuration does not tell"
        )
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


def _context_of_a_step(engine: EngineObserved) -> float | None:
    if not engine.seen[-1].counts_since_start:
        return engine.mean(lambda each: each.total_context_tokens)
    steps = engine.growth(lambda each: each.iteration_counter)
    tokens = engine.growth(lambda each: each.total_context_tokens)
    return tokens / steps if steps and tokens is not None else None


def _refused(seen: Observation) -> Iterator[Found]:
    """What trtforge's engines refuse is an error within a stream, which Triton does not count; the gateway does."""
    refused = (seen.gateway or {}).get("429", 0)
    told = f"OpenAI's API answered 429 to {refused:.0f} of {sum((seen.gateway or {}).values()):.0f} requests"
    rejected = {name: seen.model(name).failures.get("REJECTED", 0) for name in seen.readings[-1].models}
    if not refused and any(rejected.values()):
        name = max(rejected, key=lambda each: rejected[each])
        refused, told = rejected[name], f"Triton rejected {rejected[name]:.0f} requests to {name}"
    if refused:
        yield Advice(
            rule="refused",
            limit="requests are refused, because the queue is full",
            evidence=f"{told} in {seen.seconds:.0f} s",
            change="Serve more requests at once (see the other advice, or add servers behind `trtforge gateway`); a "
            "longer queue only makes them wait.",
            setting="serving.max_queue_size, more servers",
            effect="fewer refusals; with a longer queue alone later answers",
            confidence="certain",
        )
    elif seen.gateway is None:
        yield Missing(
            rule="refused",
            lacks="the metrics of OpenAI's API: refusals within Triton's streams are counted nowhere else",
        )


def _deadlines(seen: Observation) -> Iterator[Found]:
    late, left = (seen.gateway or {}).get("504", 0), (seen.gateway or {}).get("499", 0)
    requests = sum((seen.gateway or {}).values())
    if late:
        yield Advice(
            rule="deadlines",
            limit="requests miss their deadline",
            evidence=f"OpenAI's API answered 504 to {late:.0f} of {requests:.0f} requests in {seen.seconds:.0f} s",
            change="Refuse earlier what would be late anyway, and find what they wait for (the other advice).",
            setting="serving.max_queue_seconds, serving.max_queue_size",
            effect="no work on answers that nobody gets",
            confidence="certain",
        )
    if requests >= _FEW_REQUESTS and left / requests >= _LEAVING:
        yield Advice(
            rule="leaving",
            limit="clients leave before their answer has ended",
            evidence=f"{left:.0f} of {requests:.0f} requests left in {seen.seconds:.0f} s (499)",
            change="Compare the clients' time limits with `trtforge bench`; tune for latency.",
            setting="`trtforge tune REPO --goal latency`",
            effect="fewer answers that are computed in vain",
            confidence="possible",
        )


def _python_models(seen: Observation) -> Iterator[Found]:
    """Requests that wait in Triton's queue of a text model, not in the engine's."""
    engines = set(seen.readings[-1].engines)
    for name in sorted(set(seen.readings[-1].models) - engines):
        model = seen.model(name)
        if model.count < _FEW_REQUESTS:
            continue
        queue, compute = (figure / model.count / 1e3 for figure in (model.queue_us, model.infer_us))
        if queue < _LONG_QUEUE_MS or queue < compute:
            continue
        yield Advice(
            rule="python_models",
            limit=f"{name}: requests wait for this model, before they reach the engine",
            evidence=f"{model.count:.0f} requests waited {queue:.1f} ms each in Triton's queue of {name}, and were "
            f"computed for {compute:.1f} ms",
            change="Give the model more instances if it has one for all requests, or the server more processor cores.",
            setting=f"instance_group of {name}/config.pbtxt, processors of the container",
            effect="a shorter wait for the first token",
            confidence="likely",
        )


def _gpu(engine: EngineObserved, seen: Observation) -> Iterator[Found]:
    used = [sum(reading.gpus) / len(reading.gpus) for reading in seen.readings if reading.gpus]
    busy = engine.share(lambda each: bool(each.requests_scheduled))
    if not used or busy < _ALMOST_ALWAYS or sum(used) / len(used) >= _LOW_GPU:
        return
    yield Advice(
        rule="gpu",
        limit=f"{engine.name}: the GPUs wait for the host",
        evidence=f"requests ran in {_percent(busy)} of the readings, "
        f"the GPUs were used {_percent(sum(used) / len(used))} of the time",
        change="Use CUDA graphs, give the server more processor cores, or send more requests at once.",
        setting="serving.cuda_graph_mode (TensorRT engines), processors of the container",
        effect="shorter steps with few requests in flight",
        confidence="possible",
    )


def _percent(value: float) -> str:
    return f"{value:.0%}"


def _waiting(engine: EngineObserved) -> str:
    return f"{engine.mean(lambda each: each.waiting) or 0:.1f}"


RULES: Sequence[Rule] = (
    Rule("idle", "whether anything ran", _idle),
    Rule("batch", "requests that wait while all places in the batch are taken and KV blocks are free", _each(_batch)),
    Rule("kv_full", "requests that wait while KV blocks are used up", _each(_kv_full)),
    Rule("kv_reserved", "requests that wait while places in the batch and KV blocks are free", _each(_kv_reserved)),
    Rule("paused", "requests that max_utilization pauses", _each(_paused)),
    Rule("reuse", "KV blocks that later prompts share", _each(_reuse)),
    Rule("drafts", "draft tokens that are accepted", _each(_drafts)),
    Rule("tokens", "prompt tokens of a step against max_num_tokens", _each(_tokens)),
    Rule("refused", "requests that a full queue refuses", _refused),
    Rule("deadlines", "requests that miss their deadline, and clients that leave", _deadlines),
    Rule("python_models", "Triton's queue against the compute time of each Python model", _python_models),
    Rule("gpu", "the use of the GPUs while requests run", _each(_gpu)),
)


def judged(seen: Observation) -> tuple[list[Advice], list[Missing]]:
    """The advice of all rules, the surest first, and what some of them lack. An idle server gets no other advice."""
    advice, missing = [], []
    for rule in RULES:
        for found in rule.judge(seen):
            if isinstance(found, Missing):
                missing.append(found)
            else:
                advice.append(found)
        if rule.name == "idle" and advice:
            return advice, []
    order: dict[Confidence, int] = {"certain": 0, "likely": 1, "possible": 2}
    return sorted(advice, key=lambda each: order[each.confidence]), missing
