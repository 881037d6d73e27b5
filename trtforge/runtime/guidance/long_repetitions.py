"""Grammars of expressions with long repetitions of characters, such as .{1,500}.

xgrammar compiles an expression to an automaton with bounded steps and prepares its masks, except where something is
repeated more than 128 times: then each mask takes 10 to 50 ms with a vocabulary of 128,000. For characters repeated by
a grammar, outside automata, it prepares 128 masks and most of the work for further ones.
"""

import json

from trtforge.runtime.guidance.patterns import LONG_REPETITION, Token, characters, checked, joined, refuses

_MOST = 2
"""Maximum number of long repetitions for which masks are prepared, in two to five seconds each."""


def expression_grammar(pattern: str) -> str:
    """The grammar of an expression (`patterns.expression`). Raises Unenforced."""
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
    """Whether long repetitions make the expression's grammar take seconds to compile. Raises Unenforced."""
    return bool(_long(checked(pattern)))


def _long(tokens: list[Token]) -> list[int]:
    """Indices of repetitions that become parts of the grammar: of characters, outside groups and alternatives.

    Excluded are those repeated again (`a{200}*`) and those that xgrammar refuses, so that it reports the error itself.
    """
    found: list[int] = []
    depth = 0
    for index, token in enumerate(tokens):
        depth += (token.kind == "(") - (token.kind == ")")
        if depth == 0 and token.kind == "|":
            return []
        again = index + 1 < len(tokens) and tokens[index + 1].kind == "repeat"
        possible = token.times > LONG_REPETITION and token.optional >= 0  # it is negative for {200,100}
        if depth == 0 and index > 0 and possible and not again and _is_known(tokens[index - 1]):
            found.append(index)
    return found[:_MOST]


def _is_known(token: Token) -> bool:
    return token.kind == "atom" and not refuses(token) and bool(characters(token.text))


def _automaton(tokens: list[Token]) -> str:
    return f"Regex({json.dumps(joined(tokens), ensure_ascii=False)})"


def _class(atom: Token) -> str:
    """The characters of an atom in grammar syntax."""
    ranges = (f"\\U{first:08x}-\\U{last:08x}" for first, last in characters(atom.text))
    return f"[{''.join(ranges)}]"
