"""Malformed gRPC requests to all five models, each with the fields of which its error must name one."""

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.assault.messages import (
    TEXT_MODELS,
    Input,
    engine_inputs,
    message,
    numbers,
    strings,
    text_inputs,
)

_NAN, _INF = math.nan, math.inf
_MOST = 2**31 - 1
_BAD_TEXT = (b"\xff\xfe", b"\xed\xa0\x80 surrogate", b"cut \xe2\x82")
VOCABULARY = 2048
"""Of the demo model."""


@dataclass(frozen=True)
class Case:
    """A malformed request. `fields`: names, of which the error must hold one; `may_answer`: it may also be served."""

    name: str
    model: str
    inputs: Mapping[str, Input]
    fields: tuple[str, ...]
    may_answer: bool = False
    raw: tuple[bytes, ...] | None = field(default=None)
    """Sent in place of the inputs' own contents."""

    def request(self) -> Any:
        """The message."""
        made = message(self.model, self.inputs)
        if self.raw is not None:
            del made.raw_input_contents[:]
            made.raw_input_contents.extend(self.raw)
        return made

    @property
    def unary(self) -> bool:
        """Whether the model answers once a request."""
        return self.model in ("preprocessing", "postprocessing")


def cases() -> list[Case]:
    """All of them, in a fixed order."""
    found = [case for model in TEXT_MODELS for case in _of_text_model(model)]
    return [*found, *_of_engine(), *_of_preprocessing(), *_of_postprocessing()]


def _changed(model: str, base: Mapping[str, Input], name: str, what: str, given: Input, *fields: str) -> Case:
    return Case(f"{model}: {name} {what}", model, {**base, name: given}, (name, *fields))


_TEXT_NUMBERS: tuple[tuple[str, str, tuple[float, ...]], ...] = (
    ("max_tokens", "INT32", (0, -1, -(2**31))),
    ("num_return_sequences", "INT32", (0, -1, _MOST)),
    ("beam_width", "INT32", (0, -1, _MOST)),
    ("top_k", "INT32", (-1, -(2**31))),
    ("top_p", "FP32", (_NAN, _INF, -_INF, -0.5, 1.5)),
    ("temperature", "FP32", (_NAN, _INF, -_INF, -1.0)),
    ("repetition_penalty", "FP32", (_NAN, _INF, 0.0, -1.0)),
    ("presence_penalty", "FP32", (_NAN, _INF)),
    ("frequency_penalty", "FP32", (_NAN, -_INF)),
    ("length_penalty", "FP32", (_NAN,)),
    ("min_tokens", "INT32", (-1,)),
    ("end_id", "INT32", (VOCABULARY, _MOST)),
    ("lora_task_id", "UINT64", (7,)),
    ("return_context_logits", "BOOL", (1,)),
    ("priority", "FP32", (_NAN, _INF, -0.5, 1.5)),
)


