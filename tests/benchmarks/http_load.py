"""`python -m tests.benchmarks.http_load PORT CONNECTIONS REQUESTS STREAM`: an HTTP client that costs little.

Sends the same request for completions over kept-alive connections. Prints JSON: seconds of all, and of each request.
"""

import asyncio
import json
import sys
import time

import uvloop

PROMPT = "Return the number of"
MAX_TOKENS = 32


async def _load(port: int, connections: int, requests: int, *, stream: bool) -> dict[str, object]:
    values = {"model": "ensemble", "prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0, "stream": stream}
    body = json.dumps(values).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}"
    message = head.encode() + b"\r\n\r\n" + body
    taken: list[float] = []
    left = requests

    async def one() -> None:
        nonlocal left
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        while left > 0:
            left -= 1
            start = time.perf_counter()
            writer.write(message)
            await _answer(reader)
            taken.append(time.perf_counter() - start)
        writer.close()

    start = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(connections)))
    return {"seconds": time.perf_counter() - start, "taken": taken}


async def _answer(reader: asyncio.StreamReader) -> None:
    """Read one response. Raises ValueError unless it is 200."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if b" 200 " not in head.split(b"\r\n", 1)[0]:
        raise ValueError(head.decode())
    if b"content-length: " in head:
        await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
        return
    await reader.readuntil(b"0\r\n\r\n")


def main(port: int, connections: int, requests: int, *, stream: bool) -> None:
    """Measure."""
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    json.dump(asyncio.run(_load(port, connections, requests, stream=stream)), sys.stdout)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), stream=sys.argv[4] == "true")
