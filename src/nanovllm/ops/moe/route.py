"""`route`: choose each token's experts and their weights from a router's logits. `norm_route` computes the logits, too."""

import torch

from nanovllm.ops.backends import dependent_launch, installed, own_kernels
from nanovllm.ops.elementwise.norm_rope import rms_norm
from nanovllm.ops.linear.linear import linear
from nanovllm.types import Float, Int32, Int64, Tensor

MOST = 1024  # experts that one program of the kernel can handle
ROWS = 16  # tokens up to which the norm is part of the router's kernel; every program computes it
WIDEST = 16384  # inputs that one program of this kernel can handle

_LIBRARY = torch.library.Library("nanovllm", "FRAGMENT")
_LIBRARY.define(
    "route(Tensor logits, Tensor? bias, int top_k, bool normalise, float least_sum) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    "norm_route(Tensor x, Tensor gain, Tensor router, Tensor? bias, float eps, int top_k, bool normalise, float least_sum) -> "
    "(Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def route(
    logits: Float[Tensor, "T E"], bias: Float[Tensor, "E"] | None, top_k: int, normalise: bool, least_sum: float = 0.0
) -> tuple[Int32[Tensor, "T k"] | Int64[Tensor, "T k"], Float[Tensor, "T k"]]:
    """Choose the `top_k` experts with the largest probabilities, largest first, and return their numbers and weights.

    The probabilities are a softmax over all experts, computed in float32 or wider. Nothing is written in place.

    Schema: `nanovllm::route(Tensor logits, Tensor? bias, int top_k, bool normalise, float least_sum) -> (Tensor, Tensor)`.
    The reference is `softmax` and `topk` in plain torch.

    Args:
        logits: The router's logits, `[T, E]`.
        bias: Added to the probabilities for the choice only, `[E]`; the returned weights do not contain it.
        top_k: Experts per token, 1 ... E. Of experts with equal probabilities any may be chosen.
        normalise: Whether to divide a token's weights by their sum.
        least_sum: The smallest divisor that `normalise` uses.

    Returns:
        Numbers of the experts `[T, k]`, int32 from the Triton kernel and int64 from the reference. Weights `[T, k]`, in float32 or wider.

    Examples:
        >>> from nanovllm.ops import route
        >>> chosen, weights = route(torch.tensor([[0.0, 2.0, 1.0]]), None, top_k=2, normalise=True)
        >>> chosen.tolist(), [round(value, 3) for value in weights[0].tolist()]
        ([[1, 2]], [0.731, 0.269])
    """
    return torch.ops.nanovllm.route.default(logits, bias, top_k, normalise, least_sum)


@torch.library.register_fake("nanovllm::route", lib=_LIBRARY)
def _fake(logits: Tensor, bias: Tensor | None, top_k: int, normalise: bool, least_sum: float) -> tuple[Tensor, Tensor]:
    shape, wide = (logits.shape[0], top_k), torch.promote_types(logits.dtype, torch.float32)
    return logits.new_empty(shape, dtype=_index(logits)), logits.new_empty(shape, dtype=wide)


def _index(logits: Tensor) -> torch.dtype:
    return torch.int32 if _kernel_serves(logits) else torch.int64


def _kernel_serves(logits: Tensor) -> bool:
    return logits.device.type == "cuda" and logits.dtype != torch.float64 and logits.shape[1] <= MOST and installed("triton")


def plain_route(logits: Tensor, bias: Tensor | None, top_k: int, normalise: bool, least_sum: float) -> tuple[Tensor, Tensor]:
    """Compute `route` in plain torch, which `torch.func` can transform."""
    shares = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
    chosen = (shares if bias is None else shares + bias).topk(top_k, dim=-1).indices
    weights = shares.gather(-1, chosen)
    return chosen, weights / weights.sum(-1, keepdim=True).clamp(min=least_sum) if normalise else weights


def norm_route(
    x: Float[Tensor, "T M"],
    gain: Float[Tensor, "M"],
    router: Float[Tensor, "E M"],
    bias: Float[Tensor, "E"] | None,
    eps: float,
    top_k: int,
    normalise: bool,
    least_sum: float = 0.0,
) -> tuple[Float[Tensor, "T M"], Int32[Tensor, "T k"] | Int64[Tensor, "T k"], Float[Tensor, "T k"]]:
    """Compute the RMS norm of each token, and from it the router's logits and `route`. On a GPU few tokens take two launches.

    Args:
        x: Inputs, `[T, M]`.
        gain: The weight of the norm, `[M]`.
        router: The weight of the router, `[E, M]`. Its dtype may be wider than that of `x`.
        bias: As in `route`.
        eps: Added to the mean square in the norm.
        top_k: As in `route`.
        normalise: As in `route`.
        least_sum: As in `route`.

    Returns:
        The norm `[T, M]` in the dtype of `x`, then the numbers and the weights of the experts as in `route`.
    """
    return torch.ops.nanovllm.norm_route.default(x, gain, router, bias, eps, top_k, normalise, least_sum)


@torch.library.register_fake("nanovllm::norm_route", lib=_LIBRARY)
def _fake_normed(
    x: Tensor, gain: Tensor, router: Tensor, bias: Tensor | None, eps: float, top_k: int, normalise: bool, least_sum: float
) -> tuple[Tensor, Tensor, Tensor]:
    logits = x.new_empty((x.shape[0], router.shape[0]), dtype=router.dtype)
    return x.new_empty(x.shape), *_fake(logits, bias, top_k, normalise, least_sum)


def _normed(
    x: Tensor, gain: Tensor, router: Tensor, bias: Tensor | None, eps: float, top_k: int, normalise: bool, least_sum: float
) -> tuple[Tensor, Tensor, Tensor]:
    h = rms_norm(x, gain, eps)
    return h, *route(linear(h.to(router.dtype), router), bias, top_k, normalise, least_sum)


def _normed_cuda(
    x: Tensor, gain: Tensor, router: Tensor, bias: Tensor | None, eps: float, top_k: int, normalise: bool, least_sum: float
) -> tuple[Tensor, Tensor, Tensor]:
    (tokens, width), whole = x.shape, gain.is_contiguous() and router.is_contiguous()
    if not (whole and 0 < tokens <= ROWS and width <= WIDEST and own_kernels(x.device, x.dtype) and router.dtype != torch.float64):
        return _normed(x, gain, router, bias, eps, top_k, normalise, least_sum)
    from nanovllm.ops.moe.triton_route import norm_router

    h, logits = norm_router(x.contiguous(), gain, router, eps, dependent_launch(x.device))
    return h, *route(logits, bias, top_k, normalise, least_sum)


def _cuda(logits: Tensor, bias: Tensor | None, top_k: int, normalise: bool, least_sum: float) -> tuple[Tensor, Tensor]:
    if not _kernel_serves(logits):
        return plain_route(logits, bias, top_k, normalise, least_sum)
    from nanovllm.ops.moe.triton_route import route as launch

    wide = None if bias is None else bias.float().contiguous()
    return launch(logits.contiguous(), wide, top_k, normalise, least_sum, dependent_launch(logits.device))


_LIBRARY.impl("route", plain_route, "CPU")
_LIBRARY.impl("route", _cuda, "CUDA")
_LIBRARY.impl("norm_route", _normed, "CPU")
_LIBRARY.impl("norm_route", _normed_cuda, "CUDA")
