"""Records a chat in a terminal for the README. `python -m tests.transcript` runs it and writes it there.

The program runs in a pseudo-terminal of 80 columns, with an empty cache, in an empty directory with the recipes beside.
"""

import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time
from fcntl import ioctl
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMMAND = ("trtforge", "run", "recipes/demo-model", "--quant", "int4_awq", "--max-tokens", "24")
QUESTIONS = ("What does len() return?", "/stats", "/exit")
_SIZE = struct.pack("HHHH", 40, 80, 0, 0)
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]|\x1b[=>]")
_PROMPT = b">>> "


def record(directory: Path) -> tuple[str, float]:
    """What the terminal shows at the end, and the seconds until the first prompt."""
    parent, child = pty.openpty()
    ioctl(child, termios.TIOCSWINSZ, _SIZE)
    environment = {**os.environ, "TRTFORGE_CACHE": "off", "TERM": "xterm", "COLUMNS": "80", "NO_COLOR": "1"}
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", *COMMAND], stdin=child, stdout=child, stderr=child, cwd=directory, env=environment
    )
    os.close(child)
    seen, asked, ready = b"", 0, 0.0
    while process.poll() is None or select.select([parent], [], [], 0)[0]:
        if select.select([parent], [], [], 0.1)[0]:
            try:
                seen += os.read(parent, 1 << 16)
            except OSError:  # the other end is closed
                break
        elif seen.endswith(_PROMPT) and asked < len(QUESTIONS):
            ready = ready or time.monotonic() - start
            os.write(parent, f"{QUESTIONS[asked]}\n".encode())
            asked += 1
    os.close(parent)
    if process.wait() != 0 or asked < len(QUESTIONS):
        sys.exit(f"the chat ended with status {process.returncode}:\n{seen.decode(errors='replace')}")
    return as_shown(seen.decode(errors="replace")), ready


def as_shown(output: str) -> str:
    """The lines that stay on the screen: of those that a progress bar rewrites, the last version."""
    shown: list[str] = []
    for line in output.replace("\r\n", "\n").split("\n"):
        moves = len(re.findall(r"\x1b\[1A", line))
        text = _ESCAPES.sub("", line).rpartition("\r")[2].rstrip()
        del shown[len(shown) - moves :]
        shown.append(text)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(shown)).strip()


def main() -> None:
    """Record, and replace the transcript in the README."""
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copytree(ROOT / "recipes" / "demo-model", Path(scratch) / "recipes" / "demo-model")
        text, ready = record(Path(scratch))
    readme = ROOT / "README.md"
    block = f"<!-- transcript -->\n```\n$ {' '.join(COMMAND)}\n{text}\n```\n<!-- end -->"
    old = readme.read_text()
    new = re.sub(r"<!-- transcript -->\n.*?<!-- end -->", lambda _: block, old, flags=re.DOTALL)
    readme.write_text(new)
    print(f"{block}\nfirst prompt after {ready:.1f} s")


if __name__ == "__main__":
    main()
