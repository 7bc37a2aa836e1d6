"""`penalised`: logits after biases and penalties, which are looked up in tables that several batches share."""

import torch

from nanovllm.ops.backends import installed
from nanovllm.types import Float, Float32, Int32, Tensor

_LIBRARY = torch.library.Library("nanovllm", "FRAGMENT")
_LIBRARY.define(
    "penalised(Tensor logits, Tensor slots, Tensor marks, Tensor biases, Tensor repetition, Tensor presence, Tensor frequency) -> Tensor",
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
) -> Float32[Tensor, "B V"]:
    """Add the biases to the logits, then apply the repetition, frequency and presence penalties.

    Args:
        logits: Logits, `[B, V]`.
        slots: The row of the tables that belongs to each row of logits, int32 `[B]`; -1: none, the logits stay as they are.
        marks: What is known of each token, int32 `[S, V]`: bit 0 says whether it is in the prompt, the other bits count it in the output.
        biases: float32 `[S, V]`; 0: none.
        repetition: float32 `[B]`; 1: none. It acts on tokens of prompt and output.
        presence: float32 `[B]`; 0: none. Like `frequency` it acts on tokens of the output.
        frequency: float32 `[B]`; 0: none.

    Returns:
        float32 `[B, V]`, with the same bits on a CPU and a GPU.
    """
    return torch.ops.nanovllm.penalised.default(logits, slots, marks, biases, repetition, presence, frequency)


@torch.library.register_fake("nanovllm::penalised", lib=_LIBRARY)
def _fake(logits: Tensor, slots: Tensor, marks: Tensor, biases: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor) -> Tensor:
    return logits.new_empty(logits.shape, dtype=torch.float32)


def reference(
    logits: Tensor, slots: Tensor, marks: Tensor, biases: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """Compute `penalised` in plain torch."""
    at, on = slots.long().clamp(min=0), (slots >= 0).unsqueeze(1)
    bias, mark = biases[at], marks[at]
    repetition, presence, frequency = repetition.unsqueeze(1), presence.unsqueeze(1), frequency.unsqueeze(1)
    drawn, plain = mark > 1, logits.float()
    x = torch.where(bias != 0, plain + bias, plain)
    x = torch.where((mark > 0) & (repetition != 1), torch.where(x > 0, x / repetition, x * repetition), x)
    x = torch.where(drawn & (frequency != 0), x - frequency * (mark >> 1), x)
    x = torch.where(drawn & (presence != 0), x - presence, x)
    return torch.where(on, x, plain).clone()


def _cuda(logits: Tensor, slots: Tensor, marks: Tensor, biases: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor) -> Tensor:
    if logits.dtype == torch.float64 or not installed("triton"):
        return reference(logits, slots, marks, biases, repetition, presence, frequency)
    from nanovllm.ops.sampling.triton_penalised import launch

    return launch(logits, slots, marks, biases, repetition, presence, frequency)


_LIBRARY.impl("penalised", reference, "CPU")
_LIBRARY.impl("penalised", _cuda, "CUDA")
