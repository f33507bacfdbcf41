"""A step in one compiled call: what each operation costs to call from Python is then paid once.

At batch 1 a layer's operations take some 150 us, and calling them from Python a third of that again. And each time that
Python runs between two kernels it has to come back into the caches, which the first one has just filled with weights.
Every page that it touches then costs a walk through page tables which are not there either: 0.3 us after 10 ms, 4 us
after 65 (a virtual machine, with a second set of tables), whatever is on the page. So the same kernels are called one
after the other by compiled code, on the same team, with the same bits as operation by operation; the caller has let go
of the interpreter's lock meanwhile.

* `forward`: all layers, from embedded tokens to hidden states. For steps that want more of the logits than a draw.
* `draw`: embedding, layers, head and sampler, from token ids to token ids. Most steps are of this kind.

A step is an array of words (`step_words`). Those of the stack are written once, those of the pool, the batch and its
draws where these are others than in the last step. Where the step is the last one again, each sequence one token
further, compiled code brings the batch's arrays there too: the least that Python could do for it, a few assignments to
arrays, touched a hundred pages of NumPy's.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pagemill.kernels.cpu import attention_amx
from pagemill.kernels.cpu import decoder_layers as table
from pagemill.kernels.cpu import step_words as words
from pagemill.kernels.cpu.arena import huge_pages
from pagemill.kernels.cpu.attention import part_floats
from pagemill.kernels.cpu.decoder_step import run_step
from pagemill.kernels.cpu.gather import unknown_ids
from pagemill.kernels.cpu.reuse import ReusedMemory
from pagemill.kernels.cpu.team import Team
from pagemill.kernels.decoder import DecoderLayer, DecoderStack
from pagemill.kernels.layout import LayerKV
from pagemill.kernels.metadata import AttentionMetadata
from pagemill.kernels.ops import SampleBatch

_LINE = 64  # bytes of a cache line
_APART = 5 * _LINE  # rows of several buffers that are used together shall not compete for the same lines of a cache


class CpuDecoder:
    """`CompiledDecoder` for the CPU. Its memory for a step's activations is kept for the next, so a call at a time.

    logits: memory that a step's logits are written to.
    """

    def __init__(self, stack: DecoderStack, team: Team, like: Any, logits: ReusedMemory) -> None:
        self._stack = stack
        self._team = team
        self._like = like
        self._logits = logits
        self._hidden = stack.layers[0].qkv.in_features
        self._inner = stack.layers[0].down.in_features
        self._layers = _table(stack)
        # Layers that see equally far share a work list.
        runs = itertools.groupby(enumerate(stack.layers), key=lambda pair: pair[1].window)
        spans = [(window, [index for index, _ in run]) for window, run in runs]
        self._runs = np.array([(span[0], span[-1] + 1, window) for window, span in spans], np.int64)
        self._numbers = np.array([stack.eps, stack.scale], np.float32)
        self._rows = 0
        self._scratch: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self._pool = np.empty((0, 2), np.int64)
        self._drawn = np.empty(0, np.int64)
        self._columns = np.empty(7, np.int64)
        # What the words were last written for; held, so that nothing else can have its identity or its memory.
        self._kv: Sequence[LayerKV] | None = None
        self._meta: AttentionMetadata | None = None
        self._sampling: SampleBatch | None = None
        self._asked: tuple[torch.Tensor | None, torch.Tensor | None] = None, None
        self._places = (0, 0, 0)
        self._threads = 0
        self._lent = 0
        self._num_logits = 0
        self._advances = self._can_advance = self._one_each = False
        self._result_ids: memoryview[int] = self._drawn.data
        self._at = np.zeros(words.WORDS, np.int64)
        self._step = int(self._at.ctypes.data)
        self._write(
            LAYERS=self._layers.ctypes.data,
            NUM_LAYERS=len(self._layers),
            RUNS=self._runs.ctypes.data,
            NUM_RUNS=len(self._runs),
            HEADS=stack.num_heads,
            KV_HEADS=stack.num_kv_heads,
            DIM=stack.head_dim,
            SIZE=like.itemsize,
            HIDDEN=self._hidden,
            INNER=self._inner,
            LONGEST=stack.cos_sin.shape[0],
            COS_SIN=stack.cos_sin.data_ptr(),
            NUMBERS=self._numbers.ctypes.data,
            PART_FLOATS=part_floats(stack.num_heads, stack.head_dim),
            GATHERER=stack.embedding.gatherer(),
            TABLE_RECORD=stack.embedding.record.ctypes.data,
            VOCABULARY=stack.head.out_features,
            HEAD=stack.head.record.ctypes.data,
            HEAD_WORKER=stack.head.worker(),
            DRAWS=self._columns.ctypes.data,
        )

    def forward(
        self, x: torch.Tensor, meta: AttentionMetadata, kv: Sequence[LayerKV], rows: torch.Tensor
    ) -> torch.Tensor:
        hidden = torch.empty((len(rows), self._hidden), dtype=x.dtype)
        self._can_advance = self._advances = False
        x, rows = x.contiguous(), rows.contiguous()
        self._take(meta, kv, x.dtype)
        self._write(
            IDS=0,
            EMBEDDED=x.data_ptr(),
            ROWS=rows.data_ptr(),
            WANTED=len(rows),
            RESULT=hidden.data_ptr(),
            LOGITS=0,
            ADVANCE=0,
        )
        self._at[words.THREADS] = self._threads = self._team.threads
        run_step(self._team.board(), self._step, self._like)
        return hidden

    def draw(
        self,
        token_ids: torch.Tensor,
        meta: AttentionMetadata,
        kv: Sequence[LayerKV],
        rows: torch.Tensor,
        sampling: SampleBatch,
        *,
        advance: bool = False,
    ) -> list[int]:
        at = self._at
        if not advance:
            self._describe(token_ids, meta, kv, rows, sampling)
        elif not self._can_advance or meta is not self._meta:
            raise ValueError("only what was drawn from last can be brought one token further")
        # From here on NumPy is out of the way: a call of it touches some twenty pages that nothing else does.
        team = self._team
        if team.threads != self._threads:
            at[words.THREADS] = self._threads = team.threads
        logits, lent = self._logits.lend(self._num_logits)
        if lent != self._lent:
            at[words.LOGITS] = self._lent = lent
        if advance != self._advances:
            at[words.ADVANCE] = self._advances = advance
        self._can_advance = False
        if not run_step(team.board(), self._step, self._like):
            raise unknown_ids(token_ids, self._stack.embedding)
        del logits  # kept to here for who asks whether anybody holds them
        self._can_advance = self._one_each
        return self._result_ids.tolist()

    def _describe(
        self,
        token_ids: torch.Tensor,
        meta: AttentionMetadata,
        kv: Sequence[LayerKV],
        rows: torch.Tensor,
        sampling: SampleBatch,
    ) -> None:
        """Write the words of a step that draws."""
        at = self._at
        self._take(meta, kv, self._stack.embedding.dtype)
        if token_ids is not self._asked[0] or rows is not self._asked[1]:
            self._asked = token_ids, rows
            self._ids, self._wanted = token_ids.contiguous(), rows.contiguous()
            self._places = self._ids.data_ptr(), self._wanted.data_ptr(), len(rows)
        wanted = self._places[2]
        if sampling is not self._sampling:
            pairs = zip(_columns(sampling), _DRAW_TYPES, strict=True)
            self._columns[:] = [_data(column, wanted, dtype) for column, dtype in pairs]
            self._sampling = sampling
        if len(self._drawn) < wanted:
            self._drawn = np.empty(wanted, np.int64)
            at[words.DRAWN] = self._drawn.ctypes.data
        self._result_ids = self._drawn.data[:wanted]
        self._num_logits = wanted * self._stack.head.out_features
        self._one_each = wanted == meta.num_sequences == meta.num_tokens
        at[words.IDS], at[words.ROWS], at[words.WANTED] = self._places
        at[words.EMBEDDED], at[words.RESULT] = self._embedded, self._result
        self._lent = 0

    def _write(self, **values: int) -> None:
        for name, value in values.items():
            self._at[getattr(words, name)] = value

    def _take(self, meta: AttentionMetadata, kv: Sequence[LayerKV], dtype: torch.dtype) -> None:
        """Write the words of the pool and the batch."""
        if kv is not self._kv:
            self._take_pool(kv, dtype)
        if meta is not self._meta:
            tokens = meta.num_tokens
            if tokens > self._rows:
                self._make_room(tokens)
            self._write(
                TOKENS=tokens,
                SEQUENCES=meta.num_sequences,
                QUERY_START=meta.query_start.data_ptr(),
                SEQ_LENS=meta.seq_lens.data_ptr(),
                TABLES=meta.block_tables.data_ptr(),
                TABLE_WIDTH=meta.block_tables.shape[1],
                POSITIONS=meta.positions.data_ptr(),
                SLOTS=meta.slot_mapping.data_ptr(),
            )
            self._meta = meta

    def _take_pool(self, kv: Sequence[LayerKV], dtype: torch.dtype) -> None:
        first = kv[0]
        self._pool = np.array([each.addresses for each in kv], np.int64)
        self._write(
            POOL=self._pool.ctypes.data,
            DEPTH=len(kv),
            NUM_BLOCKS=first.num_blocks,
            BLOCK_SIZE=first.block_size,
            BLOCK_BYTES=first.k.stride(0) * first.k.itemsize,
            TILES=attention_amx.use_tiles(dtype, first.block_size, first.head_dim, self._stack.scale),
        )
        self._kv = kv

    def _make_room(self, tokens: int) -> None:
        """For the step's activations."""
        stack, size = self._stack, self._like.itemsize
        attended = stack.num_heads * stack.head_dim
        gated = all(layer.gate_up.gated for layer in stack.layers)
        widths = (
            size * self._hidden,
            4 * self._hidden,
            4 * self._hidden,
            size * stack.layers[0].qkv.out_features,
            size * attended,
            size * self._hidden,
            size * self._inner * (1 if gated else 3),
            size * attended,
            4 * self._hidden,
            size * self._hidden,
            size * self._hidden,
        )
        starts = np.cumsum([0, *(-(-tokens * width // _LINE) * _LINE + _APART for width in widths)])
        self._scratch = huge_pages(int(starts[-1]))
        *activations, self._embedded, self._result = (starts[:-1] + self._scratch.ctypes.data).tolist()
        self._at[words.X : words.X + len(activations)] = activations
        self._rows = tokens


def attention_work(meta: AttentionMetadata, items: int, kv: LayerKV) -> int:
    """Elements of keys that a step's attention reads, 0 where nobody could share them."""
    return int(meta.host.seq_lens.sum()) * kv.num_kv_heads * kv.head_dim if items > 1 else 0


_DRAW_TYPES = (np.float32, np.int32, np.float32, np.float32, np.uint64, np.int64, np.int32)


def _columns(sampling: SampleBatch) -> tuple[npt.NDArray[Any], ...]:
    return (
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        sampling.seed,
        sampling.position,
        sampling.index,
    )


def _data(column: npt.NDArray[Any], rows: int, dtype: type) -> int:
    if column.shape != (rows,) or column.dtype != dtype or not column.flags.c_contiguous:
        raise ValueError(f"expected {dtype.__name__} for each of {rows} rows, got {column.dtype} {column.shape}")
    return column.ctypes.data


def _table(stack: DecoderStack) -> npt.NDArray[np.int64]:
    """Addresses of what the layers are made of. `stack` keeps it alive."""
    made = np.zeros((len(stack.layers), table.COLUMNS), np.int64)
    for index, layer in enumerate(stack.layers):
        last = index + 1 == len(stack.layers)
        following = stack.final_norm if last else stack.layers[index + 1].input_norm
        row = made[index]
        row[table.INPUT_NORM], row[table.POST_NORM], row[table.NEXT_NORM] = (
            weight.data_ptr() for weight in (layer.input_norm, layer.post_norm, following)
        )
        if layer.head_norms:
            row[table.QUERY_NORM], row[table.KEY_NORM] = (weight.data_ptr() for weight in layer.head_norms)
        row[table.ROTATES], row[table.IS_GATED] = layer.rotates, layer.gate_up.gated
        for column, linear in _linears(layer):
            row[column], row[column + 1] = linear.record.ctypes.data, linear.worker()
    return made


def _linears(layer: DecoderLayer) -> list[tuple[int, Any]]:
    return [
        (table.QKV, layer.qkv),
        (table.OUTPUT, layer.output),
        (table.GATE_UP, layer.gate_up),
        (table.DOWN, layer.down),
    ]


def can_run(stack: DecoderStack, dtype: torch.dtype) -> bool:
    """Whether all linears are tasks on activations of this type; a weight of odd width is kept as float32."""
    linears = [linear for layer in stack.layers for _, linear in _linears(layer)]
    return bool(linears) and all(
        getattr(linear, "record", None) is not None and linear.dtype == dtype
        for linear in (*linears, stack.embedding, stack.head)
    )
