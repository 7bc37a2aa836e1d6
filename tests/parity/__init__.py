"""Compare every architecture with transformers: `measure` compares one of `CASES`, `python -m tests.parity` compares all."""

from tests.parity.cases import CASES, Case
from tests.parity.measure import Measures, measure, measured
from tests.parity.pair import Pair, build

__all__ = ["CASES", "Case", "Measures", "Pair", "build", "measure", "measured"]
