"""Repetitions within one another, whose counts multiply: the matcher follows each way to count what it reads."""

from collections.abc import Iterable

from trtforge.runtime.guidance.unenforced import Unenforced

_MOST_TIMES = 1000


def most_repeated(parts: Iterable[tuple[str, int]]) -> int:
    """How often something is repeated at most. Raises Unenforced if repetitions within one another do so too often.

    `parts`: kinds with numbers: brackets (0), repeat of what comes before it with its times, and anything else with how
    often something in it is repeated.
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
                raise Unenforced(f"repetitions within one another may repeat more than {_MOST_TIMES} times together")
            last *= times
        else:
            last = times
        groups[-1] = max(groups[-1], last)
    return max(groups)
