"""Think blocks: found by token id, dropped from what a reply's chunk keeps."""

from dataclasses import replace

import numpy as np
import pytest

import nanovllm as nv
from nanovllm.chunks.thinking import Retain, think_spans, without_thinking
from nanovllm.engine.donation import commit_state, guarded
from nanovllm.entrypoints import conversation as conversations
from nanovllm.loading.hub import TINY
from nanovllm.loading.load_model import load_model
from nanovllm.models.model import Model
from nanovllm.testing.models import byte_tokenizer, random_model, tiny_config
from nanovllm.tokenizer.messages import render

pytestmark = pytest.mark.unhooked  # whole engines run many steps, which the hook makes three to six times as long
TOKENIZER = byte_tokenizer()
assert TOKENIZER.think_token_ids is not None
OPEN, CLOSE = TOKENIZER.think_token_ids
END = TOKENIZER.encode("<|im_end|>", add_special_tokens=False)[0]
(A, B, SPACE, LINE) = (TOKENIZER.encode(text, add_special_tokens=False)[0] for text in ("a", "b", " ", "\n"))


@pytest.mark.parametrize(
    ("token_ids", "start", "spans"),
    [
        ([A, B], 0, []),
        ([A, OPEN, B, CLOSE, B], 0, [(1, 4)]),
        ([A, OPEN, B, CLOSE, LINE, LINE, SPACE, B], 0, [(1, 7)]),
        ([A, OPEN, B], 0, [(1, 3)]),
        ([OPEN, CLOSE], 0, [(0, 2)]),
        ([A, OPEN, B, CLOSE, A, OPEN, B], 0, [(1, 4), (5, 7)]),
        ([A, OPEN, B, CLOSE, A, OPEN, B], 4, [(5, 7)]),
        ([A, OPEN, LINE, B, CLOSE, A], 3, [(1, 5)]),  # opened by the prompt
        ([A, CLOSE, B, CLOSE], 0, []),
        ([A, OPEN, B, END, A, OPEN, B, CLOSE, A], 5, [(5, 8)]),  # the user wrote the tag
        ([A, OPEN, B, END, A, B, A], 5, []),
        ([A, OPEN, B, A, OPEN, B, CLOSE, A], 4, [(4, 7)]),
        ([A, OPEN, LINE, OPEN, B, CLOSE, A], 3, [(1, 6)]),  # the template opened a block, and so did the reply
        ([A, OPEN, B, END, B, OPEN, LINE, A, CLOSE, B], 7, [(5, 9)]),  # a turn before broke off in its thinking
        ([OPEN, A, OPEN, B, CLOSE, A], 0, [(0, 5)]),
        ([], 0, []),
    ],
)
def test_spans(token_ids: list[int], start: int, spans: list[tuple[int, int]]) -> None:
    assert think_spans(TOKENIZER, np.array(token_ids, np.int32), start, (END,)) == spans


@pytest.fixture(scope="module")
def model() -> Model:
    return random_model(tiny_config())


def closing(**options: object) -> nv.SamplingParams:
    """A reply that is nothing but the end of a think block, again and again."""
    return nv.SamplingParams(temperature=0, ignore_eos=True, logit_bias={CLOSE: 100}, **options)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("retain", ["recompute", "shift", "gap"])
def test_a_reply_is_kept_without_its_thinking(model: Model, retain: Retain) -> None:
    state = nv.init_state(model, num_pages=64, page_size=4)
    prompt = [A, B, A, A, B, OPEN, A, A]
    state, whole = nv.generate(model, state, prompt, closing(max_tokens=5))
    before = state.stats
    state, gen = nv.generate(model, state, prompt, closing(max_tokens=5), retain=retain)
    nv.check(state)
    assert gen.token_ids == whole.token_ids == [CLOSE] * 5
    assert whole.chunk.token_ids.tolist() == prompt + [CLOSE] * 5
    assert gen.chunk.token_ids.tolist() == prompt[:5] + [CLOSE] * 4
    assert gen.chunk.provenance.exact == (retain == "recompute")
    again = 4 if retain == "recompute" else 0
    ran = state.stats.prefill_tokens + state.stats.decode_tokens - before.prefill_tokens - before.decode_tokens
    assert ran <= len(prompt) + 5 + again
    free = state.pool.num_available
    state = nv.release(nv.release(state, gen.chunk), whole.chunk)
    assert free < state.pool.num_available == 64
    nv.check(state)


