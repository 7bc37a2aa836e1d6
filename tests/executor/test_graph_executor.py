"""The executor of a GPU on a CPU, with calls in the place of graphs: whatever clients ask for, replies are those of plain steps."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from random import Random
from threading import local
from typing import Any

import pytest
import torch

import nanovllm as nv
from nanovllm import models
from nanovllm.chunks.prefill import plain_request
from nanovllm.config import Mesh
from nanovllm.executor import attention_plans, cuda_graphs, graph_executor
from nanovllm.executor.batch import decode_batch
from nanovllm.executor.captured_step import CapturedStep
from nanovllm.executor.executor import Runtime
from nanovllm.executor.graph_executor import GraphExecutor
from nanovllm.executor.logits_graphs import LogitsGraphs
from nanovllm.executor.prompt_buffers import PromptBuffers
from nanovllm.executor.prompt_graphs import PromptGraphs
from nanovllm.executor.row_tables import RowTables
from nanovllm.ops.distributed.in_process import ThreadGroup, run_ranks
from nanovllm.sampling import penalty_tables
from nanovllm.sampling.penalty_tables import PenaltyTables
from nanovllm.sampling.row_options import KINDS
from nanovllm.state.request import Sequence
from nanovllm.state.vector import IntVector
from nanovllm.testing.models import byte_tokenizer, random_model, tiny_config
from tests.executor.captured_on_cpu import Call, graph_executor_of, without_cuda

pytestmark = pytest.mark.unhooked  # objects of torch.cuda are replaced by others

MODEL = random_model(tiny_config(vocab_size=60))
WINDOWED = random_model(replace(tiny_config(vocab_size=60), windows=(5, 0)))
PLAIN = nv.SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
CLIENTS = (
    PLAIN,
    replace(PLAIN, temperature=0.9, max_tokens=7),
    replace(PLAIN, temperature=0.7, top_k=20, top_p=0.9, min_p=0.01),
    replace(PLAIN, temperature=0.8, repetition_penalty=1.2, presence_penalty=0.7, frequency_penalty=0.5, max_tokens=15),
    replace(PLAIN, frequency_penalty=1.5, max_tokens=20),
    replace(PLAIN, temperature=1.0, logit_bias={5: 3.0, 9: -100.0}, max_tokens=1),
    replace(PLAIN, temperature=0.6, logprobs=3, max_tokens=9),
)
LIMITS: dict[str, Any] = {"page_size": 4, "max_num_seqs": 4, "max_model_len": 64, "max_num_batched_tokens": 32}
ROOMY: dict[str, Any] = {**LIMITS, "page_size": 16}  # rows seldom need a new page, which would load them again


def no_repeats(logits: torch.Tensor, tokens: nv.TokensSoFar) -> torch.Tensor:
    """Forbids the newest token."""
    return logits.scatter(1, tokens.last().long().unsqueeze(1), -torch.inf)


def warmer(logits: torch.Tensor, tokens: nv.TokensSoFar, steps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Flattens the logits more with every step."""
    return logits / (1.0 + 0.1 * steps).unsqueeze(1), steps + 1


PROCESSORS = (nv.LogitsProcessor(no_repeats), nv.LogitsProcessor(warmer, lambda tokens: torch.zeros(len(tokens.lengths))))


@pytest.fixture(autouse=True)
def graphs() -> Iterator[list[Call]]:
    """All graphs of the test."""
    with without_cuda() as recorded:
        yield recorded


def started(model: nv.Model, num_pages: int, limits: dict[str, Any] = LIMITS, **options: Any) -> tuple[nv.EngineState, GraphExecutor]:
    """A state with an executor of a GPU."""
    state = nv.init_state(model, num_pages=num_pages, **limits)
    executor = graph_executor_of(model, state.config, state.kv, **options)
    return replace(state, runtime=Runtime(state.runtime.lease, executor)), executor


