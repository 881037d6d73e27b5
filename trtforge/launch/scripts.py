"""Server commands inside of a shell script: how their words are quoted, and the secret that each run makes anew."""

import shlex
from collections.abc import Iterable

from trtforge.core.errors import ForgeError

DOOR = "TRTFORGE_DOOR"
"""The variable of the random value that opens closed endpoints, made anew by each run of the script."""
NEW_DOOR = f"export {DOOR}=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')"
"""The line that makes it."""


def joined(command: Iterable[str], indent: str) -> str:
    """A command, one word a line. Words with a meaning for a shell get double quotes: single ones hold the script."""
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
