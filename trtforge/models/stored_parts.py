"""The packed tensors of a quantised source, cut for every rank, and their required values."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from trtforge.core.dtypes import Dtype
from trtforge.core.errors import ForgeError
from trtforge.formats.quantized_source import QuantizedSource
from trtforge.models.content import Piece
from trtforge.models.split import Cut

FLOATS = ("float32", "float16", "bfloat16")

Holds = Literal["anything", "a_scale", "scales", "zero_points", "groups_in_order", "zeros", "a_divisor"]


@dataclass(frozen=True)
class Expected:
    """A tensor of a quantised source: shape (dimensions of 1 are ignored), dtypes and required values.

    `a_scale` and `scales` are not negative, `a_divisor` is above zero. `zero_points`: int32 words whose nibbles are all
    `code`, the symmetric zero point; `groups_in_order`: element i is i // `code`.
    """

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    holds: Holds = "anything"
    code: int = 0
    optional: bool = False

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a stored tensor's shape matches."""
        return [n for n in shape if n != 1] == [n for n in self.shape if n != 1]


@dataclass(frozen=True)
class StoredSources:
    """The tensors that a plan reads from a quantised source.

    Those of one group in `alike` must have equal values. `input_scales`: scalars of which each group's largest scales
    inputs, so it must be above zero; an expert that no calibration sample reached may have a scale of zero.
    """

    tensors: Mapping[str, Expected] = field(default_factory=dict)
    alike: tuple[tuple[str, ...], ...] = ()
    input_scales: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class StoredPart:
    """A module with `out` outputs and `inputs` inputs; `weight`: its matrix, cut for the ranks."""

    module: str
    out: int
    inputs: int
    weight: Piece
    source: QuantizedSource


class StoredParts:
    """Cuts a source's packed tensors and collects the requested ones."""

    def __init__(self, source: QuantizedSource, dtype: Dtype) -> None:
        self.source = source
        self.dtype = dtype
        self._tensors: dict[str, Expected] = {}
        self._found: dict[str, QuantizedSource | None] = {}
        self.alike: list[tuple[str, ...]] = []
        self.input_scales: list[tuple[str, ...]] = []

    @property
    def sources(self) -> StoredSources:
        """The source tensors that all targets so far need."""
        return StoredSources(self._tensors, tuple(self.alike), tuple(self.input_scales))

    def takes(self, modules: tuple[str, ...]) -> bool:
        """Whether these modules, fused in TensorRT-LLM, are quantised. Raises ForgeError if only some are."""
        found = [self._source_of(module) for module in modules]
        if any(found) and not all(found):
            quantized = [each is not None for each in found]
            raise ForgeError(
                f"{modules[quantized.index(True)]} is quantised and {modules[quantized.index(False)]} is not: "
                "TensorRT-LLM has one matrix for both",
                hint="Quantise both or neither, or convert the original checkpoint.",
            )
        self.require_one_format(modules)
        return all(found)

    def require_one_format(self, modules: tuple[str, ...]) -> None:
        """Raises ForgeError if quantised modules that TensorRT-LLM joins have different formats."""
        found = {module: each for module in modules if (each := self._source_of(module)) is not None}
        first = next(iter(found.values()), None)
        if any(each is not first for each in found.values()):
            raise ForgeError(
                f"{', '.join(f'{module} is {each.format}' for module, each in found.items())}: TensorRT-LLM has one "
                "format for them",
                hint="Quantise them alike, or convert the original checkpoint.",
            )

    def _source_of(self, module: str) -> QuantizedSource | None:
        """The module's quantisation, cached, as large models have tens of thousands of experts."""
        if module not in self._found:
            self._found[module] = self.source.of(module)
        return self._found[module]

    def part(self, weight: Piece) -> StoredPart:
        """The quantised module of a matrix."""
        out, inputs = weight.shape[::-1] if weight.transposed else weight.shape
        module = weight.source.removesuffix(".weight")
        source = self._source_of(module)
        assert source is not None, f"{module} is not quantised"
        return StoredPart(module, out, inputs, weight, source)

    def piece(
        self,
        part: StoredPart,
        suffix: str,
        dtypes: tuple[str, ...],
        *,
        rows: int = 1,
        columns: int = 1,
        transposed: bool = False,
    ) -> Piece:
        """A part's packed matrix: one element for `rows` outputs and `columns` inputs of a weight."""
        if part.weight.transposed and not transposed:
            raise ForgeError(
                f"{part.module} is a Conv1D layer, which is not converted from {self.source.tool} checkpoints",
                hint="Convert the original float16 or bfloat16 checkpoint; trtforge quantises it.",
            )
        cuts = tuple(self.packed(part, cut, rows, columns) for cut in part.weight.cuts)
        shape = (part.out // rows, part.inputs // columns)
        name = f"{part.module}.{suffix}"
        self.expect(name, shape[::-1] if transposed else shape, dtypes)
        return Piece(name, self._tensors[name].shape, cuts, transposed)

    def packed(self, part: StoredPart, cut: Cut, rows: int, columns: int) -> Cut:
        """A rank's cut of a packed matrix. Raises ForgeError if the cut would split an element."""
        for what, size, edges in (
            ("outputs", rows, [edge for span in cut.rows for edge in (span.start, span.stop)]),
            ("inputs", columns, [cut.cols.start, cut.cols.stop]),
        ):
            if any(edge % size for edge in edges):
                raise ForgeError(
                    f"{part.module}: a rank's {what} are not a multiple of {size}, the {self.source.tool} packing",
                    hint="Choose a smaller --tp, or convert the original checkpoint.",
                )
        spans = tuple(range(span.start // rows, span.stop // rows) for span in cut.rows)
        return Cut(spans, range(cut.cols.start // columns, cut.cols.stop // columns))

    def column(self, part: StoredPart, suffix: str, dtypes: tuple[str, ...]) -> Piece:
        """A part's scales of its outputs."""
        name = f"{part.module}.{suffix}"
        self.expect(name, (part.out,), dtypes, holds="scales")
        cuts = tuple(replace(cut, cols=range(1)) for cut in part.weight.cuts)
        return Piece(name, (part.out,), cuts)

    def scalar(self, module: str, suffix: str, *, divisor: bool = False) -> str:
        """The name of a module's scalar scale, which must be finite and not negative; a divisor must be above zero."""
        name = f"{module}.{suffix}"
        self.expect(name, (1,), FLOATS, holds="a_divisor" if divisor else "a_scale")
        return name

    def expect(
        self,
        name: str,
        shape: tuple[int, ...],
        dtypes: tuple[str, ...],
        *,
        holds: Holds = "anything",
        code: int = 0,
        optional: bool = False,
    ) -> None:
        self._tensors[name] = Expected(shape, dtypes, holds, code, optional)
