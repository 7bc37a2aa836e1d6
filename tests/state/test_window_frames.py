"""Frames of sliding-window layers: how many a window needs, which pages retire, and the order in which spare frames are taken."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.errors import BrokenInvariantError
from nanovllm.state import lru as age_ops
from nanovllm.state import pool as pools
from nanovllm.state.window_frames import init_frames, least_frames, num_retired


def ids(*pages):
    return np.array(pages, np.int32)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("window", range(1, 10))
def test_the_fewest_frames_are_the_most_pages_that_a_window_lies_in(window, size):
    seen = [range(max(0, at - window + 1), at + 1) for at in range(40)]
    assert least_frames(window, size) == max(len({token // size for token in tokens}) for tokens in seen)


@given(st.integers(0, 20), st.integers(1, 20), st.integers(1, 12), st.integers(1, 4))
def test_pages_retire_once_no_token_to_come_sees_them(filled, tokens, window, size):
    filled = min(filled, tokens)
    first = filled if filled < tokens else tokens - 1  # the last token runs again for its logits
    unseen = [page for page in range(20) if (page + 1) * size <= first - window + 1]
    assert num_retired(filled, tokens, window, size) == len(unseen)


@given(st.data())
def test_pages_are_taken_in_the_order_in_which_they_came(data):
    ages, shadow = age_ops.init_ages(12), []
    for _ in range(data.draw(st.integers(1, 12))):
        match data.draw(st.sampled_from(["add", "add", "remove", "take"])):
            case "add":
                left = [page for page in range(12) if page not in shadow]
                pages = data.draw(st.lists(st.sampled_from(left), unique=True, max_size=4)) if left else []
                ages = age_ops.add(ages, ids(*pages))
                shadow += pages
            case "remove":
                pages = data.draw(st.lists(st.integers(0, 11), unique=True, max_size=4))
                ages = age_ops.remove(ages, ids(*pages))
                shadow = [page for page in shadow if page not in pages]
            case "take":
                count = data.draw(st.integers(0, len(shadow)))
                ages, taken = age_ops.take(ages, count)
                assert taken.tolist() == shadow[:count]
                shadow = shadow[count:]
        assert ages.pages() == shadow and ages.count == len(shadow)
    with pytest.raises(BrokenInvariantError, match="spare pages were wanted"):
        age_ops.take(ages, len(shadow) + 1)


def test_a_prefix_is_reusable_where_its_last_window_has_frames():
    """Page 0 has lost its frame, and no token after the second page sees it."""
    pool = pools.init_pool(4, 2, init_frames(2, 4, window=3, alone=False))
    done = pools.allocate(pool, 2)
    assert done is not None
    pool, held = done
    pool = pools.insert(pool, ids(1, 2, 3, 4), ids(*held))
    pool = pools.retire(pool, held[:1])
    done = pools.allocate(pool, 1)  # takes the spare frame
    assert done is not None
    pool = pools.release(done[0], held, 1)
    for tokens, whole, expected in (
        (ids(1, 2, 3, 4, 5), False, (list(held), 1)),
        (ids(1, 2, 3, 4), False, ([], 0)),  # token 3 runs again and sees page 0
        (ids(1, 2, 3, 4, 5), True, ([], 0)),
    ):
        matched, retired = pools.reusable(pool, tokens, whole=whole)
        assert (matched.tolist(), retired) == expected
