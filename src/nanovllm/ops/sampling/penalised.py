"""`penalised`: logits after biases, penalties and masks, which are looked up in tables that several batches share."""

import torch

from nanovllm.ops.backends import installed
from nanovllm.types import Bool, Float, Float32, Int32, Tensor

_LIBRARY = torch.library.Library("nanovllm", "FRAGMENT")
_LIBRARY.define(
    "penalised(Tensor logits, Tensor slots, Tensor marks, Tensor biases, Tensor repetition, Tensor presence, Tensor frequency, "
    "Tensor lines, Tensor masks) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def penalised(
    logits: Float[Tensor, "B V"],
    slots: Int32[Tensor, "B"],
    marks: Int32[Tensor, "S V"],
    biases: Float32[Tensor, "S V"],
    repetition: Float32[Tensor, "B"],
    presence: Float32[Tensor, "B"],
    frequency: Float32[Tensor, "B"],
    lines: Int32[Tensor, "B"],
    masks: Int32[Tensor, "M W"],
) -> Float32[Tensor, "B V"]:
    """Add the biases to the logits, apply the repetition, frequency and presence penalties, and forbid tokens.

    Args:
        logits: Logits, `[B, V]`.
        slots: The row of the tables that belongs to each row of logits, int32 `[B]`; -1: none, the logits stay as they are.
        marks: What is known of each token, int32 `[S, V]`: bit 0 says whether it is in the prompt, the other bits count it in the output.
        biases: float32 `[S, V]`; 0: none.
        repetition: float32 `[B]`; 1: none. It acts on tokens of prompt and output.
        presence: float32 `[B]`; 0: none. Like `frequency` it acts on tokens of the output.
        frequency: float32 `[B]`; 0: none.
        lines: The mask of each row, int32 `[B]`; -1: none, all tokens are allowed.
        masks: One bit per token, the lowest bit of a word first, int32 `[M, ceil(V / 32)]`. A token whose bit is 0 gets the logit -inf.

    Returns:
        float32 `[B, V]`, with the same bits on a CPU and a GPU.
    """
    return torch.ops.nanovllm.penalised.default(logits, slots, marks, biases, repetition, presence, frequency, lines, masks)


@torch.library.register_fake("nanovllm::penalised", lib=_LIBRARY)
def _fake(
    logits: Tensor, slots: Tensor, marks: Tensor, biases: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor, lines: Tensor,
    masks: Tensor,
) -> Tensor:  # fmt: skip
    return logits.new_empty(logits.shape, dtype=torch.float32)


def allowed_tokens(masks: Int32[Tensor, "B W"], vocab_size: int) -> Bool[Tensor, "B V"]:
    """The bits of masks, the lowest of each word first."""
    bits = masks.unsqueeze(2) >> torch.arange(32, dtype=torch.int32, device=masks.device) & 1
    return bits.flatten(1)[:, :vocab_size].bool()


def reference(
    logits: Tensor, slots: Tensor, marks: Tensor, biases: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor, lines: Tensor,
    masks: Tensor,
) -> Tensor:  # fmt: skip
    """Compute `penalised` in plain torch."""
    at, on = slots.long().clamp(min=0), (slots >= 0).unsqueeze(1)
    bias, mark = biases[at], marks[at]
    repetition, presence, frequency = repetition.unsqueeze(1), presence.unsqueeze(1), frequency.unsqueeze(1)
    drawn, plain = mark > 1, logits.float()
    x = torch.where(bias != 0, plain + bias, plain)
    x = torch.where((mark > 0) & (repetition != 1), torch.where(x > 0, x / repetition, x * repetition), x)
    x = torch.where(drawn & (frequency != 0), x - frequency * (mark >> 1), x)
    x = torch.where(drawn & (presence != 0), x - presence, x)
    x, masked = torch.where(on, x, plain), lines >= 0
    return torch.where(masked.unsqueeze(1) & ~allowed_tokens(masks[lines.long().clamp(min=0)], x.shape[1]), -torch.inf, x)


def _cuda(
    logits: Tensor, slots: Tensor, marks: Tensor, biases: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor, lines: Tensor,
    masks: Tensor,
) -> Tensor:  # fmt: skip
    if logits.dtype == torch.float64 or not installed("triton"):
        return reference(logits, slots, marks, biases, repetition, presence, frequency, lines, masks)
    from nanovllm.ops.sampling.triton_penalised import launch

    return launch(logits, slots, marks, biases, repetition, presence, frequency, lines, masks)


_LIBRARY.impl("penalised", reference, "CPU")
_LIBRARY.impl("penalised", _cuda, "CUDA")
