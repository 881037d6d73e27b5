"""The generated parts of the documentation, made from the code. `python -m tests.docs_tables` writes them."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from tests.compile.checkpoints import drafting, engine, llama
from tests.compile.test_build_config import plan
from tests.docs_cli import commands_of_the_program, exit_statuses
from tests.docs_log import SUBJECTS, log_messages
from tests.docs_networks import EXPERTS, engine_formats, families, network_limits, network_sources
from tests.docs_releases import llm_api_features, llm_api_sources, releases, serving_settings, sources
from trtforge.advise.rules import RULES
from trtforge.compile.build_config import BuildPlan
from trtforge.compile.tensorrt_llm import commands
from trtforge.core.assets import asset_directory
from trtforge.core.errors import ForgeError
from trtforge.core.recipe import Recipe, load_recipe
from trtforge.formats.networks import networks
from trtforge.formats.releases import read_release_data
from trtforge.models.formats import FORMATS
from trtforge.models.registry import WITHOUT_ENGINES
from trtforge.pipeline.summary import deployment_of, light_model
from trtforge.plan.runtime_keys import runtime_keys

DOCS = Path(__file__).parent.parent / "docs"


def recipe_keys() -> str:
    rows = ["| key | default | meaning |", "|---|---|---|", *_rows(Recipe, "")]
    return "\n".join(rows)


def _rows(model: type[BaseModel], prefix: str) -> list[str]:
    rows = []
    for name, field in model.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            rows += _rows(annotation, f"{prefix}{name}.")
            continue
        default = "required" if field.is_required() else f"`{_as_yaml(field.default)}`"
        choices = [str(c) for c in _literals(annotation)]
        how = "Any" if isinstance(field.default, tuple) else "One"
        text = (field.description or "") + (f" {how} of {', '.join(choices)}." if choices else "")
        rows.append(f"| `{prefix}{name}` | {default} | {text} |")
        for nested in get_args(annotation):
            if isinstance(nested, type) and issubclass(nested, BaseModel):
                rows += _rows(nested, f"{prefix}{name}.")
    return rows


def _as_yaml(default: object) -> str:
    """A default as a recipe spells it; null is not the format `none`."""
    if default is None:
        return "null"
    return "[]" if default == () else str(default).lower()


def _literals(annotation: object) -> list[str | int]:
    """The values that a key takes, those inside of a list of them too."""
    found = [value for value in get_args(annotation) if isinstance(value, str | int)]
    return found or [value for inner in get_args(annotation) for value in _literals(inner)]


ASKED: dict[str, dict[str, Any]] = {
    "lora": {"lora": {"max_rank": 16}},
    "draft": {"draft": True},
    "medusa": {"medusa": {"choices": [[0], [0, 0]]}},
    "eagle": {"eagle": {"choices": [[0], [0, 0]]}},
    "lookahead": {"lookahead": True},
    "multiple_profiles": {"multiple_profiles": True},
    "weights_on_gpu": {"weights_on_gpu": 0.5},
    "context_logits": {"context_logits": True},
    "generation_logits": {"generation_logits": True},
    "max_prompt_embedding_table_size": {"max_prompt_embedding_table_size": 3200},
}


def features() -> str:
    """What each feature sets, and which releases have all of it."""
    lines = [str(line["id"]) for line in read_release_data("build-config")["versions"]]
    rows = [
        f"| feature | `trtllm-build` options | `config.pbtxt` parameters | {' | '.join(lines)} |",
        "|---|---|---|" + "---|" * len(lines),
    ]
    for name, asked in ASKED.items():
        options = [f"`{word}`" for word in _build_options(asked) if word not in _build_options({})]
        keys = [f"`{key.key}`" for key in runtime_keys(_planned("1.2.1", asked).features)]
        had = ["yes" if _has(line, asked) else "–" for line in lines]
        rows.append(f"| `{name}` | {' '.join(options) or '–'} | {', '.join(keys) or '–'} | {' | '.join(had)} |")
    return "\n".join(rows)


def _planned(version: str, asked: dict[str, Any]) -> BuildPlan:
    method = next((name for name in ("medusa", "eagle") if name in asked), None)
    stored = {"num_eagle_layers": 2} if method == "eagle" else {}
    return plan(version, drafting(method, **stored) if method else llama(dtype="float16"), engine(features=asked))


def _build_options(asked: dict[str, Any]) -> list[str]:
    """Options with their values, such as `--lora_plugin auto`."""
    (command,) = commands(Path("c"), Path("o"), _planned("1.2.1", asked), world_size=1, workers=1)
    return [f"--{option.strip()}" for option in " ".join(command.argv[5:]).split("--") if option.strip()]


def _has(line: str, asked: dict[str, Any]) -> bool:
    try:
        _planned(line, asked)
    except ForgeError as error:
        return "was added in" not in error.message
    return True


def formats() -> str:
    rows = [
        "| format | TensorRT-LLM `quant_algo` | weights | inputs | calibration | experts |",
        "|---|---|---|---|---|---|",
    ]
    weights = {
        None: "the model's dtype",
        "fp8": "E4M3, one scale per tensor",
        "fp8_rowwise": "E4M3, one scale per output",
        "int4": "signed 4-bit, one scale per output and group of 64 or 128 inputs",
        "int8": "int8, one scale per output",
        "nvfp4": "E2M1, one E4M3 scale per 16 inputs, one scale per tensor",
    }
    for name, wanted in FORMATS.items():
        stored = weights[wanted.rounding]
        if wanted.rounding is None and name != "none":
            stored += f", {'int8' if '8' in name else 'int4'} by the build"
        inputs = {"awq": "pre-scaled", "smoothquant": "pre-scaled", None: ""}[wanted.smoothing]
        static = "static scale" if wanted.static_activations else ""
        dynamic = "one scale per token" if wanted.rounding == "fp8_rowwise" else ""
        seen = ", ".join(part for part in (inputs, static, dynamic) if part) or "the model's dtype"
        refused = any(x.every_backend for x in networks().limits_of("mixtral", name, traits=EXPERTS))
        needs, experts = ("yes" if flag else "–" for flag in (wanted.calibrated, not refused))
        rows.append(f"| `{name}` | {wanted.algorithm or '–'} | {stored} | {seen} | {needs} | {experts} |")
    return "\n".join(rows)


def without_engines() -> str:
    return ", ".join(f"`{name}`" for name in WITHOUT_ENGINES) + "."


def shipped_recipes() -> str:
    rows = [
        "| recipe | model | weights, KV cache | layout | GPUs | requests at once | tokens of each |",
        "|---|---|---|---|---|---|---|",
    ]
    for path in sorted(asset_directory("recipes").glob("*.yaml")):
        recipe = load_recipe(path)
        gpu, parallel, quant = recipe.engine.target.gpu, recipe.parallel, recipe.quantization
        if gpu is not None:
            weights = deployment_of(recipe, light_model(recipe)).quant
            formats, layout = f"{weights}, {quant.kv_cache}", f"tp {parallel.tp}, pp {parallel.pp}"
            gpus, batch = f"{parallel.tp * parallel.pp} x {gpu}", recipe.engine.max_batch_size
            length = f"{recipe.engine.max_seq_len:,}"
            rows.append(
                f"| `{path.stem}` | {recipe.model.source} | {formats} | {layout} | {gpus} | {batch} | {length} |"
            )
    return "\n".join(rows)


def containers() -> str:
    """The images of the releases with engines, newest first."""
    keys = ("tensorrt_llm", "tensorrt", "cuda", "min_driver")
    rows = ["| image | TensorRT-LLM | TensorRT | CUDA | driver, at least |", "|---|---|---|---|---|"]
    known = [
        version for line in read_release_data("build-config")["versions"] for version in (line["id"], *line["also"])
    ]
    for each in read_release_data("containers")["containers"]:
        if each["tensorrt_llm"] in known:
            cells = (f"`tritonserver:{each['image_tag']}`", *(each[key] for key in keys))
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def advice_rules() -> str:
    """The rules of `trtforge advise`."""
    rows = [f"| `{rule.name}` | {rule.looks_at} |" for rule in RULES]
    return "\n".join(["| rule | looks at |", "|---|---|", *rows])


TABLES: dict[str, tuple[tuple[str, Callable[[], str]], ...]] = {
    "recipes.md": (
        ("recipe-keys", recipe_keys),
        ("shipped-recipes", shipped_recipes),
        ("features", features),
        ("serving-settings", serving_settings),
    ),
    "formats.md": (
        ("families", families),
        ("without-engines", without_engines),
        ("formats", formats),
        ("engine-formats", engine_formats),
        ("network-limits", network_limits),
        ("network-sources", network_sources),
    ),
    "deployment.md": (("advice-rules", advice_rules),),
    "llmapi.md": (("llm-api-features", llm_api_features), ("llm-api-sources", llm_api_sources)),
    "engines.md": (("releases", releases), ("release-sources", sources)),
    "quickstart-gpu.md": (("containers", containers),),
    "cli.md": (("exit-statuses", exit_statuses), ("commands", commands_of_the_program)),
    "troubleshooting.md": tuple((f"log-{subject}", partial(log_messages, subject)) for subject in SUBJECTS),
}
"""By page: the marker of each generated part and what makes it."""


def with_table(text: str, marker: str, table: str) -> str:
    """`text` with `table` between the marker and its end."""
    made = f"<!-- {marker} -->\n{table}\n<!-- end -->"
    return re.sub(rf"<!-- {marker} -->\n.*?<!-- end -->", lambda _: made, text, flags=re.S)


def main() -> None:
    """Write every generated part into its page."""
    for name, tables in TABLES.items():
        page = DOCS / name
        text = page.read_text()
        for marker, table in tables:
            text = with_table(text, marker, table())
        page.write_text(text)


if __name__ == "__main__":
    main()
