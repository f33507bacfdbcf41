"""The sampler's noise: Philox4x32-10, a pure function of (seed, position, choice, token id).

Philox is the counter-based generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011): no
state, so a token's noise does not depend on what else is in the batch, on a preemption or on a crash. The integers are
the contract between back ends; the floating-point Gumbel value made from them may differ in its last bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

PHILOX_M0 = 0xD2511F53
PHILOX_M1 = 0xCD9E8D57
PHILOX_W0 = 0x9E3779B9
PHILOX_W1 = 0xBB67AE85
PHILOX_ROUNDS = 10

UNIT = 2.0**-32  # width of one of the 2^32 steps that a draw can take in (0, 1)

_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox(counter: npt.NDArray[np.uint32], key: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Philox4x32-10 of counters [..., 4] under keys [..., 2] (broadcast); returns uint32 [..., 4]."""
    c0, c1, c2, c3 = (counter[..., i].astype(np.uint64) for i in range(4))
    k0, k1 = (key[..., i].astype(np.uint64) for i in range(2))
    for _ in range(PHILOX_ROUNDS):
        product0 = c0 * np.uint64(PHILOX_M0)
        product1 = c2 * np.uint64(PHILOX_M1)
        c0, c1, c2, c3 = (
            (product1 >> _SHIFT) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> _SHIFT) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0 = (k0 + np.uint64(PHILOX_W0)) & _LOW
        k1 = (k1 + np.uint64(PHILOX_W1)) & _LOW
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def token_bits(seed: int, position: int, choice: int, vocab_size: int) -> npt.NDArray[np.uint32]:
    """The 32 random bits of each token id 0 .. vocab_size - 1 at one place of one choice.

    Key: the seed's low and high word. Counter: (token_id // 4, low word of position, choice, high word of position);
    token_id % 4 picks the output word.
    """
    groups = (vocab_size + 3) // 4
    counter = np.zeros((groups, 4), np.uint32)
    counter[:, 0] = np.arange(groups, dtype=np.uint32)
    counter[:, 1] = np.uint32(position & 0xFFFFFFFF)
    counter[:, 2] = np.uint32(choice & 0xFFFFFFFF)
    counter[:, 3] = np.uint32((position >> 32) & 0xFFFFFFFF)
    key = np.array([seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF], np.uint32)
    return philox(counter, key).reshape(-1)[:vocab_size]


def gumbel(bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.floating[Any]]:
    """Standard Gumbel noise -log(-log(u)), u = (bits + 1/2) / 2^32, in float64: there u is exact and never 0 or 1."""
    uniform = (bits.astype(np.float64) + 0.5) * UNIT
    noise: npt.NDArray[np.floating[Any]] = -np.log(-np.log(uniform))
    return noise
