"""The facts of an engine directory that packaging needs, from its configuration and file names."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtforge.core.device import UsableDevice
from trtforge.core.dtypes import model_dtype
from trtforge.core.errors import ForgeError
from trtforge.core.features import SPECULATION, FeaturesConfig
from trtforge.core.manifest import Manifest
from trtforge.core.recipe import ResolvedBackend
from trtforge.formats.adapter import ADAPTERS_DIRECTORY
from trtforge.formats.attention_windows import attention_windows, executor_windows
from trtforge.formats.engine_target import EngineTarget
from trtforge.formats.hf import HfConfig, read_config
from trtforge.formats.llmapi import MODEL_FILE, LlmArgs, applies_windows, read_llm_args
from trtforge.formats.releases import Release, release
from trtforge.formats.triton import newest_release
from trtforge.formats.trtllm import CONFIG_FILE, CheckpointConfig, rank_file, read_engine_config
from trtforge.models.registry import architectures, family_of
from trtforge.plan.host_blocks import block_of_engine


@dataclass(frozen=True)
class EngineFacts:
    """A complete engine.

    `release`: the TensorRT-LLM release whose interface serves it; `served_by`: the release that runs it. `features`:
    those of its build; they determine keys that an engine's config.json lacks. `target`: the versions and GPU that
    TensorRT built it with and for, empty for other backends. `windows`: sliding windows in the form for a TensorRT
    engine's executor; empty without any. `layers`: None if unknown. `llm_args`: of an llmapi engine. `max_draft_len`:
    of a TensorRT engine. `has_windows`: whether its network can attend to windows. `adapters`: task ids of the engine's
    own LoRA adapters; `adapter_names`: those of a torch engine by name. `kv_block`: bytes of a KV block on one rank,
    `tokens_per_block`: its tokens; 0 if unknown.
    """

    backend: ResolvedBackend
    device: UsableDevice
    release: Release
    served_by: str
    vocab_size: int
    dtype: str
    logits_dtype: str
    world_size: int
    max_batch_size: int
    max_input_len: int
    max_beam_width: int
    paged_context: bool
    features: FeaturesConfig
    target: EngineTarget
    windows: tuple[int, ...] = ()
    layers: int | None = None
    llm_args: LlmArgs | None = None
    has_windows: bool = True
    adapters: tuple[int, ...] = ()
    adapter_names: Mapping[str, int] = field(default_factory=dict)
    max_draft_len: int = 0
    kv_block: int = 0
    tokens_per_block: int = 0


def read_engine(directory: Path, manifest: Manifest, built_for: FeaturesConfig | None = None) -> EngineFacts:
    """Read and check an engine. Raises ForgeError naming the missing key, or the rank file that is missing or empty.

    `built_for`: the engine's features; None: those recorded in its config.json or manifest, else implied by its build.
    """
    if (directory / MODEL_FILE).is_file():
        return _llmapi_engine(directory, manifest)
    model, values = read_engine_config(directory)
    path = directory / CONFIG_FILE
    build = _object(values, "build_config", path)
    plugins = build.get("plugin_config")
    tokens_per_block = plugins.get("tokens_per_block") if isinstance(plugins, dict) else None
    tokens_per_block = tokens_per_block if isinstance(tokens_per_block, int) else 0
    forge = values.get("forge")
    paged_context = isinstance(plugins, dict) and bool(plugins.get("use_paged_context_fmha", False))
    features = built_for or _features(forge, manifest, build, paged_context=paged_context)
    _check_features(build, features, path)
    names = {} if forge is None else _adapter_names(_features(forge, manifest, build, paged_context=paged_context))
    served_by = newest_release() if forge is not None else release(str(values.get("version")))
    facts = EngineFacts(
        backend="tensorrt_llm" if forge is None else "torch",
        device="cpu" if isinstance(forge, dict) and forge.get("device") == "cpu" else "cuda",
        release=served_by,
        served_by=served_by.version,
        vocab_size=model.vocab_size,
        dtype=model.dtype,
        logits_dtype=model.logits_dtype,
        world_size=model.parallel.world_size,
        max_batch_size=_integer(build, "max_batch_size", path),
        max_input_len=_integer(build, "max_input_len", path),
        max_beam_width=_integer(build, "max_beam_width", path, default=1),
        paged_context=paged_context,
        features=features,
        target=_target(values, manifest) if forge is None else EngineTarget(),
        windows=_windows(model, build, path),
        layers=model.num_hidden_layers,
        adapters=tuple(names.values()),
        adapter_names=names,
        max_draft_len=_integer(build, "max_draft_len", path, least=0, default=0),
        kv_block=_kv_block(model, tokens_per_block, forge),
        tokens_per_block=tokens_per_block,
    )
    _check_ranks(directory, facts, model)
    return facts


def _windows(model: CheckpointConfig, build: Mapping[str, Any], path: Path) -> tuple[int, ...]:
    windows = attention_windows(model)
    return executor_windows(windows, _integer(build, "max_seq_len", path)) if any(windows) else ()


def _kv_block(model: CheckpointConfig, tokens_per_block: int, forge: object) -> int:
    computed = forge.get("compute_dtype") if isinstance(forge, dict) else None
    dtype = model.dtype if computed is None else model_dtype(str(computed), model.dtype)
    return block_of_engine(model, dtype, tokens_per_block)


def _target(values: Mapping[str, Any], manifest: Manifest) -> EngineTarget:
    """The target that the build recorded; the release always comes from TensorRT-LLM's own config.json."""
    recorded = EngineTarget.recorded(manifest.identity.versions) or EngineTarget()
    return recorded.model_copy(update={"tensorrt_llm": str(values.get("version"))})


