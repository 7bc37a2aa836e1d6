"""`sample` against a row-by-row form in double precision, its bitwise independence of the batch, and how its tensors are made and kept."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.ops.sampling.uniforms import uniforms
from nanovllm.sampling.params import SamplingParams
from nanovllm.sampling.sampler import record, sample
from nanovllm.sampling.tensors import Features, Sampling, build, features

NO_IDS = np.empty(0, np.int64)
NEUTRAL = (SamplingParams(temperature=0.0), 0, NO_IDS, NO_IDS)
INF = float("inf")


class Borderline(Exception):
    """Whether a token stands just inside or just outside the nucleus is a matter of rounding: such an example says nothing."""


def scores_of(logits, params, prompt, output):
    """The logits over the temperature of one row in float64, -inf where a cut removes the token: what the softmax draws from."""
    x = logits.astype(np.float64)
    for token, bias in params.logit_bias or ():
        x[token] += bias
    for token in {*prompt, *output}:
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(output):
        x[token] -= params.frequency_penalty * list(output).count(token) + params.presence_penalty
    if params.temperature == 0:
        return x
    x = x / params.temperature
    with np.errstate(divide="ignore"):
        x[np.exp(x - x.max()) < params.min_p * (1 - 1e-6)] = -INF
    order = np.argsort(-x, kind="stable")[: params.top_k or len(x)]
    kth = x[order[-1]]
    mass = np.exp(x[order] - x.max())
    if params.top_p < 1:
        before = np.cumsum(mass) - mass
        inside = before < params.top_p * mass.sum()
        if np.any(np.abs(before - params.top_p * mass.sum())[mass > 0] < 1e-5 * mass.sum()):
            raise Borderline
        kth = x[order[inside]].min()
    return np.where(x < kth, -INF, x)


def draws_of(scores, seed, positions):
    """The noisy scores `[positions, V]`."""
    u = uniforms(torch.tensor([[seed, position] for position in positions]), len(scores)).double().numpy()
    return scores - np.log(-np.log1p(-u))


options = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.001, 0.3, 1.0, 1.7, 100.0]),
        "top_k": st.sampled_from([1, 2, 3, 7, 40, 10**6]),
        "top_p": st.sampled_from([1e-9, 0.123, 0.5, 0.9, 0.9999]),
        "min_p": st.sampled_from([1e-6, 0.03, 0.41, 1.0]),
        "repetition_penalty": st.sampled_from([0.5, 1.3, 10.0]),
        "presence_penalty": st.sampled_from([-2.0, 0.7]),
        "frequency_penalty": st.sampled_from([-1.5, 0.4]),
        "logit_bias": st.dictionaries(st.integers(0, 1), st.sampled_from([-100.0, -1.0, 2.5, 100.0]), max_size=2),
        "logprobs": st.sampled_from([0, 2, 20]),
    },
)


VOCABULARIES = st.sampled_from([2, 5, 33, 130])


@st.composite
def batches(draw, max_rows=6, grid=None, vocab=None):
    """(logits, rows, positions) for `made`; a grid of values makes ties common."""
    vocab = draw(VOCABULARIES) if vocab is None else vocab
    ids = st.lists(st.integers(0, min(vocab, 6) - 1), max_size=6).map(lambda i: np.array(i, np.int32))
    rows = draw(st.lists(st.tuples(options, st.integers(0, 2**63 - 1), ids, ids), min_size=1, max_size=max_rows))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([0.1, 2.0, 8.0]))
    logits = rng.normal(0, spread, (len(rows), vocab)).astype(np.float32)
    if draw(st.booleans()) if grid is None else grid:
        logits = np.round(logits * 2) / 2
    positions = draw(st.lists(st.integers(0, 2**31 - 1), min_size=len(rows), max_size=len(rows)))
    return torch.from_numpy(logits), rows, torch.tensor(positions, dtype=torch.int32)


@given(batches(grid=False, max_rows=3), st.booleans())
@settings(deadline=None, max_examples=100)
def test_equals_the_reference(batch, all_random):
    logits, rows, _ = made(batch)
    if all_random:
        rows = [(dataclasses.replace(p, temperature=p.temperature or 0.7), *rest) for p, *rest in rows]
    draws = 40  # of every row, so that a token wrongly kept or left out shows
    positions = torch.arange(draws).repeat(len(rows))
    many_rows = [row for row in rows for _ in range(draws)]
    out = sample(logits.repeat_interleave(draws, 0), build(many_rows, logits.shape[1], "cpu"), positions)
    for b, (params, seed, prompt, output) in enumerate(rows):
        try:
            scores = scores_of(logits[b].numpy(), params, prompt, output)
        except Borderline:
            continue
        # float32 cannot tell scores apart that are closer than this
        tolerance = 1e-5 * max(1.0, np.abs(scores[scores > -INF]).max())
        final = draws_of(scores, seed, range(draws)) if params.temperature > 0 else np.tile(scores, (draws, 1))
        tokens = out.token_ids[b * draws : (b + 1) * draws].numpy()
        assert np.all(final[np.arange(draws), tokens] >= final.max(1) - tolerance)


@given(batches())
@settings(deadline=None)
def test_logprobs_are_those_of_the_untouched_logits(batch):
    logits, rows, positions = made(batch)
    out = sample(logits, build(rows, logits.shape[1], "cpu"), positions)
    wanted = [p.logprobs for p, *_ in rows if p.logprobs is not None]
    if not wanted:
        assert out.logprobs is None and out.top_ids is None and out.top_logprobs is None
        return
    expected = logits.double().log_softmax(1)
    torch.testing.assert_close(out.logprobs.double(), expected.gather(1, out.token_ids.long()[:, None])[:, 0], rtol=1e-5, atol=1e-5)
    if max(wanted) == 0:
        assert out.top_ids is None and out.top_logprobs is None
        return
    count = min(20, logits.shape[1])
    assert out.top_ids.shape == out.top_logprobs.shape == (len(rows), count)
    torch.testing.assert_close(out.top_logprobs.double(), expected.sort(1, descending=True).values[:, :count], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.top_logprobs.double(), expected.gather(1, out.top_ids.long()), rtol=1e-5, atol=1e-5)
    assert all(len(set(row)) == count for row in out.top_ids.tolist())


def made(batch):
    """Options are built here, not in the strategy: the type checks of the import hook use `random`, which a strategy must not."""
    logits, rows, positions = batch
    return logits, [(SamplingParams(**o), *rest) for o, *rest in rows], positions


def same(a, b):
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@given(batches(max_rows=16), st.integers(0, 3), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=80)
def test_a_row_is_bitwise_the_same_alone_and_anywhere_in_any_batch(batch, padding, order):
    logits, rows, positions = made(batch)
    places = list(range(len(rows) + padding))
    order.shuffle(places)
    chosen = [p for p in places if p < len(rows)]
    sampling = build([rows[p] for p in chosen] + [NEUTRAL] * padding, logits.shape[1], "cpu")
    at = torch.tensor(chosen + [0] * padding)
    together = sample(logits[at], sampling, positions[at])
    for place, row in enumerate(chosen):
        alone = sample(logits[row : row + 1], build([rows[row]], logits.shape[1], "cpu"), positions[row : row + 1])
        assert together.token_ids[place] == alone.token_ids[0]
        if alone.logprobs is not None:
            assert same(together.logprobs[place], alone.logprobs[0])
        if alone.top_ids is not None:
            assert torch.equal(together.top_ids[place], alone.top_ids[0]) and same(together.top_logprobs[place], alone.top_logprobs[0])


@given(batches())
@settings(deadline=None, max_examples=100)
def test_how_many_candidates_are_examined_changes_nothing(batch):
    logits, rows, positions = made(batch)
    sampling = build(rows, logits.shape[1], "cpu")
    tokens = sample(logits, sampling, positions).token_ids
    wider = [c for c in (32, 128, 1024) if sampling.num_candidates is not None and c >= sampling.num_candidates]
    for candidates in (None, *wider):
        other = dataclasses.replace(sampling, num_candidates=candidates)
        assert torch.equal(tokens, sample(logits, other, positions).token_ids)


@pytest.mark.parametrize("threads", [1, 2])
def test_bitwise_batch_invariance_at_a_large_vocabulary(threads):
    """Long rows are where torch splits work among threads and vectors."""
    before, vocab = torch.get_num_threads(), 40_001
    torch.set_num_threads(threads)
    try:
        logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(1)) * 3
        params = [
            SamplingParams(logprobs=3),
            SamplingParams(top_p=0.9, temperature=1.5),
            SamplingParams(min_p=0.02, top_k=50, top_p=0.99),
            SamplingParams(temperature=0.0, frequency_penalty=1.0),
            SamplingParams(top_k=1000, repetition_penalty=1.2),
        ]
        rows = [(p, i, np.arange(i * 7), np.arange(i)) for i, p in enumerate(params)]
        for position in range(2):
            positions = torch.full((5,), position)
            together = sample(logits, build(rows, vocab, "cpu"), positions)
            for b, row in enumerate(rows):
                alone = sample(logits[b : b + 1], build([row], vocab, "cpu"), positions[:1])
                assert alone.token_ids[0] == together.token_ids[b]
                if alone.logprobs is not None:
                    assert same(alone.logprobs[0], together.logprobs[b])
    finally:
        torch.set_num_threads(before)


def many(params, logits, count, seed=1, prompt=NO_IDS, output=NO_IDS):
    """`count` draws of one row, at positions 0, 1, ..."""
    sampling = build([(params, seed, prompt, output)] * count, len(logits), "cpu")
    return sample(torch.tensor(logits).expand(count, -1), sampling, torch.arange(count)).token_ids


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=2.0),
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.2),
        SamplingParams(temperature=1.3, top_k=5, top_p=0.9, min_p=0.05),
        SamplingParams(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.3),
        SamplingParams(logit_bias={0: -1.0, 7: 2.0}),
    ],
    ids=lambda p: ",".join(f"{f.name}={getattr(p, f.name)}" for f in dataclasses.fields(p) if getattr(p, f.name) != f.default),
)
def test_distribution(params):
    """Chi-square of 20,000 draws; seeds and positions are fixed, so the test cannot flicker."""
    logits, prompt, output, count = [1.0, 0.2, -0.5, 2.0, 0.0, -3.0, 1.1, -1.0], np.array([3, 1]), np.array([6, 6, 0]), 20_000
    scores = scores_of(np.array(logits, np.float32), params, prompt, output)
    expected = np.exp(scores - scores.max())
    expected *= count / expected.sum()
    observed = np.bincount(many(params, logits, count, prompt=prompt, output=output), minlength=8)
    assert np.all(observed[expected == 0] == 0)
    kept = expected > 0
    chi2 = ((observed - expected)[kept] ** 2 / expected[kept]).sum()
    freedom = kept.sum() - 1
    assert chi2 < freedom + 4 * np.sqrt(2 * freedom) + 8


def test_a_flat_distribution_over_many_tokens():
    """Coarse random numbers would tie near the maximum, and ties go to low ids."""
    vocab, count = 20_000, 1_000
    tokens = np.concatenate([many(SamplingParams(), [0.0] * vocab, 50, seed=seed) for seed in range(count // 50)])
    quarters = np.bincount(tokens * 4 // vocab, minlength=4)
    assert ((quarters - count / 4) ** 2 / (count / 4)).sum() < 21  # 3 degrees of freedom, 1e-4
    assert len(np.unique(tokens)) > 0.95 * count  # 2.5% of the draws repeat an earlier one


def test_seeds_reproduce_and_positions_are_independent():
    logits = [0.0] * 16
    first, again, other = (many(SamplingParams(), logits, 4000, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    for a, b in ((first, other), (first[1:], first[:-1]), (first[7:], first[:-7])):
        assert abs((a == b).float().mean() - 1 / 16) < 4 * (1 / 16 / 4000) ** 0.5


def test_ties_at_every_cut_are_kept_together():
    logits = [2.0, 1.0, 1.0, 1.0, 0.0]
    assert set(many(SamplingParams(top_k=2), logits, 500).tolist()) == {0, 1, 2, 3}
    assert set(many(SamplingParams(top_p=0.6), logits, 500).tolist()) == {0, 1, 2, 3}
    assert set(many(SamplingParams(min_p=0.3), logits, 500).tolist()) == {0, 1, 2, 3}
    assert set(many(SamplingParams(min_p=1.0), [1.0, 1.0, 0.99], 500).tolist()) == {0, 1}
    assert set(many(SamplingParams(top_p=1e-9), [1.0, 1.0, 0.99], 500).tolist()) == {0, 1}
    assert many(SamplingParams(temperature=0.0), [0.0, 1.0, 1.0], 3).tolist() == [1, 1, 1]
    # Of the mass of two tokens, token 0 has 73%: below 73% it stands alone, above that the tie comes in
    assert set(many(SamplingParams(top_k=2, top_p=0.72), logits, 500).tolist()) == {0}
    assert set(many(SamplingParams(top_k=2, top_p=0.74), logits, 500).tolist()) == {0, 1, 2, 3}


def test_a_mass_that_is_reached_exactly_needs_no_further_token():
    """Token 0 has exactly half of the mass, as the weights are counted."""
    half = -np.log(2).item()
    assert torch.exp(torch.tensor([0.0, half, half])).tolist() == [1.0, 0.5, 0.5]
    logits = [0.0, half, half]
    assert set(many(SamplingParams(top_p=0.5), logits, 200).tolist()) == {0}
    assert set(many(SamplingParams(top_p=0.5000001), logits, 200).tolist()) == {0, 1, 2}


def test_a_token_at_exactly_min_p_counts_for_the_mass():
    logits = [0.0, np.log(np.float32(0.5)).item(), -4.0]
    assert set(many(SamplingParams(min_p=0.5), logits, 200).tolist()) == {0, 1}
    assert set(many(SamplingParams(min_p=0.5, top_p=0.9), logits, 200).tolist()) == {0, 1}  # of a mass of 1.5 token 0 has two thirds


def test_each_cut_sees_what_the_one_before_left():
    logits = np.log([0.4, 0.3, 0.2, 0.1]).tolist()
    assert set(many(SamplingParams(top_p=0.55), logits, 300).tolist()) == {0, 1}
    assert set(many(SamplingParams(top_p=0.55, top_k=2), logits, 300).tolist()) == {0}  # 0.4 / 0.7
    assert set(many(SamplingParams(top_p=0.55, min_p=0.6), logits, 300).tolist()) == {0}
    assert set(many(SamplingParams(top_p=0.6, min_p=0.6), logits, 300).tolist()) == {0, 1}
    assert set(many(SamplingParams(top_k=3, min_p=0.6), logits, 300).tolist()) == {0, 1}
    assert set(many(SamplingParams(top_k=1, min_p=0.6), logits, 300).tolist()) == {0}
    assert set(many(SamplingParams(min_p=0.6, temperature=2.0), logits, 300).tolist()) == {0, 1, 2}  # (0.2 / 0.4) ** 0.5 is 0.71


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_k=2, top_p=0.5, min_p=0.1)])
def test_rows_without_a_proper_maximum_stay_in_the_vocabulary_and_alone(params):
    rows = [[-INF] * 5, [0.0, float("nan"), 1.0, 2.0, 3.0], [float("nan")] * 5, [INF, 0.0, INF, -INF, 1.0], [1.0, 2.0, 3.0, 4.0, 5.0]]
    sampling = build([(params, b, NO_IDS, NO_IDS) for b in range(5)], 5, "cpu")
    tokens = sample(torch.tensor(rows), sampling, torch.arange(5)).token_ids
    assert tokens[0] == 0 and all(0 <= t < 5 for t in tokens.tolist())
    alone = build([(params, 4, NO_IDS, NO_IDS)], 5, "cpu")
    assert tokens[4] == sample(torch.tensor(rows[4:]), alone, torch.tensor([4])).token_ids[0]
    for count in range(50):
        masked = torch.tensor([[-INF, 1.0, -INF, 0.5, -INF]])
        assert sample(masked, build([(params, 0, NO_IDS, NO_IDS)], 5, "cpu"), torch.tensor([count])).token_ids.item() in (1, 3)


def test_reads_half_precision_logits():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows = [(SamplingParams(temperature=t, top_k=9, logprobs=1), 3, NO_IDS, NO_IDS) for t in (0.0, 0.5, 1.0, 2.0)]
    half, full = (sample(x, build(rows, 50, "cpu"), torch.arange(4)) for x in (logits, logits.float()))
    assert torch.equal(half.token_ids, full.token_ids) and same(half.logprobs, full.logprobs)


@given(batches(max_rows=4), st.lists(st.integers(0, 1), min_size=1, max_size=5))
@settings(deadline=None)
def test_record_counts_as_a_longer_output_does(batch, drawn):
    logits, rows, positions = made(batch)
    rows = [(dataclasses.replace(p, presence_penalty=0.5), *rest) for p, *rest in rows]
    sampling = build(rows, logits.shape[1], "cpu")
    counts = sampling.penalties.counts
    for token in drawn:
        sampling = record(sampling, torch.full((len(rows),), token, dtype=torch.int32))
    assert sampling.penalties.counts is counts  # in place
    longer = [(p, seed, prompt, np.concatenate([output, np.array(drawn, np.int32)])) for p, seed, prompt, output in rows]
    expected = build(longer, logits.shape[1], "cpu")
    assert torch.equal(counts, expected.penalties.counts)
    assert torch.equal(sample(logits, sampling, positions).token_ids, sample(logits, expected, positions).token_ids)


def test_record_without_penalties_does_nothing():
    sampling = build([(SamplingParams(), 0, NO_IDS, NO_IDS)], 4, "cpu")
    assert record(sampling, torch.tensor([1], dtype=torch.int32)) is sampling


def test_features_name_what_is_on():
    greedy, plain = SamplingParams(temperature=0.0), SamplingParams()
    assert features([]) == features([greedy]) == Features()
    assert features([greedy, plain]) == Features(temperature=True)
    # Cuts of a greedy row do not count
    assert features([SamplingParams(temperature=0.0, top_k=5, top_p=0.5, min_p=0.5)]) == Features()
    assert features([SamplingParams(top_k=20, top_p=0.9), plain]) == Features(temperature=True, top_k=True, top_p=True, num_candidates=32)
    assert features([SamplingParams(top_k=20), SamplingParams(top_k=33)]).num_candidates == 128
    assert features([SamplingParams(top_k=20), SamplingParams(top_p=0.9)]).num_candidates is None
    assert features([SamplingParams(top_k=5000)]).num_candidates is None
    assert [features([SamplingParams(logprobs=n)]).num_logprobs for n in (None, 0, 1, 20)] == [None, 0, 20, 20]
    assert features([SamplingParams(temperature=0.0, presence_penalty=1.0, logit_bias={1: 1.0})]) == Features(
        penalties=True, logit_bias=True
    )
    assert features([plain]) != features([greedy])


def test_fields_that_are_off_are_none():
    sampling = build([(SamplingParams(temperature=0.0), 3, NO_IDS, NO_IDS)], 4, "cpu")
    assert sampling.seeds.tolist() == [3]
    assert all(getattr(sampling, f.name) is None for f in dataclasses.fields(Sampling) if f.name != "seeds")


COMPILED = [
    [SamplingParams(temperature=0.0)],
    [SamplingParams(temperature=0.6, top_k=20, top_p=0.95), SamplingParams()],
    [
        SamplingParams(temperature=0.8, top_p=0.9, min_p=0.02, logprobs=2),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.1),
        SamplingParams(temperature=1.5, top_k=7, logit_bias={3: 2.0}),
    ],
]


@pytest.mark.compile
@pytest.mark.parametrize("params", COMPILED, ids=["greedy", "candidates", "everything"])
def test_compiled_equals_eager(params):
    """Several steps in one graph each, the state going from one to the next, counts written in place."""

    def step(logits, sampling, positions):
        out = sample(logits, sampling, positions)
        return out, record(sampling, out.token_ids)

    rows = [(p, 11 + i, np.array([1, 2]), np.array([3, 3])) for i, p in enumerate(params)]
    compiled = torch.compile(step, fullgraph=True)
    rows += [NEUTRAL] * (4 - len(rows))
    eager_state, compiled_state = build(rows, 97, "cpu"), build(rows, 97, "cpu")
    generator = torch.Generator().manual_seed(0)
    for position in range(6):
        logits, positions = torch.randn(4, 97, generator=generator) * 3, torch.full((4,), position, dtype=torch.int32)
        with torch.no_grad():
            expected, eager_state = step(logits, eager_state, positions)
            found, compiled_state = compiled(logits, compiled_state, positions)
        assert torch.equal(found.token_ids, expected.token_ids)
        if expected.logprobs is not None:
            torch.testing.assert_close(found.logprobs, expected.logprobs)
        if expected.top_logprobs is not None:
            torch.testing.assert_close(found.top_logprobs, expected.top_logprobs)
        if eager_state.penalties is not None:
            assert torch.equal(eager_state.penalties.counts, compiled_state.penalties.counts)
