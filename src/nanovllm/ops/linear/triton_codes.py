"""Codes of quantised matrices as numbers, inside Triton kernels. Import this module only if Triton is installed.

All conversions are exact, but for a factor (`unit_of`, `half_of`). Where the compiler's own conversion takes many instructions, the bits
are moved by hand: an integer becomes the low mantissa bits of a number whose exponent is known, and the known part is subtracted. `ASM`
selects PTX; without it plain operations compute the same, which Triton's interpreter can run.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# (assembly kept as `tl.constexpr`, types of kernels' arguments, and functions that return several tensors)

import torch
import triton
import triton.language as tl

from nanovllm.ops.linear.quantised import QuantisedMatrix
from nanovllm.types import Tensor

# Of two quads, the nibbles in the same place go into a register of two bfloat16 numbers, as a quarter of what they stand for (`unit_of`).
# With 0x4300 above it, a nibble in the lowest bits is 128 + its value. A nibble in bits 4 ... 7 and nothing else is its value times 2^-129,
# because the first normal numbers go on evenly where those below the smallest normal one end; a factor of 2^127 makes it a quarter. So
# nibbles need no shift for each of them.
INT4_BF16 = tl.constexpr("""{
    .reg .b32 high, quarter, scale, less, two;
    mov.b32 quarter, 0x3E803E80;
    mov.b32 scale, 0x7F007F00;
    mov.b32 less, 0xC208C208;
    mov.b32 two, 0xC000C000;
    shr.b32 high, $4, 8;
    lop3.b32 $0, $4, 0x000F000F, 0x43004300, 0xEA;
    and.b32 $1, $4, 0x00F000F0;
    lop3.b32 $2, high, 0x000F000F, 0x43004300, 0xEA;
    and.b32 $3, high, 0x00F000F0;
    fma.rn.bf16x2 $0, $0, quarter, less;
    fma.rn.bf16x2 $1, $1, scale, two;
    fma.rn.bf16x2 $2, $2, quarter, less;
    fma.rn.bf16x2 $3, $3, scale, two;
}""")
# Of two pairs of 8-bit codes, the low or the high ones go into a register. 128 + the low 7 bits, minus 128 or 256 by the highest bit.
INT8_LOW = tl.constexpr("""{
    .reg .b32 a, c, minus;
    mov.b32 minus, 0xBF80BF80;
    lop3.b32 c, $1, 0x00800080, 0x43004300, 0xEA;
    lop3.b32 a, $1, 0x007F007F, 0x43004300, 0xEA;
    fma.rn.bf16x2 $0, c, minus, a;
}""")
INT8_HIGH = tl.constexpr("""{
    .reg .b32 a, c, s, minus;
    mov.b32 minus, 0xBF80BF80;
    shr.b32 s, $1, 8;
    lop3.b32 c, s, 0x00800080, 0x43004300, 0xEA;
    lop3.b32 a, s, 0x007F007F, 0x43004300, 0xEA;
    fma.rn.bf16x2 $0, c, minus, a;
}""")
# Each byte gets its sign in the byte above it. Then a shift brings sign, exponent and mantissa to where bfloat16 has them. Because of the
# other exponent bias the numbers are 2^-120 of the codes, and subnormal if these are. Tensor cores multiply all of them exactly. But sums
# that are that small lose bits to float32: for inputs of about 2^-26 they are as exact as bfloat16, for smaller inputs less so.
_FP8 = """{{
    .reg .b32 a;
    prmt.b32 a, $1, 0, {bytes};
    shl.b32 a, a, 4;
    and.b32 $0, a, 0x87F087F0;
}}"""
FP8_LOW, FP8_HIGH = tl.constexpr(_FP8.format(bytes="0xA280")), tl.constexpr(_FP8.format(bytes="0xB391"))

# The GPU converts two numbers at once to float16, which has them all (compute capability 8.9 or more).
FP8_FLOAT = tl.constexpr("""{
    .reg .b16 a, b, c, d;
    .reg .b32 low, high;
    mov.b32 {a, b}, $4;
    cvt.rn.f16x2.e4m3x2 low, a;
    cvt.rn.f16x2.e4m3x2 high, b;
    mov.b32 {a, b}, low;
    mov.b32 {c, d}, high;
    cvt.f32.f16 $0, a;
    cvt.f32.f16 $1, b;
    cvt.f32.f16 $2, c;
    cvt.f32.f16 $3, d;
}""")

# 128 + the code as the low bits of float16 numbers, whose exponent stands for 1024.
INT8_FLOAT = tl.constexpr("""{
    .reg .b16 a, b, c, d;
    .reg .b32 word, low, high;
    xor.b32 word, $4, 0x80808080;
    prmt.b32 low, word, 0x64646464, 0x4140;
    prmt.b32 high, word, 0x64646464, 0x4342;
    mov.b32 {a, b}, low;
    mov.b32 {c, d}, high;
    cvt.f32.f16 $0, a;
    cvt.f32.f16 $1, b;
    cvt.f32.f16 $2, c;
    cvt.f32.f16 $3, d;
}""")


def operands(matrix: QuantisedMatrix, *, words: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return a matrix's codes, scales and zeros as kernels take them. Scales stand in for zeros that are absent.

    The matrix is `in_gpu_layout`. Codes are int16 of four nibbles or two bytes. With `words`, two of them are an int32.
    """
    codes = matrix.codes.view(torch.int32 if words else torch.int16)
    return codes, matrix.scales, matrix.scales if matrix.zeros is None else matrix.zeros


