"""`ScheduleMachine`: drive the pure scheduler without a model; the KV memory is a dict (invariants 1 to 7, priorities)."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nanovllm.engine.plan import Plan
from nanovllm.engine.scheduler import schedule
from nanovllm.sampling.params import SamplingParams
from nanovllm.state import pool as pools
from nanovllm.state.invariants import check_pool
from nanovllm.state.kv_cache import pages_for
from nanovllm.state.pool import Pool
from nanovllm.state.request import AGEING, Queue, Request, Sequence, rank_of
from nanovllm.state.sequence_pages import give_up_pages, reserve, written_pages
from nanovllm.state.vector import IntVector
from nanovllm.testing.shadows.memory import KeptValues, ShadowMemory, expect, indexed_runs
from nanovllm.testing.strategies import Limits, limits, pick, token_ids

STEP = AGEING // 4  # by how much the clock of the machine goes on in one of its steps, so that ageing shows in few of them


@dataclass(slots=True)
class Hold:
    """A live chunk as the scheduler sees it: pages that no request may write to or take."""

    tokens: IntVector
    pages: IntVector


class ScheduleMachine(RuleBasedStateMachine):
    """Test a scheduler: requests arrive, continue filled contexts, run step by step, are cancelled and end. No model runs.

    Pools have up to 18 tokens in pages of 1 to 3. Limits on rows and tokens per step are small, so preemption is common. The sampled
    tokens are the bits of a random number.

    Checks invariants 1 to 5, 6 (all requests end and all pages return) and 7 (tokens per request). Also checks that a plan respects the
    limits, that requests are admitted in the order of priority with ageing and then of arrival, that those preempted are the last in this
    order, and that the first of those that run always advances. In a step in which a reply goes on, the bound on prompt tokens holds. No
    request may run a page of tokens that the index has, or that another request runs in the same step.

    Attributes:
        scheduler: The function under test, with the signature of `nanovllm.engine.scheduler.schedule`, as a `staticmethod`.

    Examples:
        >>> from hypothesis import settings
        >>> from hypothesis.stateful import run_state_machine_as_test
        >>> from nanovllm.engine.scheduler import schedule
        >>> from nanovllm.testing import ScheduleMachine
        >>> class MyScheduler(ScheduleMachine):
        ...     scheduler = staticmethod(schedule)  # your function here
        >>> run_state_machine_as_test(MyScheduler, settings=settings(max_examples=3, deadline=None))
    """

    scheduler: Callable[..., Plan] = staticmethod(schedule)

    def __init__(self) -> None:
        super().__init__()
        self.limits = Limits(num_pages=1, page_size=1, max_model_len=2, max_num_seqs=1, max_num_batched_tokens=1)
        self.pool: Pool = pools.init_pool(1, 1)
        self.running: tuple[Sequence, ...] = ()
        self.waiting = Queue()
        self.memory = ShadowMemory(1)
        self.holds: list[Hold] = []
        self.keepers: set[int] = set()
        self.next_id = 0
        self.now = 0
        self.arrived: dict[int, tuple[int, int]] = {}  # by request id: its priority, and when it arrived
        self.oldest: tuple[int, int] | None = None  # id and filled tokens of the first running request
        self.kept = KeptValues()
        self.finished: set[int] = set()

    @initialize(drawn=limits())
    def start(self, drawn: Limits) -> None:
        """Start with an empty pool."""
        self.limits, self.memory = drawn, ShadowMemory(drawn.page_size)
        self.pool = pools.init_pool(drawn.num_pages, drawn.page_size)

    @rule(
        prompts=st.lists(token_ids(max_size=6), min_size=1, max_size=4),
        max_tokens=st.integers(1, 8),
        keep=st.integers(0, 4),
        priority=st.integers(-1, 1),
    )
    def arrive(self, prompts: list[list[int]], max_tokens: int, keep: int, priority: int) -> None:
        """Submit requests for prompts."""
        for place, tokens in enumerate(prompts):
            self._arrive(IntVector.of(tokens), IntVector.of(), 0, max_tokens, keep == place, priority)

    @precondition(lambda self: self.holds)
    @rule(
        data=st.data(),
        more=st.lists(token_ids(min_size=0, max_size=4), min_size=1, max_size=3),
        max_tokens=st.integers(1, 6),
        keep=st.integers(0, 3),
        priority=st.integers(-1, 1),
    )
    def arrive_on_context(self, data: st.DataObject, more: list[list[int]], max_tokens: int, keep: int, priority: int) -> None:
        """Submit requests that continue filled pages, with or without more tokens."""
        hold = self.holds[data.draw(st.integers(0, len(self.holds) - 1))]
        for place, tokens in enumerate(more):
            self._arrive(hold.tokens.extend(tokens), hold.pages, len(hold.tokens), max_tokens, keep == place, priority)

    @precondition(lambda self: self.running or self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """Cancel a running or waiting request."""
        sequence = pick(data, [*self.running, *self.waiting])
        self._move(give_up_pages(self.pool, sequence))
        if sequence in self.running:
            self.running = tuple(s for s in self.running if s is not sequence)
        else:
            self.waiting = self.waiting.pop(sequence.request.request_id)

    @rule(tokens=token_ids(max_size=5))
    def fill(self, tokens: list[int]) -> None:
        """Prefill a chunk outside the scheduler."""
        size, run = self.limits.page_size, IntVector.of(tokens)
        matched = pools.match(self.pool, run.array()).tolist()
        pool = pools.acquire(self.pool, matched)
        taken = pools.allocate(pool, pages_for(len(run), size) - len(matched))
        if taken is None or 2 * (pages_for(len(run), size) + self._pinned()) > self.limits.num_pages + 1:
            return
        pages = [*matched, *taken[1]]
        self.memory.run(run.array(), pages, len(matched) * size, len(run) - len(matched) * size)
        self._move(pools.insert(taken[0], run.array(), np.array(pages, np.int32)))
        self.holds.append(Hold(run, IntVector.of(pages)))

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        """Release a chunk."""
        hold = self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1)))
        self._move(pools.release(self.pool, hold.pages))

    @precondition(lambda self: self.holds)
    @rule()
    def let_go_of_all(self) -> None:
        """Release all chunks."""
        while self.holds:
            self._move(pools.release(self.pool, self.holds.pop().pages))

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        """Make a second chunk over the same pages, perhaps a shorter one."""
        hold = pick(data, self.holds)
        length = data.draw(st.integers(1, len(hold.tokens)))
        twin = Hold(hold.tokens.truncate(length), hold.pages.truncate(pages_for(length, self.limits.page_size)))
        self._move(pools.acquire(self.pool, twin.pages))
        self.holds.append(twin)

    @precondition(lambda self: self.running or self.waiting)
    @rule(draws=st.integers(0, 255))
    def step(self, draws: int) -> None:
        """Run one step: check the plan and run its tokens in the dict. The sampled tokens are the bits of `draws`."""
        before = (*self.running, *self.waiting)
        plan = self.scheduler(self.pool, self.running, self.waiting, self.limits.config())
        self._check_plan(plan, before)
        self._check_order(plan)
        self.now += STEP
        self.memory.copy_pages(plan.copies)
        self._finish_step(plan, draws)
        self._check_progress(plan)

    @precondition(lambda self: self.running or self.waiting)
    @rule(draws=st.integers(0, 255), count=st.integers(2, 8))
    def run(self, draws: int, count: int) -> None:
        """Run several steps."""
        for i in range(count):
            self.step(draws >> i % 8)

    @invariant()
    def owners_agree(self) -> None:
        """Check invariants 1 and 2, and that each filled slot contains the KV of its tokens (invariant 4)."""
        owners = Counter(page for holder in (*self.running, *self.waiting, *self.holds) for page in holder.pages)
        check_pool(self.pool, owners)
        for sequence in (*self.running, *self.waiting):
            self.memory.require(sequence.tokens.array(), list(sequence.pages), sequence.num_filled)
        for hold in self.holds:
            self.memory.require(hold.tokens.array(), list(hold.pages), len(hold.tokens))
        size = self.limits.page_size
        for run, page in indexed_runs(self.pool.prefix):
            for offset in range(size):
                held = self.memory.slots.get((page, offset))
                expect(held == run[: len(run) - size + offset + 1], f"page {page} at {offset} holds {held}, its key {run}", invariant=4)

    @invariant()
    def old_values_stand(self) -> None:
        """Check invariant 5: old values have not changed."""
        self.kept.require_unchanged()

    def teardown(self) -> None:
        """Check invariant 6: the workload ends within a bound, and all pages return."""
        sequences = (*self.running, *self.waiting)
        total = sum(s.request.max_len for s in sequences)
        bound = (total + 1) * (len(sequences) + 2)
        for _ in range(bound):
            if not self.running and not self.waiting:
                break
            self.step(0b1011)
        expect(not self.running and not self.waiting, f"{len(sequences)} requests did not end within {bound} steps", invariant=6)
        for hold in self.holds:
            self.pool = pools.release(self.pool, hold.pages)
        available, size = self.pool.num_available, self.limits.num_pages
        expect(available == size, f"{available} of {size} pages came back", invariant=6)

    def _arrive(self, tokens: IntVector, pages: IntVector, num_filled: int, max_tokens: int, keep: bool, priority: int) -> None:
        limit = min(self.limits.max_model_len, self.limits.num_pages * self.limits.page_size)
        if len(tokens) >= limit:
            return
        request = Request(
            request_id=self.next_id,
            num_prompt=len(tokens),
            sampling=SamplingParams(),
            seed=0,
            max_len=min(len(tokens) + max_tokens, limit),
            stop_ids=frozenset(),
            arrival=0.0,
            priority=priority,
            rank=rank_of(priority, self.now),
        )
        self.arrived[self.next_id] = priority, self.now
        if keep:
            self.keepers.add(self.next_id)
        self.next_id += 1
        self._move(pools.acquire(self.pool, pages))
        self.waiting = self.waiting.push(Sequence(request=request, tokens=tokens, pages=pages, num_filled=num_filled))

    def _check_plan(self, plan: Plan, before: tuple[Sequence, ...]) -> None:
        size, old = self.limits.page_size, {s.request.request_id for s in before}
        rows = [*((s, 1) for s in plan.decode), *plan.prefill]
        ids = [s.request.request_id for s, _ in rows]
        running, waiting = ([s.request.request_id for s in group] for group in (plan.running, plan.waiting))
        expect(len(set(ids)) == len(ids) and set(ids) <= set(running), f"the plan runs requests {ids}, but {running} are running")
        everyone = [*running, *waiting, *(s.request.request_id for s in plan.stuck)]
        expect(sorted(everyone) == sorted(old), f"requests {sorted(old)} became {everyone}")
        expect(len(running) <= self.limits.max_num_seqs, f"{len(running)} requests run")
        expect(sum(count for _, count in rows) <= self.limits.max_num_batched_tokens, f"the budget is exceeded: {[c for _, c in rows]}")
        writers = dict[int, Sequence]()
        for sequence, count in rows:
            wanted = max(sequence.todo, 1)
            expect(0 < count <= wanted, f"{count} of {wanted} tokens are to run", invariant=7)
            end = sequence.num_filled + min(count, sequence.todo)
            expect(end <= len(sequence.pages) * size, f"{end} tokens in {len(sequence.pages)} pages of {size}", invariant=7)
            for page in written_pages(sequence, min(count, sequence.todo), size).tolist():
                other = writers.setdefault(page, sequence)
                expect(other is sequence, f"page {page} is written by requests {_id(other)} and {_id(sequence)}", invariant=3)
        self._check_sharing(plan, writers)
        held = Counter(page for holder in (*plan.running, *plan.waiting, *plan.stuck, *self.holds) for page in holder.pages)
        check_pool(plan.pool, held)
        for sequence in plan.stuck:
            if self._is_stranded(sequence):
                continue
            expect(not plan.running, f"request {sequence.request.request_id} was given up while others run")
            pool = plan.pool
            for other in plan.waiting:
                pool = give_up_pages(pool, other)
            nothing = reserve(pool, sequence, sequence.num_filled + min(1, sequence.todo), size) is None
            expect(nothing, f"request {sequence.request.request_id} was given up although it could go on")

    def _is_stranded(self, sequence: Sequence) -> bool:
        """Whether a request that waited has too many tokens for the pages that no chunk holds and those of chunks that it shares."""
        pinned = {page for hold in self.holds for page in hold.pages}
        shared = max(
            len(pinned.intersection(pages)) for pages in (sequence.pages, pools.match(self.pool, sequence.tokens.array()).tolist())
        )
        lacks = pages_for(len(sequence.tokens), self.limits.page_size) - shared > self.limits.num_pages - len(pinned)
        return lacks and _id(sequence) in self.waiting.items

    def _check_order(self, plan: Plan) -> None:
        """Check who was admitted and who was preempted, by the priorities as they have aged until now, and the bound on prompt tokens."""
        turns = {rid: (priority - Fraction(self.now - since, AGEING), rid) for rid, (priority, since) in self.arrived.items()}
        old, running, waiting = ([_id(s) for s in group] for group in (self.running, plan.running, plan.waiting))
        in_order = all(turns[a] < turns[b] for group in (running, waiting) for a, b in pairwise(group))
        expect(in_order, f"running {running} and waiting {waiting} are not in order of priority and arrival")
        for one in set(running) - set(old):
            late = [other for other in waiting if other not in old and turns[other] < turns[one]]
            expect(not late, f"request {one} was admitted before requests {late}, whose turn was first")
        for one in set(waiting) & set(old):
            late = [other for other in running if turns[one] < turns[other] and other in old]
            expect(not late, f"request {one} was preempted before requests {late}, whose turn was last")
        bound, count = self.limits.max_prefill_tokens, sum(count for _, count in plan.prefill)
        goes_on = any(_id(s) in old for s in plan.decode)
        expect(bound is None or not goes_on or count <= bound, f"{count} prompt tokens run while replies go on, more than {bound}")

    def _check_sharing(self, plan: Plan, writers: dict[int, Sequence]) -> None:
        """Check who else holds a page that is written, and that no page is filled twice or although the index has its tokens."""
        size, came = self.limits.page_size, self.waiting.items
        for holder in (*plan.running, *plan.waiting, *plan.stuck):
            for place, page in enumerate(holder.pages):
                if (writer := writers.get(page, holder)) is not holder:
                    behind = _id(holder) in came and (place + 1) * size <= holder.num_filled and page in plan.pool.prefix
                    expect(behind, f"page {page} is written by request {_id(writer)} and held by request {_id(holder)}", invariant=3)
        for hold in self.holds:
            expect(writers.keys().isdisjoint(hold.pages), f"of the pages {list(hold.pages)} of a chunk some are written", invariant=3)
        stripped = any(len(came[_id(s)].pages) > len(s.pages) for s in plan.waiting if _id(s) in came)
        filled = dict[bytes, int]()
        for sequence, count in plan.prefill:
            rid, tokens = _id(sequence), sequence.tokens.array()
            if rid in came and not stripped and not len(came[rid].pages):
                for page in pools.match(plan.pool, tokens)[sequence.num_filled // size :].tolist():
                    expect(page in sequence.pages, f"request {rid} runs tokens that page {page} holds, from token {sequence.num_filled} on")
                for end in range(sequence.num_filled // size + 1, (sequence.num_filled + count) // size + 1):
                    other = filled.setdefault(tokens[: end * size].tobytes(), rid)
                    expect(other == rid, f"requests {other} and {rid} both fill a page with {tokens[: end * size]}")

    def _finish_step(self, plan: Plan, draws: int) -> None:
        pool, rows, running = plan.pool, {_id(s): count for s, count in plan.prefill}, []
        for sequence, count in plan.prefill:  # in one pass, which writes before it reads
            self.memory.write(sequence.tokens.array(), list(sequence.pages), sequence.num_filled, count)
        for sequence, count in plan.prefill:
            self.memory.require(sequence.tokens.array(), list(sequence.pages), sequence.num_filled + count)
        for sequence in plan.decode:  # in a second pass, in which no row reads what another one writes
            self.memory.require(sequence.tokens.array(), list(sequence.pages), sequence.num_filled)
        for sequence in plan.decode:
            rows[_id(sequence)] = sequence.todo
            self.memory.write(sequence.tokens.array(), list(sequence.pages), sequence.num_filled, sequence.todo)
        for sequence in (*plan.running, *plan.stuck):
            rid, grown = sequence.request.request_id, sequence
            if rid in rows:
                grown = sequence.advance(rows[rid])
                if rows[rid] == sequence.todo:
                    grown = replace(grown, tokens=grown.tokens.append(draws >> rid % 8 & 1))
            if sequence not in plan.stuck and len(grown.tokens) < grown.request.max_len:
                running.append(grown)
                continue
            self.finished.add(rid)
            if rid in self.keepers and grown.num_filled and 2 * (self._pinned() + len(grown.pages)) <= self.limits.num_pages + 1:
                count = pages_for(grown.num_filled, self.limits.page_size)
                self.holds.append(Hold(grown.tokens.truncate(grown.num_filled), grown.pages.truncate(count)))
                pool = pools.release(pool, grown.pages.array(count).tolist())
            else:
                pool = give_up_pages(pool, grown)
        self._move(pool)
        self.running, self.waiting = tuple(running), plan.waiting

    def _check_progress(self, plan: Plan) -> None:
        if not self.running:
            expect(not self.waiting or bool(plan.decode or plan.prefill or plan.stuck), "requests wait and nothing runs", invariant=6)
            self.oldest = None
            return
        oldest = (self.running[0].request.request_id, len(self.running[0].tokens) + self.running[0].num_filled)
        expect(oldest != self.oldest, f"request {oldest[0]}, the first of those that run, stood still", invariant=6)
        self.oldest = oldest

    def _pinned(self) -> int:
        return len({page for hold in self.holds for page in hold.pages})

    def _move(self, pool: Pool) -> None:
        self.kept.keep(self.pool)
        self.pool = pool
        for sequence in self.running:
            self.kept.keep(sequence)


def _id(sequence: Sequence) -> int:
    return sequence.request.request_id
