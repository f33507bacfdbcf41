"""Models by the architecture that config.json names: native ones, and any decoder of transformers behind a gate.

Modules are imported when a model needs them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import structlog

from pagemill.engine.errors import ConfigError
from pagemill.engine.models.spec import UnfollowedError

if TYPE_CHECKING:
    from pagemill.engine.loader import ModelFolder
    from pagemill.engine.models.base import Loading, Model

# Architecture: its model type, and the class that computes it. Some architectures are used by several model types with
# weights of other names, which transformers sorts out.
_NATIVE = {
    "LlamaForCausalLM": ("llama", "pagemill.engine.models.llama", "LlamaModel"),
    "MistralForCausalLM": ("mistral", "pagemill.engine.models.llama", "LlamaModel"),
    "Qwen2ForCausalLM": ("qwen2", "pagemill.engine.models.llama", "LlamaModel"),
    "Qwen3ForCausalLM": ("qwen3", "pagemill.engine.models.llama", "LlamaModel"),
    "SmolLM3ForCausalLM": ("smollm3", "pagemill.engine.models.llama", "LlamaModel"),
    "GPT2LMHeadModel": ("gpt2", "pagemill.engine.models.gpt2", "GPT2Model"),
    "OPTForCausalLM": ("opt", "pagemill.engine.models.opt", "OPTModel"),
}

NATIVE_ARCHITECTURES = tuple(_NATIVE)

_log = structlog.get_logger(__name__)


def _is_native(folder: ModelFolder) -> bool:
    """Whether a native model is for this folder; not where transformers knows its model type as another one."""
    if folder.architecture not in _NATIVE:
        return False
    usual, *_ = _NATIVE[folder.architecture]
    model_type = folder.config.get("model_type", usual)
    if model_type == usual:
        return True
    if not isinstance(model_type, str | None):
        raise ConfigError(f"{folder.path / 'config.json'}: model_type must be a name, got {model_type!r}")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return model_type not in CONFIG_MAPPING_NAMES


def check_architecture(folder: ModelFolder) -> None:
    """Raise `ConfigError` with the reason where config.json already says that a model cannot be served."""
    if not _is_native(folder):
        from pagemill.engine.models.refusals import read_config

        read_config(folder)


def load_model(folder: ModelFolder, loading: Loading, max_model_len: int | None = None) -> Model:
    """Build a folder's model with its weights: natively, or as transformers computes it where there is no native model
    or where that does not follow the configuration. Raises `ConfigError` where neither is possible."""
    if not _is_native(folder):
        return _generic(folder, loading, max_model_len)
    _, module, name = _NATIVE[folder.architecture]
    try:
        model: Model = getattr(importlib.import_module(module), name)(folder, loading, max_model_len)
        return model
    except UnfollowedError as unfollowed:
        _log.info("not computed natively", reason=str(unfollowed))
        try:
            return _generic(folder, loading, max_model_len)
        except ConfigError as error:
            raise ConfigError(f"{unfollowed}; and through transformers: {error}") from error


def _generic(folder: ModelFolder, loading: Loading, max_model_len: int | None) -> Model:
    from pagemill.engine.models.generic import GenericModel

    if loading.quantization != "none":
        raise ConfigError(
            f"quantization {loading.quantization} is for models that are computed natively "
            f"({', '.join(NATIVE_ARCHITECTURES)}), and {folder.architecture} is computed through transformers; use none"
        )
    return GenericModel(folder, loading, max_model_len)
