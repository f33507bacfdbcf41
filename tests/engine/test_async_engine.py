"""The asyncio face: increments on the loop, aborts at any moment, one failure told to all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from pagemill.engine.async_engine import MAX_OUTLOOK_S, OUTLOOK_S, OUTLOOK_SHARE, AsyncEngine, outlook_pause
from pagemill.engine.chat import Chat
from pagemill.engine.config import EngineConfig
from pagemill.engine.errors import EngineDeadError, RequestError
from pagemill.engine.outputs import SequenceOutput
from pagemill.engine.prompt import TokenIds
from pagemill.engine.sampling_params import SamplingParams
from tests.engine.tiny_models import CONFIGS, VOCAB, save_model

BOUND_S = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(CONFIGS["llama-gqa"](), tmp_path_factory.mktemp("tiny"))


def run(folder: Path, test: Callable[[AsyncEngine], Coroutine[Any, Any, None]], **settings: Any) -> None:
    fields: dict[str, Any] = {
        "model": str(folder),
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
        "skip_tokenizer_init": True,
        "num_blocks_override": 100,
    }

    async def main() -> None:
        engine = await AsyncEngine.create(EngineConfig(**(fields | settings)))
        try:
            await asyncio.wait_for(test(engine), BOUND_S)
        finally:
            await engine.stop()

    asyncio.run(main())


class Stream:
    """Collects one request's increments; `until` waits for a condition on them."""

    def __init__(self) -> None:
        self.outputs: list[SequenceOutput] = []
        self._changed = asyncio.Event()

    def __call__(self, output: SequenceOutput) -> None:
        assert not self.finished, "an increment after the end"
        assert output.offset == len(self.tokens)
        self.outputs.append(output)
        self._changed.set()

    @property
    def tokens(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]

    @property
    def finished(self) -> bool:
        return bool(self.outputs) and self.outputs[-1].finish_reason is not None

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    async def end(self) -> SequenceOutput:
        await self.until(lambda: self.finished)
        return self.outputs[-1]


async def submit(engine: AsyncEngine, name: str, prompt: list[int], **params: Any) -> Stream:
    fields: dict[str, Any] = {"temperature": 0.0, "max_tokens": 10, "ignore_eos": True}
    request = await engine.prepare(name, TokenIds(prompt), SamplingParams(**(fields | params)))
    stream = Stream()
    engine.submit(request, stream)
    return stream


async def gather(*tasks: Awaitable[SequenceOutput]) -> list[SequenceOutput]:
    return list(await asyncio.gather(*tasks))


def test_the_same_tokens_alone_and_beside_others(folder: Path) -> None:
    async def test(engine: AsyncEngine) -> None:
        alone = await submit(engine, "alone", [1, 2, 3])
        await alone.end()
        streams = [await submit(engine, f"r{n}", [1, 2, 3] if n % 2 else [n, 4]) for n in range(6)]
        ends = await gather(*(stream.end() for stream in streams))
        assert {end.finish_reason for end in ends} == {"length"}
        assert all(stream.tokens == alone.tokens for stream in streams[1::2])
        assert streams[0].outputs[0].started
        assert sum(output.started for output in streams[0].outputs) == 1
        assert engine.num_live == 0
        await engine.check()

    run(folder, test)


def test_abort_before_during_and_after(folder: Path) -> None:
    async def test(engine: AsyncEngine) -> None:
        engine.abort("never heard of")
        at_once = await submit(engine, "at-once", [1] * 50, max_tokens=60)
        engine.abort("at-once")
        running = await submit(engine, "running", [2, 3], max_tokens=100)
        neighbour = await submit(engine, "neighbour", [4, 5], max_tokens=20)
        await running.until(lambda: len(running.tokens) >= 3)
        engine.abort("running")
        engine.abort("running")
        ends = await gather(at_once.end(), running.end(), neighbour.end())
        assert [end.finish_reason for end in ends] == ["cancelled", "cancelled", "length"]
        engine.abort("neighbour")
        assert len(neighbour.tokens) == 20
        await engine.check()

    run(folder, test)


