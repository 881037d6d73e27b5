"""Metrics as servers write them, with other figures.

`embedded` and `gateway` were recorded from the demo model; `tensorrt_llm` has the form that TensorRT-LLM's backend
documents.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from trtforge.advise.readings import Observation, Reading
from trtforge.formats.prometheus import parse_metrics

_DIRECTORY = Path(__file__).parent / "recorded"


def text(kind: str, figures: Mapping[str, float] | None = None) -> str:
    """A recorded text. `figures`: other values, by `value of a label` or `model name` and words of the metric's name.

    The key is searched in the whole line before its value, each of its words.
    """
    lines = (_DIRECTORY / f"{kind}.txt").read_text().splitlines()
    for key, value in (figures or {}).items():
        words = key.split()
        places = [n for n, line in enumerate(lines) if line[0] != "#" and all(word in _head(line) for word in words)]
        assert len(places) == 1, f"{key} is in {len(places)} lines"
        lines[places[0]] = f"{_head(lines[places[0]])} {value}"
    return "\n".join([*lines, ""])


def _head(line: str) -> str:
    return re.sub(r" \S+$", "", line)


def observed(
    *texts: str, settings: Mapping[str, str] | None = None, seconds: float = 0.5, beside: Sequence[str] = ()
) -> Observation:
    """Readings of these texts, so many seconds apart. `beside`: of the gateway at the same moments."""
    extra = [*beside, *[""] * len(texts)]
    readings = [
        Reading.of(seconds * number, (*parse_metrics(one, "test"), *parse_metrics(more, "test")))
        for number, (one, more) in enumerate(zip(texts, extra, strict=False))
    ]
    return Observation(readings, {"tensorrt_llm": settings} if settings is not None else {})
