"""Products whose activations are rounded to FP8, like the weights: an option that changes results, and is off by default.

FP8 weights with a scale per row are multiplied by `torch._scaled_mm`, on tensor cores that multiply FP8 twice as fast as bfloat16. Each
row of activations gets its own scale, from its largest magnitude. So the result of a row does not depend on the other rows.
"""

import torch

from nanovllm.ops.backends import against_own_kernels, capability
from nanovllm.ops.linear.quantise import LARGEST_FP8
from nanovllm.ops.linear.quantised import QuantisedMatrix, spread
from nanovllm.types import Float, Tensor

ALIGNED = 16  # the outputs of a product are a multiple of this number
ROWS = 64  # products of more rows round their activations, if the matrix asks for it; fewer rows are faster by kernels that convert codes


def against(weight: QuantisedMatrix) -> str:
    """Return the reason why `product` cannot multiply a matrix by activations in FP8, or an empty string if it can."""
    if weight.kind != "fp8":
        return f"the codes are {weight.kind}"
    if weight.group < weight.columns:
        return f"a scale serves {weight.group} columns, not a row"
    if weight.shape[-2] % ALIGNED:
        return f"{weight.shape[-2]} outputs are no multiple of {ALIGNED}"
    return ""


def against_device(device: torch.device, dtype: torch.dtype) -> str:
    """Return the reason why a device has no such products, or an empty string if it has."""
    if device.type != "cuda":
        return f"the device is {device}"
    if why := against_own_kernels(device, dtype):
        return why
    if capability(device) < (8, 9):
        return f"the GPU has compute capability {'.'.join(map(str, capability(device)))}, not 8.9 or more"
    return "" if dtype == torch.bfloat16 else f"the dtype is {str(dtype).removeprefix('torch.')}, not bfloat16"


def product(x: Float[Tensor, "T K"], weight: QuantisedMatrix, bias: Float[Tensor, "N"] | None) -> Float[Tensor, "T N"]:
    """Compute `x @ weight.T + bias` with x rounded to FP8. The matrix is in pairs, without an order, and fits (`against`)."""
    from nanovllm.ops.linear.triton_rounded_rows import rounded_rows

    codes, scales = rounded_rows(x.contiguous())
    own = spread(weight.scales, (weight.shape[0], 1), weight.rows, 1).float().view(1, -1)
    factors = codes, weight.codes.view(torch.float8_e4m3fn).T
    how = {"scale_a": scales, "scale_b": own, "out_dtype": x.dtype, "use_fast_accum": True}
    y = torch._scaled_mm(*factors, **how)  # pyright: ignore[reportPrivateImportUsage]
    return y if bias is None else y.add_(bias)


def reference(x: Float[Tensor, "T K"], weight: QuantisedMatrix, bias: Float[Tensor, "N"] | None) -> Float[Tensor, "T N"]:
    """What `product` computes, in float64: the obvious form."""
    largest = x.float().abs().amax(1, keepdim=True)
    scales = torch.where(largest > 0, largest / largest.new_tensor(LARGEST_FP8), 1.0)
    codes = (x.float() / scales).clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn)
    y = (codes.double() * scales.double()) @ weight.dequantised(torch.float64).T
    return y if bias is None else y + bias.double()
