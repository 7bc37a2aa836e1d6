"""Which replica gets a request: the policies that are compared.

A policy knows what a router knows: the prompt, which replicas are there, and how many requests each of them has not answered.
"""

import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from benchmarks.router.workload import PAGE, Request

KEY_PAGES = 8  # the first pages of a prompt that a prefix hash sees: 128 tokens
Loads: TypeAlias = "dict[int, int]"  # the unanswered requests of each replica that is there, in order of their names


class Policy(ABC):
    """Chooses replicas. `num_pages` is the size of a replica's pool as the router knows it."""

    def __init__(self, seed: int, num_pages: int) -> None:
        self.random, self.num_pages = np.random.default_rng(seed), num_pages

    @abstractmethod
    def choose(self, request: Request, loads: Loads) -> int:
        """The replica that gets a request."""

    def gone(self, replica: int) -> None:
        """Note that a replica died. Most policies remember nothing of replicas."""
        return

    def least(self, loads: Loads) -> int:
        """One of the replicas with the fewest unanswered requests, at random."""
        fewest = min(loads.values())
        return self.any_of([name for name, load in loads.items() if load == fewest])

    def any_of(self, names: list[int]) -> int:
        """One of these replicas, at random."""
        return names[int(self.random.random() * len(names))]


class Random(Policy):
    """Any replica."""

    def choose(self, request: Request, loads: Loads) -> int:
        """See the class."""
        return self.any_of(list(loads))


class RoundRobin(Policy):
    """One replica after the other."""

    last = -1

    def choose(self, request: Request, loads: Loads) -> int:
        """See the class."""
        self.last = next((name for name in loads if name > self.last), next(iter(loads)))
        return self.last


class LeastRequests(Policy):
    """The replica with the fewest unanswered requests."""

    def choose(self, request: Request, loads: Loads) -> int:
        """See the class."""
        return self.least(loads)


class TwoChoices(Policy):
    """Of two replicas at random, the one with fewer unanswered requests (Mitzenmacher, 2001)."""

    def choose(self, request: Request, loads: Loads) -> int:
        """See the class."""
        names = list(loads)
        one, other = self.any_of(names), self.any_of(names)
        return one if loads[one] <= loads[other] else other


class Sticky(Policy):
    """The replica that the session had before; a new session gets the one with the fewest unanswered requests."""

    def __init__(self, seed: int, num_pages: int) -> None:
        super().__init__(seed, num_pages)
        self.places: dict[int, int] = {}

    def choose(self, request: Request, loads: Loads) -> int:
        """See the class."""
        place = self.places.get(request.affinity)
        if place not in loads:
            place = self.places[request.affinity] = self.least(loads)
        return place


class PrefixHash(Policy):
    """Rendezvous hashing (Thaler and Ravishankar, 1998) of the first pages: the replica with the highest hash of key and name."""

    pages = KEY_PAGES

    def choose(self, request: Request, loads: Loads) -> int:
        """See the class."""
        return self.ranked(request, loads)[0]

    def ranked(self, request: Request, loads: Loads) -> list[int]:
        """The replicas, highest hash first."""
        names = np.fromiter(loads, np.uint64, len(loads))
        return names[np.argsort(_mixed(names, key_of(request, self.pages)), kind="stable")[::-1]].astype(int).tolist()


class FourPages(PrefixHash):
    """The same with a key of four pages, which an instruction that all requests share fills."""

    pages = 4


class Modulo(Policy):
    """The hash of the first pages modulo the number of replicas: nearly all keys move when a replica comes or goes."""

    def choose(self, request: Request, loads: Loads) -> int:
        """See the class."""
        return list(loads)[key_of(request, KEY_PAGES) % len(loads)]


class BoundedHash(PrefixHash):
    """The first replica by rendezvous hashing with fewer than `factor` times the mean of unanswered requests (Mirrokni et al., 2016)."""

    factor = 1.25

    def choose(self, request: Request, loads: Loads) -> int:
        """See the class."""
        bound = math.ceil(self.factor * (sum(loads.values()) + 1) / len(loads))
        return next(name for name in self.ranked(request, loads) if loads[name] < bound)


class LooseHash(BoundedHash):
    """The same with twice the mean."""

    factor = 2.0


