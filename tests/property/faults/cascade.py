"""Planted faults in cascade attention and in the code that makes pages shared: plans, sessions, the prefix index and moved KV."""

from dataclasses import replace

from nanovllm import ops
from nanovllm.executor.cascade_policy import CascadePolicy
from nanovllm.executor.eager import EagerExecutor
from nanovllm.ops.attention import cascade
from nanovllm.state import pages
from nanovllm.testing.machines.cascade import CascadeChunkMachine, CascadeMachine
from nanovllm.testing.machines.chunks import ChunkMachine, ModelChunkMachine
from tests.property.faults.engine import Fault

# Plans


def _keeps_the_old_plan(refresh):
    def faulty(self, *arguments, **options):
        plan = self._plan
        carry = refresh(self, *arguments, **options)
        self._plan = plan
        return replace(carry, batch=replace(carry.batch, plan=0 if plan is None else plan.handle))

    return faulty


def _follows_their_plan(begin):
    def faulty(self, *arguments, **options):
        carry = begin(self, *arguments, **options)
        return carry if self._plan is None else replace(carry, batch=replace(carry.batch, plan=self._plan.handle))

    return faulty


def _lets_plans_go_at_once(begin):
    def faulty(self, model, kv, rows, ticket, *more, **options):
        carry = begin(self, model, kv, rows, ticket, *more, **options)
        self.end(ticket)
        return carry

    return faulty


def _shares_up_to_the_end(prompts):
    return lambda self, host: self._runs(host, host.seq_lens // self.page_size, 0)


def _shares_the_last_page(decode):
    return lambda self, host: self._runs(host, -(-host.seq_lens // self.page_size), 0)


# Parts


def _weighs_in_another_base(attend_part):
    def faulty(*args, **options):
        out, lse = attend_part(*args, **options)
        return out, lse / cascade.LOG2E

    return faulty


# Moved KV


def _moves_to_other_pages(upcoming):
    def faulty(state, count):
        found = upcoming(state, count)
        return None if found is None else found[::-1]

    return faulty


def _moves_one_slot_too_far(move_kv):
    return lambda kv, source, target, shift, inv_freq: move_kv(kv, source, target.roll(1), shift, inv_freq)


def _fault(name, faulty, *targets, machine, draw=0):
    return Fault(name=name, machine=machine, targets=targets, faulty=faulty, draw=draw)


CASCADE_FAULTS: tuple[Fault, ...] = (
    _fault("an old plan after pages grew", _keeps_the_old_plan, (EagerExecutor, "refresh"), machine=CascadeMachine),
    _fault("a session on the plan of the requests", _follows_their_plan, (EagerExecutor, "begin"), machine=CascadeMachine, draw=7),
    _fault("a plan deleted before its session ends", _lets_plans_go_at_once, (EagerExecutor, "begin"), machine=CascadeMachine, draw=2),
    _fault("shared pages that some queries see in part", _shares_up_to_the_end, (CascadePolicy, "prompts"), machine=CascadeChunkMachine),
    _fault("the last page of rows shared", _shares_the_last_page, (CascadePolicy, "decode"), machine=CascadeMachine),
    _fault("parts weighed in another base", _weighs_in_another_base, (cascade, "attend_part"), machine=ModelChunkMachine, draw=1),
    _fault("moved to other pages than are allocated", _moves_to_other_pages, (pages, "upcoming"), machine=ChunkMachine),
    _fault("moved to other slots", _moves_one_slot_too_far, (ops, "move_kv"), machine=ChunkMachine),
)
