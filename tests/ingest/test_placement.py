"""Which engine gets a request: the one that has computed the beginning of its prompt, for a moment."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from pagemill.engine.async_engine import AsyncEngine
from pagemill.engine.config import EngineConfig
from pagemill.engine.request import Request
from pagemill.ingest import scripts
from pagemill.ingest.client import AsyncClient
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.entries import Entry, Offer
from pagemill.ingest.keys import QueueKeys
from pagemill.ingest.placement import LEVELS, MAX_HELD, HeldPrefixes, Offers, beginnings_of, is_wanted
from pagemill.ingest.redis import Client, connect_commands
from pagemill.ingest.rounds import Rounds
from pagemill.ingest.schema import RequestBody
from pagemill.ingest.stream_reader import StreamReader
from pagemill.ingest.worker import Worker
from tests.chaos.model import make_model
from tests.ingest.bare_engine import SHARD, Engine, delta, raw_add, submit

LONG, SHORT = "1long", "0short"


def names(**body: Any) -> list[str]:
    return [beginning.name for beginning in beginnings_of(RequestBody.from_mapping(body))]


def test_beginnings_are_those_of_what_the_model_reads() -> None:
    text = "word " * 1000
    assert [name[0] for name in names(prompt=text)] == ["2", "1", "0"]
    assert names(prompt="short") == []
    assert names(prompt=text) == names(prompt=text + "more", max_tokens=3, tenant="other")
    assert names(prompt=text)[1:] == names(prompt=text[:3000])
    assert not set(names(prompt=text)) & set(names(prompt=text, cache_salt="s"))
    ids = list(range(1000))
    assert [name[0] for name in names(prompt_token_ids=ids)] == ["1", "0"]
    assert names(prompt_token_ids=ids)[1:] == names(prompt_token_ids=[*ids[:64], 5])
    chat = {"messages": [{"role": "system", "content": "s" * 300}, {"role": "user", "content": "a"}]}
    other = {"messages": [chat["messages"][0], {"role": "user", "content": "b"}]}
    assert names(**chat) == names(**other) and len(names(**chat)) == 1
    assert not set(names(**chat)) & set(names(**chat, tools=[{"type": "function", "function": {"name": "f"}}]))
    assert [beginning.share for beginning in beginnings_of(RequestBody(prompt="x" * 512))] == [LEVELS[0] / 512]


def test_an_engine_tells_of_what_it_still_has() -> None:
    cached: set[bytes] = set()
    now = 0.0
    held = HeldPrefixes(cached.__contains__, 16, clock=lambda: now)
    body = RequestBody(prompt="x" * 1024)
    both = beginnings_of(body)
    held.expect(both)
    assert held.names() == [beginning.name for beginning in both]
    request = Request("a", list(range(256)), body.params, seed=1, max_tokens=1)
    held.learn(both, request)
    assert len(held.names()) == 2, "it will be computed"
    request.block_hashes += [b"%d" % number for number in range(16)]
    cached |= {b"3", b"15"}  # the last full blocks of 64 and of 256 tokens
    assert len(held.names()) == 2
    cached.discard(b"15")
    assert held.names() == [both[1].name]
    # Of a prompt whose tokens never came to be nothing is told after a while; nor of one that holds no full block.
    held.expect(beginnings_of(RequestBody(prompt="y" * 300)))
    now = 61.0
    assert held.names() == [both[1].name]
    few = beginnings_of(RequestBody(prompt="z" * 256))
    held.expect(few)
    held.learn(few, Request("b", [1, 2, 3], body.params, seed=1, max_tokens=1))
    assert held.names() == [both[1].name]
    for number in range(MAX_HELD + 5):
        held.expect(beginnings_of(RequestBody(prompt=f"{number:04}" * 64)))
    assert len(held.names()) == MAX_HELD


def test_more_is_taken_for_more_of_the_prompt() -> None:
    for level, most in ((0, 5), (1, 7), (3, 19)):
        offer = Offer("e", f"{level}x", level, running=3)
        assert is_wanted(offer, most) and not is_wanted(offer, most + 1)


def test_who_does_not_take_is_left_alone_for_a_while() -> None:
    now = 0.0
    offers = Offers(0.05, clock=lambda: now)
    offers.avoid("declines", silent=False)
    offers.avoid("silent", silent=True)
    assert sorted(offers.avoided) == ["declines", "silent"]
    now = 1.0
    assert offers.avoided == ["silent"]
    now = 4.0
    assert offers.avoided == [] and offers.may_offer and not Offers(0).may_offer


async def warm(client: Client, owner: str, *beginnings: str) -> None:
    """An engine that lives and has these."""
    await scripts.run_one(client, scripts.open_streams(SHARD, owner))
    await scripts.run_one(client, scripts.renew(SHARD, owner, b"{}", beginnings))


async def told(client: Client, owner: str) -> list[Any]:
    return [fields for _, fields in await client.xrange(SHARD.told(owner))]


def offered(entry: Entry, owner: str) -> Entry:
    return Entry(entry.shard, entry.stream, entry.entry_id, entry.fields, Offer(owner, LONG, 1, 0))


@pytest.mark.parametrize("raw", [False, True])
def test_whoever_begins_first_has_it(on_queue: Any, raw: bool) -> None:
    async def scenario(client: Client) -> None:
        reads, has = Engine(client, "reads"), Engine(client, "has")
        await warm(client, "reads", SHORT)
        await warm(client, "has", SHORT, LONG)
        for name, takes in (("a", True), ("b", False)):
            await (raw_add(client, name) if raw else submit(client, name))
            entry = await reads.take()
            options: dict[str, Any] = {"beginnings": [LONG, SHORT], "running": 2}
            assert await reads.begin(entry, name, **options) == scripts.Offered("has")
            note = (await told(client, "has"))[-1]
            assert note == {b"offer": LONG.encode(), b"from": b"reads", b"stream": b"1", b"running": b"2"} | {
                b"entry": entry.entry_id
            }
            if takes:
                begun = await has.begin(offered(entry, "reads"), name)
                assert isinstance(begun, scripts.BeginReply) and begun.attempt == 1
                # Asked twice, since the reply got lost, it is the same.
                again = await has.begin(offered(entry, "reads"), name)
                assert isinstance(again, scripts.BeginReply) and again.attempt == 1
                assert await reads.begin(entry, name) == "lost"
                assert (await has.append(1, 0, [delta(1)], name)).status == "ok"
            else:
                begun = await reads.begin(entry, name)
                assert isinstance(begun, scripts.BeginReply) and begun.attempt == 1
                assert await has.begin(offered(entry, "reads"), name) == "lost"
                assert (await reads.append(1, 0, [delta(1)], name)).status == "ok"
        assert await client.hget(SHARD.statistics, "placed") == b"1"

    on_queue(scenario)


def test_an_offer_is_made_only_to_who_lives_has_more_and_listens(on_queue: Any) -> None:
    async def scenario(client: Client) -> None:
        engine = Engine(client, "reads")
        await warm(client, "reads", SHORT)
        seconds, _ = await client.time()
        count = 0

        async def outcome(**options: Any) -> Any:
            nonlocal count
            count += 1
            await submit(client, f"r{count}")
            entry = await engine.take()
            return await engine.begin(entry, f"r{count}", **{"beginnings": [LONG, SHORT], "running": 0, **options})

        await warm(client, "has", SHORT)
        assert isinstance(await outcome(), scripts.BeginReply), "as much is not more, and now it has all"
        await warm(client, "reads", SHORT)
        await warm(client, "has", SHORT, LONG)
        assert isinstance(await outcome(running=None), scripts.BeginReply)
        await warm(client, "reads", SHORT)
        assert isinstance(await outcome(avoided=["else", "has"]), scripts.BeginReply)
        await warm(client, "reads", SHORT)
        assert await outcome() == scripts.Offered("has")
        await client.zadd(SHARD.heartbeats, {"has": (seconds - 3) * 1000})
        assert isinstance(await outcome(), scripts.BeginReply)
        await warm(client, "reads", SHORT)
        await warm(client, "has", SHORT, LONG)
        await client.delete(SHARD.told("has"))
        assert isinstance(await outcome(), scripts.BeginReply)
        # What it has learned of itself it keeps: the names of what it has begun are its own until the next heartbeat.
        assert await client.smismember(SHARD.warm("reads"), [LONG, SHORT]) == [1, 1]
        assert await client.pttl(SHARD.warm("reads")) > 0
        for owner in ("reads", "has"):
            await scripts.run_one(client, scripts.retire(SHARD, owner))
            assert not await client.exists(SHARD.warm(owner), SHARD.told(owner))

    on_queue(scenario)


def test_rubbish_in_what_engines_tell_each_other_harms_nobody(on_queue: Any, queue_config: QueueConfig) -> None:
    async def scenario(client: Client) -> None:
        options = client.connection_pool.connection_kwargs  # type: ignore[union-attr]
        config = queue_config.replace(redis_url=f"redis://{options['host']}:{options['port']}/0", block_ms=20)
        declined: list[Any] = []

        async def beat() -> None:
            await scripts.run_one(client, scripts.renew(SHARD, "reads", b"{}"))

        reader = StreamReader(
            SHARD,
            "reads",
            client,
            Rounds(client),
            config,
            asyncio.Event(),
            beat,
            lambda: True,
            declined.append,
            lambda: None,
        )
        assert await reader.read() == []
        good = {"offer": LONG, "from": "other", "stream": "1", "entry": "5-5", "running": "3"}
        for change in (
            {"stream": "9"},
            {"stream": "-1"},
            {"stream": "x"},
            {"running": "many"},
            {"offer": ""},
            {"offer": "long"},
            {"entry": "no id"},
            {"from": b"\xff"},
            {},
        ):
            await client.xadd(SHARD.told("reads"), {**good, **change})
        await client.xadd(SHARD.told("reads"), {"a": "b"})
        await client.xadd(SHARD.told("reads"), {"declined": "other", "stream": "1", "entry": "7-7"})
        await client.set(SHARD.warm("other"), "no set", ex=60)
        await client.zadd(SHARD.heartbeats, {"other": 1 << 45})
        await raw_add(client, "a")
        found = []
        async with asyncio.timeout(60):
            while not declined or not found:
                found += await reader.read()
        assert declined == [(SHARD.streams[1], b"7-7")]
        (entry,) = found
        begun = await Engine(client, "reads").begin(entry, "a", beginnings=[LONG], running=0)
        assert isinstance(begun, scripts.BeginReply)
        pending: Any = await client.xpending(SHARD.told("reads"), "engines")
        assert (pending["pending"], await client.xlen(SHARD.told("reads"))) == (0, 0)
        await reader.aclose()

    on_queue(scenario)


PREFIXES, EACH, LENGTH = 8, 12, 192


def bodies() -> list[dict[str, Any]]:
    """Twelve requests behind each of eight long beginnings, in turns."""
    return [
        {
            "prompt_token_ids": [*(3 + (prefix * 17 + place) % 90 for place in range(LENGTH)), 100 + number],
            "max_tokens": 6,
            "temperature": 0,
            "ignore_eos": True,
        }
        for number in range(EACH)
        for prefix in range(PREFIXES)
    ]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = make_model(tmp_path_factory.mktemp("tiny"))
    # Six of the eight beginnings fit the pool at a time.
    return EngineConfig(
        model=str(folder),
        dtype="float32",
        max_model_len=256,
        num_blocks_override=1 + 6 * (LENGTH // 16 + 1),
        threads=1,
        skip_tokenizer_init=True,
    )


def test_eight_beginnings_on_two_engines(run: Any, tiny: EngineConfig, queue_config: QueueConfig) -> None:
    """Each engine keeps its own four in a pool that does not hold all eight."""

    async def run_all(config: QueueConfig) -> tuple[int, list[Counter[bytes]]]:
        """Cached tokens, and for each beginning how many requests each engine had."""
        engines = [await AsyncEngine.create(tiny) for _ in range(2)]
        workers = [Worker(engine, config) for engine in engines]
        tasks = [asyncio.create_task(worker.run()) for worker in workers]
        for worker in workers:
            await worker.ready.wait()
        cached, owners = 0, [Counter[bytes]() for _ in range(PREFIXES)]
        (shard,) = QueueKeys(config.key_prefix, config.queue, config.shards).shards
        redis = connect_commands(config.redis_url, "test")
        async with AsyncClient(config) as client:
            for start in range(0, PREFIXES * EACH, 4):
                handles = [await client.submit(**body) for body in bodies()[start : start + 4]]
                for number, handle in enumerate(handles, start):
                    result = await handle.result(timeout=60)
                    cached += result.usage["cached_tokens"]
                    assert result.metrics["attempts"] == 1
                    owners[number % PREFIXES][await redis.hget(shard.record(handle.id), "owner")] += 1
        await redis.aclose()
        assert all(worker.finished >= PREFIXES * EACH // 4 for worker in workers), "both have work"
        for worker in workers:
            worker.stop()
        await asyncio.gather(*tasks)
        for engine in engines:
            await engine.stop()
        return cached, owners

    async def scenario() -> None:
        cached, owners = await run_all(queue_config.replace(head_start_ms=1000))
        assert cached > 0.85 * PREFIXES * (EACH - 1) * LENGTH
        # Luck finds as much now and then; that each beginning stays with one engine is the claim.
        assert sum(max(counts.values()) for counts in owners) > 0.85 * PREFIXES * EACH, owners

    run(scenario())
