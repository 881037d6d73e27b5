"""Runs one command of trtforge in a fork of a process that has imported everything, and watches it.

A fresh interpreter takes seconds to import torch and transformers, a fork milliseconds. The parent must compute neither
with torch nor digests of files: the threads that do so would be missing in its forks.
"""

import faulthandler
import gc
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

CPU_SECONDS, WALL_SECONDS, MOST_MEMORY = 10, 40, 1 << 30
"""A case hangs when it computes, or waits, longer than this; `MOST_MEMORY`: bytes that it may add."""
_ADDRESS_SPACE = 6 << 30
_DEFECT = 70


@dataclass(frozen=True)
class Outcome:
    """How a command ended. `status`: negative for a signal. `memory`: bytes above those of the parent."""

    status: int
    seconds: float
    memory: int
    stdout: str
    stderr: str
    timed_out: bool


def warm_up() -> None:
    """Import what commands import, before the first fork."""
    import tokenizers  # noqa: F401
    import torch
    import transformers  # noqa: F401
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401

    import trtforge.cli.app
    import trtforge.convert.stage
    import trtforge.package.stage
    import trtforge.pipeline.dry_run
    import trtforge.pipeline.migration
    import trtforge.runtime.text
    import trtforge.serve.stage
    import trtforge.verify.stage  # noqa: F401

    torch.set_num_threads(1)
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "TRTFORGE_CACHE": "off", "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    gc.collect()
    gc.freeze()


def run_forked(words: Sequence[str], directory: Path, logs: Path) -> Outcome:
    """Run `trtforge` with these words in `directory`; what it says goes to files in `logs`."""
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        _child(words, directory, logs)
    timed_out = False
    while True:
        done, raw, usage = os.wait4(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() - started > WALL_SECONDS:
            timed_out = True
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.002)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)  # what it left
    status = os.waitstatus_to_exitcode(raw)
    timed_out = timed_out or status in (-signal.SIGXCPU, -signal.SIGKILL)
    said = [(logs / name).read_bytes().decode("utf-8", "replace") for name in ("stdout", "stderr")]
    start = logs / "start"
    base = int(start.read_text()) if start.exists() else 0  # less than the parent's: mapped files come back by use
    memory = max(0, usage.ru_maxrss * 1024 - base)
    return Outcome(status, time.monotonic() - started, memory, said[0], said[1], timed_out)


def _child(words: Sequence[str], directory: Path, logs: Path) -> None:
    status = _DEFECT
    try:
        os.setsid()
        os.chdir(directory)
        (logs / "start").write_text(str(_resident()))
        for number, name in ((1, "stdout"), (2, "stderr")):
            descriptor = os.open(logs / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(descriptor, number)
        sys.stdin = open(os.devnull)  # noqa: SIM115
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        faulthandler.enable(file=2)
        faulthandler.register(signal.SIGXCPU, file=2, chain=True)
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 2))
        resource.setrlimit(resource.RLIMIT_AS, (_address_space() + _ADDRESS_SPACE, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        status = _run(words)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _run(words: Sequence[str]) -> int:
    from trtforge.cli.app import main

    sys.argv = ["trtforge", *words]
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    return 0


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
