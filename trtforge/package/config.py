"""How an engine is packaged: the settings of `trtforge package`."""

import re

from pydantic import Field, field_validator

from trtforge.core.config_model import Config
from trtforge.core.features import FeaturesConfig
from trtforge.core.serving import ServingConfig
from trtforge.package.target import PackageTarget

_PREFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class PackageConfig(Config):
    """How an engine is packaged.

    All paths in the repository are relative to it, except that the TensorRT-LLM backend needs an absolute engine path.
    `serving_root` is where the repository will be mounted (launchers that serve it from elsewhere insert their path).
    """

    serving: ServingConfig = ServingConfig()
    name_prefix: str = Field("", max_length=100, description="Prefix of the five model names.")
    serving_root: str = Field("/models", pattern="^/", description="Path of the repository for a TensorRT-LLM server.")
    add_special_tokens: bool = Field(True, description="Add the tokenizer's special tokens to the prompt.")
    kv_reuse: bool | None = Field(None, description="Share KV blocks between requests; None: as built.")
    chunked_context: bool | None = Field(None, description="Split long prompts into chunks; None: as built.")
    features: FeaturesConfig | None = Field(None, description="What the engine was built for; None: as recorded.")
    target: PackageTarget = PackageTarget()

    @field_validator("name_prefix")
    @classmethod
    def _is_part_of_a_name(cls, value: str) -> str:
        """Model names are directory names: a prefix must not leave the repository or hide them."""
        if value and not _PREFIX.fullmatch(value):
            raise ValueError("a prefix begins with a letter or digit and holds letters, digits, '.', '_' and '-' only")
        return value
