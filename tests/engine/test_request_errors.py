"""Errors that belong to a request: the request ends with the error, its pages come back, and the others lose no token."""

import gc
import weakref
from dataclasses import replace

import pytest
import tokenizers
import torch
from tokenizers import decoders, models

import nanovllm as nv
from nanovllm.engine.requests import submit_many
from nanovllm.executor.executor import Runtime, executor_of
from nanovllm.testing.models import random_model, tiny_config
from nanovllm.testing.shadows.worlds import FlakyExecutor, drain
from nanovllm.tokenizer.tokenizer import make_tokenizer

BAD = 7  # the token that cannot be decoded
PROMPTS = [[1, 2, 3, 4, 5], [6, 6, 6], [9, 8, 7, 6, 5, 4, 3], [2, 8]]
NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class BrittleDecoder:
    """A decoder that fails for one token."""

    def decode_chain(self, tokens: list[str]) -> list[str]:
        """The tokens as they are."""
        if f"t{BAD}" in tokens:
            raise ValueError(f"t{BAD} has no text")
        return tokens


def brittle_tokenizer():
    backend = tokenizers.Tokenizer(models.WordLevel({f"t{i}": i for i in range(40)}, unk_token="t0"))
    backend.decoder = decoders.Decoder.custom(BrittleDecoder())
    return make_tokenizer(backend, {}, None)


MODEL = replace(random_model(tiny_config(vocab_size=40), 0), tokenizer=brittle_tokenizer())


def engine(**limits):
    state = nv.init_state(MODEL, **{"num_pages": 40, "page_size": 4, "max_num_seqs": 4, **limits})
    return replace(state, runtime=Runtime(state.runtime.lease, FlakyExecutor(executor_of(state))))


def greedy(count, **options):
    return nv.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, **options)


def saying(*tokens):
    """A function of the logits after which a reply consists of these tokens, and of token 3 after them."""

    def says(logits, so_far, place):
        best = torch.tensor([*tokens, 3])[place.clamp(max=len(tokens))]
        return torch.zeros_like(logits).scatter(1, best.unsqueeze(1), 1.0), place + 1

    return nv.LogitsProcessor(says, lambda tokens: torch.zeros(len(tokens.lengths), dtype=torch.long))


def alone(prompt, count):
    state, rid = nv.submit(MODEL, engine(), prompt, greedy(count))
    _, ended = drain(MODEL, state)
    return ended[rid].token_ids


REPLIES = [alone(prompt, 6) for prompt in PROMPTS]


def queued(state, prompts=PROMPTS, count=6, **options):
    ids = []
    for prompt in prompts:
        state, rid = nv.submit(MODEL, state, prompt, greedy(count, **options))
        ids.append(rid)
    return state, ids


def run(state, failing=()):
    """Step until all requests have ended. Returns the state and the outputs by id; the tokens of all steps are those of the outputs."""
    drawn, outputs = {}, {}
    while state.running or state.waiting:
        state, outs = nv.step(MODEL, state)
        nv.check(state)
        for out in outs:
            drawn.setdefault(out.request_id, []).extend(out.token_ids)
            if out.output is not None:
                assert (out.error is None) == (out.finish_reason != "error") == (out.request_id not in failing)
                assert out.output.error is out.error and out.output.finish_reason == out.finish_reason
                assert out.error is None or (out.error.request_id == out.request_id and f"request {out.request_id} " in str(out.error))
                outputs[out.request_id] = out.output
    assert {rid: out.token_ids for rid, out in outputs.items()} == drawn
    assert state.pool.num_available == state.config.num_pages - sum(len(chunk.pages) for chunk in state.chunks.values())
    return state, outputs


# No pages


def test_a_prompt_without_pages_ends_and_those_behind_it_run():
    state, chunk = nv.prefill(MODEL, engine(num_pages=8), [0] * 20)
    state, (long, *others) = queued(state, [[5] * 14, *PROMPTS])
    state, outputs = run(state, failing=[long])
    assert isinstance(outputs[long].error, nv.OutOfPagesError) and "its 14 tokens do not fit" in str(outputs[long].error)
    assert outputs[long].token_ids == [] and outputs[long].prompt_token_ids.tolist() == [5] * 14
    assert [outputs[rid].token_ids for rid in others] == REPLIES
    state, rid = nv.submit(MODEL, nv.release(state, chunk), [5] * 14, greedy(3))
    assert run(state)[1][rid].finish_reason == "length"


