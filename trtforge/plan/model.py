"""The model that is planned: what its config.json says, and what the headers of its safetensors say where they are."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from trtforge.core.dtypes import ModelDtype
from trtforge.core.errors import ForgeError
from trtforge.core.parallel import Parallel
from trtforge.formats.hf import INDEX, SINGLE, HfConfig, open_checkpoint, read_config, resolve_source
from trtforge.formats.quantization_config import read_quantized_source
from trtforge.formats.quantized_source import QuantizedSource
from trtforge.models.checkpoint_plan import Layout, checkpoint_plan
from trtforge.models.exclusions import excluded_modules, unquantized_rows
from trtforge.models.family import Facts, Family
from trtforge.models.registry import family_of, family_of_checkpoint
from trtforge.plan.accounting import check_sources
from trtforge.plan.known import known_config
from trtforge.plan.weights import RankWeights, rank_weights

MAIN = "main"


@dataclass(frozen=True)
class Model:
    """A model of a known family. `stored`: the quantisation it already has; `stored_bytes`: of its tensors in files.

    `complaint`: why its weights are not what config.json says, None where they are or were not looked at. `shipped`:
    whether its facts are those that travel with the program.
    """

    name: str
    config: HfConfig
    family: Family
    facts: Facts
    stored: QuantizedSource | None = None
    stored_bytes: int | None = None
    complaint: ForgeError | None = None
    shipped: bool = False
    notes: tuple[str, ...] = ()
    _weights: dict[Layout, RankWeights] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of_config(cls, name: str, config: HfConfig) -> "Model":
        """From config.json alone. Raises ForgeError for an architecture or value that is not converted."""
        family = family_of(config.architecture)
        return cls(name, config, family, family.facts(config), stored=read_quantized_source(config))

    def weights(self, layout: Layout) -> RankWeights:
        """The weights of the ranks of a legal layout; its pipeline and number formats do not matter.

        What the source or the layout excludes is unquantised. Raises ForgeError for exclusions that cannot be.
        """
        parallel = Parallel(tp=layout.parallel.tp, ep=layout.parallel.ep)
        key = Layout(parallel, layout.dtype, exclude_modules=layout.exclude_modules)
        if key not in self._weights:
            found = rank_weights(self.family, self.facts, replace(key, exclude_modules=()))
            excludes = self._excludes(layout.exclude_modules)
            if excludes is not None:
                found = found.leaving(unquantized_rows(self.family, self.facts, excludes))
            self._weights[key] = found
        return self._weights[key]

    def whole(self, dtype: ModelDtype, exclude_modules: tuple[str, ...] = ()) -> RankWeights:
        """The weights of the unsplit model."""
        return self.weights(Layout(Parallel(), dtype, exclude_modules=exclude_modules))

    def _excludes(self, patterns: tuple[str, ...]) -> Callable[[str], bool] | None:
        """Whether a linear layer stays unquantised; None where all that can be are quantised."""
        stored = self.stored
        if stored is not None:
            return lambda module: not stored.quantizes(module)
        return excluded_modules(self.family, self.facts, patterns).__contains__ if patterns else None


def find_model(source: str, revision: str = MAIN) -> Model:
    """A model by directory, or hub id: from the facts that travel with the program, else its config.json is fetched.

    Raises ForgeError if there is no such model, or no family for it.
    """
    config = known_config(source) if revision == MAIN and not Path(source).is_dir() else None
    if config is not None:
        return replace(Model.of_config(source, config), shipped=True)
    return model_at(source, resolve_source(source, revision, metadata_only=True))


def model_at(name: str, directory: Path) -> Model:
    """The model in a directory, which need not hold its weights. Raises ForgeError as `find_model` does."""
    if (directory / INDEX).is_file() or (directory / SINGLE).is_file():
        return _with_headers(name, directory)
    return Model.of_config(name, read_config(directory))


def _with_headers(name: str, directory: Path) -> Model:
    """Headers refine what config.json says: names without a prefix, the files' bytes, and whether the two agree."""
    config = read_config(directory)
    base = Model.of_config(name, config)
    try:
        checkpoint = open_checkpoint(directory)
    except ForgeError as error:
        note = f"planned from config.json alone: {error.message}"
        return Model(name, config, base.family, base.facts, base.stored, notes=(note,))
    family = family_of_checkpoint(checkpoint)
    layout, complaint = Layout(Parallel(), "bfloat16"), None
    if base.stored is not None:
        stored = base.stored
        layout = replace(layout, quant=stored.format, group_size=stored.group_size, source=stored)
    try:
        check_sources(checkpoint, family, checkpoint_plan(family, base.facts, layout))
    except ForgeError as error:
        complaint = error
    stored_bytes = sum(tensor.spec.nbytes for tensor in checkpoint.tensors.values())
    return Model(name, config, family, base.facts, base.stored, stored_bytes, complaint)
