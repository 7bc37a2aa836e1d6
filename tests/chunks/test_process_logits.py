"""`process_logits` in `generate`, `generate_many` and `begin`: the tokens of a plain loop over single steps, whatever else is asked for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

import nanovllm as nv
from nanovllm.executor import decode
from nanovllm.executor.executor import executor_of
from nanovllm.testing.models import random_model, tiny_config

pytestmark = pytest.mark.unhooked  # whole engines run many steps, which the hook makes three to six times as long
V = 40
MODEL = random_model(tiny_config(vocab_size=V), 0)
TEXTS = random_model(tiny_config(), 0)  # its tokens are bytes
CONTEXTS = [[1, 2, 3, 4, 5, 6, 7], [9], [8, 7, 6, 5]]
GREEDY = nv.SamplingParams(temperature=0, ignore_eos=True, max_tokens=8)


def engine(model: nv.Model = MODEL, **limits: Any) -> nv.EngineState:
    return nv.init_state(model, **{"num_pages": 64, "page_size": 4, "max_num_seqs": 8, **limits})


def shifted(logits: torch.Tensor, tokens: nv.TokensSoFar) -> torch.Tensor:
    """Make the token after the newest one likelier."""
    return logits.scatter_add(1, (tokens.last().long() + 1).remainder(V).unsqueeze(1), torch.full((len(logits), 1), 3.0))


def fewer(logits: torch.Tensor, tokens: nv.TokensSoFar) -> torch.Tensor:
    """Forbid all tokens that are in the row."""
    seen = torch.zeros_like(logits, dtype=torch.int32).scatter_add(1, tokens.token_ids.long(), tokens.valid().int())
    return logits.masked_fill(seen > 0, -torch.inf)


def delayed(logits: torch.Tensor, tokens: nv.TokensSoFar, carried: dict[str, torch.Tensor]) -> tuple[torch.Tensor, Any]:
    """Exchange what is carried, and sample from the logits of two steps ago too."""
    mixed = logits + 0.5 * carried["older"]
    return mixed, {"old": logits, "older": carried["old"], "count": carried["count"] + 1}


def late(logits: torch.Tensor, tokens: nv.TokensSoFar, carried: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample from the logits of the step before."""
    return carried, logits


def nothing_yet(tokens: nv.TokensSoFar) -> dict[str, torch.Tensor]:
    zeros = torch.zeros(1, V).expand(len(tokens.lengths), V)
    return {"old": zeros, "older": zeros, "count": tokens.lengths}


STATELESS = [lambda logits: -logits, shifted, fewer]
PROCESSORS = [
    *map(nv.LogitsProcessor, STATELESS),
    nv.LogitsProcessor(delayed, nothing_yet),
    nv.LogitsProcessor(late, lambda tokens: torch.zeros(len(tokens.lengths), V)),
]
NAMES = ["negated", "shifted", "fewer", "delayed", "late"]
each = pytest.mark.parametrize("processor", PROCESSORS, ids=NAMES)


def so_far(texts: list[list[int]]) -> nv.TokensSoFar:
    lengths = torch.tensor([len(text) for text in texts], dtype=torch.int32)
    rows = [text + [0] * (int(lengths.max()) - len(text)) for text in texts]
    return nv.TokensSoFar(token_ids=torch.tensor(rows, dtype=torch.int32), lengths=lengths)


