"""Generation in one call, for commands and tests: load an engine, generate for some prompts, close it."""

import queue
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trtforge.core.errors import ForgeError
from trtforge.engine_process.requests import Beam, FinishReason, GenerationRequest, Output, PromptLogProbs, TopLogProbs
from trtforge.runtime.engine import Engine, EngineOptions


@dataclass(frozen=True)
class Generation:
    """The complete output of a request."""

    tokens: tuple[int, ...]
    finish_reason: FinishReason
    error: ForgeError | None = None
    log_probs: tuple[float, ...] = ()
    cumulative_log_prob: float = 0.0
    reused_blocks: int = 0
    top_log_probs: tuple[TopLogProbs, ...] = ()
    prompt_log_probs: PromptLogProbs | None = None
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    beams: tuple[Beam, ...] = ()
    context_logits: bytes = b""
    generation_logits: bytes = b""


def generate(
    directory: Path, requests: Sequence[GenerationRequest], options: EngineOptions | None = None
) -> list[Generation]:
    """Load an engine and run the requests concurrently; results are in the order of the requests. Raises ForgeError."""
    with Engine.load(directory, options) as engine:
        return generate_with(engine, requests)


def generate_with(engine: Engine, requests: Sequence[GenerationRequest]) -> list[Generation]:
    """Like `generate`, with a loaded engine. Request ids are replaced by the requests' indices."""
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    named = [replace(request, request_id=str(index), streamed=False) for index, request in enumerate(requests)]
    engine.submit(*((request, outputs.put) for request in named))
    tokens: list[list[int]] = [[] for _ in requests]
    log_probs: list[list[float]] = [[] for _ in requests]
    top: list[list[TopLogProbs]] = [[] for _ in requests]
    prompts: dict[int, PromptLogProbs] = {}
    logits = [(bytearray(), bytearray()) for _ in requests]
    done: dict[int, Generation] = {}
    while len(done) < len(requests):
        output = outputs.get()
        index = int(output.request_id)
        tokens[index].extend(output.tokens)
        log_probs[index].extend(output.log_probs)
        top[index].extend(output.top_log_probs)
        logits[index][0].extend(output.context_logits)
        logits[index][1].extend(output.generation_logits)
        if output.prompt_log_probs is not None:
            prompts[index] = output.prompt_log_probs
        if output.finish_reason is not None:
            done[index] = Generation(
                tokens=tuple(tokens[index]),
                finish_reason=output.finish_reason,
                error=output.error,
                log_probs=tuple(log_probs[index]),
                cumulative_log_prob=output.cumulative_log_prob,
                reused_blocks=output.reused_blocks,
                top_log_probs=tuple(top[index]),
                prompt_log_probs=prompts.get(index),
                drafted_tokens=output.drafted_tokens,
                accepted_tokens=output.accepted_tokens,
                beams=output.beams,
                context_logits=bytes(logits[index][0]),
                generation_logits=bytes(logits[index][1]),
            )
    return [done[index] for index in range(len(requests))]
