"""Weights read straight from a GGUF file, quantised as they are there, under the names that transformers gives them."""

from __future__ import annotations

from pathlib import Path

import torch

from pagemill.engine.errors import ConfigError
from pagemill.engine.gguf_blocks import read_blocks
from pagemill.engine.gguf_convert import configuration, dequantised, interleaved_heads, row_order, stored_name
from pagemill.engine.gguf_file import GgufFile
from pagemill.kernels.quantised_weight import QuantisedWeight


class GgufWeights:
    """The tensors of a GGUF file. Raises `ConfigError` on a damaged file and on one of a kind that is not supported."""

    def __init__(self, path: Path) -> None:
        self._file = GgufFile(path)
        self._heads = interleaved_heads(configuration(self._file)[0])
        self._tensors = {stored_name(name, path): tensor for name, tensor in self._file.tensors.items()}
        self.names: list[str] = list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def num_bytes(self, name: str) -> int:
        """Bytes that the tensor takes in the file."""
        return self._tensors[name].num_bytes

    def is_floating(self, name: str) -> bool:
        return True  # whatever the type, `read` gives numbers

    def read(self, name: str) -> torch.Tensor:
        """The tensor, dequantised to float32."""
        values = dequantised(self._file, self._tensors[name], self._heads)
        return torch.from_numpy(values if values.flags.writeable else values.copy())

    def read_quantised(self, name: str) -> QuantisedWeight | None:
        """The matrix as it is stored; None where its type is not kept quantised."""
        tensor = self._tensors[name]
        try:
            weight = read_blocks(tensor.kind, self._file.data(tensor))
        except ValueError as error:
            raise ConfigError(
                f"{self._file.path}: tensor {tensor.name} of {tensor.kind} is damaged: {error}"
            ) from error
        order = row_order(self._file, tensor, self._heads)
        return weight if weight is None or order is None else weight.take(order)
