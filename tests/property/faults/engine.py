"""Planted faults: real bugs of engines of this kind, each with the machine that must find it.

`chunks.py` has faults in functions on chunks, `cascade.py` in cascade attention, and `windows.py` in sliding windows.
"""

import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from nanovllm.chunks import generate, session_rows
from nanovllm.chunks import prefill as fill
from nanovllm.engine import draft as drafts
from nanovllm.engine import preemption, requests, scheduler
from nanovllm.engine import step as engine
from nanovllm.engine.prompt_room import PromptRoom
from nanovllm.executor import carry
from nanovllm.state import pages, pool
from nanovllm.state import prefix_cache as prefix
from nanovllm.state.kv_cache import pages_for
from nanovllm.state.lease import Lease
from nanovllm.state.request import Queue
from nanovllm.state.vector import IntVector
from nanovllm.testing.machines import scheduler as schedules
from nanovllm.testing.machines.cascade import CascadeMachine
from nanovllm.testing.machines.engine import EngineMachine
from nanovllm.testing.machines.pages import PageMachine
from nanovllm.testing.machines.prefix import PrefixMachine
from nanovllm.testing.machines.scheduler import ScheduleMachine
from nanovllm.testing.shadows.memory import indexed_runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A bug: `faulty` makes the broken function from the right one, and the broken one replaces each of `targets` (owner, name).

    `draw` seeds the examples, so that they do not change with the text of the machine. A fault that seed 0 finds late has another seed.
    """

    name: str
    machine: type[RuleBasedStateMachine]
    targets: tuple[tuple[Any, str], ...]
    faulty: Callable[[Any], Any]
    draw: int = 0


@contextmanager
def planted(*faults: Fault) -> Iterator[None]:
    """Put the faults into the package until the block ends."""
    with ExitStack() as stack:
        for fault in faults:
            for owner, name in fault.targets:
                stack.enter_context(patch.object(owner, name, fault.faulty(getattr(owner, name))))
        yield


def find(machine: type[RuleBasedStateMachine], *, max_examples: int, rules: int = 50, draw: int = 0) -> Exception | None:
    """Run a machine over the examples that `draw` seeds, without shrinking. Returns the failure that it ends with, or None."""
    machine = seed(draw)(type(machine.__name__, (machine,), {}))
    chosen = settings(
        max_examples=max_examples,
        stateful_step_count=rules,
        deadline=None,
        derandomize=True,
        database=None,
        print_blob=False,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )
    try:
        run_state_machine_as_test(machine, settings=chosen)
    except Exception as failure:  # any consequence of the fault: a mismatch, a broken invariant, an index out of range
        if is_outdated(failure):
            raise
        return failure
    return None


def is_outdated(failure: BaseException) -> bool:
    """Whether a fault no longer fits the code: it was called in a way that it does not know, or its own lines failed."""
    one: BaseException | None = failure
    while one is not None:
        if isinstance(one, TypeError) and re.search(r"\.<locals>\.(\w+|<lambda>)\(\) (takes|got|missing)", str(one)):
            return True
        frames = traceback.extract_tb(one.__traceback__)
        if isinstance(one, TypeError | AttributeError) and frames and Path(frames[-1].filename).parent == Path(__file__).parent:
            return True
        one = one.__cause__ or one.__context__
    return False


# Pages


def _double_free(release):
    def faulty(state, held):
        held = list(held)
        twice = [page for page in held if state.refcount(page) == 0]
        after = release(state, [page for page in held if page not in twice])
        returned = after.returned
        for page in twice:
            returned = (page, returned)
        return replace(after, returned=returned)

    return faulty


def _changes_the_old_value(allocate):
    def faulty(state, count):
        done = allocate(state, count)
        if done is not None:
            object.__setattr__(state, "counts", done[0].counts)
        return done

    return faulty


def _takes_what_there_is(allocate):
    return lambda state, count: allocate(state, min(count, state.num_free))


def _writes_shared(require_writable):
    return lambda state, written: require_writable(state, [page for page in written if state.refcount(page) < 2])


# Prefix index


def _ignores_earlier_tokens(match):
    def faulty(index, tokens, *more, **options):
        size, found = index.page_size, []
        by_tokens = {run[-size:]: page for run, page in indexed_runs(index)}
        for start in range(0, len(tokens) // size * size, size):
            page = by_tokens.get(tuple(tokens[start : start + size].tolist()))
            if page is None or page in found:
                break
            found.append(page)
        return np.array(found, np.int32)

    return faulty


def _stays_evictable(set_busy):
    return lambda index, held: index


def _evicts_the_youngest(evict):
    def faulty(index, count):
        before = {index.before(page) for page in index.pages()}
        leaves = [page for page in reversed(index.idle_pages()) if page not in before][:count]
        if len(leaves) < count:
            return evict(index, count)
        return prefix.forget(index, frozenset(leaves))

    return faulty


def _indexes_partly_filled(insert):
    def faulty(index, tokens, *more, **options):
        missing = -len(tokens) % index.page_size
        return insert(index, np.concatenate([tokens, np.zeros(missing, np.int32)]), *more, **options)

    return faulty


def _indexes_out_of_order(set_idle):
    return lambda index, held: set_idle(index, held[::-1])


def _leaves_the_tail_out(insert):
    def faulty(index, tokens, pages, *more, **options):
        known = index.contains(pages[: len(tokens) // index.page_size])
        own = pages[: len(known) if known.all() else int(known.argmin())]
        others = len(prefix.match(index, tokens, *more, **options)) > len(own)
        return (index, prefix.NO_PAGES) if others else insert(index, tokens, pages, *more, **options)

    return faulty


def _forgets_only_itself(forget):
    def faulty(index, lost):
        gone = np.array([page for page in lost if page in index], np.int32)
        return (prefix._unlink(index, gone), gone) if len(gone) else (index, gone)

    return faulty


# Scheduler


def _leaks_on_preemption(preempt):
    def faulty(draft, at):
        before = draft.pool
        preempt(draft, at)
        draft.pool = before

    return faulty


def writes_without_copy(reserve):
    """Return a `reserve` that does not copy a partly filled shared page."""

    def faulty(state, sequence, length, page_size):
        missing = max(0, pages_for(length, page_size) - len(sequence.pages))
        taken = pool.allocate(state, missing)
        if taken is None:
            return None
        return taken[0], sequence.with_pages(sequence.pages.extend(taken[1]), sequence.num_filled), [], taken[1]

    return faulty


def _reserves_one_less(reserve):
    return lambda state, sequence, length, page_size: reserve(state, sequence, length - 1, page_size)


def _forgets_to_empty(without_pages):
    return lambda sequence: sequence.with_pages(IntVector.of(), sequence.num_filled)


def _preempts_the_oldest(preempt):
    return lambda draft, at: preempt(draft, 0)


def _gives_up_too_early(strip_waiting):
    return lambda draft, *more, **options: False


def _offers_nothing(offer):
    return lambda draft, prefill: None


def _offers_whole_prompts(offer):
    return lambda draft, prefill: offer(draft, [(sequence, sequence.todo) for sequence, _ in prefill])


def _preempts_who_was_shared(admit):
    def faulty(draft, budget):
        admitted = admit(draft, budget)
        if admitted is not None and len(draft.running) > 1:
            preemption.preempt(draft, draft.find(admitted[0]) - 1)
        return admitted

    return faulty


def _indexes_all_it_has(give_up_pages):
    return lambda state, sequence: give_up_pages(state, replace(sequence, num_filled=len(sequence.tokens)))


def _waits_for_a_filler_that_is_gone(may_admit):
    return lambda draft: may_admit(draft) and (bool(draft.running) or draft.waiting.first().most_filled == 0)


def _does_not_age(rank_of):
    return lambda priority, num_steps: rank_of(priority << 20, num_steps)


def _higher_first(rank_of):
    return lambda priority, num_steps: rank_of(-priority, num_steps)


def _bounds_nothing(of):
    return lambda config, num_decoding: of(replace(config, max_prefill_tokens=None), num_decoding)


def _newest_first(first):
    return lambda queue: queue.items[max(queue.items)] if queue.items else None


# Engine


def _loses_pages_of_the_cancelled(give_up_pages):
    def faulty(state, sequence):
        ended = len(sequence.tokens) >= sequence.request.max_len or sequence.tokens[-1] in sequence.request.stop_ids
        return give_up_pages(state, sequence) if ended else state

    return faulty


def _forgets_failures(lose):
    return lambda lease, *lost, **options: None


def _forgets_what_was_overwritten(lose):
    return lambda lease, pages, *more, **options: lose(lease, (), *more, **options)


def _keeps_old_page_tables(plan):
    return lambda *args, **options: replace(plan(*args, **options), grew=False)


def _copies_nothing(copy_pages):
    return lambda kv, *copies, **options: kv


def _accepts_donated(check):
    return lambda lease, epoch: None


def _draws_by_row(sampling_of):
    return lambda rows, model: sampling_of(
        [replace(s, request=replace(s.request, seed=s.request.seed + row)) for row, s in enumerate(rows)], model
    )


def _overwrites_siblings(extend):
    def faulty(vector, values):
        values, end = list(values), vector.length + len(list(values))
        if end > len(vector.buffer.data):
            return extend(vector, values)
        vector.buffer.data[vector.length : end] = values
        vector.buffer.used[0] = end
        return IntVector(vector.buffer, end)

    return faulty


def _counts_no_reruns(counted):
    return lambda sequence, count: (counted(sequence, count)[0], 0)


def _promises_too_much(bounded):
    return lambda state, sequences: sequences


def _goes_on_after_the_end(finish_reason):
    def faulty(sequence, token, *more, **options):
        return None if token in sequence.request.stop_ids else finish_reason(sequence, token, *more, **options)

    return faulty


FAULTS: tuple[Fault, ...] = (
    Fault(name="a double free", machine=PageMachine, targets=((pages, "release"),), faulty=_double_free),
    Fault(name="an old value changed", machine=PageMachine, targets=((pages, "allocate"),), faulty=_changes_the_old_value),
    Fault(name="fewer pages than asked for", machine=PageMachine, targets=((pages, "allocate"),), faulty=_takes_what_there_is),
    Fault(name="a shared page called writable", machine=PageMachine, targets=((pages, "require_writable"),), faulty=_writes_shared, draw=2),
    Fault(
        name="a prefix hit that ignores earlier tokens", machine=PrefixMachine, targets=((prefix, "match"),), faulty=_ignores_earlier_tokens
    ),
    Fault(name="eviction of a page in use", machine=PrefixMachine, targets=((prefix, "set_busy"),), faulty=_stays_evictable),
    Fault(name="eviction of the youngest", machine=PrefixMachine, targets=((prefix, "evict"),), faulty=_evicts_the_youngest),
    Fault(name="a partly filled page indexed", machine=PrefixMachine, targets=((prefix, "insert"),), faulty=_indexes_partly_filled),
    Fault(
        name="a page evicted before the pages after it",
        machine=PrefixMachine,
        targets=((prefix, "set_idle"),),
        faulty=_indexes_out_of_order,
    ),
    Fault(
        name="a lost page forgotten without the pages after it",
        machine=PrefixMachine,
        targets=((prefix, "forget"),),
        faulty=_forgets_only_itself,
        draw=1,
    ),
    Fault(name="a leak on preemption", machine=ScheduleMachine, targets=((preemption, "preempt"),), faulty=_leaks_on_preemption),
    Fault(name="a write to a shared page", machine=ScheduleMachine, targets=((drafts, "reserve"),), faulty=writes_without_copy, draw=1),
    Fault(name="one token too few reserved", machine=ScheduleMachine, targets=((drafts, "reserve"),), faulty=_reserves_one_less),
    Fault(
        name="preempted and still called filled",
        machine=ScheduleMachine,
        targets=((preemption, "_without_pages"),),
        faulty=_forgets_to_empty,
    ),
    Fault(name="the oldest preempted first", machine=ScheduleMachine, targets=((preemption, "preempt"),), faulty=_preempts_the_oldest),
    Fault(
        name="given up while others hold pages",
        machine=ScheduleMachine,
        targets=((preemption, "strip_waiting"),),
        faulty=_gives_up_too_early,
    ),
    Fault(name="shared beginnings run twice", machine=ScheduleMachine, targets=((scheduler, "offer"),), faulty=_offers_nothing, draw=3),
    Fault(
        name="a page offered that the step does not fill",
        machine=ScheduleMachine,
        targets=((scheduler, "offer"),),
        faulty=_offers_whole_prompts,
        draw=2,
    ),
    Fault(
        name="preempted after others took its pages",
        machine=ScheduleMachine,
        targets=((scheduler, "admit"),),
        faulty=_preempts_who_was_shared,
    ),
    Fault(
        name="pages shared that a preempted request did not fill",
        machine=ScheduleMachine,
        targets=((preemption, "give_up_pages"),),
        faulty=_indexes_all_it_has,
        draw=1,
    ),
    Fault(
        name="pages shared that a cancelled request did not fill",
        machine=EngineMachine,
        targets=((requests, "give_up_pages"),),
        faulty=_indexes_all_it_has,
        draw=2,
    ),
    Fault(
        name="a request that waits for ever",
        machine=ScheduleMachine,
        targets=((scheduler, "may_admit"),),
        faulty=_waits_for_a_filler_that_is_gone,
    ),
    Fault(
        name="the tail after another's pages not indexed",
        machine=PrefixMachine,
        targets=((prefix, "insert"),),
        faulty=_leaves_the_tail_out,
        draw=1,
    ),
    Fault(name="the newest admitted first", machine=ScheduleMachine, targets=((Queue, "first"),), faulty=_newest_first),
    Fault(name="ageing ignored", machine=ScheduleMachine, targets=((schedules, "rank_of"),), faulty=_does_not_age),
    Fault(name="priorities reversed", machine=ScheduleMachine, targets=((schedules, "rank_of"),), faulty=_higher_first),
    Fault(name="the bound on prompts ignored", machine=ScheduleMachine, targets=((PromptRoom, "of"),), faulty=_bounds_nothing, draw=2),
    Fault(name="pages lost on cancel", machine=EngineMachine, targets=((requests, "give_up_pages"),), faulty=_loses_pages_of_the_cancelled),
    Fault(name="a failed call forgotten", machine=EngineMachine, targets=((Lease, "lose"),), faulty=_forgets_failures),
    Fault(
        name="KV that a failed call overwrote still trusted",
        machine=EngineMachine,
        targets=((Lease, "lose"),),
        faulty=_forgets_what_was_overwritten,
    ),
    Fault(name="decode steps on old page tables", machine=EngineMachine, targets=((engine, "schedule"),), faulty=_keeps_old_page_tables),
    Fault(
        name="page copies left out", machine=EngineMachine, targets=((engine, "copy_pages"), (fill, "copy_pages")), faulty=_copies_nothing
    ),
    Fault(name="a donated state accepted", machine=EngineMachine, targets=((Lease, "check"),), faulty=_accepts_donated, draw=6),
    Fault(
        name="randomness that depends on the batch", machine=EngineMachine, targets=((carry, "sampling_of"),), faulty=_draws_by_row, draw=2
    ),
    Fault(name="tokens of a sibling overwritten", machine=EngineMachine, targets=((IntVector, "extend"),), faulty=_overwrites_siblings),
    Fault(name="reruns not counted", machine=EngineMachine, targets=((engine, "counted"),), faulty=_counts_no_reruns),
    Fault(name="more reserved than there is", machine=EngineMachine, targets=((generate, "_bounded"),), faulty=_promises_too_much),
    Fault(
        name="a reply that goes on after its end",
        machine=CascadeMachine,
        targets=((session_rows, "finish_reason"),),
        faulty=_goes_on_after_the_end,
        draw=3,
    ),
)
