"""Parses sizes: 200GB, 64GiB, a number of bytes; 4.5bits of a weight."""

import re
from fractions import Fraction
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from trtforge.core.errors import UsageError

_SIZE = r"([0-9]+(?:\.[0-9]+)?)\s*([kKmMgGtT]?)([iI]?)[bB]?"
_PREFIXES = ("", "k", "m", "g", "t")
MOST_BYTES = 2**63 - 1
"""Limit of signed 64-bit integers, in which engines receive sizes."""
MOST_INT32 = 2**31 - 1
"""Limit of signed 32-bit integers, in which engines receive ids and numbers of tokens."""
_KINDS = "200GB, 1.5TB, 64GiB or a number of bytes"


def parse_size(text: str, option: str) -> int:
    """Bytes of a size such as 500MB (decimal) or 2GiB (binary). Raises UsageError naming the option."""
    try:
        return _bytes_of(text)
    except ValueError:
        raise UsageError(f"{option} {text}: not a size", hint=f"Give {_KINDS}.") from None


def _bytes_of(text: str) -> int:
    match = re.fullmatch(_SIZE, text.strip())
    if match is None:
        raise ValueError(f"not a size: write {_KINDS}")
    number, prefix, binary = match.groups()
    unit = (1024 if binary else 1000) ** _PREFIXES.index(prefix.lower())
    return int(Fraction(number) * unit)


def _from_text(value: Any) -> Any:
    return _bytes_of(str(value)) if isinstance(value, str | bool) else value


def _text(pattern: str) -> dict[str, str]:
    """The JSON schema of text of this pattern; whether the number is within its limits, only the parser checks."""
    return {"type": "string", "pattern": rf"^\s*{pattern}\s*$"}


Bytes = Annotated[
    int,
    BeforeValidator(_from_text),
    Field(ge=1, le=MOST_BYTES),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1, "maximum": MOST_BYTES}, _text(_SIZE)]}),
]
"""A field of a configuration: bytes, or a size in text."""

MOST_BITS = 16
"""Bits of an unquantised weight."""
_BITS = r"([0-9]+(?:\.[0-9]+)?)\s*(?:[bB][iI][tT][sS]?)?"


def parse_bits(text: str, option: str) -> float:
    """Bits of a weight such as 4.5bits. Raises UsageError naming the option."""
    try:
        bits = _bits_of(text)
    except ValueError:
        raise UsageError(f"{option} {text}: not a number of bits", hint="Give 4.5bits, or 4.5.") from None
    if not 0 < bits <= MOST_BITS:
        raise UsageError(f"{option} {text}: not between 0 and {MOST_BITS} bits", hint="Give 4.5bits, or 4.5.")
    return bits


def _bits_of(value: object) -> float:
    if isinstance(value, bool):
        raise ValueError("not a number of bits: write 4.5bits, or 4.5")
    match = re.fullmatch(_BITS, str(value).strip())
    if match is None:
        raise ValueError("not a number of bits: write 4.5bits, or 4.5")
    return float(match[1])


Bits = Annotated[
    float,
    BeforeValidator(_bits_of),
    Field(gt=0, le=MOST_BITS),
    WithJsonSchema({"anyOf": [{"type": "number", "exclusiveMinimum": 0, "maximum": MOST_BITS}, _text(_BITS)]}),
]
"""A field of a configuration: bits of a weight."""
