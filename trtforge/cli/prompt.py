"""The prompt of a command: its argument, or standard input."""

import sys

from trtforge.core.errors import ForgeError


def prompt_text(given: str) -> str:
    """`given`, or all of standard input for `-`. Raises ForgeError for an empty input, or bytes that are not UTF-8."""
    if given != "-":
        require_utf8(given)
        return given
    text = decoded(sys.stdin.buffer.read())
    if not text:
        raise ForgeError("standard input is empty", hint="Give a prompt, such as `echo Hello | trtforge infer -`.")
    return text


def require_utf8(*texts: str) -> None:
    """Raise ForgeError for an argument whose bytes are not UTF-8: Python makes lone surrogates of them."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            said = text.encode(errors="backslashreplace").decode()
            raise ForgeError(f"{said!r:.60} is not UTF-8 text", hint="Give UTF-8 text.") from None


def decoded(data: bytes) -> str:
    """Standard input as text. Raises ForgeError if it is not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ForgeError("standard input is not UTF-8 text", hint="Give a prompt as UTF-8 text.") from None
