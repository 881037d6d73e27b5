"""The arguments of tensorrt_llm.LLM from model.yaml, and TensorRT-LLM's own objects for values that need them.

Classes: tensorrt_llm/llmapi/llm_args.py (*DecodingConfig), tensorrt_llm/sampling_params.py (GuidedDecodingParams),
tensorrt_llm/executor/request.py (LoRARequest) and tensorrt_llm/llmapi (KvCacheRetentionConfig), 1.0 to 1.3.
"""

from collections.abc import Collection, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from trtforge.core.errors import ForgeError, RequestError
from trtforge.engine_process.requests import DEFAULT_PRIORITY, Guide, GuideKind
from trtforge.engine_process.retention import KvCacheRetention

_ADAPTERS = "adapters"
_DRAFT_MODEL = ("speculative_model", "speculative_model_dir")
_ONE_MODEL = ("Eagle", "Eagle3", "MTP")
_GUIDES: Mapping[GuideKind, str] = {
    "json_schema": "json",
    "regex": "regex",
    "ebnf_grammar": "grammar",
    "structural_tag": "structural_tag",
}


def read_arguments(path: Path) -> Mapping[str, Any]:
    """The arguments in a model.yaml, with paths relative to it. Raises ForgeError."""
    import yaml

    try:
        arguments: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ForgeError(f"{path}: not readable: {error}", hint="Package the engine again.") from None
    arguments.pop("triton_config", None)
    arguments["model"] = str(path.parent / arguments["model"])
    speculation = arguments.get("speculative_config", {})
    for key in _DRAFT_MODEL:
        if key in speculation:
            speculation[key] = str(path.parent / speculation[key])
    return arguments


def sampled_in_one_model(arguments: Mapping[str, Any]) -> bool:
    """Whether the network itself chooses tokens to speculate (`use_one_engine` in _torch/speculative/interface.py)."""
    return arguments.get("speculative_config", {}).get("decoding_type") in _ONE_MODEL


def llm_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments for LLM. Up to 1.2 it takes no dictionary for speculative_config, so its class is made here.

    A network that chooses tokens itself is greedy whatever a request says, unless `allow_advanced_sampling` is set,
    in the releases that have it (create_py_executor in _torch/pyexecutor/py_executor_creator.py, 1.3.0rc3).
    """
    values = dict(arguments)
    if "speculative_config" not in values:
        return values
    from tensorrt_llm.llmapi import llm_args

    given = dict(values["speculative_config"])
    method = given.pop("decoding_type")
    name = f"{method.replace('_', '')}DecodingConfig"
    made = getattr(llm_args, name, None)
    if made is None:
        raise ForgeError(f"this TensorRT-LLM has no {name}", hint="Serve it with the release that it was built for.")
    if sampled_in_one_model(arguments) and "allow_advanced_sampling" in made.model_fields:
        given.setdefault("allow_advanced_sampling", True)
    values["speculative_config"] = made(**given)
    return values


def adapters_of(arguments: Mapping[str, Any]) -> Mapping[int, str]:
    """The LoRA adapters beside the model, by task id."""
    directory = Path(arguments["model"]) / _ADAPTERS
    found = directory.iterdir() if directory.is_dir() else ()
    return {int(path.name): str(path) for path in found if path.name.isdecimal()}


def lora_request(task_id: int | None, adapters: Mapping[int, str]) -> Any:
    """TensorRT-LLM's LoRARequest; None for the model without adapters. Raises RequestError for an unknown task id."""
    if task_id is None:
        return None
    if task_id not in adapters:
        known = ", ".join(map(str, sorted(adapters))) or "none"
        raise RequestError(f"lora_task_id {task_id} is not an adapter of this model", hint=f"Task ids: {known}.")
    from tensorrt_llm.executor import LoRARequest

    return LoRARequest(str(task_id), task_id, adapters[task_id])


def priority_argument(priority: float, accepted: Collection[str]) -> dict[str, float]:
    """The argument of `generate_async`, which has it since 1.3; the LLM must also be made with a
    `scheduler_config.waiting_queue_policy` of priority. Raises RequestError if it is not among `accepted`.
    """
    if priority == DEFAULT_PRIORITY:
        return {}
    if "priority" not in accepted:
        raise RequestError("this release of the LLM API has no priority", hint="Leave out the priority.")
    return {"priority": priority}


def cache_arguments(retention: KvCacheRetention | None, salt: str | None, accepted: Collection[str]) -> dict[str, Any]:
    """The arguments of `generate_async` for the KV cache; it has `cache_salt` since 1.1.

    Raises RequestError for one that is not among `accepted`.
    """
    arguments: dict[str, Any] = {}
    if salt is not None:
        if "cache_salt" not in accepted:
            raise RequestError("this release of the LLM API has no cache_salt", hint="Leave out the cache_salt.")
        arguments["cache_salt"] = salt
    if retention is not None:
        if "kv_cache_retention_config" not in accepted:
            raise RequestError(
                "this release of the LLM API does not support KV cache retention",
                hint="Leave out the retention tensors.",
            )
        arguments["kv_cache_retention_config"] = _retention_config(retention)
    return arguments


def _retention_config(retention: KvCacheRetention) -> Any:
    from tensorrt_llm.llmapi import KvCacheRetentionConfig

    ranges = [
        KvCacheRetentionConfig.TokenRangeRetentionConfig(
            each.start, each.end, each.priority, _milliseconds(each.duration_ms)
        )
        for each in retention.ranges
    ]
    return KvCacheRetentionConfig(ranges, retention.decode_priority, _milliseconds(retention.decode_duration_ms))


def _milliseconds(duration: int | None) -> timedelta | None:
    return None if duration is None else timedelta(milliseconds=duration)


def guided_decoding(guide: Guide | None) -> Any:
    """TensorRT-LLM's GuidedDecodingParams; None without a guide."""
    if guide is None:
        return None
    from tensorrt_llm.sampling_params import GuidedDecodingParams

    if guide.kind == "json":
        return GuidedDecodingParams(json_object=True)
    return GuidedDecodingParams(**{_GUIDES[guide.kind]: guide.text})
