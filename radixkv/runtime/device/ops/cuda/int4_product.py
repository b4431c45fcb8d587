"""The kernel that multiplies few rows with a 4-bit matrix, converting it on its way from memory to tensor cores.

It is written in Gluon, Triton's language with explicit layouts. They are chosen so that a thread loads exactly the
weights and activations that its tensor core instructions take from it: nothing moves between threads, and only the
final sum goes through shared memory. ``convert_layout`` with ``assert_trivial`` checks that while compiling.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixkv.runtime.device.ops.cuda.cached_kernel import CachedKernel
from radixkv.runtime.device.ops.cuda.programmatic_launch import overlapping
from radixkv.runtime.device.weights.int4_matrix import GROUP_UNIT, PER_WORD, ZERO_BITS, Int4Matrix

_ZERO = gl.constexpr(ZERO_BITS)
_PER_WORD = gl.constexpr(PER_WORD)


@dataclass(frozen=True)
class Int4Tile:
    """The tile of a program of ``multiply_int4``: the inputs are divided among its warps, unit by unit."""

    n_out: int
    """Output channels, a multiple of 16."""
    n_rows: int
    """Rows of the activations, a multiple of 8."""
    n_warps: int
    n_units: int
    """Units, of up to 128 inputs, that a warp loads at a time, while it multiplies as many."""
    n_registers: int | None = None
    """Most registers of a thread; None: as many as the compiler likes."""


def multiply_int4(x: Tensor, weight: Int4Matrix, out: Tensor, tile: Int4Tile, *, gated: bool = False) -> None:
    """Computes ``out = x @ weight.T``, with the same bits every time.

    Args:
        x: [rows, in], contiguous, bfloat16 or float16.
        weight: [out, in].
        out: [rows, out], contiguous.
        tile: of a program.
        gated: whether ``weight`` stacks gate and up, and ``out`` [rows, out / 2] gets ``silu(x @ gate.T) *
            (x @ up.T)``; the products are rounded before the activation.
    """
    assert weight.scales.is_contiguous(), "the kernel takes no view of some channels"
    # All inputs of a unit are in one group.
    n_words = gcd(weight.group_size, 4 * GROUP_UNIT) // GROUP_UNIT if len(weight.scales) > 1 else 4
    unit = n_words * GROUP_UNIT
    n_channels = out.shape[1]
    n_stored = tile.n_out // 2 if gated else tile.n_out
    _multiply_int4[-(-n_channels // n_stored), -(-len(x) // tile.n_rows)](
        x,
        weight.values,
        weight.scales,
        out,
        len(x),
        n_channels,
        weight.n_in,
        weight.values.shape[1],
        -(-weight.group_size // unit),
        ROWS=tile.n_out,
        X_ROWS=tile.n_rows,
        WARPS=tile.n_warps,
        UNITS=tile.n_warps * tile.n_units,
        WORDS=n_words,
        GATED=gated,
        num_warps=tile.n_warps,
        maxnreg=tile.n_registers,
        **overlapping(x),
    )


@gluon.constexpr_function
def _subtractions(is_float16: bool) -> str:
    """Returns PTX that converts the eight values of the word $8 into $0 to $7, less their zero point.

    The bits of a value, put below those of 128 in bfloat16 or of 1024 in float16, give that number plus the value.
    $9 has, twice, minus that number minus the zero point. A fused operation adds it to two values at once, without
    rounding.
    """
    kind, base, one = ("f16x2", 0x6400, 0x3C00) if is_float16 else ("bf16x2", 0x4300, 0x3F80)
    steps = [
        f"shr.b32 t, $8, {4 * pair}; lop3.b32 t, t, 0x000F000F, {base << 16 | base:#x}, 0xEA; "
        f"fma.rn.{kind} t, t, one, $9; mov.b32 {{${2 * pair}, ${2 * pair + 1}}}, t;"
        for pair in range(4)
    ]
    return f"{{ .reg .b32 t, one; mov.b32 one, {one << 16 | one:#x}; {' '.join(steps)} }}"


@gluon.constexpr_function
def _eight(dtype: gl.dtype) -> tuple[gl.dtype, ...]:
    return (dtype,) * 8


@gluon.jit
def _differences(words: gl.tensor, zeros: gl.tensor, dtype: gl.constexpr) -> gl.tensor:
    """Returns values less their zero points, [units, rows, inputs], of [units, rows, words] and [units, rows].

    The inputs of a unit are in the order of tensor cores: of each thread the first pair, of each the second, ...
    """
    exponent: gl.constexpr = 0x6400 if dtype == gl.float16 else 0x4300
    minus = zeros | (exponent | 0x8000)
    a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
        _subtractions(dtype == gl.float16),
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
        [words, (minus | minus << 16)[:, :, None]],
        dtype=_eight(dtype),
        is_pure=True,
        pack=1,
    )
    first, second = gl.join(gl.join(a, e), gl.join(c, g)), gl.join(gl.join(b, f), gl.join(d, h))
    pairs = gl.join(first, second)  # the pair's higher bit, its lower bit, half
    shape: gl.constexpr = words.shape
    parts = pairs.reshape([shape[0], shape[1], 4, shape[2] // 4, 2, 2, 2])
    return parts.permute([0, 1, 3, 4, 5, 2, 6]).reshape([shape[0], shape[1], shape[2] * _PER_WORD])


@CachedKernel
@gluon.jit(do_not_specialize=["n_x"])
def _multiply_int4(
    x: gl.tensor,
    values: gl.tensor,
    scales: gl.tensor,
    out: gl.tensor,
    n_x: gl.tensor,
    n_channels: gl.tensor,
    n_in: gl.tensor,
    n_words: gl.tensor,
    units_of_group: gl.tensor,
    ROWS: gl.constexpr,
    X_ROWS: gl.constexpr,
    WARPS: gl.constexpr,
    UNITS: gl.constexpr,
    WORDS: gl.constexpr,
    GATED: gl.constexpr,
    OVERLAP: gl.constexpr,
) -> None:
    """Multiplies as many units as there are warps, or a multiple, with the weight's rows as the product's rows.

    A unit of a row is 4 threads' words, ``WORDS`` each, and each of its products takes two pairs of inputs of each
    thread. Units are the batch of the products: their sums are added up in the end. The next units are loaded while
    some are multiplied, and the first before ``x`` is ready.
    """
    if OVERLAP:
        gdc_launch_dependents()
    unit_words: gl.constexpr = 4 * WORDS
    unit_inputs: gl.constexpr = unit_words * _PER_WORD
    warps: gl.constexpr = [WARPS, 1, 1]
    products: gl.constexpr = gl.NVMMADistributedLayout([2, 0], warps, [1, 16, 8])
    of_words: gl.constexpr = gl.BlockedLayout([1, 1, WORDS], [1, 8, 4], warps, [2, 1, 0])
    of_x: gl.constexpr = gl.BlockedLayout([1, 1, WORDS * _PER_WORD], [1, 8, 4], warps, [2, 1, 0])

    row = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, of_words)))
    if GATED:  # the first half of the rows is of gate, the second of up
        channel = gl.program_id(0) * (ROWS // 2) + row % (ROWS // 2)
        matrix_row = channel % n_channels + row // (ROWS // 2) * n_channels
        n_rows = 2 * n_channels
    else:
        matrix_row = (gl.program_id(0) * ROWS + row) % n_channels
        n_rows = n_channels
    # Channels after the last are read as others, and are not stored.
    unit = gl.arange(0, UNITS, gl.SliceLayout(1, gl.SliceLayout(2, of_words)))
    word = gl.arange(0, unit_words, gl.SliceLayout(0, gl.SliceLayout(1, of_words)))
    source = (
        values + (matrix_row * n_words)[None, :, None] + (unit * unit_words)[:, None, None] + word[None, None, :]
    )
    scale_source = scales + matrix_row[None, :]
    is_unit = unit * unit_inputs < n_in
    words = gl.load(source, is_unit[:, None, None], 0)
    scale = gl.load(scale_source + (unit // units_of_group * n_rows)[:, None], is_unit[:, None], 0)

    x_row = gl.program_id(1) * X_ROWS + gl.arange(0, X_ROWS, gl.SliceLayout(0, gl.SliceLayout(2, of_x)))
    x_unit = gl.arange(0, UNITS, gl.SliceLayout(1, gl.SliceLayout(2, of_x)))
    x_column = gl.arange(0, unit_inputs, gl.SliceLayout(0, gl.SliceLayout(1, of_x)))
    column = (x_unit * unit_inputs)[:, None, None] + x_column[None, None, :]
    x_source = x + (x_row * n_in)[None, :, None] + column
    is_x = (x_row < n_x)[None, :, None]
    if OVERLAP:
        gdc_wait()
    sums = gl.full([UNITS, ROWS, X_ROWS], 0.0, gl.float32, products)
    for first in range(0, n_in, UNITS * unit_inputs):
        source += UNITS * unit_words
        unit += UNITS
        is_unit = unit * unit_inputs < n_in
        next_words = gl.load(source, is_unit[:, None, None], 0)
        next_scale = gl.load(scale_source + (unit // units_of_group * n_rows)[:, None], is_unit[:, None], 0)
        part = gl.load(x_source + first, is_x & (first + column < n_in), 0.0)
        part = part.reshape([UNITS, X_ROWS, 4, WORDS, 4, 2]).permute([0, 3, 4, 2, 5, 1])
        right = gl.convert_layout(
            part.reshape([UNITS, unit_inputs, X_ROWS]), gl.DotOperandLayout(1, products, 2), assert_trivial=True
        )
        left = gl.convert_layout(
            _differences(words, scale & _ZERO, x.dtype.element_ty),
            gl.DotOperandLayout(0, products, 2),
            assert_trivial=True,
        )
        factor = gl.convert_layout(
            (scale & ~_ZERO).to(gl.float32, bitcast=True), gl.SliceLayout(2, products), assert_trivial=True
        )
        zeros = gl.full([UNITS, ROWS, X_ROWS], 0.0, gl.float32, products)
        sums += mma_v2(left, right, zeros) * factor[:, :, None]
        words, scale = next_words, next_scale

    total = gl.sum(sums, 0).to(out.dtype.element_ty)
    n_stored: gl.constexpr = ROWS // 2 if GATED else ROWS
    if GATED:
        gate, up = gl.split(total.to(gl.float32).reshape([2, n_stored, X_ROWS]).permute([1, 2, 0]))
        total = (gate / (1.0 + gl.exp(-gate)) * up).to(out.dtype.element_ty)
    of_out: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [1, WARPS], [0, 1])
    out_channel = gl.program_id(0) * n_stored + gl.arange(0, n_stored, gl.SliceLayout(1, of_out))
    out_row = gl.program_id(1) * X_ROWS + gl.arange(0, X_ROWS, gl.SliceLayout(0, of_out))
    target = out + (out_row * n_channels)[None, :] + out_channel[:, None]
    is_stored = (out_channel < n_channels)[:, None] & (out_row < n_x)[None, :]
    gl.store(target, gl.convert_layout(total, of_out), is_stored)
