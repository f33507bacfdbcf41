"""Settings: flags, then `PAGEMILL_*` environment variables, then pagemill.toml, then defaults.

There is one table, made from the fields of the configuration classes; flags, variables and file keys all come from it.
A name that is not in it is an error, since a misspelt setting that is silently ignored costs an evening.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pagemill.adapters.http.config import GatewayConfig
from pagemill.adapters.webhook.config import WebhookConfig
from pagemill.engine.config import EngineConfig
from pagemill.engine.errors import ConfigError
from pagemill.engine.values import as_text
from pagemill.engine.values import shown as brief
from pagemill.ingest.config import QueueConfig

ENV_PREFIX = "PAGEMILL_"
DEFAULT_FILE = "pagemill.toml"
FILE_VARIABLE = "PAGEMILL_SETTINGS"  # not a setting: says where the others are

Group = Literal["engine", "queue", "gateway", "webhook", "process"]

_TRUE = frozenset(("true", "yes", "on", "1"))
_FALSE = frozenset(("false", "no", "off", "0"))
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])(i?)B?", re.IGNORECASE)
_PASSWORD = re.compile(r"(://[^:@/]*):[^@/]*@")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConfig:
    """What concerns the process that a command starts, not the engine or the queue."""

    data_dir: str | None = field(
        default=None, metadata={"help": "folder of the embedded server's data; default ~/.local/share/pagemill"}
    )
    port: int = field(default=6379, metadata={"help": "loopback port of the embedded server; 0 finds a free one"})
    log_level: str = field(default="info", metadata={"help": "debug, info, warning or error"})
    log_format: str = field(
        default="auto", metadata={"help": "human, json, or auto: human on a terminal, JSON lines otherwise"}
    )

    def __post_init__(self) -> None:
        for name, allowed in (
            ("log_level", ("debug", "info", "warning", "error")),
            ("log_format", ("auto", "human", "json")),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {brief(getattr(self, name))}")
        if isinstance(self.port, bool) or not isinstance(self.port, int) or not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be in [0, 65535], got {brief(self.port)}")
        if self.data_dir is not None and as_text(self.data_dir) is None:
            raise ConfigError(f"data_dir must be text, valid in Unicode, got {brief(self.data_dir)}")


_CLASSES: dict[Group, type[Any]] = {
    "engine": EngineConfig,
    "queue": QueueConfig,
    "gateway": GatewayConfig,
    "webhook": WebhookConfig,
    "process": ProcessConfig,
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table. `secret`: its value is not to be shown."""

    name: str
    group: Group
    kind: type
    optional: bool
    default: Any
    help: str
    secret: bool = False

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.name.upper()

    def parse(self, text: str, source: str) -> Any:
        """Read a flag's or a variable's text. Raises `ConfigError` naming `source`."""
        text = text.strip()
        if self.optional and text.lower() in ("", "none"):
            return None
        try:
            if self.kind is bool:
                if text.lower() not in _TRUE | _FALSE:
                    raise ValueError
                return text.lower() in _TRUE
            if self.kind is int and (size := _SIZE.fullmatch(text)) and self.name.endswith("_bytes"):
                unit = 1024 if size[3] else 1000
                return int(float(size[1]) * unit ** (1 + "KMGT".index(size[2].upper())))
            return self.kind(text)
        except (ValueError, OverflowError):
            raise ConfigError(f"{self.name} ({source}): {brief(text)} is not {_KIND_NAMES[self.kind]}") from None

    def check_toml(self, value: object, source: str) -> Any:
        """Take a value of the settings file, which has a type already."""
        if self.kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if type(value) is not self.kind:
            if isinstance(value, str) and self.kind is int and self.name.endswith("_bytes"):
                return self.parse(value, source)
            raise ConfigError(f"{self.name} ({source}): {brief(value)} is not {_KIND_NAMES[self.kind]}")
        return value


_KIND_NAMES: dict[type, str] = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}


def settings_table() -> dict[str, Setting]:
    """Every setting by name, in the order of the configuration classes."""
    table: dict[str, Setting] = {}
    for group, config in _CLASSES.items():
        hints = get_type_hints(config)
        for item in dataclasses.fields(config):
            kind, optional = _kind(hints[item.name])
            text, secret = item.metadata.get("help", ""), item.metadata.get("secret", False)
            table[item.name] = Setting(item.name, group, kind, optional, item.default, text, secret)
    return table


