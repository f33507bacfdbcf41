"""Where a step's time goes: clocks around an engine's parts, put on and taken off again from outside.

Nothing of it is in the engine's own path. A clock counts a part's own time, without the parts that it calls and the
clocks' own work, so that the parts sum up to the whole. Compiled kernels have clocks too: what a part takes beside them
is Python's. Around the layers that are computed in one call there is one clock; to see inside, the same
layers are computed operation by operation (`by_operation`), which gives the same bits and costs what calling each from
Python costs.

For the CPU: on a GPU a call returns before its work is done.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np

from pagemill.engine.core import EngineCore
from pagemill.kernels.metadata import AttentionMetadata

SCHEDULING = "scheduling"
OUTPUT = "output processing"
BATCH = "batch building, runner"
MODEL = "model, outside of operations"
LAYERS = "layers in one call"
WHOLE = "model and draws in one call"


@dataclass(slots=True)
class Part:
    """What a part took: seconds of its own, those of them in compiled kernels, calls, bytes that it had to read or
    write, operations on numbers."""

    seconds: float = 0.0
    compiled: float = 0.0
    calls: int = 0
    bytes: int = 0
    flops: int = 0


Work = Callable[[tuple[Any, ...], Any], tuple[str, int, int]]
"""From a call's arguments and result: the part's name, its bytes and its floating-point operations."""


class Profiler:
    """Clocks around one engine's parts. `parts`: what they have counted; `steps` and `seconds`: of the whole."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._runner: Any = core._runner
        # Of each part that is running, the outermost first:
        self._inner: list[float] = []  # seconds that are not its own
        self._compiled: list[float] = []  # seconds in kernels
        self.parts: dict[str, Part] = {}

    @property
    def steps(self) -> int:
        return self.parts[OUTPUT].calls

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.parts.values())

    @property
    def python(self) -> float:
        """Seconds of the whole that were spent outside of compiled kernels."""
        return sum(part.seconds - part.compiled for part in self.parts.values())

    @contextmanager
    def attached(self, *, by_operation: bool = False) -> Iterator[None]:
        """Count from here to the end of the block, from nothing."""
        self.parts = {}
        core, runner, model = self._core, self._runner, self._runner._model
        with ExitStack() as stack:
            stack.enter_context(self._around(core, "step", _named(OUTPUT)))
            stack.enter_context(self._around(core.scheduler, "schedule", _named(SCHEDULING)))
            stack.enter_context(self._around(core.scheduler, "commit", _named(SCHEDULING)))
            stack.enter_context(self._around(runner, "execute", _named(BATCH)))
            stack.enter_context(self._around(model, "forward", _named(MODEL)))
            compiled = model.compiled
            if compiled is not None and by_operation:
                stack.enter_context(replaced(model, "compiled", None))
            elif compiled is not None:
                stack.enter_context(self._around(compiled, "forward", _layers(model._stack)))
                stack.enter_context(self._around(compiled, "draw", _whole(model._stack)))
            for name, work in _OPERATIONS.items():
                if hasattr(runner.ops, name):
                    stack.enter_context(self._around(runner.ops, name, work))
            for module, name in entry_points() if runner.ops.name == "cpu" else ():
                stack.enter_context(replaced(module, name, self._clocked_kernel(getattr(module, name))))
            yield

    @contextmanager
    def _around(self, owner: Any, name: str, work: Work) -> Iterator[None]:
        function = getattr(owner, name)

        def clocked(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            self._compiled.append(0.0)
            before = time.perf_counter()
            try:
                result = function(*args, **kwargs)
            finally:
                elapsed = time.perf_counter() - before
                inner, compiled = self._inner.pop(), self._compiled.pop()
            label, size, flops = work(args, result)
            part = self.parts.setdefault(label, Part())
            part.seconds += elapsed - inner
            part.compiled += compiled
            part.calls += 1
            part.bytes += size
            part.flops += flops
            if self._inner:
                self._inner[-1] += time.perf_counter() - before
            return result

        with replaced(owner, name, clocked):
            yield

    def _clocked_kernel(self, kernel: Any) -> Callable[..., Any]:
        stepping = threading.get_ident()

        def clocked(*args: Any) -> Any:
            before = time.perf_counter()
            result = kernel(*args)
            if self._compiled and threading.get_ident() == stepping:  # and not a helper, who is there all the time
                self._compiled[-1] += time.perf_counter() - before
            return result

        # A kernel that is compiled meanwhile and calls this one sees what is behind the clock.
        clocked._numba_type_ = kernel._numba_type_  # type: ignore[attr-defined]
        return clocked


def entry_points() -> list[tuple[Any, str]]:
    """Where Python finds the compiled kernels: modules and names in them."""
    from pagemill.kernels.cpu.jit import entries

    known = {id(kernel) for kernel in entries()}
    modules = [module for name, module in sys.modules.items() if name.startswith("pagemill.kernels.cpu.")]
    return [(module, name) for module in modules for name, value in vars(module).items() if id(value) in known]


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of this one object, for the time of the block. Its class may have slots, but then for this name."""
    own = vars(owner).get(name, replaced) if hasattr(owner, "__dict__") else getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is replaced:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def _named(name: str) -> Work:
    return lambda args, result: (name, 0, 0)


def _layers(stack: Any) -> Work:
    """All layers' weights once, and their attention; what else they do is small beside these."""
    linears = [linear for layer in stack.layers for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    held = sum(_held(linear) for linear in linears)
    products = 2 * sum(linear.in_features * linear.out_features for linear in linears)

    def work(args: tuple[Any, ...], result: Any) -> tuple[str, int, int]:
        x, meta, kv = args[:3]
        heads = stack.layers[0].output.in_features // kv[0].head_dim
        size, flops = attention_work(meta, heads, kv[0].num_kv_heads, kv[0].head_dim, kv[0].k.itemsize)
        return LAYERS, held + len(kv) * size, len(x) * products + len(kv) * flops

    return work


def _whole(stack: Any) -> Work:
    """The layers, and the head for the rows that are drawn from."""
    layers, head = _layers(stack), stack.head

    def work(args: tuple[Any, ...], result: Any) -> tuple[str, int, int]:
        _, size, flops = layers(args, result)
        return WHOLE, size + _held(head), flops + 2 * len(result) * head.in_features * head.out_features

    return work


def _linear(name: str) -> Work:
    def work(args: tuple[Any, ...], result: Any) -> tuple[str, int, int]:
        x, prepared = args
        shape = (prepared.in_features, prepared.out_features)
        size = _held(prepared) + x.numel() * x.itemsize + result.numel() * result.itemsize
        return f"{name} {shape[0]} -> {shape[1]}", size, 2 * x.shape[0] * shape[0] * shape[1]

    return work


def _held(prepared: Any) -> int:
    """Bytes of a prepared weight."""
    if not is_dataclass(prepared):
        return 0
    values = [getattr(prepared, field.name) for field in fields(prepared)]
    return sum(int(value.nbytes) for value in values if hasattr(value, "nbytes"))


def _attention(args: tuple[Any, ...], result: Any) -> tuple[str, int, int]:
    query, kv, meta = args
    return "attention", *attention_work(meta, query.shape[1], kv.num_kv_heads, query.shape[2], kv.k.itemsize)


def attention_work(meta: AttentionMetadata, heads: int, kv_heads: int, dim: int, itemsize: int) -> tuple[int, int]:
    """Bytes of the keys and values that a step looks at, each sequence's once, and floating-point operations."""
    lengths = meta.host.seq_lens.astype(np.int64)
    queries = np.diff(meta.host.query_start).astype(np.int64)
    pairs = int((queries * lengths - queries * (queries - 1) // 2).sum())
    return int(lengths.sum()) * kv_heads * dim * 2 * itemsize, 4 * pairs * heads * dim


def _elementwise(name: str) -> Work:
    def work(args: tuple[Any, ...], result: Any) -> tuple[str, int, int]:
        results = result if isinstance(result, tuple) else () if result is None else (result,)
        tensors = [value for value in (*args, *results) if hasattr(value, "numel")]
        return name, sum(value.numel() * value.itemsize for value in tensors), 0

    return work


_OPERATIONS: dict[str, Work] = {
    "linear": _linear("linear"),
    "gated_linear": _linear("linear and SiLU"),
    "logits": _linear("head"),
    "embedding": _named("embedding"),
    "paged_attention": _attention,
    "write_kv": _named("KV write"),
    "rotary_embedding": _named("rotary embedding"),
    "rms_norm": _elementwise("norms"),
    "add_rms_norm": _elementwise("norms"),
    "silu_and_mul": _elementwise("SiLU"),
    "copy_blocks": _named("block copies"),
    "edit_logits": _named("logit rules"),
    "logprobs": _named("log-probabilities"),
    "sample": _elementwise("sampling"),
}
