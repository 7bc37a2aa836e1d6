"""The CPU reference of paged attention against a naive dense one, and its independence of the batch."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.ops import kv_write, paged_decode, paged_prefill
from nanovllm.ops.attention import reference

LAYERS = 2


def naive(q, k, v, scale, window=0, softcap=0.0):
    """Dense causal attention, one head and one query at a time, in float64; the queries are the last of the keys."""
    q, k, v = (t.double() for t in (q, k, v))
    n, num_heads, _ = q.shape
    group = num_heads // k.shape[1]
    out = torch.zeros_like(q)
    for i in range(n):
        position = k.shape[0] - n + i
        keys = [j for j in range(position + 1) if not window or j > position - window]
        for h in range(num_heads):
            scores = torch.stack([q[i, h].dot(k[j, h // group]) for j in keys]) * scale
            if softcap:
                scores = softcap * (scores / softcap).tanh()
            weights = (scores - scores.max()).exp()
            out[i, h] = (weights / weights.sum()) @ v[keys, h // group]
    return out


class Case:
    """Rows of (kv length, query length), their dense keys and values, and the same in shuffled pages among garbage."""

    def __init__(self, rows, *, group, kv_heads, head_dim, page_size, extra_width=0, dtype=torch.float32, seed=0):
        rng = torch.Generator().manual_seed(seed)
        self.rows, self.dtype = rows, dtype
        rand = lambda *shape: torch.randn(*shape, generator=rng).to(dtype)  # noqa: E731
        self.k = [rand(length, kv_heads, head_dim) for length, _ in rows]
        self.v = [rand(length, kv_heads, head_dim) for length, _ in rows]
        self.q = [rand(n, group * kv_heads, head_dim) for _, n in rows]
        counts = [-(-length // page_size) for length, _ in rows]
        num_pages = sum(counts) + 3
        self.dummy = num_pages - 1
        self.pages = rand(LAYERS, num_pages, 2, kv_heads, page_size, head_dim)
        ids = torch.randperm(num_pages - 1, generator=rng).tolist()
        width = max(counts) + extra_width
        self.tables = torch.full((len(rows), width), self.dummy, dtype=torch.int32)
        for b, count in enumerate(counts):
            mine = [ids.pop() for _ in range(count)]
            self.tables[b, :count] = torch.tensor(mine, dtype=torch.int32)
            slots = torch.tensor([mine[i // page_size] * page_size + i % page_size for i in range(rows[b][0])], dtype=torch.int32)
            kv_write(self.pages, 1, self.k[b], self.v[b], slots)
        self.seq_lens = torch.tensor([length for length, _ in rows], dtype=torch.int32)
        self.cu = torch.tensor([0, *torch.tensor([n for _, n in rows]).cumsum(0).tolist()], dtype=torch.int32)
        self.scale = head_dim**-0.5

    def expected(self, **kw):
        return [naive(q, k, v, self.scale, **kw) for q, k, v in zip(self.q, self.k, self.v, strict=True)]

    def prefill(self, **kw):
        out = paged_prefill(torch.cat(self.q), self.pages, 1, self.tables, self.seq_lens, self.cu, self.scale, 0, **kw)
        return list(out.split([n for _, n in self.rows]))

    def decode(self, **kw):
        return list(paged_decode(torch.cat(self.q), self.pages, 1, self.tables, self.seq_lens, self.scale, 0, **kw).split(1))


row = st.integers(1, 40).flatmap(lambda length: st.tuples(st.just(length), st.integers(1, length)))
shapes = st.fixed_dictionaries(
    {
        "group": st.sampled_from([1, 2, 7]),
        "kv_heads": st.integers(1, 3),
        "head_dim": st.sampled_from([2, 8, 64]),
        "page_size": st.sampled_from([1, 4, 16]),
        "extra_width": st.integers(0, 3),
        "seed": st.integers(0, 99),
    }
)


@settings(deadline=None, max_examples=40)
@given(st.lists(row, min_size=1, max_size=4), shapes)
def test_prefill_equals_dense_attention(rows, kw):
    case = Case(rows, **kw)
    for out, want in zip(case.prefill(), case.expected(), strict=True):
        torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), shapes)
def test_decode_equals_dense_attention(lengths, kw):
    case = Case([(length, 1) for length in lengths], **kw)
    for out, want in zip(case.decode(), case.expected(), strict=True):
        torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=6), shapes)
def test_a_row_gives_the_same_bits_in_any_batch(lengths, kw):
    case = Case([(length, 1) for length in lengths], **kw)
    together, mixed = case.decode(), case.prefill()
    for b in range(len(lengths)):
        width = -(-lengths[b] // kw["page_size"])
        alone = paged_decode(case.q[b], case.pages, 1, case.tables[b : b + 1, :width].clone(), case.seq_lens[b : b + 1], case.scale, 0)
        assert torch.equal(together[b], alone)
        assert torch.equal(mixed[b], alone)  # a row of one query is the same in a step that also prefills


@settings(deadline=None, max_examples=20)
@given(st.lists(row, min_size=2, max_size=4), shapes)
def test_a_prefilled_row_gives_the_same_bits_in_any_batch(rows, kw):
    case = Case(rows, **kw)
    for b, together in enumerate(case.prefill()):
        cu = torch.tensor([0, rows[b][1]], dtype=torch.int32)
        alone = paged_prefill(case.q[b], case.pages, 1, case.tables[b : b + 1], case.seq_lens[b : b + 1], cu, case.scale, 0)
        assert torch.equal(together, alone)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
def test_dtypes(dtype, tolerance):
    case = Case([(33, 1), (7, 1), (100, 1)], group=2, kv_heads=2, head_dim=64, page_size=16, dtype=dtype)
    for out, want in zip(case.decode(), case.expected(), strict=True):
        assert out.dtype == dtype
        assert (out.double() - want).norm() <= tolerance * want.norm()
    case = Case([(33, 20), (7, 7)], group=2, kv_heads=2, head_dim=64, page_size=16, dtype=dtype)
    for out, want in zip(case.prefill(), case.expected(), strict=True):
        assert out.dtype == dtype
        assert (out.double() - want).norm() <= tolerance * want.norm()


def test_long_rows_are_attended_in_blocks_of_queries(monkeypatch):
    case = Case([(90, 70), (31, 31)], group=2, kv_heads=2, head_dim=16, page_size=4)
    monkeypatch.setattr(reference, "MAX_SCORES", 4 * 90 * 8)
    for out, want in zip(case.prefill(), case.expected(), strict=True):
        torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)


def test_rows_without_queries_are_skipped():
    case = Case([(5, 2), (9, 4)], group=2, kv_heads=1, head_dim=8, page_size=4)
    tables = torch.cat((case.tables[:1], torch.full_like(case.tables[:1], case.dummy), case.tables[1:]))
    seq_lens, cu = torch.tensor([5, 1, 9], dtype=torch.int32), torch.tensor([0, 2, 2, 6], dtype=torch.int32)
    out = paged_prefill(torch.cat(case.q), case.pages, 1, tables, seq_lens, cu, case.scale, 0)
    assert torch.equal(out, torch.cat(case.prefill()))


def test_a_page_table_too_narrow_for_its_row_is_refused():
    case = Case([(9, 1)], group=1, kv_heads=1, head_dim=8, page_size=4)
    with pytest.raises(IndexError, match="9 tokens needs 3 pages of 4, but its page table has 2"):
        paged_decode(case.q[0], case.pages, 1, case.tables[:, :2], case.seq_lens, case.scale, 0)


def test_scale_is_used_and_softmax_does_not_overflow():
    case = Case([(20, 1)], group=1, kv_heads=1, head_dim=8, page_size=4)
    case.scale = 1e4
    (out,) = case.decode()
    assert math.isfinite(out.sum().item())
    torch.testing.assert_close(out.double(), case.expected()[0], rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), shapes)
def test_decode_without_the_host_agrees(lengths, kw):
    case = Case([(length, 1) for length in lengths], **kw)
    out = reference.decode_rows(torch.cat(case.q), case.pages[1], case.tables, case.seq_lens, case.scale)
    torch.testing.assert_close(out, torch.cat(case.decode()), rtol=1e-5, atol=1e-5)


def test_decode_without_the_host_works_in_blocks(monkeypatch):
    case = Case([(9, 1), (3, 1), (12, 1)], group=2, kv_heads=1, head_dim=8, page_size=4)
    monkeypatch.setattr(reference, "MAX_GATHERED", 1)
    out = reference.decode_rows(torch.cat(case.q), case.pages[1], case.tables, case.seq_lens, case.scale)
    torch.testing.assert_close(out, torch.cat(case.decode()), rtol=1e-5, atol=1e-5)


# A window of a token, of part of a page, of a page, of several, and of more than there is
limits = st.fixed_dictionaries({"window": st.sampled_from([0, 1, 3, 4, 16, 17, 50]), "softcap": st.sampled_from([0.0, 0.7, 30.0])})


@settings(deadline=None, max_examples=60)
@given(st.lists(row, min_size=1, max_size=4), shapes, limits)
def test_prefill_sees_a_window_of_capped_scores(rows, kw, limits):
    case = Case(rows, **kw)
    for out, want in zip(case.prefill(**limits), case.expected(**limits), strict=True):
        torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), shapes, limits)
def test_decode_sees_a_window_of_capped_scores(lengths, kw, limits):
    case = Case([(length, 1) for length in lengths], **kw)
    want = case.expected(**limits)
    for out, exact in zip(case.decode(**limits), want, strict=True):
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    out = reference.decode_rows(torch.cat(case.q), case.pages[1], case.tables, case.seq_lens, case.scale, **limits)
    torch.testing.assert_close(out.double(), torch.cat(want), rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=6), shapes, limits)
def test_a_row_with_a_window_gives_the_same_bits_in_any_batch(lengths, kw, limits):
    case = Case([(length, 1) for length in lengths], **kw)
    together, mixed = case.decode(**limits), case.prefill(**limits)
    for b in range(len(lengths)):
        given = (case.q[b], case.pages, 1, case.tables[b : b + 1].clone(), case.seq_lens[b : b + 1], case.scale, 0)
        alone = paged_decode(*given, **limits)
        assert torch.equal(together[b], alone)
        assert torch.equal(mixed[b], alone)


@settings(deadline=None, max_examples=20)
@given(st.lists(row, min_size=2, max_size=4), shapes, limits)
def test_a_prefilled_row_with_a_window_gives_the_same_bits_in_any_batch(rows, kw, limits):
    case = Case(rows, **kw)
    for b, together in enumerate(case.prefill(**limits)):
        cu = torch.tensor([0, rows[b][1]], dtype=torch.int32)
        given = (case.q[b], case.pages, 1, case.tables[b : b + 1], case.seq_lens[b : b + 1], cu, case.scale, 0)
        assert torch.equal(together, paged_prefill(*given, **limits))


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 60), st.lists(st.integers(1, 12), max_size=6), shapes, limits)
def test_a_prompt_in_chunks_equals_the_whole_under_a_window(length, chunks, kw, limits):
    whole = Case([(length, length)], **kw)
    (want,) = whole.prefill(**limits)
    start, got = 0, []
    for chunk in [*chunks, length]:
        stop = min(length, start + chunk)
        if stop > start:
            lens, cu = torch.tensor([stop], dtype=torch.int32), torch.tensor([0, stop - start], dtype=torch.int32)
            q = whole.q[0][start:stop]
            got.append(paged_prefill(q, whole.pages, 1, whole.tables, lens, cu, whole.scale, 0, **limits))
        start = stop
    torch.testing.assert_close(torch.cat(got), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [1, 5, 40, 100])
def test_blocks_of_queries_see_their_windows(monkeypatch, window):
    case = Case([(90, 70), (31, 31)], group=2, kv_heads=2, head_dim=16, page_size=4)
    monkeypatch.setattr(reference, "MAX_SCORES", 4 * 90 * 8)
    limits = {"window": window, "softcap": 5.0}
    for out, want in zip(case.prefill(**limits), case.expected(**limits), strict=True):
        torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("softcap", [0.0, 0.5])
def test_a_window_that_holds_the_row_changes_no_bit(softcap):
    case = Case([(33, 20), (7, 7), (12, 1)], group=2, kv_heads=2, head_dim=16, page_size=4)
    for wide, plain in zip(case.prefill(window=33, softcap=softcap), case.prefill(softcap=softcap), strict=True):
        assert torch.equal(wide, plain)


def test_pages_out_of_the_window_are_not_read():
    case = Case([(40, 1), (9, 1)], group=1, kv_heads=1, head_dim=8, page_size=4)
    case.pages[:, case.tables[0, :8].long()] = torch.nan
    case.pages[:, case.tables[1, 0].long()] = torch.nan
    want = torch.cat(case.expected(window=5))
    for out in (
        torch.cat(case.decode(window=5)),
        torch.cat(case.prefill(window=5)),
        reference.decode_rows(torch.cat(case.q), case.pages[1], case.tables, case.seq_lens, case.scale, 5),
    ):
        torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
