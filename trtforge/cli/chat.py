"""`trtforge chat` and `trtforge run`: talk to a served model in the terminal."""

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trtforge.cli import completion, show
from trtforge.cli.guide import Grammar, JsonSchema, Regex, guide_of
from trtforge.cli.keys import Keys
from trtforge.cli.options import (
    MaxTokens,
    Quiet,
    Seed,
    Temperature,
    TopK,
    TopP,
    Verbose,
)
from trtforge.cli.prompt import decoded
from trtforge.core import defaults
from trtforge.core.errors import ForgeError, UsageError
from trtforge.core.figures import counted
from trtforge.core.reasoning import REASONING_PARSERS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trtforge.core.reasoning import ReasoningParser
    from trtforge.serve.client import Sampling
    from trtforge.serve.conversation import Conversation
    from trtforge.serve.local_server import LocalServer

System = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System prompt.", show_default=False)]
ChatReasoning = Annotated[
    str | None,
    typer.Option(
        "--reasoning-parser",
        metavar="NAME",
        autocompletion=completion.words(*REASONING_PARSERS),
        help="Separate the reasoning of a reasoning model from the answer: deepseek-r1 or qwen3, as in trtllm-serve.",
        show_default=False,
    ),
]
_DIM, _BRIGHT = "\x1b[2m", "\x1b[22m"
"""ANSI's codes (SGR) of faint and of normal text."""
_HELP = """\
/reset        forget the messages
/system TEXT  change the system prompt and forget the messages; without TEXT: none
/save FILE    write the messages to a new file
/load FILE    continue a chat that was saved
/stats        the length and the speed of the last answer
/exit         end; Ctrl-D too. Ctrl-C ends the answer that is being written
A line that ends with \\ goes on in the next one."""


