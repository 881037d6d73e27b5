"""The first error of a Triton log, as its own sentence."""

from pathlib import Path

import pytest

from trtforge.serve import log_limit
from trtforge.serve.log_limit import emptied
from trtforge.serve.server_log import LogMark, first_error, last_lines, without_hint

LOADING = 'I1120 19:23:06.213422 5166 model_lifecycle.cc:472] "loading: pre:1"\n'


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (LOADING, ""),
        (
            'E1120 19:23:06.212177 5166 server.cc:241] "CudaDriverHelper has not been initialized."\n'
            "Error: Failed to initialize NVML\n" + LOADING,
            "",
        ),
        (
            LOADING
            + 'E1120 19:26:08.853074 7935 main.cc:245] "failed to start GRPC service: Unavailable"\n'
            + 'E1120 19:26:09.000000 7935 main.cc:246] "a later one"\n',
            "failed to start GRPC service: Unavailable",
        ),
        (
            'E1120 19:26:08.853074 7935 pb_stub.cc:402] "Failed to initialize Python stub: ForgeError: no rank 1\n'
            "\nAt:\n  model.py(10): initialize\n" + LOADING,
            "Failed to initialize Python stub: ForgeError: no rank 1\nAt:\nmodel.py(10): initialize",
        ),
        (
            'E1120 19:26:08.853074 7935 pb.cc:1] "failed to load: TritonModelException: no rank 1\\n\\nAt:'
            '\\n  /models/tensorrt_llm/1/model.py(40): initialize\\n"\n',
            "failed to load: TritonModelException: no rank 1",
        ),
        (LOADING + "Signal (11) received.\n 0# 0x00005583FF67C52D\n", "Signal (11) received.\n0# 0x00005583FF67C52D"),
    ],
)
def test_first_error_is_found(tmp_path: Path, log: str, expected: str) -> None:
    (tmp_path / "log").write_text(log)
    assert first_error(tmp_path / "log") == expected


def test_an_abort_of_the_runtime_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(LOADING + "terminate called after throwing an instance of 'std::system_error'\n")
    assert first_error(tmp_path / "log") == "terminate called after throwing an instance of 'std::system_error'"


def test_an_abort_that_follows_an_error_is_no_part_of_it(tmp_path: Path) -> None:
    """As of a model process whose engine was killed."""
    entry = 'E1120 19:26:08.853074 7935 model.py:153] "the engine process was killed (hint: Give it more memory.)"\n'
    abort = "terminate called after throwing an instance of 'boost::interprocess::lock_exception'\n  what():  x\n"
    (tmp_path / "log").write_text(entry + abort + "Signal (6) received.\n")
    assert first_error(tmp_path / "log") == "the engine process was killed (hint: Give it more memory.)"
    (tmp_path / "log").write_text(abort + "Signal (6) received.\n")
    assert first_error(tmp_path / "log").endswith("\nSignal (6) received.")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("no rank 1 (hint: Give (two) ranks.)", ("no rank 1", "Give (two) ranks.")),
        ("no rank 1 (hint: Give two.)\nAt:", ("no rank 1\nAt:", "Give two.")),
        ("error: no rank 1\nhint: Give two.", ("error: no rank 1", "Give two.")),
        ("two (hint: Correct each:\n  a: b\n  c: d)\nAt: f(x)", ("two\nAt: f(x)", "Correct each:\n  a: b\n  c: d")),
        ("error: two\nhint: Correct each:\n  a: b\n  c: d", ("error: two", "Correct each:\n  a: b\n  c: d")),
        ("Signal (11) received.", ("Signal (11) received.", "")),
        ("", ("", "")),
    ],
)
def test_the_hint_of_an_error_is_told_apart(error: str, expected: tuple[str, str]) -> None:
    assert without_hint(error) == expected


def test_last_lines_of_a_log_without_errors(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("\n".join(f"line {number}" for number in range(20)) + "\n\n")
    assert last_lines(tmp_path / "log").splitlines() == [f"line {number}" for number in range(14, 20)]
    assert last_lines(tmp_path / "none") == ""


def test_log_that_is_not_there_has_no_error(tmp_path: Path) -> None:
    assert first_error(tmp_path / "log") == ""


def test_a_full_log_is_emptied_and_those_who_append_go_on(tmp_path: Path) -> None:
    log, kept = tmp_path / "log", tmp_path / "log.1"
    with log.open("ab", buffering=0) as writer:
        writer.write(b"old\n")
        assert not emptied(log, kept, most=4)
        writer.write(b"x")
        log.chmod(0o600)
        assert emptied(log, kept, most=4)
        writer.write(b"new\n")
    assert (log.read_bytes(), kept.read_bytes()) == (b"new\n", b"old\nx")
    assert kept.stat().st_mode & 0o777 == 0o600
    assert not emptied(tmp_path / "none", most=4)


def test_a_disk_without_room_gets_no_copy(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"12345")
    assert emptied(log, tmp_path / "missing" / "log.1", most=4)
    assert log.read_bytes() == b""


def test_a_healthy_server_empties_a_full_log_and_its_next_error_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtforge.serve.server_log.emptied", lambda log: log_limit.emptied(log, most=100))
    log = tmp_path / "log"
    mark = LogMark(log)
    with log.open("a") as writer:
        for second in range(0, 60, 6):
            writer.write('E1120 19:26:08.853074 7935 a.cc:1] "of a request"\n')
            writer.flush()
            mark.advance(float(second))
        assert log.stat().st_size <= 150
        writer.write('E1120 19:26:09.853074 7935 a.cc:1] "of the server"\n')
    mark.advance(60.0)
    assert mark.offset <= log.stat().st_size
    log.write_text("")
    with log.open("a") as writer:
        mark = LogMark(log)
        mark.advance(0.0)
        writer.write("x" * 200 + "\n")
        writer.flush()
        mark.advance(6.0)
        writer.write('E1120 19:26:09.853074 7935 a.cc:1] "of the server"\n')
    assert first_error(log, mark.offset) == "of the server"
