"""Which family a Hugging Face architecture belongs to. A family's module is imported when it is asked for."""

from importlib import import_module

from trtforge.core.errors import ForgeError
from trtforge.models.family import Family

_FAMILY_OF = {
    "LlamaForCausalLM": "llama",
}


def architectures() -> tuple[str, ...]:
    """The Hugging Face architectures that are converted."""
    return tuple(sorted(_FAMILY_OF))


def family_of(architecture: str) -> Family:
    """The family of a Hugging Face architecture. Raises ForgeError for an unknown one, with those that are known."""
    try:
        name = _FAMILY_OF[architecture]
    except KeyError:
        raise ForgeError(
            f"architecture {architecture} is not supported", hint=f"Supported: {', '.join(architectures())}."
        ) from None
    family = import_module(f"trtforge.models.families.{name}").FAMILY
    assert isinstance(family, Family)
    return family