def _features(forge: object, manifest: Manifest, build: Mapping[str, Any], *, paged_context: bool) -> FeaturesConfig:
    """The features recorded in the engine; the others follow from its build_config."""
    implied: dict[str, Any] = {"kv_reuse": paged_context, "chunked_context": paged_context}
    if _lora_rank(build):
        implied["lora"] = {"max_rank": _lora_rank(build)}
    recorded = forge.get("features") if isinstance(forge, dict) else manifest.identity.config.get("features")
    return FeaturesConfig.parse(implied | (recorded if isinstance(recorded, dict) else {}), "features of the engine")


def _check_features(build: Mapping[str, Any], features: FeaturesConfig, path: Path) -> None:
    """Raises ForgeError if config.json contradicts the features: speculative decoding, LoRA, weight streaming."""
    draft = build.get("max_draft_len", 0)
    method = next((name for name in SPECULATION if getattr(features, name) is not None), None)
    if draft and method is None:
        raise ForgeError(
            f"{path}: max_draft_len is {draft}, but the engine's speculative decoding method is not recorded",
            hint="Give it with --feature draft, medusa, eagle or lookahead, as the engine was built.",
        )
    missing: list[str] = [method] if method is not None and not draft else []
    if features.lora is not None and (features.lora.max_rank or 0) > _lora_rank(build):
        missing.append(f"lora of rank {features.lora.max_rank}")
    if features.weights_on_gpu < 1 and not build.get("weight_streaming"):
        missing.append("weights_on_gpu")
    rows = build.get("max_prompt_embedding_table_size")
    if features.max_prompt_embedding_table_size > (rows if isinstance(rows, int) else 0):
        missing.append("max_prompt_embedding_table_size")
    if missing:
        raise ForgeError(f"{path}: the engine was not built for {missing[0]}", hint="Compile it with that feature.")


def _lora_rank(build: Mapping[str, Any]) -> int:
    """The largest rank of the engine's adapters; 0 without the plugin."""
    plugins, lora = build.get("plugin_config"), build.get("lora_config")
    if not isinstance(plugins, dict) or not isinstance(lora, dict) or not plugins.get("lora_plugin"):
        return 0
    rank = lora.get("max_lora_rank")
    return rank if isinstance(rank, int) and not isinstance(rank, bool) else 0


