"""What is measured before the KV pool is made, on a CPU with the calls of torch.cuda replaced: the memory itself is a GPU's."""

import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from nanovllm.config import EngineConfig
from nanovllm.executor import kv_budget
from nanovllm.executor.batch import EXTENSION
from nanovllm.sampling.penalty_tables import PenaltyTables
from nanovllm.testing.models import random_model, tiny_config

pytestmark = pytest.mark.unhooked  # functions of torch.cuda are replaced by others


@pytest.mark.parametrize("most", [4, EXTENSION + 2])
def test_tables_are_given_back_and_sampling_has_the_most_rows(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables that stayed cached would be missing from the free memory, and be counted once more."""
    alive: list[weakref.ref[torch.Tensor]] = []
    rows, when_given_back = [], []
    empty, draw = PenaltyTables.empty, kv_budget.draw_rows

    def noted(*args: Any) -> PenaltyTables:
        tables = empty(*args)
        alive.append(weakref.ref(tables.marks))
        return tables

    def counted(kind: Any, logits: torch.Tensor, *args: Any) -> Any:
        rows.append(len(logits))
        return draw(kind, logits, *args)

    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: when_given_back.append(any(tables() is not None for tables in alive)))
    monkeypatch.setattr(kv_budget, "_prompts", lambda *_: None)
    monkeypatch.setattr(PenaltyTables, "empty", noted)
    monkeypatch.setattr(kv_budget, "draw_rows", counted)
    model = random_model(tiny_config(vocab_size=50))
    limits = EngineConfig(num_pages=4, page_size=4, max_num_seqs=most, max_num_batched_tokens=64, max_model_len=16, seed=0)
    held = kv_budget.measured(model, limits, None, None)
    assert held == kv_budget.GRAPHS + empty(most, 50, model.device).num_bytes
    assert len(alive) == 1 and any(when_given_back) and not when_given_back[-1]
    assert set(rows) == {max(most, EXTENSION)}
