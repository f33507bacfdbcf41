"""Register tiles of attention, as LLVM IR: a few query rows by a few vectors of 16 keys, or of 16 value columns.

Memory is given by address, in bytes, since the same tile reads blocks of the pool and packed copies. A *factor row* is
a query or a row of softmax weights. bfloat16 values are multiplied in pairs: a word of keys holds two dimensions of one
token, a word of values two tokens of one dimension. Three ways of doing it, by the pool's type and the processor:

* pairs: factor rows are bfloat16 too, and one instruction multiplies both halves of a word (AVX512_BF16);
* widened: factor rows are float32, each half of a word is widened by a shift or a mask;
* float32 pools: factor rows are float32, a word is one value.

A sum runs over dimensions or tokens in ascending order in one register, whatever the tile's shape: so a row has the
same bits in a prefill, in a decode, and beside any other rows.

Values lie in the pool as [token][dim]. Two rows of 32 bfloat16 are woven into two vectors of pairs by instructions that
work within 128 bits, which leaves the columns in a fixed disorder: vector 0 of a span of 32 columns holds columns 0-3,
8-11, 16-19 and 24-27, vector 1 the others. `finish_row` undoes it. Many rows read a woven copy instead.
"""

# llvmlite and numba ship no types, and `intrinsic` returns what numba makes of a function.
# mypy: disable-error-code="untyped-decorator, import-untyped, no-any-return"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagemill.kernels.cpu.isa import LANES, MULTIPLIES_PAIRS, WIDE_REGISTERS, call, dot_pairs
from pagemill.kernels.cpu.jit import exact_helper
from pagemill.kernels.cpu.simd import pair_halves, splat

SPAN = 2 * LANES
"""Value columns that are woven together."""

PACKED_ROWS = 6
"""Rows of the tile that reads packed values; callers pad their rows to it."""

SCORE_VECTORS = 4 if MULTIPLIES_PAIRS else 2 if WIDE_REGISTERS else 1
"""Vectors of a score tile: with 6 rows of sums, as many as the registers hold."""

_I1 = ir.IntType(1)
_I16 = ir.IntType(16)
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_F32 = ir.FloatType()
_VI16 = ir.VectorType(_I16, 2 * LANES)
_VI32 = ir.VectorType(_I32, LANES)
_VF32 = ir.VectorType(_F32, LANES)
_ZEROS = ir.Constant(_VF32, [0.0] * LANES)

# Within each 128 bits, elements of the first operand alternate with those of the second: their lower or upper halves.
_LOWER = [8 * part + i + source * SPAN for part in range(4) for i in range(4) for source in range(2)]
_UPPER = [index + 4 for index in _LOWER]


