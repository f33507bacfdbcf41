"""GGUF's header read without trust, and its blocks without a change of value; `gguf` is the reference for both."""

from __future__ import annotations

import struct
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from pagemill.engine.errors import ConfigError
from pagemill.engine.gguf_blocks import KEPT_KINDS, read_blocks
from pagemill.engine.gguf_file import KINDS, GgufFile

_LYING = 2**63


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def field(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str | bytes, shape: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    """shape: innermost dimension first, as in the file."""
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dims + struct.pack("<IQ", kind, offset)


def header(
    fields: list[bytes],
    tensors: list[bytes],
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    num_tensors, num_fields = counts or (len(tensors), len(fields))
    return magic + struct.pack("<IQQ", version, num_tensors, num_fields) + b"".join(fields) + b"".join(tensors)


def save(folder: Path, head: bytes, data: int = 4096) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(head + bytes(-len(head) % 32) + bytes(data))
    return path


def test_a_file_is_read_as_gguf_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    writer.add_uint32("a.number", 7)
    writer.add_float32("a.float", 0.5)
    writer.add_bool("a.flag", True)
    writer.add_string("a.text", "Grüße")
    writer.add_array("some.numbers", [3, 4, 5])
    writer.add_array("some.texts", ["a", "", "bc"])
    writer.add_int64("negative", -(2**62))
    matrix = np.arange(96, dtype=np.float32).reshape(3, 32)
    writer.add_tensor("first", matrix)
    writer.add_tensor(
        "second", gguf.quantize(matrix, gguf.GGMLQuantizationType.Q8_0), raw_dtype=gguf.GGMLQuantizationType.Q8_0
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(path)
    expected = {"a.number": 7, "a.float": 0.5, "a.flag": True, "a.text": "Grüße", "negative": -(2**62)}
    assert {name: file.fields[name] for name in expected} == expected
    assert file.fields["some.numbers"].tolist() == [3, 4, 5]
    reader = gguf.GGUFReader(path)
    for other in reader.tensors:
        mine = file.tensors[other.name]
        assert mine.shape == tuple(int(size) for size in reversed(other.shape))
        assert (mine.kind, mine.offset) == (other.tensor_type.name, other.data_offset)
        assert file.data(mine).tobytes() == other.data.tobytes()
    assert file.tensors["second"].offset % 64 == 0


def test_the_types_are_those_of_gguf() -> None:
    assert {int(kind): (kind.name, *size) for kind, size in gguf.GGML_QUANT_SIZES.items()} == KINDS


NUMBER = struct.pack("<I", 1)
BROKEN: dict[str, tuple[bytes, str]] = {
    "another magic": (header([], [], magic=b"GGML"), "begins with"),
    "the first version": (header([], [], version=1), "version must be 2 or 3, got 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "a number of tensors past the file": (header([], [], counts=(_LYING, 0)), "tells of 9223372036854775808 tensors"),
    "a number of tensors that could fit": (header([], [tensor("a")], counts=(100, 0)), "a tensor has no name"),
    "a number of fields past the file": (header([], [], counts=(0, 2**64 - 1)), "18446744073709551615 fields"),
    "a text past the file": (
        header([field("general.name", 8, struct.pack("<Q", _LYING))], []),
        "general.name has 9223372036854775808 bytes",
    ),
    "a key past the file": (header([struct.pack("<Q", _LYING) + bytes(40)], []), "the name of a field has"),
    "a key that is not there": (header([field("", 4, NUMBER)], []), "a field has no name"),
    "a field that is there twice": (header([field("a", 4, NUMBER)] * 2, []), "the field a is there twice"),
    "a field of no type": (header([field("a", 13, NUMBER)], []), "a has the type 13"),
    "a truth value of 2": (header([field("a", 7, b"\2")], []), "a must be 0 or 1, got 2"),
    "an array past the file": (
        header([field("a", 9, struct.pack("<IQ", 4, 2**62))], []),
        "a has 4611686018427387904 entries",
    ),
    "texts past the file": (
        header([field("a", 9, struct.pack("<IQ", 8, 2**60))], []),
        "a has 1152921504606846976 texts",
    ),
    "a text in an array past the file": (
        header([field("a", 9, struct.pack("<IQQ", 8, 2, 5000) + bytes(40))], []),
        "a text of a ends behind the file",
    ),
    "an array of arrays": (header([field("a", 9, struct.pack("<IQIQ", 9, 1, 4, 0))], []), "a is an array of arrays"),
    "an array of no type": (header([field("a", 9, struct.pack("<IQ", 77, 1))], []), "a is an array of the type 77"),
    "an alignment of 0": (
        header([field("general.alignment", 4, bytes(4))], []),
        r"alignment must be in \[1, 1048576\], got 0",
    ),
    "an alignment of 24": (header([field("general.alignment", 4, struct.pack("<I", 24))], []), "power of two, got 24"),
    "an alignment that is a text": (header([field("general.alignment", 8, text("32"))], []), "alignment must be in"),
    "a tensor without a name": (header([], [tensor("")]), "a tensor has no name"),
    "a tensor with a long name": (header([], [tensor("a" * 65)]), "name of a tensor has 65 bytes"),
    "a tensor that is there twice": (
        header([], [tensor("a"), tensor("a", offset=128)]),
        "tensor a is there twice",
    ),
    "no dimensions": (header([], [tensor("a", ())]), "tensor a has 0 dimensions"),
    "five dimensions": (header([], [tensor("a", (1,) * 5)]), "tensor a has 5 dimensions"),
    "a dimension of 0": (header([], [tensor("a", (32, 0))]), r"tensor a \[0, 32\] has no elements"),
    "dimensions whose product is 2^66": (header([], [tensor("a", (2**33, 2**33))]), "not complete"),
    "dimensions whose product is 0 in 64 bits": (header([], [tensor("a", (2**32, 2**32))]), "not complete"),
    "an unknown type": (
        header([], [tensor("blk.0.ffn_up.weight", kind=99)]),
        r"tensor blk\.0\.ffn_up\.weight has the type 99",
    ),
    "a type that was taken out": (header([], [tensor("a", kind=4)]), "tensor a has the type 4"),
    "rows of broken blocks": (header([], [tensor("a", (40, 2), kind=2)]), "rows of 40, which is no multiple of 32"),
    "an offset behind the file": (header([], [tensor("a", offset=4096)]), "tensor a .* ends at"),
    "an offset of 2^63": (header([], [tensor("a", offset=_LYING)]), "not complete"),
    "an offset beside the alignment": (header([], [tensor("a", offset=8)]), "begins at 8, which is no multiple of 32"),
    "tensors that overlap": (header([], [tensor("a", (32, 2)), tensor("b", offset=128)]), "tensors a and b overlap"),
}


MOST_CALLS = 10_000  # of functions: a header of some hundred bytes takes a few hundred


@pytest.mark.parametrize("name", BROKEN)
def test_a_lying_header_is_refused_at_once(tmp_path: Path, name: str) -> None:
    head, message = BROKEN[name]
    path = save(tmp_path, head)
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1
        assert calls < MOST_CALLS, "it believes what the header says"

    tracemalloc.start()
    sys.setprofile(count)
    try:
        with pytest.raises(ConfigError, match=message) as raised:
            GgufFile(path)
    finally:
        sys.setprofile(None)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert str(path) in str(raised.value)
    assert peak < 1 << 20


def test_a_file_cut_anywhere_is_named(tmp_path: Path) -> None:
    fields = [field("general.name", 8, text("m")), field("a", 9, struct.pack("<IQ", 8, 2) + text("x") + text("yz"))]
    whole = save(tmp_path, header(fields, [tensor("a", (32, 2)), tensor("b", offset=256)]), 384).read_bytes()
    for length in range(len(whole)):
        path = tmp_path / "cut.gguf"
        path.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=r"cut\.gguf"):
            GgufFile(path)
    path.write_bytes(whole)
    assert list(GgufFile(path).tensors) == ["a", "b"]


@pytest.mark.parametrize("seed", range(20))
def test_a_file_with_wrong_bytes_is_read_or_named(tmp_path: Path, seed: int) -> None:
    fields = [field("general.name", 8, text("m")), field("a", 9, struct.pack("<IQ", 8, 2) + text("x") + text("yz"))]
    head = header(fields, [tensor("a", (32, 2)), tensor("b", offset=256)])
    rng = np.random.default_rng(seed)
    for _ in range(50):
        damaged = bytearray(head)
        for _ in range(rng.integers(1, 4)):
            damaged[rng.integers(4, len(head))] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.integers(256)])
        try:
            file = GgufFile(save(tmp_path, bytes(damaged), 384))
        except ConfigError:
            continue
        for each in file.tensors.values():
            assert file.data(each).nbytes == each.num_bytes


def blocks(kind: str, rows: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Random blocks of a type, whose scales are finite numbers."""
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    data = np.random.default_rng(seed).integers(0, 256, (rows * 3, size), dtype=np.uint8)
    for at in SCALES[kind]:
        data[:, at + 1] &= 0xBB
    return data.reshape(rows, -1)


SCALES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0]}
SCALES |= {"Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}


@pytest.mark.parametrize("kind", KEPT_KINDS)
def test_blocks_keep_their_values_bit_for_bit(kind: str) -> None:
    data = blocks(kind, 50)
    weight = read_blocks(kind, data)
    assert weight is not None
    expected = gguf.dequantize(data, gguf.GGMLQuantizationType[kind])
    assert np.array_equal(weight.dequantise(), expected)
    assert weight.bits == (4 if kind.startswith("Q4") else 8)
    assert weight.group == (16 if kind == "Q6_K" else 32)


@pytest.mark.parametrize("kind", KEPT_KINDS)
def test_a_scale_that_is_no_number_is_refused(kind: str) -> None:
    data = blocks(kind, 2)
    data[1, SCALES[kind][-1] + 1] = 0x7C  # infinite, or no number
    with pytest.raises(ValueError, match="not finite"):
        read_blocks(kind, data)


def test_other_types_are_not_kept() -> None:
    assert read_blocks("F16", np.zeros((2, 64), np.uint8)) is None
    assert read_blocks("IQ4_NL", np.zeros((2, 18), np.uint8)) is None
