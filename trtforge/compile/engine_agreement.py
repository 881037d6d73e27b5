"""Whether the config.json that TensorRT-LLM wrote for an engine agrees with the plan.

`build()` changes some fields by itself, with at most a log line. An engine is refused for a difference that the recipe
or the server would notice: layout, number format, limits below the plan's, the kind of KV cache. Any other difference
is a warning: a choice of kernels, a key that a release leaves out.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trtforge.compile.build_config import BuildPlan
from trtforge.core.errors import ForgeError
from trtforge.formats.trtllm import CheckpointConfig, read_engine_config

_LIMITS = frozenset(
    {"max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens", "max_beam_width", "max_draft_len"}
) | {"max_lora_rank", "max_prompt_embedding_table_size"}
"""Fields that may be larger than planned; speculation raises max_seq_len and max_num_tokens by draft tokens."""

_EXACT = frozenset(
    {
        *("world_size", "tp_size", "pp_size", "cp_size", "moe_tp_size", "moe_ep_size"),
        *("kv_cache_type", "speculative_decoding_mode", "weight_streaming", "strongly_typed"),
        *("gather_context_logits", "gather_generation_logits"),
        *("remove_input_padding", "paged_kv_cache", "tokens_per_block", "use_paged_context_fmha", "lora_plugin"),
    }
)
"""Fields that must be as planned if config.json has them."""

_ON, _OFF = frozenset({"enable", "true"}), frozenset({"disable", "false", "none", "null"})


def check_config(directory: Path, plan: BuildPlan, model: CheckpointConfig) -> tuple[str, ...]:
    """Warnings about the engine's config.json. Raises ForgeError naming the first difference that matters."""
    built, values = read_engine_config(directory)
    _require("version", _public(values.get("version")), plan.release.version)
    _require("architecture", built.architecture, model.architecture)
    _require("dtype", built.dtype, model.dtype)
    for name in ("quant_algo", "kv_cache_quant_algo"):
        _require(f"quantization.{name}", getattr(built.quantization, name), getattr(model.quantization, name))
    found: dict[str, Any] = values["build_config"]
    decided: dict[str, Any] = plan.to_json()
    sections: tuple[tuple[str, Mapping[str, Any], Mapping[str, Any]], ...] = (
        ("mapping", built.mapping, model.mapping),
        ("build_config", found, {name: decided[name] for name in plan.build_settings}),
        *(
            (name, found.get(name) or {}, {key: decided[name][key] for key in settings})
            for name, settings in (("plugin_config", plan.plugin_settings), ("lora_config", plan.lora_settings))
        ),
    )
    modes = {str(field.value): name for name, field in plan.release.fields("speculative_decoding_mode").items()}
    drafts = _spelled(found.get("speculative_decoding_mode"), modes) not in (None, "none")
    return tuple(warning for section in sections for warning in _differences(*section, model.dtype, modes, drafts))


def _differences(
    where: str,
    found: Mapping[str, Any],
    decided: Mapping[str, Any],
    dtype: str,
    modes: Mapping[str, str],
    drafts: bool,
) -> Iterator[str]:
    """Warnings about the fields that we set, except objects and lists: `Engine.save` rewrites the paths in them.

    `dtype` is what a release may write for a plugin's `auto`. `modes`: names of the speculative decoding modes by
    number, as releases write either. `drafts`: whether the engine speculates.
    """
    for name, wanted in decided.items():
        if isinstance(wanted, dict | list):
            continue
        field = f"{where}.{name}"
        if name not in found and name not in _LIMITS:
            yield f"{field}: the engine's config.json does not say it, the plan is {_shown(wanted)}"
            continue
        value = found.get(name)
        same = _spelled(value, modes) == _spelled(wanted, modes) or (wanted == "auto" and value == dtype)
        if same or (name == "lora_plugin" and _spelled(value, modes) is not None and wanted is not None):
            continue
        if name in _LIMITS and isinstance(value, int) and isinstance(wanted, int) and value > wanted:
            if not drafts:
                yield f"{field}: the engine was built with {value}, above the plan's {wanted}: it takes more memory"
            continue
        if name in _LIMITS or name in _EXACT:
            raise _not_as_planned(f"the engine was built with {field} {_shown(value)}, not {_shown(wanted)}")
        yield f"{field}: the engine was built with {_shown(value)}, not {_shown(wanted)}"


def _public(version: object) -> object:
    """A version without its local part: 1.2.1+cu130 is a build of 1.2.1."""
    return version.partition("+")[0] if isinstance(version, str) else version


def _require(name: str, found: object, wanted: object) -> None:
    if _spelled(found, {}) != _spelled(wanted, {}):
        raise _not_as_planned(f"the engine was built with {name} {_shown(found)}, not {_shown(wanted)}")


def _spelled(value: object, modes: Mapping[str, str]) -> object:
    """The common form of a value, for comparison, as releases write it differently.

    Enumerations are PAGED up to 1.1, paged from 1.2 on, KVCacheType.PAGED where an encoder falls back to `str`; numbers
    of `modes` are their names; plugins write enable and disable for booleans and null; null and false are both off.
    Sources: `KVCacheType` in tensorrt_llm/llmapi/kv_cache_type.py of 1.2, ConfigEncoder in builder.py before;
    `from_dict` of PluginConfig in tensorrt_llm/plugin/plugin.py.
    """
    if value is None or value is False:
        return None
    if value is True:
        return True
    if isinstance(value, int):
        return modes.get(str(value), str(value)).casefold()
    if not isinstance(value, str):
        return value
    text = value.rpartition(".")[2].casefold() if _is_member(value) else value.casefold()
    if text in _ON:
        return True
    return None if text in _OFF else modes.get(text, text).casefold()


def _is_member(text: str) -> bool:
    """Whether a text is a member of an enumeration with its class, such as KVCacheType.PAGED."""
    owner, dot, name = text.rpartition(".")
    return bool(dot) and owner.isidentifier() and name.isidentifier()


def _not_as_planned(message: str) -> ForgeError:
    return ForgeError(
        message,
        hint="Nothing was published. See the rank's log for the reason; use the value that TensorRT-LLM chose, or "
        "another release (--target-version).",
    )


def _shown(value: object) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
