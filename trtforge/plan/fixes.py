"""The nearest legal choice for a problem, found by trying: what is proposed was judged legal as a whole.

A fix changes what the problem is about; where that raises or leaves another problem, what that one is about, and so
on. The fewest changes win, and among those the least intrusive.
"""

from dataclasses import dataclass

from trtforge.plan.choices import candidates
from trtforge.plan.evaluate import evaluate
from trtforge.plan.evaluation import Evaluation
from trtforge.plan.legality import Problem
from trtforge.plan.model import Model
from trtforge.plan.request import Change

_MOST_CHANGES, _BEAM = 7, 8


@dataclass(frozen=True)
class Fix:
    """A problem with the changes that make its request legal; none where no choice of the user's does."""

    problem: Problem
    changes: tuple[Change, ...]

    @property
    def text(self) -> str:
        """What to do, as a sentence."""
        return f"Use {' '.join(map(str, self.changes))}." if self.changes else self.problem.fix


def fixes(model: Model, evaluation: Evaluation) -> tuple[Fix, ...]:
    """The nearest fix of every problem. Each, applied alone, leaves no problem of any kind."""
    found: dict[str, tuple[Change, ...]] = {}
    for problem in evaluation.problems:
        if problem.rule not in found:
            without = _nearest(model, evaluation, problem.rule, without=frozenset({"gpu"}))
            found[problem.rule] = without or _nearest(model, evaluation, problem.rule)
    return tuple(Fix(problem, found[problem.rule]) for problem in evaluation.problems)


@dataclass(frozen=True)
class _Try:
    """A request on the way to a legal one: the changes so far, how it was judged, the rule to be fixed next."""

    changes: tuple[Change, ...]
    evaluation: Evaluation
    rule: str

    @property
    def broken(self) -> int:
        """Rules that it still breaks."""
        return len({problem.rule for problem in self.evaluation.problems})


def _nearest(
    model: Model, evaluation: Evaluation, rule: str, without: frozenset[str] = frozenset()
) -> tuple[Change, ...]:
    """A beam search, each level of which fixes one more rule; where nothing does, it goes on from what does not."""
    level, seen = [_Try((), evaluation, rule)], {frozenset[Change]()}
    for _ in range(_MOST_CHANGES):
        fixed: list[_Try] = []
        others: list[_Try] = []
        for one in level:
            for further in candidates(model, one.evaluation, one.rule, without):
                changes = (*one.changes, *further)
                if frozenset(changes) in seen or len({change.key for change in changes}) < len(changes):
                    continue
                seen.add(frozenset(changes))
                result = evaluate(model, evaluation.request.changed(*changes))
                if result.legal:
                    return changes
                following = _Try(changes, result, result.problems[0].rule)
                still = any(problem.rule == one.rule for problem in result.problems)
                (others if still else fixed).append(following)
        level = sorted(fixed or others, key=lambda one: one.broken)[:_BEAM]
    return ()
