"""Check TensorRT-LLM's output against the plan: the files of an engine, and every field that we set.

`build()` changes some fields by itself, with at most a log line; an engine that differs from a field of the plan does
not match the recipe.
"""

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from trtforge.compile.build_config import BuildPlan
from trtforge.core.errors import ForgeError
from trtforge.core.manifest import files_below
from trtforge.formats.trtllm import CONFIG_FILE, CheckpointConfig, read_engine_config

_BESIDE = re.compile(r"rank\d+_managed_weights\.safetensors|quant_cfg\.json|lora/.+")
"""What `Engine.save` may write besides config.json and the engines (tensorrt_llm/builder.py)."""

_RAISED_BY_SPECULATION = frozenset({"max_seq_len", "max_num_tokens"})
"""`build()` adds draft tokens to these limits."""


def engine_file(rank: int) -> str:
    """File name of a rank's engine."""
    return f"rank{rank}.engine"


def check_rank(directory: Path, rank: int) -> tuple[str, ...]:
    """The files of one rank. Raises ForgeError for missing (engine, config.json of rank 0) and unexpected files."""
    names = tuple(files_below(directory)) if directory.is_dir() else ()
    expected = (engine_file(rank), *((CONFIG_FILE,) if rank == 0 else ()))
    for name in expected:
        if name not in names or not (directory / name).stat().st_size:
            raise _not_as_planned(f"TensorRT-LLM finished rank {rank} without an error, but did not write {name}")
    for name in names:
        if name not in expected and _BESIDE.fullmatch(name) is None:
            raise _not_as_planned(f"TensorRT-LLM wrote an unexpected file for rank {rank}: {name}")
    return names


def check_config(directory: Path, plan: BuildPlan, model: CheckpointConfig) -> None:
    """Raise ForgeError naming the first field of the engine's config.json that differs from the plan."""
    built, values = read_engine_config(directory)
    _require("version", _public(values.get("version")), plan.release.version)
    _require_all("mapping", built.mapping, model.mapping)
    _require("architecture", built.architecture, model.architecture)
    _require("dtype", built.dtype, model.dtype)
    for name in ("quant_algo", "kv_cache_quant_algo"):
        _require(f"quantization.{name}", getattr(built.quantization, name), getattr(model.quantization, name))
    found: dict[str, Any] = values["build_config"]
    none = plan.release.field("speculative_decoding_mode", "NONE").value
    raised = _RAISED_BY_SPECULATION if found.get("speculative_decoding_mode", none) != none else frozenset[str]()
    decided: dict[str, Any] = plan.to_json()
    for where, built_fields, wanted, names in (
        ("build_config", found, decided, plan.build_settings),
        ("plugin_config", found.get("plugin_config", {}), decided["plugin_config"], plan.plugin_settings),
        ("lora_config", found.get("lora_config", {}), decided["lora_config"], plan.lora_settings),
    ):
        _require_all(where, built_fields, {name: wanted[name] for name in names}, raised=raised, dtype=model.dtype)


def add_runtime_defaults(directory: Path, plan: BuildPlan) -> None:
    """Write the plan's runtime defaults into the engine's config.json, which TensorRT-LLM has just written.

    They are not given to the build: whether every release can write the object that it makes of them is not known.
    """
    if not plan.runtime_defaults:
        return
    _, values = read_engine_config(directory)
    pretrained = {**values["pretrained_config"], "runtime_defaults": plan.runtime_defaults}
    text = json.dumps({**values, "pretrained_config": pretrained}, indent=4)
    (directory / CONFIG_FILE).write_text(text, encoding="utf-8")


def _require_all(
    where: str,
    found: Mapping[str, Any],
    decided: Mapping[str, JsonValue],
    *,
    raised: Collection[str] = (),
    dtype: str | None = None,
) -> None:
    """Check every field that we set, except objects and lists: `Engine.save` rewrites the paths in them.

    Fields in `raised` may be larger than planned; `dtype` is what a release may write for a plugin's `auto`.
    """
    for name, wanted in decided.items():
        value = found.get(name)
        if isinstance(wanted, dict | list) or (wanted == "auto" and value == dtype):
            continue
        if name in raised and isinstance(value, int) and isinstance(wanted, int) and value >= wanted:
            continue
        _require(f"{where}.{name}", value, wanted)


def _public(version: object) -> object:
    """A version without its local part: 1.2.1+cu130 is a build of 1.2.1."""
    return version.partition("+")[0] if isinstance(version, str) else version


def _require(name: str, found: object, wanted: object) -> None:
    if _spelled(found) != _spelled(wanted):
        raise _not_as_planned(f"the engine was built with {name} {_shown(found)}, not {_shown(wanted)}")


def _spelled(value: object) -> object:
    """A value for comparison: enumerations are written as PAGED up to 1.1 and as paged from 1.2 on.

    Source: `KVCacheType` in tensorrt_llm/llmapi/kv_cache_type.py of 1.2, and ConfigEncoder in builder.py before.
    """
    return value.casefold() if isinstance(value, str) else value


def _not_as_planned(message: str) -> ForgeError:
    return ForgeError(
        message,
        hint="Nothing was published. See the rank's log for the reason; use the value that TensorRT-LLM chose, or "
        "another release (--target-version).",
    )


def _shown(value: object) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
