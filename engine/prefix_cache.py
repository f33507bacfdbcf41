"""Names for the content of blocks, and blocks whose content is being computed.

A full block's content is decided by its tokens and everything before them, so its name is a chain:
hash(block) = SHA-256(hash(previous block) + token ids). The chain starts from a digest of tagged, length-prefixed
pairs (model, tenant salt, ...), so no two different tuples can run together into the same bytes, and requests with
different salts share nothing. SHA-256 since a collision would hand one user's context to another.

Two requests with the same prefix that arrive together would compute it twice, as nothing is published before it is
computed. So the first one announces the names of the blocks it is about to compute. Whoever comes second shares a
block as soon as it is scheduled (within a step all keys and values of a layer are written before its attention reads
them, so this is right even in the same step), and waits while it is announced but not scheduled yet.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from pagemill.engine.request import Request

_BEGUN = hashlib.sha256()  # a copy of it costs half of a new one, for which the library looks the algorithm up


def root_hash(tags: Mapping[str, str]) -> bytes:
    """Start of a hash chain: 32 bytes that differ whenever any tag's name or value does."""
    digest = hashlib.sha256()
    for name in sorted(tags):
        for part in (name.encode(), tags[name].encode()):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.digest()


def block_hashes(parent: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Names of full blocks that follow one another: each 32 bytes over the name before and its token ids (int32)."""
    packed = struct.pack(f"<{len(token_ids)}i", *token_ids)
    size = 4 * block_size
    names: list[bytes] = []
    for start in range(0, len(packed), size):
        digest = _BEGUN.copy()
        digest.update(parent + packed[start : start + size])
        parent = digest.digest()
        names.append(parent)
    return names


class AnnouncedBlocks:
    """Blocks being computed by running requests: their names, and who computes them."""

    __slots__ = ("_owners",)

    def __init__(self) -> None:
        self._owners: dict[bytes, Request] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def announce(self, names: Iterable[bytes], owner: Request) -> None:
        for name in names:
            self._owners.setdefault(name, owner)

    def withdraw(self, name: bytes, owner: Request) -> None:
        if self._owners.get(name) is owner:
            del self._owners[name]

    def owner(self, name: bytes) -> Request | None:
        return self._owners.get(name)


class MissCounter:
    """Tokens that the prefix cache did not have, by cause. It remembers a bounded number of the names asked for."""

    REMEMBERED = 200_000

    def __init__(self) -> None:
        self.new = 0
        self.evicted = 0
        self.partial = 0
        # Not a dict: taking its oldest key walks over all that were taken before.
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def count(self, missed: list[bytes], num_full: int, block_size: int, partial: int) -> None:
        """`missed`: names of the blocks that were not found; the first `num_full` of them are full blocks."""
        self.partial += partial
        for name in missed[:num_full]:
            if name in self._seen:
                self.evicted += block_size
            else:
                self.new += block_size
                self._seen[name] = None
                if len(self._seen) > self.REMEMBERED:
                    self._seen.popitem(last=False)
