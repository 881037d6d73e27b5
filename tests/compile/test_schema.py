"""Every configuration that is ever emitted, held against what TensorRT-LLM's classes declare, release by release."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from tests.compile.checkpoints import drafting, engine, llama
from tests.compile.test_build_config import plan
from tests.compile.upstream import RELEASES, schema, sections
from trtforge.compile.build_config import in_flight_batching
from trtforge.compile.tensorrt_llm import commands
from trtforge.core.errors import ForgeError
from trtforge.formats.releases import Section, release
from trtforge.formats.triton import parameters
from trtforge.models.formats import CACHE_ALGORITHMS, FORMATS
from trtforge.plan.runtime_keys import runtime_keys

SECTIONS: tuple[Section, ...] = ("build_config", "plugin_config", "lora_config")
RATES = st.sampled_from([0.0, 0.4, 1.0])
METHODS: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({}),
    st.builds(lambda tokens: {"draft": {"tokens": tokens}}, st.integers(1, 32)),
    st.builds(
        lambda window, ngram, verification: {
            "lookahead": {"window": window, "ngram": ngram, "verification": verification}
        },
        st.integers(2, 9),
        st.integers(2, 9),
        st.integers(0, 9),
    ),
    st.sampled_from([{"medusa": True}, {"medusa": {"choices": [[0], [0, 0], [1]]}}, {"eagle": True}]),
)
LORA = st.sampled_from(
    [{}, {"lora": True}, {"lora": {"max_rank": 8, "modules": ["attn_q", "mlp_4h_to_h"]}}, {"lora": {"max_rank": 256}}]
)
SWITCHES = st.fixed_dictionaries(
    {},
    optional={
        name: st.booleans()
        for name in ("kv_reuse", "chunked_context", "multiple_profiles", "context_logits", "generation_logits")
    },
)
FEATURES = st.builds(
    lambda method, lora, switches, rate: {**switches, **method, **lora, "weights_on_gpu": rate},
    METHODS,
    LORA,
    SWITCHES,
    RATES,
)


@cache
def validator(version: str) -> Draft202012Validator:
    Draft202012Validator.check_schema(schema(version))
    return Draft202012Validator(schema(version))


@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize("section", SECTIONS)
def test_the_release_data_is_what_the_classes_declare(version: str, section: Section) -> None:
    assert set(release(version).fields(section)) == sections(version)[section]


@pytest.mark.parametrize("version", RELEASES)
def test_the_schema_refuses_what_a_release_does_not_know(version: str) -> None:
    good = plan(version, llama()).to_json()
    assert validator(version).is_valid(good)
    assert not validator(version).is_valid({**good, "max_output_len": 1})
    for name in ("plugin_config", "lora_config"):
        nested = good[name]
        assert isinstance(nested, dict)
        assert not validator(version).is_valid({**good, name: {**nested, "use_custom_all_reduce": True}})
    plugins = good["plugin_config"]
    assert isinstance(plugins, dict)
    assert not validator(version).is_valid({**good, "plugin_config": {**plugins, "lora_plugin": "enable"}})
    assert not validator(version).is_valid({**good, "speculative_decoding_mode": "NONE"})


@settings(max_examples=300, deadline=None)
@given(
    version=st.sampled_from(RELEASES),
    quant=st.sampled_from([format.algorithm for format in FORMATS.values()]),
    kv_cache=st.sampled_from(list(CACHE_ALGORITHMS.values())),
    dtype=st.sampled_from(["float16", "bfloat16"]),
    batch=st.sampled_from([1, 8, 64, 600]),
    features=FEATURES,
)
def test_every_configuration_is_one_that_its_release_accepts(
    version: str, quant: str | None, kv_cache: str | None, dtype: str, batch: int, features: dict[str, Any]
) -> None:
    """Whatever is not refused by name is accepted, batches in flight, and says the same in JSON and in options."""
    name = next((method for method in ("medusa", "eagle") if method in features), None)
    checkpoint = drafting(name, quant, kv_cache, dtype) if name else llama(quant, kv_cache, dtype=dtype)
    try:
        found = plan(version, checkpoint, engine(max_batch_size=batch, max_seq_len=4096, features=features))
    except ForgeError:
        return
    values: dict[str, Any] = json.loads(json.dumps(found.to_json()))
    errors = [f"{error.json_path}: {error.message}" for error in validator(version).iter_errors(values)]
    assert errors == []
    assert in_flight_batching(found)
    (command,) = commands(Path("/c"), Path("/o"), found, world_size=1, workers=1)
    flags = [word for word in command.argv if word.startswith("--")]
    assert set(flags) <= release(version).flags().keys()
    assert len(flags) == len(set(flags))
    consistent(values, features, found.limits.max_batch_size)
    assert {key.key for key in runtime_keys(found.features)} <= keys_of(version)


def consistent(values: dict[str, Any], features: dict[str, Any], batch: int) -> None:
    """The rules of `build()` hold before it could apply them in silence."""
    plugins, draft = values["plugin_config"], values["max_draft_len"]
    assert (values["speculative_decoding_mode"] == 1) is (draft == 0)
    assert not (values["gather_context_logits"] and draft)
    assert values["max_num_tokens"] >= batch * (draft + 1)
    assert not (values["weight_streaming"] and plugins["gemm_plugin"])
    assert (plugins["lora_plugin"] is not None) is bool(values["lora_config"]["lora_target_modules"])
    assert not (plugins["multiple_profiles"] and values["opt_num_tokens"])
    paged = any(features.get(name, True) for name in ("kv_reuse", "chunked_context")) or "eagle" in features
    assert paged or not plugins["use_paged_context_fmha"]
    if values["speculative_decoding_mode"] == 32:
        assert plugins["use_paged_context_fmha"]
        assert batch <= 512


def keys_of(version: str) -> set[str]:
    return {parameter.key for parameter in parameters("tensorrt_llm", release(version))}
