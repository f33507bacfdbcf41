"""What the members of the Llama family have in common and where they differ, read from config.json.

Missing fields have the defaults of transformers' configuration class of the same architecture.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pagemill.engine.loader import ModelFolder
from pagemill.engine.models.spec import ConfigReader, ModelSpec, eos_within


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """What distinguishes an architecture. `windowed`: which layers have a sliding window where config.json does not
    list them: none (None), all, the upper ones, or those that are not rotated; `window` is its default in tokens.
    `qkv_bias`: None where the field `attention_bias` says, for the output projection too.
    """

    longest: int
    head_dim: int | None = None
    tied: bool = False
    qkv_bias: bool | None = None
    head_norm: bool = False
    skips_rotary: bool = False
    windowed: Literal["all", "upper", "unrotated"] | None = None
    window: int | None = 4096


_MOST_LAYERS = 10_000  # of each, lists are made before its weights are looked for
_MEMBERS = {
    "LlamaForCausalLM": _Member(longest=2048),
    "MistralForCausalLM": _Member(longest=131072, qkv_bias=False, windowed="all"),
    "Qwen2ForCausalLM": _Member(longest=32768, qkv_bias=True, windowed="upper"),
    "Qwen3ForCausalLM": _Member(longest=32768, head_dim=128, head_norm=True, windowed="upper"),
    "SmolLM3ForCausalLM": _Member(longest=32768, tied=True, skips_rotary=True, windowed="unrotated", window=None),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """`windows` and `rotary` have one entry per layer: the sliding window in tokens, 0 for none, and whether queries
    and keys are rotated. `head_norm`: each head of both has an RMS norm before. `longest` is what the model was made
    for, in tokens; `spec.max_model_len` may be less.
    """

    spec: ModelSpec
    intermediate_size: int
    longest: int
    eps: float
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    head_norm: bool
    windows: tuple[int, ...]
    rotary: tuple[bool, ...]


def read_shape(folder: ModelFolder, max_model_len: int | None) -> LlamaShape:
    """Read a folder's configuration. Raises `ConfigError` on a bad value and
    `UnfollowedError` on a good one that is not followed here."""
    member = _MEMBERS[folder.architecture]
    config = ConfigReader(folder)
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    kv_heads = config.size("num_key_value_heads", heads)
    head_dim = config.size("head_dim", member.head_dim or max(1, hidden // heads))
    if heads % kv_heads:
        raise config.error(f"{heads} heads cannot share {kv_heads} key/value heads")
    if head_dim % 2:
        raise config.error(f"head_dim must be even for rotary positions, got {head_dim}")
    config.one_of("hidden_act", ("silu", "swish"), "silu")
    layers = config.size("num_hidden_layers")
    if layers > _MOST_LAYERS:
        raise config.error(f"num_hidden_layers {layers} is not plausible")
    longest = config.size("max_position_embeddings", member.longest)
    rotary = _rotary(folder, config, layers) if member.skips_rotary else (True,) * layers
    windows = _windows(folder, config, member, rotary)
    attention_bias = config.flag("attention_bias", False)
    return LlamaShape(
        spec=ModelSpec(
            architecture=folder.architecture,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            hidden_size=hidden,
            vocab_size=config.size("vocab_size"),
            max_model_len=config.max_model_len(max_model_len, longest),
            eos_token_ids=eos_within(folder, config.size("vocab_size")),
            sliding_window=max(windows) if all(windows) else None,
            typical_layers=typical_layers(windows),
        ),
        intermediate_size=config.size("intermediate_size"),
        longest=longest,
        eps=config.number("rms_norm_eps", 1e-6),
        tied=config.flag("tie_word_embeddings", member.tied),
        qkv_bias=attention_bias if member.qkv_bias is None else member.qkv_bias,
        output_bias=attention_bias if member.qkv_bias is None else False,
        mlp_bias=config.flag("mlp_bias", False),
        head_norm=member.head_norm,
        windows=windows,
        rotary=rotary,
    )


def _windows(folder: ModelFolder, config: ConfigReader, member: _Member, rotary: tuple[bool, ...]) -> tuple[int, ...]:
    layers = len(rotary)
    if member.windowed is None or (member.windowed != "all" and not config.flag("use_sliding_window", False)):
        return (0,) * layers
    if folder.config.get("sliding_window", member.window) is None:
        return (0,) * layers
    window = config.size("sliding_window", member.window)
    if member.windowed == "all":
        sliding = [True] * layers
    elif folder.config.get("layer_types") is not None:
        kinds = config.for_each_layer("layer_types", layers, ("full_attention", "sliding_attention"))
        sliding = [kind == "sliding_attention" for kind in kinds]
    elif member.windowed == "upper":
        first = folder.config.get("max_window_layers", 28)
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise config.error(f"max_window_layers must be a number of layers, got {first!r}")
        sliding = [index >= first for index in range(layers)]
    else:
        sliding = [not rotated for rotated in rotary]
    return tuple(window * here for here in sliding)


def typical_layers(windows: tuple[int, ...]) -> int:
    """`ModelSpec.typical_layers`: the first layers with one of each window among them, and a layer behind another."""
    return min(len(windows), max(2, 1 + max(map(windows.index, windows))))


def _rotary(folder: ModelFolder, config: ConfigReader, layers: int) -> tuple[bool, ...]:
    """SmolLM3 leaves every fourth layer without positions (NoPE)."""
    if folder.config.get("no_rope_layers") is not None:
        return tuple(bool(on) for on in config.for_each_layer("no_rope_layers", layers, (0, 1)))
    interval = config.size("no_rope_layer_interval", 4)
    return tuple((index + 1) % interval != 0 for index in range(layers))
