"""Slots against a model of what they hold: no row reads another's tokens, and nothing is filled that is there already."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.sampling.table_slots import Owner, TableSlots


@dataclass(eq=False)
class Client:
    """A sequence that needs a slot: the tokens that it has."""

    length: int
    held: list[int] = field(default_factory=list)


def drive(slots: TableSlots, seed: int, steps: int = 60) -> None:
    """Random arrivals, ends, failures and steps of an engine, with a shadow of what each slot holds."""
    choose, shadow, filled = random.Random(seed), dict[int, tuple[Client, int]](), 0
    batch: list[Client | None] = []
    owners: dict[int, int] = {}
    clients = [Client(choose.randint(1, 5)) for _ in range(2 * slots.num_slots)]

    def place(rows: list[Client | None], loaded: bool) -> list[int]:
        nonlocal filled
        placed = slots.place([None if c is None else Owner(c, c.length) for c in rows], loaded=loaded)
        for index in placed.stale:
            client = rows[index]
            assert client is not None
            shadow[placed.slots[index]] = client, client.length
            filled += 1
        used = [slot for slot in placed.slots if slot >= 0]
        assert len(used) == len(set(used)) and all(0 <= slot < slots.num_slots for slot in used)
        for client, slot in zip(rows, placed.slots, strict=True):
            assert (client is None) == (slot < 0)
            if client is not None:
                assert shadow[slot] == (client, client.length), "a slot holds other tokens"
        return placed.slots

    def draw(rows: list[Client | None], places: list[int], failed: bool) -> None:
        """Each row samples a token; its slot counts it when it runs. The host may not see it."""
        for client, slot in zip(rows, places, strict=True):
            if client is not None:
                if shadow.get(slot, (None, 0))[0] is client:
                    shadow[slot] = client, client.length + 1
                client.length += not failed

    for _ in range(steps):
        move = choose.random()
        if move < 0.3 or not batch:
            batch = [*choose.sample(clients, choose.randint(0, slots.num_slots)), *[None] * choose.randint(0, 2)]
            choose.shuffle(batch)
            where = place(batch, True)
            owners = {id(client): slot for client, slot in zip(batch, where, strict=True) if client is not None}
        elif move < 0.45:  # prompts of sequences that are not loaded
            rows = [c for c in choose.sample(clients, choose.randint(0, slots.num_slots)) if c not in batch]
            draw([*rows], place([*rows], False), False)
        elif move < 0.6:  # some rows end
            batch = [client for client in batch if choose.random() < 0.7]
            if not slots.holds([None if c is None else Owner(c, c.length) for c in batch]):
                owners = {id(c): slot for c, slot in zip(batch, place(batch, True), strict=True) if c is not None}
        elif move < 0.65:
            clients[choose.randrange(len(clients))] = Client(choose.randint(1, 5))
        if slots.holds([None if c is None else Owner(c, c.length) for c in batch]):
            slots.ran()
            for client in batch:
                if client is not None:
                    assert shadow[owners[id(client)]] == (client, client.length), "a step reads other tokens"
            draw(batch, [-1 if c is None else owners[id(c)] for c in batch], choose.random() < 0.1)


@given(st.integers(0, 2**32), st.integers(1, 5))
@settings(deadline=None)
def test_slots_hold_the_tokens_of_their_owners(seed: int, num_slots: int) -> None:
    drive(TableSlots(num_slots), seed)


@pytest.mark.parametrize("fault", ["lengths", "owners", "evicts"])
def test_planted_faults_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths that are not compared, steps that are not noted, and slots that are taken from the batch itself."""
    if fault == "lengths":
        monkeypatch.setattr(TableSlots, "holds", lambda self, rows: True)
    elif fault == "owners":
        monkeypatch.setattr(TableSlots, "ran", lambda self: None)
    else:
        place = TableSlots.place
        monkeypatch.setattr(
            TableSlots, "place", lambda self, rows, loaded: (p := place(self, rows, loaded=loaded))._replace(stale=p.stale[:-1])
        )
    with pytest.raises((AssertionError, KeyError)):
        for seed in range(200):
            drive(TableSlots(3), seed)


def test_who_stays_is_not_filled_again() -> None:
    slots, (a, b, c) = TableSlots(2), ("a", "b", "c")
    assert slots.place([Owner(a, 5), None, Owner(b, 3)], loaded=True) == ([0, -1, 1], [0, 2])
    slots.ran()
    assert slots.place([Owner(b, 4), Owner(a, 6)], loaded=True) == ([1, 0], [])  # rows change places
    slots.ran()
    assert slots.holds([Owner(a, 7)]) and not slots.holds([Owner(a, 6)]) and not slots.holds([Owner(c, 7)])
    assert slots.place([Owner(c, 9)], loaded=False) == ([1], [0])  # no slot is free: the one that was owned first goes
    assert not slots.holds([Owner(b, 5)]) and slots.holds([Owner(a, 7)])
    assert slots.place([Owner(a, 7), Owner(c, 10)], loaded=True) == ([0, 1], [])  # the prompt's first token is counted
    assert slots.place([Owner(a, 7)], loaded=True) == ([0], [])
    assert slots.place([Owner(b, 5)], loaded=False) == ([1], [0])  # not that of the loaded row
    assert slots.place([Owner(b, 6)], loaded=True) == ([1], [])
    slots.ran()
    assert slots.place([Owner(a, 7)], loaded=True) == ([0], [])  # it did not run meanwhile
    assert slots.place([Owner(a, 6)], loaded=True) == ([0], [0])  # the step failed
