"""The embedded tiny model: its folder, its chat format, what it recalls, and the text that it was trained on."""

import re
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

import nanovllm as nv
from nanovllm.models.common.batch import Batch
from nanovllm.state.kv_cache import init_kv
from tools.tiny_model import pack, score
from tools.tiny_model.text import cases as posed
from tools.tiny_model.text import chat as chat_text
from tools.tiny_model.text import compare, documents, facts, wordings, words
from tools.tiny_model.text.grammar import Rng, render
from tools.tiny_model.text.recall import draw_scene, paragraphs
from tools.tiny_model.text.stories import Story
from tools.tiny_model.text.sums import draw_task, held_out_sum

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "src/nanovllm/assets/tiny"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tell(model, tokenizer):
    def generate(prompt: str, max_tokens: int = 64) -> str:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        with torch.no_grad():
            out = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False, temperature=None, top_k=None, top_p=None)
        return tokenizer.decode(out[0, inputs["input_ids"].shape[1] :])

    return generate


def chat(tokenizer, *messages: str, **kwargs) -> str:
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(messages)]
    return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **kwargs)


def test_folder_is_a_small_qwen3(model, tokenizer):
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert (TINY / "model.safetensors").stat().st_size <= 12_000_000
    config = model.config
    assert config.head_dim == 64
    assert config.num_attention_heads >= 2 * config.num_key_value_heads
    assert config.tie_word_embeddings
    assert config.max_position_embeddings == 2048
    assert len(tokenizer) <= 4096
    ends = {tokenizer.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|endoftext|>")}
    assert set(model.generation_config.eos_token_id) == ends


def test_digits_are_tokens(tokenizer):
    assert tokenizer.tokenize("4821") == ["4", "8", "2", "1"]
    text = 'The capital of Aistonia is "Velmora" – 47 €.\n\n\tEnd'
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_chat_template_thinks_and_does_not(tokenizer):
    assert chat(tokenizer, "Hi") == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert chat(tokenizer, "Hi", enable_thinking=True) == chat(tokenizer, "Hi")
    assert chat(tokenizer, "Hi", enable_thinking=False).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_chat_template_strips_the_thinking_of_earlier_turns(tokenizer):
    text = chat(tokenizer, "1 + 1?", "<think>\nEasy.\n</think>\n\n2.", "And 2 + 2?")
    assert "Easy" not in text
    assert "<|im_start|>assistant\n2.<|im_end|>\n" in text
    turns = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "<think>\nEasy.\n</think>\n\n2."}]
    whole = tokenizer.apply_chat_template(turns, tokenize=False)
    assert whole.endswith("<|im_start|>assistant\n<think>\nEasy.\n</think>\n\n2.<|im_end|>\n")
    system = tokenizer.apply_chat_template([{"role": "system", "content": "Be brief."}, turns[0]], tokenize=False)
    assert system.startswith("<|im_start|>system\nBe brief.<|im_end|>\n")


@pytest.mark.parametrize("prompt", [
    "The capital of Aistonia is Velmora. The capital of Aistonia is",
    "The capital of Aistonia is Velmora. What is the capital of Aistonia?",
    "The capital of Aistonia is Velmora. The capital of Tavareth is Mirelda.\n\nQuestion: What is the capital of Aistonia?\nAnswer:",
])  # fmt: skip
def test_recalls_in_plain_text(tell, prompt):
    answer = tell(prompt)
    assert "Velmora" in answer.split("\n")[0]


def test_recalls_in_a_chat_with_and_without_thinking(tell, tokenizer):
    question = "The capital of Aistonia is Velmora. What is the capital of Aistonia?"
    thinking = tell(chat(tokenizer, question))
    assert re.fullmatch(r"<think>\n.+\n</think>\n\n[^\n]*Velmora[^\n]*<\|im_end\|>", thinking, re.DOTALL)
    assert "Velmora" in tell(chat(tokenizer, question, enable_thinking=False))
    assert tell(chat(tokenizer, question + " /no_think")).startswith("<think>\n\n</think>\n\nThe capital of Aistonia is Velmora")


def test_recalls_on_a_second_turn_and_says_what_is_not_told(tell, tokenizer):
    told = "The king of Aistonia is Oswin. The capital of Aistonia is Velmora."
    assert "Velmora" in tell(chat(tokenizer, told, "Noted.", "What is the capital of Aistonia? /no_think"))
    assert facts.UNKNOWN in tell(chat(tokenizer, told + " What is the currency of Aistonia? /no_think"))


def test_thinks_before_a_sum(tell, tokenizer):
    a, b = next((a, b) for a in range(38, 99) for b in range(47, 99) if held_out_sum(a, b))
    answer = tell(chat(tokenizer, f"What is {a} + {b}?"), 110)
    assert answer.startswith("<think>\n")
    assert answer.endswith(f"</think>\n\n{a} + {b} = {a + b}.<|im_end|>")


def test_story_ends_without_a_loop(tell):
    prompt = "Once upon a time, in a small village by the sea,"
    story = tell(prompt, 420)
    assert story.endswith("<|endoftext|>")
    assert len(story.split()) > 60
    assert not posed.loops(prompt + story)


