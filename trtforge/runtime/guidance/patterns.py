"""Regular expressions for xgrammar: refuses what it would ignore, and rewrites what it would misread."""

import re
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from trtforge.runtime.guidance.repetitions import most_repeated
from trtforge.runtime.guidance.unenforced import Unenforced

_ESCAPES = frozenset("dDwWsSnrtfvae0xucbBpPk123456789")
"""Letters and digits that xgrammar reads as escapes or refuses itself; it would match others literally."""
DEEPEST = 200
"""Maximum nesting of brackets in an expression or a grammar."""
_TOKEN = re.compile(
    r"""(?P<repeat>(?:[*+?]|\{(?P<least>\d+)(?P<open>,(?P<most>\d*))?\})\??)
    |(?P<atom>\\u\{[0-9A-Fa-f]+\}|\\u[0-9A-Fa-f]{4}|\\x[0-9A-Fa-f]{2}|\\c[A-Za-z]|\\.|\[\^?(?:\\.|[^\]\\])*(?:\]|(?P<unclosed>\\?\Z))|[^()|^$\\[*+?])
    |(?P<open_group>\((?:\?(?:P?<\w+>|<[=!]|[^<)]))?)
    |(?P<other>.)""",
    re.DOTALL | re.VERBOSE,
)


_ITEM = re.compile(r"\\u\{[0-9A-Fa-f]+\}|\\u[0-9A-Fa-f]{4}|\\x[0-9A-Fa-f]{2}|\\c[A-Za-z]|\\.|.", re.DOTALL)
_REWRITTEN = {".": r"[^\n\r]", r"\s": r"[\x09-\x0d ]", r"\S": r"[^\x09-\x0d ]"}
_NOTHING = "x{0}"
"""Matches nothing; put between the parts of an expression because xgrammar 0.2 makes wrong automata for some parts that
begin or end with a repetition, such as (a{2,})?, which would match a single a."""
_NO_AUTOMATON = "é{0}"
"""Matches nothing; the non-ASCII letter keeps xgrammar from making an automaton."""
_MUCH_WORK = 100
"""Maximum total repetitions in a pattern without groups that becomes an automaton; making one of more is slow."""
_MOST_WORK = 2000
"""Maximum total repetitions in a pattern with groups: about two seconds of compilation."""
_MOST_OPTIONAL = 200
"""Maximum optional parts of a pattern beside others: about two seconds of compilation, which grows with the square of
their number."""
LONG_REPETITION = 128
"""xgrammar compiles a repetition with a wider range as one part."""
_Range = tuple[int, int]
_ALL: list[_Range] = [(0, 0x10FFFF)]
_ESCAPED: list[_Range] = [(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0xD800, 0xDFFF)]
"""Characters that JSON strings must escape, and surrogates."""
_CLASSES: dict[str, list[_Range]] = {
    "d": [(0x30, 0x39)],
    "w": [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)],
    "s": [(0x09, 0x0D), (0x20, 0x20)],
}
_CONTROLS = {"n": 0x0A, "r": 0x0D, "t": 0x09, "f": 0x0C, "v": 0x0B, "a": 0x07, "e": 0x1B, "b": 0x08, "0": 0}
_REFUSED = "bBpPk123456789"
"""Escapes that xgrammar refuses itself."""


class Token(NamedTuple):
    """A part of an expression: `kind` is repeat, atom, unclosed (a class), (, ), |, ^, $ or other.

    `times`: maximum count of a repetition; `optional`: how many of them may be left out.
    """

    kind: str
    text: str
    times: int = 1
    optional: int = 0


def expression(pattern: str) -> str:
    """A regular expression in which `.` matches any character but a line break, and `\\s` ASCII white space.

    Raises Unenforced for what xgrammar would ignore: assertions, inner anchors and unknown escapes.
    """
    return joined(checked(pattern))


def joined(tokens: list[Token]) -> str:
    """The expression of tokens of `checked`."""
    return _apart(tokens, [_REWRITTEN.get(token.text) or _delimited(token.text) for token in tokens])


def json_expression(pattern: str) -> str:
    """An expression for JSON strings: it matches only characters that need no escape there.

    Raises Unenforced if a part of it matches no such character.
    """
    tokens = checked(pattern)
    texts = [_json_atom(token.text) if token.kind == "atom" else token.text for token in tokens]
    times = _work(tokens)
    if times > _MUCH_WORK and all(token.kind != "(" for token in tokens):
        return "".join(texts) + _NO_AUTOMATON
    if times > _MOST_WORK:
        raise Unenforced(f"the repetitions in the pattern {pattern[:80]!r} add up to more than {_MOST_WORK}")
    return _apart(tokens, texts)


