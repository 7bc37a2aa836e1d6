"""The static tensors of a captured step of prompts, and how a batch is filled into them."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch

from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.executor.batch import HostBatch, aligned
from nanovllm.models.common.batch import Batch, Windowed
from nanovllm.ops.attention.prompt_tiles import TilePlan
from nanovllm.state.kv_cache import pages_for
from nanovllm.state.pool_sizes import dummies
from nanovllm.types import Int32, Tensor


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class PromptKind:
    """How many tokens and rows a captured step holds. The smallest kind that holds a batch is the best."""

    tokens: int
    rows: int


def prompt_tables(config: ModelConfig, limits: EngineConfig, device: torch.device) -> list[Int32[Tensor, "B P"]]:
    """Make page tables for `max_num_seqs` rows: of pages, and of frames if there is a second KV pool. All kinds use them."""
    shape = limits.max_num_seqs, max(2, pages_for(limits.max_model_len, limits.page_size))  # batches have at least two columns
    return [torch.full(shape, dummy, dtype=torch.int32, device=device) for dummy in dummies(config, limits) if dummy is not None]


class PromptBuffers:
    """The tensors of one kind. They never move, so `batch` can be captured.

    Attributes:
        batch: All tokens and rows of the kind. Those that the last batch does not fill are padding. Padding tokens are in no tile of the
            plan, so their attention is 0, and they write to the dummy page.
    """

    def __init__(self, kind: PromptKind, tables: Seq[Int32[Tensor, "B P"]], config: ModelConfig, limits: EngineConfig) -> None:
        """Make the tensors, on the device of `tables`, which are those of `prompt_tables`."""
        device, (self._dummy, self._dummy_frame) = tables[0].device, dummies(config, limits)
        self._page_size, self._tables = limits.page_size, tables
        of_tokens, of_rows = ["input_ids", "positions", "slots"], ["seq_lens", "logit_indices"]
        of_tokens += ["frame_slots"] * (len(tables) == 2)
        self._sizes = {**dict.fromkeys(of_tokens, kind.tokens), **dict.fromkeys(of_rows, kind.rows), "cu_seqlens": kind.rows + 1}
        self._plan = TilePlan(kind.rows, kind.tokens, config.num_heads, config.num_kv_heads, device)
        self._ints = torch.zeros(sum(map(aligned, self._sizes.values())), dtype=torch.int32, device=device)
        lines: dict[str, Any] = self._lines(self._ints)
        windowed = None
        first, *second = [table[: kind.rows] for table in tables]
        if second:
            windowed = Windowed(page_tables=second[0], slots=lines.pop("frame_slots"), plan=self._plan.handle)
        self.batch = Batch(page_tables=first, **lines, plan=self._plan.handle, windowed=windowed)

    def fill(self, host: HostBatch) -> None:
        """Copy a batch of prompts in, asynchronously on the current stream. It must not be larger than the kind."""
        assert host.cu_seqlens is not None
        on_gpu, (rows, width) = self._ints.device.type == "cuda", host.page_tables.shape
        padding = {
            "slots": self._dummy * self._page_size, "cu_seqlens": int(host.cu_seqlens[-1]), "seq_lens": 1,
            "frame_slots": (self._dummy_frame or 0) * self._page_size,
        }  # fmt: skip
        fresh = torch.empty(self._ints.shape, dtype=torch.int32, pin_memory=on_gpu)
        for name, line in self._lines(fresh).items():
            value, to = getattr(host, name), line.numpy()
            to[: len(value)], to[len(value) :] = value, padding.get(name, 0)
        self._ints.copy_(fresh, non_blocking=True)
        for table, given in zip(self._tables, (host.page_tables, host.frame_tables), strict=False):
            assert given is not None
            pinned = torch.empty((rows, width), dtype=torch.int32, pin_memory=on_gpu)
            pinned.numpy()[:] = given
            table[:rows, :width].copy_(pinned, non_blocking=True)
        self._plan.update(host.cu_seqlens, host.seq_lens)

    def _lines(self, ints: Int32[Tensor, "ints"]) -> dict[str, Int32[Tensor, "..."]]:
        """The parts of `ints` by name. Each starts at whole 16 bytes."""
        parts = ints.split([aligned(size) for size in self._sizes.values()])
        return {name: part[:size] for (name, size), part in zip(self._sizes.items(), parts, strict=True)}
