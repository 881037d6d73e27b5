"""What a tensor of a rank file is made of: source tensors, cut for every rank, and what happens to them.

`convert.encode` does what each content says; nothing here touches a tensor.
"""

from dataclasses import dataclass
from typing import Literal

from trtforge.core.recipe import KvCacheFormat
from trtforge.formats.shards import TensorSpec
from trtforge.models.formats import Rounding, Smoothing
from trtforge.models.split import Cut


@dataclass(frozen=True)
class Piece:
    """One source tensor of a target and, for each tensor-parallel rank, the part of it that the rank gets.

    `shape` is the tensor's in its file. The cuts are of the (out, in) matrix: the tensor itself, a vector as one
    column, or where `transposed` the other way round.
    """

    source: str
    shape: tuple[int, ...]
    cuts: tuple[Cut, ...]
    transposed: bool = False


@dataclass(frozen=True)
class Cast:
    """The pieces below one another, cast to the target's dtype, then `padding` rows of zeros for each rank.

    `plus_one`: one is added before the cast.
    """

    pieces: tuple[Piece, ...]
    padding: tuple[int, ...]
    plus_one: bool = False


@dataclass(frozen=True)
class Absorbed:
    """For each of a rank's `heads`: (k_nope^T q_nope) (kv_lora, q_lora), then the rotary rows of the query.

    A head has `nope` + `rope` rows in `query` (its file's shape (heads x (nope + rope), q_lora)) and `nope` + `value`
    rows in `key` ((heads x (nope + value), kv_lora)). Both pieces give every rank everything.
    """

    query: Piece
    key: Piece
    heads: tuple[range, ...]
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class Quantized:
    """The pieces, folded and rounded to a number format.

    `scaled_with`: for each piece, the modules whose largest magnitude gives its scale, where a tensor has one (fp8,
    nvfp4). `smoothed_with`: the modules whose inputs are multiplied by one vector, which is divided out of the pieces.
    `scales`: the target that holds the scales of rows or blocks that rounding gives.
    """

    pieces: tuple[Piece, ...]
    rounding: Rounding
    scaled_with: tuple[tuple[str, ...], ...]
    smoothing: Smoothing | None = None
    smoothed_with: tuple[str, ...] = ()
    group_size: int = 128
    scales: TensorSpec | None = None


@dataclass(frozen=True)
class QuantizedScales:
    """The scales of rows or blocks that writing the Quantized target before gave, under this target's name."""


@dataclass(frozen=True)
class WeightScale:
    """float32: largest weight magnitude of a group of modules / `bound`; for each rank, its groups.

    With `smoothed_with`, the magnitudes of what is left when that vector has been divided out.
    """

    groups: tuple[tuple[tuple[str, ...], ...], ...]
    bound: float
    smoothing: Smoothing | None = None
    smoothed_with: tuple[str, ...] = ()


@dataclass(frozen=True)
class ActivationScale:
    """(1,) float32: largest magnitude of the modules' inputs, smoothed where there is a smoothing, / `bound`."""

    modules: tuple[str, ...]
    bound: float
    smoothing: Smoothing | None = None


@dataclass(frozen=True)
class PreQuantScale:
    """(in,) of the model's dtype: the runtime multiplies inputs by it; `experts` times where that is not None."""

    modules: tuple[str, ...]
    smoothing: Smoothing
    cuts: tuple[Cut, ...]
    experts: int | None = None


@dataclass(frozen=True)
class KvScale:
    """(1,) float32: largest key or value of a layer / what the format holds; FP8: at least 1."""

    layer: int
    format: KvCacheFormat


@dataclass(frozen=True)
class Repacked:
    """The pieces of a quantised source, no value changed; their cuts are of the packed matrices.

    `words`: int32 words of eight 4-bit codes, `awq`: of eight outputs, `gptq`: of eight inputs; None: bytes that move.
    """

    pieces: tuple[Piece, ...]
    words: Literal["awq", "gptq"] | None = None


@dataclass(frozen=True)
class Rescaled:
    """E4M3 pieces, each with its scale's name in `scales`, in the largest scale of `shared`: unchanged where equal."""

    pieces: tuple[Piece, ...]
    scales: tuple[str, ...]
    shared: tuple[str, ...]


@dataclass(frozen=True)
class StoredScalar:
    """(1,) float32: the largest of the source's scalars, at least `least`, which stands in for one that is absent."""

    names: tuple[str, ...]
    least: float = 0.0


@dataclass(frozen=True)
class StoredScalarRows:
    """(out,) float32: the source's scalars, each repeated for every row that a rank gets of its matrix."""

    names: tuple[str, ...]
    cuts: tuple[tuple[Cut, ...], ...]


@dataclass(frozen=True)
class StoredPreQuant:
    """(in,) of the model's dtype: the vector that the source has under each of `names`; ones where it has none."""

    names: tuple[str, ...]
    cuts: tuple[Cut, ...]


StoredContent = Repacked | Rescaled | StoredScalar | StoredScalarRows | StoredPreQuant
"""Contents that come from a quantised source; `convert.repacking` makes them."""

Content = (
    Cast
    | Absorbed
    | Quantized
    | QuantizedScales
    | WeightScale
    | ActivationScale
    | PreQuantScale
    | KvScale
    | StoredContent
)


def pieces_of(content: Content) -> tuple[Piece, ...]:
    """The source tensors that a content is made of; none for what comes from a calibration alone."""
    match content:
        case Absorbed(query=query, key=key):
            return query, key
        case Repacked(pieces=pieces) | Rescaled(pieces=pieces):
            return pieces
        case Cast(pieces=pieces) | Quantized(pieces=pieces):
            return pieces
        case _:
            return ()


def sources_of(content: Content) -> tuple[str, ...]:
    """The names of all source tensors that decide a content; some may be absent from the source."""
    names: tuple[str, ...] = ()
    match content:
        case Rescaled(shared=shared):
            names = shared
        case StoredScalar(names=names) | StoredScalarRows(names=names) | StoredPreQuant(names=names):
            pass
    return (*(piece.source for piece in pieces_of(content)), *names)


@dataclass(frozen=True)
class Target:
    """One tensor in the rank files of a pipeline stage: `spec` is alike on all its tensor-parallel ranks."""

    spec: TensorSpec
    pp_rank: int
    content: Content
