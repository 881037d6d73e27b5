"""Floor 5: the plan of a build, stage by stage, from config.json alone. Reads no weights, writes nothing."""

from typing import Any, get_args

from trtforge.compile.stage import CompileOptions
from trtforge.core.recipe import Recipe
from trtforge.formats.triton import ModelRole
from trtforge.formats.trtllm import rank_file
from trtforge.models.checkpoint_plan import checkpoint_plan
from trtforge.pipeline.build import is_published, planned_checkpoint, planned_engine
from trtforge.pipeline.paths import Paths
from trtforge.pipeline.preflight import preflight
from trtforge.pipeline.stages import StageName, of_published, of_quantized


def dry_run(recipe: Recipe, paths: Paths, stages: tuple[StageName, ...], options: CompileOptions) -> dict[str, Any]:
    """The plan of every stage and the resulting deployment. Raises ForgeError for a plan that is known to fail."""
    judged = preflight(recipe)
    family, facts = judged.model.family, judged.model.facts
    plans: dict[str, Any] = {}
    if is_published(recipe, judged.model):
        stages = of_published(recipe, stages, same_weights=judged.model.config.mxfp4_experts)
    elif judged.model.stored is not None:
        stages = of_quantized(recipe, stages)
    checkpoint = planned_checkpoint(recipe, judged.model) if "convert" in stages else None
    for stage in stages:
        match stage:
            case "calibrate":
                plans[stage] = recipe.quantization.model_dump(mode="json") | {"artifact": str(paths.calibration)}
            case "convert":
                assert checkpoint is not None
                layout, model = checkpoint
                targets = checkpoint_plan(family, facts, layout).targets
                plans[stage] = {
                    "artifact": str(paths.checkpoint),
                    "config": model.model_dump(mode="json"),
                    "ranks": [
                        {
                            "file": rank_file(rank.index),
                            "tensors": sum(target.pp_rank == rank.pp_rank for target in targets),
                            "bytes": sum(t.spec.nbytes for t in targets if t.pp_rank == rank.pp_rank),
                        }
                        for rank in layout.parallel.ranks
                    ],
                }
            case "verify":
                plans[stage] = {"against": recipe.model.source, "gate": recipe.gate.model_dump(mode="json")}
            case "compile":
                plan = planned_engine(recipe, judged.model, paths, options)
                plans[stage] = {"artifact": str(paths.engine)} | plan.as_json()
            case "package":
                plans[stage] = {
                    "artifact": str(paths.repository),
                    "models": list(get_args(ModelRole)),
                    "serving": recipe.serving.model_dump(mode="json"),
                }
    return {"recipe": recipe.name, "deployment": judged.as_json(), "stages": plans}
