"""What attention a model of transformers asks for, layer by layer: one forward pass without weights or arithmetic.

The model is built on torch's meta device, where tensors have shapes and no contents, so that this takes a fraction of
a second for a model of any size and happens before its weights are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pagemill.engine.models.attention_interface import NAME, AttentionCall, carry

_TOKENS = 5
# What models pass along that says nothing about which key a query sees and with what weight.
_HARMLESS = frozenset(
    (
        "dropout",
        "position_ids",
        "position_embeddings",
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "layer_idx",
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAttention:
    """One layer's attention. `value_dim` may be less than `key_dim`; window 0: none."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int
    causal: bool
    others: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """`decoder` is the name of the part of the model that has the head's input as its last hidden state, of width
    `hidden_size`; `output` is the class of what it returns."""

    layers: list[LayerAttention]
    decoder: str
    output: type
    hidden_size: int
    vocab_size: int


class _Recorder:
    def __init__(self) -> None:
        self.layers: list[LayerAttention] = []

    def attend(self, call: AttentionCall) -> torch.Tensor:
        _, num_heads, tokens, key_dim = call.query.shape
        value_dim = call.value.shape[-1]
        others = {name: value for name, value in call.others.items() if name not in _HARMLESS}
        self.layers.append(
            LayerAttention(
                num_heads=num_heads,
                num_kv_heads=call.key.shape[1],
                key_dim=key_dim,
                value_dim=value_dim,
                window=call.window,
                causal=call.causal,
                others=others,
            )
        )
        return call.query.new_empty(1, tokens, num_heads, value_dim)


def trace(config: Any) -> Trace:
    """Run the model of a configuration once. What it raises where it cannot is transformers' or torch's."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        # bfloat16: the grouped products of mixtures of experts have no float32 on this device.
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=NAME, dtype=torch.bfloat16, trust_remote_code=False
        ).eval()
    recorder = _Recorder()
    carry(model, recorder)
    decoders: list[tuple[str, Any]] = []

    def watch(name: str) -> Any:
        def note(module: torch.nn.Module, args: Any, output: Any) -> None:
            if name and getattr(output, "last_hidden_state", None) is not None:
                decoders.append((name, output))

        return note

    for name, module in model.named_modules():
        module.register_forward_hook(watch(name))
    ids = torch.zeros((1, _TOKENS), dtype=torch.int64, device="meta")
    positions = torch.arange(_TOKENS, device="meta")[None]
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    if not decoders:
        raise RuntimeError(f"{type(model).__name__} has no part with a last hidden state")
    name, output = decoders[-1]  # the outermost ends last
    return Trace(
        layers=recorder.layers,
        decoder=name,
        output=type(output),
        hidden_size=output.last_hidden_state.shape[-1],
        vocab_size=logits.shape[-1],
    )
