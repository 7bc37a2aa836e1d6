"""Planted faults in what a failed step leaves, and in whose an error is."""

from dataclasses import replace

from nanovllm.engine import failures
from nanovllm.engine import step as engine
from nanovllm.testing.machines.engine import EngineMachine
from nanovllm.testing.machines.failures import FailureMachine
from tests.property.faults.engine import Fault


def _loses_pages_of_the_failed(give_up_together):
    def ended(sequence):
        return len(sequence.tokens) >= sequence.request.max_len or sequence.tokens[-1] in sequence.request.stop_ids

    def faulty(pool, sequences):
        return give_up_together(pool, [sequence for sequence in sequences if ended(sequence)])

    return faulty


def _trusts_the_failed_pass(forgotten):
    def faulty(state, lost):
        after = forgotten(state, lost)
        return replace(after, running=tuple(s.advance(s.todo) for s in after.running))

    return faulty


def _trusts_what_was_overwritten(overwritten):
    return lambda pool, pages, frames: frozenset()


def _loses_a_token_of_another(draw):
    def faulty(sequence, token, drawn, row, now, failed):
        others, after = len(failed), draw(sequence, token, drawn, row, now, failed)
        return sequence if others and len(failed) == others else after

    return faulty


def _blames_another(draw):
    def faulty(sequence, token, drawn, row, now, failed):
        before, after, rid = set(failed), draw(sequence, token, drawn, row, now, failed), sequence.request.request_id
        if rid in failed and rid not in before:
            failed[rid - 1] = failed.pop(rid)
        return after

    return faulty


def _ends_all(recovered):
    def faulty(model, state, error, attempt):
        done = recovered(model, state, error, attempt)
        if done is None or not done[1]:
            return done
        return replace(done[0], running=()), *done[1:]

    return faulty


def _never_recovers(relaxed):
    return lambda state: state


FAILURE_FAULTS: tuple[Fault, ...] = (
    Fault(
        name="pages of a failed request lost",
        machine=EngineMachine,
        targets=((failures, "give_up_together"),),
        faulty=_loses_pages_of_the_failed,
    ),
    Fault(
        name="a pass that failed is trusted",
        machine=EngineMachine,
        targets=((failures, "forgotten"),),
        faulty=_trusts_the_failed_pass,
    ),
    Fault(
        name="KV that a pass without memory overwrote still trusted",
        machine=FailureMachine,
        targets=((failures, "overwritten"),),
        faulty=_trusts_what_was_overwritten,
    ),
    Fault(
        name="a token lost by another request",
        machine=FailureMachine,
        targets=((engine, "draw"),),
        faulty=_loses_a_token_of_another,
        draw=1,
    ),
    Fault(name="an error given to another request", machine=FailureMachine, targets=((engine, "draw"),), faulty=_blames_another),
    Fault(name="others dropped with the failed", machine=FailureMachine, targets=((engine, "recovered"),), faulty=_ends_all),
    Fault(name="a budget that never recovers", machine=EngineMachine, targets=((engine, "relaxed"),), faulty=_never_recovers, draw=1),
)
