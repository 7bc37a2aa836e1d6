"""Cascade attention: pages that several queries share are read once for all of them (Juravsky et al., 2024, "Hydragen"; Ye et al., 2024).

The pages of a batch are cut into *runs*, each with the rows that attend to it (the executor finds them). Attention to each run gives a
partial result and its log-sum-exp; a row's partial results, over any number of levels, are merged by these weights. In exact arithmetic
that is plain attention; in floating point it differs in the last bits.
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
    pages: Float[Tensor, "L N 2 K S D"],
    layer: int,
    page_tables: Int32[Tensor, "B P"],
    seq_lens: Int32[Tensor, "B"],
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Float[Tensor, "B H D"]:
    """`paged_decode` of one layer by a plan. Of a run a row sees what lies in its window."""
    if q.shape[0] != plan.batch_size or not plan.ready:
        raise PlanMismatchError(f"{q.shape[0]} rows were given to a plan {'' if plan.ready else 'never updated '}for {plan.batch_size}")
    if q.device.type == "cuda" and installed("triton"):
        from nanovllm.ops.attention.triton_cascade import cascade_decode

        return cascade_decode(q, pages[layer], page_tables, seq_lens, scale, plan, window, softcap)
    return cascade_rows(q, pages[layer], page_tables, seq_lens, scale, plan.runs, window, softcap)


class PromptCascade:
    """How the prompts of one step read their pages, followed by plain torch; `handle` is what `paged_prefill` takes."""

    def __init__(self) -> None:
        self.runs: tuple[Run, ...] = ()
        self.row_of = self.visible = torch.empty(0, dtype=torch.int32)
        self.handle = register(self)

    def update(self, seq_lens: Int32[np.ndarray, "B"], cu_seqlens: Int32[np.ndarray, "B+1"], runs: Seq[Run], device: torch.device) -> None:
        """Plan for one step: the host's copies of what `paged_prefill` is given, and runs that cover every row's pages in use."""
        counts, tokens = np.diff(cu_seqlens), run_tokens(runs, cu_seqlens)
        self.runs = tuple(Run(rows=rows, start=run.start, stop=run.stop) for rows, run in zip(tokens, runs, strict=True) if len(rows))
        row_of = np.repeat(np.arange(len(counts)), counts)
        visible = np.arange(cu_seqlens[-1]) + np.repeat(seq_lens - cu_seqlens[1:], counts) + 1
        self.row_of, self.visible = (torch.from_numpy(part.astype(np.int32)).to(device) for part in (row_of, visible))

    def run(
        self,
        q: Float[Tensor, "T H D"],
        pages: Float[Tensor, "L N 2 K S D"],
        layer: int,
        page_tables: Int32[Tensor, "B P"],
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> Float[Tensor, "T H D"]:
        """`paged_prefill` of one layer."""
        if q.shape[0] != self.row_of.shape[0]:
            raise PlanMismatchError(f"{q.shape[0]} tokens were given to a plan last updated for {self.row_of.shape[0]}")
        return cascade_rows(q, pages[layer], page_tables[self.row_of], self.visible, scale, self.runs, window, softcap)


def run_tokens(runs: Seq[Run], cu_seqlens: Int32[np.ndarray, "bounds"]) -> list[Int32[np.ndarray, "n"]]:
    """The tokens of each run's rows, in the order of the rows."""
    bounds = cu_seqlens.tolist()
    return [np.concatenate([np.arange(bounds[row], bounds[row + 1], dtype=np.int32) for row in run.rows.tolist()]) for run in runs]


def cascade_rows(
    q: Float[Tensor, "T H D"],
    pages: Float[Tensor, "N 2 K S D"],
    page_tables: Int32[Tensor, "T P"],
    seq_lens: Int32[Tensor, "T"],
    scale: float,
    runs: Seq[Run],
    window: int = 0,
    softcap: float = 0.0,
) -> Float[Tensor, "T H D"]:
    """The reference: query t attends to its row's first `seq_lens[t]` tokens, of which it sees the last `window` (0: all), run by run, and
    the parts are merged. A run of which it sees nothing weighs nothing."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    page_size, lens = pages.shape[3], seq_lens.tolist()
    parts: list[list[tuple[Tensor, Tensor]]] = [[] for _ in lens]
    for run in runs:
        rows = run.rows.tolist()
        stop = min(run.stop * page_size, max(lens[row] for row in rows))
        if stop <= run.start * page_size:
            continue  # planned ahead, not reached yet
        if window and min(lens[row] for row in rows) - window >= stop:
            continue  # out of every row's sight
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
    """Attention of each query to those of C tokens that stand before `visible[i]`, at most `window` before it (0: all of them), and its
    log-sum-exp in base 2 (-inf where it sees none)."""
    k, v = kv.unbind(0)
    scores = capped(torch.einsum("nkgd,kcd->nkgc", q.unflatten(1, (k.shape[0], -1)), k) * scale, softcap)
    at = torch.arange(k.shape[1], device=q.device)
    hidden = at >= visible[:, None]
    if window:
        hidden |= at < visible[:, None] - window
    scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
    weights = scores.softmax(-1).nan_to_num()  # no token seen: 0, which -inf leaves out of the merge
    out = torch.einsum("nkgc,kcd->nkgd", weights, v)
    return out.flatten(1, 2), scores.logsumexp(-1).flatten(1, 2) * LOG2E


def merge(outs: Float[Tensor, "parts H D"], lses: Float[Tensor, "parts H"]) -> Float[Tensor, "H D"]:
    """One row's parts, weighted by their log-sum-exp in base 2."""
    weights = (lses * math.log(2)).softmax(0)
    return (weights[..., None] * outs).sum(0)


def merge_parts(
    outs: Float[Tensor, "parts H D"], lses: Float32[Tensor, "parts H"], starts: Int32[Tensor, "bounds"], places: Int32[Tensor, "listed"]
) -> Float[Tensor, "T H D"]:
    """Token t's result from its parts, `places[starts[t] : starts[t + 1]]`, in the dtype of `outs`."""
    if outs.device.type == "cuda" and installed("triton"):
        from nanovllm.ops.attention.triton_cascade import merge_into

        out = torch.empty(starts.shape[0] - 1, *outs.shape[1:], dtype=outs.dtype, device=outs.device)
        merge_into(outs, lses, starts, places, out)
        return out
    bounds = starts.tolist()
    rows = [places[lo:hi] for lo, hi in pairwise(bounds)]
    return torch.stack([merge(outs[row].to(lses.dtype), lses[row]) for row in rows]).to(outs.dtype)