def test_an_unclosed_block_goes_whole(model: Model) -> None:
    state = nv.init_state(model, num_pages=64, page_size=4)
    never = nv.SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logit_bias={A: 100})
    state, gen = nv.generate(model, state, [B, B, OPEN], never, retain="shift")
    assert gen.token_ids == [A] * 6
    assert gen.chunk.token_ids.tolist() == [B, B]
    assert gen.chunk.provenance.exact
    state, gen = nv.generate(model, state, [OPEN], never, retain="shift")  # a chunk cannot be empty: it stays whole
    assert len(gen.chunk) == 7
    nv.check(state)


@pytest.mark.parametrize("retain", ["recompute", "shift", "gap"])
def test_many_blocks_run_what_is_between_them_once(model: Model, retain: Retain) -> None:
    state = nv.init_state(model, num_pages=64, page_size=4)
    state, chunk = nv.prefill(model, state, [A, B, *[OPEN, A, B, CLOSE, B, A] * 4])
    before = state.stats.prefill_tokens
    with guarded(state) as taken:
        inner, kept = without_thinking(model, state, chunk, 0, retain, taken)
        state = commit_state(inner)
    assert kept.token_ids.tolist() == [A, B, *[B, A] * 4]
    assert state.stats.prefill_tokens - before == (8 if retain == "recompute" else 0)
    nv.check(state)
    state = nv.release(state, kept)
    assert state.pool.num_available == 64


def shortened(model: Model, token_ids: list[int], start: int, retain: Retain) -> list[int]:
    """The tokens of a chunk that are left without the think blocks after token `start`."""
    state = nv.init_state(model, num_pages=64, page_size=4)
    state, chunk = nv.prefill(model, state, token_ids)
    with guarded(state) as taken:
        inner, kept = without_thinking(model, state, chunk, start, retain, taken)
        state = commit_state(inner)
    nv.check(state)
    return kept.token_ids.tolist()


@pytest.mark.parametrize("retain", ["recompute", "shift", "gap"])
def test_of_a_chunk_that_is_all_thinking_the_first_block_stays(model: Model, retain: Retain) -> None:
    block = [OPEN, A, B, CLOSE, LINE]
    assert shortened(model, [*block, OPEN, B, CLOSE, *block], 0, retain) == block


@pytest.mark.parametrize("retain", ["recompute", "shift", "gap"])
def test_a_tag_in_an_earlier_message_opens_no_block(retain: Retain) -> None:
    """The end token of the message that quotes the tag closes it. Otherwise the reply would be dropped with it."""
    model = random_model(tiny_config(eos_token_ids=(END,)))
    token_ids = [A, OPEN, B, END, A, B, A]
    assert shortened(model, token_ids, 5, retain) == token_ids


@pytest.mark.parametrize("retain", ["recompute", "shift", "gap"])
def test_words_of_the_prompt_are_kept(retain: Retain) -> None:
    tiny = load_model(TINY, device="cpu")
    state = nv.init_state(tiny, num_pages=64)
    prompt = render(tiny.tokenizer, [{"role": "user", "content": "The tag <think> is odd. What is 27 + 38?"}])
    state, gen = nv.generate(tiny, state, prompt, nv.SamplingParams(temperature=0, max_tokens=120), retain=retain)
    assert tiny.tokenizer is not None
    kept = tiny.tokenizer.decode(gen.chunk.token_ids.tolist(), skip_special_tokens=False)
    assert "The tag" in kept and "is odd. What is 27 + 38?" in kept and "assistant" in kept


