"""Runs of shared pages: every row's pages once, whatever the tables; as long as the tables are equal."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.executor.batch import HostBatch
from nanovllm.executor.cascade_policy import DECODE_BYTES, RUN_TOKENS, CascadePolicy, num_saved, own_runs, shared_runs
from nanovllm.ops.attention.cascade_plan import Run


@st.composite
def batches(draw):
    """Rows that branch off each other, as chunks do: each takes some pages of an earlier one, then its own."""
    rows, fresh = [], 0
    for _ in range(draw(st.integers(1, 8))):
        base = draw(st.sampled_from(rows)) if rows and draw(st.booleans()) else []
        kept = base[: draw(st.integers(0, len(base)))]
        count = draw(st.integers(0 if kept else 1, 4))
        rows.append([*kept, *range(fresh, fresh + count)])
        fresh += count
    width = max(map(len, rows)) + 1
    tables = np.full((len(rows), width), 999, np.int32)
    for table, row in zip(tables, rows, strict=True):
        table[: len(row)] = row
    counts = np.array([len(row) for row in rows], np.int32)
    whole = np.array([draw(st.integers(0, n)) for n in counts], np.int32)
    return tables, whole, counts


def covered(runs, num_rows):
    found = [[] for _ in range(num_rows)]
    for run in runs:
        for row in run.rows.tolist():
            found[row] += range(run.start, run.stop)
    return found


@given(batches(), st.integers(1, 6))
def test_every_row_has_each_of_its_pages_once(batch, least):
    tables, whole, counts = batch
    runs = shared_runs(tables, whole, counts, lambda rows, pages: (rows - 1) * pages >= least)
    assert [sorted(pages) for pages in covered(runs, len(tables))] == [list(range(n)) for n in counts]
    for run in runs:
        assert run.stop > run.start and (np.diff(run.rows) > 0).all()
        assert (tables[run.rows, run.start : run.stop] == tables[run.rows[0], run.start : run.stop]).all()
        if len(run.rows) > 1:
            assert (whole[run.rows] >= run.stop).all() and (len(run.rows) - 1) * (run.stop - run.start) >= least


@given(batches())
def test_nothing_that_could_be_shared_is_read_twice(batch):
    tables, whole, counts = batch
    runs = shared_runs(tables, whole, counts, lambda rows, pages: True)
    # A page may be shared where its whole prefix is: what is equal up to there, in rows that see it entirely.
    distinct = {tuple(tables[b, : at + 1]) for b in range(len(tables)) for at in range(whole[b])}
    partial = sum(int(n - w) for n, w in zip(counts, whole, strict=True))
    assert sum(run.stop - run.start for run in runs) == len(distinct) + partial
    assert num_saved(runs) == int(counts.sum()) - len(distinct) - partial


@given(batches(), st.integers(0, 8))
def test_a_policy_gives_all_runs_or_none(batch, least):
    tables, _, counts = batch
    policy = CascadePolicy(always=False, page_size=RUN_TOKENS, page_bytes=-(-DECODE_BYTES // max(1, least)), group=1)
    nothing = np.zeros(1, np.int32)
    host = HostBatch(
        input_ids=nothing, positions=nothing, slots=nothing, page_tables=tables, seq_lens=counts * RUN_TOKENS, page_counts=counts
    )
    runs, got = shared_runs(tables, counts, counts, lambda rows, pages: True), policy.decode(host)
    assert (got is not None) == (num_saved(runs) >= max(1, least))
    if got is not None:
        assert [(run.rows.tolist(), run.start, run.stop) for run in got] == [(run.rows.tolist(), run.start, run.stop) for run in runs]


def test_levels():
    tables = np.array([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 7, 8, 9], [0, 2, 3, 4, 5]], np.int32)
    runs = shared_runs(tables, np.full(4, 5, np.int32), np.full(4, 5, np.int32), lambda rows, pages: True)
    assert [(run.rows.tolist(), run.start, run.stop) for run in runs] == [
        ([0, 1, 2], 0, 2), ([0, 1], 2, 4), ([0], 4, 5), ([1], 4, 5), ([2], 2, 5), ([3], 0, 5),
    ]  # fmt: skip
    assert num_saved(runs) == 2 * 2 + 2 and num_saved(own_runs(np.full(4, 5, np.int32))) == 0


def test_rows_that_share_need_not_be_neighbours():
    tables = np.array([[1, 2, 3], [7, 8, 9], [1, 2, 4], [7, 8, 9]], np.int32)
    runs = shared_runs(tables, np.full(4, 3, np.int32), np.full(4, 3, np.int32), lambda rows, pages: True)
    assert [(run.rows.tolist(), run.start, run.stop) for run in runs] == [
        ([0, 2], 0, 2), ([1, 3], 0, 3), ([0], 2, 3), ([2], 2, 3),
    ]  # fmt: skip


def batch(tables, seq_lens, cu_seqlens=None):
    tables, seq_lens = np.array(tables, np.int32), np.array(seq_lens, np.int32)
    nothing = np.zeros(1, np.int32)
    return HostBatch(
        input_ids=nothing, positions=nothing, slots=nothing, page_tables=tables, seq_lens=seq_lens, page_counts=-(-seq_lens // 4),
        cu_seqlens=None if cu_seqlens is None else np.array(cu_seqlens, np.int32),
    )  # fmt: skip


def test_pages_without_memory_are_not_shared():
    policy = CascadePolicy(always=True, page_size=4, page_bytes=1, group=2, no_frame=9)
    assert policy.decode(batch([[9, 9, 3], [9, 9, 3]], [12, 12])) is None
    runs = policy.decode(batch([[0, 1, 9, 2], [0, 1, 9, 3], [9, 1, 9, 3]], [16, 16, 16])) or []
    assert [(run.rows.tolist(), run.start, run.stop) for run in runs] == [([0, 1], 0, 2), ([0], 2, 4), ([1], 2, 4), ([2], 0, 4)]


def test_pages_that_a_query_sees_only_in_part_are_not_shared():
    policy = CascadePolicy(always=True, page_size=4, page_bytes=1, group=2)
    shared = [[0, 1, 2], [0, 1, 2]]
    assert [run.stop for run in policy.decode(batch(shared, [8, 11])) or []] == [2, 3]  # row 0 has all its pages shared
    assert policy.decode(batch(shared, [3, 3])) is None
    # Prompts: the first query of row 1 sees 6 tokens, one page of them whole; its last sees two whole pages
    runs = policy.prompts(batch(shared, [12, 11], [0, 4, 10])) or []
    assert [(run.rows.tolist(), run.start, run.stop) for run in runs] == [([0, 1], 0, 1), ([0], 1, 3), ([1], 1, 3)]


def test_sharing_is_off_where_it_does_not_pay():
    tables = [[*range(4096), 5000 + b] for b in range(8)]
    lens = [4 * 4096 + 1] * 8
    spare = CascadePolicy(always=False, page_size=4, page_bytes=16 * 4096, group=2)
    assert spare.decode(batch(tables, lens)) is not None
    assert spare.decode(batch(tables[:1], lens[:1])) is None
    assert spare.decode(batch([row[4090:] for row in tables], [6 * 4 + 1] * 8)) is None  # 24 tokens shared
    assert spare.prompts(batch(tables, lens, range(9))) is not None
    for count, paid in ((32, True), (33, False)):  # with two query heads a key/value head, 32 queries a row fill a tile
        runs = spare.prompts(batch(tables, [4 * 4096 + count] * 8, range(0, 8 * count + 1, count)))
        assert (runs is not None) == paid
    assert spare.prompts(batch(tables, [4 * 4096 + 1 + 400] * 8, range(0, 3601, 400)[:9])) is None  # 400 queries a row: bound by arithmetic


@pytest.mark.parametrize("rows", [1, 3])
def test_nothing_to_share(rows):
    tables = np.arange(rows, dtype=np.int32)[:, None]
    ones = np.ones(rows, np.int32)
    assert [run.rows.tolist() for run in shared_runs(tables, ones, ones, lambda *_: True)] == [[b] for b in range(rows)]
    assert isinstance(own_runs(ones)[0], Run)
