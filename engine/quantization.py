"""Whether weights are quantised, and how: the setting `quantization`, settled with the model and the device."""

from __future__ import annotations

from typing import Literal

from pagemill.engine.config import EngineConfig
from pagemill.engine.device import device_of
from pagemill.engine.errors import ConfigError
from pagemill.engine.loader import BUNDLED_MODEL, ModelFolder

Scheme = Literal["none", "int8", "int4", "gguf"]

BYTES_PER_ELEMENT = {"int8": 1.07, "int4": 0.75}
"""Of a model's weights, with their scales; embedding and head have 8 bits in both schemes."""


def keeps_gguf(config: EngineConfig) -> bool:
    """Whether a .gguf file's weights are to be read from the file itself, instead of being converted once."""
    if config.quantization == "auto":
        # A dtype says what the weights shall be, and so that they are not to stay as they are. The bundled model is
        # small, and there to show crowds, in which bfloat16 is faster.
        return config.model != BUNDLED_MODEL and config.dtype == "auto" and device_of(config) == "cpu"
    return config.quantization != "none"


def settle(config: EngineConfig, folder: ModelFolder, device: str) -> Scheme:
    """What becomes of this model's weights on this device. Raises `ConfigError` where that cannot be."""
    chosen = config.quantization
    stored = folder.weight_files[0].suffix == ".gguf"
    if chosen == "auto":
        return "gguf" if stored and device == "cpu" else "none"
    if chosen == "none":
        return "none"
    if device != "cpu":
        raise ConfigError(f"quantization {chosen} is built for the CPU only, and the device is {device}; use none")
    if chosen == "gguf" and not stored:
        raise ConfigError(f"quantization gguf is for .gguf files, and {folder.name} is not one; use int8, int4 or none")
    return chosen


def form_of(config: EngineConfig, folder: ModelFolder) -> str:
    """What the weights will be, in words."""
    scheme = settle(config, folder, device_of(config))
    if scheme == "gguf":
        return "quantised as its file stores it"
    return f"dtype {config.dtype}" if scheme == "none" else f"rounded to {scheme}"