class Tree(Policy):
    """The router keeps for each replica the prompts that it sent there, as many pages as a pool has, the least recent dropped first.

    The replica with the least cost gets the request: the prompt's tokens that it has to run, and `weight` tokens for each request that it
    has not answered.
    """

    weight = 256.0

    def __init__(self, seed: int, num_pages: int) -> None:
        super().__init__(seed, num_pages)
        self.owners: dict[int, int] = {}  # for each page the replicas that have it, as bits
        self.recent: dict[int, OrderedDict[int, None]] = {}

    def choose(self, request: Request, loads: Loads) -> int:
        """See the class."""
        return self.sent(request, self.by_cost(request, loads))

    def by_cost(self, request: Request, loads: Loads) -> int:
        """The replica with the least cost; among equals one at random."""
        total, matched = len(request.tokens), self.matches(request)
        costs = {name: total - PAGE * matched.get(name, 0) + self.weight * load for name, load in loads.items()}
        least = min(costs.values())
        return self.any_of([name for name, cost in costs.items() if cost == least])

    def matches(self, request: Request) -> dict[int, int]:
        """For each replica with a part of the prompt, how many of its first pages."""
        found, left = dict[int, int](), -1
        for place, page in enumerate(request.chain):
            now = left & self.owners.get(page, 0)
            if place and (lost := left & ~now):
                found |= dict.fromkeys(_bits(lost), place)
            left = now
            if not left:
                return found
        return found | dict.fromkeys(_bits(max(0, left)), len(request.chain))

    def sent(self, request: Request, name: int) -> int:
        """Note the prompt's pages as those of a replica, and return it."""
        recent, bit = self.recent.setdefault(name, OrderedDict()), 1 << name
        for page in reversed(request.chain):  # the last pages of a prompt are dropped first
            recent[page] = None
            recent.move_to_end(page)
            self.owners[page] = self.owners.get(page, 0) | bit
        while len(recent) > self.num_pages:
            page, _ = recent.popitem(last=False)
            self._forget(page, bit)
        return name

    def gone(self, replica: int) -> None:
        """See `Policy`."""
        for page in self.recent.pop(replica, ()):
            self._forget(page, 1 << replica)

    def _forget(self, page: int, bit: int) -> None:
        if left := self.owners[page] & ~bit:
            self.owners[page] = left
        else:
            del self.owners[page]


class TreeOrLeast(Tree):
    """The same tree with the rule of sglang's router and its default thresholds.

    If the loads are far apart, the replica with the fewest unanswered requests; else the one that has the longest part of the prompt, if
    that is more than a share of it; else the one whose tree is smallest.
    """

    share, apart, times = 0.3, 64, 1.5

    def choose(self, request: Request, loads: Loads) -> int:
        """See the class."""
        most, fewest = max(loads.values()), min(loads.values())
        if most - fewest > self.apart and most > self.times * fewest:
            return self.sent(request, self.least(loads))
        matched = {name: pages for name, pages in self.matches(request).items() if name in loads}
        longest = max(matched.values(), default=0)
        if longest * PAGE > self.share * len(request.tokens):
            return self.sent(request, self.any_of([name for name, pages in matched.items() if pages == longest]))
        sizes = {name: len(self.recent.get(name, ())) for name in loads}
        smallest = min(sizes.values())
        return self.sent(request, self.any_of([name for name, size in sizes.items() if size == smallest]))


POLICIES: Mapping[str, Callable[[int, int], Policy]] = MappingProxyType(
    {
        "random": Random,
        "round robin": RoundRobin,
        "least requests": LeastRequests,
        "two choices": TwoChoices,
        "session affinity": Sticky,
        "prefix hash": PrefixHash,
        "bounded prefix hash": BoundedHash,
        "tree, by cost": Tree,
        "tree, by thresholds": TreeOrLeast,
    }
)
FURTHER: Mapping[str, Callable[[int, int], Policy]] = MappingProxyType(
    {"prefix hash, 4 pages": FourPages, "bounded prefix hash, 2 x": LooseHash, "hash modulo replicas": Modulo}
)


def key_of(request: Request, pages: int) -> int:
    """The hash of the first pages of a prompt; of all of them if it has fewer."""
    return request.chain[min(pages, len(request.chain)) - 1] if request.chain else int(request.tokens[0])


def _mixed(names: np.ndarray, key: int) -> np.ndarray:
    """A hash of each name with a key: the finaliser of splitmix64."""
    with np.errstate(over="ignore"):
        mixed = (names + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(key)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        return mixed ^ (mixed >> np.uint64(31))


def _bits(mask: int) -> list[int]:
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found
