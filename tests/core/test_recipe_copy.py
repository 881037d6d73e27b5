"""Copies of recipes: paths and the name are replaced by key, and all else is as it was written."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtforge.core.errors import ForgeError
from trtforge.core.recipe import load_recipe
from trtforge.core.recipe_copy import copied_text
from trtforge.core.yaml_text import parse_yaml, replaced


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with what recipes name, beside them."""
    place = tmp_path / "first"
    for name in ("llama", "main", "none", "it's", "123", "true", "mine"):
        (place / name).mkdir(parents=True)
    (place / "g.txt").touch()
    return place


def copied(place: Path, text: str, name: str = "mine.yaml") -> str:
    """The text of a copy in another directory, without the directory of its paths; it loads as the recipe does."""
    recipe, copy = place / "recipe.yaml", place.parent / name
    recipe.write_bytes(text.encode())
    made = copied_text(recipe, copy)
    copy.write_bytes(made.encode())
    expected = load_recipe(recipe)
    assert load_recipe(copy) == expected.model_copy(update={"name": load_recipe(copy).name})
    return made.replace(f"{place}/", "/abs/")


@pytest.mark.parametrize(
    ("text", "copy"),
    [
        ("name: llama\nmodel: {source: llama}\n", "name: mine\nmodel: {source: /abs/llama}\n"),
        (
            "name: x\nmodel: {source: main, revision: main}\n",
            "name: mine\nmodel: {source: /abs/main, revision: main}\n",
        ),
        (
            "name: x\nmodel: {source: none}\nquantization: {format: none, kv_cache: none}\n",
            "name: mine\nmodel: {source: /abs/none}\nquantization: {format: none, kv_cache: none}\n",
        ),
        (
            "name: x\nmodel: {source: m}\ngate: {data: &d g.txt}\nquantization: {calibration: {data: *d}}\n",
            "name: mine\nmodel: {source: m}\ngate: {data: &d /abs/g.txt}\nquantization: {calibration: {data: *d}}\n",
        ),
        (
            "name: x\nmodel: {source: m}\nquantization:\n  calibration: &c {<<: {data: g.txt}, samples: 8}\n"
            "gate: {<<: [{samples: 4}], data: 'g.txt'} # end\n",
            "name: mine\nmodel: {source: m}\nquantization:\n  calibration: &c {<<: {data: /abs/g.txt}, samples: 8}\n"
            "gate: {<<: [{samples: 4}], data: /abs/g.txt} # end\n",
        ),
        ("name: x\nmodel: {source: 'it''s'}\n", 'name: mine\nmodel: {source: "/abs/it\'s"}\n'),
        ('name: x\nmodel: {source: "ll\\x61ma"}\n', "name: mine\nmodel: {source: /abs/llama}\n"),
        ('name: "x"\nmodel: {"source":"llama"}\n', 'name: mine\nmodel: {"source":/abs/llama}\n'),
        ("name: x\nmodel: {source: !!str 123}\n", "name: mine\nmodel: {source: !!str /abs/123}\n"),
        (
            "name: x\nmodel: {source: &a !!str # c\n  'true'}\n",
            "name: mine\nmodel: {source: &a !!str # c\n  /abs/true}\n",
        ),
        (
            "name: x\nmodel:\n  source: >- # the model\n    llama\n\n  # its branch\n  revision: main # llama\n",
            "name: mine\nmodel:\n  source: /abs/llama # the model\n\n  # its branch\n  revision: main # llama\n",
        ),
        ("name: x\nmodel:\n  source: |2-\n    llama", "name: mine\nmodel:\n  source: /abs/llama"),
        ("name: x\nmodel:\n  source: |-\n    llama", "name: mine\nmodel:\n  source: /abs/llama"),
        ("name: x\nmodel:\n  source: # c\n    llama\n", "name: mine\nmodel:\n  source: # c\n    /abs/llama\n"),
        ("name: 'x'   # x\r\nmodel: {source: llama}\r\n", "name: mine   # x\r\nmodel: {source: /abs/llama}\r\n"),
        ("{name: x, model: {source: llama}}\n", "{name: mine, model: {source: /abs/llama}}\n"),
        ("\ufeffname: x\nmodel: {source: llama}\n", "\ufeffname: mine\nmodel: {source: /abs/llama}\n"),
        ("name: mine\nmodel: {source: mine}\n", "name: mine\nmodel: {source: /abs/mine}\n"),
        ("name: &n x\nmodel: {source: m}\n", "name: &n mine\nmodel: {source: m}\n"),
    ],
)
def test_only_the_name_and_paths_are_replaced(place: Path, text: str, copy: str) -> None:
    assert copied(place, text) == copy