def served(
    model: nv.Model, state: nv.EngineState, seed: int, steps: int = 120, processed: float = 0.0, clients: Seq[nv.SamplingParams] = CLIENTS
) -> tuple[dict[int, list[int]], nv.EngineState]:
    """The replies to clients of all kinds that come, share prompts, go early, and run out of pages."""
    random, replies, live = Random(seed), dict[int, list[int]](), list[int]()
    shared = [random.randrange(60) for _ in range(12)]
    for step in range(steps):
        while len(live) < 6 and random.random() < 0.5 and step < steps - 60:
            own = [random.randrange(60) for _ in range(random.choice((1, 3, 7, 13, 20)))]
            prompt = shared + own if random.random() < 0.3 else own
            process = random.choice(PROCESSORS) if random.random() < processed else None
            params = replace(random.choice(clients), seed=random.randrange(100))
            state, rid = nv.submit(model, state, prompt, params, process_logits=process)
            live.append(rid)
        if live and random.random() < 0.03:
            state = nv.cancel(state, live.pop(random.randrange(len(live))))
        state, outs = nv.step(model, state)
        for out in outs:
            replies.setdefault(out.request_id, []).extend(out.token_ids)
            if out.output is not None and out.request_id in live:
                live.remove(out.request_id)
    nv.check(state)
    return replies, state


def compared(
    model: nv.Model, seed: int, num_pages: int, cascade: bool | None = None, **options: Any
) -> tuple[nv.EngineState, GraphExecutor, set[int]]:
    """Serve the same clients by plain steps and by captured ones. The replies must be equal. Returns the sizes of captured prompts too."""
    want, _ = served(model, nv.init_state(model, num_pages=num_pages, **LIMITS), seed, **options)
    state, executor = started(model, num_pages, cascade=cascade)
    assert executor._short is not None and [kind.tokens for kind in executor._short.kinds] == [8, 16, 16]
    ran, run = set[int](), executor._short.run

    def noted(params: Any, kv: Any, host: Any) -> Any:
        logits = run(params, kv, host)
        ran.add(0 if logits is None else len(host.input_ids))
        return logits

    executor._short.run = noted
    got, state = served(model, state, seed, **options)
    assert got == want
    return state, executor, ran


@pytest.mark.parametrize(("seed", "num_pages", "cascade"), [(0, 60, None), (1, 14, None), (2, 14, True), (3, 20, False)])
def test_replies_are_those_of_plain_steps(seed: int, num_pages: int, cascade: bool | None) -> None:
    state, executor, ran = compared(MODEL, seed, num_pages, cascade)
    steps = executor._decode._steps, executor._extend._steps
    assert [len(made) for made in steps] == [
        len(KINDS) * sum(len(graphs.ways(size)) for size in graphs.sizes) for graphs in (executor._decode, executor._extend)
    ]
    assert state.stats.discarded_tokens > 0 and (num_pages > 14 or state.stats.preemptions > 0)
    assert 0 in ran and 0 < max(ran) <= 16  # some are too long


@pytest.mark.parametrize("seed", [4, 5])
def test_short_prompts_run_as_rows_of_a_captured_step(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "EXTENSION", 32)
    _, executor, ran = compared(MODEL, seed, 20)
    assert executor._extend.sizes == (1, 8, 16, 32) and not ran


