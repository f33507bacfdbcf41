"""What the rest of the engine needs to know about a model, and how config.json is read: strictly, by name.

config.json is read as plain JSON with the defaults of transformers' configuration classes: importing those costs more
than loading a small model. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagemill.engine.errors import ConfigError
from pagemill.engine.loader import ModelFolder

_LONGEST = 1 << 24  # tokens; a table of rotary positions that long is gigabytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Shape of a model. `max_model_len` (tokens) is the longest prompt + output that is served.

    `sliding_window`: a key is visible iff it is less than so many tokens away; None: all are. `typical_layers`: a step
    of only so many layers, the first ones, takes as much memory as one of all; None: nobody knows.
    """

    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    sliding_window: int | None = None
    typical_layers: int | None = None


class UnfollowedError(ConfigError):
    """config.json asks for something that this native model does not compute; transformers' own model may."""


class ConfigReader:
    """Typed access to config.json. Every method raises `ConfigError`, naming file and field, on a bad value."""

    def __init__(self, folder: ModelFolder) -> None:
        self._config = folder.config
        self._where = folder.path / "config.json"

    def error(self, message: str) -> ConfigError:
        return ConfigError(f"{self._where}: {message}")

    def unfollowed(self, message: str) -> UnfollowedError:
        return UnfollowedError(f"{self._where}: {message}")

    def size(self, name: str, default: int | None = None) -> int:
        """A positive integer. A null or missing field is `default`; without one it is an error."""
        value = self._config.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.error(f"{name} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(f"{name} must be a positive integer, got {value!r}")
        return value

    def number(self, name: str, default: float) -> float:
        return self.number_in(self._config, name, default)

    def number_in(self, table: dict[str, Any], name: str, default: float | None = None) -> float:
        """A positive number from a part of the configuration."""
        value = table.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.error(f"{name} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.error(f"{name} must be a positive number, got {value!r}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._config.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(f"{name} must be true or false, got {value!r}")
        return value

    def one_of(self, name: str, allowed: tuple[str, ...], default: str) -> str:
        value = self._config.get(name)
        if value is None:
            return default
        if value not in allowed:
            raise self.unfollowed(f"{name} {value!r} is not supported; supported are {', '.join(allowed)}")
        return str(value)

    def for_each_layer(self, name: str, layers: int, allowed: tuple[Any, ...]) -> list[Any]:
        """A list with one of the allowed values for each layer."""
        value = self._config.get(name)
        if not isinstance(value, list) or len(value) != layers:
            raise self.error(f"{name} must have one entry for each of the {layers} layers, got {value!r}")
        for item in value:
            if item not in allowed:
                raise self.unfollowed(f"{name} {item!r} is not supported; supported are {', '.join(map(str, allowed))}")
        return value

    def table(self, name: str) -> dict[str, Any] | None:
        value = self._config.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.error(f"{name} must be an object, got {value!r}")
        return value

    def max_model_len(self, wanted: int | None, longest: int) -> int:
        """The context length to serve: `wanted` tokens, or all that the model was made for."""
        if longest > _LONGEST:
            raise self.error(f"max_position_embeddings {longest} is not plausible")
        if wanted is None:
            return longest
        if wanted > longest:
            raise ConfigError(f"max_model_len {wanted} is more than the model's {longest} tokens")
        return wanted


def eos_within(folder: ModelFolder, vocab_size: int) -> tuple[int, ...]:
    """The end-of-sequence ids of a model; one that its vocabulary does not hold can never be generated."""
    return tuple(token_id for token_id in folder.eos_token_ids if token_id < vocab_size)
