"""The CPU kernels are compiled once for all that decides what is compiled, and only where that works."""

import ctypes
import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.runtime.kernel_levels import kernels_at
from trtforge.runtime.native import bindings, compiler
from trtforge.runtime.native.bindings import native
from trtforge.runtime.native.compiler import NATIVE, CompileError, compiled


def test_the_library_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two small sources and a header in place of the kernels; a changed header makes another library."""
    sources = tmp_path / "source"
    sources.mkdir()
    (sources / "answer.h").write_text("int answer();\nconstexpr int ANSWER = 42;\n")
    (sources / "answer.cpp").write_text('#include "answer.h"\nint answer() { return ANSWER; }\n')
    (sources / "ask.cpp").write_text(
        '#include "answer.h"\nextern "C" __attribute__((visibility("default"))) int ask() { return answer(); }\n'
    )
    monkeypatch.setattr(compiler, "SOURCES", sources)
    monkeypatch.setenv("TRTFORGE_CACHE", str(tmp_path))
    made = compiled()
    written = made.stat().st_mtime_ns
    assert made.parent == tmp_path / "kernels"
    assert compiled() == made
    assert made.stat().st_mtime_ns == written
    assert [path.name for path in made.parent.iterdir()] == [made.name]
    assert ctypes.CDLL(str(made)).ask() == 42
    (sources / "answer.h").write_text("int answer();\nconstexpr int ANSWER = 43;\n")
    assert compiled() != made
    assert ctypes.CDLL(str(compiled())).ask() == 43


@pytest.mark.parametrize("content", [b"", b"\x7fELF half of a library"])
def test_a_damaged_library_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    """A crash of the machine may empty it or cut it short; loading it would end the process with SIGBUS."""
    monkeypatch.setenv("TRTFORGE_CACHE", str(tmp_path / "cache"))
    script = '[ "$1" = -shared ] && echo library > "$4"\ntrue\n'
    (tmp_path / "c++").write_text(f"#!/bin/sh\n{script}")
    (tmp_path / "c++").chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "c++"))
    library = compiled()
    whole = library.read_bytes()
    library.write_bytes(content)
    assert compiled() == library
    assert library.read_bytes() == whole
    assert caplog.messages[-1] == f"{library} is damaged: the CPU kernels are compiled again"


def test_processes_that_need_it_at_once_compile_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a killed process left in its directory is replaced."""
    monkeypatch.setenv("TRTFORGE_CACHE", str(tmp_path / "cache"))
    script = f'echo "$*" >> {tmp_path}/calls\n[ "$1" = -shared ] && cp /dev/null "$4"\ntrue\n'
    (tmp_path / "c++").write_text(f"#!/bin/sh\n{script}")
    (tmp_path / "c++").chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "c++"))
    library = compiled()
    library.unlink()
    library.with_suffix("").mkdir()
    (library.with_suffix("") / "attention.o").write_text("half")
    (tmp_path / "calls").unlink()
    with ThreadPoolExecutor(8) as pool:  # locks are of open files, so threads wait as processes do
        assert set(pool.map(lambda _: compiled(), range(8))) == {library}
    assert [path.name for path in library.parent.iterdir()] == [library.name]
    links = [call for call in (tmp_path / "calls").read_text().splitlines() if call.startswith("-shared")]
    assert len(links) == 1


