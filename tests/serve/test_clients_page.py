"""docs/clients.md: every snippet runs against a real server."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.assault.repositories import build
from tests.assault.server import Server, serving
from tests.patience import PATIENCE, eventually

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
_BLOCK = re.compile(r"^```(?P<kind>sh|python)(?P<marks>(?: \w+)*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Snippet:
    """One block of the page. `marks`: what it needs, after the language."""

    name: str
    kind: str
    marks: frozenset[str]
    text: str


def snippets() -> list[Snippet]:
    """The blocks that can be run."""
    found = []
    for block in _BLOCK.finditer(PAGE.read_text()):
        line = PAGE.read_text()[: block.start()].count("\n") + 1
        found.append(Snippet(f"line {line}", block["kind"], frozenset(block["marks"].split()), block["text"]))
    return found


# LangChain and OpenAI's agents come with the extra `clients`; tests/clients has the rest of it.
SNIPPETS = [each for each in snippets() if "clients" not in each.marks or find_spec("langchain_openai") is not None]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(build("demo-fp32", tmp_path_factory.mktemp("clients"))) as running:
        assert eventually(lambda: "try:" in running.errors[:-3])
        yield running


def run(server: Server, snippet: Snippet) -> "subprocess.CompletedProcess[str]":
    openai = server.output[1].removeprefix("openai=http://").removesuffix("/v1")
    addresses = {"127.0.0.1:8000": server.http, "127.0.0.1:8001": server.grpc, "127.0.0.1:8003": openai}
    text = re.sub("|".join(map(re.escape, addresses)), lambda found: addresses[found[0]], snippet.text)
    command = [sys.executable, "-c", text] if snippet.kind == "python" else ["sh", "-e", "-c", text]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE, env=environment)


def test_the_page_has_a_snippet_for_each_client() -> None:
    text = "".join(each.text for each in snippets())
    words = ["curl", "generate_stream", "OpenAI(", "AsyncOpenAI(", "responses.create(", "Runner.run", "ChatOpenAI("]
    for word in [*words, "async_stream_infer", ".infer("]:
        assert word in text


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda snippet: snippet.name)
def test_it_runs_and_prints_an_answer(server: Server, snippet: Snippet) -> None:
    done = run(server, snippet)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) > 10
    assert '"error"' not in done.stdout


@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_commands_that_serve_prints_can_be_pasted(server: Server, number: int) -> None:
    at = server.errors.index("try:") + 1 + number
    done = run(server, Snippet("printed", "sh", frozenset(), server.errors[at]))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
