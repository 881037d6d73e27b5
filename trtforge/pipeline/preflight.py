"""Floor 5: check before a build that a recipe can be deployed, with the rules of `trtforge plan`."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

from trtforge.core.errors import ForgeError, Repair
from trtforge.core.figures import size
from trtforge.core.recipe import Recipe
from trtforge.formats.corpus import require_data
from trtforge.formats.hf import cached_source, open_checkpoint
from trtforge.machine.host import Host
from trtforge.machine.memory import read_memory
from trtforge.pipeline.stages import StageName, rounding_of
from trtforge.plan.evaluate import evaluate
from trtforge.plan.evaluation import Evaluation
from trtforge.plan.fixes import fixes
from trtforge.plan.model import Model, find_model, model_at
from trtforge.plan.planner import Plan
from trtforge.plan.request import request_of

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Preflight:
    """A recipe that can be deployed: its model and the evaluation of its deployment."""

    model: Model
    evaluation: Evaluation

    @property
    def verification_memory(self) -> int:
        """Bytes of host memory that verification takes."""
        return Plan(self.model, self.evaluation, fixes=(), alternatives=(), fits=()).peaks.verify_host

    def as_json(self) -> Mapping[str, Any]:
        """The deployment in --dry-run, in bytes and tokens; None if unknown."""
        evaluation, request, memory = self.evaluation, self.evaluation.request, self.evaluation.memory
        return {
            "facts": "config.json facts that ship with trtforge"
            if self.model.shipped
            else "the model's own config.json",
            "gpu": request.engine.target.gpu,
            "gpus": request.tp * request.pp,
            "memory_per_gpu": memory.fullest.total if memory else None,
            "weights_per_gpu": memory.fullest.weights if memory else None,
            "kv_tokens": memory.kv_tokens if memory else None,
            "full_length_requests": evaluation.full_length_requests,
            "longest_prompt": evaluation.longest_prompt,
            "warnings": list(evaluation.warnings),
            "notes": list(self.model.notes),
        }


def preflight(recipe: Recipe) -> Preflight:
    """Check a recipe from metadata: layout, formats, limits, release, and the memory of its target GPU.

    Raises ForgeError with the first violated rule and the nearest legal choice, UsageError for a rounding that the
    format does not have. TensorRT-LLM's own rules apply to the tensorrt_llm backend, and to `auto` if the recipe has a
    target.
    """
    rounding_of(recipe)
    model = _model_of(recipe)
    evaluation = evaluate(model, request_of(recipe, model, {}))
    for problem in evaluation.problems:
        (fix,) = fixes(model, replace(evaluation, problems=(problem,)))
        settings = " ".join(f"--set {quote(change.setting)}" for change in fix.changes)
        more = (
            "" if len(evaluation.problems) == 1 else f" `trtforge plan` shows all {len(evaluation.problems)} problems."
        )
        raise ForgeError(
            f"{recipe.name}: {problem.message}",
            hint=(f"Use {settings}." if settings else problem.fix) + more,
        ).repaired_by(Repair(options=tuple(("--set", change.setting) for change in fix.changes)) if settings else None)
    return Preflight(model, evaluation)


def require_files(recipe: Recipe, stages: tuple[StageName, ...]) -> None:
    """Raise ForgeError for data that the stages cannot read, and for a model directory without weights or tokenizer.

    For a hub id the first stage fetches the files; a run that continues from a checkpoint may not need them.
    """
    source = Path(recipe.model.source)
    model = source if source.is_dir() and stages[0] in ("calibrate", "convert") else None
    if model is not None:
        open_checkpoint(model)
    if "calibrate" in stages:
        require_data(recipe.quantization.calibration.data, model)
    if "verify" in stages:
        require_data(recipe.gate.data, model)


def warn_of_verification(judged: Preflight, host: Host | None = None) -> None:
    """Warn if verification needs more memory than `host` (None: this machine) has; swap may still suffice."""
    memory, needed = read_memory(host or Host()), judged.verification_memory
    if memory is not None and needed > memory.most:
        _LOG.warning(
            f"verification takes {size(needed)} of host memory, this machine has {size(memory.most)}: "
            "build with --to convert, run `trtforge verify` on a larger machine, and resume with --from compile"
        )


def _model_of(recipe: Recipe) -> Model:
    """The model's metadata: local files take precedence over the facts that ship with trtforge."""
    source, revision = recipe.model.source, recipe.model.revision
    here = cached_source(source, revision)
    return find_model(source, revision) if here is None else model_at(source, here)
