"""The nearest legal choice for a problem, found by search; every proposed fix was evaluated as a whole.

A fix changes a setting that the problem is about; if other problems remain or appear, the search continues with one of
them. The fewest changes win, then the least intrusive.
"""

from dataclasses import dataclass

from trtforge.plan.choices import candidates
from trtforge.plan.evaluate import evaluate
from trtforge.plan.evaluation import Evaluation
from trtforge.plan.legality import Problem
from trtforge.plan.model import Model
from trtforge.plan.request import FIXED, Change

_MOST_LEVELS, _BEAM = 14, 8


@dataclass(frozen=True)
class Fix:
    """A problem and the changes that make its request legal; no changes if none were found."""

    problem: Problem
    changes: tuple[Change, ...]

    @property
    def text(self) -> str:
        """What to do, as a sentence."""
        return f"Use {' '.join(map(str, self.changes))}." if self.changes else self.problem.fix


def fixes(model: Model, evaluation: Evaluation) -> tuple[Fix, ...]:
    """The nearest fix for every problem. Each fix alone makes the request legal."""
    found: dict[str, tuple[Change, ...]] = {}
    for problem in evaluation.problems:
        if problem.rule not in found:
            without = _nearest(model, evaluation, problem.rule, without=frozenset({"gpu"}))
            found[problem.rule] = without or _nearest(model, evaluation, problem.rule)
    return tuple(Fix(problem, found[problem.rule]) for problem in evaluation.problems)


@dataclass(frozen=True)
class _Try:
    """A node of the search: the changes so far, their evaluation, and the rule to fix next."""

    changes: tuple[Change, ...]
    evaluation: Evaluation
    rule: str

    @property
    def broken(self) -> int:
        """The number of rules that are still broken."""
        return len({problem.rule for problem in self.evaluation.problems})


def _nearest(
    model: Model, evaluation: Evaluation, rule: str, without: frozenset[str] = frozenset()
) -> tuple[Change, ...]:
    """Beam search: each level fixes one more rule; if no candidate does, it continues from the other candidates.

    If a level has no candidates, the search goes back to those that earlier levels left out.
    """
    level, seen = [_Try((), evaluation, rule)], {frozenset[Change]()}
    left_out: list[_Try] = []
    for _ in range(_MOST_LEVELS):
        fixed: list[_Try] = []
        others: list[_Try] = []
        for one in level:
            for further in candidates(model, one.evaluation, one.rule, without):
                changes = (*one.changes, *further)
                if model.checkpoint is not None and not FIXED.isdisjoint(change.option for change in further):
                    continue
                if frozenset(changes) in seen or len({change.key for change in changes}) < len(changes):
                    continue
                seen.add(frozenset(changes))
                result = evaluate(model, evaluation.request.changed(*changes))
                if result.legal:
                    return changes
                following = _Try(changes, result, result.problems[0].rule)
                still = any(problem.rule == one.rule for problem in result.problems)
                (others if still else fixed).append(following)
        going_back = not fixed and not others
        ranked = sorted(left_out if going_back else fixed or others, key=lambda one: one.broken)
        level = ranked[:_BEAM]
        left_out = ranked[_BEAM:] + ([] if going_back else left_out)
    return ()
