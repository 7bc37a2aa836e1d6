"""The launch that finds each row's winner over the GPUs of one host: the id of the largest value, the lowest id of a tie.

A value and its id are one word of 64 bits, which orders as they do. A rank puts its word for each row into the others' memory, where the
place is empty (0) before, and takes theirs out of its own. So a word is data and flag at once: nobody can overwrite a word that was not
taken yet, and a captured launch can be replayed.
"""

from typing import Any, cast

import torch
import triton
import triton.language as tl

from nanovllm.ops.distributed.shared_memory import Shared
from nanovllm.ops.distributed.triton_meetings import NEAR, SPINS, exchanged, hopeless
from nanovllm.types import Tensor

_LOW = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _word(value, token_id):
    """A float32 and an id as one int64, never 0: larger for a larger value, and for a lower id of equal values."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)  # -0 equals 0
    ordered = bits ^ ((bits >> 31) & _LOW)
    return (ordered.to(tl.int64) << 32) | (token_id ^ _LOW).to(tl.int64)


@triton.jit
def _taken(place, empty, own, failed):
    """Take the word out of a place, once there is one. `empty` if the host has given up."""
    word = tl.atomic_xchg(place, empty, sem="acq_rel", scope="sys")
    left = SPINS
    while (word == empty) & (left > 0):
        word = tl.atomic_xchg(place, empty, sem="acq_rel", scope="sys")
        left -= 1
        if left % NEAR == 0:
            left = tl.where(hopeless(own, failed, left), 0, left)
    return word


@triton.jit
def _winner(best, best_id, out, table, failed, num_blocks, rank, words, SIZE: tl.constexpr, BLOCKS: tl.constexpr):
    """Program `row` finds the winner of this rank's blocks, then that of all ranks."""
    row = tl.program_id(0)
    index = tl.arange(0, BLOCKS)
    there = index < num_blocks
    y = tl.load(best + row * num_blocks + index, mask=there, other=-float("inf"))
    ids = tl.load(best_id + row * num_blocks + index, mask=there, other=_LOW)
    last = tl.max(tl.where(there, ids, 0), 0)  # NaN does not equal itself
    word = _word(tl.max(y, 0), tl.min(tl.where((y == tl.max(y, 0)) & there, ids, last), 0))
    empty = word - word
    own, good = tl.load(table + rank), True
    for peer in tl.static_range(SIZE):  # pyright: ignore[reportGeneralTypeIssues]
        if peer != rank:
            place = (tl.load(table + peer) + words).to(tl.pointer_type(tl.int64)) + row * SIZE + rank
            good = good & exchanged(place, empty, word, own, failed)
    places = (own + words).to(tl.pointer_type(tl.int64)) + row * SIZE
    for peer in tl.static_range(SIZE):  # pyright: ignore[reportGeneralTypeIssues]
        if peer != rank:
            found = _taken(places + peer, empty, own, failed)
            good = good & (found != empty)
            word = tl.where(found != empty, tl.maximum(word, found), word)
    if not good:
        tl.store(failed, 1)
    tl.store(out + row, ((word & _LOW) ^ _LOW).to(tl.int32))


def winners(values: Tensor, ids: Tensor, shared: Shared, words: int) -> Tensor:
    """The id of the largest of all ranks' values in each row, int32 `[R]`; the lowest id of a tie.

    Args:
        values: This rank's candidates, float32 `[R, K]`.
        ids: Their ids, int32 `[R, K]`.
        shared: The memory that the ranks share.
        words: Where the words are in that memory, in bytes: `size` int64 for each row, zero before the first launch.
    """
    rows, num_blocks = values.shape
    out = ids.new_empty(rows)
    place = shared.table, shared.failed, num_blocks, shared.rank, words
    how: dict[str, Any] = {"SIZE": shared.size, "BLOCKS": triton.next_power_of_2(num_blocks), "num_warps": 1}
    with torch.cuda.device_of(values):
        cast(Any, _winner)[(rows,)](values.contiguous(), ids.contiguous(), out, *place, **how)
    return out
