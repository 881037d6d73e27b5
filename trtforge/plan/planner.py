"""The whole plan of a deployment: legality with fixes, memory, time estimates, alternatives. Reads and runs nothing."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trtforge.core.errors import UsageError
from trtforge.core.parallel import Parallel
from trtforge.plan import roofline as assumed
from trtforge.plan.alternatives import Alternative, Goal, alternatives, fits_on, smallest_legal
from trtforge.plan.capacity import held_by
from trtforge.plan.evaluate import evaluate
from trtforge.plan.evaluation import Evaluation
from trtforge.plan.fixes import Fix, fixes
from trtforge.plan.instances import instances_of
from trtforge.plan.kv import bytes_per_token
from trtforge.plan.memory import Held
from trtforge.plan.model import Model
from trtforge.plan.peaks import Peaks, peaks
from trtforge.plan.published import served_as_published
from trtforge.plan.request import Request
from trtforge.plan.roofline import Performance

ESTIMATE = "estimates of a roofline model with assumed efficiencies, not measurements"


@dataclass(frozen=True)
class Plan:
    """The result of `trtforge plan`. `fits`: the fewest GPUs of each common kind, if no GPU is named.

    `layout_note`: why a layout other than the default is planned; None for the default.
    """

    model: Model
    evaluation: Evaluation
    fixes: tuple[Fix, ...]
    alternatives: tuple[Alternative, ...]
    fits: tuple[Evaluation, ...]
    layout_note: str | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the plan as a whole."""
        return (*((self.layout_note,) if self.layout_note else ()), *self.model.notes)

    @property
    def curve(self) -> tuple[Performance, ...]:
        """Performance at 1, 2, 4, ... concurrent requests, up to the number that fits; empty without a GPU or if
        illegal."""
        time, typical = self.evaluation.roofline(self.model), self.evaluation.typical
        if time is None or typical is None:
            return ()
        return tuple(time.performance(number, typical) for number in self._concurrencies())

    @property
    def performance(self) -> Performance | None:
        """Performance at the requested concurrency, else at the largest that fits."""
        wanted = self.evaluation.request.concurrency
        return next(
            (point for point in self.curve if point.concurrency == wanted), self.curve[-1] if self.curve else None
        )

    def _concurrencies(self) -> list[int]:
        request, limits = self.evaluation.request, self.evaluation.limits
        assert limits is not None
        most = max(1, min(self.evaluation.typical_requests or 1, limits.max_batch_size * request.pp))
        powers = [1 << bit for bit in range(most.bit_length())]
        return sorted({*(number for number in powers if number <= most), most, *([request.concurrency or 1])})

    def as_json(self) -> dict[str, Any]:
        """In bytes, tokens and milliseconds. null: unknown because the layout is illegal."""
        evaluation = self.evaluation
        windows = evaluation.memory.windows if evaluation.memory else None
        instances = instances_of(evaluation)
        return {
            "model": self.model.name,
            "family": self.model.family.name,
            "legal": evaluation.legal,
            "problems": [
                {
                    "rule": fix.problem.rule,
                    "message": fix.problem.message,
                    "fix": fix.text,
                    "apply": [word for change in fix.changes for word in (change.option, change.value)],
                }
                for fix in self.fixes
            ],
            "warnings": list(evaluation.warnings),
            "notes": list(self.notes),
            "choice": choice_json(evaluation.request),
            "embedded": evaluation.embedded.as_json() if evaluation.embedded else None,
            "memory": self._memory(),
            "kv_tokens": evaluation.memory.kv_tokens if evaluation.memory else None,
            "kv_windows": windows.as_json() if windows else None,
            "max_concurrency": evaluation.full_length_requests,
            "longest_prompt": evaluation.longest_prompt,
            "instances": instances.as_json() if instances else None,
            "concurrency": self._concurrency(),
            "limits": None if evaluation.limits is None else evaluation.limits.build_fields,
            "peaks": asdict(self.peaks),
            "estimates": self._estimates(),
            "fits": [choice_json(found.request) for found in self.fits],
            "alternatives": [_alternative_json(alternative) for alternative in self.alternatives],
        }

    @property
    def weights(self) -> int:
        """Bytes of the unsplit model's weights."""
        memory = self.evaluation.memory
        held = self._held
        return memory.weights if memory else held.whole.nbytes(held.stored, Parallel(), 0) + held.vision

    @property
    def kv_per_token(self) -> int:
        """Bytes of a token in the unsplit model's KV cache."""
        return bytes_per_token(self.model.facts.sizes, self._held.cache_itemsize)

    def _memory(self) -> Mapping[str, Any]:
        if self.evaluation.memory is not None:
            return self.evaluation.memory.as_json()
        unknown = dict.fromkeys(("kv_pool", "activations", "total", "per_gpu"))
        return {"weights": self.weights, "kv_per_token": self.kv_per_token, **unknown}

    @property
    def _held(self) -> Held:
        """The unsplit model, whose size is known for any layout."""
        return held_by(self.model, self.evaluation.request, None)

    def _concurrency(self) -> Mapping[str, Any] | None:
        typical = self.evaluation.typical
        if typical is None:
            return None
        return {
            "full_length": self.evaluation.full_length_requests,
            "typical": self.evaluation.typical_requests,
            "typical_prompt": typical.prompt,
            "typical_output": typical.output,
        }

    @property
    def peaks(self) -> Peaks:
        """Peak memory of the stages before serving."""
        evaluation, model = self.evaluation, self.model
        held = evaluation.held or self._held
        request = evaluation.request
        published = served_as_published(model.config, request.engine.backend, request.quant)
        quantised = model.stored is not None or model.checkpoint is not None or published
        builds = evaluation.embedded is None and request.engine.backend != "llmapi"  # others do not use trtllm-build
        built = evaluation.memory if builds else None
        return peaks(
            model.family,
            model.facts,
            held,
            request.calibration,
            request.gate,
            built,
            quantised=quantised,
            compensated=request.compensated,
            limit=request.calibration_memory,
        )

    def _estimates(self) -> Mapping[str, Any]:
        at, typical = self.performance, self.evaluation.typical
        if at is None or typical is None:
            return {}
        gpus = self.evaluation.request.tp * self.evaluation.request.pp
        return {
            "note": ESTIMATE,
            "typical": {"prompt": typical.prompt, "output": typical.output},
            **_performance_json(at, gpus),
            "curve": [_performance_json(point, gpus) for point in self.curve],
            "assumptions": assumptions(),
        }


