"""Which replica gets a request: one that has the longest prefix of its prompt, unless it has more than its share of the running requests.

A prompt that no replica has goes where rendezvous hashing says. So several routers agree without speaking to each other, and when a
replica is lost only its own prompts move.
"""

import hashlib
import math
from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence

from nanovllm.errors import InvalidRequestError

BOUND = 1.25  # the running requests of one replica, in relation to the mean of all
MOST_KEYS = 1 << 17  # prefixes that a router remembers: some 40 MB
MOST_HOLDERS = 4  # replicas that are remembered for a prefix
HASHED = 8  # prefixes of this place, about 500 bytes, are what a prompt that nobody has is hashed by


def weight(key: int, replica: str) -> int:
    """A random number of 64 bits that depends on both arguments alone."""
    return int.from_bytes(hashlib.blake2b(b"%d %b" % (key, replica.encode()), digest_size=8).digest())


def rendezvous(key: int, replicas: Collection[str]) -> list[str]:
    """Replicas in the order in which a key prefers them, which is random and the same everywhere.

    Args:
        key: The number of a prefix.
        replicas: The names of the replicas.

    Returns:
        All names. Without one of them the others have the same order.

    References:
        Highest random weight: Thaler, Ravishankar, "Using Name-Based Mappings to Increase Hit Rates", IEEE/ACM Transactions on
        Networking 6(1), 1998.

    Examples:
        >>> order = rendezvous(7, ["a", "b", "c"])
        >>> rendezvous(7, set(order) - {order[0]}) == order[1:]
        True
    """
    return sorted(replicas, key=lambda replica: (-weight(key, replica), replica))


def most_running(bound: float, num_running: int, num_replicas: int) -> int:
    """How many requests a replica may run after one more request has come, in a cluster that runs `num_running` before.

    References:
        Mirrokni, Thorup, Zadimoghaddam, "Consistent Hashing with Bounded Loads", SODA 2018: https://arxiv.org/abs/1608.01350

    Examples:
        >>> most_running(1.25, 7, 2), most_running(1.25, 0, 2)
        (5, 1)
    """
    return math.ceil(bound * (num_running + 1) / num_replicas)


class PrefixTable:
    """What one router knows: which replicas have run which prefixes, and which requests run where.

    Methods may be called from several threads, as far as each of them changes requests of its own.

    Args:
        bound: How many requests a replica may run, in relation to the mean of all. Infinity: any number.
        most_keys: How many prefixes are remembered. The ones that were not used for longest are forgotten.

    Raises:
        InvalidRequestError: The bound is below 1.

    Examples:
        >>> table = PrefixTable()
        >>> table.begin("request 1", (5, 6), "b")
        >>> table.end("request 1")
        >>> table.ranked((5, 6, 7), ["a", "b", "c"])[0]
        'b'
    """

    def __init__(self, bound: float = BOUND, most_keys: int = MOST_KEYS) -> None:
        if not bound >= 1:
            raise InvalidRequestError(f"bound={bound} must be at least 1, the mean of all replicas")
        self._bound, self._most_keys = bound, most_keys
        self._holders: OrderedDict[int, tuple[str, ...]] = OrderedDict()  # those that ran the prefix last are first
        self._running: dict[str, str] = {}

    def loads(self) -> Counter[str]:
        """How many requests each replica runs."""
        return Counter([*self._running.values()])

    def ranked(self, keys: Sequence[int], replicas: Collection[str], avoid: Collection[str] = ()) -> list[str]:
        """All replicas, the best one for a request first.

        Args:
            keys: The numbers of its prefixes, from short to long.
            replicas: The names of the replicas that are there.
            avoid: Those that have failed this request, which come last.

        Returns:
            First the replicas that may run one more request, by the length of the prefix that they have; of those that have the same, the
            one that runs least. If none of them has any, the order is that of `rendezvous`. The replicas that run too much follow.
        """
        left = [replica for replica in replicas if replica not in avoid]
        if not left:
            return rendezvous(self._hashed(keys), replicas)
        loads, depths = self.loads(), self._depths(keys, left)
        most = math.inf if math.isinf(self._bound) else most_running(self._bound, sum(loads[name] for name in replicas), len(replicas))
        known = max(depths.values()) > 0
        order = {replica: place for place, replica in enumerate(rendezvous(self._hashed(keys), left))}

        def rank(replica: str) -> tuple[int, ...]:
            load = loads[replica]
            if load >= most:
                return 1, load, 0, order[replica]
            return 0, -depths[replica], load if known else 0, order[replica]

        return [*sorted(left, key=rank), *(replica for replica in replicas if replica in avoid)]

    def begin(self, request: str, keys: Sequence[int], replica: str) -> None:
        """A request is sent to a replica, which will have its prefixes."""
        self._running[request] = replica
        for key in keys:
            before = self._holders.get(key, ())
            self._holders[key] = (replica, *(name for name in before if name != replica))[:MOST_HOLDERS]
            self._holders.move_to_end(key)
        while len(self._holders) > self._most_keys:
            self._holders.popitem(last=False)

    def runs(self, request: str) -> bool:
        """Whether a request has begun and not ended."""
        return request in self._running

    def end(self, request: str) -> None:
        """A request has ended, however it did. One that is not known is let pass."""
        self._running.pop(request, None)

    def keep(self, replicas: Collection[str]) -> None:
        """Forget the requests of all replicas but these."""
        for request, replica in [*self._running.items()]:
            if replica not in replicas:
                self._running.pop(request, None)

    def _hashed(self, keys: Sequence[int]) -> int:
        return keys[min(len(keys), HASHED) - 1] if keys else 0

    def _depths(self, keys: Sequence[int], replicas: Collection[str]) -> dict[str, int]:
        """How many of the prefixes each replica has."""
        depths, left = dict.fromkeys(replicas, 0), set(replicas)
        for place in range(len(keys), 0, -1):
            for replica in left.intersection(self._holders.get(keys[place - 1], ())):
                depths[replica] = place
                left.discard(replica)
            if not left:
                break
        return depths
