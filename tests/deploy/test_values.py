"""YAML and templates of the same tree."""

import yaml
from hypothesis import given
from hypothesis import strategies as st

from trtforge.deploy.values import Value, When, as_template, as_yaml, plain, settings, text

COUNT = Value("replicas", 3)
NAME = Value("Release.Name", "llama", builtin=True)
LABELS = Value("labels", {})
OFF = Value("feature.enabled", False)
TREE = {
    "name": text(NAME, "-100%"),
    "count": COUNT,
    "words": ["yes", "'", "a: b", "- x", "# no", "", "1", "null", "µs", "$(x)"],
    "script": "one\n\n  two {{ $labels.pod }}\n",
    "open": "a\nb",
    "empty": [{}, []],
    "nested": [[1, 2], {"a": {"b": [True, None, 1.5]}}],
    "never": When(OFF, {"value": 1}),
    "always": When(OFF, [1], otherwise=True),
    "labels": When(LABELS, LABELS),
}


def test_yaml_is_read_back_as_it_was() -> None:
    assert yaml.safe_load(as_yaml(TREE)) == plain(TREE)
    assert plain(TREE)["name"] == "llama-100%"
    assert [key for key in plain(TREE) if key in ("never", "always", "labels")] == ["always"]


WORDS = st.text(st.characters(exclude_categories=("Cs",)), max_size=8) | st.text(
    " \n\r\t-:#{}[]a\"'%\x85\u2028", max_size=8
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | WORDS
TREES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3), max_leaves=8
)


@given(st.dictionaries(st.sampled_from("abc"), TREES, min_size=1))
def test_any_tree_is_read_back_as_it_was(tree: dict[str, object]) -> None:
    assert yaml.safe_load(as_yaml(tree)) == tree


def test_words_that_other_readers_take_for_another_type_are_quoted() -> None:
    """Of these PyYAML reads strings; kubectl's and Helm's YAML reads the number 1000, the number 8, true, and so on."""
    for word in ("1e3", "12E03", "08", "09", "0o17", "0X1F", "079", "1_0e3", "-_.1", ".5e3", "1.e5", "+.5", "6e-8"):
        assert as_yaml({"subPath": word, "names": [word]}) == f"subPath: '{word}'\nnames:\n  - '{word}'\n"
    for word in ("y", "Y", "n", "N"):
        assert as_yaml({word: word}) == f"'{word}': '{word}'\n"
    for word in ("127.0.0.1", "1.2.3", "v08", "1e3a", "0x", "26.07-py3", "yn", "e3"):
        assert as_yaml({"subPath": word}) == f"subPath: {word}\n"


def test_templates_read_settings_and_escape_what_is_not_theirs() -> None:
    lines = as_template(TREE).splitlines()
    assert lines[0] == 'name: {{ printf "%v-100%%" .Release.Name | toJson }}'
    assert lines[1] == "count: {{ (int64 .Values.replicas) | toJson }}"
    assert '    two {{ "{{" }} $labels.pod }}' in lines
    first = lines.index("{{- if .Values.feature.enabled }}")
    assert lines[first + 1 : first + 4] == ["never:", "  value: 1", "{{- end }}"]
    assert "{{- if not .Values.feature.enabled }}" in lines


def test_settings_are_found_everywhere() -> None:
    assert {each.path for each in settings(TREE)} == {"Release.Name", "replicas", "feature.enabled", "labels"}
