"""A client's request as the input tensors of the text models, its answer and its errors."""

from collections.abc import Mapping
from dataclasses import dataclass

from trtforge.core.errors import ForgeError

Value = str | int | float | bool | tuple[str, ...]


@dataclass(frozen=True)
class Sampling:
    """Options of one request; None: the server's default (greedy)."""

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

    def inputs(self, prompt: str, *, stream: bool) -> Mapping[str, Value]:
        """Input tensor name to value, without options that are not set."""
        values: dict[str, Value | None] = {
            "text_input": prompt,
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
            "bad_words": self.bad or None,
            "stream": stream,
            "return_num_input_tokens": True,
            "return_num_output_tokens": True,
        }
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class Piece:
    """One response: new text (the whole text without streaming) and the token counts so far."""

    text: str
    input_tokens: int | None
    output_tokens: int | None


@dataclass(frozen=True)
class Generated:
    """A finished answer. `first_token_seconds`: time to the first response, equal to `seconds` without streaming."""

    text: str
    input_tokens: int | None
    output_tokens: int | None
    seconds: float
    first_token_seconds: float


def unreachable(url: str) -> ForgeError:
    """The error for a server that does not answer."""
    return ForgeError(f"no server answers at {url}", hint="Start one with `trtforge serve REPO`, or give its --url.")


def silent(url: str, seconds: float) -> ForgeError:
    """The error for a server that accepted a request and does not answer."""
    return ForgeError(f"the server at {url} did not answer within {seconds:.0f} s", hint="Look at the server's log.")


class Unavailable(ForgeError):
    """The server cannot take the request now: its queue is full, it is stopping, or its engine is not loaded."""


def refused(message: str) -> ForgeError:
    """The error for a request that the server refused."""
    if "UNAVAILABLE:" in message:
        return Unavailable(f"the server refused the request: {message}", hint="Send it again later.")
    return ForgeError(f"the server refused the request: {message}", hint="Correct the request and send it again.")
