"""The first real error of a log: found by rank and time, explained with its numbers, whatever surrounds it."""

import io
import re
import tracemalloc

try:
    from re._constants import ANY, BRANCH, MAX_REPEAT, MAXREPEAT, MIN_REPEAT
    from re._parser import SubPattern, parse
except ImportError:  # Python 3.10
    from sre_constants import ANY, BRANCH, MAX_REPEAT, MAXREPEAT, MIN_REPEAT
    from sre_parse import SubPattern, parse
from collections.abc import Iterator
from string import Formatter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.doctor.excerpts import BUILD, HARMLESS, LOADING, WARNINGS, Excerpt
from tests.doctor.excerpts import EXCERPTS as WRITTEN
from tests.doctor.reported import REPORTED
from trtforge.doctor.known import PATTERNS
from trtforge.doctor.log import Diagnosis, diagnose
from trtforge.doctor.log_lines import numbered_pieces, parse_line, parse_log
from trtforge.doctor.pattern import Pattern

EXCERPTS = (*WRITTEN, *REPORTED)


def read(text: str | bytes) -> Diagnosis:
    return diagnose(numbered_pieces(io.BytesIO(text.encode() if isinstance(text, str) else text)))


@pytest.mark.parametrize("excerpt", EXCERPTS, ids=lambda excerpt: excerpt.id)
def test_every_known_error_is_explained(excerpt: Excerpt) -> None:
    diagnosis = read(excerpt.text())
    first = diagnosis.first
    assert first is not None
    assert first.pattern.id == excerpt.id
    assert {name: first.values.get(name) for name in excerpt.values} == excerpt.values
    assert first.at.rank == excerpt.rank
    assert first.at.text in re.sub(" {3,}", "  ", excerpt.text().splitlines()[first.at.line - 1])
    assert "?" not in first.means + first.do
    assert all(value in first.means + first.do for value in excerpt.values.values() if value != "prefix0_2")
    assert diagnosis.failed


@pytest.mark.parametrize("excerpt", WARNINGS, ids=lambda excerpt: excerpt.id)
def test_warnings_are_told_and_are_no_error(excerpt: Excerpt) -> None:
    diagnosis = read(excerpt.text())
    assert not diagnosis.failed
    (warning,) = diagnosis.warnings
    assert warning.pattern.id == excerpt.id
    assert warning.values == excerpt.values


@pytest.mark.parametrize("text", HARMLESS.values(), ids=HARMLESS)
def test_harmless_lines_alone_are_no_error(text: str) -> None:
    lines = "\n".join(f"[1,{rank}]<stderr>:{line}" for line in text.splitlines() for rank in (0, 1))
    diagnosis = read(f"{LOADING}\n{BUILD}\n{text}\n{lines}\n")
    assert not diagnosis.failed
    assert diagnosis.warnings == ()


def test_every_pattern_has_an_excerpt() -> None:
    assert {pattern.id for pattern in PATTERNS} == {e.id for e in (*EXCERPTS, *WARNINGS)} | set(HARMLESS)
    assert len({pattern.id for pattern in PATTERNS}) == len(PATTERNS)


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.id)
def test_explanations_use_only_what_the_message_gives(pattern: Any) -> None:
    used = {name for text in (pattern.means, pattern.do) for _, name, _, _ in Formatter().parse(text) if name}
    given = set(pattern._regex.groupindex) | set(pattern._then.groupindex if pattern._then else ())
    assert used <= given
    assert pattern.sources
    for text in (pattern.means, pattern.do):
        assert text.endswith((".", "}"))


@given(st.data())
@settings(max_examples=200)
def test_interleaving_of_the_ranks_does_not_matter(data: st.DataObject) -> None:
    """The same diagnosis whatever the order in which the ranks' lines reached the log."""
    excerpt = data.draw(st.sampled_from(EXCERPTS))
    streams = excerpt.lines()
    other = excerpt_of_another_rank(data, excerpt)
    streams |= {rank: lines for rank, lines in other.items() if rank not in streams}
    order = data.draw(st.permutations([rank for rank, lines in streams.items() for _ in lines]))
    rests = {rank: iter(lines) for rank, lines in streams.items()}
    mixed = "\n".join(next(rests[rank]) for rank in order)
    apart = "\n".join(line for lines in streams.values() for line in lines)
    assert signature(read(mixed)) == signature(read(apart))


