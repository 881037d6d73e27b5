"""Which serving settings a backend and a release have, and which engines they require.

Sources: triton_backend/inflight_batcher_llm/src/model_instance_state.cc (0.19), docs/model_config.md of
tensorrtllm_backend, and the parameters of each release in `formats/release_data/triton-model-config.json`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from trtforge.core.features import FeaturesConfig
from trtforge.core.recipe import ResolvedBackend
from trtforge.core.serving import ServingConfig
from trtforge.formats.known_issues import known_issues
from trtforge.formats.releases import Release
from trtforge.formats.triton import parameter_problem
from trtforge.plan.legality import Problem

LLM_ARGUMENTS: Mapping[str, str] = {
    "max_attention_window_size": "kv_cache_config.max_attention_window",
    "sink_token_length": "kv_cache_config.sink_token_length",
    "kv_cache_host_memory_bytes": "kv_cache_config.host_cache_size",
    "guided_decoding_backend": "guided_decoding_backend",
}
"""The LLM API's arguments for settings of the engine executor; it has no others."""
EMBEDDED_SETTINGS = frozenset({"kv_cache_host_memory_bytes"})
"""The ones that the embedded engine has too."""

_LEAVE_OUT = "Leave it out of serving."


@dataclass(frozen=True)
class ServedEngine:
    """Facts of an engine that the rules need. `release`: the release that serves it; `layers` None: unknown.

    `has_windows`: whether the network can attend to a window instead of all tokens.
    """

    backend: ResolvedBackend
    release: Release
    features: FeaturesConfig
    world_size: int
    layers: int | None = None
    has_windows: bool = True

    @property
    def kv_reuse(self) -> bool:
        """Whether requests share KV blocks."""
        return self.features.kv_reuse


def serving_problems(serving: ServingConfig, engine: ServedEngine) -> Iterator[Problem]:
    """Problems of settings that the backend or the release lacks, or that contradict the engine or each other."""
    for key in serving.executor_settings:
        yield from _availability(key, serving, engine)
    if engine.backend == "tensorrt_llm":
        for key in serving.lowered_limits:
            message = f"{key}: a TensorRT engine's limits are fixed when it is built"
            yield _problem(message, f"Compile it again with engine.{key}, or leave it out of serving.")
    yield from _instances(serving, engine)
    yield from _needs(serving, engine)
    yield from _draft(serving, engine)
    windows, layers = serving.max_attention_window_size, engine.layers
    if windows is not None and layers is not None and len(windows) not in (1, layers):
        message = f"max_attention_window_size has {len(windows)} windows, the model {layers} layers"
        yield _problem(message, "Give one window, or one a layer.")
    if windows is not None and not engine.has_windows:
        message = "max_attention_window_size: this network of the PyTorch backend is not known to apply a window"
        fix = "Compare answers beyond the window: the KV cache frees older tokens."
        yield _problem(message, fix, refuses=False)


def limit_problems(serving: ServingConfig, max_batch_size: int, tokens_per_block: int) -> Iterator[Problem]:
    """Problems of settings that the limits of the embedded engine do not allow."""
    if serving.kv_cache_tokens is not None and serving.kv_cache_tokens < tokens_per_block:
        message = f"kv_cache_tokens is {serving.kv_cache_tokens}, less than a KV block of {tokens_per_block} tokens"
        yield _problem(message, f"Give at least {tokens_per_block}.")
    if serving.max_batch_size is not None and serving.max_batch_size > max_batch_size:
        message = f"max_batch_size {serving.max_batch_size} has no effect: the engine's is {max_batch_size}"
        yield _problem(message, "Compile with a larger engine.max_batch_size, or leave it out.", refuses=False)


def _availability(key: str, serving: ServingConfig, engine: ServedEngine) -> Iterator[Problem]:
    if engine.backend == "torch":
        if key not in EMBEDDED_SETTINGS:
            yield _problem(f"{key}: the embedded engine has no such setting", _LEAVE_OUT)
    elif engine.backend == "llmapi":
        if key not in LLM_ARGUMENTS:
            yield _problem(f"{key}: the LLM API has no such setting", _LEAVE_OUT)
    else:
        if key == "guided_decoding_backend" and serving.guided_decoding_backend == "llguidance":
            message = "guided_decoding_backend: TensorRT engines support xgrammar only, the LLM API also llguidance"
            yield _problem(message, "Use guided_decoding_backend: xgrammar.")
        missing = parameter_problem(key, engine.release)
        if missing is not None:
            yield _problem(missing.message, missing.hint)
        for issue in known_issues(key, engine.release):
            message = f"{key}: TensorRT-LLM {engine.release.version}: {issue.says} ({issue.source})"
            yield _problem(message, "Test it before relying on it, or target another release.", refuses=False)


