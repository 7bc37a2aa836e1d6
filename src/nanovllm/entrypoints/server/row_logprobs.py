"""The log-probabilities of one reply in a front end, until the events that show their tokens."""

from array import array
from bisect import bisect_left
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from nanovllm.entrypoints.server.text_places import TextPlaces
from nanovllm.entrypoints.server.wire import Ended, Scored


class Listed(NamedTuple):
    """One token as answers list it.

    Attributes:
        token_id: The token.
        place: Where its text begins, in characters.
        logprob: Its log-probability; None for the first token of a prompt.
        top: The most probable tokens in its place, highest first, with their log-probabilities.
    """

    token_id: int
    place: int
    logprob: float | None
    top: list[tuple[int, float]]


class RowLogprobs:
    """Tokens with their log-probabilities, in the order in which they came. What is taken is forgotten.

    Args:
        places: Where the tokens' texts begin.
        stop_ids: The tokens that end the reply.
        start: The characters before the reply.
    """

    __slots__ = ("_places", "_start", "_stop_ids", "_text", "_token_ids", "_top_ids", "_top_values", "_values")

    def __init__(self, places: TextPlaces, stop_ids: frozenset[int] = frozenset(), start: int = 0) -> None:
        self._text, self._stop_ids, self._start = places, stop_ids, start
        self._token_ids, self._places = array("i"), array("q")
        self._values, self._top_ids, self._top_values = array("f"), array("i"), array("f")

    def push(self, token_ids: Iterable[int]) -> None:
        """Add tokens."""
        for token_id in token_ids:
            self._token_ids.append(token_id)
            self._places.append(self._text.push(token_id))

    def add(self, scored: Scored | None) -> None:
        """Add the log-probabilities of tokens, which are pushed before or after."""
        if scored is not None:
            self._values.frombytes(scored.logprobs)
            self._top_ids.frombytes(scored.top_ids)
            self._top_values.frombytes(scored.top_logprobs)

    def take(self, shown: int) -> list[Listed]:
        """The tokens whose text begins in the first `shown` characters of the reply."""
        return self._take(bisect_left(self._places, shown))

    def take_all(self) -> list[Listed]:
        """All tokens."""
        return self._take(len(self._places))

    def end(self, ended: Ended) -> None:
        """Add the last tokens, and forget those that a stop string has cut away."""
        self.push(array("i", ended.token_ids))
        self.add(ended.scored)
        if ended.finish_reason == "stop" and self._token_ids and self._token_ids[-1] not in self._stop_ids:
            count = bisect_left(self._places, len(ended.text))
            self._values[:], self._top_ids[:], self._top_values[:] = self._first(count)
            del self._token_ids[count:], self._places[count:]

    def _take(self, count: int) -> list[Listed]:
        count = min(count, len(self._values))
        if not count:
            return []
        values, *tops = self._first(count)
        width, pairs = len(tops[0]) // count, iter(zip(*tops, strict=True))
        each = zip(self._token_ids[:count], self._places[:count], values, strict=True)
        found = [Listed(i, place + self._start, value, [*islice(pairs, width)]) for i, place, value in each]
        for column in (self._token_ids, self._places, self._values):
            del column[:count]
        for column in (self._top_ids, self._top_values):
            del column[: count * width]
        return found

    def _first(self, count: int) -> "tuple[array[float], array[int], array[float]]":
        """The log-probabilities of the first tokens."""
        width = len(self._top_ids) // (len(self._values) or 1)
        return self._values[:count], self._top_ids[: count * width], self._top_values[: count * width]