def excerpt_of_another_rank(data: st.DataObject, excerpt: Excerpt) -> dict[int | None, list[str]]:
    """Another error on further ranks, so that there is something to choose from."""
    others = data.draw(st.sampled_from([each for each in EXCERPTS if not names_ranks(each)]))
    text = "\n".join(others.streams.values())
    shifted = Excerpt(others.id, {7: text}, style=excerpt.style)
    return shifted.lines()


def names_ranks(excerpt: Excerpt) -> bool:
    """Whether its lines themselves say of which rank they are, so that they are not those of another one."""
    lines = [line for text in excerpt.streams.values() for line in text.splitlines()]
    return any(parse_line(1, line).rank is not None for line in lines)


def signature(diagnosis: Diagnosis) -> object:
    """All but line numbers."""

    def of(explained: Any) -> object:
        lines = [(seen.rank, seen.text) for seen in explained.lines]
        return (explained.pattern.id, explained.values, lines, explained.times)

    return (
        of(diagnosis.first) if diagnosis.first else None,
        [(seen.rank, seen.text) for seen in diagnosis.unexplained],
        [of(each) for each in diagnosis.later],
        [of(each) for each in diagnosis.warnings],
        diagnosis.ranks,
    )


def test_first_is_decided_by_time_where_there_is_one() -> None:
    late = "[1,0]<stderr>:E0711 12:00:09.000000 1 a.cc:1] Socket '0.0.0.0:8001' already in use"
    early = "[1,3]<stderr>:E0711 12:00:08.999999 1 a.cc:1] GuidedDecoder is not setup"
    diagnosis = read(f"{late}\n{early}\n")
    assert diagnosis.first is not None
    assert (diagnosis.first.pattern.id, diagnosis.first.at.rank) == ("guided-decoding-off", 3)
    assert [later.pattern.id for later in diagnosis.later] == ["port-in-use"]


def test_abort_leads_to_the_rank_that_called_it() -> None:
    diagnosis = read(
        "[1,0]<stderr>:RuntimeError: peer access is not supported between these two devices\n"
        "[1,2]<stderr>:ValueError: Config name is missing.\n"
        "MPI_ABORT was invoked on rank 2 in communicator MPI_COMM_WORLD\n"
    )
    assert diagnosis.first is not None
    assert (diagnosis.first.pattern.id, diagnosis.first.at.rank) == ("dataset-config", 2)


def test_abort_alone_shows_the_first_error_of_its_rank() -> None:
    diagnosis = read(
        "[1,0]<stderr>:RuntimeError: consequence\n"
        "[1,2]<stderr>:RuntimeError: cause that nobody knows\n"
        "MPI_ABORT was invoked on rank 2 in communicator MPI_COMM_WORLD\n"
    )
    assert diagnosis.first is not None
    assert diagnosis.first.pattern.id == "mpi-abort"
    assert [(seen.rank, seen.text) for seen in diagnosis.unexplained] == [(2, "RuntimeError: cause that nobody knows")]


def test_reason_above_the_assertion_is_shown() -> None:
    diagnosis = read(
        "[TensorRT-LLM][ERROR] 3: [runtime.cpp::deserializeCudaEngine::57] blobSize is 0\n"
        "[TensorRT-LLM][ERROR] Assertion failed: Failed to deserialize cuda engine\n"
    )
    assert diagnosis.first is not None
    assert [(seen.line, seen.text) for seen in diagnosis.first.lines] == [
        (1, "3: [runtime.cpp::deserializeCudaEngine::57] blobSize is 0"),
        (2, "Assertion failed: Failed to deserialize cuda engine"),
    ]


def test_source_lines_of_a_trace_are_not_what_happened() -> None:
    diagnosis = read(
        "Traceback (most recent call last):\n"
        '  File "convert.py", line 3, in load\n'
        '    raise RuntimeError(f"Required but not provided tensors:{missing}") or "Config name is missing"\n'
        "RuntimeError: something else\n"
    )
    assert diagnosis.first is None
    assert [seen.text for seen in diagnosis.unexplained][-1] == "RuntimeError: something else"
    assert [seen.line for seen in diagnosis.unexplained] == [2, 3, 4]


def test_trace_that_a_logger_wrote_is_one_error() -> None:
    """The logger's prefix, and the rank in it, are in front of the first line only."""
    diagnosis = read(
        "[07/07/2026-03:31:36] [TRT-LLM] [RANK 1] [E] Traceback (most recent call last):\n"
        '  File "/usr/lib/python3/tensorrt_llm/executor/worker.py", line 302, in worker_main\n'
        '    raise RuntimeError("GuidedDecoder is not setup")\n'
        "IndexError: tuple index out of range\n"
    )
    assert diagnosis.first is None
    assert [(seen.line, seen.text) for seen in diagnosis.unexplained[1:]] == [
        (3, 'raise RuntimeError("GuidedDecoder is not setup")'),
        (4, "IndexError: tuple index out of range"),
    ]