def _vocabulary(config: HfConfig, text: HfConfig) -> int:
    """The vocabulary size, which published Gemma 3 leaves to its configuration class."""
    if text.values.get("vocab_size") is None and config.architecture in architectures():
        return family_of(config.architecture).facts(config).sizes.vocab
    return text.integer("vocab_size")


def _llmapi_engine(directory: Path, manifest: Manifest) -> EngineFacts:
    """A Hugging Face checkpoint with model.yaml, where `compile` or `migrate` wrote the limits."""
    args, config = read_llm_args(directory), read_config(directory)
    if args.max_batch_size is None or args.max_input_len is None:
        raise ForgeError(
            f"{directory / MODEL_FILE}: packaging needs max_batch_size and max_input_len",
            hint="Add both.",
        )
    text = config.values.get("text_config")
    text_config = HfConfig({**config.values, **text}, config.path) if isinstance(text, dict) else config
    served_by = str(manifest.identity.config.get("target", newest_release().version))
    names = config.items("architectures")
    return EngineFacts(
        backend="llmapi",
        device="cuda",
        release=newest_release(),
        served_by=served_by,
        vocab_size=_vocabulary(config, text_config),
        dtype=text_config.dtype,
        logits_dtype="float32",
        world_size=args.world_size,
        max_batch_size=args.max_batch_size,
        max_input_len=args.max_input_len,
        max_beam_width=1,
        paged_context=True,
        features=FeaturesConfig(
            kv_reuse=args.kv_cache_config.enable_block_reuse is not False,
            chunked_context=bool(args.enable_chunked_prefill),
        ),
        target=EngineTarget(),
        llm_args=args,
        has_windows=any(applies_windows(str(name), served_by) for name in names),
        adapters=_adapters(manifest),
    )


def _adapter_names(features: FeaturesConfig) -> Mapping[str, int]:
    """The adapters in a torch engine; the task id is the position, from 1."""
    names = () if features.lora is None else features.lora.adapters
    return {name: number for number, name in enumerate(names, start=1)}


def _adapters(manifest: Manifest) -> tuple[int, ...]:
    names = {name.split("/")[1] for name in manifest.files if name.startswith(f"{ADAPTERS_DIRECTORY}/")}
    return tuple(sorted(map(int, names)))


def _check_ranks(directory: Path, facts: EngineFacts, model: CheckpointConfig) -> None:
    ranks = range(facts.world_size if facts.backend == "tensorrt_llm" else len(model.parallel.ranks))
    names = [f"rank{index}.engine" if facts.backend == "tensorrt_llm" else rank_file(index) for index in ranks]
    found = {path.name for path in directory.glob("rank*") if path.suffix == Path(names[0]).suffix}
    for name in names:
        if name not in found:
            raise ForgeError(
                f"{directory / name} is missing: config.json says {len(names)} ranks, {len(found)} exist",
                hint="Copy the engine completely, or compile it again.",
            )
        if (directory / name).stat().st_size == 0:
            raise ForgeError(f"{directory / name} is empty", hint="Copy the engine completely, or compile it again.")
    unexpected = sorted(found - set(names))
    if unexpected:
        raise ForgeError(
            f"unexpected file {directory / unexpected[0]}: config.json says {len(names)} ranks",
            hint="The directory holds files of another engine; compile into an empty one.",
        )


def _object(values: Mapping[str, Any], key: str, path: Path) -> Mapping[str, Any]:
    value = values.get(key)
    if not isinstance(value, dict):
        raise ForgeError(f"{path}: {key} is not an object", hint="Use the config.json that the build wrote.")
    return value


def _integer(values: Mapping[str, Any], key: str, path: Path, default: int | None = None, least: int = 1) -> int:
    value = values.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ForgeError(
            f"{path}: build_config.{key} is {value!r}, not a whole number from {least}",
            hint="Use the config.json that the build wrote.",
        )
    return value
