"""Every test of a GPU starts without a record of passed checks, which tests of wrong kernels would otherwise find."""

from pathlib import Path

import pytest

from nanovllm.models.check import passed


@pytest.fixture(autouse=True)
def no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of its own for the record."""
    monkeypatch.setattr(passed, "cache_folder", lambda: tmp_path)
