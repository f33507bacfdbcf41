"""Invented token ids that are equal exactly where a trace says that prompts are.

A trace names content by chain ids, block ids or sessions. Here content is *runs* of consecutive ids, so a prompt of
100,000 tokens costs a few numbers, and two prompts share a prefix exactly where their runs do.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import overload

Run = tuple[int, int]  # first token id, number of tokens: ids first, first + 1, ...

END_TOKEN = 0  # ends every simulated output; no run holds it
VOCABULARY = 2**31 - 1


def join_runs(runs: Iterable[Run]) -> tuple[Run, ...]:
    """The same tokens in as few runs as possible. Empty runs vanish."""
    joined: list[Run] = []
    for first, count in runs:
        if joined and joined[-1][0] + joined[-1][1] == first:
            joined[-1] = (joined[-1][0], joined[-1][1] + count)
        elif count:
            joined.append((first, count))
    return tuple(joined)


def cut_runs(runs: Sequence[Run], start: int, stop: int) -> tuple[Run, ...]:
    """Runs of the tokens at positions start..stop."""
    cut: list[Run] = []
    position = 0
    for first, count in runs:
        low, high = max(start - position, 0), min(stop - position, count)
        if low < high:
            cut.append((first + low, high - low))
        position += count
    return tuple(cut)


class TokenRuns(Sequence[int]):
    """Runs read as the list of their token ids. A slice is a real list."""

    __slots__ = ("_length", "_runs", "_starts")

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = tuple(runs)
        ends = list(accumulate(count for _, count in self._runs))
        self._starts = [0, *ends[:-1]]
        self._length = ends[-1] if ends else 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(range(first, first + count) for first, count in self._runs)

    @overload
    def __getitem__(self, key: int) -> int: ...
    @overload
    def __getitem__(self, key: slice) -> list[int]: ...
    def __getitem__(self, key: int | slice) -> int | list[int]:
        if isinstance(key, int):
            position = key + self._length if key < 0 else key
            if not 0 <= position < self._length:
                raise IndexError(f"position {key} of {self._length} tokens")
            index = bisect_right(self._starts, position) - 1
            return self._runs[index][0] + position - self._starts[index]
        start, stop, step = key.indices(self._length)
        if step != 1:
            return list(self)[key]
        if len(self._runs) == 1:
            first = self._runs[0][0]
            return list(range(first + start, first + stop))
        tokens: list[int] = []
        index = bisect_right(self._starts, start) - 1
        while start < stop:
            first, count = self._runs[index]
            offset = start - self._starts[index]
            taken = min(count - offset, stop - start)
            tokens.extend(range(first + offset, first + offset + taken))
            start += taken
            index += 1
        return tokens
