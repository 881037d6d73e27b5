"""How valid files are damaged: each function takes a file's bytes and a random source, and says what it did."""

import json
import random
from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

Damaged = tuple[bytes, str]
"""The new bytes, and what was done."""

_DEEP, _HUGE, _TWICE = "@@deep@@", "@@huge@@", "@@twice@@"
"""Written in place of what json and yaml cannot write."""

NASTY_VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 3, 7, 2**31, 2**63, 2**64, 10**12, 10**30, -(10**12), 0.5, -0.0, 1e308,
    float("nan"), float("inf"), float("-inf"), "", " ", "abc", "1", "nan", "../x", "/etc/passwd", "a/b", ".", "..",
    "\x00", "\ud800", "\U0001f600", "é" * 50, "x" * 100_000, "-1", "%s", "{}", "[bold]", "\x1b[2J", "*", "a" * 300,
    [], {}, [[]], [None], ["a"], [1, 2], [1] * 1000, [-1], ["../x"], {"a": 1}, {"": None}, {"type": "x"},
    {"rope_type": "llama3"}, _DEEP, _HUGE, _TWICE,
)  # fmt: skip

_YAML_LINES = (
    "x: &a [*a]", "2024-01-01: 1", "x: 2024-13-45", "x: 2001-12-14t21:59:43.10-05:00", "x: !!int abc", "x: !!float abc",
    "x: !!timestamp abc", "x: !!binary '???'", "x: !!set {a, b}", "x: !!python/object:os.system ls", "x: !foo bar",
    "x: !!bool maybe", "x: 0x", "x: 0b", "x: 190:20:30", "x: " + "9" * 5000, "? [a, b]\n: 1", "? {a: b}\n: 1", "1: 2",
    "null: 2", "<<: 3", "<<: [1, 2]", "<<: {a: 1}", "x: *nothing", "=: 1", "x: =", "\t- a", "%YAML 9.9\n---\na: 1",
    "--- a\n--- b", "x: " + "[" * 3000, "x: " + "{a: " * 3000, "- " * 3000 + "a", "? " * 500, "x: |9\n  a", "x: \x07",
    "x: '\\", 'x: "\\ud800"', 'x: "\\U00110000"', "x: >-\n" + "  a\n" * 2000,
)  # fmt: skip

_LOG_LINES = (
    "resizePhysical " * 4000, "ValueError: backend tensorrt-LLM " * 2500, "Couldn't assign a with shape b " * 2000,
    "Parameter " * 5000, "Skipping tactic " * 4000, " " * 60_000 + "x", "[1,0]<stderr>:" * 4000, "[TRT] [I] " * 6000,
    "[1," + "9" * 5000 + "]<stderr>:x", "[rank" + "1" * 5000 + "]: x", "MPI_ABORT was invoked on rank " + "8" * 5000,
    "Thu Jul " + "1" * 5000 + " 12:00:00 2024[1,0]<stderr>:x", "a" + "-1" * 30_000, "\x1b[" + "0;" * 30_000,
    "Traceback (most recent call last)", "  File " * 8000, "\r" * 60_000, "x\r" * 30_000, "\x00" * 1000, "x\n" * 20_000,
    "".join(f"[1,{rank}]<stderr>:RuntimeError: x\n" for rank in range(5000)), "Error" * 12_000, "Socket '" * 8000,
    "stdVersionRead == kSERIALIZATION_VERSION failed " * 1500, "json.exception.parse_error.101 " * 2000,
    "{needed} {0} {", "Expected " * 7000, "Error parsing text-format inference.ModelConfig: 1:1: Expected " * 1000,
)  # fmt: skip

_WORDS = ("\ufeff", "\x00", "'", '"', "{", "}", "[", "]", ":", ",", "\n", "-", "1", "e", "#", "&a ", "*a", "\\", "${x}")


