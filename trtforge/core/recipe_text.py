"""Parts of a recipe's text: its name, and the command in its first line."""

import re

LONGEST_NAME = 100


def recipe_name(text: str, suffix: str = "") -> str:
    """A recipe's name made from `text`, a file or a model, and `suffix`; only the suffix if nothing else is left."""
    cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("._-")
    return cleaned[: LONGEST_NAME - len(suffix)] + suffix


def commented(command: str) -> str:
    """A command as a comment of one line; characters that would end the line, or that YAML refuses, become `?`."""
    return "# " + "".join(letter if letter.isprintable() else "?" for letter in command)
