"""`python -m tests.benchmarks.serving_client URL < REQUEST`: a gRPC client that costs little while it measures.

REQUEST: JSON {prompts, streams, max_tokens}. Prints JSON {tokens, seconds, first, cpu, busy}: tokens of all answers,
seconds to the last, for each request the seconds to its first text, CPU seconds of this process and of the machine.
"""

import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path

from tritonclient.grpc import service_pb2

from tests.assault.h2 import Connection, Reader, messages
from tests.assault.messages import STREAM_METHOD, message, numbers, outputs_of, reply_of, text_inputs

_RECEIVE = 1 << 20


def main(url: str) -> None:
    """Send, receive, then read what was received."""
    given = json.load(sys.stdin)
    inputs = {"return_num_output_tokens": numbers("BOOL", (1, 1), 1)}
    requests = [
        message("ensemble", {**text_inputs(prompt, given["max_tokens"]), **inputs}).SerializeToString()
        for prompt in given["prompts"]
    ]
    connection = Connection(url)
    reader = Reader(connection)
    received: dict[int, list[bytes]] = defaultdict(list)
    sent: dict[int, float] = {}
    first: dict[int, float] = {}
    waiting = iter(requests)

    def submit() -> None:
        following = next(waiting, None)
        if following is not None:
            moment = time.perf_counter()
            sent[connection.open(STREAM_METHOD, following)] = moment

    busy, cpu, start = machine_busy(), time.process_time(), time.perf_counter()
    connection.socket.settimeout(120)
    for _ in range(given["streams"]):
        submit()
    done = 0
    while done < len(requests):
        buffer = connection.socket.recv(_RECEIVE)
        if not buffer:
            raise ConnectionError("the server closed the connection")
        moment = time.perf_counter()
        for stream, payload, ended in reader.feed(buffer):
            if payload:
                first.setdefault(stream, moment - sent[stream])
                received[stream].append(payload)
            if ended:
                done += 1
                submit()
    seconds, cpu, busy = time.perf_counter() - start, time.process_time() - cpu, machine_busy() - busy
    tokens = sum(_tokens(b"".join(received[stream])) for stream in sent)
    result = {"tokens": tokens, "seconds": seconds, "first": list(first.values()), "cpu": cpu, "busy": busy}
    json.dump(result, sys.stdout)


def machine_busy() -> float:
    """CPU seconds that all processes of the machine have used (man 5 proc_stat: all but idle and iowait)."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def _tokens(data: bytes) -> int:
    """The tokens of one answer: the last count that it holds. Raises ValueError if it is an error."""
    count = 0
    for raw in messages(data):
        response = service_pb2.ModelStreamInferResponse.FromString(raw)
        if reply_of(response).error:
            raise ValueError(response.error_message)
        counted = outputs_of(response.infer_response).get("num_output_tokens")
        count = int.from_bytes(counted, "little") if counted else count
    if not count:
        raise ValueError("an answer without a count of its tokens")
    return count


if __name__ == "__main__":
    main(sys.argv[1])
