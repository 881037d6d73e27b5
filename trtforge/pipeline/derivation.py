"""Floor 5: a recipe for a model: number formats, layout and limits from the hardware, the model and a goal."""

import os
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from trtforge.core import defaults
from trtforge.core.digest import text_digest
from trtforge.core.dtypes import model_dtype
from trtforge.core.errors import ForgeError, Repair
from trtforge.core.recipe import Recipe, recipe_of
from trtforge.core.recipe_text import commented, recipe_name
from trtforge.machine.nvml import LoadNvml, load_nvml, read_driver
from trtforge.plan.alternatives import Alternative, Goal, alternatives
from trtforge.plan.evaluate import evaluate
from trtforge.plan.fixes import fixes
from trtforge.plan.formats import WEIGHTS
from trtforge.plan.gpus import Gpu, gpu_named, product_of
from trtforge.plan.model import Model, find_model
from trtforge.plan.request import Change, Option, Request, request_of

OPTIONS: tuple[Option, ...] = ("--quant", "--kv-cache", "--tp", "--pp", "--ep")
"""The options that constrain all other choices."""

_FP8_CORES, _INT4_KERNELS = 89, 80  # lowest compute capabilities x 10
_MOST_POSITIONS, _MOST_REQUESTS = 4096, 32  # on the embedded engine without a GPU
_ENOUGH_REQUESTS = 16  # concurrent requests of typical length
_PERPLEXITY_LIMITS = {"4 bits": 0.05, "8 bits": 0.02, "unquantised": 0.01}
_PATHS = (("model", "source"), ("quantization", "calibration", "data"), ("gate", "data"))
_NAME = "the derived recipe"
_DERIVED, _DIGITS = "# derived by trtforge, digest ", 16
_UNBROKEN = 1 << 16  # characters of a YAML line
_FOUR_BITS = 4.5  # bits of a weight with its share of the scaling factors


@dataclass(frozen=True)
class Wish:
    """The user's choices; trtforge makes the others.

    `options`: values by option, for some of OPTIONS. `gpu`: the target GPU's name. None: not chosen by the user.
    """

    options: Mapping[Option, str] = field(default_factory=dict)
    gpu: str | None = None
    goal: Goal | None = None


@dataclass(frozen=True)
class DerivedRecipe:
    """The recipe's values and, by dotted key, why each was chosen."""

    values: Mapping[str, Any]
    reasons: Mapping[str, str]
    model: Model

    def with_overrides(self, overrides: tuple[str, ...]) -> "DerivedRecipe":
        """With `dotted.key=value` overrides; a key that is overridden has no reason.

        Raises UsageError for a wrong override.
        """
        values = deepcopy(dict(self.values))
        recipe_of(values, _NAME, Path(), overrides)
        given = {each.partition("=")[0] for each in overrides}
        return DerivedRecipe(values, {key: why for key, why in self.reasons.items() if key not in given}, self.model)

    def recipe(self) -> Recipe:
        """The checked recipe."""
        return recipe_of(deepcopy(dict(self.values)), _NAME, Path())

    def text(self, command: str, directory: Path) -> str:
        """The recipe as YAML with the reasons as comments, for a file in `directory`.

        `command`: what builds it, for its first line. The second line has a digest of the rest (`is_unedited`).
        """
        body = "\n".join(_lines(_relative_to(directory, self.values), self.reasons)) + "\n"
        return f"{commented(command)}\n{_DERIVED}{text_digest(body)[:_DIGITS]}\n{body}"


def is_unedited(text: str) -> bool:
    """Whether a recipe's text is unchanged since `DerivedRecipe.text` wrote it, apart from its first line."""
    _, _, rest = text.partition("\n")
    mark, _, body = rest.partition("\n")
    return mark == f"{_DERIVED}{text_digest(body)[:_DIGITS]}"


