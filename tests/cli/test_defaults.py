"""An option and the configuration field that it sets have one default."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from pydantic import BaseModel

from trtforge.calibrate.stage import CalibrateConfig
from trtforge.cli.calibrate import calibrate
from trtforge.cli.compile import compile_
from trtforge.cli.convert import convert
from trtforge.cli.migrate import migrate
from trtforge.cli.serving import serve
from trtforge.cli.verify import verify
from trtforge.convert.stage import ConvertConfig
from trtforge.core.recipe import CalibrationConfig, EngineConfig, GateConfig, TargetConfig
from trtforge.serve.config import ServeConfig

CASES: list[tuple[Callable[..., Any], type[BaseModel], Mapping[str, str], set[str]]] = [
    (
        calibrate,
        CalibrateConfig,
        {"quant": "format"},
        {"kv_cache", "kv_scales", "group_size", "awq_clip", "rounding", "memory", "device"},
    ),
    (
        calibrate,
        CalibrationConfig,
        {"seq_len": "sequence_length"},
        {"data", "samples", "seq_len", "batch_size", "seed"},
    ),
    (convert, ConvertConfig, {}, {"tp", "pp", "ep", "cp", "dtype", "quant", "kv_cache", "embedding_sharding_dim"}),
    (verify, GateConfig, {"seq_len": "sequence_length"}, {"data", "samples", "seq_len"}),
    (compile_, EngineConfig, {}, {"backend", "device", "compute_dtype", "max_batch_size", "max_beam_width"}),
    (compile_, TargetConfig, {"target_version": "tensorrt_llm"}, {"gpu", "target_version"}),
    (migrate, TargetConfig, {"target_version": "tensorrt_llm"}, {"target_version"}),
    (
        serve,
        ServeConfig,
        {},
        {
            "http_port",
            "grpc_port",
            "metrics_port",
            "host",
            "launcher",
            "nodes",
            "ready_timeout",
            "drain_timeout",
            "restart",
        },
    ),
]


@pytest.mark.parametrize(("command", "model", "renamed", "expected"), CASES)
def test_defaults_are_the_same(
    command: Callable[..., Any], model: type[BaseModel], renamed: Mapping[str, str], expected: set[str]
) -> None:
    options = {name: option.default for name, option in inspect.signature(command).parameters.items()}
    fields = {name: renamed.get(name, name) for name in expected}
    assert {name: options[name] for name in fields} == {
        name: model.model_fields[field].default for name, field in fields.items()
    }


@pytest.mark.parametrize(("command", "model", "renamed", "expected"), CASES)
def test_every_option_with_a_field_of_its_name_is_compared(
    command: Callable[..., Any], model: type[BaseModel], renamed: Mapping[str, str], expected: set[str]
) -> None:
    options = inspect.signature(command).parameters
    compared = set().union(*(names for other, _, _, names in CASES if other is command))
    alike = {
        name for name in options if name in model.model_fields and options[name].default is not inspect.Parameter.empty
    }
    assert {name for name in alike - compared if options[name].default not in (None, False, ())} == set()
