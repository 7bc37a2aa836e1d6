"""Planted faults in KV that is kept on disk."""

from dataclasses import replace
from unittest.mock import patch

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize
from immutables import Map

from nanovllm.engine import meeting
from nanovllm.executor import kv_disk, page_file
from nanovllm.executor.kv_disk import DiskTier
from nanovllm.executor.page_folder import PageFolder
from nanovllm.state import disk_pages, lru, offload
from nanovllm.state import pages as page_ops
from nanovllm.state.prefix_keys import keys_from
from nanovllm.testing.machines.disk import DiskMachine
from nanovllm.testing.shadows.late_disk import LateWorkers
from tests.property.faults.engine import Fault


def _trusts_changed_files(digest):
    return lambda head, image: bytes(32)


def _writes_pages_that_were_replaced(write):
    return lambda tier, key, image, used, source=None: write(tier, key, image, used)


def _does_not_note_what_is_replaced(overwriting):
    return lambda tier, pages: None


def _takes_every_read_for_whole(arrived):
    return lambda host, ended: arrived(host, [(at, True) for at, _ in ended])


def _does_not_wait_for_the_reads_of_a_failed_call(function):
    def faulty(tier, pages):
        readers, tier._readers = tier._readers, LateWorkers()
        try:
            return function(tier, pages)
        finally:
            tier._readers = readers

    return faulty


def _forgets_reads_after_a_failure_without_freeing(forget):
    def faulty(host, lost):
        lost = [*lost]
        if host.disk is not None:
            reading = host.disk.reading
            for at in lost:
                reading = reading.delete(at) if at in reading else reading
            host = replace(host, disk=replace(host.disk, reading=reading))
        return forget(host, lost)

    return faulty


def _gives_away_pages_that_are_being_read(read_ahead):
    def faulty(host, *arguments, **options):
        after, pairs = read_ahead(host, *arguments, **options)
        return replace(after, used=page_ops.release(after.used, np.array([at for at, _ in pairs], np.int32))), pairs

    return faulty


def _mixes_up_what_is_read(arrived):
    def faulty(host, ended):
        if host.disk is None or len(ended) < 2:
            return arrived(host, ended)
        pages, reading = [at for at, _ in ended], host.disk.reading
        for at, other in zip(pages, pages[::-1], strict=True):
            reading = reading.set(at, host.disk.reading[other])
        return arrived(replace(host, disk=replace(host.disk, reading=reading)), ended)

    return faulty


def _mixes_up_what_is_written(keep):
    def faulty(tier, pairs, used=None):
        pairs = [*pairs]
        return keep(tier, [(at, key) for (at, _), (_, key) in zip(pairs, pairs[::-1], strict=True)], used)

    return faulty


def _flushes_other_pages(images_of):
    return lambda kv, pages: images_of(kv, [*pages[1:], pages[0]])


def _keeps_all_files(shrunk):
    return lambda folder, files, limit: folder._seen(files)


def _counts_a_page_that_came_twice(arrived):
    def faulty(host, ended):
        after = arrived(host, ended)
        lost = [at for at, whole in ended if not whole]
        return replace(after, used=page_ops.retain(host.used, np.array(lost, np.int32))) if lost else after

    return faulty


def _lets_reads_replace_chunks(read_ahead):
    def faulty(host, request_id, keys, *arguments, **options):
        after, pairs = read_ahead(host, request_id, keys, *arguments, **options)
        kept = np.array([at for key in keys if (at := after.by_key.get(key)) is not None and after.used.refcount(at) > 1], np.int32)
        return replace(after, ages=lru.add(lru.remove(after.ages, kept), kept)), pairs

    return faulty


def _takes_what_is_still_being_read(gone_on):
    def faulty(draft, sequence):
        host = draft.pool.host
        by_key = host.by_key.update({key: at for at, key in host.disk.reading.items()})
        draft.pool = replace(draft.pool, host=replace(host, by_key=by_key))
        sequence = gone_on(draft, sequence)
        after = draft.pool.host
        draft.pool = replace(draft.pool, host=replace(after, by_key=Map({key: at for at, key in after.key_of.items()})))
        return sequence

    return faulty


def _skips_missing_pages(gone_on):
    def every(host, tokens, start, page_size, namespace=0, *more, **options):
        keys = keys_from(tokens, start, page_size, namespace)
        return [at for key in keys if (at := host.by_key.get(key)) is not None]

    def faulty(draft, sequence):
        with patch.object(offload, "find", every):
            return gone_on(draft, sequence)

    return faulty


def _counts_what_it_ran_as_reused(gone_on):
    def faulty(draft, sequence):
        after = gone_on(draft, sequence)
        draft.num_reused += sequence.num_filled if after.num_filled > sequence.num_filled else 0
        return after

    return faulty