def test_an_abort_can_carry_an_error(folder: Path) -> None:
    async def test(engine: AsyncEngine) -> None:
        stream = await submit(engine, "late", [2, 3], max_tokens=100)
        engine.abort("late", RequestError("deadline_exceeded", "too late"))
        end = await stream.end()
        assert end.finish_reason == "error" and end.error is not None and end.error.code == "deadline_exceeded"

    run(folder, test)


def test_a_live_id_is_refused_and_a_finished_one_is_not(folder: Path) -> None:
    async def test(engine: AsyncEngine) -> None:
        first = await submit(engine, "same", [2, 3], max_tokens=50)
        with pytest.raises(RequestError) as caught:
            await submit(engine, "same", [9])
        assert caught.value.code == "duplicate_id"
        assert (await first.end()).finish_reason == "length"
        assert len(first.tokens) == 50
        again = await submit(engine, "same", [2, 3], max_tokens=5)
        await again.end()
        assert again.tokens == first.tokens[:5]

    run(folder, test)


def test_room_follows_seats_and_blocks(folder: Path) -> None:
    async def test(engine: AsyncEngine) -> None:
        assert engine.has_room()
        one = await submit(engine, "one", [1] * 40, max_tokens=80)
        await one.until(lambda: bool(one.outputs))
        assert engine.has_room()
        two = await submit(engine, "two", [2] * 100, max_tokens=1)
        assert not engine.has_room(), "what waits already needs more than is free"
        await asyncio.wait_for(engine.wait_for_room(), BOUND_S)
        await gather(one.end(), two.end())
        assert engine.has_room()

    run(folder, test, num_blocks_override=9, max_num_seqs=8)


def test_no_seat_no_room(folder: Path) -> None:
    async def test(engine: AsyncEngine) -> None:
        streams = [await submit(engine, f"r{n}", [n], max_tokens=30) for n in range(2)]
        assert not engine.has_room()
        waiting = asyncio.create_task(engine.wait_for_room())
        await gather(*(stream.end() for stream in streams))
        await waiting

    run(folder, test, max_num_seqs=2)


@pytest.mark.parametrize(
    ("prompt", "params", "code", "param"),
    [
        ([], {}, "invalid_request", "prompt"),
        ([VOCAB], {}, "invalid_request", "prompt_token_ids"),
        ([-1], {}, "invalid_request", "prompt_token_ids"),
        ([1] * 128, {}, "prompt_too_long", "prompt"),
        ([1] * 100, {}, "never_fits", "prompt"),
        ([1], {"stop_token_ids": [VOCAB]}, "invalid_request", "stop_token_ids"),
        ([1], {"stop": ["x"]}, "invalid_request", "stop"),
    ],
)
def test_refusals_are_named(folder: Path, prompt: list[int], params: dict[str, Any], code: str, param: str) -> None:
    async def test(engine: AsyncEngine) -> None:
        neighbour = await submit(engine, "neighbour", [4, 5])
        with pytest.raises(RequestError) as caught:
            await submit(engine, "bad", prompt, **params)
        assert (caught.value.code, caught.value.param) == (code, param)
        assert (await neighbour.end()).finish_reason == "length"
        assert engine.num_live == 0

    run(folder, test, num_blocks_override=4)


def test_text_without_a_tokenizer_is_refused(folder: Path) -> None:
    async def test(engine: AsyncEngine) -> None:
        for prompt in ("hello", Chat([{"role": "user", "content": "hello"}])):
            with pytest.raises(RequestError, match="without a tokenizer"):
                await engine.prepare("r", prompt, SamplingParams())  # type: ignore[arg-type]

    run(folder, test)


