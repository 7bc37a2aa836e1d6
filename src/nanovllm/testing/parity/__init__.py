"""Every architecture beside transformers: `measure` compares one of `CASES`, `python -m nanovllm.testing.parity` all of them."""

from .cases import CASES, Case
from .measure import Measures, measure, measured
from .pair import Pair, build

__all__ = ["CASES", "Case", "Measures", "Pair", "build", "measure", "measured"]