@pytest.mark.parametrize(
    ("features", "resolved"),
    [
        ("lora: {adapters: [org/a, main, 'none']}", "lora: {adapters: [/abs/org/a, /abs/main, /abs/none]}"),
        ("lora:\n      adapters:\n      - main", "lora:\n      adapters:\n      - /abs/main"),
        ("draft: {model: llama, engine: main}", "draft: {model: /abs/llama, engine: /abs/main}"),
        ("medusa: {model: llama}", "medusa: {model: /abs/llama}"),
        ("eagle: {model: llama}", "eagle: {model: /abs/llama}"),
        ("eagle3: {model: llama}", "eagle3: {model: /abs/llama}"),
    ],
)
def test_paths_of_features_are_replaced(place: Path, features: str, resolved: str) -> None:
    text = f"name: x\nmodel: {{source: m}}\nserving: {{draft_engine: none}}\nengine:\n  features:\n    {features}\n"
    copy = text.replace("name: x", "name: mine").replace("draft_engine: none", "draft_engine: /abs/none")
    assert copied(place, text) == copy.replace(features, resolved)


@pytest.mark.parametrize(
    ("file", "name"),
    [("123.yaml", '"123"'), ("true.yaml", '"true"'), ("1e5.yaml", "1e5"), ("c.yaml", "c"), ("_.yaml", "x")],
)
def test_a_name_stays_text(place: Path, file: str, name: str) -> None:
    assert copied(place, "name: x\nmodel: {source: m}\n", file) == f"name: {name}\nmodel: {{source: m}}\n"


def test_the_command_in_comments_builds_the_copy(place: Path) -> None:
    text = "# trtforge build x  one GPU\n# trtforge build x-2\nname: x\nmodel: {source: m}\n"
    command = f"# trtforge build {place.parent / 'mine.yaml'}  one GPU\n"
    assert copied(place, text) == f"{command}# trtforge build x-2\nname: mine\nmodel: {{source: m}}\n"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("name: x\nmodel: {revision: &m main, source: *m}\n", "model.revision"),
        ("name: &n x\nmodel: {source: m, revision: *n}\n", "model.revision"),
        ("name: &n fp8\nmodel: {source: m}\nquantization: {format: *n}\n", "quantization.format"),
        ("name: &n llama\nmodel: {source: *n}\n", "model.source"),
    ],
)
def test_an_alias_for_another_value_too_is_refused(place: Path, text: str, key: str) -> None:
    path = place / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ForgeError) as caught:
        copied_text(path, place.parent / "mine.yaml")
    assert caught.value.message == f"{path} cannot be copied: {key} would be wrong in the copy"
    assert caught.value.hint == "If an alias (*NAME) gives the value, write the value in its place, then copy again."


@given(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
    | st.sampled_from(
        ["", ".", "...", "~", "no", "null", "0x1F", "1_0", ".5", ".inf", "a b", "a #b", "<<", "2026-01-01"]
    )
)
def test_any_text_can_replace_a_scalar(value: str) -> None:
    text = "a: {b: x, c: [y, 'z']}\nd: |\n  x\n  y\n# end\n"
    written = replaced(text, {("a", "b"): value, ("a", "c", 1): value, ("d",): value, ("e",): "-", ("a", "c", 7): "-"})
    assert parse_yaml(written, "written", "-") == {"a": {"b": value, "c": ["y", value]}, "d": value}
    assert written.endswith("\n# end\n")