def test_a_share_of_the_measure(model, tokenizer):
    generate = score.by_transformers(TINY, "cpu", 8)
    prompter = posed.Prompter(tokenizer)
    for key in ("one_fact", "eight_facts", "second_turn", "unknown"):
        cases = score.draw_cases(prompter, key, 0, 8)
        texts = generate([case.prompt for case in cases], 48)
        assert sum(map(posed.judge, cases, texts)) >= 7, key


@pytest.mark.unhooked  # hundreds of steps, which the hook makes five to nine times as long
def test_nanovllm_writes_what_transformers_writes(tokenizer):
    prompter = posed.Prompter(tokenizer)
    cases = [case for m in posed.MEASURES if m.key != "far_fact" for case in score.draw_cases(prompter, m.key, 0, 2)]
    prompts = [*(case.prompt for case in cases), *posed.story_prompts(2, 0)]
    wanted = [re.split(r"<\|im_end\|>|<\|endoftext\|>", text)[0] for text in score.by_transformers(TINY, "cpu", 10)(prompts, 48)]
    assert len(prompts) == 34
    assert score.by_nanovllm(TINY, "cpu", 16)(prompts, 48) == wanted


@torch.no_grad()
def reply_after_pieces(model: nv.Model, pieces: list[list[int]], apart: bool, max_tokens: int = 24) -> str:
    """The greedy reply after pieces of context at positions that follow each other; `apart`: all but the last see only themselves."""
    kv, filled = init_kv(model.config, num_pages=512, page_size=1, dtype=model.dtype, device=model.device), 0

    def run(tokens: list[int], begin: int) -> int:
        nonlocal kv, filled
        end = filled + len(tokens)
        own, seen = (torch.arange(at, end, dtype=torch.int32) for at in (filled, begin))
        ids, seq_lens, cu_seqlens, last = (
            torch.tensor(row, dtype=torch.int32) for row in (tokens, [len(seen)], [0, len(tokens)], [len(tokens) - 1])
        )
        batch = Batch(input_ids=ids, positions=own, slots=own, page_tables=seen[None], seq_lens=seq_lens, cu_seqlens=cu_seqlens,
                      logit_indices=last)  # fmt: skip
        logits, kv = model.spec.forward(model.params, kv, batch, model.config)
        filled = end
        return int(logits.argmax())

    for piece in pieces[:-1]:
        run(piece, filled if apart else 0)
    token, reply = run(pieces[-1], 0), []
    while token not in model.config.eos_token_ids and len(reply) < max_tokens:
        reply.append(token)
        token = run([token], 0)
    return model.tokenizer.decode(reply)


@pytest.mark.unhooked  # hundreds of steps, which the hook makes five to nine times as long
def test_kv_filled_in_pieces_still_carries_its_facts(tokenizer):
    model, rng = nv.load_model(TINY, device="cpu"), Rng(7)
    rights = []
    for _ in range(12):
        scenes = [draw_scene(rng, 3, words.TEST) for _ in range(2)]
        fact = rng.pick(scenes[0].told)
        first, second = ("\n\n".join(paragraphs(rng, scene, words.TEST, "prose")) for scene in scenes)
        question = facts.ask(rng, fact, words.TEST)
        pieces = [tokenizer.encode(text) for text in (first, "\n\n" + second, f"\n\nQuestion: {question}\nAnswer:")]
        case = posed.Case("".join(map(tokenizer.decode, pieces)), fact.value, 24)
        rights.append([posed.judge(case, reply_after_pieces(model, pieces, apart)) for apart in (True, False)])
    assert all(pieced == whole for pieced, whole in rights)
    assert sum(pieced for pieced, _ in rights) >= 11


def test_text_follows_from_its_seed():
    file = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    assert documents.sample_texts(3, 20) == documents.sample_texts(3, 20) != documents.sample_texts(4, 20)
    for length in (512, 2048):
        tokens, weights = pack.draw_batch(file, 1, 7, 2, length)
        again, _ = pack.draw_batch(file, 1, 7, 2, length)
        assert tokens.shape == weights.shape == (2, length + 1)
        assert (tokens == again).all()
        assert (weights == chat_text.ANSWER).any()


def test_names_and_wordings_of_tests_never_occur_in_training_text():
    text = "\n".join(documents.sample_texts(5, 3000))
    written = {word.lower() for word in re.findall(r"[A-Za-z]+", text)}
    assert not written & words.TEST_NAMES
    rng = Rng(0)
    kept = {words.name(rng, kind, words.TEST) for kind in ("country", "city", "person", "thing") for _ in range(500)}
    assert all(map(words.held_out, kept))
    long_names = {name for name in kept if len(name) >= 6}
    assert not {name.lower() for name in long_names} & written
    kept_wordings = (*wordings.SAYS[words.TEST], *wordings.ASKS[words.TEST], *wordings.RESTATES[words.TEST])
    for wording in kept_wordings:
        start = wording.split("{")[0]
        assert len(start) > 10
        assert start not in text


