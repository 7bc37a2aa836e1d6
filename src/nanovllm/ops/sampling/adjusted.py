"""`adjusted`: logits after biases and penalties, from tables of the batch's own."""

import torch

from nanovllm.ops.sampling import cpu_sampling
from nanovllm.types import Bool, Float, Float32, Int32, Tensor

_LIBRARY = torch.library.Library("nanovllm", "FRAGMENT")
_LIBRARY.define(
    "adjusted(Tensor logits, Tensor? bias, Tensor? prompt_mask, Tensor? counts, Tensor? repetition, Tensor? presence, Tensor? frequency)"
    " -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def adjusted(
    logits: Float[Tensor, "B V"],
    bias: Float32[Tensor, "B V"] | None,
    prompt_mask: Bool[Tensor, "B V"] | None = None,
    counts: Int32[Tensor, "B V"] | None = None,
    repetition: Float32[Tensor, "B"] | None = None,
    presence: Float32[Tensor, "B"] | None = None,
    frequency: Float32[Tensor, "B"] | None = None,
) -> Float32[Tensor, "B V"]:
    """Add the biases to the logits, then apply the repetition, frequency and presence penalties.

    On a CPU this is one op, elsewhere plain torch, which a compiler fuses. The bits are the same.

    Args:
        logits: Logits, `[B, V]`.
        bias: float32 `[B, V]`; 0: none.
        prompt_mask: Whether a token is in the row's prompt, bool `[B, V]`. None: no row has penalties; the others are None too.
        counts: How often a token is in the row's output, int32 `[B, V]`.
        repetition: float32 `[B]`; 1: none. It acts on tokens of prompt and output.
        presence: float32 `[B]`; 0: none. Like `frequency` it acts on tokens of the output.
        frequency: float32 `[B]`; 0: none.

    Returns:
        float32 `[B, V]`.
    """
    if logits.device.type == "cpu" and not logits.requires_grad:
        return torch.ops.nanovllm.adjusted.default(logits, bias, prompt_mask, counts, repetition, presence, frequency)
    return reference(logits, bias, prompt_mask, counts, repetition, presence, frequency)


@torch.library.register_fake("nanovllm::adjusted", lib=_LIBRARY)
def _fake(logits: Tensor, *tables: Tensor | None) -> Tensor:
    return logits.new_empty(logits.shape, dtype=torch.float32)


def reference(
    logits: Tensor,
    bias: Tensor | None,
    prompt_mask: Tensor | None,
    counts: Tensor | None,
    repetition: Tensor | None,
    presence: Tensor | None,
    frequency: Tensor | None,
) -> Tensor:
    """Compute `adjusted` in plain torch."""
    x = logits.float().clone()
    if bias is not None:
        x = torch.where(bias != 0, x + bias, x)
    if prompt_mask is None or counts is None or repetition is None or presence is None or frequency is None:
        return x
    repetition, presence, frequency, drawn = repetition.unsqueeze(1), presence.unsqueeze(1), frequency.unsqueeze(1), counts > 0
    x = torch.where((drawn | prompt_mask) & (repetition != 1), torch.where(x > 0, x / repetition, x * repetition), x)
    x = torch.where(drawn & (frequency != 0), x - frequency * counts, x)
    return torch.where(drawn & (presence != 0), x - presence, x)


def _cpu(logits: Tensor, bias: Tensor | None, *penalties: Tensor | None) -> Tensor:
    if cpu_sampling.serves_adjusted(logits, bias, penalties):
        return cpu_sampling.adjusted(logits, bias, penalties)
    return reference(logits, bias, *penalties)


_LIBRARY.impl("adjusted", _cpu, "CPU")
_LIBRARY.impl("adjusted", reference, "CUDA")
