"""All rules as one table, and their results for an observation."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from trtforge.advise import client_rules, engine_rules
from trtforge.advise.advice import Advice, Confidence, Found, Missing
from trtforge.advise.readings import EngineObserved, Observation

Judge = Callable[[Observation], Iterator[Found]]
OfEngine = Callable[[EngineObserved, Observation], Iterator[Found]]


@dataclass(frozen=True)
class Rule:
    """A rule: its name, and a description of what it checks."""

    name: str
    looks_at: str
    judge: Judge


def _each(judge: OfEngine) -> Judge:
    def judged(seen: Observation) -> Iterator[Found]:
        for engine in seen.engines:
            yield from judge(engine, seen)

    return judged


def _idle(seen: Observation) -> Iterator[Found]:
    """Advice if no request ran. Triton counts probes too, but they compute no prompt."""
    engines = seen.engines
    if any(engine.share(lambda each: bool(each.requests_active or each.requests_scheduled)) for engine in engines):
        return
    if engines and all(engine.seen[-1].counts_since_start for engine in engines):
        served = any(engine.growth(lambda each: each.total_context_tokens) for engine in engines)
    else:
        served = any(seen.model(name).count for name in seen.readings[-1].models)
    if not served and not any((seen.gateway or {}).values()):
        yield Advice(
            rule="idle",
            limit="nothing: the server was idle",
            evidence=f"no request ran or ended in {seen.seconds:.0f} s",
            change="Run this again while clients send their usual requests, or measure with `trtforge bench`.",
            setting="",
            effect="advice by figures under load",
            confidence="certain",
        )


RULES: Sequence[Rule] = (
    Rule("idle", "whether anything ran", _idle),
    Rule(
        "batch",
        "requests that wait while all places in the batch are taken and KV blocks are free",
        _each(engine_rules.batch),
    ),
    Rule("kv_full", "requests that wait while KV blocks are used up", _each(engine_rules.kv_full)),
    Rule(
        "kv_reserved",
        "requests that wait while places in the batch and KV blocks are free",
        _each(engine_rules.kv_reserved),
    ),
    Rule("paused", "requests that max_utilization pauses", _each(engine_rules.paused)),
    Rule("reuse", "KV blocks that later prompts share", _each(engine_rules.reuse)),
    Rule("drafts", "draft tokens that are accepted", _each(engine_rules.drafts)),
    Rule("tokens", "prompt tokens of a step against max_num_tokens", _each(engine_rules.tokens_of_a_step)),
    Rule("refused", "requests that a full queue refuses", client_rules.refused),
    Rule("deadlines", "requests that miss their deadline", client_rules.deadlines),
    Rule("leaving", "clients that leave before their answer has ended", client_rules.leaving),
    Rule("python_models", "Triton's queue against the compute time of each Python model", client_rules.python_models),
    Rule("gpu", "the use of the GPUs while requests run", _each(engine_rules.gpu)),
)


def judged(seen: Observation) -> tuple[list[Advice], list[Missing]]:
    """The advice of all rules, the most certain first, and missing data. An idle server gets no other advice."""
    advice, missing = [], []
    for rule in RULES:
        for found in rule.judge(seen):
            if isinstance(found, Missing):
                missing.append(found)
            else:
                advice.append(found)
        if rule.name == "idle" and advice:
            return advice, []
    if not seen.engines:
        missing.insert(0, Missing(rule="batch", lacks="engines: there are no gauges of any in these metrics"))
    order: dict[Confidence, int] = {"certain": 0, "likely": 1, "possible": 2}
    return sorted(advice, key=lambda each: order[each.confidence]), missing
