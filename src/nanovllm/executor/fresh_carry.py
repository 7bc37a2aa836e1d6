"""Whether a carry of a session is the newest one, and has room for another step."""

import reprlib
from typing import Any

from nanovllm.errors import DonatedStateError, InvalidRequestError
from nanovllm.executor.decode_carry import DecodeCarry, TokenLog
from nanovllm.state.device_errors import watched
from nanovllm.state.lease import Lease
from nanovllm.types import Tensor


def require_carry(carry: Any) -> None:
    """Raise `InvalidRequestError` if `carry` is not a `DecodeCarry`."""
    if not isinstance(carry, DecodeCarry):
        raise InvalidRequestError(f"carry={reprlib.repr(carry)} must be a DecodeCarry from begin(...), not {type(carry).__name__}")


def log_of(carry: Any) -> TokenLog:
    """The log of a carry of `begin`. Raises `InvalidRequestError` for anything else."""
    require_carry(carry)
    if carry.log is None:
        raise InvalidRequestError(f"carry={carry!r} has no log: pass the carry of begin, or of a later decode_step")
    return carry.log


def engine_of(log: TokenLog | None) -> Lease | None:
    """The lease of the engine of a session, or None."""
    return None if log is None or log.lease is None else log.lease.engine


def require_fresh(log: TokenLog) -> int:
    """Return how many steps the carry of this log has seen. Waits for the device only if the host does not know the carry.

    Raises:
        DonatedStateError: The carry was donated to a step, or committed.
        EngineDeadError: The device is broken.
    """
    lease = log.lease
    if (engine := engine_of(log)) is not None:
        engine.require_alive()
    if lease is not None and not lease.committed and lease.knows(log.num_steps, _counters(log)):
        return lease.num_steps
    if lease is not None and not lease.committed and lease.outdated(log.num_steps):
        raise DonatedStateError(f"this carry of session {lease.session} was donated to a captured function: use the carry that it returned")
    with watched(engine):
        ran, num_steps = int(log.ran), int(log.num_steps)
    if lease is not None and lease.committed:
        ran = -1
    if ran != num_steps:
        raise DonatedStateError(
            f"this carry has seen {num_steps} steps of session {int(log.session)}, "
            + (
                "which was committed or abandoned"
                if ran < 0
                else f"of which {ran} were run: a step took it over; use the carry that this step returned"
            )
        )
    if log.branches is not None and int(log.branches.ran) != int(log.branches.num_splits):
        raise DonatedStateError(f"the rows of this carry of session {int(log.session)} were split: use the carry that split_rows returned")
    return num_steps


def _counters(log: TokenLog) -> tuple[Tensor, ...]:
    """The tensors that every step, and every split, of the session counts up in place."""
    return (log.ran,) if log.branches is None else (log.ran, log.branches.ran)


def require_room(log: TokenLog, num_steps: int, more: int = 1) -> None:
    """Raise `InvalidRequestError` if `more` steps from a carry that has seen `num_steps` steps exceed the session's room."""
    if num_steps + more > log.token_ids.shape[1]:
        raise InvalidRequestError(
            f"this carry has seen {num_steps} steps and its session has room={log.token_ids.shape[1]}: commit it, or begin with more room"
        )


def note(log: TokenLog, num_steps: int) -> None:
    """Let the host know that the carry of this log is the newest, and has seen `num_steps` steps."""
    if log.lease is not None:
        log.lease.note(log.num_steps, _counters(log), num_steps)
