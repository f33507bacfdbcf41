"""Any decoder of transformers on the paged pool, through its attention interface, behind a gate.

A step's tokens go through the model as one row, [1, T], with their absolute positions; which tokens belong together is
known to the attention alone. Before a model serves it must pass `refusals` (its configuration), `attention_trace`
(every layer attends through the interface, in one shape) and `probe` (its logits on the pool are its own).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import structlog
import torch

from pagemill.engine.errors import ConfigError
from pagemill.engine.loader import ModelFolder
from pagemill.engine.models import probe
from pagemill.engine.models.attention_interface import NAME, PagedAttention, carry, register
from pagemill.engine.models.attention_trace import LayerAttention, Trace, trace
from pagemill.engine.models.base import Loading
from pagemill.engine.models.quiet import quiet_transformers
from pagemill.engine.models.refusals import read_config, refused, rope_tables
from pagemill.engine.models.spec import ConfigReader, ModelSpec, eos_within
from pagemill.engine.torch_import import complete
from pagemill.kernels.layout import KVLayout, LayerKV
from pagemill.kernels.metadata import AttentionMetadata
from pagemill.kernels.ops import Ops

_log = structlog.get_logger(__name__)


class GenericModel:
    """A causal language model of transformers. Raises `ConfigError`, with the reason, where it cannot be served."""

    compiled = None

    def __init__(self, folder: ModelFolder, loading: Loading, max_model_len: int | None = None) -> None:
        complete()  # models are traced on the meta device
        config = read_config(folder)
        register()
        traced = _traced(folder, config)
        self.spec = _spec(folder, config, traced, max_model_len)
        self._attention = PagedAttention(loading.ops)
        with quiet_transformers():
            model = _load(folder, config, loading)
            problem = self._try(model, traced, loading)
        if problem is not None:
            raise refused(folder, problem)
        _log.info("model served through transformers", architecture=folder.architecture)

    def _try(self, model: Any, traced: Trace, loading: Loading) -> str | None:
        """Compute a few tokens by the model alone, put the kernels into it and compute them again: what is wrong."""
        device = loading.device
        with probe.short_windows(model):
            try:
                plain = probe.plain_logits(model, self.spec, device)
                with probe.rounding_noise(model):
                    shifted = probe.plain_logits(model, self.spec, device)
            except Exception as error:  # models raise what their code happens to stumble over
                return f"it does not compute with transformers itself: {_one_line(error)}"
            try:
                self._install(model, traced, loading)
                paged = probe.paged_logits(self, lambda *size: self._layout(loading, *size), device)
            except Exception as error:
                return f"it fails on the paged pool: {_one_line(error)}"
        return probe.difference(paged, plain, shifted, loading.dtype)

    def _install(self, model: Any, traced: Trace, loading: Loading) -> None:
        """Put the kernels into a loaded model and take it apart into decoder and head."""
        model.set_attn_implementation(NAME)
        if loading.device == "cpu":
            # torch has one thread here, see `CpuOps`; our matrix product has all.
            _prepare_linears(model, loading.ops)
        carry(model, self._attention)
        self._decoder = model.get_submodule(traced.decoder)
        self._given = _GivenHidden(self._decoder, traced.output)
        model.set_submodule(traced.decoder, self._given)
        self._head = model

    def _layout(self, loading: Loading, num_blocks: int, block_size: int) -> KVLayout:
        spec = self.spec
        return KVLayout(
            num_blocks=num_blocks,
            num_layers=spec.num_layers,
            block_size=block_size,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=loading.dtype,
            device=loading.device,
            form=loading.ops.kv_form,
        )

    def forward(
        self, token_ids: torch.Tensor, meta: AttentionMetadata, kv: Sequence[LayerKV], rows: torch.Tensor
    ) -> torch.Tensor:
        self._attention.begin(kv, meta)
        output = self._decoder(input_ids=token_ids[None], position_ids=meta.positions[None], use_cache=False)
        self._attention.finish()
        hidden: torch.Tensor = output.last_hidden_state[0].index_select(0, rows)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Through the model's own head with whatever it does to logits: scaling, soft-capping."""
        with self._given.giving(hidden):
            ids = torch.zeros((1, len(hidden)), dtype=torch.int64, device=hidden.device)
            logits: torch.Tensor = self._head(input_ids=ids, use_cache=False).logits[0]
        return logits.float()


class _GivenHidden(torch.nn.Module):
    """Stands in the decoder's place and returns hidden states [R, hidden_size] that were computed before."""

    def __init__(self, decoder: torch.nn.Module, output: type) -> None:
        super().__init__()
        object.__setattr__(self, "_decoder", decoder)  # not as a part of this module
        self._output = output
        self._hidden: torch.Tensor | None = None

    @contextlib.contextmanager
    def giving(self, hidden: torch.Tensor) -> Iterator[None]:
        self._hidden = hidden
        try:
            yield
        finally:
            self._hidden = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        assert self._hidden is not None
        return self._output(last_hidden_state=self._hidden[None])

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "_decoder"), name)