@pytest.mark.parametrize(("rows", "context", "some"), [(4, 100, True), (4, 4, False), (0, 100, True)])
def test_most_short_prompts_are_captured_unless_much_comes_before_them(
    rows: int, context: int, some: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of up to 32 tokens, more than `rows` run by a graph of prompts where at most `context` tokens come before them."""
    monkeypatch.setattr(cuda_graphs, "EXTENSION", 32)
    monkeypatch.setattr(graph_executor, "MOST_ROWS", rows)
    monkeypatch.setattr(graph_executor, "LONG_CONTEXT", context)
    before, extended = list[int](), list[int]()
    extends, extension = GraphExecutor._extends, GraphExecutor._extension

    def asked(self: GraphExecutor, prompts: Any) -> bool:
        if (found := extends(self, prompts)) and sum(count for _, count in prompts) > rows:
            before.append(max(s.num_filled for s, _ in prompts))
        return found

    monkeypatch.setattr(GraphExecutor, "_extends", asked)
    monkeypatch.setattr(GraphExecutor, "_extension", lambda *args: extended.append(1) or extension(*args))
    _, _, ran = compared(MODEL, 4, 20)
    assert bool(extended) == (rows > 0) and bool(ran) and all(each > context for each in before)
    assert bool(before) != some


def test_prompts_of_two_kv_pools_are_captured() -> None:
    _, _, ran = compared(WINDOWED, 0, 60)
    assert 0 in ran and max(ran) > 8


def test_functions_of_callers_work_with_every_kind_of_sampling() -> None:
    _, executor, _ = compared(MODEL, 7, 30, processed=0.5)
    assert len({kind.sampling for kind in executor._decode._steps if kind.processors}) > 2


GRAMMARS = (nv.Grammar.regex("[ab]{3,9}"), nv.Grammar.choice(["abcd", "abxy", "z"]), nv.Grammar.json_object())


@pytest.mark.parametrize(("seed", "num_pages", "extension"), [(1, 14, 4), (2, 20, 32)])
def test_replies_follow_their_grammars(seed: int, num_pages: int, extension: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without other options, beside rows without a grammar; only the model runs ahead of the masks."""
    model = random_model(tiny_config(vocab_size=270, eos_token_ids=(258,)), tokenizer=byte_tokenizer())
    monkeypatch.setattr(cuda_graphs, "EXTENSION", extension)
    clients = [*CLIENTS, *(replace(client, grammar=GRAMMARS[place % 3], ignore_eos=place % 2 == 0) for place, client in enumerate(CLIENTS))]
    held, upload, ahead = list[bool](), RowTables.upload, list[bool]()

    def noted(self: RowTables, masks: Any, lines: Any) -> None:
        held.append(len(lines) > 1 and -1 in lines)
        upload(self, masks, lines)

    decode = GraphExecutor.decode

    def decoded(self: GraphExecutor, model: Any, carry: Any, masks: Any = None) -> Any:
        ahead.append(masks is not None and self._ahead.launched)
        return decode(self, model, carry, masks)

    monkeypatch.setattr(RowTables, "upload", noted)
    monkeypatch.setattr(GraphExecutor, "decode", decoded)
    compared(model, seed, num_pages, processed=0.2, clients=clients)
    assert any(held) and any(ahead)


def test_a_new_sequence_may_take_the_slot_of_a_row_that_ended() -> None:
    """If all rows have slots, the first token of a new one is drawn while the row that has ended is still loaded."""
    for seed in range(3):
        compared(MODEL, seed, 60, clients=CLIENTS[3:5])


@pytest.mark.parametrize("arrival", [5, 6, 7, 8])  # 5: before it is known that a row has ended
def test_a_live_row_keeps_its_slot_when_a_short_request_comes(arrival: int) -> None:
    """All slots are owned and one row has ended, so nothing was loaded since; a step over the other rows already runs."""
    penalised = replace(PLAIN, temperature=0.5, frequency_penalty=2.0, presence_penalty=2.0)

    def run(state: nv.EngineState) -> dict[int, list[int]]:
        replies, held = dict[int, list[int]](), list[nv.EngineState]()
        for rid, (lifetime, prompt) in enumerate(((30, range(20, 38)), (30, [1, 2]), (5, [3]), (30, [4, 5]))):
            state, _ = nv.submit(MODEL, state, [*prompt], replace(penalised, max_tokens=lifetime, seed=rid))
        for step in range(50):
            if step == arrival:
                state, _ = nv.submit(MODEL, state, [6, 7, 8], replace(penalised, max_tokens=1, seed=9))
            held.append(state)  # a caller may keep old states, and with them the request that has ended
            state, outs = nv.step(MODEL, state)
            for out in outs:
                replies.setdefault(out.request_id, []).extend(out.token_ids)
        assert len(replies) == 5 and not state.running
        return replies

    want = run(nv.init_state(MODEL, num_pages=60, **ROOMY))
    state, _ = started(MODEL, 60, ROOMY)
    assert run(state) == want


def test_a_fill_that_is_interrupted_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    params = replace(CLIENTS[3], repetition_penalty=2.0, seed=3)
    state, _ = started(MODEL, 60)
    state, want = nv.generate(MODEL, state, [3, 4, 5], params)
    state, _ = started(MODEL, 60)
    state, _ = nv.submit(MODEL, state, [3, 4, 5], params)
    got, decode = [], GraphExecutor.decode

    def failing(self: GraphExecutor, *args: Any) -> Any:
        decode(self, *args)
        raise KeyboardInterrupt

    def interrupted(self: PenaltyTables, slot: int, *args: Any) -> None:
        self.marks[slot].zero_()
        raise KeyboardInterrupt

    for step in range(40):
        with monkeypatch.context() as patch:
            if step == 4:  # the next step has to fill the slot again
                patch.setattr(GraphExecutor, "decode", failing)
            if step == 5:
                patch.setattr(PenaltyTables, "fill", interrupted)
            try:
                state, outs = nv.step(MODEL, state)
            except KeyboardInterrupt:
                continue
            assert step not in (4, 5)
        got += [token for out in outs for token in out.token_ids]
    assert got == want.token_ids


def test_penalised_rows_run_ahead() -> None:
    state, executor = started(MODEL, 60)
    ahead = 0
    for prompt in ([3, 4, 5], [6, 7, 8, 9]):
        state, _ = nv.submit(MODEL, state, prompt, replace(CLIENTS[3], seed=1))
        for _ in range(5):
            state, _ = nv.step(MODEL, state)
            ahead += executor._ahead.launched
    assert ahead > 3


@pytest.mark.parametrize("cascade", [False, True])
def test_rows_get_pages_while_a_step_runs_ahead(cascade: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of several lengths that end at several times: a step that runs ahead is discarded only if a smaller graph is loaded."""
    limits = {**LIMITS, "max_model_len": 256, "max_num_batched_tokens": 64}
    grown, grow = [], GraphExecutor._grow
    monkeypatch.setattr(GraphExecutor, "_grow", lambda *args: grown.append(grow(*args)) or grown[-1])

    def replies(state: nv.EngineState) -> tuple[dict[int, list[int]], nv.EngineState]:
        for prompt, count in (([3, 4, 5], 230), ([6, 7], 150), ([8] * 6, 190), ([9] * 9, 77)):
            state, _ = nv.submit(MODEL, state, prompt, replace(CLIENTS[1], seed=count, max_tokens=count))
        tokens: dict[int, list[int]] = {}
        while state.running or state.waiting:
            state, outs = nv.step(MODEL, state)
            for out in outs:
                tokens.setdefault(out.request_id, []).extend(out.token_ids)
        return tokens, state

    want, _ = replies(nv.init_state(MODEL, num_pages=400, **limits))
    got, state = replies(started(MODEL, 400, limits, cascade=cascade)[0])
    assert got == want
    assert sum(grown) >= 3 and all(grown)
    assert state.stats.discarded_tokens <= 4 + 2 + 1 + 1  # of rows that ended, and of two smaller graphs


@pytest.mark.parametrize(("model", "cascade"), [(MODEL, True), (WINDOWED, False)], ids=["shared", "windowed"])
def test_growth_discards_no_step(model: nv.Model, cascade: bool) -> None:
    """Rows over one shared prompt get pages beside a step that runs; rows with windows get them when no step runs ahead."""
    limits = {**LIMITS, "max_model_len": 256, "max_num_batched_tokens": 128}
    shared = [(7 * i) % 60 for i in range(24)]

    def replies(state: nv.EngineState) -> tuple[list[list[int]], nv.EngineState, set[str]]:
        ways, tokens = set[str](), dict[int, list[int]]()
        for own in range(4):
            state, _ = nv.submit(model, state, [*shared, own], replace(PLAIN, max_tokens=200))
        while state.running or state.waiting:
            state, outs = nv.step(model, state)
            executor = state.runtime.executor
            if isinstance(executor, GraphExecutor) and executor._loaded is not None:
                ways.add(executor._loaded[0].kind.way)
            for out in outs:
                tokens.setdefault(out.request_id, []).extend(out.token_ids)
        return list(tokens.values()), state, ways

    want, _, _ = replies(nv.init_state(model, num_pages=400, **limits))
    got, state, ways = replies(started(model, 400, limits, cascade=cascade)[0])
    assert got == want and ("shared" in ways) is cascade
    assert state.stats.discarded_tokens <= 4  # of the rows that ended


def test_a_rehearsal_samples_in_every_way_and_uses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it samples may be garbage: it is no token of the vocabulary, and neither the tables nor a later step may see it."""
    state, executor = started(MODEL, 60)
    kinds, draw = list[str](), cuda_graphs.draw_rows
    graphs = executor._decode, executor._extend

    def garbage(kind: Any, *given: Any) -> Any:
        kinds.append(kind)
        return replace(draw(kind, *given), token_ids=torch.full((len(given[0]),), 10**9, dtype=torch.int32))

    monkeypatch.setattr(cuda_graphs, "draw_rows", garbage)
    before = [tensor.clone() for tensor in (executor._rows.tables.marks, executor._rows.tables.biases, executor._rows.tables.counted)]
    for steps in graphs:
        own = steps.way()
        monkeypatch.setattr(steps, "ways", lambda size: ["fused"])
        monkeypatch.setattr(steps, "_padding", lambda kv, size, way, rest, of=steps._padding, own=own: of(kv, size, own, rest))
        for size in steps.sizes:
            steps.rehearse(state.kv, size)
            assert not (steps._lines(size)[: steps._num_lines] == 10**9).any()
    assert kinds == [kind for steps in graphs for _ in steps.sizes for kind in KINDS if kind != "logprobs"]
    after = executor._rows.tables.marks, executor._rows.tables.biases, executor._rows.tables.counted
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_a_slot_is_filled_once_while_rows_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    fills, fill = [], PenaltyTables.fill
    monkeypatch.setattr(PenaltyTables, "fill", lambda self, slot, *args: fills.append(slot) or fill(self, slot, *args))
    state, _ = started(MODEL, 60)
    for turn, prompt in enumerate(([3, 4, 5], [6, 7, 8, 9], [1], [2, 2])):
        state, _ = nv.submit(MODEL, state, prompt, replace(CLIENTS[4], max_tokens=9 + turn))
        for _ in range(3):
            state, _ = nv.step(MODEL, state)
    while state.running:
        state, _ = nv.step(MODEL, state)
    assert len(fills) == 4


def test_a_step_that_fails_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of the failed step were counted, and are drawn again."""
    params = replace(CLIENTS[3], seed=3)
    state, _ = started(MODEL, 60)
    state, want = nv.generate(MODEL, state, [3, 4, 5], params)
    state, _ = started(MODEL, 60)
    state, _ = nv.submit(MODEL, state, [3, 4, 5], params)
    got, decode = [], GraphExecutor.decode
    for step in range(40):
        with monkeypatch.context() as patch:
            if step % 3 == 2:

                def failing(self: GraphExecutor, *args: Any) -> Any:
                    decode(self, *args)
                    raise KeyboardInterrupt

                patch.setattr(GraphExecutor, "decode", failing)
            try:
                state, outs = nv.step(MODEL, state)
            except KeyboardInterrupt:
                continue
        got += [token for out in outs for token in out.token_ids]
    assert got == want.token_ids


def counted_always(self: PenaltyTables, slots: torch.Tensor, token_ids: torch.Tensor, lengths: torch.Tensor) -> None:
    """Counts a token with every step that runs it."""
    new = (slots >= 0) & (lengths > 0)
    self.marks.view(-1).scatter_add_(0, slots.long().clamp(min=0) * self.marks.shape[1] + token_ids, new.int() * 2)


def never_counted(self: PenaltyTables, slots: torch.Tensor, token_ids: torch.Tensor, lengths: torch.Tensor) -> None:
    """Counts no token."""


@pytest.mark.parametrize("fault", [counted_always, never_counted])
def test_planted_faults_of_counting_are_found(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penalty_tables.PenaltyTables, "count", fault)
    with pytest.raises(AssertionError):
        for seed in range(8):
            compared(MODEL, seed, 20)


def stale_tables(self: PromptBuffers, host: Any) -> None:
    """Leaves the page tables of the batch before."""
    FILL(self, replace(host, page_tables=host.page_tables * 0))


def logits_of_the_last_row(self: PromptGraphs, params: Any, kv: Any, host: Any) -> Any:
    """Gives every row the logits of the last one."""
    logits = RUN(self, params, kv, host)
    return None if logits is None else logits[-1:].expand_as(logits)


def ignores_the_memory(self: PromptGraphs, params: Any, kv: Any, host: Any) -> Any:
    """Runs steps that are too large, without their last tokens."""
    small = len(host.input_ids) <= 16
    return RUN(self, params, kv, host) if small else torch.zeros(len(host.logit_indices), 60)


FILL, RUN = PromptBuffers.fill, PromptGraphs.run


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [(PromptBuffers, "fill", stale_tables), (PromptGraphs, "run", logits_of_the_last_row), (PromptGraphs, "run", ignores_the_memory)],
)
def test_planted_faults_of_captured_prompts_are_found(owner: Any, name: str, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, fault)
    found = 0
    for seed in range(3):
        try:
            compared(MODEL, seed, 60)
        except AssertionError:
            found += 1
    assert found


@pytest.mark.parametrize("windows", [(), (5, 0), (5, 5)])
@pytest.mark.parametrize(("seed", "num_pages", "cascade"), [(0, 60, None), (1, 14, None), (2, 20, True), (3, 20, False)])
def test_kv_in_fp8_needs_no_plans_of_flashinfer(
    windows: tuple[int, ...], seed: int, num_pages: int, cascade: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans of our own attend, also where nothing is shared. Greedy replies are those of plain steps."""
    monkeypatch.setattr(graph_executor, "Attention", attention_plans.Attention)
    monkeypatch.setattr(attention_plans, "against_own_kernels", lambda *_: "")
    model = random_model(replace(tiny_config(vocab_size=60), windows=windows), dtype="float64")
    limits, greedy = {**LIMITS, "kv_dtype": "fp8"}, [client for client in CLIENTS if client.temperature == 0.0]
    want, _ = served(model, nv.init_state(model, num_pages=num_pages, **limits), seed, clients=greedy)
    state, executor = started(model, num_pages, limits, cascade=cascade)
    got, state = served(model, state, seed, clients=greedy)
    assert got == want
    assert {kind.way for kind in executor._decode._steps} == {kind.way for kind in executor._extend._steps} == {"shared"}
    with pytest.raises(attention_plans.AttentionUnavailableError, match="FP8"):
        executor._attention.decode_plans(1)
    request = plain_request(8)
    rows = [Sequence(request=request, tokens=IntVector.of([1, 2, 3, 4, 5]), pages=IntVector.of([0, 1]), num_filled=4)]
    plans = executor._follow(decode_batch(rows, page_size=4, dummy_page=num_pages), ticket=1)  # of a session
    assert plans == (executor._sessions[1].handle,) * 2


def test_ranks_exchange_their_best_tokens_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the model's graph, whose greedy token another kind of sampling would replace."""
    now, exchanges, winners = local(), dict[str, set[int]](run=set(), draw=set()), ThreadGroup.winners

    def noted(self: ThreadGroup, values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        now.count = getattr(now, "count", 0) + 1
        return winners(self, values, ids)

    def counted(name: str, call: Any) -> Any:
        def counts(self: CapturedStep) -> None:
            now.count = 0
            call(self)
            if not self.kind.processors:
                exchanges[name].add(now.count)

        return counts

    def run(mesh: Mesh | None) -> dict[int, list[int]]:
        model = random_model(tiny_config(vocab_size=60), dtype="float64", mesh=mesh)
        state = nv.init_state(model, num_pages=30, **LIMITS) if mesh is None else started(model, 30)[0]
        return served(model, state, 3, processed=0.1, clients=CLIENTS[:3])[0]

    alone = run(None)
    monkeypatch.setattr(ThreadGroup, "winners", noted)
    for name in exchanges:
        monkeypatch.setattr(CapturedStep, name, counted(name, getattr(CapturedStep, name)))
    assert run_ranks(run, 2) == [alone] * 2
    assert exchanges == {"run": {0}, "draw": {0, 1}}  # none where all logits are gathered


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Gemma3ForCausalLM"])
def test_prompts_in_two_halves(architecture: str, size: int) -> None:
    """Prompts that no graph holds run as two halves of at least eight tokens. Replies are those of plain steps on one rank."""
    config = tiny_config(architecture, vocab_size=60)

    def run(mesh: Mesh | None) -> dict[int, list[int]]:
        model, ran = random_model(config, dtype="float64", mesh=mesh), list[int]()
        state, executor = started(model, 30)
        inner = executor._in_halves

        def noted(params: Any, kv: Any, parts: Any, config: Any) -> Any:
            ran.extend(len(part.input_ids) for part in parts)
            return inner(params, kv, parts, config)

        assert executor.halves_from is None  # no GPUs share the model
        executor.halves_from, executor._in_halves = 17, noted  # pyright: ignore[reportAttributeAccessIssue]
        replies, _ = served(model, state, 3, clients=CLIENTS[:3])
        assert len(ran) > 10 and min(ran) >= 6
        return replies

    plain = random_model(config, dtype="float64")
    whole = served(plain, nv.init_state(plain, num_pages=30, **LIMITS), 3, clients=CLIENTS[:3])[0]
    if size == 1:
        assert run(None) == whole
    else:
        assert run_ranks(run, size) == [whole] * size


def test_scores_and_chunks_of_prompts_in_two_halves() -> None:
    prompts: list[Any] = [[(7 * at + row) % 60 for at in range(count)] for row, count in enumerate((50, 31, 20))]

    def seen(state: nv.EngineState, model: nv.Model) -> tuple[list[float], list[int]]:
        state, scores = nv.score(model, state, [prompt[:20] for prompt in prompts], [[*prompt[10:], 5] for prompt in prompts])
        state, chunk = nv.prefill(model, state, prompts[0])
        state, reply = nv.generate(model, state, [chunk, prompts[2][:8]], PLAIN)
        return [float(value) for score in scores for value in score.logprobs], reply.token_ids

    model = random_model(tiny_config(vocab_size=60), dtype="float64")
    want, tokens = seen(nv.init_state(model, num_pages=60, **LIMITS), model)
    state, executor = started(model, 60)
    executor.halves_from = 17
    got, same = seen(state, model)
    assert got == pytest.approx(want, abs=1e-9) and same == tokens


def test_an_executor_frees_all_its_graphs(graphs: list[Call]) -> None:
    state, executor = started(MODEL, 30)
    served(MODEL, state, 0)
    assert executor._short is not None and len(graphs) > len(executor._short.kinds) + len(executor._extend.sizes)
    assert not any(graph.freed for graph in graphs)
    executor.free()
    assert all(graph.freed for graph in graphs)


def test_graphs_of_logits_are_freed() -> None:
    graphs, call = LogitsGraphs(MODEL, models.forward), Call(int)
    known: Any = {(1, 1, 0, 0): (call, None, None, None)}
    graphs._graphs = known
    graphs.free()
    assert call.freed


def test_the_start_makes_no_graph_of_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled functions would be compiled again in the first step, and a model in training would keep what its gradients need."""
    modes = set[bool]()

    def forward(*given: Any) -> Any:
        modes.add(torch.is_grad_enabled())
        return models.forward(*given)

    monkeypatch.setattr(graph_executor, "compiled_forward", lambda _: forward)
    with torch.enable_grad():
        started(MODEL, 30)
    assert modes == {False}
