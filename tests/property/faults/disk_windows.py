"""Planted faults in the KV of sliding-window layers that is kept on disk: frames, and pages whose frames are elsewhere."""

from dataclasses import replace

import numpy as np

from nanovllm.engine import host_copies
from nanovllm.executor import kv_disk
from nanovllm.executor.kv_offload import HostMemory
from nanovllm.state import disk_pages
from nanovllm.state import pages as page_ops
from nanovllm.state import pool as pools
from nanovllm.state.disk_reads import NOTHING, WHOLE
from nanovllm.state.prefix_keys import frame_key, is_frame
from nanovllm.testing.machines.disk_windows import DiskFrameMachine, DiskWindowMachine
from tests.property.faults.engine import Fault


def _takes_frames_of_other_prefixes(lasting):
    def faulty(host, pages):
        pairs = lasting(host, pages)
        frames = [key for _, key in pairs if is_frame(key)]
        return [(at, frames.pop() if is_frame(key) else key) for at, key in pairs]

    return faulty


def _writes_frames_of_bare_pages(lasting):
    def faulty(host, pages):
        pages = [*pages]
        pairs = lasting(host, pages)
        bare = [(at, frame_key(key)) for at, key in pairs if at in host.bare]
        return [*pairs, *bare]

    return faulty


def _does_not_wait_for_frames(arrived):
    return lambda host, ended: arrived(host, [(at, WHOLE if part else NOTHING) for at, part in ended])


def _keeps_a_bare_page_that_was_replaced(arrived):
    def faulty(host, ended):
        after = arrived(host, ended)
        replaced = [at for at, key in host.key_of.items() if after.by_key.get(key, at) != at]
        return replace(after, used=page_ops.retain(host.used, np.array(replaced, np.int32))) if replaced else after

    return faulty


def _takes_a_page_for_its_frame(frame_key):
    return lambda key: key


def _reads_frames_into_pages(view):
    return lambda memory, at, place=0: view(memory, at)


def _finds_frames_that_are_gone(addresses):
    def faulty(pool, pages):
        first, second = addresses(pool, pages)
        return np.maximum(first, 0), None if second is None else np.maximum(second, 0)

    return faulty


def _fault(name, faulty, *targets, machine=DiskWindowMachine, draw=0):
    return Fault(name=f"disk windows: {name}", machine=machine, targets=targets, faulty=faulty, draw=draw)


LASTING = (host_copies, "lasting"), (disk_pages, "lasting")
DISK_WINDOW_FAULTS: tuple[Fault, ...] = (
    _fault("frames of other prefixes are written", _takes_frames_of_other_prefixes, *LASTING),
    _fault("frames that were not copied are written", _writes_frames_of_bare_pages, *LASTING, draw=1),
    _fault("pages are used before their frames came", _does_not_wait_for_frames, (disk_pages, "arrived")),
    _fault("a page that was replaced by a whole one stays used", _keeps_a_bare_page_that_was_replaced, (disk_pages, "arrived"), draw=15),
    _fault("the file of a page is taken for that of its frame", _takes_a_page_for_its_frame, (kv_disk, "frame_key")),
    _fault("frames are read into the place of pages", _reads_frames_into_pages, (HostMemory, "view")),
    _fault("pages without KV are flushed", _finds_frames_that_are_gone, (pools, "addresses"), machine=DiskFrameMachine),
)
