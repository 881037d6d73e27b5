"""`trtforge chat`: messages, commands, errors and interruptions, against a real server and in a real terminal."""

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE
from tests.serve.conftest import Running, Start, fake_repository, server, shared, slow, start
from trtforge.cli.chat import Repl
from trtforge.core.errors import ForgeError
from trtforge.core.reasoning import ReasoningParser
from trtforge.engine_process.requests import Guide
from trtforge.serve.conversation import Conversation
from trtforge.serve.request import Generated, Piece, Sampling

__all__ = ["fake_repository", "server", "shared", "slow", "start"]  # fixtures

USER = {"role": "user", "content": "one two"}


def conversation(server: Running, **values: Any) -> Conversation:
    return Conversation(server.grpc, "ensemble", Sampling(max_tokens=5), **values)


def chat(url: str, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    """The program with `text` on its standard input."""
    command = [sys.executable, "-m", "trtforge", "chat", "--url", url, "--max-tokens", "5", *options]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=PATIENCE)


def test_answers_become_part_of_the_conversation(server: Running, tmp_path: Path) -> None:
    talk = conversation(server, system="Be brief.")
    pieces: list[str] = []
    first = talk.answer("one two", pieces.append)
    assert first.text == "".join(pieces)
    assert first.input_tokens is not None
    assert talk.messages == [USER, {"role": "assistant", "content": first.text}]
    second = talk.answer("three", pieces.append)
    assert second.input_tokens is not None
    assert second.input_tokens > first.input_tokens  # the history is sent
    talk.save(tmp_path / "chat.json")
    saved = json.loads((tmp_path / "chat.json").read_text())["messages"]
    assert [message["role"] for message in saved] == ["system", *["user", "assistant"] * 2]
    with pytest.raises(ForgeError, match=r"chat\.json: File exists") as caught:
        talk.save(tmp_path / "chat.json")
    assert caught.value.hint == "Choose a file that does not exist yet."
    other = conversation(server)
    other.load(tmp_path / "chat.json")
    assert (other.system, other.messages) == ("Be brief.", talk.messages)
    talk.reset()
    assert (talk.system, talk.messages) == ("Be brief.", [])


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{}",
        '{"messages": [{"role": "user", "content": "x", "reasoning_content": 1}]}',
        '{"messages": [{"role": "robot", "content": "x"}]}',
        "{",
    ],
)
def test_a_file_that_is_no_chat_is_refused(server: Running, tmp_path: Path, text: str) -> None:
    (tmp_path / "chat.json").write_text(text)
    talk = conversation(server)
    with pytest.raises(ForgeError) as caught:
        talk.load(tmp_path / "chat.json")
    assert caught.value.hint == "Give a file that /save wrote."


def test_a_failed_answer_is_forgotten(server: Running) -> None:
    talk = conversation(server)
    with pytest.raises(ForgeError, match="the prompt has"):
        talk.answer("one " * 300, lambda _: None)
    assert talk.messages == []


def test_a_directory_that_a_chat_cannot_be_saved_in_is_said(tmp_path: Path) -> None:
    talk = Conversation("127.0.0.1:9", "ensemble", Sampling())
    with pytest.raises(ForgeError, match=f"there is no directory {tmp_path / 'missing'}$") as caught:
        talk.save(tmp_path / "missing" / "chat.json")
    assert caught.value.hint == "Create it, or choose another directory."
    (tmp_path / "file").write_text("")
    with pytest.raises(ForgeError, match="Not a directory") as caught:
        talk.save(tmp_path / "file" / "chat.json")
    assert caught.value.hint == "Choose a directory that you may write to."


class Script:
    """A conversation that answers by itself."""

    complete = False

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.system: str | None = None
        self.sampling = Sampling(max_tokens=5)

    def answer(self, text: str, on_text: Any, on_reasoning: Any) -> Generated:
        """The text itself; Ctrl-C for `stop`; reasoning before it for a question."""
        if text.endswith("?"):
            on_reasoning("why ")
            on_reasoning(text)
        if text == "why?":
            return Generated("", 3, 5, 0.5, 0.1, "stop")
        if text == "stop":
            on_text("[st")
            raise KeyboardInterrupt
        if text == "fail":
            raise ForgeError("no server answers", hint="Start one.")
        self.messages.append(text)
        on_text(f"[{text}]")
        return Generated(text, 3, 5, 0.5, 0.1, "stop")

    def reset(self) -> None:
        self.messages = []


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str | bytes) -> Script:
    """A chat on a terminal in which these lines are typed; bytes where the locale has UTF-8."""
    script, left = Script(), list(lines)

    def read(prompt: str) -> str:
        if not left:
            raise EOFError
        line = left.pop(0)
        return line if isinstance(line, str) else line.decode()

    monkeypatch.setattr("builtins.input", read)
    Repl(script, terminal=True).run()  # type: ignore[arg-type]
    assert left == []
    return script


