"""`attend_prompts`: causal attention of whole prompts to themselves, in plain torch that `torch.func` can transform."""

import torch
from einops import rearrange

from nanovllm.types import Float, Int32, Tensor


def attend_prompts(
    q: Float[Tensor, "T H D"],
    k: Float[Tensor, "T K D"],
    v: Float[Tensor, "T K D"],
    cu_seqlens: Int32[Tensor, "bounds"],
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Float[Tensor, "T H D"]:
    """Compute `paged_prefill` of rows without older tokens, from the keys and values of this step alone.

    It computes in float32 or wider and rounds once. Nothing is written in place and no value is read on the host, so gradients, `vmap` and
    tracers pass through. Memory and time grow with the square of T, the tokens of all rows together.

    Args:
        q: Queries of all rows, one row after another, `[T, H, D]`; H is a multiple of K.
        k: Keys, `[T, K, D]`.
        v: Values, `[T, K, D]`.
        cu_seqlens: First token of each row, then the number of tokens, int32 `[B + 1]`.
        scale: Factor of the scores, usually `D ** -0.5`.
        window: Number of last tokens, itself included, that each query attends to; 0 means all.
        softcap: A score s becomes `softcap * tanh(s / softcap)` after scaling; 0 means no cap.

    Returns:
        The attention output, `[T, H, D]`, in the dtype of `q`.

    Examples:
        >>> from nanovllm.ops.attention.whole_prompts import attend_prompts
        >>> values = torch.tensor([1.0, 3.0, 7.0]).view(3, 1, 1)  # all keys are equal
        >>> bounds = torch.tensor([0, 2, 3], dtype=torch.int32)  # a row of two tokens and a row of one
        >>> attend_prompts(torch.ones(3, 1, 1), torch.ones(3, 1, 1), values, bounds, scale=1.0).flatten().tolist()
        [1.0, 2.0, 7.0]
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    num_kv_heads = k.shape[1]
    q_kxd = rearrange(q.to(dtype) * scale, "t (k g) d -> k (g t) d", k=num_kv_heads)
    scores = rearrange(q_kxd @ rearrange(k.to(dtype), "t k d -> k d t"), "k (g t) c -> k g t c", t=q.shape[0])
    if softcap:
        scores = (scores / softcap).tanh() * softcap
    weights = scores.masked_fill(~_attended(cu_seqlens, q.shape[0], window), float("-inf")).softmax(-1)
    mixed = rearrange(weights, "k g t c -> k (g t) c") @ rearrange(v.to(dtype), "t k d -> k t d")
    return rearrange(mixed, "k (g t) d -> t (k g) d", t=q.shape[0]).to(q.dtype)


def _attended(cu_seqlens: Tensor, num_tokens: int, window: int) -> Tensor:
    """For each token (axis 0), whether it attends to each token (axis 1)."""
    index = torch.arange(num_tokens, device=cu_seqlens.device)
    row = (index[:, None] >= cu_seqlens[1:]).sum(1)
    distance = index[:, None] - index
    attended = (row[:, None] == row) & (distance >= 0)
    return attended & (distance < window) if window else attended
