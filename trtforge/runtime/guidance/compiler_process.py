"""Starts and ends the process that compiles grammars with unpredictable compilation times."""

import signal
import struct
import subprocess
import threading
from contextlib import suppress
from typing import IO

from trtforge.core.errors import RequestError
from trtforge.core.interpreter import module_arguments, python_environment, python_interpreter
from trtforge.machine.own_limits import NO_MEMORY

MOST_SECONDS = 20
"""CPU time limit of one grammar. Large permitted grammars take five seconds on slow processors."""
_PROGRAM = "trtforge.runtime.guidance.compiler_main"
MOST_MEMORY = 2 << 30
"""Memory limit of the process in bytes; with a vocabulary of 262,144 tokens it has some 500 MB before it compiles."""
MOST_GRAMMAR = 64 << 20
"""Maximum length of a grammar's JSON; each request that is computed may have a grammar of its own."""
COMPILED, REFUSED = "compiled", "refused"
_SIMPLER = "Ask for a simpler one, with fewer parts that may be repeated or left out."
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""numpy's OpenBLAS would take 40 MB of memory for each processor."""
_SIZE = struct.Struct("<I")
_ENCODING = "surrogatepass"  # a guide may contain a lone surrogate, which xgrammar refuses


class CompilerProcess:
    """A compiler process with a vocabulary. It starts with the first grammar, and again after one that took too long.

    xgrammar's compiler cannot be interrupted within a process: other guides would wait minutes for a slow one.
    """

    def __init__(self, vocabulary: str) -> None:
        """`vocabulary`: JSON of xgrammar.TokenizerInfo."""
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def compile(self, kind: str, text: str) -> str:
        """Compile a text of this guide kind to JSON of an xgrammar.CompiledGrammar.

        Raises RequestError if that exceeds `MOST_SECONDS`, `MOST_MEMORY` or `MOST_GRAMMAR`, RuntimeError with the
        compiler's message. Only one thread at a time may call this.
        """
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            for part in (kind, text):
                send(process.stdin, part)
            result, said = receive(process.stdout), receive(process.stdout)
        except (OSError, EOFError):
            status = self._end()
            if status == -signal.SIGXCPU:
                raise RequestError(f"the guide takes longer than {MOST_SECONDS} s to compile", hint=_SIMPLER) from None
            if status == NO_MEMORY:
                raise RequestError(
                    f"the guide takes more than {MOST_MEMORY / 2**30:g} GiB of memory to compile", hint=_SIMPLER
                ) from None
            raise RuntimeError(f"the process that compiles grammars ended with status {status}") from None
        if result == REFUSED:
            raise RuntimeError(said)
        if len(said) > MOST_GRAMMAR:
            raise RequestError(f"the guide's grammar takes more than {MOST_GRAMMAR >> 20} MiB", hint=_SIMPLER)
        return said

    def close(self) -> None:
        """End the process, even while it compiles. No grammar is compiled afterwards."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()

    def _running(self) -> "subprocess.Popen[bytes]":
        with self._lock:
            if self._closed:
                raise RuntimeError("the engine is closed")
            if self._process is not None:
                return self._process
            process = subprocess.Popen(
                [python_interpreter(), *module_arguments(_PROGRAM), str(MOST_SECONDS), str(MOST_MEMORY)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=python_environment() | _ONE_THREAD,
            )
            self._process = process
        assert process.stdin is not None
        with suppress(OSError):  # the first grammar reports that the process has ended
            send(process.stdin, self._vocabulary)
        return process

    def _end(self) -> int:
        with self._lock:
            process, self._process = self._process, None
        assert process is not None
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            with suppress(OSError):
                stream.close()
        return process.wait()


def send(stream: IO[bytes], text: str) -> None:
    """Write a text with its size in bytes. Raises OSError."""
    data = text.encode("utf-8", _ENCODING)
    stream.write(_SIZE.pack(len(data)) + data)
    stream.flush()


def receive(stream: IO[bytes]) -> str:
    """Read a text that `send` wrote. Raises EOFError if the stream ends early."""
    (size,) = _SIZE.unpack(_read(stream, _SIZE.size))
    return _read(stream, size).decode("utf-8", _ENCODING)


def _read(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data
