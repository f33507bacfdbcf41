"""A whole step in compiled code: what `CpuDecoder` calls.

A step is an array of words (`step_words`); `board` is the team's, or 0 (`team`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pagemill.kernels.cpu import decoder_layers as table
from pagemill.kernels.cpu import sampler
from pagemill.kernels.cpu import step_words as words
from pagemill.kernels.cpu.decoder_layers import begin_layers, multiply, run_layers, team_for
from pagemill.kernels.cpu.gather import GATHER_PARTS, ids_fit
from pagemill.kernels.cpu.jit import helper, kernel
from pagemill.kernels.cpu.matmul import FLOAT32, TASK_WORDS
from pagemill.kernels.cpu.plan import make_plan
from pagemill.kernels.cpu.team import run_at
from pagemill.kernels.cpu.views import matrix, vector


@helper
def _run_all(board: int, at: Any, task: Any, like: Any) -> None:
    """The layers of a step, with a work list for each run of those that see equally far."""
    layers = matrix(at[words.LAYERS], at[words.NUM_LAYERS], table.COLUMNS, np.int64(0))
    pool = matrix(at[words.POOL], at[words.DEPTH], 2, np.int64(0))
    runs = matrix(at[words.RUNS], at[words.NUM_RUNS], words.RUN_WORDS, np.int64(0))
    numbers = vector(at[words.NUMBERS], 2, np.float32(0.0))
    sequences, depth, kv_heads = at[words.SEQUENCES], at[words.DEPTH], at[words.KV_HEADS]
    query_start = vector(at[words.QUERY_START], sequences + 1, np.int32(0))
    seq_lens = vector(at[words.SEQ_LENS], sequences, np.int32(0))
    block_tables = matrix(at[words.TABLES], sequences, at[words.TABLE_WIDTH], np.int32(0))
    begin_layers(board, layers, at, numbers[0], like)
    for index in range(at[words.NUM_RUNS]):
        run = runs[index]
        begin, end = run[words.RUN_BEGIN], min(run[words.RUN_END], depth)
        if begin >= end:
            return
        group = at[words.HEADS] // kv_heads
        items, tokens, rows, parts = make_plan(
            query_start,
            seq_lens,
            block_tables,
            group,
            kv_heads,
            at[words.BLOCK_SIZE],
            at[words.THREADS],
            run[words.RUN_WINDOW],
        )
        work = seq_lens.sum() * kv_heads * at[words.DIM] if items.shape[0] > 1 else 0
        run_layers(
            board,
            team_for(board, work),
            begin,
            end,
            layers,
            pool,
            at,
            numbers[0],
            numbers[1],
            run[words.RUN_WINDOW],
            items,
            tokens,
            rows,
            np.empty(parts * at[words.PART_FLOATS], np.float32),
            block_tables,
            task,
            like,
        )


@helper
def _advance(at: Any) -> None:
    """The same sequences again: what was drawn for each is its token now, behind those of the last step."""
    sequences, size = at[words.SEQUENCES], at[words.BLOCK_SIZE]
    tables = matrix(at[words.TABLES], sequences, at[words.TABLE_WIDTH], np.int32(0))
    ids = vector(at[words.IDS], sequences, np.int64(0))
    drawn = vector(at[words.DRAWN], sequences, np.int64(0))
    positions = vector(at[words.POSITIONS], sequences, np.int64(0))
    seq_lens = vector(at[words.SEQ_LENS], sequences, np.int32(0))
    slots = vector(at[words.SLOTS], sequences, np.int64(0))
    draws = vector(vector(at[words.DRAWS], 7, np.int64(0))[5], sequences, np.int64(0))
    for place in range(sequences):
        position = positions[place] + 1
        ids[place] = drawn[place]
        positions[place] = position
        seq_lens[place] = position + 1
        slots[place] = np.int64(tables[place, position // size]) * size + position % size
        draws[place] += 1


@helper
def _embed(board: int, at: Any) -> bool:
    """Look up the tokens' embeddings; returns False where an id is none of the vocabulary."""
    tokens = at[words.TOKENS]
    if not ids_fit(vector(at[words.IDS], tokens, np.int64(0)), at[words.VOCABULARY]):
        return False
    task = at[words.TABLE_RECORD :].ctypes.data
    run_at(team_for(board, tokens * at[words.HIDDEN]), GATHER_PARTS, at[words.GATHERER], task)
    return True


@helper
def _draw(board: int, at: Any, task: Any) -> None:
    """The head, and a token from each row of its logits."""
    wanted, hidden, vocabulary = at[words.WANTED], at[words.HIDDEN], at[words.VOCABULARY]
    logits = at[words.LOGITS]
    multiply(
        board,
        task,
        at[words.HEAD],
        at[words.HEAD_WORKER],
        at[words.RESULT],
        hidden,
        wanted,
        logits,
        vocabulary,
        FLOAT32,
    )
    columns = vector(at[words.DRAWS], 7, np.int64(0))
    sampler.sample(
        team_for(board, wanted * vocabulary) if wanted > 1 else 0,
        matrix(logits, wanted, vocabulary, np.float32(0.0)),
        vector(columns[0], wanted, np.float32(0.0)),
        vector(columns[1], wanted, np.int32(0)),
        vector(columns[2], wanted, np.float32(0.0)),
        vector(columns[3], wanted, np.float32(0.0)),
        vector(columns[4], wanted, np.uint64(0)),
        vector(columns[5], wanted, np.int64(0)),
        vector(columns[6], wanted, np.int32(0)),
        vector(at[words.DRAWN], wanted, np.int64(0)),
    )


@kernel
def run_step(board: int, step: int, like: Any) -> bool:
    """From IDS, or 0 and EMBEDDED, to RESULT, and on to DRAWN unless LOGITS is 0. step: address of the words; like: an
    element. Returns False, and does nothing, where an id is none of the vocabulary."""
    at = vector(step, words.WORDS, np.int64(0))
    if at[words.ADVANCE] != 0:
        _advance(at)
    if at[words.IDS] != 0 and not _embed(board, at):
        return False
    task = np.zeros(TASK_WORDS, np.int64)
    _run_all(board, at, task, like)
    if at[words.LOGITS] != 0:
        _draw(board, at, task)
    return True
