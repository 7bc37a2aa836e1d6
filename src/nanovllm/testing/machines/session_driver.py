"""Decode sessions of `EngineMachine`: the steps between `begin` and `commit`, their sampled tokens and their results."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from hypothesis.stateful import multiple

from nanovllm.chunks.session import abandon, begin, commit
from nanovllm.engine.requests import capacity
from nanovllm.errors import DonatedStateError, InvalidRequestError, OutOfPagesError
from nanovllm.sampling.params import SamplingParams
from nanovllm.state.chunk import Chunk
from nanovllm.state.kv_cache import pages_for
from nanovllm.state.request import Request
from nanovllm.testing.machines.engine_driver import EngineDriver, context_of, ends, tokens_of
from nanovllm.testing.shadows.memory import expect


@dataclass(slots=True)
class Steps:
    """One decode session: the carry, its requests, and the tokens sampled so far."""

    carry: Any
    requests: list[Request]
    prompts: list[list[int]]
    room: int
    drawn: list[list[int]]
    done: int = 0


class SessionDriver(EngineDriver):
    """One engine, and its decode sessions that are not committed yet."""

    def __init__(self) -> None:
        super().__init__()
        self.sessions: list[Steps] = []

    def _begin(self, rows: Seq[tuple[Chunk | None, list[int]]], room: int, params: SamplingParams) -> bool:
        contexts = [context_of(base, ids) for base, ids in rows]
        prompts = [tokens_of(base, ids) for base, ids in rows]
        size = self.state.config.page_size
        shared = sum(len(base) // size for base, _ in rows if base is not None)
        if self._pinned() + sum(pages_for(len(p) + room, size) for p in prompts) - shared > self.most_pinned:
            return False
        call = lambda: begin(self.world.model, self.state, contexts, params, room=room)  # noqa: E731
        if max(map(len, prompts)) + room > capacity(self.state) or len(rows) > self.state.config.max_num_seqs:
            self._refused(InvalidRequestError, call)
            return False
        available, next_id = self._room(*(base for base, _ in rows)), self.state.next_id
        done = self._attempt(call, OutOfPagesError)
        if isinstance(done, OutOfPagesError):
            wanted = sum(pages_for(len(p) + room, size) for p in prompts)
            expect(wanted > available + shared, f"OutOfPagesError for {wanted} pages; {available} are available, {shared} shared: {done}")
            return False
        if done is None:
            return False
        self.state, carry = done
        requests = [self._request(next_id + i, len(p), params, len(p) + room) for i, p in enumerate(prompts)]
        self.sessions.append(Steps(carry, requests, prompts, room, [[] for _ in rows]))
        return True

    def _decode(self, session: Steps, count: int) -> None:
        for _ in range(min(count, session.room - session.done)):
            old = session.carry
            session.carry, out = self.world.decode(old)
            self._refused(DonatedStateError, lambda old=old: self.world.decode(old))
            session.done += 1
            for row, token in zip(session.drawn, out.token_ids.tolist(), strict=True):
                row.append(token)

    def _abandon(self, at: int, newest: bool) -> None:
        session = self.sessions[at]
        ticket = int(session.carry.log.session)
        done = self._attempt(lambda: abandon(self.state, session.carry if newest else ticket))
        if done is None:
            return
        self.state = done
        del self.sessions[at]
        self.needed += sum(len(prompt) - 1 for prompt in session.prompts)  # the steps are counted at a commit
        self._refused(DonatedStateError, lambda: commit(self.world.model, self.state, session.carry))
        self._refused(DonatedStateError, lambda: self.world.decode(session.carry))
        self._refused(DonatedStateError, lambda: abandon(self.state, session.carry))
        self._refused(InvalidRequestError, lambda: abandon(self.state, ticket))

    def _commit(self, at: int):
        session = self.sessions[at]
        done = self._attempt(lambda: commit(self.world.model, self.state, session.carry))
        if done is None:
            return multiple()
        self.state, made = done
        del self.sessions[at]
        for generation, prompt, request, drawn in zip(made, session.prompts, session.requests, session.drawn, strict=True):
            self.world.require_reply(prompt, drawn, request)
            count = next((i for i in range(1, len(drawn) + 1) if ends(request, drawn[:i])), len(drawn))
            expect(generation.token_ids == drawn[:count], f"{drawn} were sampled, {generation.token_ids} returned")
            reason = ends(request, drawn[:count]) or "length"
            expect(generation.finish_reason == reason, f"{drawn} ended with {generation.finish_reason}, not {reason}")
            self._adopt(generation.chunk, prompt + drawn[:count])
            self.needed += len(prompt) + count
        self._refused(DonatedStateError, lambda: commit(self.world.model, self.state, session.carry))
        self._refused(DonatedStateError, lambda: self.world.decode(session.carry))
        return self._hold(*(generation.chunk for generation in made))
