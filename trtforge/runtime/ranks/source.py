"""The directory that a model is loaded from: an engine of the torch backend, or a TensorRT-LLM checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from trtforge.core.config_model import Config
from trtforge.core.device import UsableDevice
from trtforge.core.dtypes import ModelDtype
from trtforge.core.errors import ForgeError
from trtforge.core.features import FeaturesConfig
from trtforge.formats.eagle import EagleNetwork
from trtforge.formats.rope import scaled_length
from trtforge.formats.trtllm import CheckpointConfig, is_engine, read_checkpoint_config, read_engine_config
from trtforge.runtime.architecture.spec import DecoderSpec
from trtforge.runtime.linears.kernels import Kernels, reference_kernels
from trtforge.runtime.scheduling.batch_limits import BatchLimits
from trtforge.runtime.scheduling.draft_trees import TreeShape

DEFAULT_TOKENS_PER_BLOCK = 32


class ForgeSection(Config):
    """The `forge` object of an engine's config.json."""

    backend: Literal["torch"] = "torch"
    device: UsableDevice = "cpu"
    compute_dtype: ModelDtype = "float32"
    kernels: Kernels = Field(default_factory=Kernels)
    features: FeaturesConfig = FeaturesConfig()


@dataclass(frozen=True)
class EagleDrafts:
    """A network that rank 0 runs beside the model, and the shape of its drafts."""

    network: EagleNetwork
    shape: TreeShape


@dataclass(frozen=True)
class DrafterBytes:
    """Bytes of a drafter beside a rank: its weights, and its addition to each of the engine's KV blocks."""

    weights: int = 0
    block: int = 0


@dataclass(frozen=True)
class Source:
    """A model on disk and how to compute it. `packed`: True for an engine's rank files, False for a checkpoint's.

    `beside`: memory of a drafter that is loaded after the KV cache is allocated, for each of its ranks.

    `sent_adapters`: directory for the LoRA adapters that come with requests; None: these are refused.
    """

    directory: Path
    config: CheckpointConfig
    forge: ForgeSection
    limits: BatchLimits
    tokens_per_block: int
    packed: bool
    sent_adapters: Path | None = None
    eagle: EagleDrafts | None = None
    beside: tuple[DrafterBytes, ...] = ()

    def beside_rank(self, index: int) -> DrafterBytes:
        """Bytes that rank `index` must leave free for the drafter. On a CPU, each rank leaves an equal share."""
        if self.forge.device == "cpu":
            world = self.config.parallel.world_size
            weights, block = (sum(each.weights for each in self.beside), sum(each.block for each in self.beside))
            return DrafterBytes(-(-weights // world), -(-block // world))
        return self.beside[index] if index < len(self.beside) else DrafterBytes()

    def spec(self, index: int) -> DecoderSpec:
        """The specification of rank `index`."""
        return DecoderSpec.of(self.config, index).within(self.limits.max_seq_len)

    @property
    def keeps_states(self) -> bool:
        """Whether some layers (linear attention) keep a state of each sequence outside the KV blocks."""
        return any(layer.linear for rank in self.config.parallel.ranks for layer in self.spec(rank.index).layers)

    def shares(self, asked: bool) -> bool:
        """Whether KV blocks are shared between requests: if `asked`, and if sequences have no other state."""
        return asked and not self.keeps_states

    def require_shared(self, what: str, asked: bool) -> None:
        """Raises ForgeError if KV blocks are not shared between requests, which the option `what` requires."""
        if self.keeps_states:
            raise ForgeError(
                f"{what}: not supported for linear attention, whose states are not stored with the KV blocks",
                hint="Leave it out for this model.",
            )
        if not asked:
            raise ForgeError(
                f"{what}: needs KV reuse, which is off",
                hint="Compile, package or load the engine with KV reuse, or leave it out.",
            )


def open_engine(directory: Path) -> Source:
    """Open an engine that `compile` wrote for the torch backend. Raises ForgeError for anything else."""
    config, values = read_engine_config(directory)
    if "forge" not in values:
        raise ForgeError(
            f"{directory} is an engine of TensorRT-LLM, which the embedded engine does not support",
            hint="Serve it with TensorRT-LLM, or compile the checkpoint with `--backend torch`.",
        )
    forge = ForgeSection.parse(values["forge"], f"{directory / 'config.json'}: forge")
    forge.kernels.check()
    build = values["build_config"]
    plugins = build.get("plugin_config") or {}
    limits = BatchLimits(
        max_batch_size=_positive(build, "max_batch_size", directory),
        max_num_tokens=_positive(build, "max_num_tokens", directory),
        max_input_len=_positive(build, "max_input_len", directory),
        max_seq_len=_positive(build, "max_seq_len", directory),
        max_beam_width=_positive({"max_beam_width": 1} | build, "max_beam_width", directory),
    )
    tokens_per_block = plugins.get("tokens_per_block") or DEFAULT_TOKENS_PER_BLOCK
    _positive({"tokens_per_block": tokens_per_block}, "tokens_per_block", directory)
    return Source(directory, config, forge, limits, tokens_per_block, packed=True)


def open_model(directory: Path, device: UsableDevice | None = None, compute_dtype: ModelDtype | None = None) -> Source:
    """Open an engine, or a checkpoint with the reference kernels. An engine's device and compute type are fixed."""
    if is_engine(directory):
        source = open_engine(directory)
        for name, asked, built in (
            ("device", device, source.forge.device),
            ("compute type", compute_dtype, source.forge.compute_dtype),
        ):
            if asked not in (None, built):
                raise ForgeError(
                    f"{directory} was compiled for the {name} {built}, not {asked}",
                    hint=f"Compile the checkpoint for {asked}, or pass the checkpoint itself.",
                )
        return source
    config = read_checkpoint_config(directory)
    spec = DecoderSpec.of(config, 0)
    forge = ForgeSection(
        device=device or "cpu",
        compute_dtype=compute_dtype or "float32",
        kernels=reference_kernels(spec.algorithm, mixed=spec.layer_formats is not None),
    )
    longest = scaled_length(config.max_position_embeddings, config.rotary_scaling) or 2048
    limits = BatchLimits(max_batch_size=32, max_num_tokens=8192, max_input_len=longest, max_seq_len=longest)
    return Source(directory, config, forge, limits, DEFAULT_TOKENS_PER_BLOCK, packed=False)


def _positive(build: Mapping[str, Any], key: str, directory: Path) -> int:
    value = build.get(key)
    if not isinstance(value, int) or value < 1:
        raise ForgeError(
            f"{directory / 'config.json'}: build_config.{key} is {value!r}, a positive number is expected",
            hint="Compile the checkpoint again.",
        )
    return value
