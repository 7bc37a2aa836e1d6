"""How long replies become, learned from the tokens that an engine ran: what admission expects of those that run, and of those that wait.

The limits of replies (`max_tokens`) are known, but many replies end long before. So lengths are put into classes, two for each doubling.
For each class two counts are kept: the replies that ended in it, and the replies that were in it. Their ratio is the chance to end there.
This is the Kaplan-Meier estimate. It has three properties that a mean length has not:

- Replies that still run count too, in the classes that they are past. Short replies end first, and alone they would look like all replies.
- A reply that is already long is compared with long ones only.
- A class forgets only by replies that reach it. So a thousand short replies change nothing about long ones.

Before replies tell anything, one is imagined. It ends nowhere in the first `FIRST` classes, and in each later one with a chance of
`LATER`.

Each reply is expected to reach a length of its own. Its request's number gives it a chance, evenly spread from `LEAST` to `MOST`, and it is
expected to reach the length that so many of the replies do not exceed that have become as long as it is now. So of many replies some are
expected to be short, and some long, as they are. The extremes are left out: to reserve for them would leave memory empty.

Preemption is the sign that this was too hopeful. What it loses is a debt, in tokens, and each token that runs pays for `PAID` of a token.
While there is a debt, the chances are greater.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from nanovllm.types import brief_fields

NUM_CLASSES = 40  # classes of lengths; the last begins at eight million tokens
SHORT = 16  # tokens of a reply below which lengths are put into classes evenly
FIRST, LATER = 13, 0.15  # class 13 begins at 1,432 tokens
MEMORY = 32  # after so many replies in a class, those before count 1/e
LEAST, MOST = 0.1, 0.9
PAID = 0.04  # tokens of a debt that each token pays
CAUTION = 4.0  # how much a debt of as many tokens as the pool has matters
GOLDEN = (5**0.5 - 1) / 2  # its multiples, modulo 1, are spread evenly

_BEFORE = np.where(np.arange(NUM_CLASSES) < FIRST, 0.0, LATER)
_EDGES = np.arange(NUM_CLASSES + 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyLengths:
    """What an engine knows about the lengths of its replies.

    Attributes:
        ended: For each class of lengths the replies that ended in it, older ones for less than 1.
        passed: For each class the replies that were in it, a part of one for each that ended in it.
        debt: Tokens that preemption lost, less what was paid since.
    """

    ended: tuple[float, ...] = (0.0,) * NUM_CLASSES
    passed: tuple[float, ...] = (0.0,) * NUM_CLASSES
    debt: float = 0.0

    def __repr__(self) -> str:
        return brief_fields(self)

    def after_reply(self, num_generated: int, *, at_limit: bool) -> "ReplyLengths":
        """The knowledge after the end of a reply. One that ended at its limit (`at_limit`) could have become longer."""
        place = float(place_of(num_generated))
        last = min(int(place), NUM_CLASSES - 1)
        ended, passed = list(self.ended), list(self.passed)
        for at in range(last + 1):
            part = 1.0 if at < last else place - last if at_limit else max(place - last, 0.5)
            ended[at] *= 1 - part / MEMORY
            passed[at] += part * (1 - passed[at] / MEMORY)
        ended[last] += not at_limit
        return ReplyLengths(ended=tuple(ended), passed=tuple(passed), debt=self.debt)

    def after_tokens(self, num_run: int, num_lost: int = 0) -> "ReplyLengths":
        """The knowledge after a step that ran `num_run` tokens and lost `num_lost` to preemption."""
        debt = max(0.0, self.debt + num_lost - PAID * num_run)
        return self if debt == self.debt else ReplyLengths(ended=self.ended, passed=self.passed, debt=debt)

    def growth(self, generated: np.ndarray, request_ids: np.ndarray, num_tokens: int, *, hopeful: bool = False) -> np.ndarray:
        """How many more tokens each of these replies is expected to get.

        Args:
            generated: The tokens that each reply has.
            request_ids: The numbers of their requests.
            num_tokens: The tokens of the pool.
            hopeful: Halve the chances, whatever the debt is, so that no reply is expected to be long without need.
        """
        places = place_of(generated)
        never = np.concatenate(([0.0], self._hazards(places).cumsum()))  # minus the logarithm of the chance to come to each class
        chances = LEAST + (MOST - LEAST) * ((request_ids * GOLDEN + 0.5) % 1)
        chances = chances / 2 if hopeful else chances ** (1 / (1 + CAUTION * self.debt / num_tokens))
        reached = np.interp(np.interp(places, _EDGES, never) - np.log(1 - chances), never, _EDGES)
        return np.maximum(SHORT * (np.exp2(reached / 2) - 1) - generated, 1)

    def _hazards(self, places: np.ndarray) -> np.ndarray:
        """For each class the rate at which replies end in it, if replies at these places run."""
        classes = np.minimum(places.astype(np.intp), NUM_CLASSES - 1)
        count = np.bincount(classes, minlength=NUM_CLASSES)
        part = np.bincount(classes, places - classes, NUM_CLASSES)
        running = count[::-1].cumsum()[::-1] - count + part
        return np.clip((_BEFORE + self.ended) / (1 + running + self.passed), 1e-4, 5)


def place_of(length: Any) -> Any:
    """Where a length, or each of an array, is among the classes: the number of its class, and how far it is in it.

    Examples:
        >>> float(place_of(16)), float(place_of(112))
        (2.0, 6.0)
    """
    return 2 * np.log2(1 + length / SHORT)
