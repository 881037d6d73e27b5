"""Features as users write them: what is understood, and what is refused before anything is planned."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtforge.cli.features import parse_features
from trtforge.core.errors import ForgeError, UsageError
from trtforge.core.features import FeaturesConfig, LookaheadFeature
from trtforge.core.recipe import load_recipe


def features(**values: Any) -> FeaturesConfig:
    return FeaturesConfig.parse(values, "test")


def test_a_feature_may_be_asked_for_without_details() -> None:
    found = features(lora=True, lookahead=True, medusa=False)
    assert found.lora is not None
    assert found.lora.gpu_fraction == 0.05
    assert found.medusa is None
    assert found.lookahead == LookaheadFeature(window=4, ngram=3, verification=4)
    assert found.beyond_paging == ("lora", "lookahead")
    assert features(kv_reuse=False).beyond_paging == ()


# The first is the README of examples/lookahead, the second its meaningful minimum, the last the runtime's default.
@pytest.mark.parametrize(("window", "ngram", "verification", "tokens"), [(7, 7, 7, 83), (2, 2, 1, 2), (4, 3, 4, 15)])
def test_draft_tokens_of_lookahead(window: int, ngram: int, verification: int, tokens: int) -> None:
    assert LookaheadFeature(window=window, ngram=ngram, verification=verification).draft_tokens == tokens


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lookahead": True, "draft": True}, "draft and lookahead: an engine has only one"),
        ({"lookahead": {"ngram": 1}}, "greater than or equal to 2"),
        ({"lookahead": {"window": 1, "ngram": 2, "verification": 0}}, "no tokens would be drafted"),
        ({"medusa": {"choices": [[0, 1]]}}, r"\[0, 1\] needs the path to it, \[0\]"),
        ({"medusa": {"choices": [[0], [0]]}}, "distinct paths"),
        ({"medusa": {"choices": [[-1]]}}, "negative rank"),
        ({"weights_on_gpu": 1.5}, "less than or equal to 1"),
        ({"lora": {"modules": ["q_proj"]}}, "attn_q"),
        (
            {"lora": {"host_memory": 10**25}},
            r"lora\.host_memory: Input should be less than or equal to 92233720368",
        ),
        ({"lora": {"host_memory": "16-GB"}}, r"lora\.host_memory: not a size"),
    ],
)
def test_a_mistake_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ForgeError, match=message):
        features(**values)


def test_host_memory_of_adapters_may_be_a_size() -> None:
    found = features(lora={"host_memory": "16GB"}).lora
    assert found is not None
    assert found.host_memory == 16 * 10**9
    (written,) = parse_features(("lora.host_memory=2GiB",)).values()
    assert written == {"host_memory": "2GiB"}


def test_an_unknown_key_of_a_feature_names_the_nearest() -> None:
    with pytest.raises(ForgeError, match=r"unknown key lora\.rank") as caught:
        features(lora={"rank": 8})
    assert "Did you mean lora.max_rank?" in caught.value.hint


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["kv_reuse"], {"kv_reuse": True}),
        (["kv_reuse=false", "weights_on_gpu=0.5"], {"kv_reuse": False, "weights_on_gpu": 0.5}),
        (["lookahead={window: 7, ngram: 7}"], {"lookahead": {"window": 7, "ngram": 7}}),
        (["lora", "lora.max_rank=16"], {"lora": {"max_rank": 16}}),
        (["lora.modules=[attn_q]", "lora.max_rank=8"], {"lora": {"modules": ["attn_q"], "max_rank": 8}}),
    ],
)
def test_options_say_features(words: list[str], expected: dict[str, Any]) -> None:
    assert parse_features(words) == expected
    FeaturesConfig.parse(parse_features(words), "test")


def test_options_that_contradict_are_a_wrong_command_line() -> None:
    with pytest.raises(UsageError, match=r"--feature lora\.max_rank: lora is already False"):
        parse_features(["lora=false", "lora.max_rank=8"])


def test_paths_of_features_are_relative_to_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "small").mkdir()
    text = "name: a\nmodel: {source: m}\nengine: {features: {lora: {adapters: [adapter]}, draft: {model: small}}}\n"
    (tmp_path / "recipe.yaml").write_text(text)
    found = load_recipe(tmp_path / "recipe.yaml").engine.features
    assert found.lora is not None
    assert found.lora.adapters == (str(tmp_path / "adapter"),)
    assert found.draft is not None
    assert found.draft.model == str(tmp_path / "small")
    text = "name: a\nmodel: {source: m}\nengine: {features: {medusa: {model: small}}}\n"
    (tmp_path / "recipe.yaml").write_text(text)
    medusa = load_recipe(tmp_path / "recipe.yaml").engine.features.medusa
    assert medusa is not None
    assert medusa.model == str(tmp_path / "small")


@given(paths=st.sets(st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple), min_size=1, max_size=12))
def test_a_tree_is_taken_when_it_holds_the_way_to_every_node(paths: set[tuple[int, ...]]) -> None:
    whole = {path[:end] for path in paths for end in range(1, len(path) + 1)}
    choices = [list(path) for path in sorted(whole)]
    found = features(medusa={"choices": choices})
    assert found.medusa is not None
    assert found.medusa.choices == tuple(sorted(whole))
    inner = [path for path in whole if any(other[: len(path)] == path != other for other in whole)]
    for node in inner:
        with pytest.raises(ForgeError, match="needs the path to it"):
            features(medusa={"choices": [list(path) for path in whole if path != node]})
