"""The paged pool behind transformers' attention interface (`AttentionInterface`, transformers 5).

A model of transformers calls its attention by name, with one layer's queries, keys and values. Ours is registered once
and passes the call on to an object that the model's own modules carry, so that nothing global says whose step it is.
No mask function is registered under the name: transformers then makes no mask, and causality is ours alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pagemill.engine.models.gathered_attention import gathered_attention
from pagemill.kernels.layout import LayerKV
from pagemill.kernels.metadata import AttentionMetadata
from pagemill.kernels.ops import Ops

NAME = "pagemill"
_CARRIED = "pagemill_attention"


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What a layer asked for. query [1, Hq, T, D], key and value [1, Hk, T, D] and [1, Hk, T, Dv].

    `scale` multiplies the scores. `window`: a key is visible iff it is less than so many tokens away; 0: all are.
    `softcap` c > 0 turns a score s into c * tanh(s / c). `sinks` [Hq]: a score of each head that takes part in the
    softmax and has no value. `causal`: no key behind the query is seen. `others` are further arguments by name, None
    left out.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    window: int
    softcap: float
    sinks: torch.Tensor | None
    causal: bool
    others: dict[str, Any]


class Attention(Protocol):
    """Answers the calls of one model."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """The layer's output, [1, T, Hq, Dv]."""
        ...


def carry(model: torch.nn.Module, attention: Attention) -> None:
    """Have all attention of a model that was built or switched to `NAME` answered by `attention`."""
    for module in model.modules():
        object.__setattr__(module, _CARRIED, attention)


def register() -> None:
    """Make `NAME` known to transformers; again is harmless."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attend)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    attention: Attention = getattr(module, _CARRIED)
    given = {name: value for name, value in others.items() if value is not None}
    if attention_mask is not None:
        given["attention_mask"] = attention_mask
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True) is not False
    call = AttentionCall(query, key, value, scale, sliding_window or 0, softcap or 0.0, s_aux, is_causal, given)
    return attention.attend(call), None


class PagedAttention:
    """Answers a model's calls from the paged pool, layer by layer in the order of the calls.

    `begin` starts a step of T tokens with one pool entry per layer; the model then makes exactly one call per layer.
    Values narrower than keys (multi-head latent attention) are stored with zeros behind them.
    """

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self._kv: Sequence[LayerKV] = ()
        self._meta: AttentionMetadata | None = None
        self._layer = 0

    def begin(self, kv: Sequence[LayerKV], meta: AttentionMetadata) -> None:
        self._kv, self._meta, self._layer = kv, meta, 0

    def finish(self) -> None:
        """Forget the step. Raises RuntimeError where the model did not attend in every layer."""
        layers, called = len(self._kv), self._layer
        self._kv, self._meta, self._layer = (), None, 0
        if called != layers:
            raise RuntimeError(f"the model attended {called} times in a step over {layers} layers")

    def attend(self, call: AttentionCall) -> torch.Tensor:
        if self._meta is None or self._layer >= len(self._kv):
            raise RuntimeError(f"the model attends {self._layer + 1} times in a step over {len(self._kv)} layers")
        kv, meta = self._kv[self._layer], self._meta
        self._layer += 1
        dtype = kv.k.dtype
        query, key, value = (_heads(part, dtype) for part in (call.query, call.key, call.value))
        width = value.shape[-1]
        if width < kv.head_dim:
            value = torch.nn.functional.pad(value, (0, kv.head_dim - width))
        self._ops.write_kv(key, value, kv, meta.slot_mapping)
        if call.softcap or call.sinks is not None:
            out = gathered_attention(
                query, kv, meta, scale=call.scale, window=call.window, softcap=call.softcap, sinks=call.sinks
            )
        else:
            out = self._ops.paged_attention(query, kv, meta, scale=call.scale, sliding_window=call.window)
        return out[..., :width].to(call.query.dtype).unsqueeze(0)


def _heads(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[1, H, T, D] as the kernels take it, [T, H, D]."""
    return part[0].transpose(0, 1).to(dtype).contiguous()
