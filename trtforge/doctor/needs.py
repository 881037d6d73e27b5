"""What a recipe asks of the machine: GPUs, formats, a release, memory, disk, and what its model is."""

from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Literal

from trtforge.core.errors import ForgeError
from trtforge.core.parallel import Parallel
from trtforge.core.recipe import Recipe
from trtforge.formats.hf import open_checkpoint
from trtforge.formats.releases import Release, release
from trtforge.formats.triton import ROLES
from trtforge.formats.trtllm import Quantization
from trtforge.models.registry import family_of
from trtforge.plan.formats import CACHES, WEIGHTS
from trtforge.plan.gpus import Gpu, gpu_named

_SCALES = 1.1
"""Scales take about a tenth on top of quantised weights."""


@dataclass(frozen=True)
class Model:
    """A checkpoint that is on this machine, as its headers tell. `stored`: bytes of its weights.

    `embedding`: parameters of the embedding and the output head, which stay in the model's dtype.
    """

    architecture: str
    parameters: int
    embedding: int
    stored: int
    transformers: str | None


@dataclass(frozen=True)
class Needs:
    """`gpus`: how many the engine runs on; 0 runs on the CPU (and takes a GPU where it can).

    `target`: the GPU and `release` the TensorRT-LLM that the recipe names. `model`: None where it is not here yet,
    or an error where it can never be built.
    """

    recipe: str | None = None
    backend: Literal["torch", "tensorrt_llm"] = "torch"
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
        """Models of the repository that the server runs in Python; TensorRT-LLM's own backend is C++."""
        return len(ROLES) - (self.backend == "tensorrt_llm")

    @property
    def weights(self) -> int | None:
        """Bytes of all ranks' weights in the recipe's format, about; None where the model is not known."""
        if not isinstance(self.model, Model):
            return None
        model, bits = self.model, WEIGHTS[self.format].bits
        if bits is None:
            return model.stored
        kept = model.embedding * model.stored // model.parameters
        return kept + round((model.parameters - model.embedding) * bits / 8 * _SCALES)

    @property
    def reference(self) -> int | None:
        """Bytes of the Hugging Face model in float32, which `verify` compares with."""
        return 4 * self.model.parameters if isinstance(self.model, Model) else None


def needs_of(recipe: Recipe, auto: Literal["torch", "tensorrt_llm"] = "torch") -> Needs:
    """What `recipe` needs where its backend `auto` is `auto`.

    Raises ForgeError for a GPU, release or layout that does not exist. Nothing is fetched.
    """
    wanted = recipe.engine.backend
    # What the LLM API needs is what engines need: GPUs, and NVIDIA's container where TensorRT-LLM is not installed.
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
        model=_model(Path(recipe.model.source)),
    )


def _model(source: Path) -> Model | ForgeError | None:
    if not source.is_dir():
        return None
    try:
        checkpoint = open_checkpoint(source)
        facts = family_of(checkpoint.config.architecture).facts(checkpoint.config)
    except ForgeError as error:
        return error
    written_by = checkpoint.config.values.get("transformers_version")
    return Model(
        architecture=checkpoint.config.architecture,
        parameters=sum(prod(tensor.spec.shape) for tensor in checkpoint.tensors.values()),
        embedding=facts.sizes.vocab * facts.sizes.hidden * (1 if facts.tied_embeddings else 2),
        stored=sum(tensor.spec.nbytes for tensor in checkpoint.tensors.values()),
        transformers=written_by if isinstance(written_by, str) else None,
    )