def test_a_failed_step_ends_the_engine_and_says_so(folder: Path) -> None:
    async def test(engine: AsyncEngine) -> None:
        def fail(output: object) -> list[int]:
            raise RuntimeError("the device is on fire")

        engine._core._runner.execute = fail  # type: ignore[method-assign]
        await submit(engine, "r", [1, 2])
        failure = await engine.wait_for_death()
        assert "on fire" in str(failure)
        with pytest.raises(EngineDeadError):
            await submit(engine, "later", [1])
        with pytest.raises(EngineDeadError):
            await engine.wait_for_room()

    run(folder, test)


def test_past_the_caps_nobody_is_let_in(folder: Path) -> None:
    async def test(engine: AsyncEngine) -> None:
        running = await submit(engine, "running", [1], max_tokens=100)
        await running.until(lambda: bool(running.outputs))
        waiting = [await submit(engine, f"waits{n}", [2] * 10, max_tokens=2) for n in range(2)]
        with pytest.raises(RequestError) as caught:
            await submit(engine, "too many", [3])
        assert caught.value.code == "queue_full" and caught.value.retry_after_ms
        await gather(running.end(), *(stream.end() for stream in waiting))
        await (await submit(engine, "later", [3])).end()
        assert engine.num_live == 0

    run(folder, test, max_num_seqs=1, max_waiting_requests=2)


def test_a_deadline_that_cannot_be_met_is_refused_at_once(folder: Path) -> None:
    async def test(engine: AsyncEngine) -> None:
        async def fill(name: str) -> Stream:
            return await submit(engine, name, [1, 2], max_tokens=100)

        for warm in range(2):  # until rates and lengths are known
            await (await fill(f"warm{warm}")).end()
        before = engine.outlook
        streams = [await fill(f"r{n}") for n in range(180)]  # seconds of work: the benefit of the doubt is half of one
        for stream in streams:  # until the outlook, which is made now and then, knows of them
            await stream.until(lambda stream=stream: stream.finished or engine.outlook is not before)
            if engine.outlook is not before:
                break
        request = await engine.prepare("late", TokenIds([5]), SamplingParams(max_tokens=2, temperature=0.0))
        with pytest.raises(RequestError) as caught:
            engine.submit(request, Stream(), time_left_s=0.001)
        assert caught.value.code == "deadline_unreachable" and caught.value.retry_after_ms
        patient = Stream()
        engine.submit(request, patient, time_left_s=600.0)
        await gather(*(stream.end() for stream in streams), patient.end())

    run(folder, test, max_num_seqs=1)


def test_an_aborted_id_can_be_submitted_again_once_it_is_gone(folder: Path) -> None:
    async def test(engine: AsyncEngine) -> None:
        prepared = await engine.prepare("same", TokenIds([2, 3]), SamplingParams(max_tokens=5))
        first = await submit(engine, "same", [2, 3], max_tokens=100)
        await first.until(lambda: len(first.tokens) >= 2)
        engine.abort("same")
        with pytest.raises(RequestError):
            engine.submit(prepared, Stream())  # at once, while its last step may still be running
        await engine.wait_until_gone("same")
        await engine.wait_until_gone("never heard of")
        again = await submit(engine, "same", [2, 3], max_tokens=5)
        assert (await again.end()).finish_reason == "length"
        assert again.tokens == first.tokens[:2] + again.tokens[2:] and len(again.tokens) == 5

    run(folder, test)


def test_the_longer_an_outlook_takes_the_seldomer_it_is_worked_out() -> None:
    assert outlook_pause(0.0) == outlook_pause(OUTLOOK_S * OUTLOOK_SHARE / 2) == OUTLOOK_S
    assert outlook_pause(2 * OUTLOOK_S * OUTLOOK_SHARE) == pytest.approx(2 * OUTLOOK_S)
    assert outlook_pause(60.0) == MAX_OUTLOOK_S, "who waits is to be told something of today"
