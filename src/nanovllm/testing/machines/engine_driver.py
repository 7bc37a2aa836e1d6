"""Calls of `EngineMachine` into the engine: each call updates the shadow and compares the result with it.

`session_driver.py` has the decode steps between `begin` and `commit`.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import multiple

from nanovllm.chunks.generate import generate_many
from nanovllm.chunks.generation import Generation
from nanovllm.chunks.handles import detach, release
from nanovllm.chunks.prefill import prefill
from nanovllm.engine.donation import enter
from nanovllm.engine.requests import capacity, request_seed, submit, submit_many
from nanovllm.engine.step import step
from nanovllm.errors import InvalidRequestError, NanoVLLMError, OutOfPagesError
from nanovllm.sampling.params import SamplingParams
from nanovllm.state import pool as pools
from nanovllm.state.chunk import Chunk
from nanovllm.state.engine_state import EngineState
from nanovllm.state.kv_cache import pages_for
from nanovllm.state.moved_chunks import move_in
from nanovllm.state.request import Request, RequestOutput, Sequence, StepOutput
from nanovllm.state.window_frames import least_frames
from nanovllm.testing.machines.engine_holder import EngineHolder, kv_bytes
from nanovllm.testing.shadows.memory import expect
from nanovllm.testing.shadows.worlds import PlantedError, SymbolicWorld, World
from nanovllm.testing.strategies import sampling_options

NO_ROOM = 1 << 30  # pages by which a chunk that cannot come back to the device lacks room


@dataclass(slots=True)
class Pending:
    """A submitted request as the shadow sees it.

    `most_filled` is the number of tokens run or reused for its KV before the newest step, and `num_cached` that of the reused ones.
    """

    request: Request
    prompt: list[int]
    most_filled: int = 0
    num_cached: int = 0
    drawn: list[int] = field(default_factory=list)

    def num_needed(self, output: RequestOutput) -> int:
        """The tokens run or reused until a step in which the request ended without another token, after it had found some KV perhaps."""
        return self.most_filled + output.num_cached_tokens - self.num_cached


class EngineDriver(EngineHolder):
    """One engine of `world`, and the shadow of its chunks and requests."""

    world: ClassVar[World] = SymbolicWorld()

    def __init__(self) -> None:
        super().__init__()
        self.chunk_kv: dict[int, bytes] = {}
        self.pending: dict[int, Pending] = {}
        self.ended: list[int] = []  # ids of kept requests that have ended and still have their pages
        self.shortages = 0  # device calls that ran out of memory in the newest step
        self.quiet = 0  # rules since the last misuse or planted failure, which must be rarer than other rules

    def _options(self, data: st.DataObject) -> SamplingParams:
        return SamplingParams(**data.draw(sampling_options(greedy_only=self.world.greedy_only)))

    def _sequences(self, state: EngineState | None = None) -> list[Sequence]:
        state = self.state if state is None else state
        inside = [s for session in state.sessions.values() for s in session.sequences]
        return [*state.running, *state.waiting, *state.kept.values(), *inside]

    def _attempt(self, call: Callable[[], Any], fails: type[NanoVLLMError] | None = None) -> Any:
        """Return a call's result, or None after a planted failure, or the error of type `fails`. After both the old state stays valid."""
        before = self.state
        self.kept.keep(before.pool)
        self.kept.keep(before.running)
        self.kept.keep(before.waiting)
        try:
            done = call()
        except PlantedError:
            done = None
        except NanoVLLMError as error:
            if fails is None or not isinstance(error, fails):
                raise
            return error
        self._executor.disarm()
        if done is None:
            return None
        self._replaced(before)
        return done

    def _new_chunk(self, done: tuple[EngineState, Chunk] | None, tokens: list[int]):
        if done is None:
            return multiple()
        self.state, chunk = done
        self._adopt(chunk, tokens)
        return self._hold(chunk)

    def _hold(self, *chunks: Chunk):
        """Keep these chunks, or release them at once if too many pages are pinned."""
        if self._pinned() <= self.most_pinned:
            return multiple(*chunks)
        for chunk in chunks:
            self._release(chunk)
        return multiple()

    def _pinned(self) -> int:
        inside = [s for v in self.state.sessions.values() for s in v.sequences]
        return len({page for holder in (*self.state.chunks.values(), *self.state.kept.values(), *inside) for page in holder.pages})

    def _adopt(self, chunk: Chunk, tokens: list[int]) -> None:
        expect(chunk.token_ids.tolist() == tokens, f"{chunk!r} contains {chunk.token_ids.tolist()}, not {tokens}")
        self.chunk_kv[chunk.liveness] = kv_bytes(self.state, chunk)
        self.kept.keep(chunk)

    def _available(self, base: Chunk | None) -> int:
        """Return the number of pages that a request over this chunk can use: available pages and the chunk's whole pages."""
        return self._room(base) + (0 if base is None else len(base) // self.state.config.page_size)

    def _room(self, *bases: Chunk | None) -> int:
        """Return the number of available pages once these chunks are on the device; far below 0 if they cannot all come back to it."""
        pool, chunks = pools.planning(enter(self.state).pool), self.state.chunks
        for liveness in dict.fromkeys(base.liveness for base in bases if base is not None):
            if pool.host is None or liveness not in pool.host.moved:
                continue
            done = move_in(pool, chunks[liveness])
            if done is None:
                return -NO_ROOM
            pool = done[0]
        return pool.num_available

    def _prefill(self, after: Chunk | None, ids: list[int]):
        tokens = ids if after is None else after.token_ids.tolist() + ids
        if len(tokens) > capacity(self.state):
            self._refused(InvalidRequestError, lambda: prefill(self.world.model, self.state, ids, after))
            return multiple()
        room = self._available(after)
        done = self._attempt(lambda: prefill(self.world.model, self.state, ids, after), OutOfPagesError)
        if isinstance(done, OutOfPagesError):
            wanted = pages_for(len(tokens), self.state.config.page_size)
            expect(wanted > room, f"OutOfPagesError for {wanted} pages, but {room} are available: {done}")
            return multiple()
        if done is not None:
            self.needed += len(tokens)
        return self._new_chunk(done, tokens)

    def _release(self, chunk: Chunk) -> None:
        done = self._attempt(lambda: (release(self.state, chunk), None))
        self.state = done[0]
        self._released(chunk)

    def _submit(self, base: Chunk | None, ids: list[int], params: SamplingParams, keep: bool) -> None:
        context, tokens = context_of(base, ids), tokens_of(base, ids)
        if len(tokens) >= capacity(self.state, whole=keep):
            if keep and len(tokens) < capacity(self.state, whole=False):
                call = lambda: submit_many(self.world.model, self.state, [context], [params], keep=True)  # noqa: E731
                return self._refused(InvalidRequestError, call)
            return self._refused(InvalidRequestError, lambda: submit(self.world.model, self.state, context, params))
        priority = len(tokens) % 3 - 1  # which changes who runs first, and no reply
        if keep:
            more = {"keep": True, "priorities": [priority]}
            call = lambda: submit_many(self.world.model, self.state, [context], [params], **more)  # noqa: E731
        else:
            call = lambda: submit(self.world.model, self.state, context, params, priority=priority)  # noqa: E731
        room = self._room(base)
        done = self._attempt(call, OutOfPagesError)
        if done is None or isinstance(done, OutOfPagesError):  # only a chunk that comes back from host memory needs pages and the device
            return expect(base is not None and (done is None or room < 0), f"a request was refused: {done!r}")
        self.state, ids_or_id = done
        rid = ids_or_id[0] if isinstance(ids_or_id, list) else ids_or_id
        self.pending[rid] = Pending(self.state.waiting.items[rid].request, tokens)

    def _observe(self) -> None:
        for sequence in self._sequences():
            mine = self.pending.get(sequence.request.request_id)
            if mine is not None:
                mine.most_filled = max(mine.most_filled, sequence.most_filled)
                mine.num_cached = sequence.num_cached

    def _step(self) -> None:
        self._observe()
        pinned, before, num_failed = self._pinned(), self.state, self._executor.num_failed
        done = self._attempt(lambda: step(self.world.model, self.state))
        if done is None:
            return
        self.state, outputs = done
        self.shortages = self._executor.num_failed - num_failed
        for out in outputs:
            self._see(out, pinned)
        self._see_budget(before, any(out.error is not None for out in outputs))
        while self.ended and self._pinned() > self.most_pinned:
            rid = self.ended.pop()
            kept = self.state.kept[rid]
            tokens = kept.tokens.array(0, kept.num_filled).tolist()
            self.state, chunk = detach(self.world.model, self.state, rid)
            if chunk is not None:
                self._adopt(chunk, tokens)
                self._release(chunk)

    def _see_budget(self, before: EngineState, failed: bool) -> None:
        """Check that a shortage of memory lowers the token budget, and that each step with enough memory raises a lowered one."""
        most = self.state.config.max_num_batched_tokens
        budgets = [state.token_budget or most for state in (before, self.state)]
        if self.shortages:
            expect(budgets[1] < budgets[0] or failed, f"{self.shortages} shortages changed the budget from {budgets[0]} to {budgets[1]}")
        elif before.running or before.waiting:
            expect(budgets[1] > budgets[0] or budgets[0] == most, f"the budget {budgets[0]} of {most} became {budgets[1]} in a step")

    def _see_error(self, out: StepOutput, mine: Pending, pinned: int) -> None:
        """Check that a request failed for a reason: memory ran out in this step, or its prompt has no pages while so many are pinned."""
        expect(isinstance(out.error, OutOfPagesError) and not out.token_ids, f"request {out.request_id} ended with {out.error!r}")
        if not self.shortages:
            short = self._too_much(mine.request, len(mine.prompt), pinned)
            message = f"request {out.request_id} has {len(mine.prompt)} tokens, {pinned} pages are pinned, and it ended with {out.error}"
            expect(not mine.drawn and short, message)

    def _too_much(self, request: Request, num_tokens: int, pinned: int) -> bool:
        """Return whether a request of so many tokens may need more pages or frames than the pool has besides pinned pages."""
        config, frames = self.state.config, self.state.pool.frames
        wanted = pages_for(num_tokens, config.page_size)
        if wanted > config.num_pages - pinned or frames is None:
            return wanted > config.num_pages - pinned
        return (wanted if request.keep else min(wanted, least_frames(frames.window, config.page_size))) > frames.num_frames - pinned

    def _see(self, out: StepOutput, pinned: int) -> None:
        mine = self.pending[out.request_id]
        mine.drawn += out.token_ids
        self.world.require_reply(mine.prompt, mine.drawn, mine.request, len(mine.drawn) - len(out.token_ids))
        if out.output is None:
            over = out.finish_reason or ends(mine.request, mine.drawn)
            return expect(over is None, f"request {out.request_id} goes on after {mine.drawn}, but should end with {over!r}")
        expect(out.output.token_ids == mine.drawn, f"request {out.request_id} sampled {mine.drawn}, returned {out.output.token_ids}")
        total = len(mine.prompt) + len(mine.drawn)
        if out.error is not None:
            alike = out.output.error is out.error and out.output.finish_reason == out.finish_reason == "error"
            expect(alike and out.error.request_id == out.request_id, f"request {out.request_id} and {out.output} have {out.error!r}")
            self._see_error(out, mine, pinned)
            self.needed += total - 1 if out.token_ids else mine.num_needed(out.output)
        elif out.finish_reason != ends(mine.request, mine.drawn):
            expect(out.finish_reason == "length", f"request {out.request_id} ended with {out.finish_reason} after {mine.drawn}")
            short = self._too_much(mine.request, total, pinned)
            expect(short, f"request {out.request_id} was given up with {total} tokens; {pinned} pages are pinned")
            self.needed += mine.num_needed(out.output)
        else:
            self.needed += total - 1
        del self.pending[out.request_id]
        if mine.request.keep:
            self.ended.append(out.request_id)

    def _generate(self, rows: Seq[tuple[Chunk | None, list[int], SamplingParams]]):
        contexts = [context_of(base, ids) for base, ids, _ in rows]
        prompts = [tokens_of(base, ids) for base, ids, _ in rows]
        params, size = [options for *_, options in rows], self.state.config.page_size
        call = lambda: generate_many(self.world.model, self.state, contexts, params)  # noqa: E731
        if max(map(len, prompts)) >= capacity(self.state):
            self._refused(InvalidRequestError, call)
            return multiple()
        limits = [min(len(p) + o.max_tokens, capacity(self.state)) for p, o in zip(prompts, params, strict=True)]
        room, next_id = self._room(*(base for base, *_ in rows)), enter(self.state).next_id
        shared = sum(len(base) // size for base, *_ in rows if base is not None)
        done = self._attempt(call, OutOfPagesError)
        if isinstance(done, OutOfPagesError):
            wanted = pages_for(len(prompts[0]) + 1, size) if len(rows) == 1 else sum(pages_for(limit, size) for limit in limits)
            expect(wanted > room + shared, f"OutOfPagesError for {wanted} pages, but {room} are available and {shared} shared: {done}")
            return multiple()
        if done is None:
            return multiple()
        self.state, made = done
        if len(rows) == 1:
            limits = [min(limits[0], (room + shared) * size)]
        for i, (generation, prompt, limit) in enumerate(zip(made, prompts, limits, strict=True)):
            request = self._request(next_id + i, len(prompt), params[i], limit)
            self._see_generation(generation, prompt, request)
        return self._hold(*(generation.chunk for generation in made))

    def _see_generation(self, generation: Generation, prompt: list[int], request: Request) -> None:
        self.world.require_reply(prompt, generation.token_ids, request)
        reason = ends(request, generation.token_ids)
        expect(generation.finish_reason == reason, f"{generation.token_ids} ended with {generation.finish_reason}, not {reason}")
        self._adopt(generation.chunk, prompt + generation.token_ids)
        self.needed += len(prompt) + len(generation.token_ids)

    def _request(self, request_id: int, num_prompt: int, params: SamplingParams, max_len: int) -> Request:
        """Return the request that the engine makes, except for fields that the oracle does not use."""
        seed = request_seed(self.state.config.seed, request_id) if params.seed is None else params.seed
        ends = () if params.ignore_eos else self.world.model.config.eos_token_ids
        return Request(
            request_id=request_id,
            num_prompt=num_prompt,
            sampling=params,
            seed=seed,
            max_len=max_len,
            stop_ids=frozenset((*ends, *params.stop_token_ids)),
            arrival=0.0,
        )


def ends(request: Request, drawn: list[int]) -> str | None:
    """Return the reason why a reply ends after these tokens; None if it goes on."""
    if drawn and drawn[-1] in request.stop_ids:
        return "stop"
    return "length" if request.num_prompt + len(drawn) >= request.max_len else None


def context_of(base: Chunk | None, ids: list[int]) -> Any:
    """Return a chunk, if any, followed by token ids, in the form that the engine's functions take as context."""
    return ids if base is None else [base, ids] if ids else base


def tokens_of(base: Chunk | None, ids: list[int]) -> list[int]:
    """Return the token ids of a chunk, if any, followed by token ids."""
    return ids if base is None else base.token_ids.tolist() + ids
