"""Options as columns of one buffer: what is packed is what a step reads, and rows that need less draw the same tokens."""

from dataclasses import fields

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.sampling.params import SamplingParams
from nanovllm.sampling.penalty_tables import PIECE, PenaltyTables, draw_rows
from nanovllm.sampling.row_options import (
    KINDS,
    LINES,
    Row,
    RowOptions,
    kind_of,
    mask_lines,
    needs_tables,
    pack,
    packed_options,
    row_options,
)
from nanovllm.sampling.sampler import record, sample
from nanovllm.sampling.tensors import build

VOCAB = 37
NONE = np.empty(0, np.int32)
PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0]),
        "top_k": st.sampled_from([0, 1, 5, 10**6]),
        "top_p": st.sampled_from([0.3, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.1]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "presence_penalty": st.sampled_from([0.0, 0.5]),
        "frequency_penalty": st.sampled_from([0.0, 0.4]),
        "logit_bias": st.sampled_from([None, {3: 2.0, 5: -100.0}]),
        "logprobs": st.sampled_from([None, 0, 3]),
    }
)
IDS = st.lists(st.integers(0, VOCAB - 1), max_size=6).map(lambda ids: np.array(ids, np.int32))


def options_of(rows: list[Row], size: int) -> RowOptions:
    host = np.full((LINES, size + size % 2), 77, np.int32)
    pack(rows, host)
    return row_options(torch.from_numpy(host), size)


@given(st.lists(st.tuples(PARAMS, st.integers(0, 2**63 - 1), st.integers(-1, 5)), max_size=5), st.integers(0, 3))
@settings(deadline=None)
def test_what_is_packed_is_what_a_step_reads(drawn: list, extra: int) -> None:
    rows: list[tuple[SamplingParams, int, int]] = [(SamplingParams(**options), *rest) for options, *rest in drawn]
    size = len(rows) + extra
    options = options_of([(packed_options(p), *rest) for p, *rest in rows], size)
    for name, neutral in (("temperature", 0.0), ("top_p", 1.0), ("min_p", 0.0)):
        want = [float(np.float32(getattr(p, name))) for p, _, _ in rows] + [neutral] * extra
        assert getattr(options, name).tolist() == want
    for name, neutral in (("repetition", 1.0), ("presence", 0.0), ("frequency", 0.0)):
        want = [float(np.float32(getattr(p, f"{name}_penalty"))) for p, _, _ in rows] + [neutral] * extra
        assert getattr(options, name).tolist() == want
    assert options.seeds.tolist() == [seed for _, seed, _ in rows] + [0] * extra
    assert options.top_k.tolist() == [p.top_k for p, _, _ in rows] + [0] * extra
    assert options.slots.tolist() == [slot for _, _, slot in rows] + [-1] * extra
    columns = [getattr(options, field.name) for field in fields(options)]
    assert len({column.untyped_storage().data_ptr() for column in columns}) == 1  # views, which graphs may keep


def test_a_tiny_repetition_penalty_is_no_division_by_zero() -> None:
    assert options_of([(packed_options(SamplingParams(repetition_penalty=1e-30)), 0, -1)], 1).repetition.item() == np.float32(1e-6)


def test_kinds_are_the_least_that_serve_all_rows() -> None:
    def kind(*params: SamplingParams) -> str:
        return kind_of(map(packed_options, params))

    greedy, random = SamplingParams(temperature=0.0, top_k=3), SamplingParams()
    assert kind() == kind(greedy) == "greedy" and kind(greedy, random) == "random"
    for filtered in (SamplingParams(top_k=3), SamplingParams(top_p=0.5), SamplingParams(min_p=0.1)):
        assert kind(random, filtered) == "filtered"
    for tabled in (SamplingParams(temperature=0.0, presence_penalty=1.0), SamplingParams(logit_bias={1: 1.0})):
        assert needs_tables(tabled) and packed_options(tabled).tabled and kind(greedy, tabled, random) == "everything"
    assert kind(greedy, SamplingParams(logprobs=0)) == "logprobs" and not packed_options(random).tabled


