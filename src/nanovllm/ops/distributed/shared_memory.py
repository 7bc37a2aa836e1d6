"""Symmetric memory: memory of each GPU of one host that the others can read and write (`torch.distributed._symmetric_memory`).

From its start it holds the tensors of `all_reduce` and of gathered columns, then the flags of the latter, then two slots of
`all_reduce_add`, each with its flags, then the words of `winners`. Then come the places for small tensors, which other ranks fill: those
of pieces, those of rows, and whose turn it is. Last comes whether this GPU has given up the others.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from nanovllm.types import Tensor

STAGE = 16 << 20  # bytes of gathered columns, at most, and more than those of the tensors of `all_reduce`
ADDED = 2 << 20  # bytes of a tensor of `all_reduce_add`, at most
SHARES = 6 << 20  # bytes of a tensor whose sum the ranks share, at most: NCCL is faster with larger ones (measured on two H100s)
FLAGS = 128 << 10  # bytes of flags of one kind
GATHERED = STAGE  # where the flags of gathered columns are
PUSHED = 1 << 20  # bytes of the tensors of all ranks, if each pushes one, at most. Larger ones meet
PUSHED_ROWS = 4 << 20  # of the rows that all ranks push to norm them, at most
PIECE = 512  # bytes of a tensor that one program, a warp, pushes: 16 of each thread
ROW = 16 << 10  # bytes of a row that one program pushes and norms, at most
PIECES = 2 << 20  # bytes of the places of pieces, for one turn: more than `PUSHED`, so that the bound can be measured
NUM_ROWS = 512  # places of rows, for one turn


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shared:
    """The memory, seen by one rank.

    Attributes:
        rank: This rank.
        size: The number of ranks.
        memory: This GPU's memory.
        table: The addresses of all ranks' memory on this GPU, int64 `[size]`.
        peers: The same addresses as numbers, which launches take as arguments.
        failed: One int32 in pinned host memory: whether a launch has waited in vain.
        handle: What keeps the memory of the others mapped.
    """

    rank: int
    size: int
    memory: Tensor
    table: Tensor
    peers: tuple[int, ...]
    failed: Tensor
    handle: object


def slot_of(slot: int) -> tuple[int, int]:
    """Where the tensors and the flags of a slot of `all_reduce_add` are."""
    data = STAGE + FLAGS + slot * (ADDED + FLAGS)
    return data, data + ADDED


WORD = 8  # bytes of a word of `winners`
WORDS = slot_of(2)[0]  # where these words are: `FLAGS` bytes

# Where the places of pieces and rows are, each for two turns, and the turns: int32 for each program of the ones, then of the others.
PIECE_PLACES = WORDS + FLAGS
ROW_PLACES = PIECE_PLACES + 2 * PIECES
PIECE_TURNS = ROW_PLACES + 2 * NUM_ROWS * ROW
ROW_TURNS = PIECE_TURNS + 4 * (PIECES // PIECE)
GIVEN_UP = ROW_TURNS + 4 * NUM_ROWS  # one int32: a launch has found out that the host has given up
END = GIVEN_UP + 16


def clear(memory: Tensor) -> None:
    """Make memory, `END` bytes in uint8, what it is before the first launch: no flag is set, and no tensor has been pushed."""
    memory.zero_()
    memory[PIECE_PLACES:PIECE_TURNS].fill_(255)  # the empty word


def share_memory(group: dist.ProcessGroup, device: torch.device) -> Shared | None:
    """Allocate the memory, on all ranks at the same time; None if the GPUs cannot reach each other.

    Once all ranks have returned, each may use the memory of the others.
    """
    import torch.distributed._symmetric_memory as symmetric

    try:
        memory = symmetric.empty(END, dtype=torch.uint8, device=device)
        handle = symmetric.rendezvous(memory, group.group_name)
    except RuntimeError:
        return None
    clear(memory)
    torch.cuda.synchronize(device)
    return Shared(
        rank=group.rank(),
        size=group.size(),
        memory=memory,
        table=torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device),
        peers=tuple(handle.buffer_ptrs),
        failed=torch.zeros(1, dtype=torch.int32, pin_memory=True),
        handle=handle,
    )
