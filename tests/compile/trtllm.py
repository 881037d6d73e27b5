"""A place with the stand-in for TensorRT-LLM, and checkpoints to build there."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.compile.checkpoints import llama
from tests.conftest import SMALL_TOKENIZER
from trtforge.compile.machine import Machine
from trtforge.core.artifact import produce
from trtforge.core.manifest import Identity
from trtforge.core.parallel import Parallel
from trtforge.formats.releases import Section, read_release_data, release

FAKES = Path(__file__).parent / "fakes"
H100 = {"name": "NVIDIA H100 80GB HBM3", "major": 9, "minor": 0, "total_memory": 84_929_347_584}
L4 = {"name": "NVIDIA L4", "major": 8, "minor": 9, "total_memory": 23_622_320_128}
MACHINE = Machine(tensorrt_llm="1.2.1", gpu=True)


@dataclass(frozen=True)
class Trtllm:
    """The stand-in as installed in the directory `site`."""

    site: Path

    @classmethod
    def install(cls, site: Path, version: str = "1.2.1", gpus: int = 2) -> "Trtllm":
        """Install it as release `version`, beside `gpus` H100."""
        shutil.copytree(FAKES, site, dirs_exist_ok=True)
        for old in site.glob("*.dist-info"):
            shutil.rmtree(old)
        info = site / f"tensorrt_llm-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tensorrt_llm\nVersion: {version}\n")
        (site / "schema.json").write_text(json.dumps(_schema(version.partition("+")[0])))
        found = cls(site)
        found.behaves()
        found.has_gpus(*[H100] * gpus)
        return found

    def behaves(self, **what: Mapping[str, Any]) -> None:
        """How builds go from now on: a name of behaviour to the ranks it is for."""
        (self.site / "behaviour.json").write_text(json.dumps(what))

    def has_gpus(self, *gpus: Mapping[str, Any]) -> None:
        """Which GPUs are there, of 80 GB where that is not said."""
        (self.site / "gpus.json").write_text(
            json.dumps([{"total_memory": H100["total_memory"], **gpu} for gpu in gpus])
        )

    def calls(self, name: str | None = None) -> list[dict[str, Any]]:
        """What was called so far, in order."""
        record = self.site / "calls.jsonl"
        calls = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
        return [call for call in calls if name in (None, call["call"])]

    def forget(self) -> None:
        """Begin the record anew."""
        (self.site / "calls.jsonl").unlink(missing_ok=True)

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a program that finds it."""
        return {**os.environ, "PYTHONPATH": os.pathsep.join([str(self.site), os.environ.get("PYTHONPATH", "")])}


def _schema(version: str) -> dict[str, Any]:
    sections: tuple[Section, ...] = ("build_config", "plugin_config", "lora_config")
    target = release(version)
    rules = read_release_data("build-config")["loading_rules"]["build_config_json"]
    required = next(rule.get("required_keys", []) for rule in rules if target.line in rule["versions"])
    return {
        **{section: list(target.fields(section)) for section in sections},
        "required": required,
        "version": version,
    }


def write_checkpoint(
    directory: Path, quant: str | None = None, changes: Mapping[str, Any] | None = None, **parallel: int
) -> Path:
    """A checkpoint artifact of Llama 3 8B's configuration, with `changes`, and a few bytes for weights."""
    layout = Parallel(**parallel)

    def write(out: Path) -> dict:
        (out / "config.json").write_text(llama(quant, mapping=layout.mapping(), **(changes or {})).to_json())
        for rank in layout.ranks:
            (out / f"rank{rank.index}.safetensors").write_text(f"rank {rank.index}")
        (out / "tokenizer").mkdir()
        (out / "tokenizer/tokenizer.json").write_text(SMALL_TOKENIZER)
        return {}

    produce(directory, Identity(stage="checkpoint", config={**parallel, **(changes or {})}), write)
    return directory
