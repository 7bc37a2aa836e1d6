"""The plan of our own attention of prompts: tiles of consecutive queries, in a table on the device that captured launches read."""

import numpy as np
import torch

from nanovllm.ops.attention.plan_table import PlanMismatchError, register
from nanovllm.ops.attention.reference import attend, row_kv
from nanovllm.types import Float, Int32, Tensor

FIELDS = 4  # of a tile: row of the page tables, first query, number of queries, how many tokens of the row are before the first query
QUERIES = 128  # queries of one key/value head in a tile: tokens times query heads per key/value head


def tile_tokens(num_heads: int, num_kv_heads: int) -> int:
    """Return the number of tokens in a tile. Their query heads of one key/value head are at most `QUERIES`, padded to a power of 2."""
    return max(1, QUERIES // (1 << (num_heads // num_kv_heads - 1).bit_length()))


def cut_tiles(cu_seqlens: Int32[np.ndarray, "bounds"], seq_lens: Int32[np.ndarray, "B"], tokens: int) -> Int32[np.ndarray, "tiles 4"]:
    """Cut the queries of each row into tiles of at most `tokens` queries, those with the most keys first.

    Args:
        cu_seqlens: First query of each row, then the number of queries.
        seq_lens: Tokens of each row, its queries included.
        tokens: The most queries of a tile.

    Examples:
        >>> cut_tiles(np.array([0, 3, 4], np.int32), np.array([3, 8], np.int32), 2).tolist()
        [[1, 3, 1, 7], [0, 2, 1, 2], [0, 0, 2, 0]]
    """
    starts, counts = cu_seqlens[:-1], np.diff(cu_seqlens)
    per_row = -(-counts // tokens)
    row = np.repeat(np.arange(len(counts), dtype=np.int32), per_row)
    within = (np.arange(len(row), dtype=np.int32) - np.repeat(per_row.cumsum() - per_row, per_row)) * tokens
    tiles = np.stack(
        (row, starts[row] + within, np.minimum(tokens, counts[row] - within), (seq_lens - counts)[row] + within), axis=1, dtype=np.int32
    )
    return tiles[np.argsort(-(tiles[:, 2] + tiles[:, 3]), kind="stable")]


class TilePlan:
    """The tiles of one batch of prompts, updated for every step.

    The device buffer never moves and every launch has `max_tiles` programs a key/value head, so launches can be captured, and one captured
    launch serves all batches of up to `max_tokens` queries in up to `max_rows` rows. Pass `handle` to `paged_prefill`; it is valid as long
    as this object lives. The results of queries that are in no tile are 0. On a CPU plain torch follows the plan.
    """

    def __init__(self, max_rows: int, max_tokens: int, num_heads: int, num_kv_heads: int, device: torch.device) -> None:
        self.max_rows, self.max_tokens, self.tokens = max_rows, max_tokens, tile_tokens(num_heads, num_kv_heads)
        self.max_tiles = -(-max_tokens // self.tokens) + max_rows - 1
        self.table: Int32[Tensor, "tiles 4"] = torch.zeros(self.max_tiles, FIELDS, dtype=torch.int32, device=device)
        self.handle = register(self)

    def update(self, cu_seqlens: Int32[np.ndarray, "bounds"], seq_lens: Int32[np.ndarray, "B"]) -> None:
        """Plan one step, asynchronously on the current stream. The arguments are copies of those of `paged_prefill` on the host.

        Raises:
            PlanMismatchError: There are more rows or queries than the plan was made for.
        """
        rows, num_tokens = len(seq_lens), int(cu_seqlens[-1])
        if rows > self.max_rows or num_tokens > self.max_tokens or len(cu_seqlens) != rows + 1:
            raise PlanMismatchError(
                f"got {rows} rows, {num_tokens} queries; the plan takes up to {self.max_rows} rows and {self.max_tokens} queries"
            )
        tiles = cut_tiles(cu_seqlens, seq_lens, self.tokens)
        fresh = torch.zeros(self.table.shape, dtype=torch.int32, pin_memory=self.table.device.type == "cuda")
        fresh.numpy()[: len(tiles)] = tiles
        self.table.copy_(fresh, non_blocking=True)

    def follow(
        self,
        q: Float[Tensor, "T H D"],
        pages: Float[Tensor, "N 2 K S W"],
        page_tables: Int32[Tensor, "B P"],
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> Float[Tensor, "T H D"]:
        """Compute what the kernel computes, tile by tile in plain torch, over one layer's pages."""
        out = torch.zeros_like(q)
        for row, first, count, before in self.table.tolist():
            if count:
                queries = slice(first, first + count)
                out[queries] = attend(q[queries], row_kv(pages, page_tables[row], before + count), scale, window, softcap)
        return out
