"""Grammars that are compiled in a process of their own, which ends when one takes too long."""

import json
import threading
from collections.abc import Iterator

import pytest

from tests.conftest import DEMO_MODEL
from tests.patience import PATIENCE, eventually
from trtforge.core.errors import RequestError
from trtforge.engine_process.requests import Guide, GuideKind
from trtforge.runtime.guidance import compiler_process
from trtforge.runtime.guidance.grammars import Grammars, may_take_long, value_of
from trtforge.runtime.guidance.patterns import class_states

SIZE = 2048
WORDS = 'root ::= "yes" | "no" word\nword ::= " " [a-z] [a-z]'


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    made = Grammars(DEMO_MODEL, SIZE)
    yield made
    made.close()


def endless(rules: int) -> str:
    """Rules of which each may be left out: compiling takes time with the square of their number."""
    first = "root ::= r0\n"
    return first + "".join(f'r{i} ::= ([a-z] | "") r{i + 1}\n' for i in range(rules)) + f'r{rules} ::= "x"\n'


def masks(grammar: object, text: str) -> list[list[int]]:
    """What a grammar allows before each byte of a text."""
    import xgrammar

    matcher = xgrammar.GrammarMatcher(grammar, override_stop_tokens=[1])
    found = []
    for character in text:
        mask = xgrammar.allocate_token_bitmask(1, SIZE)
        matcher.fill_next_token_bitmask(mask)
        found.append(mask[0].tolist())
        assert matcher.accept_string(character)
    return found


def test_a_grammar_from_the_process_is_the_one_that_is_compiled_here(grammars: Grammars) -> None:
    here = grammars._compiler.compile("ebnf_grammar", WORDS)
    apart = grammars.compiled(Guide("ebnf_grammar", WORDS))
    assert masks(apart, "no ab") == masks(here, "no ab")
    tag = {"type": "structural_tag", "format": {"type": "grammar", "grammar": WORDS}}
    tagged = grammars.compiled(Guide("structural_tag", json.dumps(tag)))
    assert masks(tagged, "no ab") == masks(here, "no ab")
    schema = {"type": "string", "pattern": "^" + "[a-c]?" * 40 + "$"}
    made = grammars.compiled(Guide("json_schema", json.dumps(schema)))
    assert masks(made, '"abca"') == masks(grammars._compiler.compile("json_schema", json.dumps(schema)), '"abca"')
    with pytest.raises(RequestError) as caught:
        grammars.compiled(Guide("ebnf_grammar", "root ::= nobody"))
    assert caught.value.message.startswith("the guide of type ebnf_grammar is refused: ")
    assert 'Rule "nobody" is not defined' in caught.value.message
    assert grammars._apart is not None


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("ebnf_grammar", WORDS, True),
        ("structural_tag", '{"format": {"\\u0074ype": "gramm\\u0061r", "grammar": "root ::= [a]"}}', True),
        ("structural_tag", '{"format": {"type": "regex", "pattern": "a?b"}}', False),
        ("regex", "[a-z]?" * 32, True),
        ("regex", "[a-z]?" * 31, False),
        ("json_schema", '{"pattern": "%s"}' % ("[a-z]\\u003f" * 32), True),
        ("json_schema", '{"description": "%s"}' % ("Is it? " * 32), False),
        ("json_schema", '{"items": {"format": "ipv6"}, "properties": {"a?": {"format": "date-time"}}}', False),
        ("json", "", False),
    ],
)
def test_what_may_take_long_is_compiled_apart(kind: GuideKind, text: str, expected: bool) -> None:
    assert may_take_long(kind, value_of(Guide(kind, text)), SIZE) == expected


@pytest.mark.parametrize(
    ("pattern", "states"),
    [
        ("a.[b-d]\\w\\.", 3),
        (".{64}", 64),
        ("(.{1,40} ){1,20}", 800),
        (".*.+.?", 3),
        ("(a[b]{2}(.){3}){4}|.", 21),
        (".{500}", 128),
    ],
)
def test_classes_of_characters_count_as_often_as_they_are_repeated(pattern: str, states: int) -> None:
    assert class_states(pattern) == states


def test_expressions_with_many_classes_are_compiled_apart() -> None:
    """Each class of characters is compared with the whole vocabulary."""
    schema = {"properties": {"a": {"pattern": ".{60}"}, "b": {"patternProperties": {".{40}": {}}}}}
    for kind, value in (("regex", "(.[a-z]){50}"), ("json_schema", schema), ("structural_tag", schema)):
        assert not may_take_long(kind, value, 100_000)
        assert may_take_long(kind, value, 100_001)
    assert not may_take_long("regex", "abcd" * 500, 100)
    assert may_take_long("regex", "abcd" * 501, 100)


def test_a_grammar_that_takes_too_much_memory_ends_alone(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_process, "MOST_MEMORY", 512 << 20)
    large = "root ::= " + " ".join(f"[a-z{index}]{{0,900}}" for index in range(2000))
    with pytest.raises(RequestError) as caught:
        grammars.compiled(Guide("ebnf_grammar", large))
    assert (caught.value.message, caught.value.hint) == (
        "the guide takes more than 0.5 GiB of memory to compile",
        "Ask for a simpler one, with fewer parts that may be repeated or left out.",
    )
    assert grammars.compiled(Guide("ebnf_grammar", WORDS)) is not None


def test_grammars_from_the_process_count_as_large_as_they_are(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """xgrammar counts 1.3 MB of a grammar that takes 12."""
    rules = [f'r{index} ::= [a-z]{{0,1000}} "x"' for index in range(300)]
    guide = Guide("ebnf_grammar", "\n".join([f"root ::= {' '.join(f'r{index}' for index in range(300))}", *rules]))
    made = grammars.compiled(guide)
    assert made.memory_size_bytes < 2_000_000
    assert grammars._kept_bytes == len(made.serialize_json()) > 10_000_000
    monkeypatch.setattr(compiler_process, "MOST_GRAMMAR", 1 << 20)
    with pytest.raises(RequestError, match="the guide's grammar takes more than 1 MiB"):
        grammars.compiled(Guide("ebnf_grammar", guide.text + " "))


def test_one_that_takes_too_long_ends_alone(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_process, "MOST_SECONDS", 1)
    with pytest.raises(RequestError) as caught:
        grammars.compiled(Guide("ebnf_grammar", endless(300)))
    assert (caught.value.message, caught.value.hint) == (
        "the guide takes longer than 1 s to compile",
        "Ask for a simpler one, with fewer parts that may be repeated or left out.",
    )
    assert grammars.compiled(Guide("ebnf_grammar", WORDS)) is not None


def test_closing_ends_a_compilation(grammars: Grammars) -> None:
    errors: list[Exception] = []

    def compile_one() -> None:
        try:
            grammars.compiled(Guide("ebnf_grammar", endless(900)))
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=compile_one)
    thread.start()
    assert eventually(lambda: errors != [] or (grammars._apart is not None and grammars._apart._process is not None))
    grammars.close()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert "the process that compiles grammars ended with status -9" in str(errors[0])
    with pytest.raises(RequestError, match="the engine is closed"):
        grammars.compiled(Guide("ebnf_grammar", WORDS))
