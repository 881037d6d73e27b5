"""Statuses of an engine process, and one that only answers its supervisor."""

import socket
import threading
from dataclasses import replace
from pathlib import Path

from trtforge.engine_process.control import ClientStatus, EngineStatus
from trtforge.engine_process.frames import Frame, FrameReader

ENGINE = EngineStatus(
    pid=10,
    state="serving",
    running=0,
    waiting=0,
    generated_tokens=0,
    finished=0,
    refused=0,
    cut=0,
    stalled_seconds=0.0,
    error="",
    hint="",
    clients=(),
    worker_pids=(),
)


def client(unanswered: int = 0, silent: float = 0.0, pid: int = 20) -> ClientStatus:
    """The text model's process."""
    return ClientStatus("ensemble", pid, unanswered, silent)


class FakeEngine:
    """An engine process without an engine: answers on a socket with the status that it was given."""

    def __init__(self, path: Path, status: EngineStatus = ENGINE) -> None:
        self.status = status
        self.asked: list[str] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        """Answer nobody any more."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _run(self) -> None:
        while True:
            try:
                channel, _ = self._listener.accept()
            except OSError:
                return
            with channel:
                reader, frames = FrameReader(), list[Frame]()
                while not frames and (data := channel.recv(4096)):
                    frames = list(reader.feed(data))
                for frame in frames:
                    channel.sendall(Frame(self._answer(frame)).encode())

    def _answer(self, frame: Frame) -> dict[str, object]:
        kind = frame.header["type"]
        self.asked.append(kind)
        answer = {"type": kind, "number": frame.header["number"]}
        if kind == "status":
            return {**answer, "status": self.status.encode()}
        if kind == "cut":
            cut = self.status.running + self.status.waiting
            self.status = replace(self.status, running=0, waiting=0, cut=cut)
            return {**answer, "cut": cut}
        self.status = replace(self.status, state="draining")
        return answer