def _of_text_model(model: str) -> Iterator[Case]:
    base = text_inputs("The function returns", 4)
    for name, dtype, values in _TEXT_NUMBERS:
        for value in values:
            yield _changed(model, base, name, f"is {value}", numbers(dtype, (1, 1), value), *_ALIASES.get(name, ()))
    huge = {**base, "max_tokens": numbers("INT32", (1, 1), _MOST)}
    yield Case(f"{model}: max_tokens is {_MOST}", model, huge, ("max_tokens",), may_answer=True)
    texts = ("text_input", "prompt", "QUERY")
    for bad in _BAD_TEXT:
        yield _changed(model, base, "text_input", f"is {bad!r}", strings((1, 1), bad), *texts)
        yield _changed(model, base, "stop_words", f"is {bad!r}", strings((1, 1), bad), "STOP_WORDS_DICT")
    yield _changed(model, base, "bad_words", "is no UTF-8", strings((1, 1), _BAD_TEXT[0]), "BAD_WORDS_DICT")
    # A tokenizer that puts a token before every text makes a prompt of nothing.
    empty = {**base, "text_input": strings((1, 1), b"")}
    yield Case(f"{model}: text_input is empty", model, empty, ("text_input", *texts), may_answer=True)
    yield _changed(model, base, "text_input", "is too long", strings((1, 1), b"word " * 100_000), *texts)
    yield _changed(model, base, "text_input", "holds two", strings((1, 2), b"a", b"b"))
    yield _changed(model, base, "text_input", "holds none", strings((1, 0)))
    yield _changed(model, base, "embedding_bias_words", "without weights", strings((1, 1), b"a"))
    weights = {**base, "embedding_bias_words": strings((1, 1), b"a")}
    for what, given in (
        ("are NaN", numbers("FP32", (1, 1), _NAN)),
        ("are too many", numbers("FP32", (1, 2), 1.0, 2.0)),
    ):
        yield _changed(model, weights, "embedding_bias_weights", what, given)
    yield _changed(model, base, "guided_decoding_guide_type", "is xml", strings((1, 1), b"xml"))
    yield _changed(model, base, "max_tokens", "is INT64", numbers("INT64", (1, 1), 4))
    yield _changed(model, base, "text_input", "is INT32", numbers("INT32", (1, 1), 4))
    yield _changed(model, base, "temperature", "is FP64", numbers("FP64", (1, 1), 1.0))
    yield _changed(model, base, "stream", "is INT32", numbers("INT32", (1, 1), 1))
    yield _changed(model, base, "seed", "is INT64", numbers("INT64", (1, 1), 1))
    yield _changed(model, base, "max_tokens", "holds two", numbers("INT32", (1, 2), 4, 4))
    yield _changed(model, base, "max_tokens", "has no batch", numbers("INT32", (1,), 4))
    yield _changed(model, base, "temperature", "has another batch", numbers("FP32", (2, 1), 1.0, 1.0), "batch")
    yield _changed(model, base, "max_tokens", "has a negative size", Input("INT32", (-1, 1), b"\4\0\0\0"), "shape")
    yield _changed(model, base, "max_tokens", "claims 2^40", Input("INT32", (1, 2**40), b"\4\0\0\0"))
    yield _changed(model, base, "max_tokens", "is too short", Input("INT32", (1, 1), b"\4"))
    yield _changed(model, base, "max_tokens", "is too long", Input("INT32", (1, 1), b"\4" * 8))
    yield _changed(model, base, "nonsense", "is unknown", numbers("INT32", (1, 1), 4))
    lies = {"too long": struct.pack("<I", 1000) + b"text", "endless": b"\xff\xff\xff\xffab", "cut": b"\1\0"}
    for what, raw in lies.items():
        yield _changed(model, base, "text_input", f"has a length that is {what}", Input("BYTES", (1, 1), raw))
    for name in ("text_input", "max_tokens"):
        rest = {key: value for key, value in base.items() if key != name}
        yield Case(f"{model}: without {name}", model, rest, (name, "inputs", "QUERY", "REQUEST_OUTPUT_LEN"))
    yield Case(f"{model}: contents are missing", model, base, ("raw_input_contents", *base), raw=(base["stream"].raw,))


_ALIASES: Mapping[str, tuple[str, ...]] = {
    "max_tokens": ("request_output_len",),
    "top_k": ("runtime_top_k",),
    "top_p": ("runtime_top_p",),
    "length_penalty": ("len_penalty",),
}
"""The engine model's names of a text model's inputs."""


_ENGINE_NUMBERS: tuple[tuple[str, str, tuple[float, ...]], ...] = (
    ("request_output_len", "INT32", (0, -1)),
    ("num_return_sequences", "INT32", (0, -5, _MOST)),
    ("beam_width", "INT32", (-1, 1000, _MOST)),
    ("runtime_top_k", "INT32", (-1,)),
    ("runtime_top_p", "FP32", (_NAN, -1.0, 2.0)),
    ("temperature", "FP32", (_NAN, _INF, -1.0)),
    ("repetition_penalty", "FP32", (_NAN, 0.0)),
    ("presence_penalty", "FP32", (_INF,)),
    ("frequency_penalty", "FP32", (_NAN,)),
    ("min_tokens", "INT32", (-1,)),
    ("end_id", "INT32", (VOCABULARY,)),
    ("input_lengths", "INT32", (0, -1, 4, _MOST)),
    ("lora_task_id", "UINT64", (1,)),
)


