"""One stream of events, without a gateway around it."""

from __future__ import annotations

from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from aiohttp.test_utils import make_mocked_request

from pagemill.adapters.http.sse import DONE, ClientGoneError, SseStream


def stream(writer: Any) -> SseStream:
    writer.write_headers = AsyncMock()
    writer.send_headers = Mock()
    request = make_mocked_request("GET", "/", writer=writer)
    return SseStream(request, write_timeout_s=5, ping_s=5, headers={})


def test_a_client_that_closes_after_the_last_frame_lacks_nothing(run: Any) -> None:
    writer = Mock(write=AsyncMock(), write_eof=AsyncMock(side_effect=ConnectionResetError))

    async def scenario() -> None:
        async with stream(writer) as sse:
            await sse.write(DONE)

    run(scenario())
    writer.write_eof.assert_awaited_once()


def test_a_client_that_closes_before_is_gone(run: Any) -> None:
    writer = Mock(write=AsyncMock(side_effect=ConnectionResetError), write_eof=AsyncMock())

    async def scenario() -> None:
        async with stream(writer) as sse:
            with pytest.raises(ClientGoneError):
                await sse.write(DONE)

    run(scenario())
