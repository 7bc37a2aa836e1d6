"""Slots against a model of what they hold: no row reads another's tokens, and nothing is filled that is there already."""

import random
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.sampling.table_slots import Owner, TableSlots


@dataclass(eq=False)
class Client:
    """A sequence that needs a slot: the tokens that it has."""

    length: int


def owners_of(rows: list[Client | None]) -> list[Owner | None]:
    return [None if client is None else Owner(client, client.length) for client in rows]


def drive(slots: TableSlots, seed: int, steps: int = 60) -> None:
    """Random arrivals, ends, failures and steps of an engine, with a shadow of what each slot holds.

    As in an engine, loaded rows and new ones together are at most as many as there are slots, rows that end are told when the rest runs
    again, prompts run before that, and nobody asks whether slots hold the tokens of a batch whose rows stay the same.
    """
    choose, shadow = random.Random(seed), dict[int, tuple[Client, int]]()
    batch: list[Client | None] = []
    owners: dict[int, int] = {}
    clients = [Client(choose.randint(1, 5)) for _ in range(2 * slots.num_slots)]
    ended, failed = False, False

    def place(rows: list[Client | None], loaded: bool) -> list[int]:
        placed = slots.place(owners_of(rows), loaded=loaded)
        for index in placed.stale:
            client, slot = rows[index], placed.slots[index]
            assert client is not None
            shadow[slot] = client, -1
            if choose.random() < 0.1:  # interrupted, and placed again
                return place(rows, loaded)
            shadow[slot] = client, client.length
            slots.filled(slot, Owner(client, client.length))
        used = [slot for slot in placed.slots if slot >= 0]
        assert len(used) == len(set(used)) and all(0 <= slot < slots.num_slots for slot in used)
        for client, slot in zip(rows, placed.slots, strict=True):
            assert (client is None) == (slot < 0)
            if client is not None:
                assert shadow[slot] == (client, client.length), "a slot holds other tokens"
        return placed.slots

    def draw(rows: list[Client | None], places: list[int]) -> None:
        """Each row samples a token; its slot counts it when it runs. The host may not see it."""
        for client, slot in zip(rows, places, strict=True):
            if client is not None:
                shadow[slot] = client, client.length + 1
                client.length += not failed

    def load(rows: list[Client | None]) -> dict[int, int]:
        return {id(client): slot for client, slot in zip(rows, place(rows, True), strict=True) if client is not None}

    for _ in range(steps):
        move = choose.random()
        if move < 0.2 or not batch or failed:
            batch = [*choose.sample(clients, choose.randint(0, slots.num_slots)), *[None] * choose.randint(0, 2)]
            choose.shuffle(batch)
            owners, ended, failed = load(batch), False, False
        elif move < 0.4:  # some rows end
            batch, ended = [client for client in batch if choose.random() < 0.7], True
        if choose.random() < 0.4:  # prompts of sequences that are not loaded
            most = slots.num_slots - sum(client is not None for client in batch)
            rows = [c for c in choose.sample(clients, choose.randint(0, slots.num_slots)) if c not in batch][:most]
            draw([*rows], place([*rows], False))
        if choose.random() < 0.1:
            clients[choose.randrange(len(clients))] = Client(choose.randint(1, 5))
        if choose.random() < 0.2:
            continue  # nothing else runs
        if ended and slots.holds(owners_of(batch)):
            slots.keep(owners_of(batch))
        elif ended:
            owners = load(batch)
        ended = False
        slots.ran()
        for client in batch:
            if client is not None:
                assert shadow[owners[id(client)]] == (client, client.length), "a step reads other tokens"
        failed = choose.random() < 0.1
        draw(batch, [-1 if c is None else owners[id(c)] for c in batch])


@given(st.integers(0, 2**32), st.integers(1, 5))
@settings(deadline=None)
def test_slots_hold_the_tokens_of_their_owners(seed: int, num_slots: int) -> None:
    drive(TableSlots(num_slots), seed)


def evicting(self: TableSlots, rows: list[Owner | None], *, loaded: bool) -> Any:
    """Takes slots of the loaded batch first."""
    batch = {slot: entry for slot, entry in self._entries.items() if entry.loaded}
    for entry in batch.values():
        entry.loaded = False
    self._entries = {**batch, **self._entries}
    placed = PLACE(self, rows, loaded=loaded)
    for slot, entry in batch.items():
        entry.loaded = not loaded and self._entries.get(slot) is entry
    return placed