@given(st.lists(st.tuples(PARAMS, st.integers(0, 2**63 - 1), IDS, IDS), min_size=1, max_size=4), st.integers(0, 2**32), st.booleans())
@settings(deadline=None)
def test_steps_of_every_kind_draw_what_the_sampler_draws(drawn: list, noise: int, half: bool) -> None:
    """Three steps by tables that are counted on the device, one of them twice, equal the sampler's, whose counts the host makes."""
    rows: list = [(SamplingParams(**options), *rest) for options, *rest in drawn]
    random, size = torch.Generator().manual_seed(noise), len(rows)
    tables = PenaltyTables.empty(size + 1, VOCAB, torch.device("cpu"))
    tables.marks.fill_(9)  # of other sequences
    tables.biases.fill_(9.0)
    packed: list[Row] = []
    for slot, (params, seed, prompt, output) in enumerate(rows):
        packed.append((packed_options(params), seed, slot if needs_tables(params) else -1))
        tables.fill(slot, prompt, output, dict(params.logit_bias or ()), len(prompt) + len(output))
    before = tables.marks.clone()
    options, least = options_of(packed, size), KINDS.index(kind_of([packed_options(params) for params, *_ in rows]))
    sampling, lengths = build(rows, VOCAB, "cpu"), torch.tensor([len(p) + len(o) for _, _, p, o in rows], dtype=torch.int32)
    newest = torch.tensor([([*p, *o] or [0])[-1] for _, _, p, o in rows], dtype=torch.int32)
    for step in range(3):
        logits = torch.randn(size, VOCAB, generator=random).to(torch.bfloat16 if half else torch.float32)
        want = sample(logits, sampling, lengths)
        for kind in KINDS[least:]:  # a greater kind draws the same, and runs the step again
            got = draw_rows(kind, logits, options, tables, newest, lengths)
            assert got.token_ids.tolist() == want.token_ids.tolist(), (step, kind)
        if want.logprobs is not None:
            assert torch.equal(got.logprobs, want.logprobs)
        for slot, (_, _, placed) in enumerate(packed):
            if sampling.penalties is not None and placed >= 0:
                assert torch.equal(tables.marks[slot] >> 1, sampling.penalties.counts[slot])
            elif placed < 0:
                assert torch.equal(tables.marks[slot], before[slot])
        assert (tables.marks[size] == 9).all()
        sampling, newest, lengths = record(sampling, want.token_ids), want.token_ids, lengths + 1


def test_many_rows_are_drawn_in_pieces() -> None:
    size, random = 2 * PIECE + 5, torch.Generator().manual_seed(0)
    own = packed_options(SamplingParams(temperature=0.5, frequency_penalty=1.0, logprobs=2))
    rows: list[Row] = [(own, row, row % 3 - 1) for row in range(size)]
    tables = PenaltyTables.empty(2, VOCAB, torch.device("cpu"))
    tables.marks.copy_(torch.randint(0, 5, tables.marks.shape, generator=random))
    logits, ones = torch.randn(size, VOCAB, generator=random), torch.ones(size, dtype=torch.int32)
    tables.counted.fill_(5)
    whole = draw_rows("logprobs", logits, options_of(rows, size), tables, ones, ones)
    for row in (0, PIECE - 1, PIECE, size - 1):
        alone = draw_rows("logprobs", logits[row : row + 1], options_of(rows[row : row + 1], 1), tables, ones[:1], ones[:1])
        assert alone.token_ids.item() == whole.token_ids[row].item() and torch.equal(alone.top_ids[0], whole.top_ids[row])


def test_rows_with_masks_have_lines_in_order() -> None:
    """A least length needs a mask only if a token could end the reply."""
    plain, ends = SamplingParams(temperature=0), {"temperature": 0, "min_tokens": 3}
    masked = [SamplingParams(**ends), SamplingParams(bad_words=["a"]), SamplingParams(**ends, ignore_eos=True, stop_token_ids=[3])]
    free = [plain, SamplingParams(**ends, ignore_eos=True)]
    assert mask_lines([(packed_options(p), 0, -1) for p in [free[0], *masked, free[1]]]) == [-1, 0, 1, 2, -1]
    assert [kind_of([packed_options(p)]) for p in free] == ["greedy"] * 2
    assert {kind_of([packed_options(p)]) for p in masked} == {"everything"}