def test_lines_commands_and_mistakes_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = typed(
        monkeypatch,
        "",
        "one",
        "two \\",
        "lines",
        "stop",
        "/stats",
        "fail",
        "/what",
        "/save",
        "four",
        "/stats",
        "/system Be brief.",
        "three",
    )
    assert (script.messages, script.system) == (["three"], "Be brief.")
    printed = capsys.readouterr()
    assert printed.out.splitlines() == ["[one]", "[two ", "lines]", "[st", "", "[four]", "[three]"]
    assert "(interrupted; the message and its answer are forgotten)" in printed.err
    assert "error: no server answers\nhint: Start one.\n" in printed.err
    assert "error: /what is not a command\nhint: /help lists the commands.\n" in printed.err
    assert "error: /save without a file" in printed.err
    assert re.search(r"^interrupted after 0\.\d\d s and 3 characters$", printed.err, re.MULTILINE)
    assert "3 tokens in, 5 out in 0.50 s, first text after 100 ms, 10 tokens/s" in printed.err


def test_a_terminal_whose_locale_has_only_ascii_takes_utf8_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ascii_locale = [
        data.decode("ascii", "surrogateescape") for data in ("é".encode(), b"caf\xe9", b"/save \xff", b"on")
    ]
    assert typed(monkeypatch, *ascii_locale).messages == ["é", "on"]
    told = "error: standard input is not UTF-8 text\nhint: Give a prompt as UTF-8 text.\n"
    assert capsys.readouterr().err == told * 2 + "\n"


def test_a_terminal_of_utf8_says_which_line_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed(monkeypatch, "é".encode(), b"caf\xe9", "on").messages == ["é", "on"]
    told = "error: standard input is not UTF-8 text\nhint: Give a prompt as UTF-8 text.\n"
    assert capsys.readouterr().err == told + "\n"


def piped(monkeypatch: pytest.MonkeyPatch, data: bytes) -> Script:
    """A chat whose standard input is a pipe."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
    script = Script()
    Repl(script, terminal=False).run()  # type: ignore[arg-type]
    return script


def test_reasoning_is_dimmed_on_a_terminal_and_left_out_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(monkeypatch, "how?", "why?", "one")
    assert capsys.readouterr().out == "\x1b[2mwhy how?\x1b[22m\n\n[how?]\n\x1b[2mwhy why?\x1b[22m\n[one]\n"
    piped(monkeypatch, b"how?\nwhy?\none\n")
    assert capsys.readouterr().out == "[how?]\n\n[one]\n"


class Ended:
    """A server of the chat's own that ends when `fail` has failed."""

    def error_behind(self, error: ForgeError) -> ForgeError | None:
        assert error.message == "no server answers"
        return ForgeError("the server was killed", hint="Give it more memory.")


@pytest.mark.parametrize("terminal", [True, False])
def test_a_chat_ends_with_its_own_server(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    script, lines = Script(), iter(["one", "fail", "two"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"one\nfail\ntwo\n")))
    with pytest.raises(ForgeError, match="the server was killed") as caught:
        Repl(script, terminal=terminal, server=Ended()).run()  # type: ignore[arg-type]
    assert (caught.value.hint, script.messages) == ("Give it more memory.", ["one"])