class Splits(DiskMachine):
    """`DiskMachine` in which many requests run the front of their prompts while the other pages are read."""

    max_tokens = 60

    @initialize(data=st.data(), slowness=st.sampled_from([1.0, 2.0]))
    def start(self, data: st.DataObject, slowness: float) -> None:
        """Start with much host memory and a slow disk."""
        super().start(data, 12, slowness)

    abandon = begin = begin_from = break_disk = come_back = commit = crash = damage = decode = detach = fail_to_prefill = None
    failing_step = flush = fork = generate = generate_from = lose_host_memory = misuse = offload = other_engine = None
    plant_failure = prefill = prefill_after = read_back = release = step_without_memory = submit_context = None


class FailedCalls(DiskMachine):
    """`DiskMachine` in which many calls fail while pages are read for them."""

    abandon = begin = begin_from = break_disk = come_back = commit = crash = damage = decode = detach = fork = generate = None
    generate_from = meet = misuse = other_engine = prefill_after = submit_context = None


DISK_FAULTS: tuple[Fault, ...] = (
    Fault(name="disk: a changed file is trusted", machine=DiskMachine, targets=((page_file, "_digest"),), faulty=_trusts_changed_files),
    Fault(
        name="disk: a host page is written after it was replaced",
        machine=DiskMachine,
        targets=((DiskTier, "_write"),),
        faulty=_writes_pages_that_were_replaced,
    ),
    Fault(
        name="disk: replacing a host page is not noted",
        machine=DiskMachine,
        targets=((DiskTier, "overwriting"),),
        faulty=_does_not_note_what_is_replaced,
    ),
    Fault(
        name="disk: a read that failed counts as whole",
        machine=DiskMachine,
        targets=((disk_pages, "arrived"),),
        faulty=_takes_every_read_for_whole,
    ),
    Fault(
        name="disk: reads of a failed call go on",
        machine=FailedCalls,
        targets=((DiskTier, "ended"), (DiskTier, "overwriting")),
        faulty=_does_not_wait_for_the_reads_of_a_failed_call,
    ),
    Fault(
        name="disk: pages of lost reads stay used",
        machine=DiskMachine,
        targets=((offload, "forget"),),
        faulty=_forgets_reads_after_a_failure_without_freeing,
        draw=2,
    ),
    Fault(
        name="disk: a host page is free while it is read",
        machine=DiskMachine,
        targets=((disk_pages, "read_ahead"),),
        faulty=_gives_away_pages_that_are_being_read,
    ),
    Fault(
        name="disk: reads get each other's keys",
        machine=DiskMachine,
        targets=((disk_pages, "arrived"),),
        faulty=_mixes_up_what_is_read,
    ),
    Fault(
        name="disk: files get each other's keys",
        machine=DiskMachine,
        targets=((DiskTier, "keep"),),
        faulty=_mixes_up_what_is_written,
    ),
    Fault(name="disk: other pages are flushed", machine=DiskMachine, targets=((kv_disk, "_images_of"),), faulty=_flushes_other_pages),
    Fault(name="disk: old files stay", machine=DiskMachine, targets=((PageFolder, "_shrunk"),), faulty=_keeps_all_files),
    Fault(
        name="disk: a page that did not come stays used",
        machine=DiskMachine,
        targets=((disk_pages, "arrived"),),
        faulty=_counts_a_page_that_came_twice,
    ),
    Fault(
        name="disk: a chunk gets pages into which a failed call reads",
        machine=FailedCalls,
        targets=((DiskTier, "overwriting"),),
        faulty=_does_not_wait_for_the_reads_of_a_failed_call,
    ),
    Fault(
        name="disk: reads replace pages of chunks",
        machine=DiskMachine,
        targets=((disk_pages, "read_ahead"),),
        faulty=_lets_reads_replace_chunks,
        draw=8,
    ),
    Fault(
        name="disk: last pages of preempted requests are written",
        machine=DiskMachine,
        targets=((disk_pages, "is_full"),),
        faulty=lambda is_full: lambda key: True,
        draw=2,
    ),
    Fault(
        name="split: pages are taken that are still being read",
        machine=Splits,
        targets=((meeting, "gone_on"),),
        faulty=_takes_what_is_still_being_read,
    ),
    Fault(
        name="split: a page that is missing is jumped over",
        machine=Splits,
        targets=((meeting, "gone_on"),),
        faulty=_skips_missing_pages,
    ),
    Fault(
        name="split: what ran before counts as reused",
        machine=Splits,
        targets=((meeting, "gone_on"),),
        faulty=_counts_what_it_ran_as_reused,
    ),
)
