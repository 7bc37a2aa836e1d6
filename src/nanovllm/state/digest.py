"""`digest`: a short hash of an engine's host state, by which ranks that should hold the same state find out that they do not."""

from hashlib import blake2b
from itertools import chain
from struct import pack

import numpy as np

from nanovllm.state.engine_state import EngineState, Stats
from nanovllm.state.offload import HostPages
from nanovllm.state.request import Sequence
from nanovllm.state.steady import Steady

SIZE = 16  # bytes
NEXT = 8  # free pages that are handed out next


def digest(state: EngineState, *, whole: bool = False) -> bytes:
    """A hash of what the next calls depend on, but for times, KV and the engine's own id.

    It does not depend on what was read of the state. Its cost grows with the running requests and the live chunks, not with the
    pool or the queue.

    Args:
        state: The state.
        whole: Hash every token, page and owner too, for tests.
    """
    pool, lease, waiting = state.pool, state.runtime.lease, state.waiting
    pages, prefix, frames, first = pool.pages, pool.prefix, pool.frames, state.waiting.first()
    rest, following = pages.returned, list[int]()
    while rest is not None and len(following) < NEXT:
        following.append(rest[0])
        rest = rest[1]
    facts = [
        state.epoch, lease.epoch, lease.dirty, len(lease.lost), state.next_id, state.num_steps, state.expected_reply,
        state.gather_until, state.token_budget or -1,
        pages.num_pages, pages.num_used, pages.unused, len(following), *following, prefix.num_idle, prefix.oldest, prefix.now,
        -1 if frames is None else frames.num_available, len(waiting), waiting.num_turns,
        *((-1, -1) if first is None else (first.request.request_id, first.tokens.length)), len(state.kept), len(state.sessions),
        *_of_host(pool.host), len(state.chunks), *sorted(state.chunks), *[getattr(state.stats, name) for name in Stats.__slots__],
    ]  # fmt: skip
    hashed = blake2b(pack(f"<{len(facts)}q", *facts), digest_size=SIZE)
    for part in _running(state.running):
        hashed.update(part)
    for part in _everything(state) if whole else ():
        hashed.update(part)
    return hashed.digest()


def _of_host(host: HostPages | None) -> tuple[int, ...]:
    return (
        (-1,) if host is None else (host.num_pages, host.used.num_used, host.used.unused, host.ages.count, host.ages.oldest, host.ages.now)
    )


def _running(running: tuple[Sequence, ...] | Steady) -> list[bytes]:
    """The running requests: the id, the tokens that are left and the newest token of each. The same while they are `Steady` and after."""
    if not isinstance(running, Steady):
        return [_rows(running, 0)]
    if running.log is None or not running.age:
        return [_rows(running.base, running.age)]
    tokens = running.log.arrays[0][running.age - 1]
    newest = tokens[: len(running)] if running.columns is None else tokens[running.columns]
    rows = np.array((running.ids, running.left - running.age, newest), np.int64)
    return [rows.tobytes()]


def _rows(sequences: tuple[Sequence, ...], age: int) -> bytes:
    ids = [s.request.request_id for s in sequences]
    left = [s.request.max_len - s.tokens.length - age for s in sequences]
    newest = [s.tokens.buffer.data.item(s.tokens.length - 1) for s in sequences]
    return pack(f"<{3 * len(sequences)}q", *ids, *left, *newest)


def _everything(state: EngineState) -> list[bytes]:
    pool, running = state.pool, state.running
    rest, free = pool.pages.returned, list[int]()
    while rest is not None:
        free.append(rest[0])
        rest = rest[1]
    parts = [pool.pages.counts.copy().tobytes(), np.array(free, np.int64).tobytes(), np.array(pool.prefix.pages(), np.int64).tobytes()]
    sequences = running.base if isinstance(running, Steady) else running
    for one in chain(sequences, state.waiting, [state.kept[key] for key in sorted(state.kept)]):
        parts += [pack("<qq", one.request.request_id, one.request.seed), one.tokens.array(0, one.request.num_prompt).tobytes()]
        parts.append(one.pages.array().tobytes())
    for row, one in enumerate(sequences):
        reply = running.reply(row, 0) if isinstance(running, Steady) else one.tokens.array(one.request.num_prompt).tolist()
        parts.append(np.array(reply, np.int64).tobytes())
    if (host := pool.host) is not None:
        parts += [pack("<q?", at, at in host.bare) + host.key_of[at] for at in sorted(host.key_of)]
        parts += [np.array((key, *host.moved[key].pages), np.int64).tobytes() for key in sorted(host.moved)]
        if (disk := host.disk) is not None:
            parts += [pack("<q?", at, at in disk.framed) + key for at, key in sorted(disk.reading.items())]
        parts += [np.array(host.ages.pages(), np.int64).tobytes(), host.used.counts.copy().tobytes()]
    for chunk in (state.chunks[key] for key in sorted(state.chunks)):
        parts += [chunk.token_ids.tobytes(), chunk.pages.array().tobytes(), str(chunk.provenance).encode(), pack("<q", chunk.num_exact)]
    return parts
