"""The Triton kernel of `penalised`, for a GPU or Triton's interpreter. Rows without a slot or a mask read no table."""

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 2048  # logits per program


@triton.jit
def _penalise(
    logits, stride, slots, marks, biases, repetition, presence, frequency, lines, masks, num_words, out, num, BLOCK: tl.constexpr
):
    row = tl.program_id(1).to(tl.int64)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    on = index < num
    x = tl.load(logits + row * stride + index, mask=on, other=0.0).to(tl.float32)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        bias = tl.load(biases + slot * num + index, mask=on, other=0.0)
        mark = tl.load(marks + slot * num + index, mask=on, other=0)
        r, p, f = tl.load(repetition + row), tl.load(presence + row), tl.load(frequency + row)
        x = tl.where(bias != 0, x + bias, x)
        if r != 1:
            x = tl.where(mark > 0, tl.where(x > 0, tl.div_rn(x, r), x * r), x)
        if f != 0:
            x = tl.where(mark > 1, x - f * (mark >> 1).to(tl.float32), x)
        if p != 0:
            x = tl.where(mark > 1, x - p, x)
    line = tl.load(lines + row).to(tl.int64)
    if line >= 0:
        words = tl.load(masks + line * num_words + index // 32, mask=on, other=0)
        x = tl.where((words >> (index % 32)) & 1 == 1, x, -float("inf"))
    tl.store(out + row * num + index, x, mask=on)


def launch(
    logits: torch.Tensor,
    slots: torch.Tensor,
    marks: torch.Tensor,
    biases: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    lines: torch.Tensor,
    masks: torch.Tensor,
) -> torch.Tensor:
    """Launch the kernel of the op `penalised`, for at most 65,535 rows. The tables and the options are contiguous."""
    rows, num = logits.shape
    out = torch.empty((rows, num), dtype=torch.float32, device=logits.device)
    if rows == 0:
        return out
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    kernel: Any = _penalise
    with torch.cuda.device_of(logits):
        kernel[(triton.cdiv(num, BLOCK), rows)](
            logits, logits.stride(0), slots, marks, biases, repetition, presence, frequency, lines, masks, masks.shape[1], out, num,
            BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out
