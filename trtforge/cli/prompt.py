"""The prompt of a command: its argument, or standard input."""

import sys

from trtforge.core.errors import ForgeError


def prompt_text(given: str) -> str:
    """`given`, or all of standard input for `-`. Raises ForgeError for an empty one."""
    if given != "-":
        return given
    text = decoded(sys.stdin.buffer.read())
    if not text:
        raise ForgeError("standard input is empty", hint="Give a prompt, such as `echo Hello | trtforge infer -`.")
    return text


def decoded(data: bytes) -> str:
    """Standard input as text. Raises ForgeError if it is not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ForgeError("standard input is not UTF-8 text", hint="Give a prompt as UTF-8 text.") from None