def test_a_kept_request_that_fails_keeps_its_pages_until_it_is_detached():
    state, _ = nv.prefill(MODEL, engine(num_pages=8), [0] * 20)
    state, (rid,) = submit_many(MODEL, state, [[5] * 14], [greedy(3)], keep=True)
    outs = []
    while not outs:
        state, outs = nv.step(MODEL, state)
    assert outs[0].finish_reason == "error" and rid in state.kept
    nv.check(state)


# Text


def test_a_token_that_cannot_be_searched_ends_its_request_only():
    state, ids = queued(engine())
    params = greedy(6, stop=["never"])
    state, bad = nv.submit(MODEL, state, [1, 2], params, process_logits=saying(4, 5, BAD, 6))
    state, good = nv.submit(MODEL, state, [1, 2], params, process_logits=saying(4, 5, 6))
    state, outputs = run(state, failing=[bad])
    assert outputs[bad].token_ids == [4, 5, BAD] and outputs[bad].text == ""
    assert isinstance(outputs[bad].error, nv.RequestFailedError) and "stop=['never']" in str(outputs[bad].error)
    assert "t7 has no text" in str(outputs[bad].error.__cause__)
    assert outputs[good].token_ids == [4, 5, 6, 3, 3, 3]
    assert [outputs[rid].token_ids for rid in ids] == REPLIES


@pytest.mark.parametrize("steady", [False, True])
def test_a_reply_that_cannot_be_decoded_ends_with_an_error(steady: bool):
    def says_bad(logits):  # carries nothing, so its steps need no schedule
        return torch.zeros_like(logits).index_fill(1, torch.tensor([BAD]), 1.0)

    state, ids = queued(engine(), PROMPTS[:3])
    state, bad = nv.submit(MODEL, state, [1, 2], greedy(4), process_logits=says_bad if steady else saying(4, BAD))
    state, outputs = run(state, failing=[bad])
    assert outputs[bad].token_ids == ([BAD] * 4 if steady else [4, BAD, 3, 3])
    assert [outputs[rid].token_ids for rid in ids] == REPLIES[:3]


# Functions of requests


def failing_at(length):
    """A function that fails once a row that begins with token 39 has so many tokens."""

    def fails(logits, tokens):
        if bool(((tokens.lengths >= length) & (tokens.token_ids[:, 0] == 39)).any()):
            raise ValueError(f"no rule after {length} tokens")
        return logits

    return fails


@pytest.mark.parametrize("length", [2, 3, 5])
def test_all_rows_of_a_function_that_raises_end_and_the_others_go_on(length: int):
    fails = failing_at(length)
    state, ids = queued(engine(max_num_seqs=8))
    state, first = nv.submit(MODEL, state, [39, 2], greedy(6), process_logits=fails)
    state, second = nv.submit(MODEL, state, [39, 4], greedy(6), process_logits=fails)
    state, other = nv.submit(MODEL, state, PROMPTS[0], greedy(6), process_logits=lambda logits: logits)
    state, outputs = run(state, failing=[first, second])
    for rid in (first, second):
        assert isinstance(outputs[rid].error, nv.RequestFailedError) and isinstance(outputs[rid].error.__cause__, ValueError)
        assert "process_logits fails (test_request_errors.py, line" in str(outputs[rid].error)
        assert len(outputs[rid].token_ids) == length - 2
    assert [outputs[rid].token_ids for rid in (*ids, other)] == [*REPLIES, REPLIES[0]]


