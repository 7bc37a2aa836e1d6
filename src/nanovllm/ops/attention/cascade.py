"""Cascade attention: pages that several queries share are read once for all of them (Juravsky et al., 2024, "Hydragen"; Ye et al., 2024).

The pages of a batch are divided into *runs*, each with the rows that attend to it; the executor finds the runs. Attention to each run gives
a partial result and its log-sum-exp. A row's partial results, over any number of levels, are merged with weights from the log-sum-exps.
In exact arithmetic the result equals plain attention; in floating point it differs in the last bits.
"""

import math
from collections.abc import Sequence as Seq
from itertools import pairwise

import numpy as np
import torch

from nanovllm.ops.attention.cascade_plan import CascadePlan, Run
from nanovllm.ops.attention.plan_table import PlanMismatchError, register
from nanovllm.ops.attention.reference import capped, row_kv
from nanovllm.ops.backends import installed
from nanovllm.types import Float, Float32, Int32, Tensor

LOG2E = 1 / math.log(2)


def run_cascade(
    plan: CascadePlan,
    q: Float[Tensor, "B H D"],
    pages: Float[Tensor, "L N 2 K S W"],
    layer: int,
    page_tables: Int32[Tensor, "B P"],
    seq_lens: Int32[Tensor, "B"],
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Float[Tensor, "B H D"]:
    """Compute `paged_decode` of one layer according to a plan. In each run a row attends to the tokens in its window."""
    if q.shape[0] != plan.batch_size or not plan.ready:
        raise PlanMismatchError(
            f"{q.shape[0]} rows were given to a plan {'' if plan.ready else 'that was never updated, '}for {plan.batch_size} rows"
        )
    if q.device.type == "cuda" and installed("triton"):
        from nanovllm.ops.attention.triton_cascade import cascade_decode

        return cascade_decode(q, pages[layer], page_tables, seq_lens, scale, plan, window, softcap)
    return cascade_rows(q, pages[layer], page_tables, seq_lens, scale, plan.runs, window, softcap)


class PromptCascade:
    """The plan of how the prompts of one step read their pages, for plain torch. Pass `handle` to `paged_prefill`."""

    def __init__(self) -> None:
        self.runs: tuple[Run, ...] = ()
        self.row_of = self.visible = torch.empty(0, dtype=torch.int32)
        self.handle = register(self)

    def update(self, seq_lens: Int32[np.ndarray, "B"], cu_seqlens: Int32[np.ndarray, "B+1"], runs: Seq[Run], device: torch.device) -> None:
        """Plan one step.

        Args:
            seq_lens: Copy of the argument of `paged_prefill` on the host.
            cu_seqlens: Copy of the argument of `paged_prefill` on the host.
            runs: Runs that cover all used pages of each row.
            device: Device of the queries.
        """
        counts, tokens = np.diff(cu_seqlens), run_tokens(runs, cu_seqlens)
        self.runs = tuple(Run(rows=rows, start=run.start, stop=run.stop) for rows, run in zip(tokens, runs, strict=True) if len(rows))
        row_of = np.repeat(np.arange(len(counts)), counts)
        visible = np.arange(cu_seqlens[-1]) + np.repeat(seq_lens - cu_seqlens[1:], counts) + 1
        self.row_of, self.visible = (torch.from_numpy(part.astype(np.int32)).to(device) for part in (row_of, visible))

    def run(
        self,
        q: Float[Tensor, "T H D"],
        pages: Float[Tensor, "L N 2 K S W"],
        layer: int,
        page_tables: Int32[Tensor, "B P"],
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> Float[Tensor, "T H D"]:
        """Compute `paged_prefill` of one layer. Raises `PlanMismatchError` for another number of tokens than in the last update."""
        if q.shape[0] != self.row_of.shape[0]:
            raise PlanMismatchError(f"{q.shape[0]} tokens were given to a plan that was last updated for {self.row_of.shape[0]} tokens")
        return cascade_rows(q, pages[layer], page_tables[self.row_of], self.visible, scale, self.runs, window, softcap)


def run_tokens(runs: Seq[Run], cu_seqlens: Int32[np.ndarray, "bounds"]) -> list[Int32[np.ndarray, "n"]]:
    """Return the token indices of each run's rows, in the order of the rows."""
    bounds = cu_seqlens.tolist()
    return [np.concatenate([np.arange(bounds[row], bounds[row + 1], dtype=np.int32) for row in run.rows.tolist()]) for run in runs]


def cascade_rows(
    q: Float[Tensor, "T H D"],
    pages: Float[Tensor, "N 2 K S W"],
    page_tables: Int32[Tensor, "T P"],
    seq_lens: Int32[Tensor, "T"],
    scale: float,
    runs: Seq[Run],
    window: int = 0,
    softcap: float = 0.0,
) -> Float[Tensor, "T H D"]:
    """Compute cascade attention in plain torch: attention to each run, then a merge of each query's partial results.

    Query t attends to the last `window` (0: all) of its row's first `seq_lens[t]` tokens. A run without such tokens has weight 0.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    page_size, lens = pages.shape[3], seq_lens.tolist()
    parts: list[list[tuple[Tensor, Tensor]]] = [[] for _ in lens]
    for run in runs:
        rows = run.rows.tolist()
        stop = min(run.stop * page_size, max(lens[row] for row in rows))
        if stop <= run.start * page_size:
            continue  # these pages are planned, but no row has reached them yet
        if window and min(lens[row] for row in rows) - window >= stop:
            continue  # before the window of every row
        kv = row_kv(pages, page_tables[rows[0], run.start :], stop - run.start * page_size)
        out, lse = attend_part(q[rows].to(dtype), kv.to(dtype), seq_lens[rows] - run.start * page_size, scale, window, softcap)
        for i, row in enumerate(rows):
            parts[row].append((out[i], lse[i]))
    merged = [merge(torch.stack([out for out, _ in row]), torch.stack([lse for _, lse in row])) for row in parts]
    return torch.stack(merged).to(q.dtype)


def attend_part(
    q: Float[Tensor, "n H D"],
    kv: Float[Tensor, "2 K C D"],
    visible: Int32[Tensor, "n"],
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[Float[Tensor, "n H D"], Float[Tensor, "n H"]]:
    """Compute attention of query i to the tokens before index `visible[i]`, of which it sees the last `window` (0: all).

    Returns the results and their log-sum-exps in base 2. A query that sees no token has the log-sum-exp -inf.
    """
    k, v = kv.unbind(0)
    scores = capped(torch.einsum("nkgd,kcd->nkgc", q.unflatten(1, (k.shape[0], -1)), k) * scale, softcap)
    at = torch.arange(k.shape[1], device=q.device)
    masked = at >= visible[:, None]
    if window:
        masked |= at < visible[:, None] - window
    scores = scores.masked_fill(masked[:, None, None], float("-inf"))
    weights = scores.softmax(-1).nan_to_num()  # a query that sees no token gets 0, and its -inf keeps that out of the merge
    out = torch.einsum("nkgc,kcd->nkgd", weights, v)
    return out.flatten(1, 2), scores.logsumexp(-1).flatten(1, 2) * LOG2E


def merge(outs: Float[Tensor, "parts H D"], lses: Float[Tensor, "parts H"]) -> Float[Tensor, "H D"]:
    """Merge one row's partial results, weighted by their log-sum-exps in base 2."""
    weights = (lses * math.log(2)).softmax(0)
    return (weights[..., None] * outs).sum(0)


def merge_parts(
    outs: Float[Tensor, "parts H D"], lses: Float32[Tensor, "parts H"], starts: Int32[Tensor, "bounds"], places: Int32[Tensor, "listed"]
) -> Float[Tensor, "T H D"]:
    """Merge the partial results `places[starts[t] : starts[t + 1]]` of each token t, in the dtype of `outs`."""
    if outs.device.type == "cuda" and installed("triton"):
        from nanovllm.ops.attention.triton_cascade import merge_into

        out = torch.empty(starts.shape[0] - 1, *outs.shape[1:], dtype=outs.dtype, device=outs.device)
        merge_into(outs, lses, starts, places, out)
        return out
    bounds = starts.tolist()
    rows = [places[lo:hi] for lo, hi in pairwise(bounds)]
    return torch.stack([merge(outs[row].to(lses.dtype), lses[row]) for row in rows]).to(outs.dtype)
