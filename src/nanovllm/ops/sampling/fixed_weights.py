"""Exponentials in fixed point, whose sums have the same bits on every device."""

import torch

from nanovllm.types import Float32, Int64, Tensor

# Coefficients of the series of 2**f, lowest power first. For |f| <= 1/2 its error is about that of float32.
POWERS = (1.0, 0.6931471805599453, 0.2402265069591007, 0.05550410866482158, 0.009618129107628477, 0.0013333558146428443, 0.0001540353039338)
LOG2E = 1.4426950408889634
COLDEST = 1e-30  # a smaller temperature counts as this one, so that its inverse is finite


def fixed_weights(differences: Float32[Tensor, "B C"], temperature: Float32[Tensor, "B 1"]) -> Int64[Tensor, "B C"]:
    """exp(difference / temperature) in fixed point with 40 bits, int64. `differences` are from the largest logit, so at most 0.

    A sum of integers is the same for any order, length and device. The weights themselves are made of products and sums that every device
    rounds alike.
    """
    exponents = (differences * (1.0 / temperature.clamp(min=COLDEST)) * LOG2E).clamp(min=-64.0)
    whole = torch.floor(exponents + 0.5)
    part = exponents - whole
    power = torch.full_like(part, POWERS[-1])
    for coefficient in POWERS[-2::-1]:
        power = power * part + coefficient
    shift = whole.long() + 16
    return ((power * 2.0**24).long() << shift.clamp(min=0)) >> (-shift).clamp(min=0)
