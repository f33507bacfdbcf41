"""The dashboard: what it shows is what the engines say, and nothing of it is shown without a key."""

from __future__ import annotations

import asyncio
from typing import Any

from pagemill.engine.block_pool import BlockPool
from tests.adapters.http_gateway import ENDLESS, Web

KEY = {"Authorization": "Bearer key-of-a"}


async def figures(web: Web, condition: Any) -> dict[str, Any]:
    """The queue's part of the overview, once `condition` is true of it and of its engine."""
    async with asyncio.timeout(60):
        while True:
            queue: dict[str, Any] = (await web.get("/overview.json", headers=KEY)).json["queues"]["default"]
            if queue["engines"] and condition(queue, queue["engines"][-1]):
                return queue
            await asyncio.sleep(0.1)


def test_figures_follow_what_the_engine_does(tried: Any) -> None:
    async def scenario(web: Web) -> None:
        quiet = await figures(web, lambda queue, engine: engine["alive"])
        engine = quiet["engines"][-1]
        assert engine["age_s"] < 15 and engine["running"] == 0 and "outlook" not in engine
        tokens, quiet_free = engine["output_tokens"], engine["free_blocks"]
        made = await web.post("/v1/requests", {**ENDLESS, "priority": 2}, headers=KEY)
        # Until it has written some blocks: only full ones are kept.
        busy = await figures(
            web, lambda queue, engine: engine["running"] == 1 and engine["output_tokens"] > tokens + 40
        )
        assert busy["engines"][-1]["free_blocks"] < quiet_free
        assert busy["outstanding"] == {"high": 0, "normal": 0, "batch": 1}
        held, known = busy["engines"][-1]["pool_map"]
        assert len(held) == len(known) <= 96 and set(held) != {"0"}
        await web.post(f"{made.headers['Location']}/cancel", headers=KEY)
        ended = await figures(web, lambda queue, engine: engine["running"] == 0 and queue["counters"].get("cancelled"))
        engine = ended["engines"][-1]
        assert engine["output_tokens"] > tokens and engine["free_blocks"] == quiet_free
        assert set(engine["pool_map"][0]) == {"0"} and set(engine["pool_map"][1]) != {"0"}, "free, and content is kept"
        assert ended["hooks"] == {"due": 0, "dead": 0} and ended["dead_letters"] == 0
        text = (await web.get("/metrics", headers=KEY)).text
        for name in ("hooks_due", "hooks_dead"):
            assert f'pagemill_queue_{name}{{queue="default"}} 0.0' in text
        for name in ("output_tokens_total", "hit_tokens_total", "swap_preemptions_total", "waste_percent"):
            assert f"pagemill_engine_{name}{{" in text, name

    tried(scenario, api_keys="a=key-of-a")


def test_the_page_is_there_and_holds_no_figure(tried: Any) -> None:
    async def scenario(web: Web) -> None:
        page = await web.get("/")
        assert page.status == 200 and page.headers["Content-Type"].startswith("text/html")
        assert "script-src 'self'" in page.headers["Content-Security-Policy"]
        assert "/dashboard.js" in page.text and 'href="/playground"' in page.text and "default" not in page.text
        assert 'href="/"' in (await web.get("/playground")).text
        assert (await web.get("/dashboard.js")).headers["Content-Type"].startswith("text/javascript")
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            answer = await web.get("/overview.json", headers=headers)
            assert answer.status == 401 and answer.error["code"] == "invalid_api_key"
        shown = await web.get("/overview.json", headers=KEY)
        assert shown.status == 200 and shown.headers["Cache-Control"] == "no-store"

    tried(scenario, api_keys="a=key-of-a")


def test_a_pool_of_any_size_is_drawn() -> None:
    for blocks in (2, 3, 97, 98, 1000, 5003):
        pool = BlockPool(blocks)
        held, known = pool.map(96)
        assert len(held) == len(known) <= 96 and set(held + known) == {"0"}
        pool.allocate(blocks - 1)
        assert set(pool.map(96)[0]) == {"9"}
    pool = BlockPool(97)
    taken = pool.allocate(2)
    pool.cache(taken[0], b"content")
    pool.free(taken[:1])
    held, known = pool.map(96)
    assert (held[taken[0] - 1], known[taken[0] - 1], held[taken[1] - 1], known[taken[1] - 1]) == ("0", "9", "9", "0")
