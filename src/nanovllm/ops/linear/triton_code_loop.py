"""The loop over codes that products on tensor cores share. Import this module only if Triton is installed.

Codes come to shared memory as they are, become numbers in registers, and multiply the inputs; the codes are the left factor. `FORM` says
where scales come in (`scale_form`). The scales of a step are loaded a step earlier.
"""

# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# (compile-time constants, types of kernels' arguments, names bound in a compile-time branch, and loop ranges without `__next__`)

import triton
import triton.language as tl

from nanovllm.ops.linear.triton_codes import fields_of, half_of, numbers, span_of, unit_of


@triton.jit
def scale_at(values, row, column, K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """Load the scales or zeros of rows of scales for a column, or for columns. Columns beyond K get those of the last one."""
    return tl.load(values + row * GROUPS + tl.minimum(column, K - 1) // GROUP)


@triton.jit
def weight_tiles(
    codes, scales, zeros, row, column, K: tl.constexpr, NIBBLES: tl.constexpr, FP8: tl.constexpr, FORM: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, ZEROS: tl.constexpr, D: tl.constexpr, dtype: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Convert a tile of elements to a tile of numbers for each field, whose first column is `column` + field * `span_of`.

    With `FORM` "spread", they are the dequantised weights. Otherwise they are codes minus zeros, which have few enough bits to be exact,
    and are to be multiplied by `unit_of`, and twice by `half_of`.
    """
    UNIT: tl.constexpr = unit_of(dtype, NIBBLES, ASM)
    HALF: tl.constexpr = half_of(dtype, FP8, ASM)
    SPAN: tl.constexpr = span_of(NIBBLES)
    wide = numbers(codes, dtype, NIBBLES, FP8, ASM)
    tiles = ()
    for field in tl.static_range(fields_of(NIBBLES)):
        tile = wide[field]
        if FORM == "spread":
            columns = column + field * SPAN + tl.arange(0, D)[None, :]
            scale = scale_at(scales, row[:, None], columns, K, GROUP, GROUPS).to(tl.float32)
            zero = scale_at(zeros, row[:, None], columns, K, GROUP, GROUPS).to(tl.float32) if ZEROS else 0.0
            tile = ((tile.to(tl.float32) * UNIT * HALF * HALF - zero) * scale).to(dtype)
        elif ZEROS:
            at = column + (field * SPAN if FORM == "fields" else 0)
            tile -= (scale_at(zeros, row, at, K, GROUP, GROUPS).to(tl.float32) * (1 / UNIT)).to(dtype)[:, None]
        tiles += (tile,)
    return tiles


@triton.jit
def column_of(at, NIBBLES: tl.constexpr):
    """Return the column of the lowest field of element `at` of a row."""
    SPAN: tl.constexpr = span_of(NIBBLES)
    return at // SPAN * 128 + at % SPAN


@triton.jit
def step_scales(
    scales, row, column, K: tl.constexpr, NIBBLES: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Load the scales of a step, times `UNIT`: those of each field with `FORM` "fields", those of all fields with "step", else none."""
    found = ()
    if FORM == "step":
        found = (scale_at(scales, row, column, K, GROUP, GROUPS).to(tl.float32) * UNIT,)
    elif FORM == "fields":
        for field in tl.static_range(fields_of(NIBBLES)):
            found += (scale_at(scales, row, column + field * span_of(NIBBLES), K, GROUP, GROUPS).to(tl.float32) * UNIT,)
    return found


@triton.jit
def first_scales(
    scales, row, up_row, column, K: tl.constexpr, NIBBLES: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    GATED: tl.constexpr, dtype: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Load the scales with which `summed_products` begins: the gate's, or the only matrix's, then the up projection's (`step_scales`)."""
    UNIT: tl.constexpr = unit_of(dtype, NIBBLES, ASM)
    found = step_scales(scales, row, column, K, NIBBLES, FORM, GROUP, GROUPS, UNIT)
    if GATED:
        found += step_scales(scales, up_row, column, K, NIBBLES, FORM, GROUP, GROUPS, UNIT)
    return found


@triton.jit
def _multiplied(sums, tiles, inputs, scales, FIRST: tl.constexpr, NIBBLES: tl.constexpr, FORM: tl.constexpr, HALF: tl.constexpr):
    """Return the sums with the products of a step added. Its scales begin at number `FIRST`, and are multiplied by `HALF`."""
    if FORM == "fields":
        for field in tl.static_range(fields_of(NIBBLES)):
            sums += tl.dot(tiles[field], inputs[field]) * (scales[FIRST + field] * HALF)[:, None]
    elif FORM == "step":
        total = tl.dot(tiles[0], inputs[0])
        for field in tl.static_range(1, fields_of(NIBBLES)):
            total = tl.dot(tiles[field], inputs[field], total)
        sums += total * (scales[FIRST] * HALF)[:, None]
    else:
        for field in tl.static_range(fields_of(NIBBLES)):
            sums = tl.dot(tiles[field], inputs[field], sums)
    return sums


@triton.jit
def summed_products(
    inputs, on, own, up_own, scales, zeros, row, up_row, first, start, stop, K: tl.constexpr, WIDTH: tl.constexpr, BP: tl.constexpr,
    BN: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr, NIBBLES: tl.constexpr, FP8: tl.constexpr, FORM: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, ZEROS: tl.constexpr, GATED: tl.constexpr, WHOLE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Compute `[BN, BP]` products of codes and inputs, scaled, and those of the up projection if `GATED`, in float32.

    It takes elements `start` ... `stop` of each output's codes, D in a step. `inputs` are pointers to the inputs of column 0 ... D - 1,
    `[D, BP]`, `own` and `up_own` to the first D elements of codes, `[BN, D]`; `row` and `up_row` are rows of scales. `first` comes from
    `first_scales`. `WHOLE`: no step reaches beyond the codes or the inputs.
    """
    dtype: tl.constexpr = inputs.dtype.element_ty
    UNIT: tl.constexpr = unit_of(dtype, NIBBLES, ASM)
    HALF: tl.constexpr = half_of(dtype, FP8, ASM) if FORM != "spread" else 1.0
    SPAN: tl.constexpr = span_of(NIBBLES)
    UP: tl.constexpr = fields_of(NIBBLES) if FORM == "fields" else 1  # pyright: ignore[reportAssignmentType]  # the number of the up projection's first scale
    d = tl.arange(0, D)
    acc = tl.zeros([BN, BP], tl.float32)
    other = tl.zeros([BN, BP], tl.float32)
    now = first
    for at in tl.range(start, stop, D, num_stages=STAGES):
        # Not by `column_of`: Triton forgets the alignment of what a call returns, and would load input by input.
        column = tl.multiple_of(at // SPAN * 128 + at % SPAN, D)
        after = first_scales(scales, row, up_row, column_of(at + D, NIBBLES), K, NIBBLES, FORM, GROUP, GROUPS, GATED, dtype, ASM)
        taken = ()
        if WHOLE:
            codes = tl.load(own + at)
            for field in tl.static_range(fields_of(NIBBLES)):
                taken += (tl.load(inputs + column + field * SPAN, mask=on, other=0.0),)
        else:
            codes = tl.load(own + at, mask=(at + d < WIDTH)[None, :], other=0)
            for field in tl.static_range(fields_of(NIBBLES)):
                there = on & (column + field * SPAN + d < K)[:, None]
                taken += (tl.load(inputs + column + field * SPAN, mask=there, other=0.0),)
        tiles = weight_tiles(codes, scales, zeros, row, column, K, NIBBLES, FP8, FORM, GROUP, GROUPS, ZEROS, D, dtype, ASM)
        acc = _multiplied(acc, tiles, taken, now, 0, NIBBLES, FORM, HALF)
        if GATED:
            codes = tl.load(up_own + at) if WHOLE else tl.load(up_own + at, mask=(at + d < WIDTH)[None, :], other=0)
            tiles = weight_tiles(codes, scales, zeros, up_row, column, K, NIBBLES, FP8, FORM, GROUP, GROUPS, ZEROS, D, dtype, ASM)
            other = _multiplied(other, tiles, taken, now, UP, NIBBLES, FORM, HALF)
        now = after
    if FORM == "row":
        acc *= tl.load(scales + row).to(tl.float32)[:, None] * (UNIT * HALF)
        if GATED:
            other *= tl.load(scales + up_row).to(tl.float32)[:, None] * (UNIT * HALF)
    acc *= HALF
    other *= HALF
    return acc, other
