"""`least_kept`: the smallest logit that the filters top-k, top-p and min-p keep in each row.

Shapes: B rows; V vocabulary; C candidates that the filters examine.
"""

import torch

from nanovllm.ops.backends import installed
from nanovllm.ops.sampling import cpu_sampling
from nanovllm.ops.sampling.fixed_weights import fixed_weights
from nanovllm.types import Float, Float32, Int32, Tensor

_LIBRARY = torch.library.Library("nanovllm", "FRAGMENT")
_LIBRARY.define(
    "least_kept(Tensor logits, Tensor temperature, Tensor? top_k, Tensor? top_p, Tensor? min_p, SymInt? num_candidates) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def least_kept(
    logits: Float[Tensor, "B V"],
    temperature: Float32[Tensor, "B"],
    top_k: Int32[Tensor, "B"] | None,
    top_p: Float32[Tensor, "B"] | None,
    min_p: Float32[Tensor, "B"] | None,
    num_candidates: int | None = None,
) -> Float32[Tensor, "B"]:
    """Return the smallest logit that min-p, top-k and top-p keep in each row; -inf where they keep all.

    It is not divided by the temperature, so that comparisons are exact however the division rounds. Tokens with equal logits are kept or
    left out together. Top-p counts the mass of exactly `top_k` of the tokens that min-p keeps, in fixed point (`fixed_weights`). So the
    result has the same bits on a CPU and a GPU, apart from the logarithm of `min_p`.

    Args:
        logits: Logits, `[B, V]`.
        temperature: Temperature of each row, float32 `[B]`. A row at 0 keeps all, since it is not sampled at random.
        top_k: How many tokens to keep, int32 `[B]`; 0: all.
        top_p: The part of the mass to keep (Holtzman et al., 2020), float32 `[B]`; 1: all.
        min_p: The least probability to keep, relative to the largest one, float32 `[B]`; 0: all.
        num_candidates: How many of the largest logits hold all that top-k keeps, for an implementation that sorts. None: all.

    Returns:
        float32 `[B]`. A row whose largest logit is not finite, or that holds NaN, keeps all.
    """
    return torch.ops.nanovllm.least_kept.default(logits, temperature, top_k, top_p, min_p, num_candidates)


@torch.library.register_fake("nanovllm::least_kept", lib=_LIBRARY)
def _fake(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None, num_candidates: int | None
) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.float32)


def reference(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None, num_candidates: int | None = None
) -> Tensor:
    """Compute `least_kept` in plain torch, by a sorted copy of the candidates."""
    drawn_B1 = (temperature > 0).unsqueeze(1)
    temperature_B1 = torch.where(temperature > 0, temperature, 1.0).unsqueeze(1)
    if top_k is None and top_p is None:
        sorted_BC = logits.amax(1, keepdim=True).float()
    elif num_candidates is not None and num_candidates < logits.shape[1]:
        sorted_BC = logits.topk(num_candidates, 1).values.float()
    else:
        sorted_BC = logits.sort(1, descending=True).values.float()
    least_B1 = torch.full_like(temperature_B1, -torch.inf)
    if min_p is not None:
        min_p_B1 = min_p.unsqueeze(1)
        least_B1 = torch.where(min_p_B1 > 0, sorted_BC[:, :1] + temperature_B1 * min_p_B1.log(), least_B1)
    num_kept_B1 = torch.full_like(temperature_B1, sorted_BC.shape[1], dtype=torch.int64)
    cut_B1 = torch.zeros_like(temperature_B1, dtype=torch.bool)
    if top_k is not None:
        top_k_B1 = top_k.unsqueeze(1)
        cut_B1 = top_k_B1 > 0
        num_kept_B1 = torch.where(cut_B1, top_k_B1.clamp(max=sorted_BC.shape[1]).long(), num_kept_B1)
    if top_p is not None:
        top_p_B1 = top_p.unsqueeze(1)
        cut_B1 = cut_B1 | (top_p_B1 < 1)
        kept_BC = (torch.arange(sorted_BC.shape[1], device=logits.device) < num_kept_B1) & (sorted_BC >= least_B1)
        weights_BC = fixed_weights(sorted_BC - sorted_BC[:, :1], temperature_B1)
        num_kept_B1 = torch.where(top_p_B1 < 1, _num_in_nucleus(weights_BC, kept_BC, top_p_B1), num_kept_B1)
    last_B1 = sorted_BC.gather(1, num_kept_B1 - 1)
    least_B1 = torch.where(cut_B1, torch.maximum(last_B1, least_B1), least_B1)
    return torch.where(drawn_B1 & sorted_BC[:, :1].isfinite(), least_B1, -torch.inf).squeeze(1)


def _num_in_nucleus(weights_BC: Tensor, kept_BC: Tensor, top_p_B1: Tensor) -> Tensor:
    """The number of kept tokens, in descending order, that hold `top_p` of their mass; at least 1."""
    weights_BC = torch.where(kept_BC, weights_BC, 0)
    sums_BC = weights_BC.cumsum(1)
    wanted_B1 = (top_p_B1.double() * sums_BC[:, -1:].double()).long()
    missing_BC = kept_BC & (sums_BC - weights_BC < wanted_B1)
    return missing_BC.sum(1, keepdim=True).clamp(min=1)


def _cpu(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None, num_candidates: int | None
) -> Tensor:
    options = (temperature, torch.float32, 1), (top_k, torch.int32, 1), (top_p, torch.float32, 1), (min_p, torch.float32, 1)
    if cpu_sampling.serves(logits, *options):
        return cpu_sampling.least_kept(logits, temperature, top_k, top_p, min_p, num_candidates, reference)
    return reference(logits, temperature, top_k, top_p, min_p, num_candidates)


def _cuda(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None, num_candidates: int | None
) -> Tensor:
    if logits.dtype == torch.float64 or not installed("triton"):
        return reference(logits, temperature, top_k, top_p, min_p, num_candidates)
    from nanovllm.ops.sampling.triton_least_kept import launch

    return launch(logits, temperature, top_k, top_p, min_p)


_LIBRARY.impl("least_kept", _cpu, "CPU")
_LIBRARY.impl("least_kept", _cuda, "CUDA")