def chat(
    url: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="gRPC address of a running server.", show_default=defaults.GRPC_URL),
    ] = None,
    build: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Serve this build or repository during the chat.", show_default=False),
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Text model.", show_default="ensemble")] = None,
    system: System = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = None,
    json_schema: JsonSchema = None,
    regex: Regex = None,
    grammar: Grammar = None,
    reasoning_parser: ChatReasoning = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Chat with a served model: its own chat template, history, streaming.

    In a terminal, /help lists the commands: /reset, /system TEXT, /save FILE, /load FILE, /stats and /exit. A line that
    ends with \\ continues on the next line.

    Without a terminal each line of standard input is a message, and only the answers are printed.

    With --reasoning-parser, a terminal shows the reasoning dimmed, before the answer.

    Example: trtforge chat --url 127.0.0.1:8001

    Example: trtforge chat --build build/demo-int4awq --system "Answer briefly."
    """
    if url is not None and build is not None:
        raise UsageError("--url cannot be combined with --build", hint="Give one of them.")
    from trtforge.serve.client import Sampling
    from trtforge.serve.endpoint import Endpoint

    guide = guide_of(json_schema, regex, grammar)
    sampling = Sampling(max_tokens, temperature, top_k, top_p, seed, guide=guide, finish_reason=True)
    parser = parser_of(reasoning_parser)
    talk(Endpoint.of_grpc(url).url, build, model, system, sampling, parser=parser, quiet=quiet)


def parser_of(name: str | None) -> "ReasoningParser | None":
    """The parser that is asked for. Raises UsageError for another name."""
    found = next((parser for parser in REASONING_PARSERS if parser == name), None)
    if found is None and name is not None:
        known = " or ".join(REASONING_PARSERS)
        raise UsageError(f"--reasoning-parser {name}: there is no such parser", hint=f"Give {known}.")
    return found


def talk(
    url: str,
    build: Path | None,
    model: str | None,
    system: str | None,
    sampling: "Sampling",
    *,
    parser: "ReasoningParser | None" = None,
    quiet: bool,
) -> None:
    """Chat until the input ends. `build`: served meanwhile; None: the server at `url` is used."""
    from trtforge.serve.request import request_warnings

    for warning in request_warnings(sampling):
        show.warning(warning)
    with ExitStack() as stack:
        name, server = model, None
        if build is not None:
            server, served = stack.enter_context(served_build(build, quiet=quiet))
            url, name = server.grpc, model or served
        conversation = _conversation(url, name or "ensemble", system, sampling, parser)
        terminal = sys.stdin.isatty() and sys.stdout.isatty()
        if terminal and not quiet:
            kind = "completing prompts: the tokenizer has no chat template" if conversation.complete else "chatting"
            print(f"{kind} with {conversation.model} at {url}; /help lists the commands", file=sys.stderr)
        keys = Keys.of(sys.stdin) if terminal else None
        if keys is not None:
            stack.callback(keys.restore)
            stack.enter_context(_line_editing())
        Repl(conversation, terminal=terminal, quiet=quiet, keys=keys, server=server).run()


@contextmanager
def served_build(build: Path, *, quiet: bool) -> "Iterator[tuple[LocalServer, str]]":
    """Serve a build or repository; yields the server and the name of its text model."""
    from trtforge.cli.places import artifact_at
    from trtforge.core.manifest import open_artifact
    from trtforge.core.progress import for_this_terminal
    from trtforge.formats.triton import read_facts
    from trtforge.serve.embedded import compile_kernels
    from trtforge.serve.local_server import local_server

    repository = artifact_at(build, "repository")
    facts = read_facts(open_artifact(repository, "repository"))
    if not quiet:
        print(f"starting the server of {show.path(repository)}", file=sys.stderr)
    with ExitStack() as stack:
        with for_this_terminal(quiet=quiet).waiting("starting the server"):
            compile_kernels(facts)  # here, so that it is said
            server = stack.enter_context(local_server(repository, ready_timeout=defaults.READY_TIMEOUT))
        yield server, facts.model("ensemble")


def _conversation(
    url: str, model: str, system: str | None, sampling: "Sampling", parser: "ReasoningParser | None"
) -> "Conversation":
    """A new conversation. Raises ForgeError if no server answers, UsageError for what needs a chat template."""
    from trtforge.formats.text_tensors import MESSAGES
    from trtforge.serve.conversation import Conversation
    from trtforge.serve.grpc_client import GrpcClient

    inputs = GrpcClient(url, timeout=10.0).inputs(model)
    complete = MESSAGES not in inputs
    if complete and system is not None:
        raise UsageError(
            "--system: the served tokenizer has no chat template, so its prompts have no system message",
            hint="Leave out --system, or package the engine again with the tokenizer of an instruct model.",
        )
    if complete and parser is not None:
        raise UsageError(
            "--reasoning-parser: the served tokenizer has no chat template, so its prompts are completed as they are",
            hint="Leave out --reasoning-parser, or package the engine again with the tokenizer of an instruct model.",
        )
    return Conversation(url, model, sampling, system, complete, parser, seeds="seed" in inputs)


class Repl:
    """Reads messages and commands, prints answers as they are generated.

    `keys`: the terminal's, if there is one; `server`: the one that runs for this chat, with which the chat ends.
    """

    def __init__(
        self,
        conversation: "Conversation",
        *,
        terminal: bool,
        quiet: bool = False,
        keys: Keys | None = None,
        server: "LocalServer | None" = None,
    ) -> None:
        self._conversation = conversation
        self._keys = keys
        self._server = server
        self._terminal = terminal
        self._quiet = quiet
        self._last = "no answer yet"
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: self._say(_HELP),
            "reset": lambda _: self._reset(),
            "system": self._system,
            "save": self._save,
            "load": self._load,
            "stats": lambda _: self._say(self._last),
        }

    def run(self) -> None:
        """Read until the input ends. On a terminal the chat goes on after an error; elsewhere the error ends it."""
        while True:
            try:
                text = self._read()
            except EOFError:
                if self._terminal:
                    print(file=sys.stderr)
                return
            except ForgeError as error:
                self._tell(error)
                continue
            except KeyboardInterrupt:
                if not self._terminal:
                    raise
                print("\n/exit or Ctrl-D ends the chat", file=sys.stderr)
                continue
            if self._terminal and text.strip() in ("/exit", "/quit", "/bye"):
                return
            if text.strip():
                self._take(text)

    def _take(self, text: str) -> None:
        try:
            if self._terminal and text.startswith("/"):
                self._command(text)
            else:
                self._answer(text)
        except ForgeError as error:
            self._tell(error)
        except KeyboardInterrupt:
            if not self._terminal:
                raise
            print("\n(interrupted; the message and its answer are forgotten)", file=sys.stderr)

    def _tell(self, error: ForgeError) -> None:
        """Show an error on a terminal. Elsewhere, and if the chat's own server has ended, raise it."""
        ended = None if self._server is None else self._server.error_behind(error)
        if ended is not None:
            raise ended from None
        if not self._terminal:
            raise error
        show.message("error:", error.message)
        show.message("hint:", error.hint)

    def _read(self) -> str:
        lines = [self._line(">>> ")]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            try:
                lines.append(self._line("... "))
            except EOFError:
                break
        return "\n".join(lines)

    def _line(self, prompt: str) -> str:
        if self._terminal:
            # For undecodable bytes, Python returns lone surrogates in an ASCII locale and raises an error in UTF-8.
            try:
                return decoded(input(prompt).encode(errors="surrogateescape"))
            except UnicodeDecodeError as error:
                return decoded(error.object)
        line = decoded(sys.stdin.buffer.readline())
        if not line:
            raise EOFError
        return line.rstrip("\n")

    def _answer(self, text: str) -> None:
        from trtforge.serve.request import answer_warnings

        shown, start = 0, time.perf_counter()

        reasoning = _Reasoning(shown=self._terminal)

        def add(piece: str) -> None:
            nonlocal shown
            reasoning.end()
            print(piece, end="", flush=True)
            shown += len(piece)

        try:
            with self._keys.silent() if self._keys is not None else nullcontext():
                answer = self._conversation.answer(text, add, reasoning.add)
        except KeyboardInterrupt:
            self._last = f"interrupted after {time.perf_counter() - start:.2f} s and {counted(shown, 'character')}"
            raise
        finally:
            reasoning.end(answered=False)
            print()
        counts = f"{answer.input_tokens} tokens in, {answer.output_tokens} out"
        self._last = f"{counts} in {answer.seconds:.2f} s, {answer.pace}"
        for warning in answer_warnings(self._conversation.sampling, answer):
            show.warning(warning)

    def _command(self, text: str) -> None:
        name, _, rest = text[1:].partition(" ")
        command = self._commands.get(name)
        if command is None:
            raise ForgeError(f"/{name} is not a command", hint="/help lists the commands.")
        command(rest.strip())

    def _reset(self) -> None:
        self._conversation.reset()
        self._say("the messages are forgotten")

    def _system(self, text: str) -> None:
        if self._conversation.complete and text:
            raise ForgeError("the served tokenizer has no chat template", hint="Its prompts have no system message.")
        self._conversation.system = text or None
        self._reset()

    def _save(self, name: str) -> None:
        path = _file(name, "/save")
        self._conversation.save(path)
        self._say(f"saved to {name}")

    def _load(self, name: str) -> None:
        path = _file(name, "/load")
        self._conversation.load(path)
        self._say(f"{len(self._conversation.messages)} messages")

    def _say(self, text: str) -> None:
        if not self._quiet:
            print(text, file=sys.stderr)


class _Reasoning:
    """Prints the reasoning before an answer: dimmed, and on a terminal alone."""

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown
        self._begun = False

    def add(self, piece: str) -> None:
        """Print a piece."""
        if self._shown:
            print(piece if self._begun else f"{_DIM}{piece}", end="", flush=True)
            self._begun = True

    def end(self, *, answered: bool = True) -> None:
        """End it, if it has begun: a blank line comes before what is `answered`."""
        if self._begun:
            print(_BRIGHT, end="\n\n" if answered else "", flush=True)
            self._begun = False


def _file(name: str, command: str) -> Path:
    if not name:
        raise ForgeError(f"{command} without a file", hint=f"For example {command} chat.json.")
    return Path(name).expanduser()


@contextmanager
def _line_editing() -> "Iterator[None]":
    """Line editing and a history of this chat, where Python has readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    readline.set_auto_history(True)
    yield
    readline.clear_history()
