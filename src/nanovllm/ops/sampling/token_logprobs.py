"""`token_logprobs`: log-probabilities of sampled tokens, and of the most probable tokens."""

import torch

from nanovllm.ops.sampling import cpu_sampling
from nanovllm.types import Float, Float32, Int32, Tensor

_LIBRARY = torch.library.Library("nanovllm", "FRAGMENT")
_LIBRARY.define(
    "token_logprobs(Tensor logits, Tensor token_ids, SymInt num) -> (Tensor, Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,)
)


def token_logprobs(
    logits: Float[Tensor, "B V"], token_ids: Int32[Tensor, "B"], num: int
) -> tuple[Float32[Tensor, "B"], Int32[Tensor, "B C"], Float32[Tensor, "B C"]]:
    """Return log-probabilities of one token per row, and the most probable tokens with theirs, the most probable first.

    On a CPU with a C compiler, tokens that tie come in order of their ids; the log-probabilities agree with plain torch within rounding.

    Args:
        logits: Logits, `[B, V]`.
        token_ids: One token per row, int32 `[B]`.
        num: How many of the most probable tokens to return; C is the smaller of `num` and V.
    """
    if logits.device.type == "cpu" and not logits.requires_grad:
        return torch.ops.nanovllm.token_logprobs.default(logits, token_ids, num)
    return reference(logits, token_ids, num)


@torch.library.register_fake("nanovllm::token_logprobs", lib=_LIBRARY)
def _fake(logits: Tensor, token_ids: Tensor, num: int) -> tuple[Tensor, Tensor, Tensor]:
    rows, num = logits.shape[0], min(num, logits.shape[1])
    return (
        logits.new_empty(rows, dtype=torch.float32),
        logits.new_empty((rows, num), dtype=torch.int32),
        logits.new_empty((rows, num), dtype=torch.float32),
    )


def reference(logits: Tensor, token_ids: Tensor, num: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `token_logprobs` in plain torch."""
    logprobs_BV = logits.float().log_softmax(1)
    logprobs_B = logprobs_BV.gather(1, token_ids.long().unsqueeze(1)).squeeze(1)
    top = logprobs_BV.topk(min(num, logprobs_BV.shape[1]), 1)
    return logprobs_B, top.indices.int(), top.values


def _cpu(logits: Tensor, token_ids: Tensor, num: int) -> tuple[Tensor, Tensor, Tensor]:
    if cpu_sampling.serves(logits, (token_ids, torch.int32, 1)):
        return cpu_sampling.logprobs(logits, token_ids, num, reference)
    return reference(logits, token_ids, num)


_LIBRARY.impl("token_logprobs", _cpu, "CPU")
_LIBRARY.impl("token_logprobs", reference, "CUDA")
