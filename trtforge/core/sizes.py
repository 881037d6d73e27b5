"""Sizes as people write them: 200GB, 64GiB, a number of bytes."""

from typing import Annotated

from pydantic import ByteSize, Field, TypeAdapter, ValidationError, WithJsonSchema

from trtforge.core.errors import UsageError

Bytes = Annotated[
    ByteSize, Field(ge=1), WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string"}]})
]
"""A field of a configuration: bytes, or text such as 16GB (decimal) or 2GiB (binary)."""

_SIZE = TypeAdapter(ByteSize)


def parse_size(text: str, option: str) -> int:
    """Bytes of such text. Raises UsageError naming the option for anything else."""
    try:
        return _SIZE.validate_python(text.strip())
    except ValidationError:
        raise UsageError(
            f"{option} {text}: not a size", hint="Write 200GB, 1.5TB, 64GiB or a number of bytes."
        ) from None
