"""How a tensor of a rank file is computed: its source tensors, the cuts for each rank, and the operation on them.

Data only; `convert.encode` executes it.
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

    `shape` is the tensor's in its file. Cuts refer to the (out, in) matrix: the tensor itself (a vector is one column,
    (out, 1, in) is the same matrix), or its transpose if `transposed`.
    """

    source: str
    shape: tuple[int, ...]
    cuts: tuple[Cut, ...]
    transposed: bool = False


@dataclass(frozen=True)
class Cast:
    """The pieces concatenated by rows and cast to the target's dtype, then `padding` zero rows (a number per rank).

    `plus_one`: 1 is added before the cast.
    """

    pieces: tuple[Piece, ...]
    padding: tuple[int, ...]
    plus_one: bool = False


@dataclass(frozen=True)
class WeightOnly:
    """The pieces concatenated by rows and cast, for TensorRT-LLM's build to round: if the calibration contains codes,
    values that the build rounds to them."""

    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Absorbed:
    """For each of a rank's `heads`: (k_nope^T q_nope) (kv_lora, q_lora), then the rotary rows of the query.

    A head has `nope` + `rope` rows in `query` (its file's shape (heads x (nope + rope), q_lora)) and `nope` + `value`
    rows in `key` ((heads x (nope + value), kv_lora)). Every rank reads both pieces whole.
    """

    query: Piece
    key: Piece
    heads: tuple[range, ...]
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class Quantized:
    """The pieces, smoothed and rounded to a number format.

    `scaled_with`: for each piece, the modules whose joint amax gives its per-tensor scale (fp8, nvfp4).
    `smoothed_with`: the modules that share one pre-quantisation scale, by which the pieces are divided. `scales`: the
    target for the per-row or per-block scales.
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
    """The per-row or per-block scales of the preceding Quantized target, whose `scales` names this target."""


@dataclass(frozen=True)
class WeightScale:
    """float32: weight amax of a group of modules / `bound`. `groups`: for each rank, its groups.

    `smoothed_with`: the modules that share the pre-quantisation scale by which weights are divided first.
    """

    groups: tuple[tuple[tuple[str, ...], ...], ...]
    bound: float
    smoothing: Smoothing | None = None
    smoothed_with: tuple[str, ...] = ()


@dataclass(frozen=True)
class ActivationScale:
    """(1,) float32: amax of the modules' inputs / `bound`, after smoothing if there is any."""

    modules: tuple[str, ...]
    bound: float
    smoothing: Smoothing | None = None


@dataclass(frozen=True)
class PreQuantScale:
    """(in,), or (experts, in), in the model's dtype: the pre-quantisation scale that multiplies inputs at run time."""

    modules: tuple[str, ...]
    smoothing: Smoothing
    cuts: tuple[Cut, ...]
    experts: int | None = None


@dataclass(frozen=True)
class KvScale:
    """(1,) float32: amax of a layer's keys and values / the format's largest value; for FP8 at least 1."""

    layer: int
    format: KvCacheFormat


@dataclass(frozen=True)
class Repacked:
    """The pieces of a quantised source, repacked without changing a value; cuts refer to the packed matrices.

    `words`: int32 words of 4-bit codes of eight outputs (`awq`) or eight inputs (`gptq`); None: bytes to copy.
    `scales`: they are E4M3 scales, which must not be negative.
    """

    pieces: tuple[Piece, ...]
    words: Literal["awq", "gptq"] | None = None
    scales: bool = False


@dataclass(frozen=True)
class Rescaled:
    """E4M3 pieces, rescaled to the largest of the scales that are `shared` with each piece.

    `scales`: the name of each piece's own scale.
    """

    pieces: tuple[Piece, ...]
    scales: tuple[str, ...]
    shared: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class StoredScalar:
    """(1,) float32: the largest of the source's scalars, at least `least`; absent ones count as `least`.

    `divisors`: of their inverses.
    """

    names: tuple[str, ...]
    least: float = 0.0
    divisors: bool = False


@dataclass(frozen=True)
class StoredScalars:
    """(groups,) float32: the largest of each group of the source's scalars. `groups`: for each rank; `divisors`: of
    their inverses."""

    groups: tuple[tuple[tuple[str, ...], ...], ...]
    divisors: bool = False


@dataclass(frozen=True)
class StoredScalarRows:
    """(out,) float32: the source's scalars, each repeated for the rows of its matrix on a rank."""

    names: tuple[str, ...]
    cuts: tuple[tuple[Cut, ...], ...]


@dataclass(frozen=True)
class StoredRowScales:
    """(out, `groups`) float32: the source's scale of each row, repeated for its groups of inputs.

    `names`: a vector for each matrix that is concatenated by rows; `cuts`: of that matrix, for each rank.
    """

    names: tuple[str, ...]
    cuts: tuple[tuple[Cut, ...], ...]
    groups: int


@dataclass(frozen=True)
class StoredPreQuant:
    """(in,), or (experts, in), in the model's dtype: the source's pre-quantisation scale, equal under all `names`; ones
    if absent."""

    names: tuple[str, ...]
    cuts: tuple[Cut, ...]
    experts: int | None = None


StoredVector = StoredScalar | StoredScalars | StoredScalarRows | StoredRowScales | StoredPreQuant
"""Made of scalars or vectors of a quantised source, each read whole."""

StoredContent = Repacked | Rescaled | StoredVector
"""Contents from a quantised source, computed by `convert.repacking`."""

Content = (
    Cast
    | WeightOnly
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
    """The source tensors of a content; none if it comes from calibration alone."""
    match content:
        case Absorbed(query=query, key=key):
            return query, key
        case Repacked(pieces=pieces) | Rescaled(pieces=pieces):
            return pieces
        case Cast(pieces=pieces) | WeightOnly(pieces=pieces) | Quantized(pieces=pieces):
            return pieces
        case _:
            return ()


def sources_of(content: Content) -> tuple[str, ...]:
    """The names of all source tensors that determine a content; some may be absent from the source."""
    names: tuple[str, ...] = ()
    match content:
        case Rescaled(shared=shared):
            names = tuple(name for group in shared for name in group)
        case StoredScalars(groups=groups):
            names = tuple(name for of_rank in groups for group in of_rank for name in group)
        case StoredScalar(names=names) | StoredScalarRows(names=names) | StoredPreQuant(names=names):
            pass
        case StoredRowScales(names=names):
            pass
    return (*(piece.source for piece in pieces_of(content)), *names)


@dataclass(frozen=True)
class Target:
    """One tensor in the rank files of a pipeline stage; `spec` is the same on all its tensor-parallel ranks."""

    spec: TensorSpec
    pp_rank: int
    content: Content
