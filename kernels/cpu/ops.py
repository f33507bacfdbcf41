"""`Ops` on the CPU, with numba. Takes float32 and bfloat16 tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from pagemill.kernels.cpu import attention, attention_amx, edit, elementwise, logprobs, matmul, sampler
from pagemill.kernels.cpu.arena import Arena
from pagemill.kernels.cpu.attention import part_floats
from pagemill.kernels.cpu.decoder import CpuDecoder, attention_work, can_run
from pagemill.kernels.cpu.decoder_layers import PARALLEL_ELEMENTS
from pagemill.kernels.cpu.gather import gather
from pagemill.kernels.cpu.jit import keep_compiled, keep_in
from pagemill.kernels.cpu.kernel_cache import Report
from pagemill.kernels.cpu.linear import CpuLinear, TaskLinear, apply, prepare_linear
from pagemill.kernels.cpu.plan import AttentionPlan, attention_plan
from pagemill.kernels.cpu.reuse import ReusedMemory
from pagemill.kernels.cpu.step_clock import StepClock
from pagemill.kernels.cpu.team import Team
from pagemill.kernels.cpu.threads import available_threads
from pagemill.kernels.decoder import DecoderStack
from pagemill.kernels.layout import KVForm, LayerKV
from pagemill.kernels.metadata import AttentionMetadata, HostMetadata
from pagemill.kernels.ops import LogitEdits, SampleBatch, TopLogprobs
from pagemill.kernels.quantised_weight import QuantisedWeight
from pagemill.kernels.reference import ReferenceOps

if TYPE_CHECKING:
    from pagemill.kernels.cpu.quantised import QuantisedLinear


# A stored element of each type, from which the kernels take theirs: bfloat16 travels as uint16.
_LIKE = {torch.float32: np.float32(0), torch.bfloat16: np.uint16(0)}


def _like(dtype: torch.dtype) -> Any:
    like = _LIKE.get(dtype)
    if like is None:
        raise ValueError(f"the CPU kernels take float32 and bfloat16, got {dtype}")
    return like


def _address(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    """The address of a tensor that lies in order and is of the type expected."""
    if tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(f"expected a contiguous {dtype} tensor, got {tensor.dtype} with strides {tensor.stride()}")
    return tensor.data_ptr()


def _rows(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[int, int]:
    """The address of a [T, heads, dim] tensor whose rows may be parts of longer ones, and the distance of its rows."""
    _, heads, dim = tensor.shape
    row, head, element = tensor.stride()
    if (
        tensor.dtype != dtype
        or element != 1
        or (heads > 1 and head != dim)
        or (tensor.shape[0] > 1 and row < heads * dim)
    ):
        raise ValueError(f"expected {dtype} heads side by side, got {tensor.dtype} with strides {tensor.stride()}")
    return tensor.data_ptr(), max(row, heads * dim)


def _logits(logits: torch.Tensor) -> tuple[int, int]:
    """The address of logits [R, V] whose rows may be parts of longer ones, and the distance of its rows."""
    rows, vocab_size = logits.shape
    row, element = logits.stride()
    if logits.dtype != torch.float32 or (vocab_size > 1 and element != 1) or (rows > 1 and row < vocab_size):
        raise ValueError(f"expected rows of float32 logits, got {logits.dtype} with strides {logits.stride()}")
    return logits.data_ptr(), max(row, vocab_size)


def _data(array: npt.NDArray[Any]) -> int:
    """The address of an array that lies in order."""
    if not array.flags.c_contiguous:
        raise ValueError(f"expected a contiguous array, got strides {array.strides}")
    return array.ctypes.data


class CpuOps:
    """`Ops` for the CPU, on a team of `threads` (default: the cores that this process may use).

    Compiled code is kept on disk, see `kernel_cache`. Sets torch to one thread.
    """

    name = "cpu"
    kv_form: KVForm = "k_major"

    def __init__(
        self, *, threads: int | None = None, cache_dir: str | None = None, report: Report | None = None
    ) -> None:
        self._team = Team(threads or available_threads())
        self._clock = StepClock(self._team)
        self._arena = Arena()
        self._logits = ReusedMemory()
        # What is left to torch is small, and its own team would spin on the cores that ours needs: measured at batch
        # 1 on two busy cores, 26 ms of processor time a step instead of 15.
        torch.set_num_threads(1)
        self._reference = ReferenceOps()
        self.cache = keep_compiled(cache_dir, report)

    @property
    def threads(self) -> int:
        return self._team.threads

    def step(self, tokens: int) -> AbstractContextManager[None]:
        self._clock.tokens = tokens
        return self._clock

    def _board(self, elements: int) -> int:
        """What to run a kernel on so many elements on: the team, or 0 for this thread alone."""
        return 0 if elements < PARALLEL_ELEMENTS else self._team.board()

    def write_kv(self, key: torch.Tensor, value: torch.Tensor, kv: LayerKV, slot_mapping: torch.Tensor) -> None:
        dtype = kv.k.dtype
        keys, key_stride = _rows(key, dtype)
        values, value_stride = _rows(value, dtype)
        _like(dtype)
        elementwise.write_kv(
            self._board(key.numel()),
            keys,
            key_stride * dtype.itemsize,
            values,
            value_stride * dtype.itemsize,
            kv.num_kv_heads,
            kv.head_dim * dtype.itemsize // 4,
            *kv.addresses,
            kv.k.stride(0) * dtype.itemsize,
            kv.block_size,
            kv.num_blocks,
            _address(slot_mapping, torch.int64),
            key.shape[0],
        )

    def paged_attention(
        self, query: torch.Tensor, kv: LayerKV, meta: AttentionMetadata, *, scale: float, sliding_window: int = 0
    ) -> torch.Tensor:
        tokens, heads, dim = query.shape
        group = heads // kv.num_kv_heads
        out = torch.empty((tokens, heads, dim), dtype=query.dtype)
        plan, parts = self._attention_plan(meta, heads, kv, sliding_window)
        queries, stride = _rows(query, kv.k.dtype)
        element = query.dtype.itemsize
        attention.attention(
            self._board(attention_work(meta, len(plan.items), kv)),
            plan.items,
            plan.tokens,
            plan.rows,
            parts,
            meta.host.block_tables,
            queries,
            stride * element,
            kv.k.data_ptr(),
            kv.v.data_ptr(),
            kv.k.stride(0) * element,
            kv.block_size,
            kv.num_kv_heads,
            dim,
            group,
            np.float32(scale),
            sliding_window,
            attention_amx.use_tiles(query.dtype, kv.block_size, dim, scale),
            out.data_ptr(),
            _like(query.dtype),
        )
        return out

    def _attention_plan(
        self, meta: AttentionMetadata, heads: int, kv: LayerKV, window: int
    ) -> tuple[AttentionPlan, npt.NDArray[np.float32]]:
        """The step's work list for layers like this one, and memory for its parts."""
        dim = kv.head_dim
        name = f"cpu {heads} {kv.num_kv_heads} {dim} {window}"

        def make(host: HostMetadata) -> tuple[AttentionPlan, npt.NDArray[np.float32]]:
            plan = attention_plan(
                host,
                group=heads // kv.num_kv_heads,
                num_kv_heads=kv.num_kv_heads,
                block_size=kv.block_size,
                threads=self.threads,
                window=window,
            )
            return plan, np.empty(plan.num_parts * part_floats(heads, dim), np.float32)

        return meta.plan(name, make)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        dtype = x.dtype
        rows, size = x.shape
        elementwise.rms_norm(
            self._board(x.numel()),
            _address(x, dtype),
            _address(weight, dtype),
            np.float32(eps),
            out.data_ptr(),
            rows,
            size,
            _like(dtype),
        )
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = x.contiguous(), residual.contiguous()
        out, total = torch.empty_like(x), torch.empty_like(residual)
        dtype = x.dtype
        rows, size = x.shape
        elementwise.add_rms_norm(
            self._board(x.numel()),
            _address(x, dtype),
            _address(residual, residual.dtype),
            _address(weight, dtype),
            np.float32(eps),
            out.data_ptr(),
            total.data_ptr(),
            rows,
            size,
            _like(dtype),
            _like(residual.dtype),
        )
        return out, total

    def rotary_embedding(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
    ) -> None:
        dtype = query.dtype
        longest, dim = cos_sin.shape
        queries, query_stride = _rows(query, dtype)
        keys, key_stride = _rows(key, dtype)
        elementwise.rotary(
            self._board(query.numel()),
            queries,
            query.shape[1],
            query_stride,
            keys,
            key.shape[1],
            key_stride,
            _address(positions, torch.int64),
            query.shape[0],
            _address(cos_sin, torch.float32),
            longest,
            dim,
            _like(dtype),
        )

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate_up = gate_up.contiguous()
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((rows, size), dtype=gate_up.dtype)
        dtype = gate_up.dtype
        elementwise.silu_and_mul(
            self._board(out.numel()), _address(gate_up, dtype), out.data_ptr(), rows, size, _like(dtype)
        )
        return out

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> CpuLinear:
        return self.prepare_stored((weight,), bias, weight.dtype)

    def prepare_gated_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> CpuLinear:
        return self.prepare_stored(weight.chunk(2), bias, weight.dtype, gated=True)

    def prepare_stored(
        self, parts: Iterable[torch.Tensor], bias: torch.Tensor | None, dtype: torch.dtype, *, gated: bool = False
    ) -> CpuLinear:
        return prepare_linear(tuple(parts), bias, dtype, self._arena, self._team, gated=gated)

    def prepare_quantised(
        self, weight: QuantisedWeight, bias: torch.Tensor | None, dtype: torch.dtype, *, gated: bool = False
    ) -> QuantisedLinear:
        return self._pack_quantised(weight, bias, dtype, self._arena, gated=gated)

    @cached_property
    def _pack_quantised(self) -> Callable[..., QuantisedLinear]:
        """Imported for who has such weights: defining the kernels of their sixteen forms is a fortieth of a start."""
        from pagemill.kernels.cpu.quantised import prepare_quantised

        keep_in(self.cache)
        return prepare_quantised

    def linear(self, x: torch.Tensor, prepared: TaskLinear) -> torch.Tensor:
        return apply(prepared, x, self._team)

    def gated_linear(self, x: torch.Tensor, prepared: TaskLinear) -> torch.Tensor:
        if prepared.gated:
            return apply(prepared, x, self._team, matmul.GATED)
        return self.silu_and_mul(self.linear(x, prepared))

    def logits(self, hidden: torch.Tensor, prepared: TaskLinear) -> torch.Tensor:
        return apply(prepared, hidden, self._team, matmul.FLOAT32, self._logits)

    def embedding(self, token_ids: torch.Tensor, prepared: TaskLinear) -> torch.Tensor:
        board = self._board(len(token_ids) * prepared.in_features)
        return gather(prepared, token_ids, board)

    def compile_decoder(self, stack: DecoderStack, dtype: torch.dtype) -> CpuDecoder | None:
        return CpuDecoder(stack, self._team, _like(dtype), self._logits) if can_run(stack, dtype) else None

    def copy_blocks(self, pool: torch.Tensor, pairs: torch.Tensor) -> None:
        pool[:, pairs[:, 1]] = pool[:, pairs[:, 0]]

    def edit_logits(self, logits: torch.Tensor, edits: LogitEdits) -> None:
        rows, vocab_size = logits.shape
        edits.check_fit(rows, vocab_size)
        address, stride = _logits(logits)
        place = (address, max(rows - 1, 0) * stride + vocab_size, stride, vocab_size)
        masked, penalised = len(edits.mask_rows), len(edits.penalty_rows)
        if masked:
            board = self._board(masked * vocab_size) if masked > 1 else 0
            edit.mask(board, *place, _data(edits.mask_rows), _data(edits.masks), masked)
        if banned := len(edits.ban_rows):
            edit.ban(self._board(banned), *place, _data(edits.ban_rows), _data(edits.ban_ids), banned)
        if biased := len(edits.bias_rows):
            columns = (_data(edits.bias_rows), _data(edits.bias_ids), _data(edits.bias))
            edit.add_bias(self._board(biased), *place, *columns, biased)
        if penalised:
            edit.penalise(
                self._board(len(edits.ids)) if penalised > 1 else 0,
                *place,
                _data(edits.penalty_rows),
                _data(edits.repetition),
                _data(edits.presence),
                _data(edits.frequency),
                _data(edits.starts),
                penalised,
                _data(edits.ids),
                _data(edits.counts),
                len(edits.ids),
            )

    def logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, top: int) -> TopLogprobs:
        if top > logprobs.LONGEST_LIST:
            return self._reference.logprobs(logits, token_ids, top)
        rows, vocab_size = logits.shape
        address, stride = _logits(logits)
        asked = token_ids.contiguous()
        result = TopLogprobs(
            torch.empty(rows, dtype=torch.float32),
            torch.empty(rows, dtype=torch.int64),
            torch.empty((rows, top), dtype=torch.int64),
            torch.empty((rows, top), dtype=torch.float32),
        )
        logprobs.logprobs(
            self._board(logits.numel()) if rows > 1 else 0,
            address,
            stride,
            rows,
            vocab_size,
            _address(asked, torch.int64),
            result.chosen.data_ptr(),
            result.rank.data_ptr(),
            result.ids.data_ptr(),
            result.values.data_ptr(),
            top,
        )
        return result

    def sample(self, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        out = torch.empty(logits.shape[0], dtype=torch.int64)
        sampler.sample(
            self._board(logits.numel()) if logits.shape[0] > 1 else 0,
            logits.contiguous().numpy(),
            batch.temperature,
            batch.top_k,
            batch.top_p,
            batch.min_p,
            batch.seed,
            batch.position,
            batch.index,
            out.numpy(),
        )
        return out
