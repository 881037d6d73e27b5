"""Grammars of expressions in which characters are repeated often, such as .{1,500}.

xgrammar compiles an expression to an automaton, whose steps are bounded, and prepares its masks; but none where
something is repeated more than 128 times: each mask takes 10 to 50 ms then, with a vocabulary of 128,000. Of characters
that a grammar repeats, outside of automata, it prepares 128 masks, and most of what the further ones need.
"""

import json

from trtforge.runtime.guidance.patterns import LONG_REPETITION, Token, characters, checked, joined, refuses

_MOST = 2
"""Repetitions of which masks are prepared, in two to five seconds each."""


def expression_grammar(pattern: str) -> str:
    """The grammar of an expression (`patterns.expression`). Raises Unenforced, as that does."""
    tokens = checked(pattern)
    parts, begin = [], 0
    for index in _long(tokens):
        if begin < index - 1:
            parts.append(_automaton(tokens[begin : index - 1]))
        parts.append(_class(tokens[index - 1]) + tokens[index].text.rstrip("?"))
        begin = index + 1
    if begin < len(tokens) or not parts:
        parts.append(_automaton(tokens[begin:]))
    return f"root ::= {' '.join(parts)}"


def has_long_repetitions(pattern: str) -> bool:
    """Whether the grammar of an expression takes seconds to compile for these. Raises Unenforced."""
    return bool(_long(checked(pattern)))


def _long(tokens: list[Token]) -> list[int]:
    """Indices of repetitions that become parts of the grammar: of characters, outside of groups and alternatives.

    Not those that are repeated again (`a{200}*`), and none that xgrammar refuses, so that its error is about this one.
    """
    found: list[int] = []
    depth = 0
    for index, token in enumerate(tokens):
        depth += (token.kind == "(") - (token.kind == ")")
        if depth == 0 and token.kind == "|":
            return []
        again = index + 1 < len(tokens) and tokens[index + 1].kind == "repeat"
        possible = token.times > LONG_REPETITION and token.optional >= 0  # of {200,100} it is negative
        if depth == 0 and index > 0 and possible and not again and _is_known(tokens[index - 1]):
            found.append(index)
    return found[:_MOST]


def _is_known(token: Token) -> bool:
    return token.kind == "atom" and not refuses(token) and bool(characters(token.text))


def _automaton(tokens: list[Token]) -> str:
    return f"Regex({json.dumps(joined(tokens), ensure_ascii=False)})"


def _class(atom: Token) -> str:
    """The characters of an atom, as grammars spell them."""
    ranges = (f"\\U{first:08x}-\\U{last:08x}" for first, last in characters(atom.text))
    return f"[{''.join(ranges)}]"