@pytest.mark.parametrize(
    ("parser", "thought", "pieces"),
    [
        ("qwen3", None, ["<th", "ink>\nI add", ".</thi", "nk>\n\nFo", "ur."]),
        ("deepseek-r1", "", ["<think>I add.</think>", "Four."]),
        ("deepseek-r1", None, ["I add.</think>", "Four."]),
        ("qwen3", "<think>", ["I add", ".</thi", "nk>\n\nFour."]),
        (
            None,
            "<think>",
            [
                "<|channel|>analysis<|mess",
                "age|>I add.<|end",
                "|><|start|>assistant<|channel|>final<|message|>Fo",
                "ur.",
            ],
        ),
    ],
)
def test_reasoning_is_told_from_the_answer_and_kept_for_the_template(
    parser: ReasoningParser | None,
    thought: str | None,
    pieces: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    prompts: list[Any] = []

    def generate(
        url: str, model: str, prompt: Any, sampling: Sampling, *, stream: bool, on_text: Any, on_first: Any
    ) -> Generated:
        prompts.append(prompt.messages)
        assert sampling.prompt_thought == (parser is not None and sampling.guide is None)
        on_first(Piece("", 3, 0, prompt_thought=thought if sampling.prompt_thought else None))
        for piece in pieces:
            on_text(piece)
        return Generated("".join(pieces), 3, 5, 0.5, 0.1, "stop")

    monkeypatch.setattr("trtforge.serve.conversation.generate", generate)
    talk = Conversation("127.0.0.1:9", "ensemble", Sampling(), parser=parser)
    texts, thoughts = list[str](), list[str]()
    assert talk.answer("2 + 2?", texts.append, thoughts.append).text == "".join(texts) == "Four."
    assert "".join(thoughts) == "I add."
    told = {"role": "assistant", "content": "Four.", "reasoning_content": "I add."}
    assert talk.messages == [{"role": "user", "content": "2 + 2?"}, told]
    talk.answer("Again", texts.append)
    assert prompts[1] == [{"role": "user", "content": "2 + 2?"}, told, {"role": "user", "content": "Again"}]
    talk.save(tmp_path / "chat.json")
    other = Conversation("127.0.0.1:9", "ensemble", Sampling(guide=Guide("regex", "a")), parser=parser)
    other.load(tmp_path / "chat.json")
    assert other.messages == talk.messages
    assert other.answer("Again", texts.append).text == "".join(pieces), "a guided answer has none"


@pytest.mark.parametrize(
    ("sampling", "seeds", "drawn"),
    [
        (Sampling(top_p=0.9), True, True),
        (Sampling(top_k=40), True, True),
        (Sampling(top_p=0.9), False, False),  # the model has no such input
        (Sampling(), True, False),
        (Sampling(temperature=0.8), True, False),  # greedy, as in TensorRT-LLM
    ],
)
def test_drawn_answers_to_equal_messages_have_seeds_of_their_own(
    sampling: Sampling, seeds: bool, drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int | None] = []

    def generate(url: str, model: str, prompt: Any, sampling: Sampling, **_: Any) -> Generated:
        asked.append(sampling.seed)
        return Generated("", 3, 5, 0.5, 0.1, "stop")

    monkeypatch.setattr("trtforge.serve.conversation.generate", generate)
    for complete in (False, True):
        talk = Conversation("127.0.0.1:9", "ensemble", sampling, complete=complete, seeds=seeds)
        for _ in range(4):
            talk.answer("Again", lambda _: None)
        Conversation("127.0.0.1:9", "ensemble", replace(sampling, seed=7), seeds=seeds).answer("", lambda _: None)
    own = asked[:4] + asked[5:9]
    assert asked[4] == asked[9] == 7
    assert len(set(own)) > 6 if drawn else own == [None] * 8


def test_an_answer_that_is_cut_while_it_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    def generate(url: str, model: str, prompt: Any, sampling: Sampling, **given: Any) -> Generated:
        given["on_first"](Piece("I add", 3, 2, prompt_thought="<think>"))
        given["on_text"]("I add")
        return Generated("I add", 3, 2, 0.5, 0.1, "length")

    monkeypatch.setattr("trtforge.serve.conversation.generate", generate)
    thoughts, texts = list[str](), list[str]()
    talk = Conversation("127.0.0.1:9", "ensemble", Sampling(), parser="qwen3")
    assert talk.answer("2 + 2?", texts.append, thoughts.append).text == ""
    assert (texts, thoughts) == ([], ["I add"])
    assert talk.messages[1] == {"role": "assistant", "content": "", "reasoning_content": "I add"}


def test_a_served_model_tells_how_its_prompt_ends(server: Running) -> None:
    """The demo model's prompts end without `<think>`, so answers are no reasoning, with `deepseek-r1` either."""
    thoughts, texts = list[str](), list[str]()
    talk = conversation(server, parser="deepseek-r1")
    answer = talk.answer("one two", texts.append, thoughts.append).text
    assert answer == "".join(texts) == talk.messages[1]["content"] != ""
    assert thoughts == []


def test_a_parser_that_does_not_exist_is_refused_before_the_server_is_asked(run: Any) -> None:
    status, out, errors = run("chat", "--url", "127.0.0.1:9", "--reasoning-parser", "qwen")
    assert (status, out) == (2, "")
    assert "error: --reasoning-parser qwen: there is no such parser\nhint: Give deepseek-r1 or qwen3.\n" in errors


def test_exit_ends_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script()
    lines = iter(["one", "/exit", "two"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    Repl(script, terminal=True).run()  # type: ignore[arg-type]
    assert script.messages == ["one"]


def test_every_line_of_a_pipe_is_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    script = piped(monkeypatch, b"/usr/bin/env is what?\n\ntwo \\\nlines\nlast\\")
    assert script.messages == ["/usr/bin/env is what?", "two \nlines", "last"]
    with pytest.raises(ForgeError, match="standard input is not UTF-8 text"):
        piped(monkeypatch, b"\xff\n")
    with pytest.raises(KeyboardInterrupt):
        piped(monkeypatch, b"stop\n")


def test_only_answers_go_to_standard_output(server: Running) -> None:
    found = chat(server.grpc, "one two\nthree\n", "--system", "Be brief.")
    talk = conversation(server, system="Be brief.")
    expected = [talk.answer(text, lambda _: None).text for text in ("one two", "three")]
    assert (found.returncode, found.stdout) == (0, "".join(f"{text}\n" for text in expected))


def test_a_model_that_is_not_served_is_said_before_the_first_message(server: Running) -> None:
    found = chat(server.grpc, "", "--model", "nosuch")
    assert (found.returncode, found.stdout) == (1, "")
    assert "unknown model: 'nosuch'" in found.stderr
    assert "hint: Give the name of a text model of this server with --model" in found.stderr


def test_without_a_server_it_says_so() -> None:
    found = chat("127.0.0.1:9", "one\n")
    assert found.returncode == 1
    assert "error: no server answers at 127.0.0.1:9" in found.stderr
    assert "Traceback" not in found.stderr


@pytest.mark.usefixtures("slow")
def test_a_real_terminal_streams_and_survives_ctrl_c(fake_repository: Path, start: Start) -> None:
    server = start(fake_repository)
    server.wait_ready()
    command = [sys.executable, "-m", "trtforge", "chat", "--url", server.grpc, "--max-tokens", "4000"]
    parent, child = pty.openpty()
    found = termios.tcgetattr(parent)
    process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, start_new_session=True)
    os.close(child)
    seen = b""

    def until(text: bytes, after: bytes = b"") -> None:
        nonlocal seen
        end = time.monotonic() + PATIENCE
        while text not in seen.partition(after)[2] if after else text not in seen:
            assert time.monotonic() < end, seen
            if select.select([parent], [], [], 0.1)[0]:
                seen += os.read(parent, 4096)

    try:
        until(b">>> ")
        os.write(parent, b"stripes " * 30 + b"zebra\n")
        until(b"zebra\r\n")
        until(b"stripes", after=b"zebra\r\n")  # the fake engine repeats its prompt, slowly
        os.write(parent, b"typed")
        time.sleep(0.3)  # the terminal would echo it at once
        until(b"stripes", after=seen)
        assert b"typed" not in seen
        process.send_signal(signal.SIGINT)
        until(b"the message and its answer are forgotten")
        until(b">>> typed")  # the next prompt reads it
        os.write(parent, b"\x15/stats\n")  # after Ctrl-U
        until(b"interrupted after ")
        os.write(parent, b"/exit\n")
        assert process.wait(PATIENCE) == 0
        assert termios.tcgetattr(parent) == found
    finally:
        process.kill()
        os.close(parent)


def test_the_address_of_http_is_refused_in_the_words_of_chat(run: Any) -> None:
    status, out, errors = run("chat", "--url", "http://127.0.0.1:9101")
    assert (status, out) == (2, "")
    assert errors.startswith("error: http://127.0.0.1:9101: this command speaks gRPC, not HTTP\nhint: Give the address")
    assert "--protocol" not in errors