def damage(path: Path, data: bytes, source: random.Random) -> Damaged:
    """Damage the content of a file as its kind asks for."""
    kinds: list[Callable[[bytes, random.Random], Damaged]] = [damage_bytes]
    match path.suffix:
        case ".json":
            kinds = [damage_json] * 6 + [damage_text, damage_bytes]
        case ".jsonl":
            kinds = [_a_line_of_json] * 5 + [damage_text, damage_bytes]
        case ".yaml" | ".lock":
            kinds = [damage_yaml] * 5 + [_yaml_lines] * 4 + [damage_text, damage_bytes]
        case ".safetensors":
            kinds = [damage_header] * 5 + [damage_text, damage_bytes]
        case ".log":
            kinds = [_log_lines] * 5 + [damage_text, damage_bytes]
        case ".txt" | ".pbtxt":
            kinds = [damage_text, damage_text, damage_bytes]
    return source.choice(kinds)(data, source)


def damage_bytes(data: bytes, source: random.Random) -> Damaged:
    """Cut, flip, repeat, replace: nothing of the format is respected."""
    way = source.choice(("truncate", "flip", "insert", "empty", "repeat", "zeros", "utf16", "bom", "garbage"))
    place = source.randrange(len(data) + 1)
    found = bytearray(data)
    match way:
        case "truncate":
            del found[place:]
        case "flip":
            for _ in range(source.choice((1, 3, 30))):
                if found:
                    found[source.randrange(len(found))] ^= 1 << source.randrange(8)
        case "insert":
            found[place:place] = source.randbytes(source.choice((1, 8, 1000)))
        case "empty":
            found.clear()
        case "repeat":
            found += data
        case "zeros":
            found[place : place + 64] = bytes(64)
        case "utf16":
            found = bytearray(data.decode("utf-8", "replace").encode("utf-16"))
        case "bom":
            found[:0] = b"\xef\xbb\xbf"
        case "garbage":
            found = bytearray(source.randbytes(1000))
    return bytes(found), f"{way} at {place}"


def damage_text(data: bytes, source: random.Random) -> Damaged:
    """Put characters that mean something into a text, or take some out."""
    text = data.decode("utf-8", "surrogateescape")
    word, place = source.choice(_WORDS) * source.choice((1, 1, 2, 5000)), source.randrange(len(text) + 1)
    end = place + source.choice((0, 1, 5, 100))
    text = text[:place] + word + text[end:]
    return text.encode("utf-8", "surrogateescape"), f"text at {place}: {word[:20]!r}"


def damage_json(data: bytes, source: random.Random) -> Damaged:
    """Change the values of a JSON text."""
    values = json.loads(data)
    done = [_change(values, source) for _ in range(source.choice((1, 1, 1, 2, 4)))]
    return _filled(json.dumps(values)).encode("utf-8", "surrogatepass"), "; ".join(done)


def damage_yaml(data: bytes, source: random.Random) -> Damaged:
    """Change the values of a YAML text."""
    values = yaml.safe_load(data)
    done = [_change(values, source) for _ in range(source.choice((1, 1, 1, 2, 4)))]
    if source.random() < 0.5:  # JSON is YAML
        return _filled(json.dumps(values)).encode("utf-8", "surrogatepass"), "; ".join(done)
    text = yaml.safe_dump(values, allow_unicode=True)
    return _filled(text).encode("utf-8", "surrogatepass"), "; ".join(done)