def _relative_to(directory: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with relative paths of files that exist here made relative to `directory`."""
    changed = deepcopy(dict(values))
    for *parents, name in _PATHS:
        part: Any = changed
        for parent in parents:
            part = part.get(parent, {}) if isinstance(part, dict) else {}
        found = part.get(name) if isinstance(part, dict) else None
        if isinstance(found, str) and not Path(found).is_absolute() and Path(found).exists():
            part[name] = os.path.relpath(found, directory)
    return changed


def derive(source: str, wish: Wish, *, name: str | None = None, load: LoadNvml = load_nvml) -> DerivedRecipe:
    """A recipe for the model `source`, a directory or hub id.

    With a GPU (`wish.gpu`, else this machine's) formats and layout are those of `trtforge plan`'s best alternative for
    the goal; without a goal, the usual format of that GPU on the fewest GPUs. Without a GPU the recipe is for the
    embedded engine on the CPU. Raises ForgeError for an unknown model or GPU, and with the nearest legal choice if the
    wishes cannot be fulfilled.
    """
    model = find_model(source)
    here = machine_gpus(load) if wish.gpu is None else None
    gpu = gpu_named(wish.gpu) if wish.gpu is not None else here[0] if here else None
    reasons: dict[str, str] = {}
    request = request_of(_start(source, gpu, model), model, dict(wish.options))
    kept: frozenset[Option] = frozenset(option for option in OPTIONS if option in wish.options)
    if gpu is not None:
        request = _on_gpu(model, request, gpu, here[1] if here else None, wish.goal, kept, reasons)
    elif "--quant" not in kept and wish.goal in ("memory", "latency"):
        request = request.changed(Change("--quant", "int4_awq"))
        reasons["quantization.format"] = f"for the goal {wish.goal}: a CPU is limited by the bytes that it reads"
    request = _legal(model, request, kept)
    if model.stored is not None:
        reasons["quantization.format"] = "the checkpoint is already quantised"
    return DerivedRecipe(_values(source, name, model, request, reasons), reasons, model)


def machine_gpus(load: LoadNvml = load_nvml) -> tuple[Gpu, int] | None:
    """The first GPU of this machine and the number of GPUs like it; None if there is none or its product is unknown."""
    try:
        nvml = load()
    except ImportError:
        return None
    try:
        gpus = read_driver(nvml).gpus
    except (nvml.NVMLError, OSError):
        return None
    if not gpus or gpus[0].memory is None:
        return None
    product = product_of(gpus[0].name, gpus[0].memory)
    return None if product is None else (product, sum(gpu.name == gpus[0].name for gpu in gpus))


def name_for(source: str, quant: str) -> str:
    """A name for a model's build: the last part of its source and the format."""
    last = Path(source).resolve().name if Path(source).is_dir() else Path(source).name
    suffix = "" if quant == "none" else f"-{quant}"
    return recipe_name(last if recipe_name(last) else "model", suffix)


def _start(source: str, gpu: Gpu | None, model: Model) -> Recipe:
    """The recipe before anything is chosen."""
    engine: dict[str, Any] = {"features": {"kv_reuse": True, "chunked_context": True}}
    if gpu is not None:
        engine["target"] = {"gpu": gpu.name}
        if not model.family.engines:
            engine["backend"] = "llmapi"
    else:
        longest = model.facts.sizes.max_positions
        engine |= {
            "backend": "torch",
            "device": "cpu",
            "max_batch_size": _MOST_REQUESTS,
            "max_seq_len": min(longest, _MOST_POSITIONS),
        }
    return Recipe.parse({"name": "derived", "model": {"source": source}, "engine": engine}, "the derived recipe")


def _on_gpu(
    model: Model,
    request: Request,
    gpu: Gpu,
    count: int | None,
    goal: Goal | None,
    kept: frozenset[Option],
    reasons: dict[str, str],
) -> Request:
    """The best alternative, with the usual format of the GPU where neither a format nor a goal was given.

    `count`: the GPUs of this machine; an alternative that needs more is chosen only if no other is legal. None: no
    limit.
    """
    tries = _tries(model, request, gpu, goal, kept)
    choices = [(wanted, asked, alternatives(model, asked, wanted, fixed)) for wanted, asked, fixed in tries]
    fitting = [
        (wanted, asked, [each for each in found if count is None or each.gpus <= count])
        for wanted, asked, found in choices
    ]
    for _, asked, found in (*fitting, *choices):
        if found:
            best = found[0] if goal else next((each for each in found if _is_roomy(each)), found[0])
            if "--quant" not in kept:
                usual = f"the usual format on {gpu.name}" if asked is tries[0][1] else f"fits {best.gpus} x {gpu.name}"
                reasons["quantization.format"] = best.why if goal else usual
            if count is not None and best.gpus > count:
                reasons["parallel"] = f"{best.gpus} GPUs: more than the {count} of this machine"
            # The estimate may have been made with more requests in flight; the limits stay the user's.
            return replace(best.evaluation.request, engine=asked.engine)
    return request


def _tries(
    model: Model, request: Request, gpu: Gpu, goal: Goal | None, kept: frozenset[Option]
) -> list[tuple[Goal, Request, frozenset[Option]]]:
    """The attempts, in their order: (goal, request, options that must not change)."""
    if goal is not None:
        return [(goal, request, kept)]
    tries: list[tuple[Goal, Request, frozenset[Option]]] = []
    if "--quant" not in kept and model.stored is None:
        for name in dict.fromkeys((_usual_format(gpu), "int4_awq")):
            usual = request.changed(Change("--quant", name))
            if "--kv-cache" not in kept and name == "fp8":
                usual = usual.changed(Change("--kv-cache", "fp8"))
            tries.append(("quality", usual, kept | {"--quant", "--kv-cache"}))
    else:
        tries.append(("quality", request, kept | {"--quant", "--kv-cache"}))
    return [*tries, ("quality", request, kept)]


def _is_roomy(alternative: Alternative) -> bool:
    """Whether the KV cache can contain enough requests for in-flight batching."""
    return (alternative.evaluation.typical_requests or 0) >= _ENOUGH_REQUESTS


def _usual_format(gpu: Gpu) -> str:
    if gpu.sm >= _FP8_CORES:
        return "fp8"
    return "int4_awq" if gpu.sm >= _INT4_KERNELS else "int8_wo"


def _legal(model: Model, request: Request, kept: frozenset[Option]) -> Request:
    """The request with the changes that make it legal. Raises ForgeError if only changes of kept options would."""
    evaluation = evaluate(model, request)
    for fix in fixes(model, evaluation):
        changed = {change.option for change in fix.changes}
        if fix.changes and kept.isdisjoint(changed):
            return request.changed(*fix.changes)
    for problem in evaluation.problems:
        (fix,) = fixes(model, replace(evaluation, problems=(problem,)))
        changes = tuple((change.option, change.value) for change in fix.changes)
        raise ForgeError(problem.message, hint=fix.text).repaired_by(Repair(options=changes) if changes else None)
    return request


def _values(
    source: str, name: str | None, model: Model, request: Request, reasons: dict[str, str]
) -> dict[str, dict[str, Any] | Any]:
    engine = request.engine.model_dump(mode="json", exclude_unset=True)
    gate = _gate(request.quant)
    positions = model.facts.sizes.max_positions
    reasons["engine.max_seq_len"] = f"the model has {positions:,} positions"
    reasons["gate"] = "the build fails if the quality is worse"
    quantization: dict[str, Any] = {"format": request.quant, "kv_cache": request.kv_cache}
    weights = WEIGHTS[request.quant]
    if weights.grouped and weights.group_size is None and request.group_size != defaults.GROUP_SIZE:
        quantization["group_size"] = request.group_size
    if positions < defaults.CALIBRATION_TOKENS and model.stored is None:
        quantization["calibration"] = {"sequence_length": positions}
    if positions < defaults.GATE_TOKENS:
        gate["sequence_length"] = positions
    parallel = {"tp": request.tp, "pp": request.pp, "ep": request.ep}
    dtype = {} if request.dtype == model_dtype("auto", model.config.dtype) else {"dtype": request.dtype}
    if dtype:
        reasons["model.dtype"] = f"{request.engine.target.gpu} does not compute in {model.config.dtype}"
    return {
        "name": name or name_for(source, "none" if model.stored else request.quant),
        "model": {"source": source, **dtype},
        "quantization": quantization,
        "parallel": {key: value for key, value in parallel.items() if value > 1 or key == "tp"},
        "engine": engine,
        "gate": gate,
    }


def _gate(quant: str) -> dict[str, Any]:
    bits = WEIGHTS[quant].bits
    kind = "unquantised" if bits is None else "4 bits" if bits <= _FOUR_BITS else "8 bits"
    return {"perplexity_increase": _PERPLEXITY_LIMITS[kind]}


def _lines(values: Mapping[str, Any], reasons: Mapping[str, str], prefix: str = "", indent: str = "") -> list[str]:
    lines = []
    for key, value in values.items():
        why = reasons.get(f"{prefix}{key}")
        comment = f"  # {why}" if why else ""
        inner = value if isinstance(value, Mapping) else {}
        if any(isinstance(each, Mapping) or f"{prefix}{key}.{name}" in reasons for name, each in inner.items()):
            lines += [f"{indent}{key}:{comment}", *_lines(inner, reasons, f"{prefix}{key}.", f"{indent}  ")]
        else:
            lines.append(f"{indent}{key}: {_flow(value)}{comment}")
    return lines


def _flow(value: Any) -> str:
    plain = dict(value) if isinstance(value, Mapping) else value
    text = yaml.safe_dump(plain, default_flow_style=True, sort_keys=False, width=_UNBROKEN, allow_unicode=True)
    return text.removesuffix("\n...\n").strip()
