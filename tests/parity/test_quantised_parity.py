"""Every quantised format stays within the bounds of the page, and a figure out of bounds is told."""

from dataclasses import replace

import pytest

from tests.loading.quantisation.encoders import ENCODERS
from tests.parity.quantised import Row, measure, page


@pytest.mark.parametrize("name", ENCODERS)
def test_a_format_agrees_with_transformers(name: str) -> None:
    row = measure(name)
    assert row.failures == []
    assert (row.reader is None) != name.startswith("compressed")


def test_what_is_out_of_bounds_is_told() -> None:
    good = Row(name="a format", logits=1e-6, reader=None, bound=1e-4, agreed=7, clear=7)
    wrong = [replace(good, logits=2e-4), replace(good, logits=float("nan")), replace(good, reader=2e-4), replace(good, agreed=6)]
    assert good.failures == [] and all(len(each.failures) == 1 for each in [*wrong, replace(good, agreed=0, clear=0)])
    assert "| a format | 1.0e-06 | - | 1.0e-04 | 7 of 7 |" in page([good])