@intrinsic
def stand_alone(typingctx: Any) -> Any:
    """Keep the function that calls this from being inlined.

    A tile needs all vector registers, and its surroundings make LLVM order it otherwise: inlined, the widest tiles kept
    sums in memory, and a prefill took a third longer. It also compiles once instead of wherever it is called.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), codegen


def at(builder: Any, address: Any, offset: Any) -> Any:
    """An address moved by bytes: an int, or an i64."""
    return builder.add(address, ir.Constant(_I64, offset) if isinstance(offset, int) else offset)


def load(builder: Any, address: Any, kind: Any, align: int = 4) -> Any:
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = align
    return value


def store(builder: Any, value: Any, address: Any, align: int = 4) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = align


def _times(builder: Any, value: Any, factor: int) -> Any:
    return builder.mul(value, ir.Constant(_I64, factor))


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return call(builder, f"llvm.fma.v{LANES}f32", _VF32, [a, b, c])


def _steps(builder: Any, count: Any) -> Any:
    return cgutils.for_range(builder, count)


def _multiply(
    builder: Any, packed: bool, factors: list[Any], step: Any, words: list[Any], sums: list[Any], vectors: int
) -> None:
    """Add one step's products to the sums [row][vector]. factors: addresses of the rows; words: the step's vectors."""
    rows = len(factors)
    widened = packed and not MULTIPLIES_PAIRS
    parts = [pair_halves(builder, word) if widened else (word,) for word in words]
    for row in range(rows):
        base = at(builder, factors[row], _times(builder, step, 8 if widened else 4))
        for part in range(2 if widened else 1):
            kind = _I32 if packed and MULTIPLIES_PAIRS else _F32
            factor = splat(builder, load(builder, at(builder, base, 4 * part), kind))
            for vector in range(vectors):
                pointer = sums[row * vectors + vector]
                total = builder.load(pointer)
                if packed and MULTIPLIES_PAIRS:
                    total = dot_pairs(builder, factor, parts[vector][0], total)
                else:
                    total = _fma(builder, factor, parts[vector][part], total)
                builder.store(total, pointer)


def _row_addresses(builder: Any, first: Any, stride: Any, rows: int) -> list[Any]:
    return [at(builder, first, _times(builder, stride, row)) for row in range(rows)]


def _is_packed(like: Any) -> bool:
    return bool(like == types.uint16)


def make_score_tile(rows: int, vectors: int) -> Callable[..., Any]:
    """c[r, n] = scale * sum over d of a[r, d] * key[n, d], for `rows` rows and `vectors` * 16 tokens.

    Its arguments: factor rows a and their distance; four addresses of 16 tokens' keys, of which `vectors`
    are used, and the distance of their dimensions (words); how many words; c and the distance of its rows; scale; an
    element like the pool's.
    """

    @intrinsic
    def score_tile(
        typingctx: Any,
        a: Any,
        astr: Any,
        b0: Any,
        b1: Any,
        b2: Any,
        b3: Any,
        bstr: Any,
        words: Any,
        c: Any,
        cstr: Any,
        scale: Any,
        like: Any,
    ) -> Any:
        packed = _is_packed(like)

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            first, a_stride, *places, b_stride, count, out, c_stride, factor, _ = args
            sums = [cgutils.alloca_once(builder, _VF32) for _ in range(rows * vectors)]
            for pointer in sums:
                builder.store(_ZEROS, pointer)
            factors = _row_addresses(builder, first, a_stride, rows)
            with _steps(builder, count) as loop:
                offset = builder.mul(loop.index, b_stride)
                kind = _VI32 if packed else _VF32
                keys = [load(builder, at(builder, place, offset), kind) for place in places[:vectors]]
                _multiply(builder, packed, factors, loop.index, keys, sums, vectors)
            scales = splat(builder, factor)
            for row, target in enumerate(_row_addresses(builder, out, c_stride, rows)):
                for vector in range(vectors):
                    total = builder.fmul(builder.load(sums[row * vectors + vector]), scales)
                    store(builder, total, at(builder, target, 4 * LANES * vector))
            return context.get_dummy_value()

        return types.void(a, astr, b0, b1, b2, b3, bstr, words, c, cstr, scale, like), codegen

    @exact_helper
    def tile(
        a: int,
        astr: int,
        b0: int,
        b1: int,
        b2: int,
        b3: int,
        bstr: int,
        words: int,
        c: int,
        cstr: int,
        scale: Any,
        like: Any,
    ) -> None:
        stand_alone()
        score_tile(a, astr, b0, b1, b2, b3, bstr, words, c, cstr, scale, like)

    return tile


def _load_sums(builder: Any, rows: list[Any], vectors: int) -> list[Any]:
    sums = [cgutils.alloca_once(builder, _VF32) for _ in range(len(rows) * vectors)]
    for row, address in enumerate(rows):
        for vector in range(vectors):
            value = load(builder, at(builder, address, 4 * LANES * vector), _VF32)
            builder.store(value, sums[row * vectors + vector])
    return sums


def _store_sums(builder: Any, sums: list[Any], rows: list[Any], vectors: int) -> None:
    for row, address in enumerate(rows):
        for vector in range(vectors):
            store(builder, builder.load(sums[row * vectors + vector]), at(builder, address, 4 * LANES * vector))


def _weave(builder: Any, first: Any, second: Any) -> list[Any]:
    """Two rows of 32 bfloat16 as two vectors of pairs."""
    orders = [ir.Constant(ir.VectorType(_I32, SPAN), order) for order in (_LOWER, _UPPER)]
    return [builder.bitcast(builder.shuffle_vector(first, second, order), _VI32) for order in orders]


def make_value_tile(rows: int, spans: int) -> Callable[..., Any]:
    """c[r, d] += sum over t of weight[r, t] * value[t, d], for `rows` rows and `spans` * 32 columns of stored values.

    Its arguments: weights (those of token 0) and the distance of their rows; values of token 0 and the
    distance of tokens; the tokens begin <= t < end; c and the distance of its rows; an element like the pool's. No
    other token is read: where begin or end splits a pair, the other half's weight must be 0.
    """
    vectors = 2 * spans

    @intrinsic
    def value_tile(
        typingctx: Any, a: Any, astr: Any, v: Any, vstr: Any, begin: Any, end: Any, c: Any, cstr: Any, like: Any
    ) -> Any:
        packed = _is_packed(like)

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            first, a_stride, values, v_stride, low, high, out, c_stride, _ = args
            one = ir.Constant(_I64, 1)
            targets = _row_addresses(builder, out, c_stride, rows)
            sums = _load_sums(builder, targets, vectors)
            factors = _row_addresses(builder, first, a_stride, rows)
            start = builder.lshr(low, one) if packed else low
            stop = builder.lshr(builder.add(high, one), one) if packed else high
            with _steps(builder, builder.sub(stop, start)) as loop:
                step = builder.add(loop.index, start)
                if packed:
                    token = builder.shl(step, one)
                    # A partner outside the range may be anything, even not a number: take the same token twice.
                    even = call(builder, "llvm.smax.i64", _I64, [token, low])
                    odd = call(builder, "llvm.smin.i64", _I64, [builder.add(token, one), builder.sub(high, one)])
                    pair = [at(builder, values, builder.mul(place, v_stride)) for place in (even, odd)]
                    words = []
                    for span in range(spans):
                        loaded = [load(builder, at(builder, place, 2 * SPAN * span), _VI16, 2) for place in pair]
                        words += _weave(builder, *loaded)
                else:
                    place = at(builder, values, builder.mul(step, v_stride))
                    words = [load(builder, at(builder, place, 4 * LANES * i), _VF32) for i in range(vectors)]
                _multiply(builder, packed, factors, step, words, sums, vectors)
            _store_sums(builder, sums, targets, vectors)
            return context.get_dummy_value()

        return types.void(a, astr, v, vstr, begin, end, c, cstr, like), codegen

    @exact_helper
    def tile(a: int, astr: int, v: int, vstr: int, begin: int, end: int, c: int, cstr: int, like: Any) -> None:
        stand_alone()
        value_tile(a, astr, v, vstr, begin, end, c, cstr, like)

    return tile


def make_packed_tile(rows: int, vectors: int) -> Callable[..., Any]:
    """c[r, n] += sum over steps of weight[r, step] * packed[step, n], for `rows` rows and `vectors` * 16 columns.

    A step is a pair of tokens of woven bfloat16 values or a token of float32 ones. The intrinsic's arguments: weights
    and the distance of their rows; packed values and the distance of steps; how many steps; c and the distance of its
    rows; an element like the pool's.
    """

    @intrinsic
    def packed_tile(
        typingctx: Any, a: Any, astr: Any, b: Any, bstr: Any, steps: Any, c: Any, cstr: Any, like: Any
    ) -> Any:
        packed = _is_packed(like)

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            first, a_stride, values, b_stride, count, out, c_stride, _ = args
            targets = _row_addresses(builder, out, c_stride, rows)
            sums = _load_sums(builder, targets, vectors)
            factors = _row_addresses(builder, first, a_stride, rows)
            with _steps(builder, count) as loop:
                place = at(builder, values, builder.mul(loop.index, b_stride))
                kind = _VI32 if packed else _VF32
                words = [load(builder, at(builder, place, 4 * LANES * i), kind) for i in range(vectors)]
                _multiply(builder, packed, factors, loop.index, words, sums, vectors)
            _store_sums(builder, sums, targets, vectors)
            return context.get_dummy_value()

        return types.void(a, astr, b, bstr, steps, c, cstr, like), codegen

    @exact_helper
    def tile(a: int, astr: int, b: int, bstr: int, steps: int, c: int, cstr: int, like: Any) -> None:
        stand_alone()
        packed_tile(a, astr, b, bstr, steps, c, cstr, like)

    return tile


@intrinsic
def weave_rows(typingctx: Any, first: Any, second: Any, dim: Any, out: Any, like: Any) -> Any:
    """The values of two tokens as one step of packed values, by address; float32: those of the first token.

    Columns past dim are not written. dim is even where the values are bfloat16.
    """
    packed = _is_packed(like)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        one, two, count, target, _ = args
        if not packed:
            cgutils.raw_memcpy(
                builder,
                builder.inttoptr(target, _F32.as_pointer()),
                builder.inttoptr(one, _F32.as_pointer()),
                count,
                4,
            )
            return context.get_dummy_value()
        spans = builder.udiv(count, ir.Constant(_I64, SPAN))
        with _steps(builder, spans) as loop:
            offset = _times(builder, loop.index, 2 * SPAN)
            rows = [load(builder, at(builder, row, offset), _VI16, 2) for row in (one, two)]
            place = at(builder, target, _times(builder, loop.index, 4 * SPAN))
            for vector, words in enumerate(_weave(builder, *rows)):
                store(builder, words, at(builder, place, 4 * LANES * vector))
        done = _times(builder, spans, SPAN)
        with _steps(builder, builder.sub(count, done)) as loop:
            column = builder.add(done, loop.index)
            halves = [load(builder, at(builder, row, _times(builder, column, 2)), _I16, 2) for row in (one, two)]
            low, high = (builder.zext(half, _I32) for half in halves)
            word = builder.or_(low, builder.shl(high, ir.Constant(_I32, 16)))
            # Bits of a column within its span: 2 choose the 128 bits, 1 the vector, 2 the place.
            part = builder.and_(builder.lshr(column, ir.Constant(_I64, 3)), ir.Constant(_I64, 3))
            vector = builder.and_(builder.lshr(column, ir.Constant(_I64, 2)), ir.Constant(_I64, 1))
            lane = builder.and_(column, ir.Constant(_I64, 3))
            index = builder.add(builder.add(done, _times(builder, vector, LANES)), _times(builder, part, 4))
            store(builder, word, at(builder, target, _times(builder, builder.add(index, lane), 4)))
        return context.get_dummy_value()

    return types.void(first, second, dim, out, like), codegen


@intrinsic
def load_factors(typingctx: Any, source: Any, size: Any, target: Any, like: Any) -> Any:
    """A query row of `size` elements, by address, in the form that the score tiles take."""
    widened = _is_packed(like) and not MULTIPLIES_PAIRS

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        place, count, out, _ = args
        if not widened:
            pointers = [builder.inttoptr(address, _I16.as_pointer()) for address in (out, place)]
            cgutils.raw_memcpy(builder, *pointers, count, 2 if _is_packed(like) else 4)
            return context.get_dummy_value()
        with _steps(builder, count) as loop:
            half = builder.zext(load(builder, at(builder, place, _times(builder, loop.index, 2)), _I16, 2), _I32)
            value = builder.bitcast(builder.shl(half, ir.Constant(_I32, 16)), _F32)
            store(builder, value, at(builder, out, _times(builder, loop.index, 4)))
        return context.get_dummy_value()

    return types.void(source, size, target, like), codegen


@intrinsic
def element_size(typingctx: Any, like: Any) -> Any:
    """Bytes of a stored element."""
    size = 2 if _is_packed(like) else 4
    return types.int64(like), lambda context, builder, sig, args: ir.Constant(_I64, size)


@intrinsic
def factor_size(typingctx: Any, like: Any) -> Any:
    """Bytes of an element of a factor row."""
    size = 2 if _is_packed(like) and MULTIPLIES_PAIRS else 4
    return types.int64(like), lambda context, builder, sig, args: ir.Constant(_I64, size)
