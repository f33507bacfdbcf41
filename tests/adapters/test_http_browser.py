"""The playground in a real browser: an answer as it comes, cancel, a reload in mid-answer, and a tab that is closed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

from pagemill.adapters.http.playground import PATH
from pagemill.engine.async_engine import AsyncEngine
from tests.adapters.http_gateway import Web

CHROMIUM, DRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")
# Without the last ones it asks for hosts of its maker at every start.
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
STORY = "Write a very long story about a lighthouse, a storm and a ship."


class Page:
    """The playground in one tab. Blocking, so it is used from a thread."""

    def __init__(self, driver: webdriver.Chrome, url: str) -> None:
        self.driver, self.url = driver, url

    def ask(self, prompt: str, tokens: int) -> None:
        self.driver.get(self.url + PATH)
        for name, value in (("prompt", prompt), ("tokens", tokens), ("temperature", 0)):
            self.driver.execute_script("document.getElementById(arguments[0]).value = arguments[1]", name, value)
        self.click("send")

    def click(self, name: str) -> None:
        self.driver.find_element(By.ID, name).click()

    def text(self, name: str) -> str:
        return str(self.driver.execute_script("return document.getElementById(arguments[0]).textContent", name))

    def until(self, holds: Callable[[], bool], what: str, timeout: float = 60) -> None:
        end = time.monotonic() + timeout
        while not holds():
            assert time.monotonic() < end, f"{what}: {self.text('state')!r}, {self.text('answer')[-60:]!r}"
            time.sleep(0.02)

    def kept(self, name: str) -> str:
        return str(self.driver.execute_script("return sessionStorage.getItem(arguments[0])", f"pagemill.{name}"))


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    if not (CHROMIUM.exists() and DRIVER.exists()):
        pytest.skip("needs Debian's chromium and chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    made = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    yield made
    made.quit()


def test_an_answer_is_gone_on_with_after_a_reload(tried: Any, driver: webdriver.Chrome) -> None:
    """It grows while it comes, and not a word is missing or there twice."""

    async def scenario(web: Web) -> None:
        page = Page(driver, web.url)

        def read() -> tuple[str, str, str]:
            page.ask(STORY, 300)
            for length in (1, 10, 20):
                page.until(lambda least=length: len(page.text("answer")) >= least, "the answer grows")  # type: ignore[misc]
            assert page.text("state") == "running"
            for _ in range(2):
                before = page.text("answer")
                driver.refresh()
                assert page.text("answer").startswith(before[:20])
                page.until(lambda seen=before: len(page.text("answer")) > len(seen), "it goes on")  # type: ignore[misc]
            page.until(lambda: page.text("state").endswith("tokens"), "the end")
            return page.kept("id"), page.text("answer"), page.text("state")

        name, shown, state = await asyncio.to_thread(read)
        record = (await web.get(f"/v1/requests/{name}")).json
        assert shown == record["choices"][0]["text"] and record["state"] == "completed"
        assert state == f"{record['usage']['completion_tokens']} tokens"

    tried(scenario)


def test_cancelling_and_closing_the_tab_free_the_blocks(
    tried: Any, driver: webdriver.Chrome, engine: AsyncEngine
) -> None:
    async def scenario(web: Web) -> None:
        page = Page(driver, web.url)

        def begin() -> None:
            page.ask(STORY, 350)
            page.until(lambda: len(page.text("answer")) > 10, "the answer begins")

        def cancel() -> None:
            begin()
            page.click("cancel")
            page.until(lambda: "cancelled" in page.text("state"), "the cancel")

        def close() -> None:
            first = driver.current_window_handle
            driver.switch_to.new_window("tab")
            begin()
            driver.close()
            driver.switch_to.window(first)

        for leave in (cancel, close):
            await asyncio.to_thread(leave)
            async with asyncio.timeout(60):
                while engine.num_live or engine.statistics().cache.pool.used:
                    await asyncio.sleep(0.01)

    tried(scenario)
