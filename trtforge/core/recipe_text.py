"""Parts of a recipe's text: its name, YAML scalars, and the command in its first line."""

import json
import re

LONGEST_NAME = 100


def recipe_name(text: str, suffix: str = "") -> str:
    """A recipe's name made from `text`, a file or a model, and `suffix`; only the suffix if nothing else is left."""
    cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("._-")
    return cleaned[: LONGEST_NAME - len(suffix)] + suffix


def yaml_scalar(text: str) -> str:
    """A text as a value in YAML, also in a flow mapping: quoted as JSON if it has other characters than usual paths."""
    return text if re.fullmatch(r"[\w./][\w./@+ -]*[\w./]", text) else json.dumps(text)


def commented(command: str) -> str:
    """A command as a comment of one line; characters that would end the line, or that YAML refuses, become `?`."""
    return "# " + "".join(letter if letter.isprintable() else "?" for letter in command)
