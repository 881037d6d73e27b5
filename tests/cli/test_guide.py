"""--json-schema, --regex and --grammar: what they send, and what is wrong with them."""

from pathlib import Path

import pytest

from trtforge.cli.guide import guide_of
from trtforge.core.errors import ForgeError, UsageError
from trtforge.engine_process.requests import Guide
from trtforge.serve.request import Sampling


def test_each_option_is_a_guide_of_its_type(tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "list.gbnf"
    schema.write_text('{"type": "object"}')
    grammar.write_text('root ::= "- " [a-z]+\n')
    assert guide_of(None, None, None) is None
    assert guide_of(schema, None, None) == Guide("json_schema", '{"type": "object"}')
    assert guide_of(None, "yes|no", None) == Guide("regex", "yes|no")
    assert guide_of(None, None, grammar) == Guide("ebnf_grammar", 'root ::= "- " [a-z]+\n')


def test_a_guide_is_sent_as_the_tensors_of_tensorrt_llm() -> None:
    inputs = Sampling(guide=Guide("regex", "yes|no")).inputs("a", stream=False)
    assert inputs["guided_decoding_guide_type"] == "regex"
    assert inputs["guided_decoding_guide"] == "yes|no"
    assert not {name for name in Sampling().inputs("a", stream=False) if "guide" in name}


def test_two_of_them_are_a_wrong_command(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--json-schema with --regex: an answer follows one of them"):
        guide_of(tmp_path / "schema.json", "yes|no", None)


def test_a_file_that_is_wrong_is_named_with_its_line(tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    for given in (schema, Path('{"type": "object"}')):
        with pytest.raises(ForgeError, match=r"schema\.json|type") as caught:
            guide_of(given, None, None)
        assert caught.value.hint == "The option takes the name of a file that holds it."
    schema.write_text('{"type":\n object}')
    with pytest.raises(ForgeError, match=r"schema\.json: not JSON: .*line 2"):
        guide_of(schema, None, None)
