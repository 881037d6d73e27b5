"""The rules' own tables: names that exist, and releases that refuse as surely as they were seen."""

from typing import Any

import pytest

from tests.compile.checkpoints import engine, llama
from trtforge.formats.known_issues import known_issues
from trtforge.formats.releases import read_release_data, release
from trtforge.formats.triton import parameter_problem
from trtforge.plan import feature_rules
from trtforge.plan.feature_rules import feature_problems


def names(section: str, key: str) -> set[str]:
    return {entry[key] for entry in read_release_data("build-config")[section]}


def test_formats_and_architectures_are_tensorrt_llms() -> None:
    formats = {name for seen in feature_rules._SPECULATION_SEEN.values() for name in seen}
    formats |= feature_rules._NO_LORA | feature_rules._LORA_SEEN | feature_rules._STREAMED
    assert formats - {None} <= names("quant_algo", "quant_algo")
    assert set(feature_rules._LORA_ARCHITECTURES) <= names("architectures", "architecture")


def test_a_parameter_that_a_release_lacks_is_as_sure_as_its_template() -> None:
    found = parameter_problem("lora_prefetch_dir", release("0.17.0"))
    assert found is not None
    assert found.refuses
    assert found.message == "TensorRT-LLM 0.17.0: config.pbtxt: lora_prefetch_dir was added in 0.19.0"
    unknown = parameter_problem("worker_path", release("1.0.0"))
    assert unknown is not None
    assert not unknown.refuses
    assert unknown.message == "TensorRT-LLM 1.0.0: config.pbtxt: worker_path is not known"
    assert parameter_problem("lora_prefetch_dir", release("1.0.0")) is None


@pytest.mark.parametrize("version", ["0.19.0", "0.20.0", "1.0.0", "1.2.1"])
def test_every_feature_is_there_from_0_19(version: str) -> None:
    asked: list[dict[str, Any]] = [
        {"lora": {"max_rank": 8, "modules": ["attn_q", "attn_k", "attn_v"]}, "multiple_profiles": True},
        {"lookahead": True, "generation_logits": True},
        {"draft": True, "weights_on_gpu": 0.5},
        {"context_logits": True},
    ]
    for features in asked:
        found = feature_problems(llama(dtype="float16"), engine(features=features), release(version))
        assert [problem.message for problem in found if "issue #" not in problem.message] == []


def test_what_users_reported_of_a_release_is_a_warning() -> None:
    asked = engine(features={"lookahead": True})
    (found,) = feature_problems(llama(dtype="float16"), asked, release("0.20.0"))
    assert not found.refuses
    assert found.message.startswith("engine.features.lookahead: TensorRT-LLM 0.20.0: requests end with `invalid conf")
    assert found.message.endswith("(NVIDIA/TensorRT-LLM issue #5451)")
    assert known_issues("lookahead", release("0.21.0")) == ()
    assert known_issues("lora", release("0.20.0")) == ()