def test_last_line_of_a_logged_trace_is_an_error_whatever_its_name() -> None:
    diagnosis = read(
        "E1206 10:58:56.559834 61613 model.py:345] Traceback (most recent call last):\n"
        '  File "/models/ensemble/1/model.py", line 323, in execute\n'
        "    sys.exit(3)\n"
        "SystemExit: 3\n"
    )
    assert [seen.text for seen in diagnosis.unexplained][-1] == "SystemExit: 3"


def test_announcement_of_a_known_message_is_not_told() -> None:
    text = "terminate called after throwing an instance of 'tensorrt_llm::common::TllmException'\n  what():  {}\n"
    known = read(text.format("[TensorRT-LLM][ERROR] Assertion failed: mpiSize == tp * pp (worldConfig.cpp:80)"))
    assert known.first is not None
    assert known.unexplained == ()
    assert [seen.line for seen in read(text.format("no idea")).unexplained] == [1, 2]


def test_lines_without_a_rank_follow_from_those_of_a_rank() -> None:
    diagnosis = read("RuntimeError: peer access is not supported\n[1,1]<stderr>:ValueError: Config name is missing.\n")
    assert diagnosis.first is not None
    assert (diagnosis.first.pattern.id, diagnosis.first.at.rank) == ("dataset-config", 1)


def test_unknown_error_is_shown_with_what_follows() -> None:
    diagnosis = read(f'{LOADING}\nE0711 12:00:05.000000 1 pb_stub.cc:402] "no idea"\nAt:\n  model.py(10)\n{LOADING}\n')
    assert diagnosis.first is None
    assert diagnosis.failed
    assert [seen.text for seen in diagnosis.unexplained] == ['"no idea"', "At:", "model.py(10)"]


def test_status_table_of_triton_is_read() -> None:
    diagnosis = read(
        "| preprocessing | 1       | READY                                      |\n"
        "| tensorrt_llm  | 1       | UNAVAILABLE: Internal: Assertion failed:   |\n"
        "|               |         | mpiSize == tp * pp (/app/worldConfig.cpp)  |\n"
    )
    assert diagnosis.first is not None
    assert diagnosis.first.at.text == "|  |  | mpiSize == tp * pp (/app/worldConfig.cpp)  |"
    assert [seen.line for seen in diagnosis.unexplained] == [2]


def test_unknown_error_before_a_known_one_is_kept() -> None:
    diagnosis = read("[TRT] [E] who knows\nE0711 12:00:05.000000 1 a.cc:1] GuidedDecoder is not setup\n")
    assert diagnosis.first is not None
    assert diagnosis.unexplained[0].text == "who knows"


@pytest.mark.parametrize(("clock", "shown"), [("12:00:04", True), ("12:00:06", False)])
def test_unknown_error_of_another_rank_is_kept_if_it_was_earlier(clock: str, shown: bool) -> None:
    diagnosis = read(
        f"[1,1]<stderr>:E0711 {clock}.000000 1 a.cc:1] who knows\n"
        "[1,0]<stderr>:E0711 12:00:05.000000 1 a.cc:1] GuidedDecoder is not setup\n"
    )
    assert diagnosis.first is not None
    assert [seen.text for seen in diagnosis.unexplained] == (["who knows"] if shown else [])


def test_warning_that_becomes_an_error_counts_as_one() -> None:
    warned = "[07/11/2024-12:00:01] [TRT] [W] Tactic Device request: 600MB Available: 302MB."
    diagnosis = read(f"{warned}\n")
    assert not diagnosis.failed
    assert [w.pattern.id for w in diagnosis.warnings] == ["build-tactic-memory"]
    diagnosis = read(f"{warned}\n{warned.replace('[W]', '[E]')}\n")
    assert diagnosis.first is not None
    assert diagnosis.warnings == ()


def test_repetitions_are_counted() -> None:
    line = "[1,{}]<stderr>:[TensorRT-LLM][ERROR] GuidedDecoder is not setup"
    diagnosis = read("\n".join(line.format(rank) for rank in (0, 1, 0)))
    assert diagnosis.first is not None
    assert diagnosis.first.times == 3
    assert diagnosis.ranks == (0, 1)


