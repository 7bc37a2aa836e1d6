"""What an engine learns from its disk: which reads have ended, which pages there are, and the time.

Ranks have files of their own, and their reads end at different times. All of them must plan alike, so they tell each other: a page is there
when each rank has its part of it, and the time is that of rank 0.
"""

from collections.abc import Sequence as Seq

import numpy as np

from nanovllm.config import Mesh
from nanovllm.executor.distributed import gathered, least
from nanovllm.executor.kv_disk import DiskTier
from nanovllm.state.engine_state import EngineState

Ended = list[tuple[int, bool]]


def mesh_of(state: EngineState) -> Mesh | None:
    """The ranks of an engine; None if it has one."""
    mesh = state.runtime.lease.model.mesh
    return None if mesh is None or mesh.size == 1 else mesh


def told_by_all(disk: DiskTier, mesh: Mesh | None, ended: Ended) -> tuple[Ended, float]:
    """The reads of an engine that have ended, and the time. Ranks call this at the same time.

    Args:
        disk: The disk of this rank.
        mesh: The ranks.
        ended: The host pages whose reads have ended here, in their order, each with whether its page is there.

    Returns:
        Those that have ended on all ranks, in the order of rank 0, with whether all of them are there; and seconds of a monotonic clock.
    """
    now = disk.clock()
    if mesh is None:
        return ended, now
    own = np.array([now, *(2 * at + whole for at, whole in ended)])
    first, *others = (np.frombuffer(told) for told in gathered(mesh, own.tobytes()))
    pages, whole = np.divmod(first[1:].astype(np.int64), 2)
    there = np.ones(len(pages), bool)
    for told in others:
        found, has = np.divmod(told[1:].astype(np.int64), 2)
        known = np.full(1 + max(pages.max(initial=-1), found.max(initial=-1)), -1)
        known[found] = has
        there &= known[pages] >= 0
        whole &= known[pages]
    return [(int(at), bool(has)) for at, has in zip(pages[there], whole[there], strict=True)], float(first[0])


def on_all_disks(mesh: Mesh | None, keys: Seq[bytes]) -> Seq[bytes]:
    """Those of some keys in a row whose pages are on the disks of all ranks, which call this at the same time with what they found."""
    return keys[: least(mesh, [len(keys)])[0]]
