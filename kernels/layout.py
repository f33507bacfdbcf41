"""Where the keys and values of a block lie in memory: the one place that knows.

The pool is one tensor [layer, block, piece]. A piece is what one layer keeps in one block, keys and values, and lies
in a row; those of neighbouring blocks lie side by side. Attention reads one layer at a time, so all that it reads lies
in one stretch of the pool, and a sequence whose blocks have ascending ids is one stream. A copy or a swap of a block
moves as many pieces as there are layers, some KiB each.

Inside a piece the order is the one that the device reads fastest:

* "token_major" (CUDA): [2, block_size, kv_heads, head_dim].
* "k_major" (CPU): [2, kv_heads, ...]. Keys are [head_dim / P, block_size, P], so that a product with a query walks the
  tokens of a block with whole vectors; P elements (two for 16-bit types, else one) share a 32-bit word, which is how a
  CPU widens bfloat16 with one shift and one mask. Values are [block_size, head_dim].

Rejected: the block outermost, [block, layer, ...], which makes a block one piece to move and was slower to read
(`docs/architecture.md` has the figures); keys and values of a layer apart, [layer, 2, block, ...], which gained nothing
more.

Block 0 is the null block: padding may point at it and nobody reads it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch

from pagemill.kernels.cpu.arena import huge_pages

KVForm = Literal["token_major", "k_major"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class LayerKV:
    """The keys and values of one layer, as views of the pool. Opaque outside the kernels.

    k, v: [num_blocks, block_size, kv_heads, head_dim] when token_major;
    k [num_blocks, kv_heads, head_dim / P, block_size, P], v [num_blocks, kv_heads, block_size, head_dim] when k_major.
    """

    k: torch.Tensor
    v: torch.Tensor
    form: KVForm
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int

    def gather(self, block_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the keys and values of some blocks, in token order: two of [n * block_size, kv_heads, head_dim]."""
        k, v = self.k[block_ids], self.v[block_ids]
        if self.form == "k_major":
            k = k.permute(0, 3, 1, 2, 4)
            v = v.permute(0, 2, 1, 3)
        shape = (-1, self.num_kv_heads, self.head_dim)
        return k.reshape(shape), v.reshape(shape)

    def scatter(self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write key, value [n, kv_heads, head_dim] at slots int64 [n], each block_id * block_size + offset."""
        block, offset = slots // self.block_size, slots % self.block_size
        if self.form == "k_major":
            pack = self.k.shape[-1]
            packed = key.reshape(key.shape[0], self.num_kv_heads, self.head_dim // pack, pack)
            self.k.permute(0, 3, 1, 2, 4)[block, offset] = packed.to(self.k.dtype)
            self.v.permute(0, 2, 1, 3)[block, offset] = value.to(self.v.dtype)
        else:
            self.k[block, offset] = key.to(self.k.dtype)
            self.v[block, offset] = value.to(self.v.dtype)

    @cached_property
    def addresses(self) -> tuple[int, int]:
        """Of block 0's keys and values."""
        return self.k.data_ptr(), self.v.data_ptr()

    @cached_property
    def words(self) -> tuple[Any, Any]:
        """The same memory as NumPy arrays for the CPU kernels: float32 as it is, 16-bit types as uint16."""
        if self.k.dtype == torch.float32:
            return self.k.numpy(), self.v.numpy()
        return self.k.view(torch.uint16).numpy(), self.v.view(torch.uint16).numpy()


@dataclass(frozen=True, kw_only=True)
class KVLayout:
    """Shape and order of a KV pool. Raises ValueError on sizes that no kernel can serve.

    num_blocks counts the null block. block_size is in tokens. form: None means the device's own.
    """

    num_blocks: int
    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    form: KVForm | None = None

    def __post_init__(self) -> None:
        for name in ("num_blocks", "num_layers", "block_size", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be float32, bfloat16 or float16, got {self.dtype}")
        if self.form is None:
            object.__setattr__(self, "form", "k_major" if torch.device(self.device).type == "cpu" else "token_major")
        if self.head_dim % self._pack:
            raise ValueError(f"head_dim must be even for {self.dtype}, got {self.head_dim}")

    @property
    def _pack(self) -> int:
        return 2 if self.form == "k_major" and self.dtype.itemsize == 2 else 1

    @property
    def elements_per_piece(self) -> int:
        """Elements of one layer's keys and values in one block."""
        return 2 * self.num_kv_heads * self.block_size * self.head_dim

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers, keys and values."""
        return self.num_layers * self.elements_per_piece * self.dtype.itemsize

    def allocate(self) -> torch.Tensor:
        """The pool [num_layers, num_blocks, elements_per_piece]. The null block is zero, the rest may be anything.

        On the CPU the operating system commits memory as blocks are first written, so that a generous pool costs
        nothing until it is used.
        """
        shape = (self.num_layers, self.num_blocks, self.elements_per_piece)
        if torch.device(self.device).type == "cpu":
            pool = torch.from_numpy(huge_pages(math.prod(shape) * self.dtype.itemsize))
            pool = pool.view(self.dtype).view(shape)
        else:
            pool = torch.empty(shape, dtype=self.dtype, device=self.device)
        pool[:, 0].zero_()  # memory for the first blocks as well, lest the first request should wait for it
        return pool

    def layer(self, pool: torch.Tensor, index: int) -> LayerKV:
        """The keys and values of one layer of a pool made by `allocate`."""
        if not 0 <= index < self.num_layers:
            raise IndexError(f"layer {index} of {self.num_layers}")
        assert self.form is not None
        heads, tokens, dim, pack = self.num_kv_heads, self.block_size, self.head_dim, self._pack
        keys, values = pool[index].view(self.num_blocks, 2, tokens * heads * dim).unbind(1)
        if self.form == "token_major":
            k, v = (part.view(self.num_blocks, tokens, heads, dim) for part in (keys, values))
        else:
            k = keys.view(self.num_blocks, heads, dim // pack, tokens, pack)
            v = values.view(self.num_blocks, heads, tokens, dim)
        return LayerKV(k, v, self.form, self.num_blocks, tokens, heads, dim)
