"""Models and requests that the plan's tests share."""

from typing import Any

from trtforge.core.recipe import Recipe
from trtforge.plan.model import Model, find_model
from trtforge.plan.request import Request, request_of
from trtforge.plan.roofline import Workload

LLAMA_8B = "meta-llama/Llama-3.1-8B"
LLAMA_70B = "meta-llama/Llama-3.1-70B"
LLAMA_405B = "meta-llama/Llama-3.1-405B"
MIXTRAL = "mistralai/Mixtral-8x7B-v0.1"


def asked(
    model: Model, *, recipe: dict[str, Any] | None = None, typical: Workload | None = None, **options: Any
) -> Request:
    """The request of `trtforge plan` with options by their names: `asked(model, tp=2, kv_cache="fp8")`."""
    values = {"name": "plan", "model": {"source": model.name}} | (recipe or {})
    given = {f"--{name.replace('_', '-')}": value for name, value in options.items()}
    return request_of(Recipe.parse(values, "test"), model, given, typical)  # type: ignore[arg-type]


def known(hub_id: str) -> Model:
    """A model whose facts travel with the program."""
    return find_model(hub_id)