def grouping(matrix: QuantisedMatrix) -> tuple[int, int, int, bool]:
    """Return `GROUP`, `GROUPS`, `ROWS` and `ZEROS` of the kernels."""
    return matrix.group, matrix.scales.shape[1], matrix.rows, matrix.zeros is not None


def results(x: Tensor, outputs: int, parts: int) -> Tensor:
    """Memory for a product of x: `[B, N]` in its dtype, or for sums over several parts of the inputs, float32 `[parts, B, N]`."""
    shape, dtype = ((len(x), outputs), x.dtype) if parts == 1 else ((parts, len(x), outputs), torch.float32)
    return torch.empty(shape, dtype=dtype, device=x.device)


@triton.constexpr_function
def fields_of(nibbles):
    """Return the columns whose codes an element of 16 bits holds."""
    return 4 if nibbles else 2


@triton.constexpr_function
def span_of(nibbles):
    """Return the elements of a block of 128 columns, which is also how many columns lie between two fields of an element."""
    return 32 if nibbles else 64


@triton.constexpr_function
def unit_of(dtype, nibbles, asm):
    """Return what the numbers that `numbers` gives are to be multiplied by, beside `half_of`."""
    return 4.0 if nibbles and asm and dtype == tl.bfloat16 else 1.0


@triton.constexpr_function
def half_of(dtype, fp8, asm):
    """Return the square root of the factor 2^120 that FP8 codes then lack. It is applied twice: 2^120 times a scale may be infinite.

    A scale has to be less than 2^68.
    """
    return 2.0**60 if fp8 and asm and dtype == tl.bfloat16 else 1.0