def test_only_the_rows_whose_init_raises_end():
    def init(tokens):
        if bool((tokens.token_ids == 39).any()):
            raise ValueError("39")
        return torch.zeros(len(tokens.lengths))

    processor = nv.LogitsProcessor(lambda logits, tokens, carried: (logits, carried), init)
    state, good = nv.submit(MODEL, engine(), PROMPTS[0], greedy(6), process_logits=processor)
    state, _ = nv.step(MODEL, state)
    state, bad = nv.submit(MODEL, state, [39], greedy(6), process_logits=processor)
    state, outputs = nv.step(MODEL, state)
    assert {out.request_id: out.finish_reason for out in outputs} == {good: None, bad: "error"}
    _, ended = drain(MODEL, state)
    assert ended[good].token_ids == REPLIES[0]


def test_an_error_holds_no_tensors():
    """Errors are values that programs keep, so they must not keep the memory of the step alive."""
    seen = []

    def fails(logits):
        local = logits * 2
        seen.append(weakref.ref(local))
        raise ValueError("planted")

    state, _ = nv.submit(MODEL, engine(), [1, 2], greedy(6), process_logits=fails)
    old = weakref.ref(state.kv.pools[0])
    state, (out,) = nv.step(MODEL, state)
    del state
    gc.collect()
    assert out.error is not None and out.error.__cause__ is not None
    assert 'raise ValueError("planted")' in out.error.__cause__.__notes__[-1]
    assert seen[0]() is None and old() is None


def from_itself(logits):
    error = ValueError("planted")
    raise error from error


def without_text(logits):
    class Silent(Exception):
        def __str__(self):
            raise TypeError("no text")

    raise Silent


def hiding(logits):
    local = logits * 2
    try:
        raise KeyError(local.shape)
    except KeyError:
        try:
            raise ExceptionGroup("several", [ValueError("one")])
        except ExceptionGroup:
            raise ValueError("planted") from None


@pytest.mark.parametrize("fails", [from_itself, without_text, hiding])
def test_odd_exceptions_end_their_request_and_hold_no_memory(fails):
    state, (good,) = queued(engine(), PROMPTS[:1])
    state, bad = nv.submit(MODEL, state, [1, 2], greedy(6), process_logits=fails)
    old = weakref.ref(state.kv.pools[0])
    state, outputs = run(state, failing=[bad])
    assert isinstance(outputs[bad].error, nv.RequestFailedError) and outputs[good].token_ids == REPLIES[0]
    del state
    gc.collect()
    assert old() is None


def test_one_exception_of_several_functions_ends_the_request_of_each():
    error = ValueError("planted")

    def one(logits):
        raise error

    def other(logits):
        raise error

    state, ids = queued(engine(max_num_seqs=8))
    failing = []
    for _ in range(3):
        for function in (one, other):
            state, rid = nv.submit(MODEL, state, [1, 2], greedy(6), process_logits=function)
            failing.append(rid)
    state, outputs = run(state, failing=failing)
    assert [outputs[rid].token_ids for rid in ids] == REPLIES
    assert all(" one " in str(outputs[rid].error) for rid in failing[::2])
    assert all(" other " in str(outputs[rid].error) for rid in failing[1::2])
    assert len(error.__notes__) == 1


def test_memory_that_a_function_lacks_is_the_error_of_its_request():
    def greedy_for_memory(logits):
        raise NO_MEMORY

    state, ids = queued(engine(max_num_seqs=8))
    state, bad = nv.submit(MODEL, state, [1, 2], greedy(6), process_logits=greedy_for_memory)
    state, outputs = run(state, failing=[bad])
    assert [outputs[rid].token_ids for rid in ids] == REPLIES
    assert state.stats.memory_shortages == 0 and outputs[bad].token_ids == []


def test_an_error_of_nobody_is_raised_and_nothing_is_lost():
    state, ids = queued(engine())
    for countdown in range(3):
        state.runtime.executor.arm(countdown, late=True, error=RuntimeError("a bug"))
        with pytest.raises(RuntimeError, match="a bug"):
            for _ in range(4):
                state, _ = nv.step(MODEL, state)
    _, ended = drain(MODEL, state)
    assert [ended[rid].token_ids for rid in ids] == REPLIES


