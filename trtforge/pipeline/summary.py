"""Floor 5: facts of a build before it starts: model, formats, layout, hardware. Needs no network access and no weights.

Imports no stage: `trtforge build` shows this at once.
"""

from pathlib import Path

from trtforge.core.dtypes import model_dtype
from trtforge.core.errors import ForgeError
from trtforge.core.parallel import Parallel
from trtforge.core.recipe import Recipe
from trtforge.formats.hf import cached_source, read_config
from trtforge.models.formats import FORMATS
from trtforge.pipeline.record import DeploymentRecord, ModelRecord
from trtforge.plan.known import known_config
from trtforge.plan.model import MAIN, Model
from trtforge.plan.published import published_format, served_as_published, weight_format
from trtforge.plan.weights import Stored

_PLAIN = 2  # bytes of a weight in 16 bits


def light_model(recipe: Recipe) -> Model | None:
    """The recipe's model from its config.json alone; None if config.json is not on this machine or not supported."""
    source, revision = recipe.model.source, recipe.model.revision
    try:
        config = known_config(source) if revision == MAIN and not Path(source).is_dir() else None
        if config is None:
            directory = cached_source(source, revision)
            config = None if directory is None else read_config(directory)
        return None if config is None else Model.of_config(source, config)
    except ForgeError:
        return None


def is_quantized(recipe: Recipe) -> bool:
    """Whether the recipe's model is already quantised, as far as its config.json is known on this machine."""
    model = light_model(recipe)
    return model is not None and model.stored is not None


def model_record(model: Model) -> ModelRecord:
    """Name, family, parameters and bytes of a model."""
    count = parameters(model)
    files = tuple(Path(model.name).glob("model*.safetensors")) if Path(model.name).is_dir() else ()
    stored = sum(path.stat().st_size for path in files)
    return ModelRecord(
        name=model.name, family=model.family.name, parameters=count, source_bytes=stored or _source_bytes(model, count)
    )


def parameters(model: Model) -> int:
    """Weights of the Hugging Face model; tied embeddings count once."""
    count = 0
    for block, copies in model.whole("bfloat16").blocks(Parallel(), 0):
        weights = sum(matrix.weights for matrix in block.matrices if not matrix.absorbed)
        count += copies * (weights + block.other // _PLAIN)
    sizes = model.facts.sizes
    return count - (sizes.vocab * sizes.hidden if model.facts.tied_embeddings else 0)


def _source_bytes(model: Model, count: int) -> int:
    if model.config.fp8_blocks is not None:
        return count
    if model.config.mxfp4_experts:
        stored = Stored(weight_format(model.config, "llmapi", "none"), _PLAIN)
        total = 0
        for block, copies in model.whole("bfloat16").blocks(Parallel(), 0):
            matrices = (m.nbytes(stored) if m.formatted else m.weights * _PLAIN for m in block.matrices)
            total += copies * (block.other + sum(matrices))
        return total
    return count * (4 if model.config.dtype == "float32" else _PLAIN)


def deployment_of(recipe: Recipe, model: Model | None) -> DeploymentRecord:
    """Formats, layout and hardware of a recipe. A model that is already quantised keeps its formats."""
    quant, parallel, target = recipe.quantization, recipe.parallel, recipe.engine.target
    name, group, kv_cache = quant.format, int(quant.group_size), quant.kv_cache
    described: str = name
    stored = None if model is None else model.stored
    if stored is not None and name in ("none", stored.format):
        name, group, described = stored.format, stored.group_size, stored.described
        kv_cache = "fp8" if stored.fp8_kv_cache else kv_cache
    gpus = parallel.tp * parallel.pp
    if target.gpu is not None:
        hardware = f"{gpus} x {target.gpu}"
    else:
        hardware = "embedded engine" if recipe.engine.backend == "torch" else "this machine"
        hardware += f", {gpus} ranks" if gpus > 1 else ""
    published = model is not None and served_as_published(model.config, recipe.engine.backend, quant.format)
    return DeploymentRecord(
        quant=f"{published_format(model.config)}, as published" if model is not None and published else described,
        group_size=group if FORMATS[name].rounding == "int4" else None,
        kv_cache=kv_cache,
        dtype=None if model is None else model_dtype(recipe.model.dtype, model.config.dtype),
        tp=parallel.tp,
        pp=parallel.pp,
        ep=parallel.ep,
        hardware=hardware,
    )
