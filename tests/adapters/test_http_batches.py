"""Files and batches by OpenAI's client: progress, errors, cancelling, and another gateway that goes on."""

from __future__ import annotations

import asyncio
import codecs
from typing import Any

import openai
import orjson
import pytest

from pagemill.adapters.http import batch_runner
from pagemill.ingest.config import QueueConfig
from tests.adapters.http_gateway import HI, Web, gateway

CHAT = "/v1/chat/completions"


def line(name: Any, body: dict[str, Any] | None = None, url: str = CHAT, **more: Any) -> bytes:
    given = {"messages": HI, "max_tokens": 3, "temperature": 0} if body is None else body
    return orjson.dumps({"custom_id": name, "method": "POST", "url": url, "body": given, **more})


async def ended(client: openai.AsyncOpenAI, batch_id: str) -> Any:
    async with asyncio.timeout(60):
        while (batch := await client.batches.retrieve(batch_id)).status not in batch_runner.FINAL:
            await asyncio.sleep(0.05)
    return batch


def test_files(tried: Any) -> None:
    async def scenario(web: Web) -> None:
        data = b"\n".join(b"%07d" % number for number in range(200_000))  # several pieces
        async with web.openai() as client:
            made = await client.files.create(file=("numbers.txt", data), purpose="batch")
            assert (made.bytes, made.filename, made.status) == (len(data), "numbers.txt", "processed")
            assert (await client.files.content(made.id)).content == data
            assert [item.id async for item in await client.files.list()] == [made.id]
            assert (await client.files.delete(made.id)).deleted
            for call in (client.files.retrieve, client.files.content, client.files.delete):
                with pytest.raises(openai.NotFoundError):
                    await call(made.id)
            with pytest.raises(openai.APIStatusError) as refused:
                await client.files.create(file=("big", b"x" * 3_000_000), purpose="batch")
            assert refused.value.status_code == 413
            with pytest.raises(openai.BadRequestError, match="purpose"):
                await client.files.create(file=("x", b"x"), purpose="vision")
            assert [item.id async for item in await client.files.list()] == []
        form = "multipart/form-data"
        for data, kind in ((b"x", form), (b"--b\r\n", f"{form}; boundary=b"), (b"{}", "application/json")):
            answer = await web.ask("POST", "/v1/files", data=data, headers={"Content-Type": kind})
            assert answer.status in (400, 415) and answer.error
        fields = (
            (b'name="file"; filename="\xe4.jsonl"', b"{}", 200, None),  # a terminal in Latin-1
            (b'name="\xe4"', b"x", 400, "\ufffd"),
            (b'name="_charset_"', b"x" * 99, 400, "body"),
        )
        for named, data, status, param in fields:
            part = b"--b\r\nContent-Disposition: form-data; " + named + b"\r\n\r\n" + data + b"\r\n"
            purpose = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n'
            answer = await web.ask(
                "POST", "/v1/files", data=part + purpose, headers={"Content-Type": f"{form}; boundary=b"}
            )
            assert answer.status == status, (named, answer.text)
            assert answer.json["filename"] == "\ufffd.jsonl" if param is None else answer.error["param"] == param

    tried(scenario, http_max_file_bytes=2_000_000)


def test_a_batch_from_file_to_files(tried: Any) -> None:
    async def scenario(web: Web) -> None:
        lines = [line(f"line {number}") for number in range(6)]
        lines[2] = line("bad", {"messages": HI, "max_tokens": 0})
        lines[4] = line("two", {"messages": HI, "max_tokens": 2, "n": 2})
        async with web.openai() as client:
            file = await client.files.create(
                file=("in.jsonl", codecs.BOM_UTF8 + b"\r\n".join(lines) + b"\n\n"), purpose="batch"
            )
            made = await client.batches.create(
                input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"a": "b"}
            )
            assert made.status == "validating"
            batch = await ended(client, made.id)
            assert batch.status == "completed" and batch.metadata == {"a": "b"}
            counts = batch.request_counts
            assert (counts.total, counts.completed, counts.failed) == (6, 5, 1)
            output = (await client.files.content(batch.output_file_id)).text.splitlines()
            found = [orjson.loads(item) for item in output]
            assert [item["custom_id"] for item in found] == ["line 0", "line 1", "line 3", "two", "line 5"]
            assert all(item["response"]["status_code"] == 200 for item in found)
            assert len(found[3]["response"]["body"]["choices"]) == 2
            (error,) = (await client.files.content(batch.error_file_id)).text.splitlines()
            wrong = orjson.loads(error)
            assert (wrong["custom_id"], wrong["response"]["status_code"]) == ("bad", 400)
            assert wrong["response"]["body"]["error"]["param"] == "max_tokens"
            assert [item.id async for item in await client.batches.list()] == [made.id]

    tried(scenario)


