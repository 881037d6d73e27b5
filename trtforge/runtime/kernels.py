"""Which kernels compute a rank on a device, and packing a checkpoint's tensors for them."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from trtforge.core.config import Config
from trtforge.core.errors import ForgeError
from trtforge.formats.trtllm import CheckpointConfig
from trtforge.runtime.fp8_linear import Fp8Dense, Fp8ScaledMatmul
from trtforge.runtime.int4_linear import Int4Dense, Int4Packed
from trtforge.runtime.linear import Dense, Kernel, Stored, merged
from trtforge.runtime.spec import Algorithm, DecoderSpec
from trtforge.runtime.weights import Weights

Device = Literal["cpu", "cuda"]
ComputeDtype = Literal["float32", "bfloat16", "float16"]
KernelName = Literal["dense", "fp8_dense", "fp8_scaled_mm", "int4_dense", "int4_packed_cpu", "int4_packed_cuda"]

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_REFERENCE: dict[Algorithm, KernelName] = {"none": "dense", "fp8": "fp8_dense", "int4_awq": "int4_dense"}


class Kernels(Config):
    """The `kernels` object of an engine's config.json: how its quantised linear layers are computed.

    `cpu_capability` is set where the packed layout depends on the CPU's instruction set.
    """

    quantized: KernelName = "dense"
    cpu_capability: str | None = None

    def check(self) -> None:
        """Raises ForgeError if this machine cannot use weights that were packed for another one."""
        here = torch.backends.cpu.get_cpu_capability()
        if self.cpu_capability not in (None, here):
            raise ForgeError(
                f"the engine's weights were packed for {self.cpu_capability} CPUs, this one is {here}",
                hint="Compile the checkpoint again on this machine.",
            )


def reference_kernels(algorithm: Algorithm) -> Kernels:
    """Plain arithmetic on any device and in any compute type: what a checkpoint is verified with."""
    return Kernels(quantized=_REFERENCE[algorithm])


def choose_kernels(algorithm: Algorithm, group_size: int, device: Device, dtype: ComputeDtype) -> Kernels:
    """The fastest kernels for a device."""
    match algorithm, device:
        case "fp8", "cuda" if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9):
            return Kernels(quantized="fp8_scaled_mm")
        case "int4_awq", "cuda" if dtype == "bfloat16":
            return Kernels(quantized="int4_packed_cuda")
        case "int4_awq", "cpu" if dtype == "bfloat16" and group_size in (32, 64, 128, 256):
            return Kernels(quantized="int4_packed_cpu", cpu_capability=torch.backends.cpu.get_cpu_capability())
        case _:
            return reference_kernels(algorithm)


def kernel_of(spec: DecoderSpec, kernels: Kernels, module: str) -> Kernel:
    """The kernel of one linear layer."""
    if not spec.quantized(module):
        return Dense()
    match kernels.quantized:
        case "dense":
            return Dense()
        case "fp8_dense":
            return Fp8Dense()
        case "fp8_scaled_mm":
            return Fp8ScaledMatmul()
        case "int4_dense":
            return Int4Dense()
        case "int4_packed_cpu":
            return Int4Packed("cpu")
        case "int4_packed_cuda":
            return Int4Packed("cuda")


def pack_rank(
    config: CheckpointConfig, index: int, tensors: Weights | Mapping[str, Tensor], kernels: Kernels, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The tensors of rank `index` of a checkpoint as `kernels` want them, ready for a safetensors file.

    mlp.fc and mlp.gate become mlp.fc_gate where one scale serves both. Every tensor is used; ForgeError names the
    first that is missing, of the wrong shape or without a place.
    """
    spec = DecoderSpec.of(config, index)
    source = tensors if isinstance(tensors, Weights) else Weights.of(tensors, f"rank {index}")
    packed: dict[str, Tensor] = {}
    for layer in range(spec.num_layers):
        for module, stored in _layer(spec, source, f"transformer.layers.{layer}"):
            parts = kernel_of(spec, kernels, module).pack(stored, dtype)
            packed |= {f"{module}.{name}": tensor for name, tensor in parts.items()}
        for norm in ("input_layernorm", "post_layernorm"):
            name = f"transformer.layers.{layer}.{norm}.weight"
            packed[name] = source.take(name, spec.hidden_size).to(dtype)
        if spec.fp8_kv_cache:
            name = f"transformer.layers.{layer}.attention.kv_cache_scaling_factor"
            packed[name] = source.take_scalar(name)
    embedding: Tensor | None = None
    if spec.first:
        embedding = packed["transformer.vocab_embedding.weight"] = source.take(
            "transformer.vocab_embedding.weight", *embedding_shape(spec)
        ).to(dtype)
    if spec.last:
        packed["transformer.ln_f.weight"] = source.take("transformer.ln_f.weight", spec.hidden_size).to(dtype)
        packed["lm_head.weight"] = _lm_head(spec, source, embedding).to(dtype)
    source.finish()
    return {name: tensor.contiguous() for name, tensor in packed.items()}


