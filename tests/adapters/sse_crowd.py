"""A crowd of clients of the gateway on plain sockets: most read their streams, some stop reading after a while."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

FRAME = b"data: {"
END = b"data: [DONE]"


@dataclass(slots=True)
class Reader:
    """What one client saw. `gaps`: seconds between reads that brought frames, once the first had come."""

    gaps: list[float] = field(default_factory=list)
    frames: int = 0
    size: int = 0
    is_whole: bool = False


@dataclass(slots=True)
class Crowd:
    """What a crowd saw. `cut`: of those that stopped reading, how many found their connection closed."""

    readers: list[Reader]
    cut: int = 0

    @property
    def gaps(self) -> list[float]:
        return sorted(gap for reader in self.readers for gap in reader.gaps)

    @property
    def whole(self) -> int:
        return sum(reader.is_whole for reader in self.readers)


def percentile(values: Sequence[float], share: float) -> float:
    """Of values in order."""
    return values[min(len(values) - 1, int(len(values) * share))]


def request(path: str, body: Mapping[str, Any]) -> bytes:
    data = orjson.dumps(body)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


async def read(port: int, asked: bytes, wait_s: float = 0.0) -> Reader:
    """Ask for a stream after a while, and read it to its end."""
    await asyncio.sleep(wait_s)
    seen, last, tail = Reader(), 0.0, b""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(asked)
        while data := await reader.read(1 << 16):
            seen.size += len(data)
            # A frame's mark may be cut by the read; what is counted here has ended before `tail`.
            text = tail + data
            frames = text.count(FRAME)
            tail = text[-(len(END) - 1) :]
            frames -= tail.count(FRAME)
            seen.is_whole = seen.is_whole or END in text
            if frames:
                now = time.perf_counter()
                if seen.frames:
                    seen.gaps.append(now - last)
                seen.frames, last = seen.frames + frames, now
    finally:
        writer.close()
    return seen


class Deaf:
    """A client that asks for a stream, takes its first bytes and then reads nothing any more."""

    def __init__(self, port: int, asked: bytes) -> None:
        self._port = port
        self._asked = asked
        self._socket = socket.socket()

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.setblocking(False)
        await loop.sock_connect(self._socket, ("127.0.0.1", self._port))
        await loop.sock_sendall(self._socket, self._asked)
        await loop.sock_recv(self._socket, 1024)

    def was_cut(self) -> bool:
        """Whether the other side has closed in the middle."""
        data = b""
        try:
            while more := self._socket.recv(1 << 20):
                data += more
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True
        return END not in data

    def close(self) -> None:
        self._socket.close()


async def crowd(
    port: int, asked: bytes, readers: int, *, much: bytes = b"", greedy: int = 0, deaf: int = 0, ramp_s: float = 0.0
) -> Crowd:
    """`readers` clients that read everything, and beside them some that ask for `much`: `greedy` ones, which read it,
    and `deaf` ones, which do not. Those of the first kind come within `ramp_s`. Ends when all who read have ended, and
    tells what the first kind saw."""
    stuck = [Deaf(port, much) for _ in range(deaf)]
    try:
        reading = [asyncio.create_task(read(port, asked, ramp_s * number / readers)) for number in range(readers)]
        beside = [asyncio.create_task(read(port, much)) for _ in range(greedy)]
        await asyncio.gather(*(one.start() for one in stuck))
        seen = Crowd(list(await asyncio.gather(*reading)))
        await asyncio.gather(*beside)
        seen.cut = sum(one.was_cut() for one in stuck)
    finally:
        for one in stuck:
            one.close()
    return seen
