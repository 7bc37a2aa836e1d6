"""`PageState`: what the machine does not say by itself."""

import pytest

from nanovllm.errors import BrokenInvariantError
from nanovllm.state.pages import allocate, free_pages, give_back, init_pages, release, require_writable, retain


def taken(pages, count):
    done = allocate(pages, count)
    assert done is not None
    return done


def test_pages_come_back_newest_first():
    pages, _ = taken(init_pages(4), 3)
    pages = release(release(pages, [0]), [2])
    assert taken(pages, 2)[1] == (2, 0)
    assert free_pages(pages) == [2, 0, 3]


@pytest.mark.parametrize(
    ("run", "once", "left"), [([2, 0], [2, 0], [1, 0]), ([2, 1, 2, 0], [2, 1, 0], [0, 0, 0]), ([1], [1], [0]), ([], [], [])]
)
def test_pages_that_are_given_back_are_told_once_and_in_order(run, once, left):
    pages, _ = taken(init_pages(4), 3)
    after, given, owners = give_back(retain(pages, [2]), run)
    assert given.tolist() == once and owners.tolist() == left
    assert [after.refcount(page) for page in once] == left
    assert free_pages(after) == [*[page for page, n in zip(once, left, strict=True) if not n][::-1], 3]


def test_a_page_given_back_twice_keeps_the_owners_that_it_has_left():
    pages, _ = taken(init_pages(4), 3)
    pages = retain(pages, [2, 2])
    assert pages.refcounts == {0: 1, 1: 1, 2: 3}
    after, given, owners = give_back(pages, [2, 0, 2])
    assert given.tolist() == [2, 0] and owners.tolist() == [1, 0]
    assert after.refcounts == {1: 1, 2: 1} and free_pages(after) == [0, 3]


def test_too_few_is_none_and_nothing_is_taken():
    pages, _ = taken(init_pages(3), 2)
    assert allocate(pages, 2) is None
    assert pages.num_free == 1


@pytest.mark.parametrize(
    ("call", "run", "words"),
    [
        (release, [1], "page 1 is free already"),
        (release, [0, 0], "page 0 is free already"),
        (retain, [2], "page 2 is free"),
        (require_writable, [2], "page 2 has 0 owners"),
    ],
)
def test_errors_name_the_page(call, run, words):
    pages, _ = taken(init_pages(3), 1)
    with pytest.raises(BrokenInvariantError, match=words):
        call(pages, run)
    assert pages.refcount(0) == 1


def test_a_shared_page_is_not_writable():
    pages, _ = taken(init_pages(1), 1)
    require_writable(pages, [0])
    with pytest.raises(BrokenInvariantError, match="2 owners"):
        require_writable(retain(pages, [0]), [0])


def test_a_call_that_raises_leaves_the_value():
    pages, _ = taken(init_pages(3), 2)
    with pytest.raises(BrokenInvariantError):
        release(pages, [0, 2])
    assert [pages.refcount(page) for page in range(3)] == [1, 1, 0]


def test_a_long_free_list_is_no_deep_recursion():
    pages, held = taken(init_pages(200_000), 200_000)
    pages = release(pages, held)
    assert pages.num_free == 200_000
    del pages
