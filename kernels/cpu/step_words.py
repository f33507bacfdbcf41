"""What a step is for compiled code: int64 words, most of them addresses (see `decoder`).

Sizes are in elements, but for those called bytes; SIZE is that of an element in bytes. NUMBERS: float32 eps and scale.
RUNS: rows of RUN_WORDS, layers that see equally far. DRAWS: addresses of the columns of a `SampleBatch`. IDS is 0
where tokens are embedded already, LOGITS is 0 where nothing is drawn. ADVANCE: whether the arrays are the last step's,
to be brought one token further, to what DRAWN holds.
"""

from __future__ import annotations

RUN_BEGIN, RUN_END, RUN_WINDOW = range(3)
RUN_WORDS = 3

(
    # the stack
    LAYERS,
    NUM_LAYERS,
    RUNS,
    NUM_RUNS,
    HEADS,
    KV_HEADS,
    DIM,
    SIZE,
    HIDDEN,
    INNER,
    LONGEST,
    COS_SIN,
    NUMBERS,
    GATHERER,
    VOCABULARY,
    HEAD,
    HEAD_WORKER,
    THREADS,
    PART_FLOATS,
    # the pool
    POOL,
    DEPTH,
    NUM_BLOCKS,
    BLOCK_SIZE,
    BLOCK_BYTES,
    TILES,
    # the step's sequences
    SEQUENCES,
    QUERY_START,
    SEQ_LENS,
    TABLES,
    TABLE_WIDTH,
    POSITIONS,
    SLOTS,
    ROWS,
    WANTED,
    # a task for who looks up the embeddings (`gather`)
    TABLE_RECORD,
    IDS,
    TOKENS,
    EMBEDDED,
    # what is to come of it
    RESULT,
    LOGITS,
    DRAWS,
    DRAWN,
    ADVANCE,
    # where its activations lie
    X,
    RESIDUAL,
    SPARE,
    QKV_ROWS,
    ATTENDED,
    PROJECTED,
    ACTIVATED,
    PICKED,
    PICKED_RESIDUAL,
) = range(52)
WORDS = 52