class _PreparedLinear(torch.nn.Module):
    """A linear layer of transformers', computed by `Ops.linear`.

    Models look at a weight's shape and dtype. `weight` has both and no contents, so that computing with it is an error.
    """

    def __init__(self, ops: Ops, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = torch.empty_like(weight, device="meta")
        self._ops = ops
        self._prepared = ops.prepare_linear(weight, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._ops.linear(x.flatten(0, -2), self._prepared).view(*x.shape[:-1], -1)


def _prepare_linears(model: Any, ops: Ops) -> None:
    names = [name for name, module in model.named_modules() if type(module) is torch.nn.Linear]
    for name in names:
        linear = model.get_submodule(name)
        bias = None if linear.bias is None else linear.bias.detach()
        model.set_submodule(name, _PreparedLinear(ops, linear.weight.detach(), bias))


def _load(folder: ModelFolder, config: Any, loading: Loading) -> Any:
    """The model with its weights, on its device, with transformers' plain attention."""
    from transformers import AutoModelForCausalLM

    loading.checkpoint.check_unquantised()  # transformers would take the numbers without their scales
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder.path,
            config=config,
            dtype=loading.dtype,
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # damaged files, shapes that do not fit, classes that do not follow the interface
        raise ConfigError(f"transformers cannot load {folder.path}: {_one_line(error)}") from error
    for what, message in _REPORT.items():
        names = sorted(map(str, report.get(what) or ()))
        if names:
            raise ConfigError(f"{folder.path}: {message.format(len(names))}, first {names[0]}")
    # With a padding id set, transformers looks for it in every batch, to warn of a missing mask.
    model.config.pad_token_id = None
    return model.to(loading.device).eval()


_REPORT = {
    "missing_keys": "the checkpoint lacks {} weights",
    "mismatched_keys": "the checkpoint has {} weights of another shape than config.json says",
    "unexpected_keys": "the checkpoint has {} weights that the model lacks",
    "error_msgs": "the checkpoint has {} weights that cannot be read",
}


def _traced(folder: ModelFolder, config: Any) -> Trace:
    """The model's attention, checked for what the pool can hold and the kernels can compute."""
    with quiet_transformers():
        try:
            found = trace(config)
        except Exception as error:  # models that do not follow the interface fail in ways of their own
            raise refused(folder, f"it does not run with a paged attention: {_one_line(error)}") from error
    layers = int(config.num_hidden_layers)
    if len(found.layers) != layers:
        raise refused(
            folder,
            f"{len(found.layers)} attention calls of {layers} layers go through transformers' attention interface; "
            "the others attend in a way of their own or keep a state",
        )
    for layer in found.layers:
        reason = _layer_refusal(layer, found.layers[0])
        if reason is not None:
            raise refused(folder, reason)
    return found


def _layer_refusal(layer: LayerAttention, first: LayerAttention) -> str | None:
    if not layer.causal:
        return "it attends in both directions, as an encoder does"
    if layer.others:
        return f"its attention takes {', '.join(sorted(layer.others))}, which the kernels do not compute"
    if layer.num_heads % layer.num_kv_heads:
        return f"{layer.num_heads} heads cannot share {layer.num_kv_heads} key/value heads"
    if layer.value_dim > layer.key_dim:
        return f"its values are wider than its keys ({layer.value_dim} and {layer.key_dim})"
    if (layer.num_kv_heads, layer.key_dim) != (first.num_kv_heads, first.key_dim):
        return "its layers differ in the number or the width of their key/value heads, and the pool has one shape"
    return None


def _spec(folder: ModelFolder, config: Any, traced: Trace, max_model_len: int | None) -> ModelSpec:
    reader = ConfigReader(folder)
    first = traced.layers[0]
    windows = [layer.window for layer in traced.layers]
    longest = _longest(folder, config) or max_model_len
    if longest is None:
        raise reader.error("max_position_embeddings is missing; say how long sequences may be with max_model_len")
    return ModelSpec(
        architecture=folder.architecture,
        num_layers=len(traced.layers),
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.key_dim,
        hidden_size=traced.hidden_size,
        vocab_size=traced.vocab_size,
        max_model_len=reader.max_model_len(max_model_len, longest),
        eos_token_ids=eos_within(folder, traced.vocab_size),
        sliding_window=max(windows) if all(windows) else None,
    )


def _longest(folder: ModelFolder, config: Any) -> int | None:
    """How long sequences may be, in tokens, by the configuration.

    LongRoPE has other frequencies for a batch with a sequence longer than those it was first trained on, for all of
    the batch: so none may be longer, or one request would change another's tokens.
    """
    longest: int | None = getattr(config, "max_position_embeddings", None)
    for rope in rope_tables(config.to_dict()):
        if rope.get("rope_type") == "longrope" and (
            longest is None or rope["original_max_position_embeddings"] < longest
        ):
            longest = int(rope["original_max_position_embeddings"])
            _log.warning("longrope: sequences are as long as those of the first training only", max_model_len=longest)
    return longest


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"