def by_hand(
    contexts: list[list[int]], params: Any, processor: nv.LogitsProcessor, room: int, model: nv.Model = MODEL
) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Tokens and logits of a loop that keeps texts and carried tensors by itself."""
    texts = [list(context) for context in contexts]
    carried = None if processor.init is None else processor.init(so_far(texts))
    state, carry = nv.begin(model, engine(model), contexts, params, room=room)
    seen = []
    for _ in range(room):

        def process(logits: torch.Tensor, texts: list[list[int]] = texts) -> torch.Tensor:
            nonlocal carried
            if processor.init is not None:
                logits, carried = processor.function(logits, so_far(texts), carried)
                return logits
            return processor.function(logits) if processor.function is STATELESS[0] else processor.function(logits, so_far(texts))

        carry, out = nv.decode_step(model.params, carry, model.config, process_logits=process)
        seen.append(out.logits)
        texts = [[*text, token] for text, token in zip(texts, out.token_ids.tolist(), strict=True)]
    state, _ = nv.commit(model, state, carry)
    return [text[len(context) :] for text, context in zip(texts, contexts, strict=True)], seen


OPTIONS = [
    {"temperature": 0},
    {"temperature": 1.2, "seed": 3, "top_p": 0.9},
    {"temperature": 0.8, "seed": 5, "top_k": 7, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "logit_bias": {3: 2.0}},
]


@each
@pytest.mark.parametrize("options", OPTIONS, ids=["greedy", "seeded", "penalised"])
def test_replies_are_those_of_a_plain_loop(processor: nv.LogitsProcessor, options: dict[str, Any]):
    lengths = (8, 3, 6)
    params = [nv.SamplingParams(**options, ignore_eos=True, max_tokens=n, logprobs=0) for n in lengths]
    state, made = nv.generate_many(MODEL, engine(), CONTEXTS, params, process_logits=processor)
    nv.check(state)
    texts, logits = by_hand(CONTEXTS, params, processor, 8)
    for row, (one, text, count) in enumerate(zip(made, texts, lengths, strict=True)):
        assert one.token_ids == text[:count] and one.finish_reason == "length" and one.logprobs is not None
        want = [logits[i][row].log_softmax(0)[token].item() for i, token in enumerate(text[:count])]
        assert [entry.logprob for entry in one.logprobs] == pytest.approx(want, abs=1e-5)
        assert [entry.token_id for entry in one.logprobs] == one.token_ids
        # A row that has ended is run on with the others, which must leave its KV as it is.
        state, more = nv.generate(MODEL, state, one.chunk, GREEDY)
        _, plain = nv.generate(MODEL, engine(), CONTEXTS[row] + one.token_ids, GREEDY)
        assert more.token_ids == plain.token_ids
        state = nv.release(nv.release(state, one.chunk), more.chunk)
    assert nv.memory(state).num_held == 0 and executor_of(state)._sessions == {}
    state, (alone,) = nv.generate_many(MODEL, state, CONTEXTS[:1], params[:1], process_logits=processor)
    assert alone.token_ids == texts[0]
    state, single = nv.generate(MODEL, state, CONTEXTS[1], params[1], process_logits=processor)
    assert single.token_ids == texts[1][:3]


@each
def test_end_tokens_end_rows_and_leave_the_others(processor: nv.LogitsProcessor):
    texts, _ = by_hand(CONTEXTS, GREEDY, processor, 8)
    ends = [text.index(text[place]) + 1 for text, place in zip(texts, (0, 4, 7), strict=True)]
    params = [
        nv.SamplingParams(temperature=0, ignore_eos=True, max_tokens=8, stop_token_ids=[text[end - 1]])
        for text, end in zip(texts, ends, strict=True)
    ]
    state, made = nv.generate_many(MODEL, engine(), CONTEXTS, params, process_logits=processor)
    nv.check(state)
    assert [one.token_ids for one in made] == [text[:end] for text, end in zip(texts, ends, strict=True)]
    assert {one.finish_reason for one in made} == {"stop"}
    assert state.stats.decode_tokens + state.stats.prefill_tokens == 12 + 3 * max(ends)


def test_rows_may_be_mixed_and_stay_in_order():
    """The first row samples from the difference of the first two, so an end of the second must not take its row away."""

    def contrast(logits: torch.Tensor, tokens: nv.TokensSoFar) -> torch.Tensor:
        shapes.append(tuple(logits.shape))
        lengths.append(tokens.lengths.tolist())
        return torch.stack((logits[0] - 0.5 * logits[1], logits[1], logits[2]))

    shapes, lengths = [], []
    params = [nv.SamplingParams(temperature=0, ignore_eos=True, max_tokens=n) for n in (6, 2, 4)]
    state, made = nv.generate_many(MODEL, engine(), CONTEXTS, params, process_logits=contrast)
    assert shapes == [(3, V)] * 6 and [len(one.token_ids) for one in made] == [6, 2, 4]
    assert lengths == [[7 + i, 1 + min(i, 2), 4 + min(i, 4)] for i in range(6)]
    nv.check(state)


@pytest.mark.parametrize("wanted", [1, 2])
def test_stop_strings_end_rows(wanted: int):
    letters = torch.full((TEXTS.config.vocab_size,), -torch.inf)
    letters[[TEXTS.tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abcdefgh"]] = 0
    processor = nv.LogitsProcessor(lambda logits: logits + letters)
    contexts = ["One", "Two words", "x"]
    hot = {"temperature": 2.0, "ignore_eos": True, "max_tokens": 60}
    _, free = nv.generate_many(TEXTS, engine(TEXTS), contexts, nv.SamplingParams(**hot, seed=1), process_logits=processor)
    assert all(set(one.text) <= set("abcdefgh") for one in free)
    stops = [one.text[place : place + wanted] for one, place in zip(free, (3, 20, 45), strict=True)]
    params = [nv.SamplingParams(**hot, seed=1, stop=stop) for stop in stops]
    state, made = nv.generate_many(TEXTS, engine(TEXTS), contexts, params, process_logits=processor)
    for one, whole, stop in zip(made, free, stops, strict=True):
        assert one.text == whole.text[: whole.text.index(stop)] and one.finish_reason == "stop"
        assert one.token_ids == whole.token_ids[: len(one.text) + len(stop)]
    longest = max(len(one.token_ids) for one in made)
    assert state.stats.discarded_tokens <= 3 * (longest + 16)
    nv.check(state)


@each
@settings(max_examples=10)
@given(data=st.data())
def test_splits_take_tokens_and_carried_tensors_along(processor: nv.LogitsProcessor, data: st.DataObject):
    """A split is a permutation here, so that the rows of a plain loop without splits are the oracle."""
    order = data.draw(st.lists(st.permutations(range(3)), min_size=4, max_size=4))
    copy = data.draw(st.booleans())
    contexts = [CONTEXTS[0]] * 3 if copy else CONTEXTS
    texts, _ = by_hand(contexts, GREEDY, processor, 4)
    state, carry = nv.begin(MODEL, engine(), contexts, GREEDY, room=4, branching=True, process_logits=processor)
    names = [0, 1, 2]
    for count, parents in enumerate(order):
        carry, out = nv.decode_step(MODEL.params, carry, MODEL.config)
        assert out.token_ids.tolist() == [texts[name][count] for name in names]
        parents = [0, 0, parents[2]] if copy else parents  # noqa: PLW2901
        carry = nv.split_rows(carry, torch.tensor(parents))
        names = [names[parent] for parent in parents]
        assert carry.token_ids is not None
        for row, (length, name) in enumerate(zip(carry.batch.seq_lens.tolist(), names, strict=True)):
            assert carry.token_ids[row, :length].tolist() == contexts[name] + texts[name][: count + 1]
    state, made = nv.commit(MODEL, state, carry)
    assert [one.token_ids for one in made] == [texts[name] for name in names]
    nv.check(state)


def test_a_split_with_other_tokens_shows_them():
    state, carry = nv.begin(MODEL, engine(), CONTEXTS[:2], GREEDY, room=4, branching=True, process_logits=shifted)
    carry, _ = nv.decode_step(MODEL.params, carry, MODEL.config)
    carry = nv.split_rows(carry, torch.tensor([1, 1]), torch.tensor([11, 12], dtype=torch.int32))
    assert carry.token_ids is not None and carry.token_ids[:, :2].tolist() == [[9, 11], [9, 12]]
    for _ in range(3):
        carry, _ = nv.decode_step(MODEL.params, carry, MODEL.config)
    state, made = nv.commit(MODEL, state, carry)
    for one, token in zip(made, (11, 12), strict=True):
        _, want = nv.generate(MODEL, engine(), [9, token], GREEDY, process_logits=shifted)
        assert one.token_ids == [token, *want.token_ids[:3]]


@each
def test_tensors_that_are_written_in_place(processor: nv.LogitsProcessor, monkeypatch: pytest.MonkeyPatch):
    """As traced code on a GPU writes them: carried tensors that are exchanged, or sampled from, are read before they are written."""
    texts, _ = by_hand(CONTEXTS, GREEDY, processor, 8)
    state, carry = nv.begin(MODEL, engine(), CONTEXTS, GREEDY, room=8, process_logits=processor)
    monkeypatch.setattr(decode, "written_in_place", lambda tensor: True)
    kept = [leaf for one in carry.processing for leaf in pytree.tree_leaves(one.carried)]
    for _ in range(8):
        carry, _ = nv.decode_step(MODEL.params, carry, MODEL.config)
    assert all(a is b for a, b in zip(kept, [x for one in carry.processing for x in pytree.tree_leaves(one.carried)], strict=True))
    state, made = nv.commit(MODEL, state, carry)
    assert [one.token_ids for one in made] == texts


def test_what_init_returns_gets_memory_of_its_own():
    shared = []

    def kept(logits: torch.Tensor, tokens: nv.TokensSoFar, carried: Any) -> Any:
        shared.append([leaf.clone() for leaf in carried])
        return logits, carried

    processor = nv.LogitsProcessor(kept, lambda tokens: [tokens.token_ids, tokens.token_ids, tokens.lengths[:1].expand(3)])
    _, carry = nv.begin(MODEL, engine(), CONTEXTS, GREEDY, room=4, process_logits=processor)
    leaves = carry.processing[0].carried
    assert len({leaf.data_ptr() for leaf in (*leaves, carry.token_ids)}) == 4 and all(leaf.is_contiguous() for leaf in leaves)
    for _ in range(4):
        carry, _ = nv.decode_step(MODEL.params, carry, MODEL.config)
    assert all(torch.equal(a, b) for step in shared for a, b in zip(step, shared[0], strict=True))  # the table itself is written in place


@pytest.mark.compile
@each
def test_steps_with_processors_trace(processor: nv.LogitsProcessor):
    torch._dynamo.reset()
    texts, _ = by_hand(CONTEXTS, GREEDY, processor, 6)
    run: Callable[..., Any] = torch.compile(
        lambda params, carry: nv.decode_step(params, carry, MODEL.config)[0], fullgraph=True, backend="eager"
    )
    state = engine()
    for _ in range(2):
        state, carry = nv.begin(MODEL, state, CONTEXTS, GREEDY, room=6, process_logits=processor)
        step = nv.capture(lambda carry: nv.decode_step(MODEL.params, carry, MODEL.config)[0], carry)
        for turn in (run, run, step, run, step, run):
            carry = run(MODEL.params, carry) if turn is run else step(carry)
        state, made = nv.commit(MODEL, state, carry)
        assert [one.token_ids for one in made] == [text[:6] for text in texts]
        nv.check(state)


class OwnError(Exception):
    pass


def raises(*given: Any) -> Any:
    raise OwnError


def after(count: int, then: Callable[..., Any]) -> Callable[..., Any]:
    """Return the logits as they are in the first steps."""
    calls = [0]

    def function(logits: torch.Tensor, tokens: nv.TokensSoFar, *carried: Any) -> Any:
        calls[0] += 1
        if calls[0] > count:
            return then(logits, tokens, *carried)
        return (logits, *carried) if carried else logits

    return function


def some(tokens: nv.TokensSoFar) -> torch.Tensor:
    return tokens.lengths


FAULTS: dict[str, tuple[Any, type[Exception]]] = {
    "shape": (lambda: after(2, lambda logits, tokens: logits[:, :5]), nv.InvalidRequestError),
    "dtype": (lambda: lambda logits: logits.int(), nv.InvalidRequestError),
    "nothing": (lambda: lambda logits, tokens: None, nv.InvalidRequestError),
    "not callable": (lambda: 3, nv.InvalidRequestError),
    "rows of init": (lambda: nv.LogitsProcessor(after(9, raises), lambda tokens: torch.zeros(7)), nv.InvalidRequestError),
    "init raises": (lambda: nv.LogitsProcessor(after(9, raises), raises), OwnError),
    "raises at once": (lambda: raises, OwnError),
    "raises later": (lambda: after(3, raises), OwnError),
    "raises with init": (lambda: nv.LogitsProcessor(after(3, raises), some), OwnError),
    "carried shape": (lambda: nv.LogitsProcessor(after(1, lambda x, tokens, c: (x, c[:0])), some), nv.InvalidRequestError),
    "carried tree": (lambda: nv.LogitsProcessor(after(1, lambda x, tokens, c: (x, [c])), some), nv.InvalidRequestError),
    "one result": (lambda: nv.LogitsProcessor(after(1, lambda x, tokens, c: x), some), nv.InvalidRequestError),
}


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize(("make", "error"), list(FAULTS.values()), ids=list(FAULTS))
def test_a_fault_leaves_the_state(make: Callable[[], Any], error: type[Exception]):
    state, base = nv.prefill(MODEL, engine(num_pages=16), CONTEXTS[0])
    held = nv.memory(state).num_held
    for call in (
        lambda: nv.generate(MODEL, state, [base, [3]], GREEDY, process_logits=make()),
        lambda: nv.generate_many(MODEL, state, [[base, [3]], CONTEXTS[1]], GREEDY, process_logits=make()),
    ):
        with pytest.raises(error):
            call()
        nv.check(state)
        assert nv.memory(state).num_held == held and executor_of(state)._sessions == {}
    try:
        later, carry = nv.begin(MODEL, state, [[base, [3]]], GREEDY, room=6, process_logits=make())
    except error:
        assert executor_of(state)._sessions == {}
    else:
        with pytest.raises(error):
            for _ in range(6):
                carry, _ = nv.decode_step(MODEL.params, carry, MODEL.config)
        state, _ = nv.commit(MODEL, later, carry)  # the step that failed has not taken the carry
    nv.check(state)
    _, more = nv.generate(MODEL, state, base, GREEDY)
    _, plain = nv.generate(MODEL, engine(), CONTEXTS[0], GREEDY)
    assert more.token_ids == plain.token_ids


def test_too_many_contexts_for_one_batch():
    state = engine(max_num_seqs=2)
    with pytest.raises(nv.InvalidRequestError, match="3 contexts with process_logits exceed max_num_seqs=2"):
        nv.generate_many(MODEL, state, CONTEXTS, GREEDY, process_logits=shifted)
    state, made = nv.generate_many(MODEL, state, CONTEXTS[:2], GREEDY, process_logits=shifted)
    assert len(made) == 2
    nv.check(state)


def test_submitted_requests_wait_meanwhile():
    state, rid = nv.submit(MODEL, engine(), CONTEXTS[2], GREEDY)
    state, _ = nv.step(MODEL, state)
    state, one = nv.generate(MODEL, state, CONTEXTS[0], GREEDY, process_logits=shifted)
    _, want = nv.generate(MODEL, engine(), CONTEXTS[0], GREEDY, process_logits=shifted)
    assert one.token_ids == want.token_ids
    ended: dict[int, Any] = {}
    while state.running or state.waiting:
        state, outputs = nv.step(MODEL, state)
        ended.update({out.request_id: out.output for out in outputs if out.output is not None})
    _, plain = nv.generate(MODEL, engine(), CONTEXTS[2], GREEDY)
    assert ended[rid].token_ids == plain.token_ids
    nv.check(state)


def test_the_alternatives_of_tokens_are_those_of_the_processed_logits():
    params = [nv.SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=count) for count in (2, 0, 3)]
    _, plain = nv.generate_many(MODEL, engine(), CONTEXTS, params)
    _, same = nv.generate_many(MODEL, engine(), CONTEXTS, params, process_logits=lambda logits: logits)
    for one, other, wanted in zip(plain, same, (2, 0, 3), strict=True):
        assert one.logprobs is not None and other.logprobs is not None
        assert [[token for token, _ in entry.top] for entry in one.logprobs] == [[t for t, _ in entry.top] for entry in other.logprobs]
        assert all(len(entry.top) == wanted for entry in other.logprobs)
        for a, b in zip(one.logprobs, other.logprobs, strict=True):
            assert [v for _, v in a.top] == pytest.approx([v for _, v in b.top], abs=1e-4)
    _, odd = nv.generate_many(MODEL, engine(), CONTEXTS, params, process_logits=lambda logits: -logits)
    assert odd[0].logprobs is not None and [entry.top[0][0] for entry in odd[0].logprobs] == odd[0].token_ids


@pytest.mark.parametrize(
    "result", [lambda x: x[:1], lambda x: x[:, :7], lambda x: x.mean(0, keepdim=True), lambda x: None, lambda x: x > 0]
)
@pytest.mark.parametrize("traced", [False, pytest.param(True, marks=pytest.mark.compile)])
def test_a_function_of_one_step_returns_logits(result: Callable[[torch.Tensor], Any], traced: bool):
    state, carry = nv.begin(MODEL, engine(), CONTEXTS, GREEDY, room=2)

    def step(params: Any, carry: nv.DecodeCarry) -> nv.DecodeCarry:
        return nv.decode_step(params, carry, MODEL.config, process_logits=result)[0]

    with pytest.raises((nv.InvalidRequestError, torch._dynamo.exc.TorchDynamoException), match=None if traced else "must return logits"):
        (torch.compile(step, fullgraph=True, backend="eager") if traced else step)(MODEL.params, carry)
    state, made = nv.commit(MODEL, state, carry)
    assert [reply.token_ids for reply in made] == [[], [], []]


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("given", [nv.LogitsProcessor(shifted), 3])
def test_one_step_takes_a_function_of_the_logits_alone(given: Any):
    state, carry = nv.begin(MODEL, engine(), CONTEXTS, GREEDY, room=2)
    with pytest.raises(nv.InvalidRequestError, match="function of the logits alone"):
        nv.decode_step(MODEL.params, carry, MODEL.config, process_logits=given)
    nv.commit(MODEL, state, carry)
