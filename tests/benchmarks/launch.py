"""`python -m tests.benchmarks.launch COMMAND...`: run it, then print JSON {seconds, rss}.

`seconds` end when everything written is on the disk. `rss` is the peak in bytes, mapped files included. A process of
its
own, and a small one: on Linux a child's peak starts at the size of the process that it was forked from.
"""

import json
import os
import subprocess
import sys
import time


def main() -> None:
    """Exit with the command's status."""
    start = time.perf_counter()
    child = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    os.sync()
    print(json.dumps({"seconds": time.perf_counter() - start, "rss": usage.ru_maxrss * 1024}))
    sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
