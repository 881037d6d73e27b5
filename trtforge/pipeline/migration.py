"""Floor 5: `trtforge migrate`: an engine's settings as model.yaml; with a checkpoint, the whole llmapi engine."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trtforge import __version__
from trtforge.compile.llmapi import LlmapiPlan
from trtforge.compile.llmapi_engine import write_llmapi_engine
from trtforge.compile.stage import CompileOptions, plan_engine
from trtforge.core.artifact import Produced, produce
from trtforge.core.digest import text_digest
from trtforge.core.errors import ForgeError
from trtforge.core.features import FeaturesConfig
from trtforge.core.manifest import FileRecord, Identity
from trtforge.core.progress import Progress
from trtforge.core.recipe import EngineConfig
from trtforge.formats.hf import read_config
from trtforge.formats.llmapi import MODEL_FILE, LlmArgs, has_argument, require_llm_api
from trtforge.formats.trtllm import is_hugging_face, read_checkpoint_config
from trtforge.migrate.migration import Left, Migration, migrate
from trtforge.migrate.sources import Settings, read_settings
from trtforge.plan.llm_api_arguments import sampler_arguments

REPORT_FILE = "migration.json"
_PADDING = 64
"""ModelOpt pads the vocabulary of W4A16_AWQ to a multiple of 64 (modelopt/torch/export/postprocess.py), that of other
formats to a multiple of the ranks; 64 per rank covers both."""


@dataclass(frozen=True)
class MigrateOptions:
    """Source and target release. `checkpoint`: TensorRT-LLM or Hugging Face; None writes only the arguments."""

    source: Path
    target: str
    checkpoint: Path | None = None
    engine: Path | None = None
    model: str | None = None


def run_migration(
    options: MigrateOptions, out: Path, *, force: bool = False, progress: Progress | None = None
) -> tuple[Migration, Produced]:
    """Migrate, or reuse the result at `out`.

    Raises ForgeError if the source is neither an engine nor a repository, or the checkpoint is of another model.
    """
    settings = read_settings(options.source, options.engine, options.model)
    found = migrate(settings)
    _leave_out(found, options.target)
    found.args = found.args.with_values(sampler_arguments(FeaturesConfig(), options.target), "migration")
    require_llm_api(options.target, found.args)
    if options.checkpoint is None:
        found.attention.append(Left("model", found.args.model, "path of the weights: give --checkpoint, or edit it"))
        return found, _write_arguments(found, options.target, out, force=force)
    _require_same_model(settings, options.checkpoint, found.args.tensor_parallel_size)
    plan = _plan(found, options, out)
    found.args = plan.args
    return found, write_llmapi_engine(plan, options.checkpoint, out, force=force, progress=progress)


def _leave_out(found: Migration, target: str) -> None:
    """Remove the arguments that the target release lacks. Raises ForgeError for an unknown release."""
    of_the_llm = [entry for entry in found.carried if not entry.to.startswith("triton_config.")]
    for entry in [each for each in of_the_llm if not has_argument(target, each.to)]:
        found.carried.remove(entry)
        del found.values[entry.to]
        found.attention.append(Left(entry.key, entry.value, f"TensorRT-LLM {target} has no LLM argument {entry.to}"))
    found.args = LlmArgs().with_values(found.values, "migration")


def _plan(found: Migration, options: MigrateOptions, out: Path) -> LlmapiPlan:
    """The plan of `compile` for the checkpoint, with the migrated arguments."""
    assert options.checkpoint is not None
    args = found.args
    limits = ("max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens")
    given = {name: value for name in limits if (value := getattr(args, name)) is not None}
    config = EngineConfig.parse(
        {
            "backend": "llmapi",
            "target": {"tensorrt_llm": options.target},
            **given,
            "features": {"chunked_context": bool(args.enable_chunked_prefill)},
        },
        str(options.source),
    )
    plan = plan_engine(config, options.checkpoint, out, CompileOptions())
    assert isinstance(plan, LlmapiPlan)
    return plan.with_args(found.values)


def _write_arguments(found: Migration, target: str, out: Path, *, force: bool) -> Produced:
    report = json.dumps(found.as_json(), indent=2) + "\n"

    def write(directory: Path) -> Mapping[str, FileRecord]:
        (directory / MODEL_FILE).write_text(found.args.to_yaml(), encoding="utf-8")
        (directory / REPORT_FILE).write_text(report, encoding="utf-8")
        return {}

    identity = Identity(
        stage="migration",
        config={"target": target, "model_yaml": found.args.to_json()},
        inputs={"report": text_digest(report)},
        versions={"trtforge": __version__},
    )
    return produce(out, identity, write, force=force)


def _require_same_model(settings: Settings, checkpoint: Path, tp: int) -> None:
    """Raise ForgeError if engine and checkpoint differ in size; the engine's vocabulary may be padded."""
    names = ("num_hidden_layers", "hidden_size", "vocab_size")
    if is_hugging_face(checkpoint):
        values = read_config(checkpoint).values
        text = values.get("text_config") or values  # a multimodal model's language model
        sizes = {name: text.get(name) for name in names} if isinstance(text, dict) else {}
    else:
        model = read_checkpoint_config(checkpoint)
        sizes = {name: getattr(model, name) for name in names}
    for name, ours in sizes.items():
        theirs = settings.engine.get(f"pretrained_config.{name}")
        if ours is None or theirs is None:
            continue
        padded = name == "vocab_size" and isinstance(ours, int) and isinstance(theirs, int)
        if ours != theirs and not (padded and 0 < theirs - ours < _PADDING * tp):
            raise ForgeError(
                f"{checkpoint} is of another model: its {name} is {ours}, the engine's {theirs}",
                hint="Give the checkpoint that the engine was built from.",
            )
