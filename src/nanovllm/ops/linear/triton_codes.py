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
# 128 + the low 7 bits, minus 128 or 256 by the highest bit.
INT8_BF16 = tl.constexpr("""{
    .reg .b32 a, b, c, minus;
    mov.b32 minus, 0xBF80BF80;
    prmt.b32 a, $2, 0x43434343, 0x4140;
    prmt.b32 b, $2, 0x43434343, 0x4342;
    and.b32 c, a, 0x43804380;
    and.b32 a, a, 0xFF7FFF7F;
    fma.rn.bf16x2 $0, c, minus, a;
    and.b32 c, b, 0x43804380;
    and.b32 b, b, 0xFF7FFF7F;
    fma.rn.bf16x2 $1, c, minus, b;
}""")
# The sign stays, exponent and mantissa move down by 4 bits, and a factor of 2^120 makes up for the other exponent bias. Codes below the
# smallest normal number are below bfloat16's too, and its products keep them. The summand is -0, which keeps both zeros.
FP8_BF16 = tl.constexpr("""{
    .reg .b32 a, b, c, scale, zero;
    mov.b32 scale, 0x7B807B80;
    mov.b32 zero, 0x80008000;
    prmt.b32 a, $2, 0, 0x1404;
    prmt.b32 b, $2, 0, 0x3424;
    shr.b32 c, a, 4;
    and.b32 c, c, 0x07F007F0;
    lop3.b32 a, a, 0x80008000, c, 0xEA;
    fma.rn.bf16x2 $0, a, scale, zero;
    shr.b32 c, b, 4;
    and.b32 c, c, 0x07F007F0;
    lop3.b32 b, b, 0x80008000, c, 0xEA;
    fma.rn.bf16x2 $1, b, scale, zero;
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

    Codes are uint8 of two nibbles, or int8, whose bits may be those of FP8. With `words`, four bytes of codes are an int32.
    """
    codes = matrix.codes.view(torch.int32) if words else matrix.codes if matrix.bits == 4 else matrix.codes.view(torch.int8)
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
def numbers(codes, dtype: tl.constexpr, FP8: tl.constexpr, ASM: tl.constexpr):
    """Convert codes of 8 bits to numbers. The codes are int8, or the bits of float8_e4m3fn as int8, which is never NaN."""
    if ASM and dtype == tl.bfloat16:
        wide = tl.inline_asm_elementwise(FP8_BF16 if FP8 else INT8_BF16, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
    elif FP8:
        wide = e4m3(codes).to(dtype)
    else:
        wide = codes.to(tl.float32).to(dtype)
    return wide


@triton.jit
def e4m3(bits):
    """Convert the bits of float8_e4m3fn, the lowest 8 of an integer, to float32."""
    wide = bits.to(tl.int8).to(tl.int32)
    return (((wide & 0x7F) << 20) | (wide & -0x80000000)).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit
def in_word(words, HALF: tl.constexpr, NIBBLES: tl.constexpr, FP8: tl.constexpr, ASM: tl.constexpr):
    """Convert the codes of words of 4 bytes, int32, to 4 tensors of float32: those of low or high nibbles (`HALF`), or all of 8 bits.

    Integers get a summand, because it costs less to subtract it from their sums: 264 low nibbles, 24 high nibbles, 1152 codes of 8 bits.
    """
    if FP8 and ASM:
        a, b, c, d = tl.inline_asm_elementwise(
            FP8_FLOAT, "=f,=f,=f,=f,r", [words], dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1
        )
    elif FP8:
        a, b, c, d = e4m3(words), e4m3(words >> 8), e4m3(words >> 16), e4m3(words >> 24)
    elif NIBBLES:
        a, b = _nibble(words << 15, HALF, ASM), _nibble(words << 7, HALF, ASM)
        c, d = _nibble(words >> 1, HALF, ASM), _nibble(words >> 9, HALF, ASM)
    elif ASM:
        a, b, c, d = tl.inline_asm_elementwise(
            INT8_FLOAT, "=f,=f,=f,=f,r", [words], dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1
        )
    else:
        words = words ^ -0x7F7F7F80  # 0x80 in each byte
        a, b = ((words & 0xFF) + 1024).to(tl.float32), (((words >> 8) & 0xFF) + 1024).to(tl.float32)
        c, d = (((words >> 16) & 0xFF) + 1024).to(tl.float32), (((words >> 24) & 0xFF) + 1024).to(tl.float32)
    return a, b, c, d


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
