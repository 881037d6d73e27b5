"""The needs of a recipe: GPUs, formats, release, memory, disk and model."""

from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from trtforge.core.dtypes import dtype_named, model_dtype
from trtforge.core.errors import ForgeError
from trtforge.core.parallel import Parallel
from trtforge.core.recipe import EngineBackend, GateConfig, Recipe
from trtforge.formats.hf import open_checkpoint
from trtforge.formats.releases import Release, release
from trtforge.formats.triton import ROLES
from trtforge.formats.trtllm import Quantization
from trtforge.models.registry import family_of
from trtforge.plan.formats import CACHES, WEIGHTS
from trtforge.plan.gpus import Gpu, gpu_named
from trtforge.plan.model import Model as PlannedModel
from trtforge.plan.peaks import verify_host_peak

_SCALES = 1.1
"""Size of quantised weights with their scales, relative to the weights alone."""


@dataclass(frozen=True)
class Model:
    """A checkpoint on this machine, from its headers.

    `stored`: bytes of its weights; `verification`: bytes of host memory for `trtforge verify`.

    `embedding`: parameters of the embedding and the LM head, which stay in the model's dtype.
    """

    architecture: str
    parameters: int
    embedding: int
    stored: int
    verification: int
    transformers: str | None


@dataclass(frozen=True)
class Needs:
    """`gpus`: the number of GPUs for the engine; 0 for the CPU (a GPU is used if present).

    `target`: the recipe's GPU; `release`: its release of TensorRT-LLM. `model`: None if it is not on this machine, an
    error if it cannot be built.
    """

    recipe: str | None = None
    backend: EngineBackend = "torch"
    ranks: int = 1
    gpus: int = 0
    format: str = "none"
    quantization: Quantization = field(default_factory=Quantization)
    target: Gpu | None = None
    release: Release | None = None
    source: str | None = None
    model: Model | ForgeError | None = None

    @property
    def python_models(self) -> int:
        """Number of the repository's models that run in Python; TensorRT-LLM's own backend is C++."""
        return len(ROLES) - (self.backend == "tensorrt_llm")

    @property
    def weights(self) -> int | None:
        """Approximate bytes of all ranks' weights in the recipe's format; None if the model is unknown."""
        if not isinstance(self.model, Model):
            return None
        model, bits = self.model, WEIGHTS[self.format].bits
        if bits is None:
            return model.stored
        kept = model.embedding * model.stored // model.parameters
        return kept + round((model.parameters - model.embedding) * bits / 8 * _SCALES)

    @property
    def host_memory(self) -> tuple[int, str] | None:
        """Peak bytes of host memory, and the text that names their use; None if the model is unknown."""
        if not isinstance(self.model, Model) or self.weights is None:
            return None
        served = self.weights if self.backend == "torch" and not self.gpus else 0
        return max((self.model.verification, "`trtforge verify` takes"), (served, "the engine's weights take"))


def needs_of(recipe: Recipe, auto: EngineBackend = "torch") -> Needs:
    """The needs of `recipe`; `auto`: the backend to assume if the recipe says `auto`.

    Raises ForgeError for a GPU, release or layout that does not exist. Nothing is fetched.
    """
    wanted = recipe.engine.backend
    # The LLM API needs the same as engines: GPUs, and NVIDIA's container if TensorRT-LLM is not installed.
    backend = auto if wanted == "auto" else "tensorrt_llm" if wanted == "llmapi" else wanted
    layout = Parallel(recipe.parallel.tp, recipe.parallel.pp, recipe.parallel.ep)
    ranks = layout.world_size
    on_gpus = backend == "tensorrt_llm" or recipe.engine.device == "cuda"
    quantization = recipe.quantization
    target = recipe.engine.target
    return Needs(
        recipe=recipe.name,
        backend=backend,
        ranks=ranks,
        gpus=ranks if on_gpus else 0,
        format=quantization.format,
        quantization=Quantization(
            quant_algo=WEIGHTS[quantization.format].algorithm,
            kv_cache_quant_algo=CACHES[quantization.kv_cache].algorithm,
        ),
        target=gpu_named(target.gpu) if target.gpu is not None else None,
        release=release(target.tensorrt_llm) if backend == "tensorrt_llm" and wanted != "llmapi" else None,
        source=recipe.model.source,
        model=_model(Path(recipe.model.source), recipe.gate),
    )


def _model(source: Path, gate: GateConfig) -> Model | ForgeError | None:
    if not source.is_dir():
        return None
    try:
        checkpoint = open_checkpoint(source)
        facts = family_of(checkpoint.config.architecture).facts(checkpoint.config)
        dtype = model_dtype("auto", checkpoint.config.dtype)
        whole = PlannedModel.of_config(str(source), checkpoint.config).whole(dtype)
    except ForgeError as error:
        return error
    written_by = checkpoint.config.values.get("transformers_version")
    return Model(
        architecture=checkpoint.config.architecture,
        parameters=sum(prod(tensor.spec.shape) for tensor in checkpoint.tensors.values()),
        embedding=facts.sizes.vocab * facts.sizes.hidden * (1 if facts.tied_embeddings else 2),
        stored=checkpoint.stored_bytes,
        verification=verify_host_peak(whole, dtype_named(dtype).size, facts, gate),
        transformers=written_by if isinstance(written_by, str) else None,
    )
