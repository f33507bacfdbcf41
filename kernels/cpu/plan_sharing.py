"""Which sequences have leading segments of their context in common: for the work list (`plan`), in compiled code.

Two sequences share a segment where their block tables name the same blocks up to its end. Members of a group that go
different ways are told apart by a hash of a segment's blocks, and compared block by block where the hash is the same.
"""

# numba ships no types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any

import numpy as np

from pagemill.kernels.cpu.jit import helper

SEGMENT = 256
"""Context tokens of a segment. Shorter ones share and split more, and cost more joining."""

_PRIME = np.uint64(1099511628211)  # of FNV-1a, a hash of words here instead of bytes


@helper
def _same(one: Any, other: Any) -> bool:
    column = 0
    while column < one.shape[0] and one[column] == other[column]:
        column += 1
    return bool(column == one.shape[0])


@helper
def _alike(tables: Any, members: Any, found: Any, sizes: Any) -> int:
    """Sort members, which have equal tables so far, into groups of two or more with equal `tables` [S, W] too.

    Writes the groups to `found`, one behind the other, and their sizes; returns how many there are.
    """
    hashes = np.empty(members.shape[0], np.uint64)
    for index in range(members.shape[0]):
        value = np.uint64(14695981039346656037)
        for block in tables[members[index]]:
            value = (value ^ np.uint64(block)) * _PRIME
        hashes[index] = value
    order = np.argsort(hashes, kind="mergesort")
    groups = 0
    used = 0
    index = 0
    while index < members.shape[0]:
        first = members[order[index]]
        begin = used
        end = index
        while end < members.shape[0] and hashes[order[end]] == hashes[order[index]]:
            # One whose hash is the same by chance is left alone: sharing is no duty.
            if _same(tables[members[order[end]]], tables[first]):
                found[used] = members[order[end]]
                used += 1
            end += 1
        if used - begin > 1:
            sizes[groups] = used - begin
            groups += 1
        else:
            used = begin
        index = end
    return groups


@helper
def shared_segments(query_start: Any, seq_lens: Any, block_tables: Any, block_size: int, few: int) -> Any:
    """Leading segments that sequences of at most `few` tokens in this step have in common with others.

    Returns int32 [S], how many they are of each sequence; and the groups that compute a segment together: members of
    all, one group behind the other; where each begins in that list, with the end of the last; the segment of each; and
    1 for each that has the members of the group before it.
    """
    count = seq_lens.shape[0]
    whole = np.zeros(count, np.int64)  # segments that all of a sequence's tokens see to the end
    current = np.empty(count, np.int32)
    room = 0
    members = 0
    for sequence in range(count):
        length = query_start[sequence + 1] - query_start[sequence]
        whole[sequence] = (seq_lens[sequence] - length + 1) // SEGMENT
        if 0 < length <= few and whole[sequence] > 0:
            current[members] = sequence
            members += 1
            room += whole[sequence]
    shared = np.zeros(count, np.int32)
    if members < 2:
        room = 0
    together = np.empty(room, np.int32)
    starts = np.zeros(room + 1, np.int64)
    segments = np.empty(room, np.int64)
    repeats = np.zeros(room, np.int64)
    groups = 0
    used = 0
    # Each group goes on alone, so that those of one set of members follow each other.
    pending = np.empty(room + 1, np.int64)  # groups whose members have not been asked for the next segment
    waiting = 0
    found = np.empty(members, np.int32)
    sizes = np.empty(members, np.int64)
    parent = np.int64(-1)
    asked = current[:members] if room else current[:0]
    segment = 0
    while True:
        going = np.empty(asked.shape[0], np.int32)
        left = 0
        for member in asked:
            if whole[member] > segment:
                going[left] = member
                left += 1
        if left > 1:
            first_block = segment * SEGMENT // block_size
            end_block = -(-(segment + 1) * SEGMENT // block_size)
            made = _alike(block_tables[:, first_block:end_block], going[:left], found, sizes)
            taken = 0
            for index in range(made):
                size = sizes[index]
                for member in found[taken : taken + size]:
                    together[used] = member
                    used += 1
                    shared[member] = segment + 1
                segments[groups] = segment
                repeats[groups] = parent == groups - 1 and parent >= 0 and size == asked.shape[0]
                groups += 1
                starts[groups] = used
                taken += size
            for back in range(made):
                pending[waiting] = groups - 1 - back
                waiting += 1
        if waiting == 0:
            break
        waiting -= 1
        parent = pending[waiting]
        asked = together[starts[parent] : starts[parent + 1]]
        segment = segments[parent] + 1
    return shared, together[:used], starts[: groups + 1], segments[:groups], repeats[:groups]