def damage_header(data: bytes, source: random.Random) -> Damaged:
    """Change the header of a safetensors file; its length stays right, most of the time."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    names = [name for name in header if name != "__metadata__"]
    way = source.choice(("change", "change", "change", "overlap", "swap", "length", "copy", "shape"))
    done = way
    if way == "change" or not names:
        done = "; ".join(_change(header, source) for _ in range(source.choice((1, 2))))
    elif way == "overlap":
        header[source.choice(names)]["data_offsets"] = header[source.choice(names)]["data_offsets"]
    elif way == "swap":
        one, other = source.choice(names), source.choice(names)
        header[one], header[other] = header[other], header[one]
    elif way == "copy":
        header[source.choice(("new", "model.layers.0.self_attn.q_proj.weight", "../x"))] = header[source.choice(names)]
    elif way == "shape":
        entry = header[source.choice(names)]
        entry["shape"] = source.choice(
            ([], [0], [1] * 50, list(reversed(entry["shape"])), [*entry["shape"], 1], [10**9, 10**9])
        )
    text = _filled(json.dumps(header)).encode("utf-8", "surrogatepass")
    size = len(text) if way != "length" else source.choice((0, 1, 2**40, 2**63, 99_999_999, len(text) + 1))
    return (size % 2**64).to_bytes(8, "little") + text + data[8 + length :], f"header: {done}"


def _a_line_of_json(data: bytes, source: random.Random) -> Damaged:
    lines = data.decode().splitlines()
    number = source.randrange(len(lines))
    changed, done = damage_json(lines[number].encode(), source)
    before, after = "\n".join(lines[:number]), "\n".join(lines[number + 1 :])
    return f"{before}\n".encode() + changed + f"\n{after}\n".encode(), f"line {number + 1}: {done}"


def _yaml_lines(data: bytes, source: random.Random) -> Damaged:
    line = source.choice((*_YAML_LINES, "bomb"))
    if line == "bomb":
        names = "abcdefghi"
        bomb = [f"{names[0]}: &{names[0]} [" + ", ".join(["lol"] * 9) + "]"]
        bomb += [f"{n}: &{n} [" + ", ".join([f"*{m}"] * 9) + "]" for m, n in pairwise(names)]
        line = "\n".join(bomb)
    text = data.decode()
    where = source.choice(("before", "after", "alone"))
    text = {"before": f"{line}\n{text}", "after": f"{text}\n{line}\n", "alone": f"{line}\n"}[where]
    return text.encode("utf-8", "surrogatepass"), f"yaml {where}: {line[:40]!r}"


def _log_lines(data: bytes, source: random.Random) -> Damaged:
    lines = data.decode().splitlines()
    done = []
    for _ in range(source.choice((1, 2, 3))):
        line = source.choice(_LOG_LINES)
        lines.insert(source.randrange(len(lines) + 1), line)
        done.append(line[:30])
    return "\n".join(lines).encode(), f"log lines {done}"


def _change(values: Any, source: random.Random) -> str:
    """Change one value somewhere inside of `values`, in place."""
    places = list(_places(values, "", 0))
    if not places:
        return "nothing to change"
    # Few values lie outside, many inside: a vocabulary would take all changes.
    shallow = [place for place in places if place[3] == 0]
    holder, key, name, _ = source.choice(shallow if shallow and source.random() < 0.5 else places)
    way = source.choice(("value", "value", "value", "value", "delete", "near", "rename", "move"))
    if way == "near" and isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
        holder[key] = source.choice(
            (-holder[key], holder[key] + 1, holder[key] * 2, holder[key] * 1000, holder[key] / 2)
        )
        return f"{name} = {holder[key]!r}"
    if way == "delete":
        del holder[key]
        return f"{name} deleted"
    if way == "rename" and isinstance(holder, dict):
        holder[source.choice((f"{key}x", "", "name", "../x"))] = holder.pop(key)
        return f"{name} renamed"
    if way == "move":
        other, other_key, other_name, _ = source.choice(places)
        value = other[other_key] if (isinstance(other, list) or other_key in other) else None
        holder[key] = json.loads(json.dumps(value))
        return f"{name} = value of {other_name}"
    value = source.choice(NASTY_VALUES)
    holder[key] = deepcopy(value)  # the next change may be inside of it
    return f"{name} = {value!r:.40}"


def _places(values: Any, prefix: str, depth: int) -> Any:
    items = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for number, (key, value) in enumerate(items):
        if number > 400:
            return
        yield values, key, f"{prefix}{key}", depth
        yield from _places(value, f"{prefix}{key}.", depth + 1)


def _filled(text: str) -> str:
    """Put in what stands behind the marks."""
    text = text.replace(f'"{_DEEP}"', _DEEP).replace(f"'{_DEEP}'", _DEEP).replace(f'"{_HUGE}"', _HUGE)
    text = text.replace(f"'{_HUGE}'", _HUGE)
    text = text.replace(_DEEP, "[" * 100_000 + "]" * 100_000).replace(_HUGE, "7" * 5000)
    place = text.find(f'"{_TWICE}"')
    if place >= 0:  # the key of that value once more
        start = text.rfind(', "', 0, place)
        key = text[start + 2 : place] if start >= 0 else '"a": '
        text = text[:place] + f'1, {key}"again"' + text[place + len(_TWICE) + 2 :]
    return text