def plan(
    model: Model, request: Request, goal: Goal, *, with_alternatives: bool = False, any_layout: bool = False
) -> Plan:
    """Plan a deployment. Raises ForgeError for an unknown GPU or release.

    `any_layout`: the user gave no layout, so if the request's layout is illegal, the fewest GPUs are planned instead. A
    TensorRT-LLM checkpoint is planned as it is. Raises UsageError if alternatives to a checkpoint are requested.
    """
    fixed = model.checkpoint is not None
    if fixed and with_alternatives:
        raise UsageError(
            f"--alternatives: {model.name} is a checkpoint, whose layout and formats are fixed",
            hint="Plan the Hugging Face model that it was made from.",
        )
    evaluation, note = evaluate(model, request), None
    if any_layout and not fixed and request.gpu is not None and not evaluation.legal:
        found = smallest_legal(model, request)
        if found is not None:
            planned = found.request
            note = (
                f"planned for tp {planned.tp}, pp {planned.pp}, the fewest GPUs: with tp {request.tp}, pp {request.pp} "
                f"{evaluation.problems[0].message}"
            )
            evaluation, request = found, planned
    return Plan(
        model=model,
        evaluation=evaluation,
        fixes=fixes(model, evaluation),
        alternatives=alternatives(model, request, goal) if with_alternatives else (),
        fits=fits_on(model, request) if not fixed and request.gpu is None and request.for_tensorrt is not False else (),
        layout_note=note,
    )


def choice_json(request: Request) -> dict[str, Any]:
    """A request as options."""
    return {
        "gpu": None if request.gpu is None else request.gpu.name,
        "gpus": request.tp * request.pp,
        "tp": request.tp,
        "pp": request.pp,
        "ep": request.ep,
        "quant": request.quant,
        "kv_cache": request.kv_cache,
        "group_size": request.group_size,
        "dtype": request.dtype,
        "tensorrt_llm": request.engine.target.tensorrt_llm,
    }


def assumptions() -> dict[str, Any]:
    """The efficiencies behind the estimates."""
    return {
        "compute_efficiency": dict(assumed.COMPUTE_EFFICIENCY),
        "unpacking_efficiency": assumed.UNPACKING_EFFICIENCY,
        "stage_loss": assumed.STAGE_LOSS,
        "attention_efficiency": assumed.ATTENTION_EFFICIENCY,
        "bandwidth_efficiency": assumed.BANDWIDTH_EFFICIENCY,
        "cache_efficiency": assumed.CACHE_EFFICIENCY,
        "link_efficiency": assumed.LINK_EFFICIENCY,
        "all_reduce_seconds": assumed.ALL_REDUCE_SECONDS,
        "step_seconds": assumed.STEP_SECONDS,
        "request_seconds": assumed.REQUEST_SECONDS,
    }


def _alternative_json(alternative: Alternative) -> dict[str, Any]:
    evaluation = alternative.evaluation
    assert evaluation.memory is not None
    return {
        **choice_json(evaluation.request),
        "memory": evaluation.memory.as_json(),
        "kv_tokens": evaluation.memory.kv_tokens,
        "max_concurrency": evaluation.full_length_requests,
        "longest_prompt": evaluation.longest_prompt,
        "estimates": _performance_json(alternative.performance, alternative.gpus),
        "warnings": list(evaluation.warnings),
        "why": alternative.why,
    }


def _performance_json(point: Performance, gpus: int) -> dict[str, Any]:
    return {
        "concurrency": point.concurrency,
        "ttft_ms": round(1e3 * point.ttft, 2),
        "tpot_ms": round(1e3 * point.tpot, 2),
        "tokens_per_second": round(point.tokens_per_second, 1),
        "tokens_per_second_per_gpu": round(point.tokens_per_second / gpus, 1),
    }
