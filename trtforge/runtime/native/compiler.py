"""Compiles the kernels for this processor once, and keeps the library for later processes.

The library's file name contains a digest of everything that affects the machine code: sources, flags, compiler and the
instruction set of this processor. The file ends with a digest of its other bytes, because loading a truncated library
crashes the process.
"""

import hashlib
import logging
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

from trtforge.core.cache import cache_directory
from trtforge.core.locks import locked_by
from trtforge.machine.cgroups import processors
from trtforge.machine.compiler import find_compiler
from trtforge.machine.host import Host

SOURCES = Path(__file__).parent / "source"
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fopenmp",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
)
LINK_FLAGS = ("-shared", "-fopenmp")
NATIVE = "native"
"""-march value for the processor that compiles."""
VARIABLE = "TRTFORGE_KERNELS"
"""Environment variable; with the value `torch` the kernels are not used."""
_ROOM = 8 * 2**20  # bytes; the library and its objects take 3 MB
_TIMEOUT = 300.0  # seconds for one source file; the slowest takes 15
_LOG = logging.getLogger(__name__)


class CompileError(Exception):
    """The kernels could not be compiled; the message says why."""


def kernels_wanted() -> bool:
    """Whether to use kernels if they can be compiled."""
    return os.environ.get(VARIABLE) != "torch"


def compile_ahead() -> None:
    """Compile the library, if it is wanted, before another process needs it. That process reports a failure."""
    if kernels_wanted():
        with suppress(CompileError):
            compiled()


def compiled(defines: Sequence[str] = (), architecture: str = NATIVE) -> Path:
    """Path of the compiled library, which is built if it does not exist yet. Raises CompileError.

    The compiler must use the OpenMP library that torch uses. `defines`: macros; `architecture`: -march. Both are for
    tests, except for a processor with broken AMX tile registers.
    """
    compiler = find_compiler(Host())
    if compiler is None:
        raise CompileError("there is no C++ compiler (c++ or g++; CXX names another)")
    flags = (*FLAGS, f"-march={architecture}", *(f"-D{name}" for name in defines))
    name = f"kernels-{_digest(compiler, flags)}.so"
    directory = _directory(name)
    library = directory / name
    try:
        if not _is_whole(library):
            waiting = partial(_LOG.info, "another process compiles the CPU kernels: waiting for it")
            with locked_by(library.with_suffix(".lock"), waiting=waiting):
                if not _is_whole(library):
                    _build(compiler, flags, library)
    except OSError as error:
        raise CompileError(f"{directory}: {error.strerror}") from error
    return library


def _directory(name: str) -> Path:
    """The directory for library `name`, which no other user can write to. Raises CompileError."""
    base = cache_directory()
    if base is not None:
        try:
            return _with_room(_private(base / "kernels"), name)
        except CompileError as error:  # the cache is shared by several users, read-only or full
            _LOG.info("the CPU kernels are not kept in the cache: %s", error)
    # Another user may have created this directory.
    return _private(_private(Path(tempfile.gettempdir()) / f"trtforge-{os.getuid()}") / "kernels")


def _with_room(directory: Path, name: str) -> Path:
    if not (directory / name).exists() and (free := shutil.disk_usage(directory).free) < _ROOM:
        raise CompileError(f"{directory} has only {free:,} free bytes")
    return directory


def _private(directory: Path) -> Path:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.lstat()
    except OSError as error:
        raise CompileError(f"{directory}: {error.strerror}") from error
    if not os.access(directory, os.W_OK):
        raise CompileError(f"{directory} is not writable")
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or not stat.S_ISDIR(found.st_mode):
        raise CompileError(f"{directory} is a link, belongs to another user or is writable by others")
    return directory


def _digest(compiler: Sequence[str], flags: Sequence[str]) -> str:
    """Digest of sources, flags and compiler. It includes the compiler's path: wrappers of it print the same version.

    It includes the predefined macros, which list the instruction sets that `native` stands for here: machines that
    share a cache may differ.
    """
    sha = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        sha.update(source.name.encode() + b"\0" + source.read_bytes())
    version = _run((*compiler, "--version"), SOURCES)
    macros = _run((*compiler, *flags, "-dM", "-E", "-x", "c++", os.devnull), SOURCES)
    for text in (str(Path(compiler[0]).resolve()), *compiler[1:], *flags, *LINK_FLAGS, version, macros):
        sha.update(text.encode() + b"\0")
    return sha.hexdigest()[:32]


def _build(compiler: Sequence[str], flags: Sequence[str], library: Path) -> None:
    """Compile and link the sources, and move the result to `library` atomically. Raises CompileError and OSError.

    One compiler per processor runs at a time; each takes up to 300 MB. Intermediate files are in a directory next to
    the library, with its name; a process that was killed may have left some there.
    """
    if library.exists():
        _LOG.warning("%s is damaged: the CPU kernels are compiled again", library)
    else:
        _LOG.info("compiling the CPU kernels for this processor, once: they are kept in %s", library.parent)
    directory = library.with_suffix("")
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(mode=0o700)
    try:
        sources = sorted(SOURCES.glob("*.cpp"), key=lambda source: (-source.stat().st_size, source.name))
        objects = [f"{source.stem}.o" for source in sources]
        commands = [
            (*compiler, *flags, "-c", str(source), "-o", target)
            for source, target in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(processors()) as pool:
            list(pool.map(partial(_run, directory=directory), commands))
        linked = directory / "kernels.so"
        _run((*compiler, *LINK_FLAGS, "-o", str(linked), *objects), directory)
        _seal(linked)
        linked.replace(library)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _seal(library: Path) -> None:
    """Append a library's digest to its file; loaders ignore it."""
    digest = hashlib.sha256(library.read_bytes()).digest()
    with library.open("ab") as file:
        file.write(digest)


def _is_whole(library: Path) -> bool:
    """Whether a library exists and ends with the digest of its content. Raises OSError."""
    try:
        content = library.read_bytes()
    except FileNotFoundError:
        return False
    size = hashlib.sha256().digest_size
    return hashlib.sha256(content[:-size]).digest() == content[-size:]


def _run(command: Sequence[str], directory: Path) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT, cwd=directory)
    except subprocess.TimeoutExpired as error:
        raise CompileError(f"the compiler took more than {_TIMEOUT:.0f} s") from error
    except OSError as error:
        raise CompileError(f"{command[0]}: {error.strerror}") from error
    if done.returncode != 0:
        raise CompileError(f"the compiler failed: {_first_error(done.stderr)}")
    return done.stdout


def _first_error(text: str) -> str:
    lines = [line for line in text.splitlines() if "error" in line] or text.splitlines() or ["no message"]
    return lines[0]