def test_a_full_pool_refuses_before_anything_is_lost(model: Model) -> None:
    state = nv.init_state(model, num_pages=3, page_size=4)
    state, _ = nv.prefill(model, state, [A, B])
    with pytest.raises(nv.OutOfPagesError):
        nv.generate(model, state, [A, OPEN], closing(max_tokens=5), retain="shift")
    nv.check(state)
    state, gen = nv.generate(model, state, [A, OPEN], closing(max_tokens=5))
    assert len(gen.chunk) == 7


def test_a_bad_retain_is_named(model: Model, untyped: None) -> None:
    state = nv.init_state(model, num_pages=8)
    with pytest.raises(nv.InvalidRequestError, match="retain='some'"):
        nv.generate(model, state, [A], retain="some")  # pyright: ignore[reportArgumentType]
    plain = random_model(tiny_config(vocab_size=20))
    with pytest.raises(nv.InvalidRequestError, match="no think tokens"):
        nv.generate(plain, nv.init_state(plain, num_pages=8), [1], retain="gap")


@pytest.mark.parametrize("retain", ["recompute", "shift", "gap"])
def test_a_chat_runs_only_what_is_new(retain: Retain) -> None:
    """Twenty turns with thinking: each turn's prompt runs its own words, and with `recompute` the last answer."""
    model = load_model(TINY, "cpu")
    tokenizer = model.tokenizer
    assert tokenizer is not None
    state = nv.init_state(model, num_pages=256, max_num_seqs=2)
    conversation, params = conversations.Conversation(retain=retain), nv.SamplingParams(temperature=0, max_tokens=60)
    prompt, answer = 0, 0
    for turn in range(20):
        text = f"What is {11 + turn} + {24 - turn}?"
        asked = replace(conversation, messages=(*conversation.messages, {"role": "user", "content": text}))
        state, conversation, figures = conversations.turn(model, state, asked, params, lambda _: None)
        nv.check(state)
        words = len(tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False))
        bound = words + 4 + (answer if retain == "recompute" else 0)  # and the end of the last answer, which was drawn and not run
        assert figures.run <= bound, (turn, figures)
        assert figures.run + figures.reused == figures.prompt
        answer = len(tokenizer.encode(conversation.messages[-1]["content"].split("</think>")[-1].strip(), add_special_tokens=False))
        prompt = figures.prompt
        if prompt > 1500:
            break
    assert turn == 19
    assert "<think>" in conversation.messages[-1]["content"]
    assert conversation.chunk is not None
    assert conversation.chunk.provenance.exact == (retain == "recompute")


@pytest.mark.parametrize("retain", ["all", "recompute"])
def test_the_figures_of_the_turns_are_all_that_ran(retain: Retain) -> None:
    """The answer without its thinking runs in the next turn, if there is one, and not in its own."""
    model = load_model(TINY, "cpu")
    state = nv.init_state(model, num_pages=64, max_num_seqs=2)
    conversation, ran = conversations.Conversation(retain=retain), 0
    for text in ("What is 1 + 1?", "What is 2 + 2?"):
        asked = replace(conversation, messages=(*conversation.messages, {"role": "user", "content": text}))
        state, conversation, figures = conversations.turn(
            model, state, asked, nv.SamplingParams(temperature=0, max_tokens=60), lambda _: None
        )
        ran += figures.run
        assert "</think>" in conversation.messages[-1]["content"]
        assert state.stats.prefill_tokens == ran


