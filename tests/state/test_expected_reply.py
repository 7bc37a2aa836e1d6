"""How long replies are expected to become."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.state.expected_reply import FIRST, MEMORY, PAID, ReplyLengths, place_of

POOL = 10_000  # tokens
IDS = np.arange(80)
REPLIES = st.lists(st.tuples(st.integers(1, 50_000), st.booleans()), max_size=40)


def learned(replies, known=None):
    """The knowledge after replies of these lengths, of which some ended at their limits."""
    known = known or ReplyLengths()
    for length, at_limit in replies:
        known = known.after_reply(length, at_limit=at_limit)
    return known


def reached(known, generated=0, *, hopeful=False):
    """The lengths that 80 replies with so many tokens are expected to reach. They are the only ones that run, and do not count as such."""
    one = [known.growth(np.array([generated]), np.array([i]), POOL, hopeful=hopeful)[0] for i in IDS]
    return generated + np.array(one)


def test_of_two_kinds_of_replies_both_are_expected():
    known = learned([(10, False), (10, False), (10, False), (1500, False)] * 40)
    new = reached(known)
    assert 0.65 < (new < 20).mean() < 0.85 and ((new < 20) | ((new > 1000) & (new < 2100))).all()
    assert (reached(known, 30) > 1000).all()  # the short ones have ended
    assert (reached(known, 1490) < 2100).mean() > 0.8


def test_before_replies_tell_anything_they_are_long():
    assert place_of(1432) < FIRST < place_of(1433)
    assert (reached(ReplyLengths()) > 1432).all() and (reached(ReplyLengths(), 3000) > 3000).all()


def test_replies_that_run_count_as_those_that_came_so_far():
    """Short replies end first. What they seem to tell about all is put right by those that go on."""
    known = learned([(10, False)] * 20)
    alone = known.growth(np.zeros(80, int), IDS, POOL)
    beside = known.growth(np.repeat([0, 40], 80), np.tile(IDS, 2), POOL)[:80]
    assert (alone > 1000).mean() < 0.1 and (beside > 1000).mean() > 0.8


@given(REPLIES, st.integers(1, 10_000), st.data())
def test_replies_tell_nothing_about_those_that_are_longer(replies, length, data):
    """What ends in lower classes than a reply has come to changes nothing for that reply."""
    known = learned(replies)
    below = st.integers(1, max(1, int(16 * (2 ** (int(place_of(length)) / 2) - 1)) - 1))
    more = learned(data.draw(st.lists(st.tuples(below, st.booleans()))), known)
    if int(place_of(length)):
        assert reached(more, length).tolist() == pytest.approx(reached(known, length).tolist())


@given(REPLIES, st.lists(st.integers(0, 60_000), min_size=1, max_size=30))
def test_every_reply_is_expected_to_grow(replies, generated):
    known = learned(replies)
    before = (known.ended, known.passed, known.debt)
    lengths, ids = np.array(generated), np.arange(len(generated))
    growth = known.growth(lengths, ids, POOL)
    assert np.isfinite(growth).all() and (growth >= 1).all()
    assert (known.growth(lengths, ids, POOL) == growth).all() and (known.ended, known.passed, known.debt) == before
    assert (known.growth(lengths, ids, POOL, hopeful=True) <= growth).all()
    assert (known.after_tokens(0, POOL).growth(lengths, ids, POOL) >= growth).all()


@given(REPLIES, st.integers(1, 50_000))
def test_counts_are_those_of_replies(replies, length):
    """What ended in a class was in it; both forget, so neither exceeds what `MEMORY` can hold."""
    known = learned(replies)
    assert all(0 <= ended <= 2 * passed + 1e-9 for ended, passed in zip(known.ended, known.passed, strict=True))
    assert max(known.passed) <= MEMORY
    assert (reached(known.after_reply(length, at_limit=True)) >= reached(known) - 1e-6).all()  # it could have become longer


def test_a_class_forgets_by_replies_that_reach_it():
    known = learned([(1500, False)] * 50)
    later = learned([(10, False)] * 1000, known)
    at = int(place_of(1500))
    assert later.ended[at] == known.ended[at]
    assert (reached(learned([(300, False)] * 300, later)) < 400).mean() > 0.8


@given(st.lists(st.tuples(st.integers(0, 500), st.sampled_from([0, 0, 100, 3000])), max_size=30))
def test_a_debt_is_paid_by_tokens_that_run(steps):
    known, debt = ReplyLengths(), 0.0
    for num_run, num_lost in steps:
        known, debt = known.after_tokens(num_run, num_lost), max(0.0, debt + num_lost - PAID * num_run)
        assert known.debt == debt
    assert known.after_tokens(10**9).debt == 0


def test_a_debt_brings_caution():
    known = learned([(10, False), (10, False), (10, False), (1500, False)] * 40)
    owing = known.after_tokens(0, POOL)
    assert (reached(owing) > 1000).mean() > (reached(known) > 1000).mean() + 0.3
    assert reached(owing, hopeful=True).tolist() == reached(known, hopeful=True).tolist()
