"""The JSON schema of configurations: adds what validators accept and check, which pydantic does not know.

Not part of it: rules about several keys, and the texts that pydantic reads as numbers or booleans.
"""

from collections.abc import Callable
from typing import Any

from trtforge.core.plausible import LARGEST

Schema = dict[str, Any]


def also(form: Schema) -> Callable[[Schema], None]:
    """`json_schema_extra` of an optional field whose validator accepts values of one more form."""

    def add(field: Schema) -> None:
        field["anyOf"] = [*field["anyOf"], dict(form)]

    return add


def narrowed(**keywords: Any) -> Callable[[Schema], None]:
    """`json_schema_extra` of an optional field whose validator checks more than its type: the keywords that say so."""

    def add(field: Schema) -> None:
        field["anyOf"] = [form if form.get("type") == "null" else form | keywords for form in field["anyOf"]]

    return add


def add_limits(model: Schema) -> None:
    """Add the limits of `plausible.py` to the integers of a model's schema."""
    for name, field in model.get("properties", {}).items():
        if name in LARGEST:
            for form in field.get("anyOf", [field]):
                if form.get("type") == "integer":
                    form["maximum"] = min(LARGEST[name], form.get("maximum", LARGEST[name]))