def test_kept_thinking_leaves_room_for_a_reply(model: Model) -> None:
    """A prompt that would fill the engine with the thinking before it is continued without the thinking."""
    hidden = np.array([False, True, True, True, False])
    for length, kept, left in ((6, 5, 4), (7, 1, 6)):
        state = nv.init_state(model, num_pages=64, page_size=4, max_model_len=10)
        state, chunk = nv.prefill(model, state, [A, OPEN, B, CLOSE, A])
        tokens = np.array([A, A, B, B, B, B, B][:length], np.int32)
        _, context = conversations._continued(state, chunk, tokens, hidden)
        assert isinstance(context, tuple)
        assert (len(context[0]), len(context[1])) == (kept, left)


def talk(model: Model, texts: list[str], **limits: int) -> list[tuple[conversations.Conversation, conversations.Turn]]:
    """The turns of a chat that keeps its thinking."""
    state = nv.init_state(model, num_pages=256, max_num_seqs=2, **limits)
    conversation, turns = conversations.Conversation(retain="all"), []
    for text in texts:
        asked = replace(conversation, messages=(*conversation.messages, {"role": "user", "content": text}))
        state, conversation, figures = conversations.turn(
            model, state, asked, nv.SamplingParams(temperature=0, max_tokens=60), lambda _: None
        )
        nv.check(state)
        assert figures.run + figures.reused == figures.prompt
        turns.append((conversation, figures))
    return turns


def test_a_chat_keeps_its_thinking() -> None:
    model = load_model(TINY, "cpu")
    tokenizer = model.tokenizer
    assert tokenizer is not None and tokenizer.think_token_ids is not None
    texts = [f"What is {11 + i} + {24 - i}?" for i in range(6)]
    turns = talk(model, texts)
    for i, (text, (conversation, figures)) in enumerate(zip(texts, turns, strict=True)):
        words = tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
        assert figures.run <= len(words) + 4
        assert conversation.chunk is not None and conversation.chunk.provenance.exact
        ids = conversation.chunk.token_ids
        assert np.count_nonzero(ids == tokenizer.think_token_ids[0]) == np.count_nonzero(ids == tokenizer.think_token_ids[1]) == i + 1
    chunk = turns[-1][0].chunk
    assert chunk is not None and len(chunk) > len(render(model.tokenizer, turns[-1][0].messages[:-1])) + 100
    prompt, greedy = chunk.token_ids[: turns[-1][1].prompt], nv.SamplingParams(temperature=0, max_tokens=60)
    _, gen = nv.generate(model, nv.init_state(model, num_pages=256), prompt, greedy)
    assert gen.text == turns[-1][0].messages[-1]["content"]


@pytest.mark.parametrize("limit", [160, 2048])
@pytest.mark.parametrize("text", ["<think>b</think> a", "a <think>", "</think>", "What is 2 + 3?"])
def test_what_a_chat_keeps_is_the_prompt_and_its_thinking(text: str, limit: int) -> None:
    model = load_model(TINY, "cpu")
    tokenizer, real, contexts = model.tokenizer, conversations.submit_many, []

    def seen(model: Model, state: nv.EngineState, given: list, params: list, *, keep: bool) -> tuple[nv.EngineState, list[int]]:
        (context,) = given
        contexts.append(np.concatenate([context[0].token_ids, context[1]]) if isinstance(context, tuple) else context)
        return real(model, state, given, params, keep=keep)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversations, "submit_many", seen)
        turns = talk(model, ["What is 1 + 1?", text, "And 4 + 4?"], max_model_len=limit)
    assert tokenizer is not None
    for (conversation, figures), context in zip(turns, contexts, strict=True):
        prompt = np.array(render(model.tokenizer, conversation.messages[:-1]))
        assert len(context) == figures.prompt <= limit
        kept = np.ones(len(context), bool)
        for begin, end in think_spans(tokenizer, context):
            kept[begin:end] = False
        left = np.ones(len(prompt), bool)
        for begin, end in think_spans(tokenizer, prompt):
            left[begin:end] = False
        assert context[kept].tolist() == prompt[left].tolist()
