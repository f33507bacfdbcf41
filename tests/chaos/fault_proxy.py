"""A TCP proxy that does to connections what networks do: cuts them, loses replies, delays and stalls.

A lost reply is the hard one: the server has executed the command, and the client sees the connection end.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass, field

CHUNK = 65536


@dataclass(slots=True, eq=False)
class _Link:
    """One proxied connection. `losing`: bytes from the server are thrown away, and the first ones end it."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    losing: bool = False
    flowing: asyncio.Event = field(default_factory=asyncio.Event)

    def cut(self) -> None:
        for writer in (self.client, self.server):
            writer.transport.abort()


class FaultProxy:
    """Forwards a loopback port to `target_port`. Faults strike connections that exist; new ones are whole."""

    def __init__(self, target_port: int, rng: random.Random) -> None:
        self._target_port = target_port
        self._rng = rng
        self._links: set[_Link] = set()
        self._server: asyncio.Server | None = None
        self._delay_s = 0.0
        self.refusing = False
        self.port = 0

    async def __aenter__(self) -> FaultProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut(1.0)
        await self._server.wait_closed()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def connections(self) -> int:
        return len(self._links)

    def cut(self, share: float) -> None:
        """End a share of the connections at once."""
        for link in self._some(share):
            link.cut()

    def lose_replies(self, share: float) -> None:
        """Let a share of the connections end instead of carrying their next reply."""
        for link in self._some(share):
            link.losing = True

    def delay(self, seconds: float) -> None:
        """From now on every piece takes so much longer, either way; 0 ends that."""
        self._delay_s = seconds

    def stall(self, share: float) -> None:
        """Hold up a share of the connections, open as they are, until `resume`."""
        for link in self._some(share):
            link.flowing.clear()

    def resume(self) -> None:
        for link in self._links:
            link.flowing.set()

    def _some(self, share: float) -> list[_Link]:
        links = list(self._links)
        return links if share >= 1 else [link for link in links if self._rng.random() < share]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self.refusing:
                raise ConnectionRefusedError
            from_server, to_server = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()
            return
        link = _Link(client=writer, server=to_server)
        link.flowing.set()
        self._links.add(link)
        try:
            there = asyncio.create_task(self._carry(link, reader, to_server))
            back = asyncio.create_task(self._carry(link, from_server, writer, replies=True))
            await asyncio.wait({there, back}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._links.discard(link)
            link.cut()
            for way in (there, back):
                way.cancel()

    async def _carry(
        self, link: _Link, source: asyncio.StreamReader, sink: asyncio.StreamWriter, replies: bool = False
    ) -> None:
        with contextlib.suppress(OSError):
            while piece := await source.read(CHUNK):
                if self._delay_s:
                    await asyncio.sleep(self._delay_s * self._rng.random() * 2)
                await link.flowing.wait()
                if replies and link.losing:
                    return
                sink.write(piece)
                await sink.drain()
