"""The weights of a checkpoint by name, each read once, straight into the tensor that will hold it.

What a model does not find, finds in another shape, or does not use is an error with the tensor's name: a checkpoint
that differs from what the model expects in any of these ways would answer nonsense without a word.
"""

from __future__ import annotations

import math
import pickle
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from pagemill.engine.errors import ConfigError
from pagemill.engine.gguf_weights import GgufWeights
from pagemill.engine.loader import Progress, no_progress
from pagemill.kernels.quantised_weight import QuantisedWeight, stack

_FLOATING = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_PREFIX = re.compile(r"^(model|transformer)\.")  # checkpoints of the bare model, without its head, lack it


class Checkpoint:
    """Tensors of some safetensors, PyTorch or GGUF files. Names are without the leading "model." or "transformer.".

    Raises `ConfigError` on a damaged file, here or at the first read.
    """

    def __init__(self, files: Sequence[Path], progress: Progress = no_progress) -> None:
        self._progress = progress
        self._tensors: dict[str, tuple[Any, str]] = {}  # name -> (open file, name in it)
        self._unused: set[str] = set()
        for path in files:
            reader = _READERS.get(path.suffix, _SafetensorsFile)(path)
            for stored in reader.names:
                name = _PREFIX.sub("", stored)
                if name in self._tensors:
                    raise ConfigError(f"{path}: tensor {name} is there twice")
                self._tensors[name] = (reader, stored)
        self._unused.update(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @property
    def num_elements(self) -> int:
        """Elements of all tensors together."""
        return sum(math.prod(reader.shape(stored)) for reader, stored in self._tensors.values())

    @property
    def num_stored_bytes(self) -> int | None:
        """Bytes of all tensors together as they are stored, where that is quantised; None for other checkpoints."""
        readers = [(reader, stored) for reader, stored in self._tensors.values() if isinstance(reader, GgufWeights)]
        return sum(reader.num_bytes(stored) for reader, stored in readers) if readers else None

    def check_unquantised(self) -> None:
        """Raise `ConfigError` where a matrix is not of floating-point numbers of at least 16 bits."""
        for name, (reader, stored) in self._tensors.items():
            if len(reader.shape(stored)) > 1 and name.endswith(".weight") and not reader.is_floating(stored):
                raise ConfigError(f"weight {name} is stored in 8 bits or less: quantised checkpoints are not supported")

    def take(self, name: str, shape: Sequence[int], *, dtype: torch.dtype, device: str) -> torch.Tensor:
        """The tensor `name` of this shape, as a new tensor."""
        return self.stack((name,), (shape[0],), shape[1:], dtype=dtype, device=device)

    def stack(
        self, names: Iterable[str], sizes: Iterable[int], tail: Sequence[int], *, dtype: torch.dtype, device: str
    ) -> torch.Tensor:
        """Tensors of shape (size, *tail) one under another: separate projections fused into one."""
        names, sizes = list(names), list(sizes)
        for name, size in zip(names, sizes, strict=True):
            self._check_shape(name, (size, *tail))  # before memory is taken for what config.json claims
        fused = torch.empty((sum(sizes), *tail), dtype=dtype, device=device)
        for name, part in zip(names, torch.split(fused, sizes), strict=True):
            self._copy(name, part)
        return fused

    def parts(self, names: Sequence[str], sizes: Sequence[int], tail: Sequence[int]) -> Iterator[torch.Tensor]:
        """Tensors of shape (size, *tail), each as it is stored, on the host and not to be written to."""
        for name, size in zip(names, sizes, strict=True):
            self._check_shape(name, (size, *tail))
            tensor = self._read(name)
            self._used(name)
            yield tensor

    def stack_quantised(self, names: Sequence[str], sizes: Sequence[int], columns: int) -> QuantisedWeight | None:
        """Matrices (size, columns) one under another, quantised as they are stored; None where one of them is not."""
        parts = []
        for name, size in zip(names, sizes, strict=True):
            self._check_shape(name, (size, columns))
            reader, stored = self._tensors[name]
            part = reader.read_quantised(stored) if isinstance(reader, GgufWeights) else None
            if part is None:
                return None
            parts.append(part)
        for name in names:
            self._used(name)
        return stack(parts)

    def _check_shape(self, name: str, expected: tuple[int, ...]) -> None:
        if name not in self._tensors:
            raise ConfigError(f"the checkpoint lacks the weight {name} {expected}")
        reader, stored = self._tensors[name]
        if reader.shape(stored) != expected:
            raise ConfigError(f"weight {name} has shape {reader.shape(stored)}; config.json says {expected}")

    def _copy(self, name: str, destination: torch.Tensor) -> None:
        destination.copy_(self._read(name))
        self._used(name)

    def _read(self, name: str) -> torch.Tensor:
        reader, stored = self._tensors[name]
        tensor: torch.Tensor = reader.read(stored)
        if tensor.dtype not in _FLOATING:
            raise ConfigError(f"weight {name} is {tensor.dtype}: quantised checkpoints are not supported")
        return tensor

    def _used(self, name: str) -> None:
        self._unused.discard(name)
        self._progress("loading weights", 1 - len(self._unused) / len(self._tensors))

    def ignore(self, pattern: str) -> None:
        """Leave out the tensors whose whole name matches a regular expression."""
        self._unused = {name for name in self._unused if not re.fullmatch(pattern, name)}

    def finish(self) -> None:
        """Raise `ConfigError` where tensors are left that the model has no place for."""
        if self._unused:
            first = min(self._unused)
            raise ConfigError(f"the checkpoint has {len(self._unused)} weights that the model lacks, first {first}")


class _SafetensorsFile:
    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self._error = SafetensorError
        self._path = path
        try:
            self._file = cast(Any, safe_open(path, framework="pt"))
        except (SafetensorError, OSError, ValueError) as error:
            raise ConfigError(f"{path} is damaged or not complete: {error}") from error
        self.names: list[str] = list(self._file.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(cast(Any, self._file).get_slice(name).get_shape())

    def is_floating(self, name: str) -> bool:
        return cast(Any, self._file).get_slice(name).get_dtype() in ("F64", "F32", "F16", "BF16")

    def read(self, name: str) -> torch.Tensor:
        try:
            tensor: torch.Tensor = self._file.get_tensor(name)
        except (self._error, OSError, ValueError, AttributeError) as error:
            raise ConfigError(f"{self._path}: weight {name} cannot be read: {error}") from error
        return tensor


class _PyTorchFile:
    """A pickled state dict, read with PyTorch's restricted unpickler: tensors only, no code."""

    def __init__(self, path: Path) -> None:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
            raise ConfigError(f"{path} is damaged or not a PyTorch state dict: {error}") from error
        if not isinstance(state, dict) or not all(isinstance(item, torch.Tensor) for item in state.values()):
            raise ConfigError(f"{path} does not hold a state dict")
        self._state: dict[str, torch.Tensor] = state
        self.names: list[str] = list(state)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._state[name].shape)

    def is_floating(self, name: str) -> bool:
        return self._state[name].dtype in _FLOATING

    def read(self, name: str) -> torch.Tensor:
        return self._state[name]


_READERS: dict[str, Callable[[Path], Any]] = {".bin": _PyTorchFile, ".gguf": GgufWeights}
