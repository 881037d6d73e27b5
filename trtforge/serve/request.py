"""A client's request as input tensors of the text models, and its answer, errors and warnings."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from trtforge.core.errors import ForgeError
from trtforge.core.seeds import seed_of
from trtforge.core.server_errors import TRITON_NOT_LOADED, TRITON_STOPPING
from trtforge.engine_process.requests import Guide
from trtforge.formats.text_tensors import MESSAGES

Message = Mapping[str, str]
"""A chat message: role and content."""


@dataclass(frozen=True)
class Chat:
    """A prompt of chat messages, rendered by the served model's chat template."""

    messages: Sequence[Message]


Prompt = str | Chat
Value = str | int | float | bool | tuple[str, ...]

FINISH_REASON_INPUT = "return_finish_reason"
"""The input that asks for the finish reason; older repositories do not have it."""
_INCLUDE_STOP = "include_stop_str_in_output"
_THOUGHT_INPUT = "return_prompt_thought"
_COUNT_INPUTS = frozenset({"return_num_input_tokens", "return_num_output_tokens"})


@dataclass(frozen=True)
class Sampling:
    """Options of one request; None: the server's default (greedy).

    `finish_reason`, `counts`, `prompt_thought`: request the finish reason, the token counts and `Piece.prompt_thought`,
    which other repositories may lack.
    `cuts_stop`: the text ends before the first text of `stop`, however the tokenizer splits it. Without it, or if the
    repository lacks this, the text ends with the tokens of the stop word.
    """

    max_tokens: int = 64
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    min_tokens: int | None = None
    stop: tuple[str, ...] = ()
    bad: tuple[str, ...] = ()
    guide: Guide | None = None
    finish_reason: bool = False
    counts: bool = True
    cuts_stop: bool = False
    prompt_thought: bool = False

    def seeded(self) -> "Sampling":
        """These options with a random seed if tokens are sampled and no seed is given."""
        return replace(self, seed=seed_of(self.seed, draws=self.top_k is not None or self.top_p is not None))

    def known_to(self, inputs: frozenset[str]) -> "Sampling":
        """These options for a model with these inputs, without outputs that it lacks."""
        return replace(
            self,
            finish_reason=self.finish_reason and FINISH_REASON_INPUT in inputs,
            counts=self.counts and (not inputs or _COUNT_INPUTS.issubset(inputs)),
            cuts_stop=self.cuts_stop and _INCLUDE_STOP in inputs,
            prompt_thought=self.prompt_thought and _THOUGHT_INPUT in inputs,
        )

    def inputs(self, prompt: Prompt, *, stream: bool) -> Mapping[str, Value]:
        """Input tensor name to value, without options that are not set."""
        values: dict[str, Value | None] = {
            "text_input": prompt if isinstance(prompt, str) else None,
            MESSAGES: json.dumps(prompt.messages, ensure_ascii=False) if isinstance(prompt, Chat) else None,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "seed": self.seed,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "min_tokens": self.min_tokens,
            "stop_words": self.stop or None,
            _INCLUDE_STOP: False if self.stop and self.cuts_stop else None,
            "bad_words": self.bad or None,
            "guided_decoding_guide_type": self.guide.kind if self.guide else None,
            "guided_decoding_guide": (self.guide.text or None) if self.guide else None,
            "stream": stream,
            FINISH_REASON_INPUT: self.finish_reason or None,
            _THOUGHT_INPUT: self.prompt_thought or None,
            **dict.fromkeys(_COUNT_INPUTS, self.counts or None),
        }
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class Piece:
    """One response: new text (the whole text without streaming) and the token counts so far.

    `prompt_thought`: in the first response, the opening tag of reasoning with which the prompt of a chat ends, "" if it
    ends with none; None: not reported.
    """

    text: str
    input_tokens: int | None
    output_tokens: int | None
    finish_reason: str | None = None
    prompt_thought: str | None = None


@dataclass(frozen=True)
class Generated:
    """A finished answer. `first_token_seconds`: time to the first response, equal to `seconds` without streaming.

    `finish_reason`: stop, length or cancelled; None if it was not requested or the repository does not report it.
    """

    text: str
    input_tokens: int | None
    output_tokens: int | None
    seconds: float
    first_token_seconds: float
    finish_reason: str | None = None

    @property
    def pace(self) -> str:
        """The time to the first text, and the rate if tokens were counted, as text."""
        rate = f", {self.output_tokens / self.seconds:.0f} tokens/s" if self.output_tokens else ""
        return f"first text after {self.first_token_seconds * 1000:.0f} ms{rate}"


def request_warnings(sampling: Sampling) -> tuple[str, ...]:
    """Warnings about options with no effect or an unexpected one, shown before the request is sent."""
    found = []
    if sampling.temperature and not sampling.top_k and not sampling.top_p:
        found.append(
            f"temperature {sampling.temperature:g} has no effect without top-k or top-p: generation is greedy, as in "
            "TensorRT-LLM. Add --top-p 1 to sample from all tokens"
        )
    if "" in sampling.stop:
        found.append("an empty stop word never matches")
    return tuple(found)


def answer_warnings(sampling: Sampling, answer: Generated) -> tuple[str, ...]:
    """Warnings about an answer: that the engine cut it before `max_tokens`."""
    count = answer.output_tokens
    if answer.finish_reason != "length" or count is None or count >= sampling.max_tokens:
        return ()
    longest = "" if answer.input_tokens is None else f", which prompt and answer reach at {answer.input_tokens + count}"
    return (f"the answer was cut after {count} of {sampling.max_tokens} tokens by the engine's max_seq_len{longest}",)


class Unreachable(ForgeError):
    """No server accepts connections at the address, or it closed the connection."""


def unreachable(url: str) -> Unreachable:
    """The error for a server that does not answer."""
    hint = "Start one with `trtforge serve REPO`, or give the HOST:PORT of one that runs."
    return Unreachable(f"no server answers at {url}", hint=hint)


def silent(url: str, seconds: float) -> ForgeError:
    """The error for a server that accepted a request and does not answer."""
    return ForgeError(f"the server at {url} did not answer within {seconds:.0f} s", hint="Look at the server's log.")


class Unavailable(ForgeError):
    """The server cannot take the request now: its queue is full, it is stopping, or its engine is not loaded."""


class Refused(ForgeError):
    """The server refuses this request, for example because it is too long."""


def not_loaded(message: str) -> Unavailable:
    """The error for a request that Triton refused because it is stopping or has not loaded the model."""
    named = re.search(rf"'([^']*)' {TRITON_NOT_LOADED}", message)
    model = named[1] if named else "the model"
    return Unavailable(
        f"the server does not serve {model} now: it is stopping, or the model is not loaded",
        hint="Look at its log, and start it again with `trtforge serve REPO` if it ended.",
    )


def refused(message: str) -> ForgeError:
    """The error for a request that the server refused."""
    if "UNAVAILABLE:" in message:
        return Unavailable(f"the server refused the request: {message}", hint="Send it again later.")
    if TRITON_NOT_LOADED in message or TRITON_STOPPING in message:
        return not_loaded(message)
    if "unknown model" in message:
        return ForgeError(
            f"the server refused the request: {message}",
            hint="Give the name of a text model of this server with --model; `trtforge serve REPO` serves ensemble.",
        )
    return Refused(f"the server refused the request: {message}", hint="Correct the request and send it again.")
