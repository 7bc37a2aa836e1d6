"""Parts of a recording, and which of them start next: a pure function of the free cards, the waiting parts and the running parts."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """A command, and what it needs.

    Attributes:
        name: What `--parts` calls it.
        command: The words of the command. OUT in a word stands for the folder of the results.
        limit: The seconds after which it is ended.
        cards: How many GPUs it needs. It has them to itself.
        quiet: Whether nothing else may run on the host meanwhile, because it measures what the host does.
        figures: Whether the program writes figures to the file of `--output`, and takes `--commit`.
        by_name: Whether it only runs if `--parts` names it.
        environment: Names and values of environment variables to set.
    """

    name: str
    command: tuple[str, ...]
    limit: float
    cards: int = 1
    quiet: bool = False
    figures: bool = True
    by_name: bool = False
    environment: tuple[tuple[str, str], ...] = ()


def choose(free: Sequence[int], waiting: Sequence[Part], running: Sequence[Part]) -> list[tuple[Part, tuple[int, ...]]]:
    """Decide which parts start now.

    Parts start in the order given. A later part may start before an earlier one that lacks cards, but not before the oldest waiting part,
    which so gets its cards when the running parts end. A quiet part starts if nothing runs, and no other part waits for it.

    Args:
        free: The numbers of the free cards.
        waiting: The parts that have not started, in the order given.
        running: The parts that run.

    Returns:
        The parts to start, each with its cards.

    Example:
        >>> wide, first, second = Part("wide", (), 60, cards=2), Part("first", (), 60), Part("second", (), 60)
        >>> [(part.name, cards) for part, cards in choose([0, 1], [first, wide, second], [])]
        [('first', (0,)), ('second', (1,))]
        >>> choose([1], [wide, second], [first])
        []
    """
    if any(part.quiet for part in running):
        return []
    left, chosen, oldest = sorted(free), list[tuple[Part, tuple[int, ...]]](), True
    for part in waiting:
        fits = part.cards <= len(left)
        if part.quiet:
            if fits and not running and not chosen:
                return [(part, tuple(left[: part.cards]))]
            continue
        if fits:
            chosen.append((part, tuple(left[: part.cards])))
            left = left[part.cards :]
        elif oldest:
            break
        oldest = False
    return chosen
