"""Keys of pages are the same whether they are made from tokens or from the index, and differ when any earlier token does."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.state import prefix_cache
from nanovllm.state.prefix_cache import ROOT, init_prefix
from nanovllm.state.prefix_keys import KEY_BYTES, keys_from, keys_of


def ints(values) -> np.ndarray:
    return np.array(values, np.int32)


@given(st.lists(st.integers(0, 1), max_size=12), st.integers(1, 3), st.integers(0, 3), st.integers(0, 2))
def test_keys_can_be_made_from_any_page_on(tokens, size, start, namespace):
    whole = list(keys_from(ints(tokens), 0, size, namespace))
    assert len(whole) == len(tokens) // size
    assert list(keys_from(ints(tokens), start, size, namespace)) == whole[start:]
    assert all(len(key) == KEY_BYTES for key in whole)


@given(st.lists(st.lists(st.integers(0, 1), max_size=8), max_size=6), st.integers(1, 3), st.integers(0, 2))
def test_indexed_pages_have_the_keys_of_their_tokens(runs, size, namespace):
    index, root, page, expected = init_prefix(64, size), ROOT - namespace, 0, {}
    for tokens in runs:
        held = prefix_cache.match(index, ints(tokens), root)
        count = len(tokens) // size
        pages = np.concatenate([held, np.arange(page, page + count - len(held), dtype=np.int32)])
        page += count - len(held)
        index, added = prefix_cache.insert(index, ints(tokens), pages, root)
        keys = list(keys_from(ints(tokens), 0, size, namespace))
        expected |= {int(one): keys[pages.tolist().index(one)] for one in added.tolist()}
    pages = ints(sorted(expected, reverse=True))
    assert keys_of(index, pages) == [expected[at] for at in pages.tolist()]


@given(st.lists(st.integers(0, 3), min_size=2, max_size=9), st.data())
def test_a_key_commits_to_every_earlier_token_and_to_the_namespace(tokens, data):
    (*_, last) = keys_from(ints(tokens), 0, 1)
    place = data.draw(st.integers(0, len(tokens) - 1))
    other = [*tokens[:place], tokens[place] + 1, *tokens[place + 1 :]]
    assert list(keys_from(ints(other), 0, 1))[-1] != last
    assert list(keys_from(ints(tokens), 0, 1, namespace=1))[-1] != last
