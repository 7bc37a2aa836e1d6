"""KV heads of chunk files whose engine is several ranks: a file has the heads of all, so it does not depend on their number."""

from collections.abc import Callable

import torch

from nanovllm.config import Mesh, ModelConfig
from nanovllm.ops.distributed.collectives import all_gather
from nanovllm.types import Tensor

PIECE = 64 << 20  # bytes of one rank that are exchanged at once


def own_heads(rows: Tensor, config: ModelConfig) -> Tensor:
    """The heads that a rank keeps of rows `[R, 2, K, D]` of a file."""
    if (mesh := config.mesh) is None:
        return rows
    first = mesh.rank // config.kv_copies * config.num_kv_heads
    return rows[:, :, first : first + config.num_kv_heads].contiguous()


def all_heads(own: Tensor, mesh: Mesh, copies: int, device: torch.device) -> Callable[[int, Tensor], None]:
    """Exchange the heads of all ranks. Every rank calls this at the same time.

    Args:
        own: The bytes of this rank's heads, uint8 `[R, 2, K, D]`, in host memory.
        mesh: The ranks.
        copies: How many ranks have the same head.
        device: Where the exchange takes place.

    Returns:
        A function that copies rows of all heads from a first one on into host memory, as `blocks.write_file` takes it.
    """
    step = max(1, PIECE // max(1, own[:1].nbytes))
    pieces = []
    for piece in own.split(step):
        parts = all_gather(piece.to(device), mesh)[::copies].cpu()  # [ranks, rows, 2, K, D]
        pieces.append(parts.permute(1, 2, 0, 3, 4).reshape(len(piece), -1))
    whole = torch.cat(pieces) if pieces else own.flatten(1)

    def gather(first: int, out: Tensor) -> None:
        out.copy_(whole[first : first + len(out)])

    return gather
