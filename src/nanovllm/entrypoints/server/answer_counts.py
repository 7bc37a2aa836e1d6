"""`AnswerCounts`: the answers of one front end by path, method and status, until the engine is told of them."""

from typing import Any

METHODS = frozenset({"GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT", "PATCH"})


class AnswerCounts:
    """Counts of answers and their seconds. Paths are those of routes, so there are few."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, int], list[float]] = {}

    def add(self, path: str | None, method: str, status: int, seconds: float) -> None:
        """Count an answer. A path of None has no route; the status 0 stands for a client that has gone before an answer."""
        key = (path or "other", method if method in METHODS else "other", status)
        entry = self._counts.setdefault(key, [0, 0.0])
        entry[0] += 1
        entry[1] += seconds

    def take(self) -> list[list[Any]]:
        """What was counted since the last call."""
        counts, self._counts = self._counts, {}
        return [[*key, *value] for key, value in counts.items()]
