"""What guided decoding costs: requests with JSON schemas against as many tokens without.

64 requests arrive together on an engine that runs 32; each has one of 16 schemas of objects with strings and numbers,
whose grammars are compiled, and is greedy, where the cost shows most. The same prompts without a guide then ask for
exactly as many tokens.
"""

import json
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path

from trtforge.engine_process.requests import GenerationRequest, Guide
from trtforge.runtime.engine import Engine, EngineOptions
from trtforge.runtime.generate import generate_with

REQUESTS, BATCH_SIZE, SCHEMAS, END_IDS = 64, 32, 16, frozenset((1, 3))


@dataclass(frozen=True)
class Measured:
    """Tokens per second of CPU time of both, one figure a run: other programs on the machine do not matter."""

    tokens: int
    guided: tuple[float, ...]
    free: tuple[float, ...]

    @property
    def cost(self) -> float:
        """Median loss, as a share; the two of a run are compared with each other."""
        return statistics.median(1 - ours / theirs for ours, theirs in zip(self.guided, self.free, strict=True))


def schema(number: int) -> str:
    """An object of about a hundred tokens."""
    name = {"type": "string", "minLength": 12, "maxLength": 16 + number}
    people = {"type": "array", "items": {"type": "object", "properties": {"name": name, "age": {"type": "integer"}}}}
    people["items"] |= {"required": ["name", "age"], "additionalProperties": False}
    people |= {"minItems": 3, "maxItems": 4}
    return json.dumps({"type": "object", "properties": {f"list_{number}": people}, "required": [f"list_{number}"]})


def measure(directory: Path, vocab_size: int, runs: int) -> Measured:
    """Both ways `runs` times, one after the other."""
    guided = [
        GenerationRequest(
            str(number),
            tuple((number * 37 + place * 11) % (vocab_size - 8) + 8 for place in range(32)),
            256,
            end_ids=END_IDS,
            guide=Guide("json_schema", schema(number % SCHEMAS)),
        )
        for number in range(REQUESTS)
    ]
    rates: tuple[list[float], list[float]] = ([], [])
    with Engine.load(directory, EngineOptions(kv_reuse=False, max_batch_size=BATCH_SIZE)) as engine:
        lengths = [len(answer.tokens) for answer in generate_with(engine, guided)]
        # An end id takes a step too, and is not counted: the others ask for one token more.
        free = [
            replace(request, guide=None, end_ids=frozenset(), max_tokens=length + 1)
            for request, length in zip(guided, lengths, strict=True)
        ]
        generate_with(engine, free)
        for _ in range(runs):
            for requests, found in zip((guided, free), rates, strict=True):
                start = time.process_time()
                generate_with(engine, requests)
                found.append((sum(lengths) + len(lengths)) / (time.process_time() - start))
    return Measured(sum(lengths), tuple(rates[0]), tuple(rates[1]))
