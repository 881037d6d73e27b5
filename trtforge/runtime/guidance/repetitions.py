"""Limits nested repetitions, whose counts multiply: the matcher follows every way to count what it reads."""

from collections.abc import Iterable

from trtforge.runtime.guidance.unenforced import Unenforced

_MOST_TIMES = 1000


def most_repeated(parts: Iterable[tuple[str, int]]) -> int:
    """The maximum repetitions of anything in `parts`. Raises Unenforced if nested repetitions multiply to too many.

    `parts`: kinds with numbers: brackets (0), "repeat" with the maximum count of the part before it, and anything else
    with the maximum repetitions inside it.
    """
    groups, last = [1], 1
    for kind, times in parts:
        if kind == "(":
            groups.append(1)
            last = 1
        elif kind == ")":
            last = groups.pop() if len(groups) > 1 else 1
        elif kind == "repeat":
            if last > 1 < times and last * times > _MOST_TIMES:
                raise Unenforced(f"nested repetitions multiply to more than {_MOST_TIMES}")
            last *= times
        else:
            last = times
        groups[-1] = max(groups[-1], last)
    return max(groups)
