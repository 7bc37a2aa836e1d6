"""The field `best_of` of completions: more replies run than are returned."""

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from nanovllm.entrypoints.server.errors import ApiError
from nanovllm.entrypoints.server.settings import MOST_CHOICES
from nanovllm.entrypoints.server.wire import Ended


def num_candidates(best_of: int | None, n: int, *, stream: bool) -> int:
    """How many replies to each prompt run, of which `n` are returned.

    Raises:
        ApiError: They are fewer than `n` or too many, or are more than `n` in a stream, which cannot take back what it has sent.
    """
    if best_of is None or best_of == n:
        return n
    if not n <= best_of <= MOST_CHOICES:
        raise ApiError(400, f"best_of={best_of}: must be in [{n}, {MOST_CHOICES}], because n={n}", param="best_of")
    if stream:
        raise ApiError(400, f"best_of={best_of}: a stream has all replies that run, so best_of must be n={n}", param="best_of")
    return best_of


def scoring(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a candidate, whose tokens have their log-probabilities, whether the client asked for them or not."""
    return {**options, "logprobs": options.get("logprobs", 0)}


def best(ends: Seq[Ended], candidates: int, n: int) -> list[Ended]:
    """The best `n` of each prompt's candidates, the best first. Of equals the earlier one is better.

    Args:
        ends: The ends of all candidates, those of one prompt after those of the one before it.
        candidates: How many each prompt has.
        n: How many are returned.
    """
    if candidates == n:
        return [*ends]
    found = list[Ended]()
    for first in range(0, len(ends), candidates):
        found += sorted(ends[first : first + candidates], key=mean_logprob, reverse=True)[:n]
    return found


def mean_logprob(ended: Ended) -> float:
    """The mean log-probability of a reply's tokens, the one that ended it included; 0 if it has none."""
    values = np.frombuffer(b"" if ended.scored is None else ended.scored.logprobs, "<f4")
    return float(values.mean(dtype=np.float64)) if len(values) else 0.0
