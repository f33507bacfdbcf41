"""The sequences of the last step, a row each: most steps are the same sequences again, one token further.

Rows are kept by place in the batch. Where the sequences are others than last time, those that stay bring their rows
along. A block table is written here as int32; whether that is still true is asked of the table itself, by comparing its
ids with a copy of what was written. So it does not matter what was done to it meanwhile: growth, a copy on write, a
fork, blocks given back, out of sight or swapped.

Where the same sequences are one token further, less will do: of a sequence that has run in the last step and runs in
this one, no more can have changed than that its table is longer, or that the block is another in which the token goes,
but for blocks out of sight. Comparing these instead of all ids leaves 96 tables and 96 copies out of the caches' way.
"""

from __future__ import annotations

import numpy as np

from pagemill.engine.request import Request

WIDTH = 16  # block tables have room for a multiple of so many ids

DRAW = np.dtype(
    [
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("seed", np.uint64),
        ("index", np.int32),
    ]
)


class BatchRows:
    """`requests` [S] of the last `update`; `draws` [S]: how their tokens are drawn; `tables` int32 [S, W]: their block
    tables, with anything behind a table's end. `marked`: whether more than a draw is wanted of some request: rules for
    its logits, log-probabilities.

    The arrays are others after an `update` that returned True, and else the same ones, changed.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.draws = np.zeros(1, DRAW)
        self.tables = np.zeros((1, WIDTH), np.int32)
        self.marked = False
        self._width = WIDTH
        self._cells = self.tables.data  # of it: an id costs less to write than through NumPy
        self._written: list[list[int]] = []
        # Of each table as it was last seen: how many ids it has, and which is that of the block that is written to.
        self._lengths: list[int] = []
        self._heads: list[int] = []

    def update(
        self,
        requests: list[Request],
        tables: list[list[int]],
        lengths: list[int],
        heads: list[int],
        *,
        further: bool = False,
    ) -> bool:
        """Take the next step's sequences and their block tables, in order; there is at least one. lengths: of the
        tables; heads: the block of each that the step's first token goes to. further: each sequence has one token to
        compute, and had the one before it in the last step, if it was part of that, and no block leaves a table."""
        fresh = requests != self.requests
        if fresh:
            self._arrange(requests)
        if not fresh and further:
            before, now = zip(self._lengths, self._heads, strict=True), zip(lengths, heads, strict=True)
            changed = [place for place, (one, other) in enumerate(zip(before, now, strict=True)) if one != other]
        elif tables == self._written:
            changed = []
        else:
            changed = [place for place, table in enumerate(tables) if table != self._written[place]]
        self._lengths, self._heads = lengths, heads
        if changed and max(lengths) > self._width:
            fresh = True
            self._widen(max(lengths))
        for place in changed:
            self._write(place, tables[place])
        return fresh

    def _widen(self, longest: int) -> None:
        wider = np.zeros((len(self.tables), -(-longest // WIDTH) * WIDTH), np.int32)
        wider[:, : self._width] = self.tables
        self._width = wider.shape[1]
        self.tables, self._cells = wider, wider.data

    def _write(self, place: int, table: list[int]) -> None:
        written = self._written[place]
        known = len(written)
        if table[:known] == written:
            for index in range(known, len(table)):
                self._cells[place, index] = table[index]
        else:
            self.tables[place, : len(table)] = table
        self._written[place] = table.copy()

    def _arrange(self, requests: list[Request]) -> None:
        places = {request: place for place, request in enumerate(self.requests)}
        source = [places.get(request, -1) for request in requests]
        self.draws, self.tables = self.draws[source], self.tables[source]
        self._cells = self.tables.data
        written = self._written
        self._written = [written[place] if place >= 0 else [] for place in source]
        for place, (request, known) in enumerate(zip(requests, source, strict=True)):
            if known < 0:
                params = request.params
                self.draws[place] = (
                    params.temperature,
                    params.top_k,
                    params.top_p,
                    params.min_p,
                    request.seed,
                    request.index,
                )
        self.marked = any(_is_marked(request) for request in requests)
        self.requests = requests


def _is_marked(request: Request) -> bool:
    params = request.params
    return request.rules is not None or params.logprobs is not None or params.prompt_logprobs is not None