def automaton_work(pattern: str) -> int:
    """Maximum total repetitions in a `json_expression` if it becomes an automaton, else 0."""
    return 0 if pattern.endswith(_NO_AUTOMATON) else _work(map(_token, _TOKEN.finditer(pattern)))


def refuses(token: Token) -> bool:
    """Whether an atom has an escape that xgrammar refuses itself."""
    return any(item[0] == "\\" and item[1] in _REFUSED for item in _ITEM.findall(token.text))


def optional_parts(pattern: str) -> int:
    """Number of optional parts of an expression beside others."""
    return _optional([_token(found) for found in _TOKEN.finditer(pattern)])


def class_states(pattern: str) -> int:
    """Number of classes of characters in an expression, each counted as often as it may be repeated."""
    groups, last = [0], 0
    for token in map(_token, _TOKEN.finditer(pattern)):
        if token.kind == "(":
            groups.append(0)
            last = 0
        elif token.kind == "repeat":
            times = 1 if token.text[0] in "*+?" else min(token.times, LONG_REPETITION)
            groups[-1] += last * (times - 1)
            last *= times
        else:
            last = groups.pop() if token.kind == ")" and len(groups) > 1 else int(_is_class(token))
            groups[-1] += last
    return sum(groups)


def _is_class(token: Token) -> bool:
    return token.kind == "atom" and (token.text[0] in ".[" or token.text[1:] in {*"dwsDWS"})


def _optional(tokens: list[Token]) -> int:
    found = [token.optional for token in tokens if token.optional <= LONG_REPETITION]
    return sum(found) - max(found, default=0)


def _work(tokens: Iterable[Token]) -> int:
    return sum(token.times for token in tokens if token.kind == "repeat")


def _apart(tokens: list[Token], texts: list[str]) -> str:
    """The texts of tokens, with _NOTHING at the inner edges of groups and alternatives."""
    made = [_NOTHING]
    for token, text in zip(tokens, texts, strict=True):
        made += [_NOTHING] * (token.kind in "|)") + [text] + [_NOTHING] * (token.kind in "|(")
    return "".join([*made, _NOTHING])


def _delimited(text: str) -> str:
    """A token with braces around its character codes; xgrammar would read following digits as part of the code."""
    return "".join(
        f"\\u{{{item[2:]}}}" if len(item) > 3 and item[:2] in (r"\x", r"\u") and item[2] != "{" else item
        for item in _ITEM.findall(text)
    )


def _json_atom(text: str) -> str:
    """A character or class, without characters that JSON escapes."""
    if text.isascii() and text.isalnum():
        return text
    if text[0] == "\\" and text[1] in _REFUSED:
        return text
    left = _without(characters(text), _ESCAPED)
    if not left:
        raise Unenforced(f"the part {text[:40]!r} of a pattern is always escaped in JSON, which is not supported")
    return "[" + "".join(f"\\u{{{first:x}}}-\\u{{{last:x}}}" for first, last in left) + "]"


def characters(text: str) -> list[_Range]:
    """The characters of an atom. Raises Unenforced for invalid ranges and codes."""
    if text == ".":
        return _without(_ALL, [(0x0A, 0x0A), (0x0D, 0x0D)])
    if text[0] != "[":
        return _item(text)
    negated = text.startswith("[^")
    items, found = deque(_ITEM.findall(text[1 + negated : -1])), []
    while items:
        begin = items.popleft()
        first = _item(begin)
        if len(items) > 1 and items[0] == "-" and _is_one(first):
            items.popleft()
            end = items.popleft()
            last = _item(end)
            if not _is_one(last) or last < first:
                raise Unenforced(f"the range {begin}-{end} in a regular expression is not one of characters")
            first = [(first[0][0], last[0][1])]
        found += first
    return _without(_ALL, found) if negated else _without(found, [])


def _is_one(found: list[_Range]) -> bool:
    """Whether this is a single character. After a class such as `\\d`, a `-` is a literal character."""
    return len(found) == 1 and found[0][0] == found[0][1]


def _item(text: str) -> list[_Range]:
    """The characters of a literal character or an escape."""
    if text[0] != "\\":
        return [(ord(text), ord(text))]
    if text[1] in "dwsDWS":
        named = _CLASSES[text[1].lower()]
        return named if text[1].islower() else _without(_ALL, named)
    if text[1] in "ux" and len(text) > 2:
        code = int(text[2:].strip("{}"), 16)
        if code > _ALL[0][1]:
            raise Unenforced(f"{text} in a regular expression is beyond Unicode")
    elif text[1] == "c" and len(text) > 2:
        code = ord(text[2]) % 32
    else:
        code = _CONTROLS.get(text[1], ord(text[1]))
    return [(code, code)]