# Device memory


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("countdown", range(6))
def test_a_step_without_memory_is_run_again_with_fewer_tokens(countdown: int, late: bool):
    state, ids = queued(engine(num_pages=9))
    executor = state.runtime.executor
    executor.arm(countdown, late, NO_MEMORY)
    state, outputs = run(state)
    assert executor.num_failed == 1 and state.stats.memory_shortages == 1
    assert [outputs[rid].token_ids for rid in ids] == REPLIES


def test_the_budget_is_halved_and_recovers():
    state, _ = queued(engine(max_num_batched_tokens=64), [[1] * 40, [2] * 20], count=60)
    state.runtime.executor.arm(0, False, NO_MEMORY)
    state, _ = nv.step(MODEL, state)
    assert state.token_budget == 30 and state.stats.prefill_tokens == 30
    before, steps = 0, 0
    while state.token_budget is not None:
        assert before < state.token_budget < 64
        before, steps = state.token_budget, steps + 1
        state, _ = nv.step(MODEL, state)
    assert steps == 34  # one token more in each step below 64


def test_a_budget_below_the_rows_makes_the_youngest_wait():
    state, ids = queued(engine())
    state, outs = nv.step(MODEL, state)
    drawn = {out.request_id: list(out.token_ids) for out in outs}
    assert len(state.running) == 4
    state.runtime.executor.arm(0, False, NO_MEMORY)
    state, outs = nv.step(MODEL, state)
    assert [out.request_id for out in outs] == ids[:2] and len(state.running) == 4
    for out in outs:
        drawn[out.request_id] += out.token_ids
    while state.running:
        state, outs = nv.step(MODEL, state)
        for out in outs:
            drawn[out.request_id] += out.token_ids
    assert [drawn[rid] for rid in ids] == REPLIES


class Crowded(FlakyExecutor):
    """Has no memory for rows that decode after a prompt."""

    beside = num_prompts = 0

    def prefill(self, model, kv, rows, **options):
        self.beside, self.num_prompts = len(rows), self.num_prompts + 1
        return super().prefill(model, kv, rows, **options)

    def decode(self, model, carry, masks=None):
        beside, self.beside = self.beside, 0
        if beside:
            raise NO_MEMORY
        return super().decode(model, carry, masks)


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_without_memory_beside_a_prompt_decode_before_it(rows: int):
    state, ids = queued(engine(max_num_seqs=8, num_pages=60), PROMPTS[:rows])
    state, _ = nv.step(MODEL, state)
    state, long = nv.submit(MODEL, state, [5] * 90, greedy(1))
    state = replace(state, runtime=Runtime(state.runtime.lease, executor := Crowded(executor_of(state).inner)), loaded=None)
    state, outs = nv.step(MODEL, state)
    assert executor.num_prompts == 1 and [out.request_id for out in outs] == ids[:1] and outs[0].error is None
    state, outputs = drain(MODEL, state)
    assert [outputs[rid].token_ids for rid in (*ids, long)][:rows] == REPLIES[:rows] and outputs[long].error is None
    assert executor.num_prompts < 100


def test_a_prompt_without_memory_takes_nothing_from_the_rows_that_decode():
    state, ids = queued(engine(max_num_seqs=8))
    state, _ = nv.step(MODEL, state)
    state, long = nv.submit(MODEL, state, [5] * 9, greedy(1))
    state.runtime.executor.arm(0, False, NO_MEMORY)
    state, outs = nv.step(MODEL, state)
    assert [out.request_id for out in outs] == ids and state.token_budget == 4 + 4
    assert state.running[-1].request.request_id == long and state.running[-1].num_filled == 4


def test_a_request_that_has_no_memory_even_alone_ends_and_the_next_step_serves_the_others():
    state, ids = queued(engine())
    executor = state.runtime.executor
    executor.arm(0, False, NO_MEMORY, times=6)  # for 17 tokens, 8, 4, 2, 1, and for the first token of the next request
    state, (out,) = nv.step(MODEL, state)
    assert executor.num_failed == 5 and out.request_id == ids[0]
    assert isinstance(out.error, nv.OutOfPagesError) and "no memory for even one" in str(out.error)
    assert out.error.__cause__ is NO_MEMORY and state.token_budget == 1
    state, (second,) = nv.step(MODEL, state)
    assert second.request_id == ids[1] and second.finish_reason == "error"
    state, outputs = run(state)
    assert [outputs[rid].token_ids for rid in ids[2:]] == REPLIES[2:]


