"""A batch of prompts that is cut in two: the halves are the batch, whatever prompts it has and wherever it is cut."""

from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.chunks.prefill import plain_request
from nanovllm.executor.batch import HostBatch, prefill_batch, to_device, token_rows
from nanovllm.executor.prompt_halves import ALIGNED, NEAR, cut, least_tokens, middle
from nanovllm.state.request import Sequence
from nanovllm.state.vector import IntVector
from nanovllm.testing.models import random_model, tiny_config

SIZE = 4


@st.composite
def batches(draw: st.DrawFn) -> HostBatch:
    """Prompts of which some tokens may be filled, and some may run later, with or without frames for sliding windows."""
    pieces = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 12), st.integers(0, 3)), min_size=1, max_size=5))
    rows, next_page = list[tuple[Sequence, int]](), 0
    for filled, count, later in pieces:
        total = filled + count + later
        pages = list(range(next_page, next_page + -(-total // SIZE)))[::-1]
        next_page += len(pages)
        ids = IntVector.of(draw(st.lists(st.integers(0, 50), min_size=total, max_size=total)))
        rows.append((Sequence(request=plain_request(total), tokens=ids, pages=IntVector.of(pages), num_filled=filled), count))
    host = prefill_batch(rows, page_size=SIZE, dummy_page=next_page)
    if draw(st.booleans()):
        second = {"frame_tables": host.page_tables[:, ::-1] + 1, "frame_slots": host.slots + SIZE}
        host = HostBatch(**{field.name: getattr(host, field.name) for field in fields(host)} | second)
    return host


def as_rows(host: HostBatch) -> list[tuple[int, ...]]:
    """For each token: its id, position and slots, how many tokens it attends to, and in which pages and frames."""
    one = token_rows(host, SIZE)
    parts = [one.input_ids, one.positions, one.slots, one.seq_lens, *one.page_tables.T]
    parts += [] if one.frame_slots is None or one.frame_tables is None else [one.frame_slots, *one.frame_tables.T]
    return [tuple(int(part[token]) for part in parts) for token in range(len(one.input_ids))]


@given(host=batches(), data=st.data())
def test_the_halves_are_the_batch(host: HostBatch, data: st.DataObject) -> None:
    total = len(host.input_ids)
    if total < 2:
        return
    at = data.draw(st.integers(1, total - 1))
    first, second = cut(host, at, SIZE)
    assert as_rows(first) + as_rows(second) == as_rows(host)
    assert first.logit_indices is not None and second.logit_indices is not None and host.logit_indices is not None
    assert [*first.logit_indices, *(second.logit_indices + at)] == host.logit_indices.tolist()
    for half in (first, second):
        assert half.cu_seqlens is not None and half.cu_seqlens[0] == 0 and half.cu_seqlens[-1] == len(half.input_ids)
        assert (np.diff(half.cu_seqlens) > 0).all(), "no row without tokens"
        assert half.page_counts.tolist() == [-(-int(length) // SIZE) for length in half.seq_lens]
        arrays = [value for field in fields(half) if (value := getattr(half, field.name)) is not None]
        assert {array.dtype for array in arrays} == {np.dtype(np.int32)}
        to_device(half, torch.device("cpu"))


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=6))
def test_the_middle_is_near_the_middle(counts: list[int]) -> None:
    bounds = np.cumsum([0, *counts]).astype(np.int32)
    total = int(bounds[-1])
    if total < 2:
        return
    at = middle(bounds)
    assert 0 < at < total
    if at in bounds.tolist():
        assert abs(at - total / 2) <= max(total / NEAR, ALIGNED)
    else:
        assert total / 2 - ALIGNED < at <= total / 2 and (at % ALIGNED == 0 or total < 2 * ALIGNED)


def test_a_model_of_one_gpu_or_of_none_runs_whole() -> None:
    assert least_tokens(random_model(tiny_config())) is None


@pytest.mark.parametrize(("bounds", "at"), [([0, 4096, 8192], 4096), ([0, 100, 8192], 4096), ([0, 3000, 6000, 9000], 4480)])
def test_where_a_batch_is_cut(bounds: list[int], at: int) -> None:
    assert middle(np.array(bounds, np.int32)) == at
