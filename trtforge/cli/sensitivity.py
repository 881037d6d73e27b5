"""How a sensitivity analysis is printed: the ranking of layers, and the recipe lines of the proposal."""

from typing import TYPE_CHECKING

from trtforge.cli import show

if TYPE_CHECKING:
    from trtforge.pipeline.sensitivity import Sensitivity, Trial

DEFAULT_GATE = "perplexity_increase=0.01"
_SHOWN = 20


def show_sensitivity(found: "Sensitivity") -> None:
    """Print the ranking as a table, and the proposal as lines for a recipe."""
    rows = [[", ".join(damage.modules), f"{damage.error:.3%}"] for damage in found.ranking[:_SHOWN]]
    more = f" (the first {_SHOWN} of {len(found.ranking)})" if len(found.ranking) > _SHOWN else ""
    show.table(f"Error of the decoder layer when one linear layer is quantised{more}", ["layer", "error"], rows)
    print(f"all quantised: {_figures(found.everything)}")
    if found.proposal is None:
        print(f"no exclusions meet the gate: with all of these layers excluded, {_figures(found.last)}")
    elif found.proposal is found.everything:
        print("the gate passes without exclusions")
    else:
        print(f"with these layers excluded: {_figures(found.proposal)}")
        print("quantization:\n  exclude_modules:")
        for module in found.proposal.exclude_modules:
            print(f"    - {module}")


def _figures(trial: "Trial") -> str:
    found = trial.verification
    return (
        f"perplexity {found.perplexity.increase:+.3%}, top-1 agreement {found.top1_agreement:.2%}, "
        f"mean KL divergence {found.kl_mean:.2e}, {show.size(trial.bytes)}"
    )
