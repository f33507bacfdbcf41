"""Why a model cannot be served, as far as its configuration says: before any weight is read.

What is refused here would run on the paged pool without an error and answer wrongly. What a configuration does not
say, `attention_trace` (the calls that the model makes) and `probe` (its logits) find out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pagemill.engine.errors import ConfigError
from pagemill.engine.loader import ModelFolder
from pagemill.engine.models.quiet import quiet_transformers

_ATTENTION = ("full_attention", "sliding_attention", "attention", "global_attention", "local_attention")
_LAYER_LISTS = ("layer_types", "layers_block_type", "block_types", "_block_types", "layers_block_types")
_STATE_FIELDS = (
    "state_size",
    "ssm_state_size",
    "mamba_d_state",
    "mamba_expand",
    "ssm_cfg",
    "attention_hidden_size",  # RWKV
    "lru_width",
    "linear_num_key_heads",
    "linear_attn_config",
    "conv_L_cache",
)
_ALIBI = ("bloom", "mpt")  # always; others have a field for it
_POSITIONS = ("absolute", "learned", "rope", "rotary")


def read_config(folder: ModelFolder) -> Any:
    """transformers' configuration of a model that may be served. Raises `ConfigError`, with the reason, if not."""
    from transformers import AutoConfig, __version__
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    model_type = folder.config.get("model_type")
    if model_type not in CONFIG_MAPPING_NAMES:
        code = "; it brings code of its own, which is never run" if "auto_map" in folder.config else ""
        raise refused(folder, f"transformers {__version__} does not know the model type {model_type!r}{code}")
    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(folder.path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # its validation raises what each class sees fit
        raise ConfigError(f"{folder.path / 'config.json'} is not plausible: {error}") from error
    reason = refusal(folder.architecture, config.to_dict())
    if reason is not None:
        raise refused(folder, reason)
    return config


def refused(folder: ModelFolder, reason: str) -> ConfigError:
    """The error that a model is refused with."""
    return ConfigError(f"architecture {folder.architecture} of {folder.name} is not supported: {reason}")


def refusal(architecture: str, config: dict[str, Any]) -> str | None:
    """The reason not to serve a model with this configuration, all defaults filled in, or None."""
    if config.get("is_encoder_decoder"):
        return "it is an encoder-decoder, and only decoders have their keys and values in the paged pool"
    if config["model_type"] in _ALIBI or config.get("alibi") is True:
        return "its attention adds a bias by distance (alibi), which the kernels do not compute"
    parts = [name for name, part in config.items() if name.endswith("_config") and _is_model(part)]
    if parts:
        return f"it is a model of several parts ({', '.join(parts)}), such as text and images; only text decoders run"
    if config.get("add_cross_attention"):
        return "it attends to an encoder's output (add_cross_attention)"
    reason = _class_refusal(architecture, config["model_type"])
    if reason is not None:
        return reason
    if str(config.get("position_embedding_type") or "absolute") not in _POSITIONS:
        return f"its attention has relative positions ({config['position_embedding_type']}), which the kernels lack"
    return _layer_refusal(config) or _rope_refusal(config)


def _is_model(part: Any) -> bool:
    return isinstance(part, dict) and ("model_type" in part or "hidden_size" in part or "num_hidden_layers" in part)


def _class_refusal(architecture: str, model_type: str) -> str | None:
    from transformers import __version__
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    if causal is None:
        return f"transformers {__version__} has no causal language model of the type {model_type!r}"
    if architecture != causal:
        return f"its weights are not those of the causal language model of its type, {causal}"
    return None


def _layer_refusal(config: dict[str, Any]) -> str | None:
    for name in _LAYER_LISTS:
        kinds = config.get(name)
        if isinstance(kinds, list):
            others = sorted({str(kind) for kind in kinds} - set(_ATTENTION))
            if "chunked_attention" in others:
                return "some layers attend within chunks (chunked_attention), which the kernels do not compute"
            if others:
                return f"layers of the kind {', '.join(others)} do not attend to keys and values as the pool keeps them"
            return None
    for name in _STATE_FIELDS:
        if config.get(name):
            return f"some layers keep a state (config.json has {name}) instead of keys and values"
    return None


def _rope_refusal(config: dict[str, Any]) -> str | None:
    if any(rope.get("rope_type") == "dynamic" for rope in rope_tables(config)):
        return (
            "its rope scaling 'dynamic' depends on the longest sequence of a batch, so that one request would change "
            "another's tokens"
        )
    return None


def rope_tables(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The rotary parameters of the whole model, or of each kind of its layers."""
    table = config.get("rope_parameters")
    if isinstance(table, dict):
        yield table
        yield from (inner for inner in table.values() if isinstance(inner, dict))
