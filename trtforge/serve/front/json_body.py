"""JSON from clients, checked before a recursive parser reads it: UTF-8, depth, size of numbers, duplicate names."""

import json
import math
import re
from http import HTTPStatus
from typing import Any

from trtforge.serve.front.limits import FrontLimits
from trtforge.serve.front.refusal import Refusal, refuse

_OTHERS = bytes(set(range(256)) - set(b"[]{}"))


def parse_object(body: bytes, limits: FrontLimits) -> dict[str, Any]:
    """The object in `body`. Raises Refusal (400, 413) naming the problem; never RecursionError."""
    if len(body) > limits.json_bytes:
        raise Refusal(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the JSON body has {len(body)} bytes, at most {limits.json_bytes} are accepted",
        )
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        refuse(f"the body is not valid UTF-8: byte 0x{body[error.start]:02x} at offset {error.start}")
    _check_nesting(body, limits)
    try:
        document = json.loads(
            text,
            parse_constant=lambda name: refuse(f"{name} is not JSON"),
            parse_int=lambda digits: int(_number(digits, limits)),
            parse_float=lambda digits: _finite(_number(digits, limits)),
            object_pairs_hook=_without_duplicates,
        )
    except json.JSONDecodeError as error:
        refuse(f"the body is not JSON: {error.msg} at line {error.lineno} column {error.colno}")
    if not isinstance(document, dict):
        refuse(f"the body must be a JSON object, not {json_type(document)}")
    if "\\u" in text:
        _check_surrogates(document)
    return document


def json_type(value: object) -> str:
    """The JSON name of a value's type."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "an array"
    return "an object"


def _check_nesting(body: bytes, limits: FrontLimits) -> None:
    """Check the count and depth of brackets outside of strings; invalid JSON is left to the parser."""
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    brackets = b"".join(unescaped.split(b'"')[::2]).translate(None, _OTHERS)
    if len(brackets) > 2 * limits.containers:
        refuse(f"the JSON has more than {limits.containers} arrays and objects")
    depth = 0
    for bracket in brackets:
        depth += 1 if bracket in b"[{" else -1
        if depth > limits.depth:
            refuse(f"the JSON is nested deeper than {limits.depth} levels")


def _number(digits: str, limits: FrontLimits) -> str:
    if len(digits) > limits.number_digits:
        refuse(f"a number has {len(digits)} characters, at most {limits.number_digits} are accepted")
    return digits


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        refuse(f"the number {digits} is out of range")
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            refuse(f"the name {printable(name)} is given twice")
        found[name] = value
    return found


def _check_surrogates(document: dict[str, Any]) -> None:
    try:
        json.dumps(document, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        refuse("a string has an escape of half a surrogate pair, which is not valid Unicode")


def printable(text: str) -> str:
    """A name from a client, short and without control characters, for a message."""
    return "'" + re.sub(r"[^\x20-\x7e]", "?", text[:64]) + ("…'" if len(text) > 64 else "'")
