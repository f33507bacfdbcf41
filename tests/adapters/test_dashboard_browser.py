"""The dashboard in a real browser: no figure without a key, then what the engine does, as it does it."""

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

from tests.adapters.http_gateway import ENDLESS, Web

KEY = {"Authorization": "Bearer key-of-a"}
CHROMIUM, DRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[webdriver.Chrome]:
    """A browser that asks for nothing but what the test opens."""
    if not (CHROMIUM.exists() and DRIVER.exists()):
        pytest.skip("needs Debian's chromium and chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (*FLAGS, f"--user-data-dir={tmp_path}"):
        options.add_argument(flag)
    made = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    yield made
    made.quit()


def text_of(driver: webdriver.Chrome, selector: str) -> str:
    """The text of all elements that match."""
    script = "return [...document.querySelectorAll(arguments[0])].map((part) => part.textContent).join('|')"
    return str(driver.execute_script(script, selector))


def until(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def test_the_dashboard_shows_what_runs(tried: Any, driver: webdriver.Chrome) -> None:
    async def scenario(web: Web) -> None:
        def give(key: str) -> None:
            field = driver.find_element(By.ID, "key")
            field.clear()
            field.send_keys(key)
            field.submit()

        def unlock() -> None:
            driver.get(web.url)
            until(lambda: "key is needed" in text_of(driver, "#state"), "the page asks for a key")
            assert text_of(driver, "#queues") == ""
            give("wrong")
            until(lambda: "not known" in text_of(driver, "#state"), "a wrong key is told")
            assert text_of(driver, "#queues") == ""
            give("key-of-a")
            until(lambda: "1 of" in text_of(driver, "#queues h3"), "an engine is shown")
            assert "0running|" in text_of(driver, ".tile") and not driver.find_element(By.ID, "form").is_displayed()

        def busy() -> None:
            until(lambda: text_of(driver, ".tile").startswith("1running|"), "one request runs")
            until(lambda: "1unfinished, batch" in text_of(driver, ".tile"), "it is outstanding in its class")
            held = "return [...document.querySelectorAll('.map i')].filter((cell) => !cell.title.startsWith('held 0'))"
            until(lambda: bool(driver.execute_script(held)), "blocks are held")
            assert "KV pool: " in text_of(driver, ".engine:not(.gone)")

        def quiet() -> None:
            until(lambda: text_of(driver, ".tile").startswith("0running|"), "nothing runs")
            until(lambda: "1cancelled" in text_of(driver, ".tile"), "it is counted")
            errors = [line for line in driver.get_log("browser") if "401" not in line["message"]]
            assert errors == [], errors

        await asyncio.to_thread(unlock)
        made = await web.post("/v1/requests", {**ENDLESS, "priority": 2}, headers=KEY)
        await asyncio.to_thread(busy)
        await web.post(f"{made.headers['Location']}/cancel", headers=KEY)
        await asyncio.to_thread(quiet)

    tried(scenario, api_keys="a=key-of-a")
