"""Where a setting's value comes from, and that nothing misspelt passes."""

from __future__ import annotations

import dataclasses
import logging
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from pagemill.adapters.cli.main import run
from pagemill.adapters.cli.settings import ProcessConfig, load_settings, settings_table, shown, without_password
from pagemill.adapters.http.config import GatewayConfig
from pagemill.adapters.webhook.config import WebhookConfig
from pagemill.engine.config import EngineConfig
from pagemill.engine.errors import ConfigError
from pagemill.ingest.config import QueueConfig


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """`run` sets the process's logging up, which here is everybody's."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def test_every_field_of_the_configuration_is_a_setting() -> None:
    names = {
        field.name for config in (EngineConfig, QueueConfig, GatewayConfig) for field in dataclasses.fields(config)
    }
    table = settings_table()
    assert names <= set(table)
    assert all(setting.help for setting in table.values())


def test_flags_win_over_variables_over_the_file_over_defaults(tmp_path: Path) -> None:
    (tmp_path / "pagemill.toml").write_text('block_size = 8\nqueue = "q"\ngpu_memory_utilization = 1\n')
    environment = {"PAGEMILL_BLOCK_SIZE": "32", "PAGEMILL_QUEUE": "fromenv", "HOME": "/"}
    settings = load_settings({"block_size": "64"}, environment)
    assert (settings.values["block_size"], settings.sources["block_size"]) == (64, "--block-size")
    assert (settings.values["queue"], settings.sources["queue"]) == ("fromenv", "PAGEMILL_QUEUE")
    assert settings.sources["gpu_memory_utilization"] == "pagemill.toml"
    assert (settings.values["max_num_seqs"], settings.sources["max_num_seqs"]) == (128, "default")
    assert settings.engine().block_size == 64
    assert settings.queue().queue == "fromenv"
    assert settings.is_given("queue") and not settings.is_given("redis_url")


def test_a_settings_file_may_be_named_and_must_then_be_there(tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text("block_size = 4")
    assert load_settings({}, {}, str(other)).engine().block_size == 4
    assert load_settings({}, {"PAGEMILL_SETTINGS": str(other)}).engine().block_size == 4
    assert load_settings({}, {"PAGEMILL_SETTINGS": ""}).sources["block_size"] == "default", "empty is not set"
    with pytest.raises(ConfigError, match=r"missing\.toml"):
        load_settings({}, {}, "missing.toml")


@pytest.mark.parametrize(
    ("file", "environment", "message"),
    [
        ("blocksize = 3", {}, r"unknown setting 'blocksize' in pagemill\.toml; did you mean block_size\?"),
        ("[engine]\nblock_size = 3", {}, "unknown setting 'engine'"),
        ("block_size = ", {}, r"pagemill\.toml is not valid TOML"),
        ('block_size = "3"', {}, "block_size .*is not an integer"),
        ("block_size = true", {}, "block_size .*is not an integer"),
        ("enable_prefix_caching = 1", {}, "enable_prefix_caching .*is not true or false"),
        ("block_size = " + "9" * 5000, {}, r"pagemill\.toml is not valid TOML: .*digits"),
        ("block_size = " + "[" * 3000 + "]" * 3000, {}, "nested too deeply"),
        ("", {"PAGEMILL_BLOKSIZE": "3"}, "unknown setting PAGEMILL_BLOKSIZE.*did you mean PAGEMILL_BLOCK_SIZE"),
        ("", {"PAGEMILL_BLOCK_SIZE": "many"}, r"block_size \(PAGEMILL_BLOCK_SIZE\): 'many' is not an integer"),
        ("", {"PAGEMILL_ENABLE_PREFIX_CACHING": "perhaps"}, "is not true or false"),
        ("", {"PAGEMILL_BLOCK_SIZE": ""}, "is not an integer"),
    ],
)
def test_wrong_names_and_values_are_errors(
    tmp_path: Path, file: str, environment: dict[str, str], message: str
) -> None:
    (tmp_path / "pagemill.toml").write_text(file)
    with pytest.raises(ConfigError, match=message):
        load_settings({}, environment)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("enable_prefix_caching", "no", False),
        ("enable_prefix_caching", "ON", True),
        ("kv_cache_memory_bytes", "2GiB", 2 << 30),
        ("kv_cache_memory_bytes", "1.5 GB", 1_500_000_000),
        ("kv_cache_memory_bytes", "1000000", 1_000_000),
        ("kv_cache_memory_bytes", "none", None),
        ("max_model_len", "", None),
        ("gpu_memory_utilization", "0.5", 0.5),
        ("model", "none", "none"),
    ],
)
def test_reading_a_flag(name: str, text: str, value: Any) -> None:
    assert load_settings({name: text}, {}).values[name] == value


def test_what_config_prints_is_a_settings_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(["config", "--block-size", "8", "--redis-url", "redis://me:secret@host/0", "--no-enable-prefix-caching"])
        == 0
    )
    text = capsys.readouterr().out
    assert "secret@" not in text
    values = tomllib.loads(text)
    assert (values["block_size"], values["enable_prefix_caching"]) == (8, False)
    assert set(values) <= set(settings_table())


def test_ranges_are_checked_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, name in (
        (["--block-size", "0"], "block_size"),
        (["--port", "70000"], "port"),
        (["--redis-url", "http://x"], "redis_url"),
        (["--log-level", "loud"], "log_level"),
    ):
        assert run(["config", *arguments]) == 2
        assert name in capsys.readouterr().err


ODD: list[Any] = [None, True, -1, 0, 10**5000, 1e308, float("nan"), "", "\udcff", "\0", "9" * 5000, "[", b"x", [1], {}]


@pytest.mark.parametrize("config", [EngineConfig, QueueConfig, GatewayConfig, WebhookConfig, ProcessConfig])
def test_whatever_a_setting_is_set_to_the_error_names_it_and_is_short(config: Any) -> None:
    for field in dataclasses.fields(config):
        refused = 0
        for value in ODD:
            try:
                config(**{field.name: value})
            except ConfigError as error:
                refused += 1
                assert field.name in str(error) and len(str(error)) < 400
                str(error).encode()
        assert refused >= 3, f"{field.name} takes nearly anything"


def test_passwords_are_never_shown() -> None:
    assert without_password("redis://:p4ss@host:1/0") == "redis://:***@host:1/0"
    assert without_password("redis://host:6379/0") == "redis://host:6379/0"
    assert shown("rediss://u:p4ss@h") == '"rediss://u:***@h"'
    assert shown('a"b\\c') == '"a\\"b\\\\c"'
