"""Regular expressions for xgrammar: what it would ignore is refused, what it would read otherwise is rewritten."""

import re
from typing import NamedTuple

from trtforge.runtime.guidance.repetitions import most_repeated
from trtforge.runtime.guidance.unenforced import Unenforced

MOST_REPETITIONS = 2000
"""Times that parts of patterns in JSON are repeated, all together: about two seconds of compilation."""
_ESCAPES = frozenset("dDwWsSnrtfvae0xucbBpPk123456789")
"""Letters and digits that xgrammar takes as escapes, or refuses itself; others it would match literally."""
DEEPEST = 200
"""Brackets within one another, in an expression or a grammar."""
_TOKEN = re.compile(
    r"""(?P<repeat>(?:[*+?]|\{(?P<least>\d+)(?P<open>,(?P<most>\d*))?\})\??)
    |(?P<atom>\\u\{[0-9A-Fa-f]*\}|\\.|\[\^?(?:\\.|[^\]\\])*\]|[^()|^$\\[*+?])
    |(?P<open_group>\((?:\?(?:P?<\w+>|[^<P)]))?)
    |(?P<other>.)""",
    re.DOTALL | re.VERBOSE,
)


class _Token(NamedTuple):
    """A part of an expression: `kind` is repeat, atom, (, ), |, ^, $ or other. `times`: of a repetition, at most."""

    kind: str
    text: str
    times: int = 1


def expression(pattern: str) -> str:
    """A regular expression whose point is any character but a line break, as in Python.

    Raises Unenforced for what xgrammar would ignore: assertions, anchors inside, escapes that it does not know.
    """
    return "".join("[^\\n\\r]" if token.text == "." else token.text for token in _checked(pattern))


def json_expression(pattern: str) -> str:
    """An expression of strings in JSON, written in ASCII.

    xgrammar keeps quotation marks, backslashes and control characters out of these strings if it compiles the pattern
    to an automaton, which it does only for ASCII. Raises Unenforced if it does not.
    """
    made = "".join(_ascii(token.text) for token in _checked(pattern))
    if work(made) > MOST_REPETITIONS:
        raise Unenforced(
            f"the pattern {pattern[:80]!r} may repeat its parts more than {MOST_REPETITIONS} times together"
        )
    if not _is_automaton(made):
        raise Unenforced(f"the pattern {pattern[:80]!r} cannot be kept free of quotation marks and backslashes")
    return made


def work(pattern: str) -> int:
    """How often the parts of a pattern are repeated at most, all together."""
    return sum(token.times for token in map(_token, _TOKEN.finditer(pattern)) if token.kind == "repeat")


def _ascii(text: str) -> str:
    """A token with escapes for what is not ASCII."""
    if text.isascii() and text.isprintable():
        return text
    unescaped = text[1:] if text[0] == "\\" and not text[1].isascii() else text
    return "".join(each if each.isascii() and each.isprintable() else f"\\u{{{ord(each):x}}}" for each in unescaped)


def _is_automaton(pattern: str) -> bool:
    import json

    import xgrammar

    schema = json.dumps({"type": "string", "pattern": pattern})
    return "Regex(" in str(xgrammar.Grammar.from_json_schema(schema, any_whitespace=False))


def _checked(pattern: str) -> list[_Token]:
    """The parts of an expression but for its anchors: outputs match as a whole."""
    tokens = [_token(found) for found in _TOKEN.finditer(pattern)]
    for token in tokens:
        for letter in re.findall(r"\\(.)", token.text, re.DOTALL):
            if letter.isascii() and letter.isalnum() and letter not in _ESCAPES:
                raise Unenforced(f"the escape \\{letter} in a regular expression is not supported")
        if token.kind == "(" and token.text[:3] in ("(?=", "(?!"):
            raise Unenforced("lookahead in a regular expression is not supported")
    _check_anchors(tokens, "^", "(", ")")
    _check_anchors(tokens[::-1], "$", ")", "(")
    depth = 0
    for token in tokens:
        depth += (token.kind == "(") - (token.kind == ")")
        if depth > DEEPEST:
            raise Unenforced(f"a regular expression has more than {DEEPEST} brackets within one another")
    most_repeated((token.kind, token.times) for token in tokens)
    return [token for token in tokens if token.kind not in "^$"]


def _token(found: "re.Match[str]") -> _Token:
    text = found[0]
    if found["repeat"]:
        if found["least"] is None:
            return _Token("repeat", text, 2)
        most = found["most"] or found["least"]
        return _Token("repeat", text, int(most) if len(most) < 10 else 10**9)
    if found["open_group"]:
        return _Token("(", text)
    return _Token("atom" if found["atom"] else text, text)


def _check_anchors(tokens: list[_Token], anchor: str, begin: str, end: str) -> None:
    """Raises Unenforced for an anchor after (of `$`: before) something, which no output could follow. `tokens` from the
    side that the anchor belongs to."""
    at_edge, groups = True, [True]
    for index, token in enumerate(tokens):
        if token.kind == anchor:
            if not at_edge:
                raise Unenforced(f"{anchor} inside of a regular expression is not supported")
        elif token.kind == begin:
            groups.append(at_edge and not _repeated(tokens, index, begin))
            at_edge = groups[-1]
        elif token.kind == "|":
            at_edge = groups[-1]
        else:
            at_edge = False
            if token.kind == end and len(groups) > 1:
                groups.pop()


def _repeated(tokens: list[_Token], index: int, begin: str) -> bool:
    """Whether the group that begins here is repeated."""
    if begin == ")":
        return index > 0 and tokens[index - 1].kind == "repeat"
    depth = 0
    for after in range(index, len(tokens)):
        depth += (tokens[after].kind == "(") - (tokens[after].kind == ")")
        if depth == 0:
            return after + 1 < len(tokens) and tokens[after + 1].kind == "repeat"
    return False
