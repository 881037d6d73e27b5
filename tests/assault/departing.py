"""`python -m tests.assault.departing URL STREAMS TOKENS`: a client process with open streams, to be killed or stopped.

Prints `open` when each stream has its first text.
"""

import asyncio
import sys

from tests.assault.client import ask, stubs
from tests.assault.messages import PROMPTS, text_request


async def main(url: str, streams: int, tokens: int) -> None:
    """Read all streams to their ends; those that are refused end early."""
    waiting = streams
    said = False

    async def one(stub: object, number: int) -> None:
        nonlocal waiting, said
        counted = False

        def started(_: object = None) -> None:
            nonlocal waiting, said, counted
            if not counted:
                counted = True
                waiting -= 1
            if waiting == 0 and not said:
                said = True
                print("open", flush=True)

        await ask(stub, text_request(PROMPTS[number % len(PROMPTS)], tokens), within=120, on_text=started)
        started()

    async with stubs(url, streams) as many:
        await asyncio.gather(*(one(many[number % len(many)], number) for number in range(streams)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
