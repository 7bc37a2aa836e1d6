"""Cascade attention of prompts with FlashInfer's kernels: one launch over all shared runs, one over each row's own pages, and a merge."""

from collections.abc import Sequence as Seq

import numpy as np
import torch

from nanovllm.ops.attention.cascade import merge_parts, run_tokens
from nanovllm.ops.attention.cascade_plan import Run
from nanovllm.ops.attention.flashinfer_plans import PrefillPlan
from nanovllm.ops.attention.plan_table import PlanMismatchError, register
from nanovllm.types import Float, Int32, Tensor


class FlashInferCascade:
    """The plan of how the prompts of one step read their pages.

    The queries of shared runs are gathered, so one launch serves runs of all levels. If some row is longer than a layer's window, that
    layer reads each row's pages without sharing. The reason: FlashInfer counts a window back from the end of the keys, but gathered
    queries have other positions. Pass `handle` to `paged_prefill`.

    Args:
        own: Plan for the pages that only one row reads. It may also serve plain prompts, one batch at a time.
        shared: Plan for shared runs; it is not causal. `own` and `shared` need no windows.
        windowed: Plan for layers with windows; it may also serve plain prompts.
    """

    def __init__(self, own: PrefillPlan, shared: PrefillPlan, windowed: PrefillPlan | None = None) -> None:
        self.own, self.shared, self.windowed = own, shared, windowed
        self.num_tokens = self.longest = 0
        self.gathered = self.starts = self.places = torch.empty(0, dtype=torch.int32)
        self.handle = register(self)

    def update(
        self,
        seq_lens: Int32[np.ndarray, "B"],
        cu_seqlens: Int32[np.ndarray, "B+1"],
        page_tables: Int32[np.ndarray, "B P"],
        runs: Seq[Run],
    ) -> None:
        """Plan one step, from copies of the arguments of `paged_prefill` on the host and the runs of its rows."""
        size, levels = self.own.page_size, [run for run in runs if len(run.rows) > 1]
        begin = np.zeros(len(seq_lens), np.int32)
        for run in levels:
            begin[run.rows] = np.maximum(begin[run.rows], run.stop)
        columns = begin[:, None] + np.arange(page_tables.shape[1], dtype=np.int32)
        tables = np.take_along_axis(page_tables, np.minimum(columns, page_tables.shape[1] - 1), 1)
        self.own.update(cu_seqlens, seq_lens - begin * size, tables)
        self.longest = int(seq_lens.max())
        if self.windowed is not None and any(0 < window < self.longest for window in self.windowed.windows):
            self.windowed.update(cu_seqlens, seq_lens, page_tables)
        tokens = run_tokens(levels, cu_seqlens)
        cu_shared = np.zeros(len(levels) + 1, np.int32)
        np.cumsum([len(of_run) for of_run in tokens], out=cu_shared[1:])
        pages = np.array([run.stop - run.start for run in levels], np.int32)
        tables = np.zeros((len(levels), pages.max()), np.int32)
        for table, run in zip(tables, levels, strict=True):
            table[: run.stop - run.start] = page_tables[run.rows[0], run.start : run.stop]
        self.shared.update(cu_shared, pages * size, tables)
        self.num_tokens, gathered = int(cu_seqlens[-1]), np.concatenate(tokens)
        parts = np.concatenate((np.arange(self.num_tokens, dtype=np.int32), gathered))
        starts = np.zeros(self.num_tokens + 1, np.int32)
        np.cumsum(np.bincount(parts), out=starts[1:])
        flat = torch.from_numpy(np.concatenate((gathered, starts, np.argsort(parts, kind="stable").astype(np.int32)))).pin_memory()
        flat = flat.to(self.own.ints.device, non_blocking=True)
        self.gathered, self.starts, self.places = flat.split((len(gathered), len(starts), len(parts)))

    def run(
        self,
        q: Float[Tensor, "T H D"],
        pages: Float[Tensor, "L N 2 K S D"],
        layer: int,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> Float[Tensor, "T H D"]:
        """Compute `paged_prefill` of one layer for the batch of the last update; raises `PlanMismatchError` for another batch or window."""
        if 0 < window < self.longest:
            if self.windowed is None:
                raise PlanMismatchError(
                    f"a layer of window {window} needs a cascade with a plan for windows: rows have up to {self.longest} tokens"
                )
            return self.windowed.run(q, pages, layer, scale, window=window, softcap=softcap)
        num_parts = self.num_tokens + len(self.gathered)
        outs = torch.empty(num_parts, *q.shape[1:], dtype=q.dtype, device=q.device)
        lses = torch.empty(num_parts, q.shape[1], dtype=torch.float32, device=q.device)
        here = slice(0, self.num_tokens), slice(self.num_tokens, None)
        self.own.run(q, pages, layer, scale, outs[here[0]], lses[here[0]], softcap=softcap)
        self.shared.run(q[self.gathered], pages, layer, scale, outs[here[1]], lses[here[1]], softcap=softcap)
        return merge_parts(outs, lses, self.starts, self.places)
