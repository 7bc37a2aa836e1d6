"""Fixtures of the tests of engines."""

import pytest

from nanovllm.engine import host_copies


@pytest.fixture
def nothing_ahead(monkeypatch) -> None:
    """Pages are copied only when they are evicted."""
    monkeypatch.setattr(host_copies, "keep_ahead", lambda *_: None)
