"""Fixtures of the tests of engines."""

from collections.abc import Iterator

import pytest

from nanovllm.engine import host_copies


@pytest.fixture
def nothing_ahead() -> Iterator[None]:
    """Pages are copied only when they are evicted, so that no thread writes them to the disk before a test says so."""
    with pytest.MonkeyPatch.context() as patch:  # of its own: a test may undo its patches
        patch.setattr(host_copies, "keep_ahead", lambda *_: None)
        yield
