"""Codes of quantised matrices as numbers, inside Triton kernels. Import this module only if Triton is installed.

All conversions are exact. Where the compiler's own conversion takes many instructions, the bits are moved by hand: a code becomes the low
mantissa bits of a number whose exponent is known, and the known part is subtracted. `ASM` selects PTX; without it the same numbers are
computed by plain operations, which Triton's interpreter can run.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# (assembly kept as `tl.constexpr`, types of kernels' arguments, and functions that return several tensors)

import torch
import triton
import triton.language as tl

from nanovllm.ops.linear.quantised import QuantisedMatrix
from nanovllm.types import Tensor

# Of 4 bytes, two go into a register of two bfloat16 numbers each. With 0x43 as the upper byte, a number is 128 + its low bits.
INT4_BF16 = tl.constexpr("""{
    .reg .b32 a, b, c, one, less;
    mov.b32 one, 0x3F803F80;
    mov.b32 less, 0xC308C308;
    prmt.b32 a, $4, 0x43434343, 0x4140;
    prmt.b32 b, $4, 0x43434343, 0x4342;
    and.b32 $0, a, 0xFF0FFF0F;
    and.b32 $1, b, 0xFF0FFF0F;
    shr.b32 c, a, 4;
    lop3.b32 $2, c, 0x000F000F, 0x43004300, 0xEA;
    shr.b32 c, b, 4;
    lop3.b32 $3, c, 0x000F000F, 0x43004300, 0xEA;
    fma.rn.bf16x2 $0, $0, one, less;
    fma.rn.bf16x2 $1, $1, one, less;
    fma.rn.bf16x2 $2, $2, one, less;
    fma.rn.bf16x2 $3, $3, one, less;
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
# The sign stays, exponent and mantissa move to where bfloat16 has them, and a factor of 2^120 makes up for the other exponent bias. Codes
# below the smallest normal number are below bfloat16's too, and its products keep them. The summand is -0, which keeps both zeros.
FP8_LOW = tl.constexpr("""{
    .reg .b32 a, b, scale, zero;
    mov.b32 scale, 0x7B807B80;
    mov.b32 zero, 0x80008000;
    shl.b32 a, $1, 8;
    shl.b32 b, $1, 4;
    and.b32 a, a, 0x80008000;
    lop3.b32 a, b, 0x07F007F0, a, 0xEA;
    fma.rn.bf16x2 $0, a, scale, zero;
}""")
FP8_HIGH = tl.constexpr("""{
    .reg .b32 a, b, scale, zero;
    mov.b32 scale, 0x7B807B80;
    mov.b32 zero, 0x80008000;
    shr.b32 a, $1, 4;
    and.b32 b, $1, 0x80008000;
    lop3.b32 a, a, 0x07F007F0, b, 0xEA;
    fma.rn.bf16x2 $0, a, scale, zero;
}""")

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

    The matrix is `in_pairs`. Codes are uint8 of two nibbles, or int16 of two codes of 8 bits. With `words`, four bytes are an int32.
    """
    codes = matrix.codes.view(torch.int32) if words else matrix.codes if matrix.bits == 4 else matrix.codes.view(torch.int16)
    return codes, matrix.scales, matrix.scales if matrix.zeros is None else matrix.zeros


@triton.jit
def nibbles(codes, dtype: tl.constexpr, ASM: tl.constexpr):
    """Convert packed 4-bit codes, uint8, to the numbers -8 ... 7 of the low nibbles, and those of the high nibbles."""
    if ASM and dtype == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(INT4_BF16, "=r,=r,=r,=r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4)
    else:
        low = ((codes & 15).to(tl.int32) - 8).to(tl.float32).to(dtype)
        high = ((codes >> 4).to(tl.int32) - 8).to(tl.float32).to(dtype)
    return low, high


@triton.jit
def pairs(codes, dtype: tl.constexpr, FP8: tl.constexpr, ASM: tl.constexpr):
    """Convert pairs of 8-bit codes, int16, to the numbers of the low bytes, and those of the high bytes. No code of FP8 is NaN."""
    if ASM and dtype == tl.bfloat16:
        low = tl.inline_asm_elementwise(FP8_LOW if FP8 else INT8_LOW, "=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=2)
        high = tl.inline_asm_elementwise(FP8_HIGH if FP8 else INT8_HIGH, "=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=2)
    elif FP8:
        low, high = e4m3(codes).to(dtype), e4m3(codes >> 8).to(dtype)
    else:
        low, high = codes.to(tl.int8).to(tl.float32).to(dtype), (codes >> 8).to(tl.float32).to(dtype)
    return low, high


@triton.jit
def halves(codes, dtype: tl.constexpr, NIBBLES: tl.constexpr, FP8: tl.constexpr, ASM: tl.constexpr):
    """Convert codes to the numbers of their low halves, and those of their high halves, 64 columns on."""
    if NIBBLES:
        low, high = nibbles(codes, dtype, ASM)
    else:
        low, high = pairs(codes, dtype, FP8, ASM)
    return low, high


@triton.jit
def e4m3(bits):
    """Convert the bits of float8_e4m3fn, the lowest 8 of an integer, to float32."""
    wide = bits.to(tl.int8).to(tl.int32)
    return (((wide & 0x7F) << 20) | (wide & -0x80000000)).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit
def in_word(words, HALF: tl.constexpr, NIBBLES: tl.constexpr, FP8: tl.constexpr, ASM: tl.constexpr):
    """Convert the low or high codes (`HALF`) of words of 4 bytes, int32, to tensors of float32: 4 of nibbles, or 2 of 8 bits.

    Integers get a summand, because it costs less to subtract it from their sums: 264 low nibbles, 24 high nibbles, 1152 codes of 8 bits.
    """
    if NIBBLES:
        a, b = _nibble(words << 15, HALF, ASM), _nibble(words << 7, HALF, ASM)
        c, d = _nibble(words >> 1, HALF, ASM), _nibble(words >> 9, HALF, ASM)
        wide = (a, b, c, d)
    elif ASM:  # for both halves at once: the compiler sees that the second conversion repeats the first
        a, b, c, d = tl.inline_asm_elementwise(
            FP8_FLOAT if FP8 else INT8_FLOAT, "=f,=f,=f,=f,r", [words], dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True, pack=1,
        )  # fmt: skip
        wide = (b, d) if HALF else (a, c)
    elif FP8:
        wide = (e4m3(words >> (8 * HALF)), e4m3(words >> (8 * HALF + 16)))
    else:
        words = words ^ -0x7F7F7F80  # 0x80 in each byte
        wide = (
            (((words >> (8 * HALF)) & 0xFF) + 1024).to(tl.float32), (((words >> (8 * HALF + 16)) & 0xFF) + 1024).to(tl.float32),
        )  # fmt: skip
    return wide


@triton.jit
def _nibble(words, HALF: tl.constexpr, ASM: tl.constexpr):
    """Convert the byte in bits 15 ... 22 to 256 + its low nibble or 16 + its high nibble."""
    if ASM and HALF:
        wide = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, 0x00780000, 0x41800000, 0xEA;", "=f,r", [words], dtype=tl.float32, is_pure=True, pack=1
        )
    elif ASM:
        wide = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, 0x00078000, 0x43800000, 0xEA;", "=f,r", [words], dtype=tl.float32, is_pure=True, pack=1
        )
    elif HALF:
        wide = ((words & 0x00780000) | 0x41800000).to(tl.float32, bitcast=True)
    else:
        wide = ((words & 0x00078000) | 0x43800000).to(tl.float32, bitcast=True)
    return wide


@triton.jit
def four(base, at, there):
    """Load 4 neighbouring numbers of 2 or 4 bytes in float32, as 4 tensors. `at` counts steps of 4; the memory is aligned to 8 bytes."""
    kind: tl.constexpr = base.dtype.element_ty
    words = base.to(tl.pointer_type(tl.int64))
    if kind.primitive_bitwidth == 32:
        one, two = tl.load(words + 2 * at, mask=there, other=0), tl.load(words + 2 * at + 1, mask=there, other=0)
        a, b = one.to(tl.int32).to(tl.float32, bitcast=True), (one >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        c, d = two.to(tl.int32).to(tl.float32, bitcast=True), (two >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        word = tl.load(words + at, mask=there, other=0)
        a, b = word.to(tl.int16).to(kind, bitcast=True).to(tl.float32), (word >> 16).to(tl.int16).to(kind, bitcast=True).to(tl.float32)
        c, d = (
            (word >> 32).to(tl.int16).to(kind, bitcast=True).to(tl.float32),
            (word >> 48).to(tl.int16).to(kind, bitcast=True).to(tl.float32),
        )
    return a, b, c, d


@triton.jit
def two(base, at, there):
    """Load 2 neighbouring numbers, as `four` loads 4. `at` counts steps of 2."""
    kind: tl.constexpr = base.dtype.element_ty
    if kind.primitive_bitwidth == 32:
        word = tl.load(base.to(tl.pointer_type(tl.int64)) + at, mask=there, other=0)
        a, b = word.to(tl.int32).to(tl.float32, bitcast=True), (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        word = tl.load(base.to(tl.pointer_type(tl.int32)) + at, mask=there, other=0)
        a, b = word.to(tl.int16).to(kind, bitcast=True).to(tl.float32), (word >> 16).to(tl.int16).to(kind, bitcast=True).to(tl.float32)
    return a, b


@triton.jit
def in_half(base, words, half: tl.constexpr, K: tl.constexpr, NIBBLES: tl.constexpr):
    """Load what belongs to the low or high codes of words, out of K numbers per column: 4 tensors of float32, or 2 for 8 bits.

    Word 16 i + j of 4-bit codes holds columns 128 i + 4 j ... + 3, and those + 64. Word 32 i + j of 8-bit codes holds columns
    128 i + 2 j and + 1, and those + 64.
    """
    if NIBBLES:
        at = words // 16 * 32 + words % 16 + 16 * half
        wide = four(base, at, at < K // 4)
    else:
        at = words // 32 * 64 + words % 32 + 32 * half
        wide = two(base, at, at < K // 2)
    return wide


@triton.jit
def word_column(words, NIBBLES: tl.constexpr):
    """Return the first column of words of codes."""
    return words // 16 * 128 + words % 16 * 4 if NIBBLES else words // 32 * 128 + words % 32 * 2
