"""The device that an engine runs on."""

from __future__ import annotations

from pagemill.engine.config import EngineConfig
from pagemill.engine.errors import ConfigError


def device_of(config: EngineConfig) -> str:
    """The name "cpu" or "cuda". Raises `ConfigError` where CUDA is asked for and cannot be used."""
    if config.device == "cpu":
        return "cpu"
    import torch

    usable = torch.cuda.is_available()
    if config.device == "auto":
        return "cuda" if usable else "cpu"
    if not usable:
        raise ConfigError("device is cuda, but this machine has no usable CUDA device (or torch is built without it)")
    return config.device
