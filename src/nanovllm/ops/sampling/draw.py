"""`draw`: sample one token per row from its logits with the Gumbel-max trick, without normalisation and without waiting for the device."""

import torch

from nanovllm.ops.backends import installed
from nanovllm.ops.sampling import cpu_sampling
from nanovllm.ops.sampling.uniforms import uniforms
from nanovllm.types import Float, Float32, Int32, Int64, Tensor

_LIBRARY = torch.library.Library("nanovllm", "FRAGMENT")
_LIBRARY.define("highest(Tensor logits) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.define("draw(Tensor logits, Tensor temperature, Tensor? least, Tensor keys) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def draw(
    logits: Float[Tensor, "B V"], temperature: Float32[Tensor, "B"], least: Float32[Tensor, "B"] | None, keys: Int64[Tensor, "B 2"]
) -> Int32[Tensor, "B"]:
    """Sample one token per row: the argmax of `logits + temperature * g`, where g is Gumbel noise.

    The noise has the standard Gumbel distribution (Gumbel, 1954). It is a function of the key and the token id, so a row's token does not
    depend on the other rows. At temperature 0 the result is the argmax of the logits. A tie gives the lowest id.

    Args:
        logits: Logits, `[B, V]`.
        temperature: Temperature of each row, float32 `[B]`.
        least: If given, tokens with a smaller logit are left out in rows with a temperature above 0, float32 `[B]`.
        keys: Seed and position of each row, int64 `[B, 2]`.

    Returns:
        Token ids, int32 `[B]`. A row with NaN gives some id of the vocabulary. A row in which all logits are -inf gives 0.
    """
    return torch.ops.nanovllm.draw.default(logits, temperature, least, keys)


def highest(logits: Float[Tensor, "B V"]) -> Int32[Tensor, "B"]:
    """Return the id of each row's largest logit, the lowest id of a tie; a row with NaN gives some id of the vocabulary."""
    return torch.ops.nanovllm.highest.default(logits)


@torch.library.register_fake("nanovllm::highest", lib=_LIBRARY)
def _fake_highest(logits: Tensor) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int32)


@torch.library.register_fake("nanovllm::draw", lib=_LIBRARY)
def _fake(logits: Tensor, temperature: Tensor, least: Tensor | None, keys: Tensor) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int32)


def gumbel(uniform: Tensor) -> Tensor:
    """Return standard Gumbel noise from uniform numbers: -log(-log(1 - u)); 1 - u is uniform too, and u is finest near 0."""
    # 1 - u is exact if u >= 2**-9. For smaller u, three terms of the series of log are as accurate as float32.
    exponential = torch.where(uniform < 2.0**-9, uniform + uniform * uniform * (0.5 + uniform / 3), -torch.log(1 - uniform))
    return -torch.log(exponential)


def _reference(logits: Tensor, temperature: Tensor, least: Tensor | None, keys: Tensor) -> Tensor:
    ids = logits.argmax(1)
    random = temperature > 0
    if random.any():  # generate random numbers only for rows that need them
        x = logits[random].float()
        if least is not None:  # compare before any rounding, so that the largest logit is never left out
            x = torch.where(x < least[random].unsqueeze(1), -torch.inf, x)
        ids[random] = (x + temperature[random].unsqueeze(1) * gumbel(uniforms(keys[random], x.shape[1]))).argmax(1)
    return ids.int()


def _highest(logits: Tensor) -> Tensor:
    return logits.argmax(1).int()


def _cpu_highest(logits: Tensor) -> Tensor:
    return cpu_sampling.highest(logits) if cpu_sampling.serves(logits) else _highest(logits)


def _cuda_highest(logits: Tensor) -> Tensor:
    if logits.dtype == torch.float64 or not installed("triton"):
        return _highest(logits)
    from nanovllm.ops.sampling.triton_sampling import launch_highest

    return launch_highest(logits)


def _cpu(logits: Tensor, temperature: Tensor, least: Tensor | None, keys: Tensor) -> Tensor:
    if cpu_sampling.serves(logits, (temperature, torch.float32, 1), (least, torch.float32, 1), (keys, torch.int64, 2)):
        return cpu_sampling.draw(logits, temperature, least, keys, _reference)
    return _reference(logits, temperature, least, keys)


def _cuda(logits: Tensor, temperature: Tensor, least: Tensor | None, keys: Tensor) -> Tensor:
    from nanovllm.ops.sampling.triton_sampling import launch_draw  # triton need not be installed without a GPU

    return launch_draw(logits, temperature, least, keys)


_LIBRARY.impl("highest", _cpu_highest, "CPU")
_LIBRARY.impl("highest", _cuda_highest, "CUDA")
_LIBRARY.impl("draw", _cpu, "CPU")
_LIBRARY.impl("draw", _cuda, "CUDA")