def test_empty_and_binary_logs_are_no_errors() -> None:
    assert not read("").failed
    assert not read(bytes(range(256)) * 3).failed


@given(st.lists(st.one_of(st.text(max_size=40), st.sampled_from([e.text() for e in EXCERPTS])), max_size=6))
def test_any_text_can_be_read(parts: list[str]) -> None:
    diagnosis = read("".join(parts).encode("utf-8", errors="replace"))
    assert diagnosis.failed == (diagnosis.first is not None or bool(diagnosis.unexplained))


def test_undecodable_bytes_do_not_hide_an_error() -> None:
    diagnosis = read(b"\xff\xfe progress 10%\r progress 100%\r\xc3RuntimeError: Config name is missing.\r\n")
    assert diagnosis.first is not None
    assert diagnosis.first.at.line == 1


def test_long_logs_take_constant_memory() -> None:
    def pieces(count: int) -> Iterator[tuple[int, str]]:
        for number in range(1, count):
            yield number, f"[1,{number % 4}]<stderr>:[TensorRT-LLM][INFO] step {number}"
            if number % 50 == 0:
                yield number, f"[1,{number % 4}]<stderr>:RuntimeError: number {number}"

    tracemalloc.start()
    try:
        diagnose(pieces(1_000))
        base = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        assert diagnose(pieces(20_000)).lines == 19_999
        assert tracemalloc.get_traced_memory()[1] < base + 50_000
    finally:
        tracemalloc.stop()


def test_line_without_end_is_read_in_pieces() -> None:
    class Endless(io.RawIOBase):
        def __init__(self) -> None:
            self.asked: list[int] = []

        def readline(self, size: int | None = -1, /) -> bytes:
            assert size is not None
            self.asked.append(size)
            return b"x" * size if len(self.asked) < 20 else b""

    source: Any = Endless()
    assert {number for number, _ in numbered_pieces(source)} == {1}
    assert set(source.asked) == {1 << 16}


@pytest.mark.parametrize(
    ("text", "rank", "time", "level", "said"),
    [
        ("[1,3]<stderr>:E0711 12:00:00.000000 1 file.cc:1] no", 3, "07-11 12:00:00.000000", "error", "no"),
        ("Thu Jul 11 12:00:00 2024[1,3]<stdout>:no", 3, "07-11 12:00:00", None, "no"),
        ("[prterun-node7-12@1,11]<stderr>: no", 11, None, None, "no"),
        ("[rank3]: no", 3, None, None, "no"),
        ("[TensorRT-LLM][ERROR] [TensorRT-LLM][ERROR] no", None, None, "error", "no"),
        ("[TensorRT-LLM][WARNING][2] no", 2, None, "warning", "no"),
        ("[07/11/2024-12:00:00] [TRT] [E] no", None, "07-11 12:00:00", "error", "no"),
        ("[07/11/2025-12:00:00] [TRT-LLM] [RANK 1] [I] no", 1, "07-11 12:00:00", "info", "no"),
        ("E20240711 12:00:00.000000 35588 grpc_server.cc:2495] no", None, "07-11 12:00:00.000000", "error", "no"),
        ("[TRT] [W] no", None, None, "warning", "no"),
        (
            "triton-models-1    | I0223 12:03:30.795466 120 libtensorrtllm.cc:184] no",
            None,
            "02-23 12:03:30.795466",
            "info",
            "no",
        ),
        ("2024-07-11T12:00:00.123456789Z stderr F [1,0]<stderr>:no", 0, "07-11 12:00:00.123456789", None, "no"),
        ("2024-07-11T12:00:00Z E 1 main.cc:245] no", None, "07-11 12:00:00", "error", "no"),
        ("2024-07-11 12:00:00,123 - ERROR - no", None, "07-11 12:00:00.123", "error", "no"),
        ("[libprotobuf ERROR /x/text_format.cc:335] no", None, None, "error", "no"),
        ("\x1b[31mno\x1b[0m", None, None, None, "no"),
        ("\x1b[36mtriton  | \x1b[0mno\x1b(B", None, None, None, "no"),
        ("triton  | 2024-07-11T12:00:00.5Z [TensorRT-LLM][ERROR] no", None, "07-11 12:00:00.5", "error", "no"),
        ("[pod/llama-0/triton] E0711 12:00:00.0 1 a.cc:1] no", None, "07-11 12:00:00.0", "error", "no"),
        (
            "Jul 11 12:00:00 node7 tritonserver[101]: [TensorRT-LLM][WARNING] no",
            None,
            "07-11 12:00:00",
            "warning",
            "no",
        ),
        ("[07/11/2024-12:00:00] [TRT-LLM] [MPI_Rank 3] [E] no", 3, "07-11 12:00:00", "error", "no"),
        ("[07/11/2026-12:00:00] [TRT-LLM] [E] [executor] no", None, "07-11 12:00:00", "error", "no"),
        ("[07/11/2026-12:00:00] [TRT-LLM] [E] [executor][RANK 1] no", 1, "07-11 12:00:00", "error", "no"),
        ("[07/11/2024-12:00:00] [TRT] [E] [a.cpp::load::1] no", None, "07-11 12:00:00", "error", "[a.cpp::load::1] no"),
        ("| ensemble | 1 | READY |", None, None, None, "| ensemble | 1 | READY |"),
    ],
)
def test_prefixes_are_peeled(text: str, rank: int | None, time: str | None, level: str | None, said: str) -> None:
    line = parse_line(1, text)
    assert (line.rank, line.time, line.level, line.text) == (rank, time, level, said)


