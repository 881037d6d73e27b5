"""Server commands in a shell script: the quoting of their words, and the secret that each run creates."""

import shlex
from collections.abc import Iterable

from trtforge.core.errors import ForgeError

DOOR = "TRTFORGE_DOOR"
"""The variable with the random value that opens closed endpoints; each run of the script creates a new one."""
NEW_DOOR = f"export {DOOR}=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')"
"""The line that creates it."""


def joined(command: Iterable[str], indent: str) -> str:
    """A command, one word per line. Words with shell syntax get double quotes, as the script is in single quotes."""
    return f" \\\n{indent}".join(_quoted(word) for word in command)


def with_door(script: str, secret: str) -> str:
    """`script` with the variable in place of the secret."""
    return script.replace(secret, f"${{{DOOR}}}")


def _quoted(word: str) -> str:
    if "'" in word:
        raise ForgeError(f"{word}: a script cannot have a quote in an argument", hint="Use a path without it.")
    if shlex.quote(word) == word:
        return word
    escaped = "".join(f"\\{character}" if character in '"\\$`' else character for character in word)
    return f'"{escaped}"'
