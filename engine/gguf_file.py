"""The header of a GGUF file, version 2 or 3, read without trust: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

Every number is checked against what is left of the file before anything is done with it, so that a damaged or lying
header costs no more memory or time than the file's own length, and its error names the field or the tensor. Tensor data
stays on disk until it is asked for.
"""

from __future__ import annotations

import itertools
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pagemill.engine.errors import ConfigError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32  # unless general.alignment says
_MOST_ALIGNMENT = 1 << 20
_MOST_DIMS = 4
_LONGEST_KEY = (1 << 16) - 1
_LONGEST_NAME = 64
_MOST_STRINGS = 1 << 22  # no tokenizer has as many; walking over more takes seconds

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_UINT32, _BOOL, _STRING, _ARRAY = 4, 7, 8, 9

KINDS = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}
"""ggml's types by number: name, elements of a block, bytes of a block."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of the file. shape: outermost dimension first, the blocks lie along the last. offset: in the file."""

    name: str
    type_number: int
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    @property
    def kind(self) -> str:
        return KINDS[self.type_number][0]


class GgufFile:
    """A checked header. Raises `ConfigError` on anything that is not as the format says.

    fields: the metadata that are numbers, booleans or texts. Of arrays only those of numbers are kept, as NumPy arrays.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # an empty file cannot be mapped
            raise ConfigError(f"{path} is damaged or not a GGUF file: {error}") from error
        self.fields: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        reader = _Reader(self._data, path)
        tensor_count, field_count = reader.begin()
        for _ in range(field_count):
            self._read_field(reader)
        rows = [reader.tensor() for _ in range(tensor_count)]
        self._place(reader, rows)

    def data(self, tensor: GgufTensor) -> npt.NDArray[np.uint8]:
        """The bytes of a tensor, [rows, bytes of a row], as they lie in the file."""
        flat = np.frombuffer(self._data, np.uint8, tensor.num_bytes, tensor.offset)
        rows = 1
        for size in tensor.shape[:-1]:
            rows *= size
        return flat.reshape(rows, -1)

    def _read_field(self, reader: _Reader) -> None:
        key = reader.text("the name of a field", _LONGEST_KEY)
        if not key:
            raise reader.error("a field has no name")
        if key in self.fields:
            raise reader.error(f"the field {key} is there twice")
        value = reader.value(key, reader.number("I", f"the type of {key}"))
        self.fields[key] = value

    def _place(self, reader: _Reader, rows: list[tuple[str, tuple[int, ...], int, int]]) -> None:
        """Find where the data of each tensor lies, which must be inside the file and nobody else's."""
        alignment = self.fields.get("general.alignment", _ALIGNMENT)
        if isinstance(alignment, bool) or not isinstance(alignment, int) or not 1 <= alignment <= _MOST_ALIGNMENT:
            raise reader.error(f"general.alignment must be in [1, {_MOST_ALIGNMENT}], got {alignment!r}")
        if alignment & (alignment - 1):
            raise reader.error(f"general.alignment must be a power of two, got {alignment}")
        begin = -(-reader.at // alignment) * alignment
        size = len(self._data)
        for name, shape, number, offset in rows:
            kind, block, block_bytes = KINDS[number]
            if shape[-1] % block:
                raise reader.error(f"tensor {name} of {kind} has rows of {shape[-1]}, which is no multiple of {block}")
            elements = 1
            for each in shape:
                elements *= each
            num_bytes = elements // block * block_bytes
            if offset % alignment:
                raise reader.error(f"tensor {name} begins at {offset}, which is no multiple of {alignment}")
            if begin + offset + num_bytes > size:
                raise reader.cut(
                    f"tensor {name} {list(shape)} of {kind} ends at {begin + offset + num_bytes}, the file at {size}"
                )
            if name in self.tensors:
                raise reader.error(f"tensor {name} is there twice")
            self.tensors[name] = GgufTensor(name, number, shape, begin + offset, num_bytes)
        ordered = sorted(self.tensors.values(), key=lambda tensor: tensor.offset)
        for before, after in itertools.pairwise(ordered):
            if before.offset + before.num_bytes > after.offset:
                raise reader.error(f"tensors {before.name} and {after.name} overlap")


class _Reader:
    """A place in the file that moves on."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data, self._path, self.at = data, path, 0
        self._size = len(data)

    def error(self, message: str) -> ConfigError:
        return ConfigError(f"{self._path} is damaged or not a GGUF file: {message}")

    def cut(self, message: str) -> ConfigError:
        return ConfigError(f"{self._path} is not complete or damaged: {message}")

    def begin(self) -> tuple[int, int]:
        """Numbers of tensors and of fields."""
        if self._data[:4] != _MAGIC:
            raise self.error(f"it begins with {bytes(self._data[:4])!r}")
        self.at = 4
        version = self.number("I", "the version")
        if version in (version_ << 24 for version_ in (1, *_VERSIONS)):
            raise self.error("it is big-endian, which is not supported")
        if version not in _VERSIONS:
            raise self.error(f"version must be 2 or 3, got {version}")
        tensors, fields = self.number("Q", "the number of tensors"), self.number("Q", "the number of fields")
        # A tensor takes 32 bytes of the header at least, a field 13.
        for what, count, least in (("tensors", tensors, 32), ("fields", fields, 13)):
            if count > (self._size - self.at) // least:
                raise self.error(f"the header tells of {count} {what}, more than fit into {self._size} bytes")
        return tensors, fields

    def number(self, code: str, what: str) -> Any:
        size = struct.calcsize(code)
        if self.at + size > self._size:
            raise self.cut(f"the file ends within {what}")
        (value,) = struct.unpack_from(f"<{code}", self._data, self.at)
        self.at += size
        return value

    def text(self, what: str, longest: int | None = None) -> str:
        length = self.number("Q", what)
        if longest is not None and length > longest:
            raise self.error(f"{what} has {length} bytes, more than {longest}")
        if length > self._size - self.at:
            raise self.cut(f"{what} has {length} bytes, the file {self._size - self.at} more")
        raw = self._data[self.at : self.at + length]
        self.at += length
        return raw.decode("utf-8", errors="replace")

    def value(self, key: str, number: int) -> Any:
        if number in _NUMBERS:
            return self.number(_NUMBERS[number], key)
        if number == _BOOL:
            value = self.number("B", key)
            if value > 1:
                raise self.error(f"{key} must be 0 or 1, got {value}")
            return bool(value)
        if number == _STRING:
            return self.text(key)
        if number == _ARRAY:
            return self._array(key)
        raise self.error(f"{key} has the type {number}, which the format does not know")

    def _array(self, key: str) -> npt.NDArray[Any] | None:
        """An array of numbers; of texts nothing but that they are whole."""
        kind, count = self.number("I", key), self.number("Q", key)
        left = self._size - self.at
        if kind == _STRING:
            self._skip_strings(key, count)
            return None
        if kind == _ARRAY:
            raise self.error(f"{key} is an array of arrays, which is not supported")
        code = "B" if kind == _BOOL else _NUMBERS.get(kind)
        if code is None:
            raise self.error(f"{key} is an array of the type {kind}, which the format does not know")
        size = struct.calcsize(code)
        if count > left // size:
            raise self.cut(f"{key} has {count} entries, the file {left} bytes more")
        values = np.frombuffer(self._data, f"<{code}", count, self.at)
        self.at += count * size
        return values

    def _skip_strings(self, key: str, count: int) -> None:
        if count > (self._size - self.at) // 8:
            raise self.cut(f"{key} has {count} texts, the file {self._size - self.at} bytes more")
        if count > _MOST_STRINGS:
            raise self.error(f"{key} has {count} texts, more than {_MOST_STRINGS}")
        at, size, unpack, data = self.at, self._size, struct.Struct("<Q").unpack_from, self._data
        for _ in range(count):
            if at + 8 > size:
                raise self.cut(f"the file ends within {key}")
            at += 8 + unpack(data, at)[0]
            if at > size:
                raise self.cut(f"a text of {key} ends behind the file")
        self.at = at

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, number of the type, offset."""
        name = self.text("the name of a tensor", _LONGEST_NAME)
        if not name:
            raise self.error("a tensor has no name")
        dims = self.number("I", f"tensor {name}")
        if not 1 <= dims <= _MOST_DIMS:
            raise self.error(f"tensor {name} has {dims} dimensions, the format allows 1 to {_MOST_DIMS}")
        shape = tuple(reversed([self.number("Q", f"tensor {name}") for _ in range(dims)]))
        if 0 in shape:
            raise self.error(f"tensor {name} {list(shape)} has no elements")
        number, offset = self.number("I", f"tensor {name}"), self.number("Q", f"tensor {name}")
        if number not in KINDS:
            raise self.error(f"tensor {name} has the type {number}, which is not known here")
        return name, shape, number, offset
