"""A live server that the tests of a process share."""

from collections.abc import Iterator

import pytest

from tests.entrypoints.server.live import Live


@pytest.fixture(scope="session")
def live() -> Iterator[Live]:
    """A server for the packaged model."""
    with Live() as server:
        yield server
