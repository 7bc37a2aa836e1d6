"""Which sequence owns which slot of the tables of penalties and biases, and whether the slot holds its tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Owner(NamedTuple):
    """An owner of a slot, compared by identity, and how many tokens it has."""

    of: Any
    length: int


class Placed(NamedTuple):
    """The slot of each row (-1: none), and the rows whose slots do not hold their tokens yet."""

    slots: list[int]
    stale: list[int]


@dataclass(slots=True)
class _Entry:
    """The owner of a slot, how many tokens it will have at the next step, and whether it is in the loaded batch."""

    of: Any
    length: int
    loaded: bool


@dataclass(slots=True)
class TableSlots:
    """The owners of `num_slots` slots.

    A slot stays with its owner until another one needs it. What it holds is right if the owner returns with the tokens that it had, or with
    those that the steps since then have added; a sequence whose step failed does not.

    Attributes:
        num_slots: The number of slots, at least the most rows of a batch that need one.
    """

    num_slots: int
    _entries: dict[int, _Entry] = field(default_factory=dict)  # by slot, the longest owned first

    def place(self, rows: Sequence[Owner | None], *, loaded: bool) -> Placed:
        """Give each owner a slot. `None` is a row that needs none.

        Args:
            rows: The rows of a batch.
            loaded: Whether the batch stays loaded, so that its rows get one token with every `ran`, and replaces the batch that was loaded
                before. If not, the batch runs once, and each of its rows gets one token.
        """
        if loaded:
            for entry in self._entries.values():
                entry.loaded = False
        mine = {id(entry.of): slot for slot, entry in self._entries.items()}
        needed = {id(row.of) for row in rows if row is not None}
        free = [slot for slot in range(self.num_slots) if slot not in self._entries]
        others = [slot for slot, entry in self._entries.items() if id(entry.of) not in needed]
        spare = iter([*free, *sorted(others, key=lambda slot: self._entries[slot].loaded)])
        slots, stale = [], []
        for index, row in enumerate(rows):
            if row is None:
                slots.append(-1)
                continue
            slot = mine.get(id(row.of), -1)
            if slot < 0 or self._entries[slot].length != row.length:
                slot = next(spare) if slot < 0 else slot
                stale.append(index)
            self._entries.pop(slot, None)
            self._entries[slot] = _Entry(row.of, row.length if loaded else row.length + 1, loaded)
            slots.append(slot)
        return Placed(slots, stale)

    def ran(self) -> None:
        """Note that the loaded batch runs a step."""
        for entry in self._entries.values():
            entry.length += entry.loaded

    def holds(self, rows: Sequence[Owner | None]) -> bool:
        """Whether these rows of the loaded batch still own slots that hold their tokens."""
        lengths = {id(entry.of): entry.length for entry in self._entries.values() if entry.loaded}
        return all(row is None or lengths.get(id(row.of)) == row.length for row in rows)
