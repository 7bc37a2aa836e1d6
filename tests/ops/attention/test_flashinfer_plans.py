"""What FlashInfer's kernels are told of windows and soft caps: kernels in plain torch stand in their place, so no GPU is needed.

They refuse what would be wrong on a GPU: of the kernels of the second generation a schedule that was made for another window, of Hopper's a
window of -1 where they were built for windows, and of both a window or a soft cap that they were not built for.
"""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nanovllm.executor.cascade_policy import shared_runs
from nanovllm.ops.attention import flashinfer, flashinfer_plans, reference
from nanovllm.ops.attention.cascade import attend_part
from nanovllm.ops.attention.flashinfer import EVERYTHING, AttentionWorkspace
from nanovllm.ops.attention.flashinfer_cascade import FlashInferCascade
from nanovllm.ops.attention.flashinfer_plans import DecodePlan, PrefillPlan, copied_kv, kv_lines
from nanovllm.ops.attention.plan_table import PlanMismatchError

CPU, HEADS, KV_HEADS, HEAD_DIM, SIZE, SCALE = torch.device("cpu"), 4, 2, 128, 4, 0.1
SHAPE = (HEADS, KV_HEADS, HEAD_DIM, SIZE, torch.float16, CPU)


class Space(AttentionWorkspace):
    def __init__(self) -> None:
        self.buffer = torch.empty(0)


SPACE = Space()


class Kernels:
    """A module of FlashInfer's: `plan` and `paged_run` with the arguments of 0.6.14, over pages `[N, K, S, D]`."""

    def __init__(self, backend: str, windows: bool, soft_caps: bool) -> None:
        self.backend, self.windows, self.soft_caps = backend, windows, soft_caps
        self.planned: dict[int, int] = {}

    def plan(self, buffer, memory, staged, qo, kv, lens, num_tokens, rows, heads, kv_heads, size, captured, d, also_d, causal, left, *rest):
        assert len(rest) == (3 if self.backend == "fa2" else 0) and memory.shape == staged.shape
        self.planned[memory.data_ptr()] = left
        return [left]

    def paged_run(self, buffer, memory, info, q, k, v, qo, kv, indices, last, out, lse, mask, layout, left, pdl, *rest):
        softcap, scale = rest[6:8]
        assert (self.windows or left == -1) and bool(softcap) == self.soft_caps and layout == flashinfer.HND
        if self.backend == "fa2":
            assert self.planned[memory.data_ptr()] == info[0] == left
        else:
            assert info == [-1] and (left >= 0) == self.windows
        for b in range(len(qo) - 1):
            pages, queries = indices[kv[b] : kv[b + 1]].long(), q[qo[b] : qo[b + 1]].double()
            length = (len(pages) - 1) * SIZE + int(last[b])
            keys = torch.stack([part[pages].transpose(0, 1).flatten(1, 2)[:, :length] for part in (k, v)]).double()
            seen = torch.full((len(queries),), length)
            if mask == flashinfer.CAUSAL:
                seen = length - len(queries) + 1 + torch.arange(len(queries))
            mixed, weight = attend_part(queries, keys, seen.int(), scale, 0 if left in (-1, EVERYTHING) else left + 1, softcap)
            out[qo[b] : qo[b + 1]] = mixed.to(out.dtype)
            if lse is not None:
                lse[qo[b] : qo[b + 1]] = weight.float()

    def ragged_run(self, buffer, memory, info, q, k, v, qo, kv, out, lse, mask, layout, left, pdl, *rest):
        softcap, scale = rest[6:8]
        assert self.backend == "fa3" and info == [-1] and (left >= 0) == self.windows and layout == flashinfer.NHD
        assert mask == flashinfer.CAUSAL and len(k) == len(v) == kv[-1]
        for b in range(len(qo) - 1):
            keys, queries = (
                torch.stack([part[kv[b] : kv[b + 1]].transpose(0, 1) for part in (k, v)]).double(),
                q[qo[b] : qo[b + 1]].double(),
            )
            seen = keys.shape[2] - len(queries) + 1 + torch.arange(len(queries))
            mixed, _ = attend_part(queries, keys, seen.int(), scale, 0 if left in (-1, EVERYTHING) else left + 1, softcap)
            out[qo[b] : qo[b + 1]] = mixed.to(out.dtype)


