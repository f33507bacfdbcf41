"""Native models by the architecture that config.json names. Modules are imported when a model needs them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from pagemill.engine.errors import ConfigError

if TYPE_CHECKING:
    from pagemill.engine.loader import ModelFolder
    from pagemill.engine.models.base import Loading, Model

_MODELS = {
    "LlamaForCausalLM": ("pagemill.engine.models.llama", "LlamaModel"),
    "MistralForCausalLM": ("pagemill.engine.models.llama", "LlamaModel"),
    "Qwen2ForCausalLM": ("pagemill.engine.models.llama", "LlamaModel"),
    "Qwen3ForCausalLM": ("pagemill.engine.models.llama", "LlamaModel"),
    "SmolLM3ForCausalLM": ("pagemill.engine.models.llama", "LlamaModel"),
    "GPT2LMHeadModel": ("pagemill.engine.models.gpt2", "GPT2Model"),
    "OPTForCausalLM": ("pagemill.engine.models.opt", "OPTModel"),
}

SUPPORTED_ARCHITECTURES = tuple(_MODELS)


def check_architecture(folder: ModelFolder) -> None:
    """Raise `ConfigError`, naming what is supported, where the model's architecture is not."""
    if folder.architecture not in _MODELS:
        raise ConfigError(
            f"architecture {folder.architecture} of {folder.name} is not supported; "
            f"supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
        )


def load_model(folder: ModelFolder, loading: Loading, max_model_len: int | None = None) -> Model:
    """Build a folder's model with its weights. Raises `ConfigError` where configuration or weights do not allow it."""
    check_architecture(folder)
    module, name = _MODELS[folder.architecture]
    model: Model = getattr(importlib.import_module(module), name)(folder, loading, max_model_len)
    return model
