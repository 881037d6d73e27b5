"""Tables in the documentation are those of the code. `python -m tests.test_docs` writes them."""

import re
from pathlib import Path
from typing import get_args

from pydantic import BaseModel

from trtforge.core.recipe import Recipe
from trtforge.models.registry import architectures, family_of

DOCS = Path(__file__).parent.parent / "docs"


def recipe_keys() -> str:
    rows = ["| key | default | meaning |", "|---|---|---|", *_rows(Recipe, "")]
    return "\n".join(rows)


def _rows(model: type[BaseModel], prefix: str) -> list[str]:
    rows = []
    for name, field in model.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            rows += _rows(annotation, f"{prefix}{name}.")
            continue
        default = "required" if field.is_required() else f"`{str(field.default).lower()}`"
        choices = [str(c) for c in get_args(annotation) if isinstance(c, str | int)]
        text = (field.description or "") + (f" One of {', '.join(choices)}." if choices else "")
        rows.append(f"| `{prefix}{name}` | {default} | {text} |")
    return rows


def families() -> str:
    rows = ["| Hugging Face architecture | family | TensorRT-LLM architecture |", "|---|---|---|"]
    for name in architectures():
        family = family_of(name)
        rows.append(f"| {name} | {family.name} | {family.architectures[name]} |")
    return "\n".join(rows)


TABLES = {"recipes.md": ("recipe-keys", recipe_keys), "formats.md": ("families", families)}


def with_table(text: str, marker: str, table: str) -> str:
    return re.sub(rf"<!-- {marker} -->\n.*?<!-- end -->", f"<!-- {marker} -->\n{table}\n<!-- end -->", text, flags=re.S)


def test_tables_are_those_of_the_code() -> None:
    for name, (marker, table) in TABLES.items():
        text = (DOCS / name).read_text()
        assert f"<!-- {marker} -->" in text
        assert with_table(text, marker, table()) == text, f"docs/{name}: run python -m tests.test_docs"


if __name__ == "__main__":
    for name, (marker, table) in TABLES.items():
        (DOCS / name).write_text(with_table((DOCS / name).read_text(), marker, table()))
