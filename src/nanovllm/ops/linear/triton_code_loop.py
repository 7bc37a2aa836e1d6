"""The loop over codes that products on tensor cores share. Import this module only if Triton is installed.

Codes come to shared memory as they are, become numbers in registers, and multiply the inputs; the codes are the left factor. `FORM` says
where scales come in (`scale_form`). The scales of a step are loaded a step earlier.
"""

# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# (types of kernels' arguments, names bound in a compile-time branch, and loop ranges without `__next__`)

import triton
import triton.language as tl

from nanovllm.ops.linear.triton_codes import halves


@triton.jit
def scale_at(values, row, column, K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """Load the scales or zeros of rows of scales for a column, or for columns. Columns beyond K get those of the last one."""
    return tl.load(values + row * GROUPS + tl.minimum(column, K - 1) // GROUP)


@triton.jit
def weight_tiles(
    codes, scales, zeros, row, column, K: tl.constexpr, NIBBLES: tl.constexpr, FP8: tl.constexpr, SPREAD: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, ZEROS: tl.constexpr, D: tl.constexpr, dtype: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Convert a tile of pairs of codes to two tiles of numbers: the low and the high codes.

    With `SPREAD`, they are the dequantised weights, of columns `column` ... + D - 1 and those + 64. Otherwise they are codes minus zeros,
    which have few enough bits to be exact.
    """
    low, high = halves(codes, dtype, NIBBLES, FP8, ASM)
    if SPREAD:
        columns = column + tl.arange(0, D)[None, :]
        scale = scale_at(scales, row[:, None], columns, K, GROUP, GROUPS).to(tl.float32)
        zero = scale_at(zeros, row[:, None], columns, K, GROUP, GROUPS).to(tl.float32) if ZEROS else 0.0
        low = ((low.to(tl.float32) - zero) * scale).to(dtype)
        scale = scale_at(scales, row[:, None], columns + 64, K, GROUP, GROUPS).to(tl.float32)
        zero = scale_at(zeros, row[:, None], columns + 64, K, GROUP, GROUPS).to(tl.float32) if ZEROS else 0.0
        high = ((high.to(tl.float32) - zero) * scale).to(dtype)
    elif ZEROS:
        low -= scale_at(zeros, row, column, K, GROUP, GROUPS).to(tl.float32).to(dtype)[:, None]
        high -= scale_at(zeros, row, column + 64, K, GROUP, GROUPS).to(tl.float32).to(dtype)[:, None]
    return low, high


@triton.jit
def column_of(at):
    """Return the column of the low code of pair `at` of a row."""
    return at // 64 * 128 + at % 64


@triton.jit
def step_scales(scales, row, column, K: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """Load the scales of a step's low codes, then those of its high codes, which differ with `FORM` "halves" only."""
    low = scale_at(scales, row, column, K, GROUP, GROUPS).to(tl.float32)
    high = low
    if FORM == "halves":
        high = scale_at(scales, row, column + 64, K, GROUP, GROUPS).to(tl.float32)
    return low, high


@triton.jit
def first_scales(
    scales, row, up_row, column, K: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, GATED: tl.constexpr
):  # fmt: skip
    """Load the scales with which `summed_products` begins: a pair of the gate's, or of the only matrix, and a pair of the up projection's.

    Without scales after each step, and without an up projection, they are zeros.
    """
    low, high, up_low, up_high = 0.0, 0.0, 0.0, 0.0
    if FORM == "step" or FORM == "halves":  # noqa: PLR1714
        low, high = step_scales(scales, row, column, K, FORM, GROUP, GROUPS)
        if GATED:
            up_low, up_high = step_scales(scales, up_row, column, K, FORM, GROUP, GROUPS)
    return low, high, up_low, up_high


@triton.jit
def _multiplied(sums, low, high, low_inputs, high_inputs, scale, scale_high, FORM: tl.constexpr):
    """Return the sums with the products of a step added."""
    if FORM == "halves":
        sums += tl.dot(low, low_inputs) * scale[:, None]
        sums += tl.dot(high, high_inputs) * scale_high[:, None]
    elif FORM == "step":
        sums += tl.dot(high, high_inputs, tl.dot(low, low_inputs)) * scale[:, None]
    else:
        sums = tl.dot(high, high_inputs, tl.dot(low, low_inputs, sums))
    return sums


@triton.jit
def summed_products(
    inputs, on, own, up_own, scales, zeros, row, up_row, first, start, stop, K: tl.constexpr, WIDTH: tl.constexpr, BP: tl.constexpr,
    BN: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr, NIBBLES: tl.constexpr, FP8: tl.constexpr, FORM: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, ZEROS: tl.constexpr, GATED: tl.constexpr, WHOLE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Compute `[BN, BP]` products of codes and inputs, scaled, and those of the up projection if `GATED`, in float32.

    It takes pairs `start` ... `stop` of each output's codes, D in a step. `inputs` are pointers to the inputs of column 0 ... D - 1,
    `[D, BP]`, `own` and `up_own` to the first D pairs of codes, `[BN, D]`; `row` and `up_row` are rows of scales. `first` comes from
    `first_scales`. `WHOLE`: no step reaches beyond the codes or the inputs.
    """
    dtype: tl.constexpr = inputs.dtype.element_ty
    SPREAD: tl.constexpr = FORM == "spread"
    EACH: tl.constexpr = FORM == "step" or FORM == "halves"  # noqa: PLR1714  # scales after each step
    d = tl.arange(0, D)
    acc = tl.zeros([BN, BP], tl.float32)
    other = tl.zeros([BN, BP], tl.float32)
    scale, scale_high, up_scale, up_scale_high = first
    for at in tl.range(start, stop, D, num_stages=STAGES):
        # Not by `column_of`: Triton forgets the alignment of what a call returns, and would load input by input.
        column = tl.multiple_of(at // 64 * 128 + at % 64, D)
        if EACH:
            after = column_of(at + D)
            next_scale, next_high = step_scales(scales, row, after, K, FORM, GROUP, GROUPS)
            if GATED:
                next_up, next_up_high = step_scales(scales, up_row, after, K, FORM, GROUP, GROUPS)
        if WHOLE:
            gate_codes = tl.load(own + at)
            low_inputs = tl.load(inputs + column, mask=on, other=0.0)
            high_inputs = tl.load(inputs + column + 64, mask=on, other=0.0)
        else:
            gate_codes = tl.load(own + at, mask=(at + d < WIDTH)[None, :], other=0)
            low_inputs = tl.load(inputs + column, mask=on & (column + d < K)[:, None], other=0.0)
            high_inputs = tl.load(inputs + column + 64, mask=on & (column + 64 + d < K)[:, None], other=0.0)
        low, high = weight_tiles(gate_codes, scales, zeros, row, column, K, NIBBLES, FP8, SPREAD, GROUP, GROUPS, ZEROS, D, dtype, ASM)
        acc = _multiplied(acc, low, high, low_inputs, high_inputs, scale, scale_high, FORM)
        if GATED:
            up_codes = tl.load(up_own + at) if WHOLE else tl.load(up_own + at, mask=(at + d < WIDTH)[None, :], other=0)
            low, high = weight_tiles(up_codes, scales, zeros, up_row, column, K, NIBBLES, FP8, SPREAD, GROUP, GROUPS, ZEROS, D, dtype, ASM)
            other = _multiplied(other, low, high, low_inputs, high_inputs, up_scale, up_scale_high, FORM)
        if EACH:
            scale, scale_high = next_scale, next_high
            if GATED:
                up_scale, up_scale_high = next_up, next_up_high
    if FORM == "row":
        acc *= tl.load(scales + row).to(tl.float32)[:, None]
        if GATED:
            other *= tl.load(scales + up_row).to(tl.float32)[:, None]
    return acc, other