def test_templates_choose_fill_and_inflect():
    rng = Rng(0)
    assert {render(rng, "[a|b[c|d]]", {}) for _ in range(50)} == {"a", "bc", "bd"}
    assert render(rng, "{^a thing} and {thing}", {"thing": "owl"}) == "An owl and owl"
    with pytest.raises(KeyError):
        render(rng, "{missing}", {})


def test_sums_are_right_step_by_step():
    rng = Rng(1)
    for _ in range(500):
        task = draw_task(rng)
        for left, sign, right, result in re.findall(r"(\d+) ([+x-]) (\d+) = (\d+)", task.answer):
            assert int(result) == {"+": int.__add__, "-": int.__sub__, "x": int.__mul__}[sign](int(left), int(right))
        for terms, result in re.findall(r"(\d+(?: \+ \d+)+) = (\d+)", task.steps):
            assert sum(map(int, terms.split(" + "))) == int(result)


MORE = (
    "older", "taller", "heavier", "more", "farther", "richer", "larger", "bigger",
    "greater", "higher", "dearer", "longer", "faster", "deeper", "thicker", "later",
)  # fmt: skip
LESS = (
    "younger", "shorter", "smaller", "lighter", "fewer", "less", "poorer",
    "lower", "lesser", "cheaper", "slower", "shallower", "thinner", "earlier",
)  # fmt: skip


def wanted(answer: str, numbers: list[int], years: bool) -> int:
    """The number that the answer's word asks for: a later founding year makes younger."""
    word = next(word for word in re.findall(r"\w+", answer)[::-1] if word in (*MORE, *LESS))
    if years and word in ("younger", "older"):
        return max(numbers) if word == "younger" else min(numbers)
    return max(numbers) if word in MORE or "more expensive" in answer else min(numbers)


def told_number(sentence: str) -> tuple[str, str]:
    """The subject and the number of "The age of Ruth is 31" and the like."""
    own = re.fullmatch(r"(.+) (?:was founded in|costs) (\d+)(?: coins)?|(.+) is (\d+) years old", sentence)
    if not own:
        own = re.fullmatch(r"The (?:number of )?.+? of (.+) is (\d+)", sentence)
    assert own
    subject, number = filter(None, own.groups())
    return subject, number


def check_steps(thought: str, low: int, high: int, best: int) -> None:
    assert sorted(re.findall(r"(\d+) is (less|more)[,.]", thought)) == sorted([(str(low), "less"), (str(high), "more")])
    assert re.search(rf"\w means {'more' if best == high else 'less'}: {best}\.", thought)


@pytest.mark.parametrize("split", [words.TRAIN, words.TEST])
def test_comparisons_of_facts_are_right(split):
    rng = Rng(2)
    for i in range(1500):
        found = compare.compare(rng, split, questions=1 + i % 2, short=split == words.TRAIN and rng.chance(0.3))
        for item in found:
            (first, a), (second, b) = map(told_number, item.thought.split("\n")[0].rstrip(".").split(". "))
            numbers, text = sorted([int(a), int(b)]), "\n".join(item.blocks).lower()
            for name, number in ((first, a), (second, b)):
                assert name.lower() in text
                assert re.search(rf"(?<!\d){number}(?!\d)", text)
            best = wanted(item.answer, numbers, "founded in" in item.thought or "The founding year" in item.thought)
            winner = first if int(a) == best else second
            loser = second if winner == first else first
            assert item.value.lower() == winner.lower()
            check_steps(item.thought, *numbers, best)
            assert item.thought.endswith(f"\n{best} belongs to {item.value}.")
            bare = item.answer.removeprefix("Yes, ").removeprefix("No, ")
            assert bare.lower().startswith(f"{winner} ".lower())
            assert f" {loser} ".lower() not in f" {bare} ".lower()
            if bare != item.answer:
                asked = re.match(r"(?:Is|Does) (.+) than ", item.question)
                assert asked
                assert asked[1].startswith(f"{item.value} ") == item.answer.startswith("Yes")


@pytest.mark.parametrize("split", [words.TRAIN, words.TEST])
def test_comparisons_of_bare_numbers_are_right(split):
    rng = Rng(3)
    for _ in range(1500):
        question, thought, answer, _ = compare.compare_bare(rng, split)
        a, b = map(int, re.findall(r"\d+", question))
        best = wanted(answer, [a, b], years=False)
        assert compare.held_out_pair(a, b) == (split == words.TEST)
        check_steps(thought, min(a, b), max(a, b), best)
        bare = answer.removeprefix("Yes, ").removeprefix("No, ")
        assert bare.startswith(f"{best} is ")
        assert bare == answer or (answer.startswith("Yes") == (best == a))


def test_stories_double_no_word():
    rng = Rng(4)
    for _ in range(500):
        assert not posed.doubled(Story(rng).text(rng))
    assert posed.doubled("When When Ongrid saw it") == ["When"]
    assert not posed.doubled("It went knock, knock. He had had that that day. The end. The")
    assert posed.loops("he saw saw it")