BAD_FILES = [
    (b"{}", "invalid_custom_id"), (b"nonsense", "invalid_json_line"), (b"", "empty_file"), (b"[]", "invalid_json_line"),
    (line("a") + b"\n" + line("a"), "duplicate_custom_id"), (line("a", url="/v1/embeddings"), "invalid_url"),
    (line("a", method="GET"), "invalid_method"), (line("a", body=None) [:-1], "invalid_json_line"),
    (b"[" * 4_000_000, "line_too_long"),
]  # fmt: skip


def test_files_that_are_no_batch(tried: Any) -> None:
    async def scenario(web: Web) -> None:
        async with web.openai() as client:
            for data, code in BAD_FILES:
                file = await client.files.create(file=("in.jsonl", data), purpose="batch")
                made = await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
                batch = await ended(client, made.id)
                assert (batch.status, batch.errors.data[0].code) == ("failed", code), data
            for wrong in ({"endpoint": "/v1/embeddings"}, {"completion_window": "1h"}, {"input_file_id": "file-1"}):
                body = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h", **wrong}
                answer = await web.post("/v1/batches", body)
                assert (answer.status, answer.error["param"]) == (400, next(iter(wrong)))
        assert (await web.get("/v1/batches/batch_1")).status == 404

    tried(scenario)


def test_cancelling_and_going_on_elsewhere(
    tried: Any, queue_config: QueueConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway that leaves in the middle of a batch leaves it to another, and no line is generated twice."""
    monkeypatch.setattr(batch_runner, "LOOK_EVERY_S", 0.1)
    monkeypatch.setattr(batch_runner, "BEAT_S", 0.05)

    async def scenario(web: Web) -> None:
        body = {"messages": HI, "max_tokens": 12, "ignore_eos": True}
        data = b"\n".join(line(str(number), body) for number in range(10))
        async with web.openai() as client:
            file = await client.files.create(file=("in.jsonl", data), purpose="batch")
            made = await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
            async with asyncio.timeout(60):
                while not (await client.batches.retrieve(made.id)).request_counts.completed:  # type: ignore[union-attr]
                    await asyncio.sleep(0.02)
        await web.process.stop(0)
        async with gateway(queue_config, http_batch_requests=3) as other, other.openai() as client:
            assert (await client.batches.retrieve(made.id)).status == "in_progress"
            batch = await ended(client, made.id)
            assert (batch.status, batch.request_counts.completed) == ("completed", 10)
            output = (await client.files.content(batch.output_file_id)).text.splitlines()
            assert [orjson.loads(item)["custom_id"] for item in output] == [str(number) for number in range(10)]
            text = (await other.get("/metrics")).text
            assert 'pagemill_queue_events_total{event="completed",queue="default"} 10.0' in text
            long = {"messages": HI, "max_tokens": 300, "ignore_eos": True}
            data = b"\n".join(line(str(number), long) for number in range(8))
            file = await client.files.create(file=("in.jsonl", data), purpose="batch")
            made = await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
            assert (await client.batches.cancel(made.id)).status in ("cancelling", "cancelled")
            batch = await ended(client, made.id)
            assert batch.status == "cancelled" and batch.cancelled_at and batch.request_counts.failed == 8
            errors = (await client.files.content(batch.error_file_id)).text.splitlines()
            assert {orjson.loads(item)["error"]["code"] for item in errors} == {"batch_cancelled"} and len(errors) == 8

    tried(scenario, http_batch_requests=3)


def test_a_batch_of_responses(tried: Any) -> None:
    async def scenario(web: Web) -> None:
        url = "/v1/responses"
        good = {"input": "Say hello.", "max_output_tokens": 3, "temperature": 0}
        lines = [line("a", good, url), line("b", {**good, "stream": True}, url)]
        lines.append(line("c", {**good, "previous_response_id": "resp_x"}, url))
        async with web.openai() as client:
            file = await client.files.create(file=("x.jsonl", b"\n".join(lines)), purpose="batch")
            batch = await client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")
            done = await ended(client, batch.id)
            assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", 1, 2)
            answer = orjson.loads((await client.files.content(done.output_file_id)).content)["response"]["body"]
            whole = await client.responses.create(model="smollm2-135m", **good)
            assert answer["object"] == "response" and answer["output"][0]["content"][0]["text"] == whole.output_text
            errors = (await client.files.content(done.error_file_id)).content.splitlines()
            assert [orjson.loads(item)["response"]["body"]["error"]["param"] for item in errors] == [
                "stream",
                "previous_response_id",
            ]

    tried(scenario)