@pytest.mark.parametrize(
    ("record", "time", "level", "said"),
    [
        (
            '{"log":"[TensorRT-LLM][ERROR] no\\n","stream":"stderr","time":"2024-07-11T12:00:00.5Z"}',
            "07-11 12:00:00.5",
            "error",
            ["no"],
        ),
        (
            '{"level":"ERROR","time":"2024-07-11T12:00:00Z","message":"no\\nmore"}',
            "07-11 12:00:00",
            "error",
            ["no", "more"],
        ),
        ('{"severity":"Warning","msg":"\\u001b[33mno"}', None, "warning", ["no"]),
        ('{"level":"notice","msg":"no","ts":1720000000.5}', None, None, ["no"]),
        ('{"message":""}', None, None, ['{"message":""}']),
        ('{"error":"no"}', None, None, ['{"error":"no"}']),
        ('{"message":"no"', None, None, ['{"message":"no"']),
        ('{"message":["no"]}', None, None, ['{"message":["no"]}']),
        ('{"a":' * 9000, None, None, ['{"a":' * 9000]),
    ],
)
def test_records_stand_for_their_message(record: str, time: str | None, level: str | None, said: list[str]) -> None:
    lines = list(parse_log([(4, record)]))
    assert [(line.number, line.time, line.level, line.text) for line in lines] == [(4, time, level, t) for t in said]


def unbounded(parsed: Any) -> bool:
    """Whether an expression repeats `.` without an upper bound anywhere."""
    for operator, argument in parsed:
        if operator in (MAX_REPEAT, MIN_REPEAT):
            _, most, inner = argument
            if most == MAXREPEAT and any(op == ANY for op, _ in inner):
                return True
            if unbounded(inner):
                return True
        inside = argument if operator is not BRANCH else argument[1]
        parts = inside if isinstance(inside, list | tuple) else (inside,)
        if any(unbounded(part) for part in parts if isinstance(part, SubPattern)):
            return True
    return False


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.id)
def test_no_pattern_reads_a_long_line_from_everywhere(pattern: Pattern) -> None:
    """`A.*B` is tried from each A to the end of the line: 64 KB of A would take seconds."""
    for regex in (pattern.regex, pattern.then, pattern.inside):
        assert regex is None or not unbounded(parse(regex)), regex


def test_an_unbounded_repetition_is_found() -> None:
    assert unbounded(parse("a.*b"))
    assert unbounded(parse("(?:x|a(?P<y>.+?)b)?c"))
    assert not unbounded(parse(r"a.{0,300}b\d+"))


@pytest.mark.parametrize(
    "text",
    [
        "Thu Jul " + "1" * 5000 + " 12:00:00 2024[1,0]<stderr>:x",
        "[1," + "9" * 5000 + "]<stderr>:RuntimeError: x",
        "[rank" + "1" * 5000 + "]: RuntimeError: x",
        "MPI_ABORT was invoked on rank " + "8" * 5000,
        "[TRT] [I] " * 5000,
        "libmpi.so" * 7000,
        "libpython3.10.so.1.0" * 3000,
        " " * 60_000 + "x",
    ],
)
def test_long_numbers_and_many_prefixes_are_no_trouble(text: str) -> None:
    assert diagnose([(1, text)]).lines == 1


def test_prefixes_are_peeled_to_a_depth() -> None:
    line = parse_line(1, "[rank3]: " * 100 + "x")
    assert line.rank == 3
    assert line.text.startswith("[rank3]: ")
