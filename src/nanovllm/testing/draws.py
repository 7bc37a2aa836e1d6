"""`Draws`: what rules draw in a written test."""

from typing import Any
from unittest import SkipTest

from hypothesis import strategies as st


class Draws(st.DataObject):
    """Stands for `st.data()` where a test calls rules by hand: each draw returns the next of the given values.

    Args:
        *values: The values, in the order of the draws.

    Raises:
        unittest.SkipTest: By `draw`: all values have been drawn. The call that failed goes on now, and draws more than it did.

    Examples:
        >>> from nanovllm.testing import Draws
        >>> data = Draws(3, [0, 1])
        >>> data.draw(None), data.draw(None)
        (3, [0, 1])
    """

    def __init__(self, *values: Any):
        self.values, self.place = values, 0

    def draw(self, strategy: Any, label: Any = None) -> Any:
        """The next value. `strategy` and `label` are ignored."""
        if self.place == len(self.values):
            raise SkipTest(f"the call goes on after the {len(self.values)} draws that it made when the test was written")
        self.place += 1
        return self.values[self.place - 1]
