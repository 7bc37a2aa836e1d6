"""KV heads of chunk files whose engine is several ranks: a file has the heads of all, so it does not depend on their number."""

import torch

from nanovllm.config import Mesh, ModelConfig
from nanovllm.ops.distributed.collectives import all_gather
from nanovllm.types import Tensor


def own_heads(rows: Tensor, config: ModelConfig) -> Tensor:
    """The heads that a rank keeps of rows `[R, 2, K, D]` of a file."""
    if (mesh := config.mesh) is None:
        return rows
    first = mesh.rank // config.kv_copies * config.num_kv_heads
    return rows[:, :, first : first + config.num_kv_heads].contiguous()


def all_heads(own: Tensor, mesh: Mesh, copies: int, device: torch.device) -> Tensor:
    """The heads of all ranks, which call this at the same time.

    Args:
        own: The bytes of this rank's heads, uint8 `[R, 2, K, D]`, in host memory.
        mesh: The ranks.
        copies: How many ranks have the same head.
        device: Where the exchange takes place.

    Returns:
        The rows in host memory, uint8 `[R, bytes]`.
    """
    parts = all_gather(own.to(device), mesh)[::copies].cpu()  # [ranks, R, 2, K, D]
    return parts.permute(1, 2, 0, 3, 4).reshape(len(own), -1)