def trusting(self: TableSlots, rows: list[Owner | None], *, loaded: bool) -> Any:
    """Takes slots for filled before they are."""
    placed = PLACE(self, rows, loaded=loaded)
    for index in placed.stale:
        row = rows[index]
        assert row is not None
        self.filled(placed.slots[index], row)
    return placed


PLACE = TableSlots.place


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("holds", lambda self, rows: True),
        ("ran", lambda self: None),
        ("keep", lambda self, rows: None),
        ("place", evicting),
        ("place", trusting),
    ],
)
def test_planted_faults_are_found(name: str, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths that are not compared, steps and ends that are not noted, slots taken from the loaded batch, and fills that are trusted."""
    monkeypatch.setattr(TableSlots, name, fault)
    with pytest.raises((AssertionError, KeyError)):
        for seed in range(200):
            drive(TableSlots(3), seed)


def placed(slots: TableSlots, *rows: Owner | None, loaded: bool) -> Any:
    """Place rows, and fill their slots."""
    found = slots.place(rows, loaded=loaded)
    for index in found.stale:
        row = rows[index]
        assert row is not None
        slots.filled(found.slots[index], row)
    return found


def test_who_stays_is_not_filled_again() -> None:
    slots, (a, b, c) = TableSlots(2), (Client(0), Client(0), Client(0))
    assert placed(slots, Owner(a, 5), None, Owner(b, 3), loaded=True) == ([0, -1, 1], [0, 2])
    slots.ran()
    assert placed(slots, Owner(b, 4), Owner(a, 6), loaded=True) == ([1, 0], [])  # rows change places
    slots.ran()
    assert slots.holds([Owner(a, 7)]) and not slots.holds([Owner(a, 6)]) and not slots.holds([Owner(c, 7)])
    slots.keep([Owner(a, 7)])
    assert placed(slots, Owner(c, 9), loaded=False) == ([1], [0])  # not that of the loaded row
    assert not slots.holds([Owner(b, 5)]) and slots.holds([Owner(a, 7)])
    assert placed(slots, Owner(a, 7), Owner(c, 10), loaded=True) == ([0, 1], [])  # the prompt's first token is counted
    assert placed(slots, Owner(a, 7), loaded=True) == ([0], [])
    assert placed(slots, Owner(b, 5), loaded=False) == ([1], [0])
    assert placed(slots, Owner(b, 6), loaded=True) == ([1], [])
    slots.ran()
    assert placed(slots, Owner(a, 7), loaded=True) == ([0], [])  # it did not run meanwhile
    assert placed(slots, Owner(a, 6), loaded=True) == ([0], [0])  # the step failed


def test_a_loaded_row_keeps_its_slot_or_is_placed_again() -> None:
    """If it is not known which row has ended, no slot is taken from a row that then runs as if it had it."""
    slots, (a, b, c) = TableSlots(2), (Client(0), Client(0), Client(0))
    placed(slots, Owner(a, 5), Owner(b, 3), loaded=True)
    assert placed(slots, Owner(c, 9), loaded=False).stale == [0]
    assert not slots.holds([Owner(a, 5)]) and not slots.holds([Owner(b, 3)])
    assert slots.holds([None])


def test_a_slot_is_right_when_it_has_been_filled() -> None:
    slots, a = TableSlots(1), Client(0)
    assert slots.place([Owner(a, 5)], loaded=False).stale == [0]
    assert slots.place([Owner(a, 5)], loaded=True).stale == [0] and not slots.holds([Owner(a, 5)])
    slots.filled(0, Owner(a, 5))
    assert slots.holds([Owner(a, 5)]) and slots.place([Owner(a, 5)], loaded=False).stale == []


def test_owners_are_not_kept_alive() -> None:
    slots, a, b = TableSlots(3), Client(0), Client(0)
    placed(slots, Owner(a, 5), Owner(b, 2), loaded=True)
    seen = weakref.ref(a)
    slots.keep([Owner(b, 2)])
    assert list(slots._entries) == [1]
    del a
    assert seen() is None
    del b
    c = Client(0)
    assert placed(slots, Owner(c, 1), loaded=False) == ([0], [0]) and list(slots._entries) == [0]
