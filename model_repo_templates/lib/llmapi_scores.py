"""Log probabilities as TensorRT-LLM's LLM API asks for and gives them.

`SamplingParams.logprobs` and `prompt_logprobs` are the numbers of likely tokens at each position. Answers have a
dictionary for each position (tensorrt_llm/executor/result.py): token to `Logprob(logprob, rank)`, with more entries
than were asked for where the token itself is not among them. Some releases leave that token out, and before there were
dictionaries an entry was the token's number.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from trtforge.core.errors import RequestError
from trtforge.engine_process.requests import PromptLogProbs, SamplingParams, TopLogProbs


def score_arguments(sampling: SamplingParams, known: frozenset[str]) -> Mapping[str, int]:
    """The arguments of SamplingParams that ask for the scores; `known`: those that the installed release has.

    Raises RequestError for one that it lacks.
    """
    count = max(1, sampling.top_log_probs)
    wanted = {"logprobs": sampling.return_log_probs, "prompt_logprobs": sampling.prompt_log_probs}
    arguments = {name: count for name, asked in wanted.items() if asked}
    for name in arguments:
        if name not in known:
            raise RequestError(
                f"return_{name}: the installed TensorRT-LLM's SamplingParams has no {name}",
                hint="Serve the engine with a later release of TensorRT-LLM.",
            )
    return arguments


def log_probs(tokens: Sequence[int], entries: Sequence[Any]) -> tuple[float, ...]:
    """Each token's log probability. Raises RequestError if the API tells only those of other tokens."""
    return tuple(_of_token("return_logprobs", token, entry) for token, entry in zip(tokens, entries, strict=True))


def top_log_probs(entries: Sequence[Any], count: int) -> tuple[TopLogProbs, ...]:
    """The `count` most likely tokens at each position; none if `count` is 0."""
    if not count:
        return ()
    return tuple(
        sorted(((token, float(each.logprob)) for token, each in entry.items()), key=lambda pair: -pair[1])[:count]
        for entry in entries
    )


def prompt_log_probs(prompt: Sequence[int], entries: Sequence[Any], count: int) -> PromptLogProbs:
    """The scores of the prompt's tokens but the first: the API's entry at a position is of the token after it.

    Raises RequestError if positions are missing: blocks that an earlier request left are not computed again.
    """
    tokens = prompt[1:]
    if len(entries) < len(tokens):
        raise RequestError(
            f"return_prompt_logprobs: TensorRT-LLM scored {len(entries)} of {len(prompt)} positions, because the "
            "others are in reused KV blocks; serve an engine with kv_reuse=false to score prompts",
            hint="Build it with --set engine.features.kv_reuse=false.",
        )
    scored = entries[: len(tokens)]
    values = [_of_token("return_prompt_logprobs", *each) for each in zip(tokens, scored, strict=True)]
    return PromptLogProbs(values, top_log_probs(scored, count))


def _of_token(asked: str, token: int, entry: Any) -> float:
    if not isinstance(entry, dict):
        return float(entry)
    if token not in entry:
        raise RequestError(
            f"{asked}: the installed TensorRT-LLM does not return the log probability of token {token}, only those of "
            f"the {len(entry)} most likely; top_logprobs up to 20 includes more tokens",
            hint="Serve the engine with a later release of TensorRT-LLM.",
        )
    return float(entry[token].logprob)