def test_as_many_compilers_run_as_there_are_processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All 20 at once took 3 GB of memory."""
    monkeypatch.setenv("TRTFORGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "processors", lambda: 2)
    (tmp_path / "running").mkdir()
    count = f"mkdir {tmp_path}/running/$$; ls {tmp_path}/running | wc -l >> {tmp_path}/counts; sleep 0.02; "
    script = f'case " $* " in *" -c "*) {count}rmdir {tmp_path}/running/$$;; *" -shared "*) cp /dev/null "$4";; esac'
    (tmp_path / "c++").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "c++").chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "c++"))
    compiled()
    counts = [int(line) for line in (tmp_path / "counts").read_text().split()]
    assert len(counts) == len(list(compiler.SOURCES.glob("*.cpp")))
    assert max(counts) == 2


def test_each_compiler_and_target_has_a_library_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags, macros, a wrapper that prints the same version, another version, other instructions of the processor."""
    monkeypatch.setenv("TRTFORGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "_build", lambda compiler, flags, library: library.touch())
    script = 'case "$1" in --version) echo "$VERSION";; *) echo "$MACROS";; esac'
    for name in ("one", "two"):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "link").symlink_to("one")

    def library(name: str, version: str = "12.2", macros: str = "__AVX2__", **options: Any) -> Path:
        for variable, value in {"CXX": str(tmp_path / name), "VERSION": version, "MACROS": macros}.items():
            monkeypatch.setenv(variable, value)
        return compiled(**options)

    found = [
        library("one"),
        library("two"),
        library("one", version="12.3"),
        library("one", macros="__AVX512F__"),
        library("one", architecture="x86-64"),
        library("one", defines=["TRTFORGE_WITHOUT_AMX"]),
    ]
    assert len(set(found)) == len(found)
    assert library("link") == library("one") == found[0]


def test_without_a_compiler_torch_computes(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    bindings._native.cache_clear()
    assert native() is None
    assert "there is no C++ compiler" in caplog.text
    bindings._native.cache_clear()


def test_a_compiler_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler_ = tmp_path / "c++"
    compiler_.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "fatal error: no omp" >&2\nexit 1\n')
    compiler_.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler_))
    monkeypatch.setenv("TRTFORGE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(CompileError, match="the compiler failed: fatal error: no omp"):
        compiled()
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_others_can_write_to_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one behind a link: the library goes to the user's own temporary directory."""
    monkeypatch.setattr(compiler, "_build", lambda compiler, flags, library: library.touch())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = tmp_path / f"trtforge-{os.getuid()}" / "kernels"
    for name in ("shared", "linked"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv("TRTFORGE_CACHE", str(tmp_path / name))
    (tmp_path / "shared" / "kernels").mkdir()
    (tmp_path / "shared" / "kernels").chmod(0o777)
    (tmp_path / "linked" / "kernels").symlink_to(tmp_path / "shared")
    for name in ("shared", "linked"):
        monkeypatch.setenv("TRTFORGE_CACHE", str(tmp_path / name))
        assert compiled().parent == own
    assert list((tmp_path / "shared" / "kernels").iterdir()) == []


def test_a_cache_without_room_is_used_only_for_what_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiler, "_build", lambda compiler, flags, library: library.touch())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TRTFORGE_CACHE", str(tmp_path / "cache"))
    held = compiled()
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=1000))
    assert compiled() == held == tmp_path / "cache" / "kernels" / held.name
    held.unlink()
    with caplog.at_level("INFO"):
        assert compiled().parent == tmp_path / f"trtforge-{os.getuid()}" / "kernels"
    assert f"the CPU kernels are not kept in the cache: {held.parent} has only 1,000 free bytes" in caplog.text


def test_a_temporary_directory_of_others_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TRTFORGE_CACHE", "off")
    (tmp_path / f"trtforge-{os.getuid()}").mkdir()
    (tmp_path / f"trtforge-{os.getuid()}").chmod(0o777)
    with pytest.raises(CompileError, match="writable by others"):
        compiled()


def test_kernels_that_multiply_wrong_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[str, ...]] = []

    def compiled_with(defines: tuple[str, ...]) -> Path:
        tried.append(tuple(defines))
        return compiled()

    monkeypatch.setattr(bindings, "compiled", compiled_with)
    monkeypatch.setattr(bindings, "multiplies_right", lambda _: len(tried) == 2)
    assert bindings._native.__wrapped__() is not None
    assert tried == [(), ("TRTFORGE_WITHOUT_AMX",)]
    monkeypatch.setattr(bindings, "multiplies_right", lambda _: False)
    assert bindings._native.__wrapped__() is None


def test_a_wrong_product_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = kernels_at(NATIVE)
    assert bindings.multiplies_right(kernels)
    monkeypatch.setattr(kernels, "multiplies", True)
    monkeypatch.setattr(kernels, "linear", lambda x, *_: torch.ones(len(x), 32))
    assert not bindings.multiplies_right(kernels)


def test_the_sources_travel_with_the_package() -> None:
    assert {path.suffix for path in compiler.SOURCES.iterdir()} == {".cpp", ".h"}
