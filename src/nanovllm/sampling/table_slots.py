"""Which sequence owns which slot of the tables of penalties and biases, and whether the slot holds its tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import ref


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
    """The owner of a slot, how many tokens it will have at the next step (-1: not filled yet), and whether it is in the loaded batch."""

    of: ref[Any]
    length: int
    loaded: bool


@dataclass(slots=True)
class TableSlots:
    """The owners of `num_slots` slots.

    A slot stays with its owner until another one needs it. What it holds is right if the owner returns with the tokens that it had, or with
    those that the steps since then have added; a sequence whose step failed does not. Owners are not kept alive.

    A row of the loaded batch keeps its slot, because a step that already runs may count the row's token in it.

    Attributes:
        num_slots: The number of slots, at least the most rows of a batch that need one.
    """

    num_slots: int
    _entries: dict[int, _Entry] = field(default_factory=dict)  # by slot, the longest owned first

    def place(self, rows: Sequence[Owner | None], *, loaded: bool) -> Placed:
        """Give each owner a slot. `None` is a row that needs none. `filled` must follow when the stale rows' slots have been filled.

        If there are too few slots besides those of the loaded batch, the batch is given up: `holds` is false for its rows, so they must be
        placed again before they run. This only happens if some of its rows have ended, since all live rows have slots together.

        Args:
            rows: The rows of a batch.
            loaded: Whether the batch stays loaded, so that its rows get one token with every `ran`, and replaces the batch that was loaded
                before. If not, the batch runs once, and each of its rows gets one token.
        """
        self._entries = {slot: entry for slot, entry in self._entries.items() if entry.of() is not None}
        mine = {id(entry.of()): slot for slot, entry in self._entries.items()}
        needed = {id(row.of) for row in rows if row is not None}
        free = [slot for slot in range(self.num_slots) if slot not in self._entries]
        others = [slot for slot, entry in self._entries.items() if id(entry.of()) not in needed]
        kept = {slot for slot in others if self._entries[slot].loaded}
        if loaded or len(needed - mine.keys()) > len(free) + len(others) - len(kept):
            kept = set[int]()
            for entry in self._entries.values():
                entry.loaded = False
        spare = iter([*free, *(slot for slot in others if slot not in kept)])
        slots, stale = [], []
        for index, row in enumerate(rows):
            if row is None:
                slots.append(-1)
                continue
            slot, length = mine.get(id(row.of), -1), row.length if loaded else row.length + 1
            if slot < 0 or self._entries[slot].length != row.length:
                slot, length = next(spare) if slot < 0 else slot, -1
                stale.append(index)
            self._entries.pop(slot, None)
            self._entries[slot] = _Entry(ref(row.of), length, loaded)
            slots.append(slot)
        return Placed(slots, stale)

    def filled(self, slot: int, row: Owner) -> None:
        """Note that a slot, which this row was given, now holds the row's tokens."""
        entry = self._entries[slot]
        entry.length = row.length if entry.loaded else row.length + 1

    def keep(self, rows: Sequence[Owner | None]) -> None:
        """Note that only these rows of the loaded batch are left. The slots of the others are free."""
        left = {id(row.of) for row in rows if row is not None}
        self._entries = {slot: entry for slot, entry in self._entries.items() if not entry.loaded or id(entry.of()) in left}

    def ran(self) -> None:
        """Note that the loaded batch runs a step."""
        for entry in self._entries.values():
            entry.length += entry.loaded

    def holds(self, rows: Sequence[Owner | None]) -> bool:
        """Whether these rows of the loaded batch still own slots that hold their tokens."""
        lengths = {id(entry.of()): entry.length for entry in self._entries.values() if entry.loaded}
        return all(row is None or lengths.get(id(row.of)) == row.length for row in rows)
