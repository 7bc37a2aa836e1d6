"""`generate_many` with a function between logits and samples: the contexts are the rows of one batch from the first step to the last."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
import torch

from nanovllm.chunks.generation import Generation
from nanovllm.chunks.loop import Rows
from nanovllm.chunks.session_rows import closed, opened
from nanovllm.engine.output import scan
from nanovllm.executor.decode import decode_step, donated
from nanovllm.executor.decode_carry import DecodeCarry
from nanovllm.executor.executor import executor_of
from nanovllm.models.model import Model
from nanovllm.sampling.process_logits import LogitsProcessor
from nanovllm.state.engine_state import EngineState
from nanovllm.state.pool import Taken
from nanovllm.state.request import Sequence
from nanovllm.state.stop_scan import StopScan
from nanovllm.types import Tensor

Top = tuple[Tensor, Tensor] | None  # the most probable tokens of each row and their log-probabilities, if a row asked for them
SCANNED = 16  # steps between two searches for stop strings


def processed(
    model: Model, state: EngineState, sequences: Seq[Sequence], processor: LogitsProcessor, taken: Taken
) -> tuple[EngineState, list[Generation]]:
    """Generate one reply to each sequence. Donates the KV.

    A row that has ended stays in the batch, so that the processor sees the same rows in every step. On a GPU the step, with the processor,
    is one CUDA graph, which stops rows by itself.
    """
    executor, ticket = executor_of(state), state.next_id
    state, session, carry = opened(model, state, sequences, taken, processor=processor)
    lease = None if carry.log is None else carry.log.lease
    try:
        inputs, scans = _ends(sequences, model.device), [s.stops for s in sequences]
        step, rows, tops = executor.captured(_Step(model), carry, *inputs), Rows(), []
        for count in range(1, session.room + 1):
            carry, top = step(carry, *inputs)
            tops.append(top)
            if any(scans) and count % SCANNED == 0:
                carry, scans = _without_ended(carry, sequences, scans, count)
            if rows.all_stopped(carry, count):
                break
        return closed(model, state, session, carry, _stacked(tops))
    finally:
        executor.end(ticket)
        if lease is not None:
            lease.committed = True  # the graph may take the next call's carry


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """One decode step, after which rows stop that have sampled an end token or reached their length. Equal for the same model."""

    model: Model

    def __call__(self, carry: DecodeCarry, ends: Tensor, limits: Tensor) -> tuple[DecodeCarry, Top]:
        carry, out = decode_step(self.model.params, carry, self.model.config)
        assert carry.log is not None
        over = (out.token_ids.unsqueeze(1) == ends).any(1) | (carry.log.num_steps >= limits)
        top = None if out.top_ids is None or out.top_logprobs is None else (out.top_ids, out.top_logprobs)
        return replace(carry, active=donated(carry.active, torch.where(over, 0, carry.active))), top

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Step) and other.model is self.model

    def __hash__(self) -> int:
        return id(self.model)


def _stacked(tops: Seq[Top]) -> tuple[np.ndarray, np.ndarray] | None:
    """The most probable tokens of all steps and their log-probabilities, `[steps, B, k]`, on the host."""
    known = [top for top in tops if top is not None]
    if not known:
        return None
    ids, logprobs = (torch.stack(each).cpu().numpy() for each in zip(*known, strict=True))
    return ids, logprobs


def _ends(sequences: Seq[Sequence], device: torch.device) -> tuple[Tensor, Tensor]:
    """For each row its end tokens, padded with -1, and the most tokens of its reply."""
    most = max(1, *(len(s.request.stop_ids) for s in sequences))
    padded = [[*s.request.stop_ids, *[-1] * (most - len(s.request.stop_ids))] for s in sequences]
    limits = [s.request.max_len - len(s.tokens) for s in sequences]
    return torch.tensor(padded, dtype=torch.int32, device=device), torch.tensor(limits, dtype=torch.int32, device=device)


def _without_ended(
    carry: DecodeCarry, sequences: Seq[Sequence], scans: list[StopScan | None], count: int
) -> tuple[DecodeCarry, list[StopScan | None]]:
    """The carry in which rows have stopped with a stop string in their last `SCANNED` of `count` tokens, and the scans after these."""
    assert carry.log is not None
    active, after = carry.active.cpu().numpy().copy(), list(scans)
    tokens = carry.log.token_ids[:, count - SCANNED : count].tolist()
    for row, (sequence, one, new) in enumerate(zip(sequences, scans, tokens, strict=True)):
        after[row] = _scanned(sequence, one, new)
        if (stops := after[row]) is not None and stops.found is not None:
            active[row], after[row] = 0, None
    return replace(carry, active=torch.from_numpy(active.astype(np.int32)).to(carry.active.device)), after


def _scanned(sequence: Sequence, stops: StopScan | None, tokens: list[int]) -> StopScan | None:
    """The search for stop strings after these tokens, up to the first that is found."""
    for token in tokens:
        if stops is not None and stops.found is None and token >= 0:
            stops = scan(stops, [token], sequence.request.sampling)
    return stops