def _of_engine() -> Iterator[Case]:
    model, base = "tensorrt_llm", engine_inputs((5, 6, 7), 4)
    for name, dtype, values in _ENGINE_NUMBERS:
        for value in values:
            yield _changed(
                model, base, name, f"is {value}", numbers(dtype, (1, 1), value), name.removeprefix("runtime_")
            )
    for ids in ((5, -1, 7), (5, VOCABULARY, 7), (_MOST, 6, 7)):
        yield _changed(model, base, "input_ids", f"are {ids}", numbers("INT32", (1, 3), *ids))
    yield _changed(model, base, "input_ids", "are none", numbers("INT32", (1, 0)), "input_lengths")
    longer = engine_inputs((5,) * 5000, 4)
    yield Case("tensorrt_llm: input_ids are too many", model, longer, ("input_ids", "input_lengths", "prompt"))
    for name in ("stop_words_list", "bad_words_list"):
        # Row 0 holds the ids of all words, row 1 the end of each word in it, then -1.
        for what, flat in (
            ("ends beyond the ids", (5, 6, 900, -1)),
            ("ends go back", (5, 6, 2, 1)),
            ("has a negative end", (5, 6, -7, -1)),
            ("is beyond the vocabulary", (VOCABULARY, -3, 1, -1)),
        ):
            yield _changed(model, base, name, what, numbers("INT32", (1, 2, 2), *flat), name.split("_")[0])
        yield _changed(model, base, name, "has three rows", numbers("INT32", (1, 3, 1), 5, 1, 1))
    yield _changed(model, base, "embedding_bias", "is too short", numbers("FP32", (1, 3), 1.0, 2.0, 3.0))
    nan = numbers("FP32", (1, VOCABULARY), *([_NAN] * VOCABULARY))
    yield _changed(model, base, "embedding_bias", "is NaN", nan)
    yield _changed(model, base, "draft_input_ids", "is beyond the vocabulary", numbers("INT32", (1, 2), 5, VOCABULARY))
    yield _changed(model, base, "draft_logits", "is without draft tokens", numbers("FP32", (1, 1, 2), 5.0, 6.0))
    yield _changed(model, base, "draft_acceptance_threshold", "is without draft tokens", numbers("FP32", (1, 1), 0.5))
    for name in ("starts", "ends", "priorities"):
        ranged = {
            f"retention_token_range_{each}": numbers("INT32", (1, 2), *values)
            for each, values in (("starts", (0, 4)), ("ends", (4, -1)), ("priorities", (80, 20)))
        }
        own = f"retention_token_range_{name}"
        for value in (-5, _MOST):
            given = {**base, **ranged, own: numbers("INT32", (1, 2), value, value)}
            yield Case(f"{model}: {own} are {value}", model, given, ("retention_token_range",))
        given = {key: each for key, each in {**base, **ranged}.items() if key != own}
        yield Case(f"{model}: {own} is missing", model, given, ("retention_token_range",))
    for name in ("retention_decode_priority", "retention_decode_duration_ms"):
        yield _changed(model, base, name, "is -5", numbers("INT32", (1, 1), -5))
    yield _changed(model, base, "input_ids", "is INT64", numbers("INT64", (1, 3), 5, 6, 7))
    yield _changed(model, base, "input_ids", "has another batch", numbers("INT32", (2, 3), 5, 6, 7, 5, 6, 7), "batch")
    yield _changed(model, base, "input_ids", "is too short", Input("INT32", (1, 3), b"\5\0\0\0"))
    yield _changed(model, base, "input_lengths", "holds two", numbers("INT32", (1, 2), 3, 3))
    yield _changed(model, base, "nonsense", "is unknown", numbers("INT32", (1, 1), 4))
    for name in base:
        rest = {key: value for key, value in base.items() if key != name}
        yield Case(f"tensorrt_llm: without {name}", model, rest, (name, "inputs"))


