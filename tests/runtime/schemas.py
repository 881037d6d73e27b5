"""Random JSON schemas whose instances have bounded lengths."""

import json
import random
from typing import Any

_PATTERNS = ("^[A-Z]{2}[0-9]{3}$", "^(red|green|blue)$", "^[a-z]{1,8}@[a-z]{1,8}\\.com$")
_WORDS = ("name", "größe", "two words", 'quote"d', "id", "next", "value", "a", "名前")


def random_schemas(count: int) -> list[str]:
    """Different schemas of objects at most three levels deep, always the same ones."""
    draw = random.Random(0)
    found: dict[str, None] = {}
    while len(found) < count:
        found[json.dumps(_object(draw, 0))] = None
    return list(found)


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = draw.sample(_WORDS, draw.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _any(draw, depth + 1) for name in names},
        "required": draw.sample(names, draw.randint(0, len(names))),
        "additionalProperties": False,
    }


def _any(draw: random.Random, depth: int) -> dict[str, Any]:
    kinds = ["integer", "string", "boolean", "null", "enum", "const", "pattern"]
    kind = draw.choice([*kinds, *(("object", "array", "union") if depth < 3 else ())])
    match kind:
        case "integer":
            low = draw.randint(-1000, 1000)
            return {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 5000)}
        case "string":
            low = draw.randint(0, 3)
            return {"type": "string", "minLength": low, "maxLength": low + draw.randint(0, 8)}
        case "boolean" | "null":
            return {"type": kind}
        case "enum":
            return {"enum": draw.sample(["a", "B c", 1, -2.5, True, None, "ü"], draw.randint(1, 4))}
        case "const":
            return {"const": draw.choice(["fixed", 7, False])}
        case "pattern":
            return {"type": "string", "pattern": draw.choice(_PATTERNS)}
        case "array":
            low = draw.randint(0, 2)
            return {"type": "array", "items": _any(draw, depth + 1), "minItems": low, "maxItems": low + 2}
        case "union":
            return {"anyOf": [_any(draw, depth + 1), _any(draw, depth + 1)]}
    return _object(draw, depth)
