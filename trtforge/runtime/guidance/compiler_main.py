"""Process that compiles grammars: `python -m trtforge.runtime.guidance.compiler_main SECONDS BYTES`.

It reads a vocabulary, then kinds and texts of guides, from standard input, and writes results to standard output. A
grammar that takes more than SECONDS of CPU time ends it with SIGXCPU, one that takes more than BYTES of memory, its own
included, with status NO_MEMORY; closing its standard input ends it, too.
"""

import os
import signal
import sys
from contextlib import suppress

import xgrammar

from trtforge.core.heap import trim
from trtforge.machine.own_limits import NO_MEMORY, limit_memory, limit_processor_time, write_no_core_dump
from trtforge.runtime.guidance.compiler_process import COMPILED, REFUSED, receive, send
from trtforge.runtime.guidance.vocabulary_compiler import VocabularyCompiler

_OUT_OF_MEMORY = "std::bad_alloc"  # the message of xgrammar's error


def main() -> int:
    """Compile until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal signals the whole process group; the engine decides
    write_no_core_dump()
    limit_memory(int(sys.argv[2]))
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output printed by a library must not mix with results
    with suppress(EOFError, BrokenPipeError):
        compiler = VocabularyCompiler(xgrammar.TokenizerInfo.deserialize_json(receive(sys.stdin.buffer)))
        while True:
            kind, text = receive(sys.stdin.buffer), receive(sys.stdin.buffer)
            limit_processor_time(int(sys.argv[1]))
            try:
                result, said = COMPILED, compiler.compile(kind, text).serialize_json()
            except MemoryError:
                return NO_MEMORY
            except (RuntimeError, UnicodeError) as error:
                if _OUT_OF_MEMORY in str(error):
                    return NO_MEMORY
                result, said = REFUSED, "it cannot be parsed" if isinstance(error, UnicodeError) else str(error)
            send(answers, result)
            send(answers, said)
            del said
            trim()
    return 0


if __name__ == "__main__":
    sys.exit(main())