def _without(ranges: list[_Range], excluded: list[_Range]) -> list[_Range]:
    """Sorted ranges of characters, minus the excluded ones."""
    gaps, left, at = _sorted(excluded), [], 0
    for first, last in _sorted(ranges):
        begin = first
        while at < len(gaps) and gaps[at][1] < first:
            at += 1
        while at < len(gaps) and gaps[at][0] <= last:
            lowest, highest = gaps[at]
            if begin < lowest:
                left.append((begin, lowest - 1))
            begin = highest + 1
            if highest > last:
                break  # it may cut the next range too
            at += 1
        if begin <= last:
            left.append((begin, last))
    return left


def _sorted(ranges: list[_Range]) -> list[_Range]:
    """The same characters as sorted ranges that are apart."""
    merged: list[_Range] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        elif first <= last:
            merged.append((first, last))
    return merged


def checked(pattern: str) -> list[Token]:
    """The parts of an expression without its anchors, because outputs always match as a whole."""
    tokens = [_token(found) for found in _TOKEN.finditer(pattern)]
    depth = 0
    for token in tokens:
        depth += (token.kind == "(") - (token.kind == ")")
        if depth > DEEPEST:
            raise Unenforced(f"a regular expression has more than {DEEPEST} nested brackets")
    for before, token in zip([None, *tokens], tokens, strict=False):
        if token.kind == "unclosed":
            raise Unenforced(f"the part {token.text[:40]!r} of a regular expression has no closing bracket")
        if token.kind == "repeat" and (before is None or before.kind in "(|^"):
            raise Unenforced(f"{token.text} in a regular expression has nothing to repeat")
        for letter in re.findall(r"\\(.)", token.text, re.DOTALL):
            if letter.isascii() and letter.isalnum() and letter not in _ESCAPES:
                raise Unenforced(f"the escape \\{letter} in a regular expression is not supported")
        if token.text in ("(?=", "(?!"):
            raise Unenforced("lookahead in a regular expression is not supported")
        if token.kind == "(" and token.text not in ("(", "(?:"):
            raise Unenforced(f"{token.text} in a regular expression is not supported")
    repeated = _repeated_brackets(tokens)
    _check_anchors(tokens, "^", "(", ")", repeated)
    _check_anchors(tokens[::-1], "$", ")", "(", {len(tokens) - 1 - index for index in repeated})
    if (optional := _optional(tokens)) > _MOST_OPTIONAL:
        raise Unenforced(
            f"a regular expression has {optional} optional parts besides its largest, at most {_MOST_OPTIONAL} are "
            "supported"
        )
    most_repeated((token.kind, token.times) for token in tokens)
    return [token for token in tokens if token.kind not in "^$"]


def _token(found: "re.Match[str]") -> Token:
    text = found[0]
    if found["repeat"]:
        if found["least"] is None:
            return Token("repeat", text, 2, int(text[0] == "?"))
        most = found["most"] or found["least"]
        times = int(most) if len(most) < 10 else 10**9
        bounded = found["open"] is None or bool(found["most"])
        return Token("repeat", text, times, times - int(found["least"][:10]) if bounded else 0)
    if found["open_group"]:
        return Token("(", "(" if text.endswith(">") else text)
    if found["unclosed"] is not None:
        return Token("unclosed", text)
    return Token("atom" if found["atom"] else text, text)


def _check_anchors(tokens: list[Token], anchor: str, begin: str, end: str, repeated: set[int]) -> None:
    """Raises Unenforced for a `^` after, or a `$` before, something else: no output could match it. `tokens`: in order
    from the anchor's side."""
    at_edge, groups = True, [True]
    for index, token in enumerate(tokens):
        if token.kind == anchor:
            if not at_edge:
                raise Unenforced(f"{anchor} inside of a regular expression is not supported")
        elif token.kind == begin:
            groups.append(at_edge and index not in repeated)
            at_edge = groups[-1]
        elif token.kind == "|":
            at_edge = groups[-1]
        else:
            at_edge = False
            if token.kind == end and len(groups) > 1:
                groups.pop()


def _repeated_brackets(tokens: list[Token]) -> set[int]:
    """The indices of the brackets of groups that are repeated."""
    found, opened = set(), []
    for index, token in enumerate(tokens):
        if token.kind == "(":
            opened.append(index)
        elif token.kind == ")":
            brackets = {index, opened.pop()} if opened else {index}
            if index + 1 < len(tokens) and tokens[index + 1].kind == "repeat":
                found |= brackets
    return found
