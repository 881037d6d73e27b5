"""Every known log message, by subject. If two match a line, the first in the table applies; it is the more specific
one."""

from trtforge.doctor.known import build, containers, engine, environment, llmapi, precision, quantize, ranks, serving
from trtforge.doctor.pattern import Pattern

PATTERNS: tuple[Pattern, ...] = (
    *engine.PATTERNS,
    *ranks.PATTERNS,
    *precision.PATTERNS,
    *serving.PATTERNS,
    *llmapi.PATTERNS,
    *build.PATTERNS,
    *quantize.PATTERNS,
    *environment.PATTERNS,
    *containers.PATTERNS,
)
