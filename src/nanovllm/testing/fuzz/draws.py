"""`Draws`: what rules draw in a written test."""

from typing import Any

from hypothesis import strategies as st

from nanovllm.errors import InvalidRequestError


class Draws(st.DataObject):
    """Stands for `st.data()` where a test calls rules by hand: each draw returns the next of the given values.

    Args:
        *values: The values, in the order of the draws.

    Raises:
        InvalidRequestError: By `draw`: all values have been drawn. The rule now draws more than when the test was written.

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
            raise InvalidRequestError(f"the rule draws more than the {len(self.values)} values given: it has changed since they were drawn")
        self.place += 1
        return self.values[self.place - 1]
