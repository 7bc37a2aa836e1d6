"""Requests for a fleet: chats, tenants with system prompts of their own, and questions over documents and examples that are shared.

Lengths are tokens. Everything follows from a seed. Sessions start at times of a Poisson process of rate 1, which a simulation divides by
its own rate. The replies of the replicas are zeros, so the prompt of a later turn is known from the start.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from benchmarks.host import VOCABULARY

PAGE = 16


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A prompt and the length of its reply.

    Attributes:
        number: The place of the request in its workload.
        affinity: What session affinity goes by: the chat, the tenant or the user.
        tokens: The prompt, int32.
        chain: For each full page of the prompt a hash of all tokens up to its end.
        reply: Tokens of the reply.
    """

    number: int
    affinity: int
    tokens: np.ndarray
    chain: tuple[int, ...]
    reply: int


@dataclass(frozen=True, slots=True, eq=False)
class Session:
    """Requests one after another: each is sent some time after the reply to the one before it.

    Attributes:
        start: When the first is sent, in a process of one session per second.
        turns: The requests.
        thinks: The seconds before each request but the first.
    """

    start: float
    turns: tuple[Request, ...]
    thinks: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of the three workloads. A range is uniform and includes both ends."""

    first: tuple[int, int] = (1_000, 4_000)  # chats: the first message, such as a file or a mail
    message: tuple[int, int] = (64, 512)  # a later message
    turns: tuple[int, int] = (2, 5)
    think: float = 0.25  # mean seconds between a reply and the next message
    tenants: int = 400
    system: tuple[int, int] = (1_024, 3_072)  # a tenant's system prompt
    question: tuple[int, int] = (128, 768)  # the tokens after it
    documents: int = 2_000
    document: tuple[int, int] = (512, 1_536)
    instruction: int = 64  # before the documents, the same for all
    asked: tuple[int, int] = (32, 128)  # the tokens after two documents
    tasks: int = 20  # few-shot tasks, which a third of these requests are
    examples: tuple[int, int] = (1_500, 2_500)  # a task's examples
    skew: float = 1.0  # of Zipf's law, for tenants, documents and tasks
    reply: tuple[int, int] = (16, 64)


def chats(count: int, seed: int, sizes: Sizes) -> list[Session]:
    """Sessions whose prompts are all that was said before and a new message."""
    random, sessions, number = np.random.default_rng(seed), list[Session](), 0
    starts = np.cumsum(random.exponential(1.0, count))
    for place in range(count):
        turns, tokens, chain = list[Request](), np.empty(0, np.int32), ()
        num_turns = _uniform(random, sizes.turns)
        for turn in range(num_turns):
            length, reply = _uniform(random, sizes.message if turn else sizes.first), _uniform(random, sizes.reply)
            before = np.zeros(turns[-1].reply, np.int32) if turns else np.empty(0, np.int32)
            tokens = np.concatenate([tokens, before, _text(random, length)])
            chain = chained(tokens, chain)
            turns.append(Request(number, place, tokens, chain, reply))
            number += 1
        sessions.append(Session(float(starts[place]), tuple(turns), tuple(random.exponential(sizes.think, num_turns - 1).tolist())))
    return sessions


def tenants(count: int, seed: int, sizes: Sizes) -> list[Session]:
    """Single requests. Each begins with the system prompt of its tenant; few tenants send most of them."""
    random = np.random.default_rng(seed)
    prompts = [_text(random, _uniform(random, sizes.system)) for _ in range(sizes.tenants)]
    chains, starts = [chained(prompt) for prompt in prompts], np.cumsum(random.exponential(1.0, count))
    sessions = list[Session]()
    for place, who in enumerate(_zipf(random, sizes.tenants, count, sizes.skew)):
        tokens = np.concatenate([prompts[who], _text(random, _uniform(random, sizes.question))])
        request = Request(place, int(who), tokens, chained(tokens, chains[who]), _uniform(random, sizes.reply))
        sessions.append(Session(float(starts[place]), (request,)))
    return sessions


def shared(count: int, seed: int, sizes: Sizes) -> list[Session]:
    """Single requests. Two thirds have two documents between an instruction and a question, one third the examples of a task."""
    random = np.random.default_rng(seed)
    documents = [_text(random, _uniform(random, sizes.document)) for _ in range(sizes.documents)]
    examples = [_text(random, _uniform(random, sizes.examples)) for _ in range(sizes.tasks)]
    instruction, starts = _text(random, sizes.instruction), np.cumsum(random.exponential(1.0, count))
    found, tasks = (_zipf(random, many, size, sizes.skew) for many, size in ((sizes.documents, 2 * count), (sizes.tasks, count)))
    sessions = list[Session]()
    for place in range(count):
        first, second = found[2 * place : 2 * place + 2]
        begin = [examples[tasks[place]]] if random.random() < 1 / 3 else [instruction, documents[first], documents[second]]
        tokens = np.concatenate([*begin, _text(random, _uniform(random, sizes.asked))])
        sessions.append(Session(float(starts[place]), (Request(place, place, tokens, chained(tokens), _uniform(random, sizes.reply)),)))
    return sessions


WORKLOADS: Mapping[str, Callable[[int, int, Sizes], list[Session]]] = MappingProxyType(
    {"chats": chats, "tenants": tenants, "shared": shared}
)


def chained(tokens: np.ndarray, before: tuple[int, ...] = ()) -> tuple[int, ...]:
    """For each full page a hash of it and of all pages before it. `before` are those of a prefix."""
    chain, size = list(before), PAGE * tokens.itemsize
    data = tokens[: len(tokens) // PAGE * PAGE].tobytes()
    for page in range(len(before), len(tokens) // PAGE):
        last = chain[-1].to_bytes(8, "little") if chain else b""
        chain.append(int.from_bytes(hashlib.blake2b(last + data[page * size : (page + 1) * size], digest_size=8).digest(), "little"))
    return tuple(chain)


@dataclass(slots=True)
class Seen:
    """The pages of all prompts so far, as if one memory without an end held them."""

    pages: set[int] = field(default_factory=set)

    def reusable(self, request: Request) -> int:
        """The tokens of a prompt that an earlier one had at its beginning. At least one token of a prompt must run."""
        known = next((place for place, page in enumerate(request.chain) if page not in self.pages), len(request.chain))
        self.pages.update(request.chain)
        return min(known * PAGE, (len(request.tokens) - 1) // PAGE * PAGE)


def _uniform(random: np.random.Generator, between: tuple[int, int]) -> int:
    return int(random.integers(between[0], between[1] + 1))


def _text(random: np.random.Generator, length: int) -> np.ndarray:
    return random.integers(1, VOCABULARY, length, np.int32)


def _zipf(random: np.random.Generator, many: int, count: int, skew: float) -> np.ndarray:
    shares = np.arange(1, many + 1) ** -skew
    return random.choice(many, count, p=shares / shares.sum())
