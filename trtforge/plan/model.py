"""The model to plan for: its config.json, and its safetensors headers where they are present."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

from trtforge.core.dtypes import ModelDtype, dtype_named
from trtforge.core.errors import ForgeError
from trtforge.core.parallel import Parallel
from trtforge.core.recipe import KvCacheFormat, QuantFormat
from trtforge.formats.hf import INDEX, SINGLE, HfConfig, open_checkpoint, read_config, resolve_source
from trtforge.formats.quantization_config import read_quantized_source
from trtforge.formats.quantized_source import QuantizedSource
from trtforge.formats.trtllm import CheckpointConfig
from trtforge.models.checkpoint_config import formats_by_row
from trtforge.models.checkpoint_plan import Layout, checkpoint_plan
from trtforge.models.exclusions import excluded_modules, formats_in_source, unquantized_rows
from trtforge.models.family import Facts, Family
from trtforge.models.registry import family_of_checkpoint, family_of_config
from trtforge.models.vision import vision_weights
from trtforge.plan.accounting import check_sources
from trtforge.plan.formats import WEIGHTS, WeightFormat
from trtforge.plan.known import known_config
from trtforge.plan.weights import RankWeights, rank_weights

MAIN = "main"


@dataclass(frozen=True)
class Model:
    """A model of a known family. `stored`: the quantisation that it already has; `stored_bytes`: of its tensor files.

    `complaint`: how its weights contradict config.json; None if they agree or were not read. `shipped`: whether its
    facts come from `known_models.json`. `checkpoint`: config.json of a TensorRT-LLM checkpoint, whose layout and
    formats are fixed; None for a Hugging Face model. `vision_bytes`: of a multimodal model's vision part, which the LLM
    API loads; None if unknown.
    """

    name: str
    config: HfConfig
    family: Family
    facts: Facts
    stored: QuantizedSource | None = None
    stored_bytes: int | None = None
    complaint: ForgeError | None = None
    shipped: bool = False
    checkpoint: CheckpointConfig | None = None
    vision_bytes: int | None = 0
    notes: tuple[str, ...] = ()
    _weights: dict[Layout, RankWeights] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of_config(cls, name: str, config: HfConfig) -> "Model":
        """From config.json alone. Raises ForgeError for an architecture or value that conversion does not support."""
        family = family_of_config(config)
        weights = vision_weights(config)
        vision = None if weights is None else weights * dtype_named(config.dtype).size
        stored = read_quantized_source(config)
        return cls(name, config, family, family.facts(config), stored=stored, vision_bytes=vision)

    @property
    def kv_caches(self) -> tuple[KvCacheFormat, ...]:
        """The formats that the KV cache of a checkpoint can have; a quantised model keeps its own."""
        stored = self.stored
        if stored is None:
            return get_args(KvCacheFormat)
        if stored.fp8_kv_cache:
            return ("fp8",)
        return tuple(name for name in get_args(KvCacheFormat) if stored.kv_cache_problem(name) is None)

    def weights(self, layout: Layout) -> RankWeights:
        """The weights of one tensor-parallel rank of a legal layout; its pipeline and number formats are ignored.

        Modules that the source or the layout excludes stay unquantised. Raises ForgeError for invalid exclusions.
        """
        parallel = Parallel(tp=layout.parallel.tp, ep=layout.parallel.ep)
        key = Layout(parallel, layout.dtype, exclude_modules=layout.exclude_modules)
        if self.checkpoint is not None:
            made = self.checkpoint
            key = replace(
                key,
                parallel_embedding=made.use_parallel_embedding,
                embedding_sharding_dim=made.embedding_sharding_dim,
            )
        if key not in self._weights:
            found = rank_weights(self.family, self.facts, replace(key, exclude_modules=()))
            formats = self._formats(layout.exclude_modules)
            self._weights[key] = found.with_formats(formats) if formats is not None else found
        return self._weights[key]

    def whole(self, dtype: ModelDtype, exclude_modules: tuple[str, ...] = ()) -> RankWeights:
        """The weights of the unsplit model."""
        return self.weights(Layout(Parallel(), dtype, exclude_modules=exclude_modules))

    def _formats(self, patterns: tuple[str, ...]) -> Sequence[Mapping[str, WeightFormat]] | None:
        """In each decoder layer, the linear layers whose format differs from the model's; None if no layer differs."""
        mixed = self.checkpoint is not None and self.checkpoint.quantization.quantized_layers is not None
        excludes = self._excludes(patterns)
        if not mixed and excludes is None:
            return None
        layers: list[dict[str, WeightFormat]] = [{} for _ in range(self.facts.sizes.num_layers)]
        found: Iterator[tuple[int, str, QuantFormat]] = iter(())
        if self.checkpoint is not None:
            found = formats_by_row(self.checkpoint, self.family, self.facts)
        elif self.stored is not None and self.stored.mixed:
            found = formats_in_source(self.stored, self.family, self.facts)
        for layer, row, quant in found:
            layers[layer][row] = WEIGHTS[quant]
        if excludes is not None:
            for layer, names in enumerate(unquantized_rows(self.family, self.facts, excludes)):
                layers[layer] |= dict.fromkeys(names, WEIGHTS["none"])
        return layers

    def _excludes(self, patterns: tuple[str, ...]) -> Callable[[str], bool] | None:
        """Function that tells whether a linear layer stays unquantised; None if all quantisable ones are quantised."""
        stored = self.stored
        if stored is not None:
            return lambda module: not stored.quantizes(module)
        return excluded_modules(self.family, self.facts, patterns).__contains__ if patterns else None


def find_model(source: str, revision: str = MAIN) -> Model:
    """A model by directory or hub id; the config.json of a hub id is fetched unless its facts are shipped.

    Raises ForgeError if the model does not exist or its architecture is not supported.
    """
    config = known_config(source) if revision == MAIN and not Path(source).is_dir() else None
    if config is not None:
        return replace(Model.of_config(source, config), shipped=True)
    return model_at(source, resolve_source(source, revision, metadata_only=True))


def model_at(name: str, directory: Path) -> Model:
    """The model in a directory, with or without its weights. Raises ForgeError as `find_model` does."""
    if (directory / INDEX).is_file() or (directory / SINGLE).is_file():
        return _with_headers(name, directory)
    return Model.of_config(name, read_config(directory))


def _with_headers(name: str, directory: Path) -> Model:
    """The model with what its headers add: tensor names without a prefix, bytes of the files, and contradictions."""
    config = read_config(directory)
    base = Model.of_config(name, config)
    try:
        checkpoint = open_checkpoint(directory)
    except ForgeError as error:
        note = f"planned from config.json alone: {error.message}"
        return replace(base, notes=(note,))
    family = family_of_checkpoint(checkpoint)
    layout, complaint = Layout(Parallel(), "bfloat16"), None
    if base.stored is not None:
        stored = base.stored
        layout = replace(layout, quant=stored.format, group_size=stored.group_size, source=stored)
        if stored.fp8_kv_cache:
            layout = replace(layout, kv_cache="fp8")
    try:
        check_sources(checkpoint, family, base.facts, checkpoint_plan(family, base.facts, layout))
    except ForgeError as error:
        complaint = error
    sizes = {name: tensor.spec.nbytes for name, tensor in checkpoint.tensors.items()}
    vision = sum(size for name, size in sizes.items() if name.startswith(family.carried or ("\0",)))
    return Model(name, config, family, base.facts, base.stored, checkpoint.stored_bytes, complaint, vision_bytes=vision)