def _instances(serving: ServingConfig, engine: ServedEngine) -> Iterator[Problem]:
    """Problems of instances: each needs a GPU, in orchestrator mode also an MPI rank, for each rank of the engine."""
    for key, groups in (("gpu_device_ids", serving.instances), ("participant_ids", serving.participants)):
        for group in groups:
            if len(group) != engine.world_size:
                message = f"{key}: an instance has {len(group)} ids, the engine {engine.world_size} ranks"
                yield _problem(message, "Give an id for each rank, with a semicolon between instances.")
                break
            if len(set(group)) != len(group):
                yield _problem(f"{key}: an id occurs twice in an instance", "Give each rank its own.")
                break
    gpus = [gpu for group in serving.instances for gpu in set(group)]
    if len(set(gpus)) < len(gpus) and serving.kv_cache_tokens is None:
        message = "gpu_device_ids: instances share a GPU, and each would take kv_cache_fraction of its free memory"
        yield _problem(message, "Set kv_cache_tokens, which bounds the KV cache of each instance.")
    ranks = [rank for group in serving.participants for rank in group]
    if 0 in ranks:
        yield _problem("participant_ids: MPI rank 0 is the orchestrator", "Begin with rank 1.")
    if len(set(ranks)) < len(ranks) and len(set(serving.participants)) == len(serving.participants):
        yield _problem("participant_ids: instances share an MPI rank", "Give each instance its own ranks.")
    if serving.instances and serving.participants and len(serving.instances) != len(serving.participants):
        message = f"gpu_device_ids has {len(serving.instances)} instances, participant_ids {len(serving.participants)}"
        yield _problem(message, "Give both the same instances.")


def _draft(serving: ServingConfig, engine: ServedEngine) -> Iterator[Problem]:
    """Problems of a draft engine beside the served one."""
    if serving.draft_engine is None:
        if serving.draft_gpu_device_ids is not None:
            yield _problem("draft_gpu_device_ids: there is no draft_engine", _LEAVE_OUT)
        return
    if engine.backend == "llmapi":
        message = "draft_engine: the LLM API runs its draft model itself"
        yield _problem(message, "Use engine.features.draft.model, which becomes part of the engine.")
        return
    if engine.backend == "torch":
        yield from _embedded_draft(serving, engine)
        return
    if engine.features.draft is None:
        message = "draft_engine: the engine cannot verify draft tokens"
        yield _problem(message, "Compile it with engine.features.draft (--feature draft).")
    if len(serving.instances) > 1 or serving.participants:
        key = "participant_ids" if serving.participants else "several instances (gpu_device_ids)"
        yield _problem(f"draft_engine with {key} is not supported", "Leave one of them out.")
        return
    target = serving.instances[0] if serving.instances else tuple(range(engine.world_size))
    shared = not serving.draft_gpus or not set(serving.draft_gpus).isdisjoint(target)
    if shared and serving.kv_cache_tokens is None:
        message = "draft_engine: both engines share a GPU, and each would take kv_cache_fraction of its free memory"
        yield _problem(message, "Set kv_cache_tokens, which bounds the KV cache of each, or draft_gpu_device_ids.")


def _embedded_draft(serving: ServingConfig, engine: ServedEngine) -> Iterator[Problem]:
    """Problems of two embedded engines, which run side by side, each in its own process."""
    if engine.features.of_torch is not None:
        message = "draft_engine: the engine has a drafter of its own"
        yield _problem(message, "Leave draft_engine out, or compile the engine without speculative decoding.")
    if serving.draft_gpu_device_ids is not None:
        yield _problem("draft_gpu_device_ids: not supported by embedded engines", _LEAVE_OUT)
    if serving.kv_cache_tokens is None:
        message = "draft_engine: both engines share memory, and each would take kv_cache_fraction of what is free"
        yield _problem(message, "Set kv_cache_tokens, which bounds the KV cache of each.")


def _needs(serving: ServingConfig, engine: ServedEngine) -> Iterator[Problem]:
    """Problems of settings that have no effect without another one."""
    if serving.kv_cache_host_memory_bytes is not None and not engine.kv_reuse:
        message = "kv_cache_host_memory_bytes: it needs KV reuse, but kv_reuse is off"
        yield _problem(message, "Set engine.features.kv_reuse to true, or leave it out of serving.")
    if serving.cuda_graph_cache_size is not None and not serving.cuda_graph_mode:
        yield _problem("cuda_graph_cache_size: cuda_graph_mode is off", "Set cuda_graph_mode to true.")
    if serving.enable_trt_overlap and not serving.cuda_graph_mode:
        yield _problem("enable_trt_overlap: cuda_graph_mode is off", "Set cuda_graph_mode to true.")
    if serving.lora_prefetch_dir is not None and engine.features.lora is None:
        yield _problem(
            "lora_prefetch_dir: the engine does not support adapters", "Compile it with engine.features.lora."
        )
    if serving.speculative_decoding_fast_logits and serving.participant_ids is None:
        message = "speculative_decoding_fast_logits: the backend ignores it unless participant_ids is set"
        yield _problem(message, "Set participant_ids: the ranks are then started beforehand (orchestrator mode).")
    nodes = serving.num_nodes
    if nodes is not None and nodes > engine.world_size * max(1, len(serving.instances)):
        yield _problem(f"num_nodes {nodes}: the engine has {engine.world_size} ranks", "Use fewer nodes.")


def _problem(message: str, fix: str, *, refuses: bool = True) -> Problem:
    return Problem("serving", f"serving.{message}", fix, refuses=refuses)
