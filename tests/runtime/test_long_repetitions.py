"""Expressions whose characters are repeated often, against Python's own."""

import re

import pytest
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st

from trtforge.runtime.guidance.long_repetitions import expression_grammar, has_long_repetitions
from trtforge.runtime.guidance.unenforced import Unenforced

END = 256
VOCABULARY = xgrammar.TokenizerInfo(
    [*(bytes([byte]) for byte in range(256)), b"</s>"], xgrammar.VocabType.RAW, vocab_size=257, stop_token_ids=[]
)


def compiled(grammar: str) -> xgrammar.CompiledGrammar:
    compiler = xgrammar.GrammarCompiler(VOCABULARY, max_threads=1, cache_enabled=False)
    return compiler.compile_grammar(grammar)


def matches(grammar: xgrammar.CompiledGrammar, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(grammar, override_stop_tokens=[END])
    return (not text or matcher.accept_string(text)) and matcher.is_completed()


@settings(max_examples=40, deadline=None)
@given(
    before=st.sampled_from(["", "foo: ", "(x|yy)?"]),
    atom=st.sampled_from(["[a-c]", ".", r"\d", r"[^a\]\-]", "é", r"\u{1F600}", r"[\s-]", "b"]),
    least=st.integers(0, 700),
    more=st.none() | st.integers(0, 700),
    lazy=st.sampled_from(["", "?"]),
    after=st.sampled_from(["", r"\.", "[xyz]+"]),
    data=st.data(),
)
def test_as_often_as_python_does(
    before: str, atom: str, least: int, more: int | None, lazy: str, after: str, data: st.DataObject
) -> None:
    pattern = f"{before}{atom}{{{least},{'' if more is None else least + more}}}{lazy}{after}"
    known = re.compile(pattern.replace(r"\u{1F600}", "\U0001f600"))
    grammar = compiled(expression_grammar(pattern))
    ends = [least, least + (more or 0)]
    for count in {0, 1, 127, 128, 129, *(end + step for end in ends for step in (-1, 0, 1) if end + step >= 0)}:
        one = data.draw(st.sampled_from("abc5é\U0001f600 \n-]b"))
        for start, end in (("", ""), ("foo: ", "."), ("yy", "xz")):
            text = start + one * count + end
            assert matches(grammar, text) == (known.fullmatch(text) is not None), (pattern, text[:9], count)


@pytest.mark.parametrize(
    ("pattern", "grammar"),
    [
        (".{1,500}", r"[\U00000000-\U00000009\U0000000b-\U0000000c\U0000000e-\U0010ffff]{1,500}"),
        ("a[b-c]{100,300}?x", r'Regex("x{0}ax{0}") [\U00000062-\U00000063]{100,300} Regex("x{0}xx{0}")'),
        ("[a-z]{200,}", r"[\U00000061-\U0000007a]{200,}"),
        ("a{150}", r"[\U00000061-\U00000061]{150}"),
        ("[a-z]{0,128}", r'Regex("x{0}[a-z]{0,128}x{0}")'),
        ("(ab){300}", r'Regex("x{0}(x{0}abx{0}){300}x{0}")'),
        ("a|b{300}", r'Regex("x{0}ax{0}|x{0}b{300}x{0}")'),
        ("(a.{300})", r'Regex("x{0}(x{0}a[^\\n\\r]{300}x{0})x{0}")'),
        ("a{200}*", 'Regex("x{0}a{200}*x{0}")'),
        ("a{200}{3}b", 'Regex("x{0}a{200}{3}bx{0}")'),
        ("[]{200}", 'Regex("x{0}[]{200}x{0}")'),
        ("a{200,100}b", 'Regex("x{0}a{200,100}bx{0}")'),
        ("a{150}b{150}c{150}", r'[\U00000061-\U00000061]{150} [\U00000062-\U00000062]{150} Regex("x{0}c{150}x{0}")'),
    ],
)
def test_characters_that_are_repeated_often_are_parts_of_the_grammar(pattern: str, grammar: str) -> None:
    assert expression_grammar(pattern) == f"root ::= {grammar}"
    assert has_long_repetitions(pattern) == (r"\U" in grammar)


@pytest.mark.parametrize("atom", [r"[\d-z]", r"[\w-a]", r"[\d-a-z]", r"[+--]", r"[a-c-e]", r"[\d-\w]"])
def test_classes_hold_what_xgrammar_says(atom: str) -> None:
    """A - after an escape of several characters is one itself."""
    short, long = (compiled(expression_grammar(f"{atom}{{{times}}}")) for times in (20, 200))
    for one in "-5azAbd`+,.":
        assert matches(long, one * 200) == matches(short, one * 20), one


@pytest.mark.parametrize("atom", [r"[5-\d]", r"[a-\w]", "[z-a]", r"\u{110000}", "[]", r"\p{L}"])
def test_what_xgrammar_refuses_is_refused_repeated_often_too(atom: str) -> None:
    with pytest.raises(RuntimeError):
        compiled(expression_grammar(f"{atom}{{20}}"))
    with pytest.raises((RuntimeError, Unenforced)):
        compiled(expression_grammar(f"{atom}{{200}}"))


def test_masks_of_long_repetitions_are_prepared() -> None:
    """Those of an automaton are not: it takes no memory for them."""
    prepared = compiled(expression_grammar("[a-z]{1,500}")).memory_size_bytes
    assert prepared > 10 * compiled('root ::= Regex("[a-z]{1,500}")').memory_size_bytes
