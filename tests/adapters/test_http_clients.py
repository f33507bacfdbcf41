"""What OpenAI's client does beyond asking: forms as classes, streams with helpers, retries, time limits, raw data."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Literal

import httpx2
import openai
import orjson
import pytest
from pydantic import BaseModel

from pagemill.engine.async_engine import AsyncEngine
from pagemill.ingest.client import AsyncClient
from pagemill.ingest.config import QueueConfig
from tests.adapters.http_gateway import ENDLESS, GREEDY, HI, Web, gateway
from tests.contract.conftest import serving

MODEL = "smollm2-135m"
ASKED: dict[str, Any] = {"model": MODEL, "messages": HI, **GREEDY}


class Verdict(BaseModel):
    answer: Literal["yes", "no"]
    score: Literal[1, 2]


def test_forms_as_classes(tried: Any) -> None:
    async def scenario(web: Web) -> None:
        async with web.openai() as client:
            asked = {**ASKED, "max_tokens": 40}
            parsed = await client.chat.completions.parse(**asked, response_format=Verdict)
            assert isinstance(parsed.choices[0].message.parsed, Verdict)
            async with client.chat.completions.stream(**asked, response_format=Verdict) as stream:
                kinds = {event.type async for event in stream}
                final = await stream.get_final_completion()
            assert {"content.delta", "content.done", "chunk"} <= kinds
            assert final.choices[0].message.parsed == parsed.choices[0].message.parsed
            answer = await client.responses.parse(
                model=MODEL, input="Is it?", temperature=0, max_output_tokens=40, text_format=Verdict
            )
            assert isinstance(answer.output_parsed, Verdict)
            with pytest.raises(openai.LengthFinishReasonError):
                await client.chat.completions.parse(**{**ASKED, "max_tokens": 2}, response_format=Verdict)

    tried(scenario)


def test_choices_and_raw_answers(tried: Any) -> None:
    async def scenario(web: Web) -> None:
        async with web.openai() as client:
            body = {**ASKED, "n": 3, "temperature": 1.2, "seed": 5, "logprobs": True, "top_logprobs": 1}
            raw = await client.chat.completions.with_raw_response.create(**body)
            assert raw.headers["x-request-id"] == raw.request_id and raw.http_response.status_code == 200
            completion = raw.parse()
            assert [choice.index for choice in completion.choices] == [0, 1, 2]
            for choice in completion.choices:
                assert choice.logprobs and choice.logprobs.content
                joined = b"".join(bytes(entry.bytes or ()) for entry in choice.logprobs.content)
                assert joined.decode(errors="replace").startswith(choice.message.content or "")
            async with client.chat.completions.with_streaming_response.create(**ASKED) as answer:
                assert orjson.loads(await answer.read())["object"] == "chat.completion"

    tried(scenario)


def test_a_client_waits_as_long_as_it_is_told_and_asks_again(tried: Any, engine: AsyncEngine) -> None:
    """A second generation is over the tenant's limit: 429, tried again by the client once the first has been left."""

    async def scenario(web: Web) -> None:
        async with web.openai() as client:
            first = await client.completions.create(
                model=MODEL, prompt=ENDLESS["prompt"], max_tokens=300, stream=True, extra_body={"ignore_eos": True}
            )
            async for chunk in first:
                if chunk.choices[0].text:
                    break
            with pytest.raises(openai.RateLimitError) as refused:
                await client.chat.completions.create(**ASKED)
            told = refused.value.response.headers
            assert int(told["retry-after-ms"]) > 0 and told["x-should-retry"] == "true"
            seen: list[int] = []

            async def watch(answer: httpx2.Response) -> None:
                seen.append(answer.status_code)
                if answer.status_code == 429:
                    await first.close()

            http = openai.DefaultAsyncHttpxClient(event_hooks={"response": [watch]})
            async with web.openai(max_retries=3, http_client=http) as patient:
                assert (await patient.chat.completions.create(**ASKED)).choices
            assert seen[0] == 429 and seen[-1] == 200

    tried(scenario, http_tenant_requests=1)


@pytest.mark.parametrize("reason", ["queue_full", "no_engine"])
def test_a_client_comes_back_when_the_queue_takes_it(
    play: Any, engine: AsyncEngine, queue_config: QueueConfig, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """Refused once with 503; while the client waits, as long as it was told, there comes to be room, or an engine."""
    if reason == "queue_full":
        config = queue_config.replace(max_queued_requests=1)
    else:
        config = queue_config.replace(refuse_without_engine=True)

    async def scenario() -> None:
        refused: list[httpx2.Response] = []
        waited: list[float] = []

        async def watch(answer: httpx2.Response) -> None:
            refused.extend([answer] if answer.status_code == 503 else [])

        async with contextlib.AsyncExitStack() as stack:
            queue = await stack.enter_async_context(AsyncClient(config))
            first = await queue.submit("x", max_tokens=1) if reason == "queue_full" else None

            async def wait(seconds: float) -> None:
                waited.append(seconds)
                if first is not None:
                    await first.cancel()
                await stack.enter_async_context(serving(engine, config))

            monkeypatch.setattr(openai._base_client.anyio, "sleep", wait)
            web = await stack.enter_async_context(gateway(config))
            http = openai.DefaultAsyncHttpxClient(event_hooks={"response": [watch]})
            client = await stack.enter_async_context(web.openai(max_retries=2, http_client=http))
            answer = await client.chat.completions.create(**ASKED)
            monkeypatch.undo()
            assert answer.choices[0].message.content
        (only,) = refused
        assert orjson.loads(only.content)["error"]["code"] == reason
        assert only.headers["x-should-retry"] == "true"
        assert waited == [int(only.headers["retry-after-ms"]) / 1000]

    play(scenario())


def test_a_client_that_gives_up_ends_its_generation(tried: Any, engine: AsyncEngine) -> None:
    async def scenario(web: Web) -> None:
        async with web.openai(timeout=0.5) as client:
            with pytest.raises(openai.APITimeoutError):
                await client.completions.create(
                    model=MODEL, prompt=ENDLESS["prompt"], max_tokens=300, extra_body={"ignore_eos": True}
                )
        async with asyncio.timeout(60):
            while engine.num_live:
                await asyncio.sleep(0.005)

    tried(scenario)