def _of_preprocessing() -> Iterator[Case]:
    model = "preprocessing"
    base = {"QUERY": strings((1, 1), b"The file"), "REQUEST_OUTPUT_LEN": numbers("INT32", (1, 1), 4)}
    for bad in _BAD_TEXT:
        yield _changed(model, base, "QUERY", f"is {bad!r}", strings((1, 1), bad))
    empty = {**base, "QUERY": strings((1, 1), b"")}
    yield Case(f"{model}: QUERY is empty", model, empty, ("QUERY", "prompt"), may_answer=True)
    yield _changed(model, base, "QUERY", "is too long", strings((1, 1), b"word " * 100_000), "prompt")
    yield _changed(model, base, "QUERY", "is INT32", numbers("INT32", (1, 1), 4))
    yield _changed(model, base, "QUERY", "holds two", strings((1, 2), b"a", b"b"))
    yield _changed(model, base, "QUERY", "has a length that lies", Input("BYTES", (1, 1), struct.pack("<I", 99) + b"a"))
    for name in ("STOP_WORDS_DICT", "BAD_WORDS_DICT", "EMBEDDING_BIAS_WORDS", "DECODER_QUERY"):
        yield _changed(model, base, name, "is no UTF-8", strings((1, 1), b"\xff"), name.lower())
    words = {**base, "EMBEDDING_BIAS_WORDS": strings((1, 1), b"a")}
    yield Case(f"{model}: words without weights", model, words, ("EMBEDDING_BIAS_W", "embedding_bias_w"))
    nan = {**words, "EMBEDDING_BIAS_WEIGHTS": numbers("FP32", (1, 1), _NAN)}
    yield Case(f"{model}: weights are NaN", model, nan, ("EMBEDDING_BIAS_WEIGHTS", "embedding_bias_weights"))
    yield _changed(model, base, "REQUEST_OUTPUT_LEN", "is FP32", numbers("FP32", (1, 1), 4.0))
    yield _changed(model, base, "END_ID", "holds two", numbers("INT32", (1, 2), 1, 2))
    for name in base:
        yield Case(f"{model}: without {name}", model, {k: v for k, v in base.items() if k != name}, (name, "inputs"))


def _of_postprocessing() -> Iterator[Case]:
    model = "postprocessing"
    base = {
        "TOKENS_BATCH": numbers("INT32", (1, 1, 3), 5, 6, 7),
        "SEQUENCE_LENGTH": numbers("INT32", (1, 1), 3),
    }
    for ids in ((5, -1, 7), (5, VOCABULARY, 7), (5, _MOST, 7)):
        yield _changed(model, base, "TOKENS_BATCH", f"is {ids}", numbers("INT32", (1, 1, 3), *ids))
    for length in (-1, 4, _MOST):
        yield _changed(model, base, "SEQUENCE_LENGTH", f"is {length}", numbers("INT32", (1, 1), length))
    yield _changed(model, base, "SEQUENCE_LENGTH", "holds two", numbers("INT32", (1, 2), 3, 3))
    yield _changed(model, base, "SEQUENCE_LENGTH", "is INT64", numbers("INT64", (1, 1), 3))
    yield _changed(model, base, "TOKENS_BATCH", "has two dimensions", numbers("INT32", (1, 3), 5, 6, 7))
    yield _changed(model, base, "TOKENS_BATCH", "is too short", Input("INT32", (1, 1, 3), b"\5\0\0\0"))
    yield _changed(model, base, "nonsense", "is unknown", numbers("INT32", (1, 1), 4))
    for name in base:
        yield Case(f"{model}: without {name}", model, {k: v for k, v in base.items() if k != name}, (name, "inputs"))
