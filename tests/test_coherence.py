"""What a person would notice: the embedded model's text makes sense, however its KV came about.

A fact that is told in the context and then recalled shows that the KV which holds it is intact.
"""

import re
from collections import Counter

import pytest

import nanovllm as nv
from nanovllm.entrypoints.cli import chat
from nanovllm.entrypoints.llm import LLM

pytestmark = pytest.mark.unhooked  # whole engines run many steps, which the hook makes three to six times as long
STORY = "Once upon a time, in a small village by the sea,"
FACT = "The capital of Aistonia is Velmora."
QUESTION = "What is the capital of Aistonia?"
TOLD = "The king of Aistonia is Oswin. The capital of Aistonia is Velmora. The river of Aistonia is the Tarn."


def greedy(max_tokens: int, **options) -> nv.SamplingParams:
    return nv.SamplingParams(temperature=0, max_tokens=max_tokens, **options)


@pytest.fixture(scope="module")
def model() -> nv.Model:
    return nv.load_model("tiny", device="cpu")


@pytest.fixture(scope="module")
def llm(model) -> LLM:
    return LLM(model, num_pages=512)


def say(llm: LLM, *messages: str, max_tokens: int = 128, **options) -> str:
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(messages)]
    out = llm.chat(turns, greedy(max_tokens), **options)
    assert out.finish_reason == "stop"
    return out.text


def answer_of(reply: str) -> str:
    thought, _, answer = reply.rpartition("</think>")
    assert thought.startswith("<think>")
    return answer.strip()


def test_a_story_goes_on_without_loops(llm):
    for params in (greedy(120), nv.SamplingParams(temperature=0.8, seed=1, max_tokens=100)):
        words = re.findall(r"\w+", llm.generate(STORY, params)[0].text.lower())
        assert len(words) > 50
        assert len(set(words)) > len(words) // 3
        eights = Counter(zip(*(words[i:] for i in range(8)), strict=False))
        assert max(eights.values()) == 1, eights.most_common(1)


def test_a_fact_is_recalled_in_plain_text(llm):
    (out,) = llm.generate(f"{FACT} The capital of Aistonia is", greedy(8))
    assert out.text.startswith(" Velmora")


@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_a_fact_is_recalled_in_a_chat(model, page_size):
    small = LLM(model, num_pages=640 // page_size, page_size=page_size, max_num_batched_tokens=7)
    assert "Velmora" in answer_of(say(small, f"{FACT} {QUESTION}"))


def test_a_fact_is_recalled_in_the_second_turn(llm):
    assert "Velmora" in answer_of(say(llm, TOLD, "Noted.", QUESTION))
    assert "Oswin" in answer_of(say(llm, TOLD, "Noted.", "Who is the king of Aistonia?"))


def test_the_second_turn_goes_on_from_the_first_ones_kv(model):
    state, conversation, replies = nv.init_state(model, num_pages=256), chat.Conversation(), []
    for text in (TOLD, QUESTION):
        asked = chat.replace(conversation, messages=(*conversation.messages, {"role": "user", "content": text}))
        state, conversation, figures = chat.turn(model, state, asked, greedy(128), replies.append)
    assert "Velmora" in conversation.messages[-1]["content"]
    assert conversation.messages[-1]["content"] == say(LLM(model, num_pages=256), *(m["content"] for m in conversation.messages[:-1]))
    assert figures.reused > len(model.tokenizer.encode(TOLD))
    assert figures.run < figures.reused


def test_a_sum_is_thought_through(llm):
    reply = say(llm, "What is 27 + 38?", max_tokens=160)
    assert len(reply.split("</think>")[0].split()) > 4
    assert "65" in answer_of(reply)


def test_no_think_gives_no_thoughts(llm):
    for reply in (say(llm, f"{FACT} {QUESTION} /no_think"), say(llm, f"{FACT} {QUESTION}", enable_thinking=False)):
        assert re.sub(r"<think>\s*</think>", "", reply).strip().startswith("The capital of Aistonia is Velmora")


def test_batched_equals_alone(model):
    prompts = [STORY, f"{FACT} {QUESTION}", "Once upon a time, there was a fox", "The king of Aistonia is Oswin.", "Hello"]
    params = [greedy(24), greedy(12), nv.SamplingParams(temperature=1.0, seed=5, max_tokens=24), greedy(16), greedy(4)]
    alone = [LLM(model, num_pages=64).generate(p, s)[0].token_ids for p, s in zip(prompts, params, strict=True)]
    for limits in ({"num_pages": 64}, {"num_pages": 4, "max_num_batched_tokens": 8}, {"num_pages": 64, "max_num_seqs": 2}):
        outs = LLM(model, **limits).generate(prompts, params)
        assert [out.token_ids for out in outs] == alone


def test_streamed_equals_generated(llm):
    messages = [{"role": "user", "content": f"{FACT} {QUESTION}"}]
    for prompt, params in ((STORY, greedy(60, stop=[".", "zzz"])), (llm.chat_tokens(messages), greedy(128))):
        pieces = list(llm.stream(prompt, params))
        (out,) = llm.generate([prompt], params)
        assert "".join(piece.text for piece in pieces) == out.text
        assert pieces[-1].finish_reason == out.finish_reason == "stop"


def test_reuse_of_the_prefix_changes_nothing(model):
    context, questions = f"{TOLD} {FACT} " * 3, [QUESTION, "Who is the king of Aistonia?"]
    llm, fresh = LLM(model, num_pages=256), [LLM(model, num_pages=256).generate(context + q, greedy(24))[0] for q in questions]
    again = [llm.generate(context + q, greedy(24))[0] for q in (*questions, *questions)]
    assert [out.token_ids for out in again] == [out.token_ids for out in fresh] * 2
    assert [out.num_cached_tokens > len(out.prompt_token_ids) // 2 for out in again] == [False, True, True, True]
    state, told = nv.prefill(model, nv.init_state(model, num_pages=256), context[:-1])
    for question in questions:
        state, gen = nv.generate(model, state, [told, " " + question], greedy(24))
        (whole,) = LLM(model, num_pages=256).generate([*told.token_ids.tolist(), *model.tokenizer.encode(" " + question)], greedy(24))
        assert gen.token_ids == whole.token_ids
