"""Maps Hugging Face architectures to families, whose modules are imported on demand."""

from importlib import import_module

from trtforge.core.errors import ForgeError
from trtforge.formats.hf import HfCheckpoint, HfConfig
from trtforge.models.family import Family

_FAMILY_OF = {
    "BloomForCausalLM": "bloom",
    "CohereForCausalLM": "cohere",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Exaone4ForCausalLM": "exaone4",
    "FalconForCausalLM": "falcon",
    "GPT2LMHeadModel": "gpt2",
    "GPTBigCodeForCausalLM": "gpt_bigcode",
    "GPTJForCausalLM": "gptj",
    "GPTNeoXForCausalLM": "gpt_neox",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3_multimodal",
    "GemmaForCausalLM": "gemma",
    "Glm4MoeForCausalLM": "glm4_moe",
    "GptOssForCausalLM": "gpt_oss",
    "GraniteForCausalLM": "granite",
    "Llama4ForCausalLM": "llama4",
    "Llama4ForConditionalGeneration": "llama4_multimodal",
    "LlamaForCausalLM": "llama",
    "Mistral3ForConditionalGeneration": "mistral3",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "NemotronForCausalLM": "nemotron",
    "OPTForCausalLM": "opt",
    "Phi3ForCausalLM": "phi3",
    "PhiForCausalLM": "phi",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "RWForCausalLM": "falcon",
    "Starcoder2ForCausalLM": "starcoder2",
}
WITHOUT_ENGINES = (
    "Cohere2ForCausalLM",
    "DeepseekV32ForCausalLM",
    "ExaoneMoEForCausalLM",
    "Gemma3nForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "GlmMoeDsaForCausalLM",
    "KimiK25ForConditionalGeneration",
    "MiniMaxM2ForCausalLM",
    "NemotronHForCausalLM",
    "NemotronNASForCausalLM",
)
"""Architectures without a table that TensorRT-LLM's PyTorch backend serves and its engine builder does not support.

Sources: the engines' MODEL_MAP (tensorrt_llm/models/__init__.py, 1.2) and the documentation's table of models that
the PyTorch backend supports (models/supported-models, 1.3).
"""


WITH_VISION_ONLY = ("Llama4ForCausalLM",)
"""Language models that TensorRT-LLM runs only as part of the multimodal model."""
WITH_STATES = ("Qwen3NextForCausalLM",)
"""Architectures with linear attention, whose per-sequence states are not in KV blocks and cannot be shared."""

_TYPE_OF = {
    "gemma3": "gemma3_text",
    "gemma3_multimodal": "gemma3",
    "llama4": "llama4_text",
    "llama4_multimodal": "llama4",
}
"""The `model_type` in config.json of families whose names differ from it."""


def architectures() -> tuple[str, ...]:
    """The supported Hugging Face architectures, sorted."""
    return tuple(sorted(_FAMILY_OF))


def family_of(architecture: str) -> Family:
    """The family of a Hugging Face architecture. Raises ForgeError for an unsupported one."""
    if architecture in WITHOUT_ENGINES:
        raise ForgeError(
            f"TensorRT-LLM builds no engines for {architecture}: only its PyTorch backend (llmapi) runs it",
            hint="Compile the Hugging Face checkpoint itself: `trtforge compile HF_DIR ENGINE --backend llmapi`.",
        )
    try:
        name = _FAMILY_OF[architecture]
    except KeyError:
        raise ForgeError(
            f"architecture {architecture} is not supported", hint=f"Supported: {', '.join(architectures())}."
        ) from None
    family = import_module(f"trtforge.models.families.{name}").FAMILY
    assert isinstance(family, Family)
    return family


def family_of_engine(architecture: str) -> Family | None:
    """The family of TensorRT-LLM's architecture in a checkpoint's config.json; None for an architecture that is not
    converted.

    TensorRT-LLM's names are Hugging Face's (checked by `tests/models/test_facts.py`).
    """
    return family_of(architecture) if architecture in _FAMILY_OF else None


def family_of_config(config: HfConfig) -> Family:
    """The family of a Hugging Face config.json.

    Raises ForgeError for an unsupported one, and for a `model_type` of another family, by which transformers would load
    the model. A type that belongs to no family comes from the model's own code (Kimi K2).
    """
    family, found = family_of(config.architecture), config.values.get("model_type")
    types = {_TYPE_OF.get(name, name) for name in _FAMILY_OF.values()}
    own = _TYPE_OF.get(family.name, family.name)
    if found in types and found != own:
        raise ForgeError(
            f"{config.path}: the architecture is {config.architecture}, but model_type {found} is of another one, "
            "which transformers would load",
            hint=f'Set "model_type": "{own}" in it if the model is a {config.architecture}, else its architectures.',
        )
    return family


def family_of_checkpoint(checkpoint: HfCheckpoint) -> Family:
    """The family with the tensor names of this checkpoint: those of GPT-2 and Bloom often lack the base prefix."""
    family = family_of_config(checkpoint.config)
    prefix = family.base_prefix
    if prefix and not any(name.startswith(prefix) for name in checkpoint.tensors):
        return family.bare()
    return family
