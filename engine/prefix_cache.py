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
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


def root_hash(tags: Mapping[str, str]) -> bytes:
    """Start of a hash chain: 32 bytes that differ whenever any tag's name or value does."""
    digest = hashlib.sha256()
    for name in sorted(tags):
        for part in (name.encode(), tags[name].encode()):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Name of a full block: 32 bytes over the parent's name and the block's token ids (int32)."""
    return hashlib.sha256(parent + array("i", token_ids).tobytes()).digest()


@dataclass(slots=True)
class Announcement:
    """A block that `owner` is going to compute; `block_id` is set once it is scheduled and may be shared."""

    owner: object
    block_id: int | None = None


class AnnouncedBlocks:
    """Blocks being computed by running requests, by hash."""

    __slots__ = ("_by_hash",)

    def __init__(self) -> None:
        self._by_hash: dict[bytes, Announcement] = {}

    def __len__(self) -> int:
        return len(self._by_hash)

    def announce(self, name: bytes, owner: object) -> None:
        self._by_hash.setdefault(name, Announcement(owner))

    def schedule(self, name: bytes, owner: object, block_id: int) -> None:
        entry = self._by_hash.get(name)
        if entry is not None and entry.owner is owner:
            entry.block_id = block_id

    def withdraw(self, name: bytes, owner: object) -> None:
        entry = self._by_hash.get(name)
        if entry is not None and entry.owner is owner:
            del self._by_hash[name]

    def get(self, name: bytes) -> Announcement | None:
        return self._by_hash.get(name)