def embedding_shape(spec: DecoderSpec) -> tuple[int, int]:
    """Shape of this rank's part of the embedding."""
    match spec.embedding:
        case "replicated":
            return spec.vocab_size, spec.hidden_size
        case "vocab":
            return spec.vocab_share, spec.hidden_size
        case "hidden":
            return spec.vocab_size, spec.hidden_size // spec.tp


def _lm_head(spec: DecoderSpec, source: Weights, embedding: Tensor | None) -> Tensor:
    """TensorRT-LLM's loader excuses a missing lm_head where the embedding of the same rank and shape is tied to it."""
    shape = (spec.vocab_share, spec.hidden_size)
    if not source.has("lm_head.weight") and embedding is not None and tuple(embedding.shape) == shape:
        return embedding.clone()
    return source.take("lm_head.weight", *shape)


def _layer(spec: DecoderSpec, source: Weights, layer: str) -> list[tuple[str, Stored]]:
    """The linear layers of one decoder layer by the names they are packed under."""
    hidden, inner, heads = spec.hidden_size, spec.intermediate_size, spec.num_heads * spec.head_size
    fc = _stored(spec, source, f"{layer}.mlp.fc", inner, hidden, bias=spec.mlp_bias)
    gate = _stored(spec, source, f"{layer}.mlp.gate", inner, hidden, bias=spec.mlp_bias)
    same_kind = spec.quantized(f"{layer}.mlp.fc") == spec.quantized(f"{layer}.mlp.gate")
    fused = merged((fc, gate)) if same_kind else None
    return [
        (
            f"{layer}.attention.qkv",
            _stored(spec, source, f"{layer}.attention.qkv", spec.qkv_rows, hidden, bias=spec.qkv_bias),
        ),
        (
            f"{layer}.attention.dense",
            _stored(spec, source, f"{layer}.attention.dense", hidden, heads, bias=spec.dense_bias),
        ),
        *([(f"{layer}.mlp.fc_gate", fused)] if fused else [(f"{layer}.mlp.fc", fc), (f"{layer}.mlp.gate", gate)]),
        (f"{layer}.mlp.proj", _stored(spec, source, f"{layer}.mlp.proj", hidden, inner, bias=spec.mlp_bias)),
    ]


def _stored(spec: DecoderSpec, source: Weights, module: str, out: int, inputs: int, *, bias: bool) -> Stored:
    vector = source.take(f"{module}.bias", out) if bias else None
    if not spec.quantized(module):
        return Stored(source.take(f"{module}.weight", out, inputs), vector)
    if spec.algorithm == "fp8":
        return Stored(
            source.take(f"{module}.weight", out, inputs),
            vector,
            weights_scale=source.take_scalar(f"{module}.weights_scaling_factor"),
            activation_scale=source.take_scalar(f"{module}.activation_scaling_factor"),
        )
    prequant = f"{module}.prequant_scaling_factor"
    return Stored(
        source.take(f"{module}.weight", out // 2, inputs),
        vector,
        weights_scale=source.take(f"{module}.weights_scaling_factor", out, inputs // spec.group_size),
        prequant=source.take(prequant, inputs) if source.has(prequant) else None,
    )