class Staging(flashinfer._Staging):
    def __init__(self, num_ints: int, schedules: int, schedule_bytes: int) -> None:
        self.ints = torch.empty(num_ints, dtype=torch.int32)
        self.schedules = torch.empty(schedules, schedule_bytes, dtype=torch.uint8).unbind()
        self.copied: Any = SimpleNamespace(synchronize=lambda: None, record=lambda: None)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What was built: backend, whether for windows, whether for soft caps."""
    found: list[tuple[Any, ...]] = []

    def get_batch_prefill_module(backend, *args):
        found.append((backend, *args[-3:-1]))
        return Kernels(backend, *args[-3:-1])

    def last_page_lens(out, seq_lens, indptr, size):
        out.copy_(seq_lens - (indptr.diff() - 1) * size)

    package, prefill, kv = ModuleType("flashinfer"), ModuleType("flashinfer.prefill"), ModuleType("nanovllm.ops.kv_cache.triton_kv")
    prefill.get_batch_prefill_module = get_batch_prefill_module  # pyright: ignore[reportAttributeAccessIssue]
    kv.last_page_lens = last_page_lens  # pyright: ignore[reportAttributeAccessIssue]
    for module in (package, prefill, kv):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("nanovllm.ops.kv_cache.triton_kv", kv, raising=False)
    monkeypatch.setattr(flashinfer, "attention_backend", lambda *_: "flashinfer")
    monkeypatch.setattr(flashinfer_plans, "num_tiles", lambda *_: 1)
    monkeypatch.setattr(flashinfer, "_Staging", Staging)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    return found


class Batch:
    """Rows of these lengths over pages of one layer, of which the last `new[b]` tokens are queries; two share their first four pages."""

    def __init__(self, lens: list[int], new: list[int]) -> None:
        torch.manual_seed(0)
        counts = [-(-length // SIZE) for length in lens]
        self.counts, self.lens = np.array(counts, np.int32), np.array(lens, np.int32)
        self.cu = np.cumsum([0, *new]).astype(np.int32)
        ids = np.random.default_rng(0).permutation(sum(counts)).astype(np.int32)
        self.tables = np.zeros((len(lens), max(counts)), np.int32)
        for b, count in enumerate(counts):
            self.tables[b, :count], ids = ids[:count], ids[count:]
        self.tables[1, :4] = self.tables[0, :4]
        self.pages = torch.randn(1, sum(counts), 2, KV_HEADS, SIZE, HEAD_DIM).half()
        self.q = (torch.randn(sum(new), HEADS, HEAD_DIM) * 3).half()

    def expected(self, window: int, softcap: float) -> torch.Tensor:
        given = (torch.from_numpy(part) for part in (self.tables, self.lens, self.cu))
        return reference.prefill_rows(self.q.double(), self.pages[0].double(), *given, SCALE, window, softcap).half()


PROMPTS = Batch([40, 30, 9, 21], [7, 1, 9, 2])
DECODE = Batch([40, 30, 9, 1], [1, 1, 1, 1])


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("windows", [(0,), (0, 3, 16), (30, 40, 100), (1,)])
@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_prompts_in_windows(built: list[Any], backend: str, windows: tuple[int, ...], softcap: float) -> None:
    plan = PrefillPlan(SPACE, 8, 20, *SHAPE, backend=backend, windows=windows, softcap=softcap)
    assert built == [(name, any(windows), softcap > 0) for name in ("fa2", "fa3")[: 1 + (backend == "fa3")]]
    plan.update(PROMPTS.cu, PROMPTS.lens, PROMPTS.tables)
    for window in windows:
        out = plan.run(PROMPTS.q, PROMPTS.pages, 0, SCALE, window=window, softcap=softcap)
        torch.testing.assert_close(out, PROMPTS.expected(window, softcap))
    left = {window - 1 if 0 < window < 40 else -1 for window in windows}
    assert {schedule.info[0] for schedule in plan.schedules.values()} == (left if backend == "fa2" else {-1})


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("windows", [(0,), (0, 3, 16), (30, 40, 100), (1,)])
def test_decode_in_windows(built: list[Any], windows: tuple[int, ...], softcap: float) -> None:
    """What a row may outgrow before the next update is told of, whatever the rows' lengths now."""
    plan = DecodePlan(SPACE, 4, 20, *SHAPE, windows, softcap)
    assert built == [("fa2", any(windows), softcap > 0)]
    plan.update(DECODE.counts, DECODE.tables)
    for window in windows:
        out = plan.run(DECODE.q, DECODE.pages, 0, torch.from_numpy(DECODE.lens), SCALE, window, softcap)
        torch.testing.assert_close(out, DECODE.expected(window, softcap))
    assert [schedule.window_left for schedule in plan.schedules.values()] == [window - 1 for window in windows]


def test_what_is_captured_follows_its_window_in_every_batch(built: list[Any]) -> None:
    plan = PrefillPlan(SPACE, 8, 20, *SHAPE, max_tokens=32, windows=(0, 100))
    plan.update(PROMPTS.cu, PROMPTS.lens, PROMPTS.tables)
    assert [schedule.window_left for schedule in plan.schedules.values()] == [-1, 99]
    assert plan.schedules[0].memory.data_ptr() != plan.schedules[100].memory.data_ptr()


