"""The JSON schema of recipes takes and refuses the values that the parser takes and refuses, key by key."""

from collections.abc import Iterator
from typing import Any, get_args

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel

from trtforge.core.errors import ForgeError
from trtforge.core.recipe import Recipe

SCHEMA = Draft202012Validator(Recipe.model_json_schema())
VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 3, 48, 64, 4096, 10**7, 2**31 - 1, 2**31, 2**60, 2**63, 10**25),
    *(-0.5, 0.25, 1.5, 17.5, "", "none", "auto", "fp8", "xgrammar", "text", "-1", "1,2", "1;2,3", "1,", "a"),
    *("16GB", "1.5 MiB", " 64 kib ", "64 b", "16-GB", "1,5TB", "16GBs", "4.5bits", "4.5 BIT", "4 bytes"),
    *([], {}, [1], [0], [-1], [4096, 1024], [2, 2], [2**31], ["attn_q"], ["x", "y"], [[0], [0, 0]], [[0], [0]]),
    *([[]], [[-1]], {"nothing": 1}, {"enabled": False}, {"model": "x"}, {"max_rank": 8}, {"balance": True}),
)
NEEDED = {"name": "x", "model": {"source": "x"}}
BESIDE: dict[str, dict[str, Any]] = {"eagle3": {"model": "x"}, "attention_dp": {"balance": True}}


def keys(model: type[BaseModel] = Recipe, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The path of every key, nested ones too, with its type."""
    for name, field in model.model_fields.items():
        yield (*prefix, name), field.annotation
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from keys(kind, (*prefix, name))


KEYS = dict(keys())


def recipe_with(path: tuple[str, ...], value: object) -> dict[str, Any]:
    """A valid recipe with this value, and with the keys that the others of its feature need."""
    values: dict[str, Any] = {**NEEDED, "model": dict(NEEDED["model"])}
    place = values
    for parent in path[:-1]:
        place = place.setdefault(parent, dict(BESIDE.get(parent, {})))
    place[path[-1]] = value
    return values


def parser_takes(values: dict[str, Any]) -> bool:
    try:
        Recipe.parse(values, "test")
    except ForgeError:
        return False
    return True


def is_read_leniently(kind: Any, value: object) -> bool:
    """Whether the parser reads a value of another type, which the schema refuses: 0 and 1 as booleans, "-1" as -1."""
    kinds = {kind, *get_args(kind)}
    if bool in kinds:
        return value in (0, 1) and not isinstance(value, bool)
    return isinstance(value, str) and value == "-1" and not kinds.isdisjoint({int, float})


@pytest.mark.parametrize("path", KEYS, ids=".".join)
def test_schema_and_parser_agree(path: tuple[str, ...]) -> None:
    for value in VALUES:
        values = recipe_with(path, value)
        if not is_read_leniently(KEYS[path], value):
            assert SCHEMA.is_valid(values) == parser_takes(values), (value, list(SCHEMA.iter_errors(values)))


@pytest.mark.parametrize(
    ("key", "taken", "refused"),
    [
        ("engine.features.cuda_graphs", [True, False, None, {"enabled": False}], [1, "none", {"enabled": 3}]),
        *(
            (f"engine.features.{name}", [True, False, None, {}], [1, "true", []])
            for name in ("lora", "lookahead", "draft", "medusa", "eagle", "mtp", "ngram", "attention_dp")
        ),
        ("engine.features.eagle3", [None, {"model": "x"}], [True, False, {}]),
        ("engine.features.lora.host_memory", [1, "16GB", 2**63 - 1], [0, "16-GB", 2**63, None]),
        ("serving.max_attention_window_size", [4096, [4096], [1, 2**31 - 1]], [0, [], [0], 2**31, [2**31], "4096"]),
        ("serving.sink_token_length", [0, 2**31 - 1], [-1, 2**31]),
        *(
            (f"serving.{name}", [0, 3, 2**31 - 1, "0", "0,1"], [-1, 2**31, "0,", True, [0]])
            for name in ("gpu_device_ids", "participant_ids", "draft_gpu_device_ids")
        ),
        ("serving.kv_cache_tokens", [1, 2**50], [0, 2**50 + 1]),
        *(
            (f"gate.{name}", ["none", None, 0, 0.5], ["None", -1, True])
            for name in ("perplexity_increase", "top1_agreement", "kl_mean", "kl_p99")
        ),
        (
            "quantization.memory",
            [1, "16GB", "16gb", "1.5 TiB", " 5 "],
            ["lots", "", "-1GB", "1 2", "16 GB s", 0, 2**63],
        ),
        ("quantization.budget", [4, 4.5, "4.5bits", "4 Bit", "5"], ["lots", "4.5bytes", "bits", 0, 16.5]),
        ("engine.tokens_per_block", [1, 2, 64, 1 << 20, None], [0, 3, 48, 1 << 21]),
        *((f"parallel.{name}", [1, 1024], [0, 1025, 10**7]) for name in ("tp", "pp", "ep")),
        ("engine.max_seq_len", [2, 1 << 30], [1, (1 << 30) + 1]),
    ],
)
def test_values_that_validators_take_and_refuse_are_those_of_the_schema(
    key: str, taken: list[Any], refused: list[Any]
) -> None:
    for expected, values in ((True, taken), (False, refused)):
        for value in values:
            recipe = recipe_with(tuple(key.split(".")), value)
            assert (parser_takes(recipe), SCHEMA.is_valid(recipe)) == (expected, expected), value
