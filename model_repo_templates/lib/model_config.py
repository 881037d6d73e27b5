"""A model's configuration when it is loaded: its parameters from config.pbtxt and the directory of its files."""

import json
from collections.abc import Mapping
from pathlib import Path


class ModelConfig:
    """The arguments of a Python model's `initialize`."""

    def __init__(self, args: Mapping[str, str]) -> None:
        self._values = json.loads(args["model_config"])
        self._parameters = {key: value["string_value"] for key, value in self._values["parameters"].items()}
        self.directory = Path(args["model_repository"]) / args["model_version"]
        self.name = args["model_name"]

    @property
    def decoupled(self) -> bool:
        """Whether a request may have several responses."""
        return bool(self._values.get("model_transaction_policy", {}).get("decoupled", False))

    @property
    def max_batch_size(self) -> int:
        """The model's max_batch_size."""
        return int(self._values["max_batch_size"])

    @property
    def inputs(self) -> frozenset[str]:
        """The names of the model's inputs."""
        return frozenset(tensor["name"] for tensor in self._values["input"])

    def text(self, key: str, default: str = "") -> str:
        """A parameter; an empty one counts as absent."""
        return self._parameters.get(key) or default

    def flag(self, key: str, default: bool) -> bool:
        """A parameter that is true or false."""
        return self.text(key, str(default)).lower() == "true"

    def integer(self, key: str, default: int) -> int:
        """A parameter that is a whole number."""
        return int(self.text(key, str(default)))

    def integers(self, key: str) -> tuple[int, ...]:
        """A comma-separated list of whole numbers."""
        return tuple(int(part) for part in self.text(key).split(",") if part)

    def pairs(self, key: str) -> tuple[tuple[str, str], ...]:
        """A comma-separated list of `from:to`."""
        return tuple((source, target) for source, _, target in (p.partition(":") for p in self.text(key).split(",")))