def test_shared_prompts_in_windows(built: list[Any]) -> None:
    """Where rows outgrow a window, each reads its own pages; where they do not, what is shared is read once."""
    own, shared = (PrefillPlan(SPACE, 8, 20, *SHAPE, causal=causal, softcap=5.0) for causal in (True, False))
    windowed = PrefillPlan(SPACE, 8, 20, *SHAPE, windows=(0, 6, 40), softcap=5.0)
    cascade = FlashInferCascade(own, shared, windowed)
    whole = (PROMPTS.lens - np.diff(PROMPTS.cu)) // SIZE
    runs = shared_runs(PROMPTS.tables, whole, PROMPTS.counts, lambda rows, pages: True)
    cascade.update(PROMPTS.lens, PROMPTS.cu, PROMPTS.tables, runs)
    for window in (0, 6, 40):
        out = cascade.run(PROMPTS.q, PROMPTS.pages, 0, SCALE, window, 5.0)
        torch.testing.assert_close(out, PROMPTS.expected(window, 5.0), rtol=2e-3, atol=2e-3)
    without = FlashInferCascade(own, shared)
    without.update(PROMPTS.lens, PROMPTS.cu, PROMPTS.tables, runs)
    for plan, window, softcap in ((cascade, 7, 5.0), (cascade, 6, 0.0), (cascade, 0, 0.0), (without, 6, 5.0)):
        with pytest.raises(PlanMismatchError, match=f"window {window}"):
            plan.run(PROMPTS.q, PROMPTS.pages, 0, SCALE, window, softcap)


def test_plans_refuse_what_they_were_not_made_for(built: list[Any]) -> None:
    plan = DecodePlan(SPACE, 4, 20, *SHAPE, (0, 6), 5.0)
    plan.update(DECODE.counts, DECODE.tables)
    for window, softcap in ((7, 5.0), (6, 0.0), (0, 6.0)):
        with pytest.raises(PlanMismatchError, match=rf"window {window} and soft cap {softcap}.*\(0, 6\) and 5.0"):
            plan.run(DECODE.q, DECODE.pages, 0, torch.from_numpy(DECODE.lens), SCALE, window, softcap)
    for windows, softcap in (((), 0.0), ((0, -1), 0.0), ((0,), -1.0)):
        with pytest.raises(PlanMismatchError, match="at least 0"):
            DecodePlan(SPACE, 4, 20, *SHAPE, windows, softcap)
    with pytest.raises(PlanMismatchError, match="causal"):
        PrefillPlan(SPACE, 8, 20, *SHAPE, causal=False, windows=(6,))


@pytest.mark.parametrize("windows", [(0,), (0, 16)])
@pytest.mark.parametrize("batch", [Batch([40, 30, 9, 21], [27, 16, 9, 20]), Batch([19, 18], [19, 18])], ids=["older", "fresh"])
def test_new_keys_and_values_lie_together(
    batch: Batch, windows: tuple[int, ...], built: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older ones are copied out of the pages, if there are not too many."""
    monkeypatch.setattr(flashinfer_plans, "COPIED_FROM", 1)
    plan = PrefillPlan(SPACE, 8, 20, *SHAPE, backend="fa3", windows=windows)
    counts, bounds = np.diff(batch.cu), list(batch.cu)
    plan.update(batch.cu, batch.lens, batch.tables, together=True)
    assert plan.together and (plan.copied is None) == bool((counts == batch.lens).all())
    rows = [reference.row_kv(batch.pages[0], torch.from_numpy(table), int(n)) for table, n in zip(batch.tables, batch.lens, strict=True)]
    new = torch.cat([row[:, :, len(row[0, 0]) - int(count) :] for row, count in zip(rows, counts, strict=True)], 2).transpose(1, 2)
    assert len(new[0]) == bounds[-1]
    for window in windows:
        out = plan.run(batch.q, batch.pages, 0, SCALE, new=(new[0], new[1]), window=window)
        torch.testing.assert_close(out, batch.expected(window, 0.0))
    few = Batch([40, 30, 9, 21], [7, 1, 9, 2])
    plan.update(few.cu, few.lens, few.tables, together=True)
    assert not plan.together and plan.copied is None
    torch.testing.assert_close(plan.run(few.q, few.pages, 0, SCALE), few.expected(0, 0.0))


def test_keys_and_values_are_copied_out_of_the_pages() -> None:
    pages = torch.randn(9, 2, 3, 4, 8)
    tables, lens = np.array([[5, 0, 7], [3, 8, 8], [1, 2, 8]], np.int32), np.array([11, 3, 8], np.int32)
    k, v = copied_kv(pages, kv_lines(lens, tables, 3, 4, CPU))
    rows = [reference.row_kv(pages, torch.from_numpy(table), int(length)) for table, length in zip(tables, lens, strict=True)]
    want = torch.cat(rows, 2).transpose(1, 2)
    assert torch.equal(k, want[0]) and torch.equal(v, want[1])
    assert k.is_contiguous() and v.is_contiguous()