def _kind(hint: Any) -> tuple[type, bool]:
    if get_origin(hint) in (Union, types.UnionType):
        inner = next(argument for argument in get_args(hint) if argument is not type(None))
        return _kind(inner)[0], True
    if get_origin(hint) is Literal:
        return type(get_args(hint)[0]), False
    assert isinstance(hint, type)
    return hint, False


@dataclass(frozen=True, slots=True)
class Settings:
    """The merged values, and for each where it came from: "default", a file, a variable or a flag."""

    values: Mapping[str, Any]
    sources: Mapping[str, str]

    def is_given(self, name: str) -> bool:
        """Whether somebody chose this value."""
        return self.sources[name] != "default"

    def engine(self, **defaults: Any) -> EngineConfig:
        """The engine's part; `defaults` stand in for what nobody chose. Raises `ConfigError`."""
        config: EngineConfig = self._make("engine", defaults)
        return config

    def queue(self, **defaults: Any) -> QueueConfig:
        config: QueueConfig = self._make("queue", defaults)
        return config

    def gateway(self, **defaults: Any) -> GatewayConfig:
        config: GatewayConfig = self._make("gateway", defaults)
        return config

    def webhook(self, **defaults: Any) -> WebhookConfig:
        config: WebhookConfig = self._make("webhook", defaults)
        return config

    def process(self, **defaults: Any) -> ProcessConfig:
        config: ProcessConfig = self._make("process", defaults)
        return config

    def _make(self, group: Group, defaults: Mapping[str, Any]) -> Any:
        names = [item.name for item in dataclasses.fields(_CLASSES[group])]
        chosen = {name: self.values[name] for name in names}
        chosen |= {name: value for name, value in defaults.items() if not self.is_given(name)}
        return _CLASSES[group](**chosen)


def load_settings(flags: Mapping[str, str], environment: Mapping[str, str], file: str | None = None) -> Settings:
    """Merge the four sources. `flags`: setting name -> text. `file`: a settings file that must be there.

    Raises `ConfigError` on unknown names (with the nearest known one), unreadable files and values of a wrong type.
    Ranges are checked when the configuration objects are made.
    """
    table = settings_table()
    values = {name: setting.default for name, setting in table.items()}
    sources = dict.fromkeys(table, "default")
    named = file if file is not None else environment.get(FILE_VARIABLE) or None
    path = Path(named if named is not None else DEFAULT_FILE)
    if named is not None or path.is_file():
        for name, value in _read_file(path, table).items():
            source = f"{path}"
            values[name], sources[name] = table[name].check_toml(value, source), source
    by_variable = {setting.variable: setting for setting in table.values()}
    for variable, text in sorted(environment.items()):
        if not variable.startswith(ENV_PREFIX) or variable == FILE_VARIABLE:
            continue
        setting = by_variable.get(variable)
        if setting is None:
            raise ConfigError(f"unknown setting {variable} in the environment{nearest(variable, by_variable)}")
        values[setting.name], sources[setting.name] = setting.parse(text, variable), variable
    for name, text in flags.items():
        values[name], sources[name] = table[name].parse(text, table[name].flag), table[name].flag
    return Settings(values, sources)


def _read_file(path: Path, table: Mapping[str, Setting]) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read settings from {path}: {error.strerror}") from error
    except ValueError as error:  # no TOML, no UTF-8, or a number of more digits than Python reads
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path} is not valid TOML: nested too deeply") from error
    for name in content:
        if name not in table:
            raise ConfigError(f"unknown setting {name!r} in {path}{nearest(name, table)}")
    return content


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint at the known name that is most like `name`, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def without_password(url: str) -> str:
    """A server's URL, fit to be shown."""
    return _PASSWORD.sub(r"\1:***@", url)


def shown(value: Any) -> str:
    """A value as the settings file would have it, without passwords."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + without_password(value).replace("\\", "\\\\").replace('"', '\\"') + '"'
    return str(value)