@triton.jit
def quads(codes, dtype: tl.constexpr, ASM: tl.constexpr):
    """Convert quads of 4-bit codes, int16, to four tensors of numbers, from the lowest nibbles to the highest."""
    if ASM and dtype == tl.bfloat16:
        a, b, c, d = tl.inline_asm_elementwise(
            INT4_BF16, "=r,=r,=r,=r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:
        a, b = ((codes & 15).to(tl.float32) - 8.0).to(dtype), (((codes >> 4) & 15).to(tl.float32) - 8.0).to(dtype)
        c, d = (((codes >> 8) & 15).to(tl.float32) - 8.0).to(dtype), (((codes >> 12) & 15).to(tl.float32) - 8.0).to(dtype)
    return a, b, c, d


@triton.jit
def pairs(codes, dtype: tl.constexpr, FP8: tl.constexpr, ASM: tl.constexpr):
    """Convert pairs of 8-bit codes, int16, to the numbers of the low bytes, and those of the high bytes. No code of FP8 is NaN.

    They are to be multiplied as `numbers` says.
    """
    if ASM and dtype == tl.bfloat16:
        low = tl.inline_asm_elementwise(FP8_LOW if FP8 else INT8_LOW, "=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=2)
        high = tl.inline_asm_elementwise(FP8_HIGH if FP8 else INT8_HIGH, "=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=2)
    elif FP8:
        low, high = e4m3(codes).to(dtype), e4m3(codes >> 8).to(dtype)
    else:
        low, high = codes.to(tl.int8).to(tl.float32).to(dtype), (codes >> 8).to(tl.float32).to(dtype)
    return low, high


@triton.jit
def numbers(codes, dtype: tl.constexpr, NIBBLES: tl.constexpr, FP8: tl.constexpr, ASM: tl.constexpr):
    """Convert elements of 16 bits to a tensor of numbers for each of their fields, from the lowest bits to the highest.

    They are to be multiplied by `unit_of`, and twice by `half_of`. Field f of element i of a block belongs to column i + f * `span_of`.
    """
    return quads(codes, dtype, ASM) if NIBBLES else pairs(codes, dtype, FP8, ASM)


@triton.jit
def e4m3(bits):
    """Convert the bits of float8_e4m3fn, the lowest 8 of an integer, to float32."""
    wide = bits.to(tl.int8).to(tl.int32)
    return (((wide & 0x7F) << 20) | (wide & -0x80000000)).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit
def in_word(words, FIELD: tl.constexpr, NIBBLES: tl.constexpr, FP8: tl.constexpr, ASM: tl.constexpr):
    """Convert a field of the two elements of words, int32, to two tensors of float32.

    Integers get a summand, because it costs less to subtract it from their sums (`summand_of`).
    """
    if NIBBLES:
        by: tl.constexpr = 15 - FIELD // 2 * 8  # to bits 15 ... 22, with its neighbour; those of the second element lie 16 bits higher
        wide = (_nibble(words << by, FIELD % 2, ASM), _nibble(words >> (16 - by), FIELD % 2, ASM))
    elif ASM:  # for both fields at once: the compiler sees that the second conversion repeats the first
        a, b, c, d = tl.inline_asm_elementwise(
            FP8_FLOAT if FP8 else INT8_FLOAT, "=f,=f,=f,=f,r", [words], dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True, pack=1,
        )  # fmt: skip
        wide = (b, d) if FIELD else (a, c)
    elif FP8:
        wide = (e4m3(words >> (8 * FIELD)), e4m3(words >> (8 * FIELD + 16)))
    else:
        words = words ^ -0x7F7F7F80  # 0x80 in each byte
        wide = (
            (((words >> (8 * FIELD)) & 0xFF) + 1024).to(tl.float32), (((words >> (8 * FIELD + 16)) & 0xFF) + 1024).to(tl.float32),
        )  # fmt: skip
    return wide


@triton.constexpr_function
def summand_of(field, nibbles, fp8):
    """Return how much more than the codes of a field the numbers of `in_word` are."""
    return 0.0 if fp8 else (264.0, 24.0)[field % 2] if nibbles else 1152.0


@triton.jit
def _nibble(words, HIGH: tl.constexpr, ASM: tl.constexpr):
    """Convert bits 15 ... 18 to 256 + their value, or bits 19 ... 22 to 16 + their value (`HIGH`)."""
    if ASM and HIGH:
        wide = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, 0x00780000, 0x41800000, 0xEA;", "=f,r", [words], dtype=tl.float32, is_pure=True, pack=1
        )
    elif ASM:
        wide = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, 0x00078000, 0x43800000, 0xEA;", "=f,r", [words], dtype=tl.float32, is_pure=True, pack=1
        )
    elif HIGH:
        wide = ((words & 0x00780000) | 0x41800000).to(tl.float32, bitcast=True)
    else:
        wide = ((words & 0x00078000) | 0x43800000).to(tl.float32, bitcast=True)
    return wide


@triton.jit
def two(base, at, there):
    """Load 2 neighbouring numbers of 2 or 4 bytes in float32, as 2 tensors. `at` counts steps of 2."""
    kind: tl.constexpr = base.dtype.element_ty
    if kind.primitive_bitwidth == 32:
        word = tl.load(base.to(tl.pointer_type(tl.int64)) + at, mask=there, other=0)
        a, b = word.to(tl.int32).to(tl.float32, bitcast=True), (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        word = tl.load(base.to(tl.pointer_type(tl.int32)) + at, mask=there, other=0)
        a, b = word.to(tl.int16).to(kind, bitcast=True).to(tl.float32), (word >> 16).to(tl.int16).to(kind, bitcast=True).to(tl.float32)
    return a, b


@triton.jit
def in_field(base, words, FIELD: tl.constexpr, K: tl.constexpr, NIBBLES: tl.constexpr):
    """Load what belongs to a field of the two elements of words, out of K numbers per column: 2 tensors of float32."""
    SPAN: tl.constexpr = span_of(NIBBLES)
    at = words // (SPAN // 2) * 64 + words % (SPAN // 2) + FIELD * (SPAN // 2)
    return two(base, at, at < K // 2)


@triton.jit
def word_column(words, NIBBLES: tl.constexpr):
    """Return the first column of words of codes."""
    SPAN: tl.constexpr = span_of(NIBBLES)
    return words // (SPAN // 2) * 128 + words % (SPAN // 2) * 2