# Calls that return whole replies


def test_generate_many_returns_the_error_of_one_reply_and_the_others_whole():
    state, held = nv.prefill(MODEL, engine(), [1, 2, 3])
    state, waiting = nv.submit(MODEL, state, PROMPTS[0], greedy(6))
    before = state.pool.num_available
    found = next(prompt for prompt in ([i, j] for i in range(40) for j in range(40)) if BAD in alone(prompt, 6))
    state, (first, bad, last) = nv.generate_many(MODEL, state, [[held, PROMPTS[0]], found, PROMPTS[2]], greedy(6, stop=["never"]))
    assert bad.finish_reason == "error" and isinstance(bad.error, nv.RequestFailedError) and bad.token_ids[-1] == BAD
    assert (first.error, last.error) == (None, None) and last.token_ids == REPLIES[2]
    nv.check(state)
    for call in (lambda: nv.fork(state, bad.chunk), lambda: nv.release(state, bad.chunk)):
        with pytest.raises(nv.ReleasedChunkError):
            call()
    state = nv.release(nv.release(state, first.chunk), last.chunk)
    assert state.pool.num_available == before
    with pytest.raises(nv.RequestFailedError) as raised:
        nv.generate(MODEL, state, found, greedy(6, stop=["never"]))
    assert raised.value.request_id == state.next_id
    state, reply = nv.generate(MODEL, state, PROMPTS[2], greedy(6))  # the old state serves
    assert reply.token_ids == REPLIES[2] and not state.kept
    _, outputs = run(nv.release(nv.release(state, reply.chunk), held))
    assert outputs[waiting].token_ids == REPLIES[0]


def test_generate_without_memory_for_one_token_raises_and_leaves_the_state():
    state = engine()
    state.runtime.executor.arm(0, True, NO_MEMORY, times=4)
    with pytest.raises(nv.OutOfPagesError, match="request 0 failed: the device has no memory") as raised:
        nv.generate(MODEL, state, PROMPTS[0], greedy(6))
    assert raised.value.request_id == 0
    nv.check(state)
    state, reply = nv.generate(MODEL, state, PROMPTS[0], greedy(6))
    assert reply.token_ids == REPLIES[0]


def test_the_llm_returns_errors_in_outputs_and_raises_them_for_one_reply():
    llm = nv.LLM(MODEL, num_pages=40, page_size=4)
    fails, params = failing_at(4), greedy(6)
    outputs = llm.generate([[1, 2], [3] * 5], params, process_logits=lambda logits: logits)
    assert [out.error for out in outputs] == [None, None]
    outputs = llm.generate([[39, 2], [39]], params, process_logits=fails)
    assert [(out.finish_reason, type(out.error)) for out in outputs] == [("error", nv.RequestFailedError)] * 2
    good, bad = llm.stream(PROMPTS[0], params), llm.stream([39, 2, 1], params, process_logits=fails)
    drawn = [*next(good).token_ids]
    assert len(next(bad).token_ids) == 1
    with pytest.raises(nv.RequestFailedError, match="no rule after 4 tokens") as raised:
        list(bad)
    assert raised.value.request_id is not None
    drawn += [token for piece in good for token in piece.token_ids]
    assert drawn == REPLIES[0]
    assert not llm.inbox and not llm.state.running
    undecodable = llm.stream([1, 2], params, process_logits=saying(4, BAD))
    with pytest.raises(nv.RequestFailedError, match="cannot be decoded"):
        list(undecodable)
    assert not llm.inbox and not llm.state.running and not llm.state.waiting


def test_a_chat_raises_the_error_of_its_reply():
    llm = nv.LLM("tiny", device="cpu", num_pages=64)

    def fails(logits):
        raise ValueError("planted")

    with pytest.raises(nv.RequestFailedError, match="planted"):
        llm.chat([{"role": "user", "content": "Hello"}], greedy(3), process_logits=fails)
    assert llm.chat([{"role": "user", "content": "Hello"}], greedy(3)).finish_reason == "length"
