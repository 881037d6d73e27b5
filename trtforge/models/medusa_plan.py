"""Medusa heads in a checkpoint plan: their targets in every rank file and their config.json.

Sources: `load_medusa_hf` (tensorrt_llm/models/medusa/weight.py), `MedusaConfig` (config.py beside it) and
examples/medusa/convert_checkpoint.py (1.2, b93e14ca). Every pipeline stage has the heads, as TensorRT-LLM loads them on
every rank. They stay unquantised; in a quantised model config.json excludes them.
"""

from collections.abc import Iterator
from pathlib import Path

from trtforge.core.dtypes import dtype_named
from trtforge.core.errors import ForgeError
from trtforge.core.features import MedusaFeature
from trtforge.formats.hf import HfConfig
from trtforge.formats.medusa import MEDUSA_FILE, MEDUSA_MODULES, MedusaHeads, head_shapes, name_in_rank, read_medusa
from trtforge.formats.shards import TensorSpec
from trtforge.formats.trtllm import MEDUSA_ARCHITECTURE, CheckpointConfig
from trtforge.models.checkpoint_plan import Layout
from trtforge.models.content import Cast, Piece, Target
from trtforge.models.family import Sizes
from trtforge.models.split import column_cuts

MEDUSA_HEADS, MEDUSA_LAYERS, TREE_TOKENS = 4, 1, 63
"""The converter's defaults: heads, residual layers of a head, draft tokens of a step."""


def require_heads(medusa: MedusaFeature, heads: int, layers: int, where: str) -> None:
    """Raises ForgeError for more heads than there are, or other numbers of layers. `where`: the source of the heads."""
    for name, asked, has in (("heads", medusa.heads, heads), ("layers", medusa.layers, layers)):
        if asked is not None and (asked > has or (name == "layers" and asked != has)):
            raise ForgeError(
                f"engine.features.medusa.{name} is {asked}, {where} has {has}",
                hint=f"Leave {name} out, or give {has}.",
            )
    most = medusa.heads or heads
    if (medusa.tree_depth or 0) > most:
        raise ForgeError(
            f"engine.features.medusa.choices are {medusa.tree_depth} tokens deep, and {most} heads are used",
            hint=f"Use choices of at most {most} tokens.",
        )


def converted_heads(medusa: MedusaFeature, found: MedusaHeads) -> int:
    """The number of heads to convert. Raises ForgeError as `require_heads` does."""
    require_heads(medusa, found.heads, found.layers, MEDUSA_FILE)
    return medusa.heads or min(MEDUSA_HEADS, found.heads)


def medusa_targets(found: MedusaHeads, heads: int, sizes: Sizes, layout: Layout) -> Iterator[Target]:
    """The heads' tensors of every pipeline stage, cut by rows; the LM heads' are zero-padded to a multiple of tp."""
    tp, dtype = layout.parallel.tp, dtype_named(layout.dtype)
    for stage in range(layout.parallel.pp):
        for name, shape in head_shapes(heads, found.layers, sizes.hidden, sizes.vocab).items():
            each = -(-shape[0] // tp)
            cuts = column_cuts(range(shape[0]), shape[1] if len(shape) > 1 else 1, tp, rows_each=each)
            padding = tuple(each - cut.height for cut in cuts)
            spec = TensorSpec(name_in_rank(name), dtype, (each, *shape[1:]))
            yield Target(spec, stage, Cast((Piece(name, shape, cuts),), padding))


def planned_medusa(
    config: CheckpointConfig, source: HfConfig, medusa: MedusaFeature, *, assumed: bool = False
) -> CheckpointConfig:
    """`config` of a model with the heads in `medusa.model`. Raises ForgeError for heads of another model.

    `assumed`: nothing is read; the heads are assumed to have the requested or default numbers.
    """
    if assumed:
        expected = MedusaHeads(medusa.heads or MEDUSA_HEADS, medusa.layers or MEDUSA_LAYERS, {})
        return with_medusa(config, source, medusa, expected)
    found = read_medusa(Path(medusa.model or ""), config.hidden_size, config.vocab_size)
    return with_medusa(config, source, medusa, found)


def with_medusa(
    config: CheckpointConfig, source: HfConfig, medusa: MedusaFeature, found: MedusaHeads
) -> CheckpointConfig:
    """The config.json of a model with heads. TensorRT-LLM chooses the network by Hugging Face's `model_type`."""
    quantization = config.quantization
    if quantization.exclude_modules is not None:
        excluded = [*quantization.exclude_modules, MEDUSA_MODULES]
        quantization = quantization.model_copy(update={"exclude_modules": excluded})
    return config.model_copy(
        update={
            "architecture": MEDUSA_ARCHITECTURE,
            "quantization": quantization,
            "model_type": str(source.values.get("model_type", "")),
            "max_draft_len": medusa.draft_tokens or TREE_TOKENS,
            "num_medusa_heads": converted_heads(medusa, found),
            "num_medusa_layers": found.layers,
        }
    )
