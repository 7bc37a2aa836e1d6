"""The cases of `score.py`: prompts with names and wordings that never occur in training, and the rules that judge an answer."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from tools.tiny_model.text import facts
from tools.tiny_model.text.compare import compare, compare_bare
from tools.tiny_model.text.events import draw_told
from tools.tiny_model.text.grammar import Rng
from tools.tiny_model.text.reason import chain
from tools.tiny_model.text.recall import Scene, draw_scene, paragraphs, pose
from tools.tiny_model.text.stories import Story
from tools.tiny_model.text.sums import addition
from tools.tiny_model.text.words import FIRST_NAMES, TEST, name


@dataclass(frozen=True)
class Case:
    """A prompt, the value that a right answer contains, and the largest number of tokens of the answer."""

    prompt: str
    value: str
    max_tokens: int


@dataclass(frozen=True)
class Measure:
    """One line of the table."""

    key: str
    title: str
    goal: float
    count: int
    draw: Callable[[Rng, "Prompter"], Case]


class Prompter:
    """Writes prompts through the model's own tokenizer and chat template."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def chat(self, messages: list[tuple[str, str]], thinking: bool) -> str:
        """The chat format; without thinking the last message carries `/no_think`."""
        turns = [{"role": role, "content": content} for role, content in messages]
        if not thinking:
            turns[-1]["content"] += " /no_think"
        return self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)

    def length(self, text: str) -> int:
        """Its number of tokens."""
        return len(self.tokenizer.encode(text))


def _ask(rng: Rng, prompter: Prompter, context: str, question: str, value: str, thinking: bool = False) -> Case:
    # Half as plain text, half as a chat.
    if rng.chance(0.5) and not thinking:
        return Case(f"{context}\n\nQuestion: {question}\nAnswer:", value, 40)
    return Case(prompter.chat([("user", f"{context}\n\n{question}")], thinking), value, 110 if thinking else 48)


def _scene(rng: Rng, count: int) -> Scene:
    scene = draw_scene(rng, count, TEST)
    while len(scene.told) != count:
        scene = draw_scene(rng, count, TEST)
    return scene


def _recall(rng: Rng, prompter: Prompter, count: int, thinking: bool = False) -> Case:
    scene = _scene(rng, count)
    fact = rng.pick(scene.told)
    context = "\n\n".join(paragraphs(rng, scene, TEST, rng.pick(("prose", "prose", "list"))))
    return _ask(rng, prompter, context, facts.ask(rng, fact, TEST), fact.value, thinking)


def one_fact(rng: Rng, prompter: Prompter) -> Case:
    """One fact, then its question."""
    return _recall(rng, prompter, 1)


def one_fact_thinking(rng: Rng, prompter: Prompter) -> Case:
    """One fact, then its question, with a think block."""
    return _recall(rng, prompter, 1, thinking=True)


def eight_facts(rng: Rng, prompter: Prompter) -> Case:
    """Eight facts, one of them asked for."""
    return _recall(rng, prompter, 8)


def eight_facts_thinking(rng: Rng, prompter: Prompter) -> Case:
    """Eight facts, one of them asked for, with a think block."""
    return _recall(rng, prompter, 8, thinking=True)


def completion(rng: Rng, prompter: Prompter) -> Case:
    """Four facts in prose, then the beginning of the sentence that restates one."""
    scene = _scene(rng, 4)
    fact = rng.pick(scene.told)
    context = "\n\n".join(paragraphs(rng, scene, TEST, "prose"))
    return Case(f"{context}\n\n{facts.restate(rng, fact, TEST)}", fact.value, 24)


def far_fact(rng: Rng, prompter: Prompter) -> Case:
    """Four facts, 1,500 tokens of other text, then the question."""
    scene = _scene(rng, 4)
    fact = rng.pick(scene.told)
    context = "\n\n".join(paragraphs(rng, scene, TEST, rng.pick(("prose", "list"))))
    fill: list[str] = []
    while prompter.length("\n\n".join(fill)) < 1500:
        other = "\n\n".join(paragraphs(rng, draw_scene(rng, rng.randint(2, 6), TEST), TEST))
        fill.append(Story(rng, TEST).text(rng) if rng.chance(0.6) else other)
    middle = prompter.tokenizer.decode(prompter.tokenizer.encode("\n\n".join(fill))[:1500])
    return _ask(rng, prompter, f"{context}\n\n{middle}", facts.ask(rng, fact, TEST), fact.value)


def second_turn(rng: Rng, prompter: Prompter) -> Case:
    """Four facts and a first question with its answer; then, in a second turn, a question about another of the facts."""
    scene = _scene(rng, 4)
    first, second = rng.some(scene.told, 2)
    context = "\n\n".join(paragraphs(rng, scene, TEST, rng.pick(("prose", "list"))))
    opened = pose(rng, first, TEST)
    asked = facts.ask_further(rng, second, first, TEST) if rng.chance(0.3) else facts.ask(rng, second, TEST)
    history = [("user", f"{context}\n\n{opened.question}"), ("assistant", opened.answer), ("user", asked)]
    return Case(prompter.chat(history, thinking=False), second.value, 48)


def unknown(rng: Rng, prompter: Prompter) -> Case:
    """One to eight facts, and a question that they do not answer."""
    scene = _scene(rng, rng.randint(1, 8))
    fact = rng.pick(scene.untold)
    context = "\n\n".join(paragraphs(rng, scene, TEST, rng.pick(("prose", "prose", "list"))))
    return _ask(rng, prompter, context, facts.ask(rng, fact, TEST), facts.UNKNOWN)


def who_did_what(rng: Rng, prompter: Prompter) -> Case:
    """Four sentences of deeds, havings and happenings; a question after who, what, when or where."""
    told = draw_told(rng, 4, TEST)[0]
    while not told.value:
        told = draw_told(rng, 4, TEST)[0]
    return _ask(rng, prompter, told.text, told.question, told.value)


def sum_thinking(rng: Rng, prompter: Prompter) -> Case:
    """Two numbers of two digits, with a think block; the pairs were kept out of training."""
    task = addition(rng, TEST)
    return Case(prompter.chat([("user", task.question)], thinking=True), task.answer, 110)


def sum_direct(rng: Rng, prompter: Prompter) -> Case:
    """The same without thinking, for comparison."""
    task = addition(rng, TEST)
    return Case(prompter.chat([("user", task.question)], thinking=False), task.answer, 40)


def long_sum_thinking(rng: Rng, prompter: Prompter) -> Case:
    """Two numbers of three digits, with a think block."""
    task = addition(rng, TEST, digits=3)
    return Case(prompter.chat([("user", task.question)], thinking=True), task.answer, 140)


def long_sum_direct(rng: Rng, prompter: Prompter) -> Case:
    """The same without thinking."""
    task = addition(rng, TEST, digits=3)
    return Case(prompter.chat([("user", task.question)], thinking=False), task.answer, 40)


def _chained(rng: Rng, prompter: Prompter, thinking: bool) -> Case:
    found = chain(rng, TEST)
    context = "\n\n".join(found.blocks)
    return Case(prompter.chat([("user", f"{context}\n\n{found.question}")], thinking), found.value, 110 if thinking else 40)


def chain_thinking(rng: Rng, prompter: Prompter) -> Case:
    """A look-up through another look-up, with a think block."""
    return _chained(rng, prompter, True)


def chain_direct(rng: Rng, prompter: Prompter) -> Case:
    """The same without thinking."""
    return _chained(rng, prompter, False)


def _compared(rng: Rng, prompter: Prompter, thinking: bool) -> Case:
    # A quarter bare numbers, the rest facts about two to four names; only the whole answer is right, so none that names both.
    if rng.chance(0.25):
        question, _, answer, _ = compare_bare(rng, TEST)
    else:
        found = compare(rng, TEST)[0]
        question, answer = "\n\n".join([*found.blocks, found.question]), found.answer
    return Case(prompter.chat([("user", question)], thinking), answer, 140 if thinking else 40)


def comparison_thinking(rng: Rng, prompter: Prompter) -> Case:
    """Which of two is more or less, with a think block; the pairs of numbers were kept out of training."""
    return _compared(rng, prompter, True)


def comparison_direct(rng: Rng, prompter: Prompter) -> Case:
    """The same without thinking."""
    return _compared(rng, prompter, False)


MEASURES = (
    Measure("one_fact", "one fact", 0.98, 400, one_fact),
    Measure("eight_facts", "one among eight facts", 0.92, 400, eight_facts),
    Measure("far_fact", "one among four facts, 1,500 tokens back", 0.90, 200, far_fact),
    Measure("second_turn", "on a second turn", 0.92, 400, second_turn),
    Measure("unknown", "the context does not tell", 0.85, 400, unknown),
    Measure("sum_thinking", "two-digit sums, thinking", 0.97, 400, sum_thinking),
    Measure("sum_direct", "two-digit sums, `/no_think`", 0.0, 400, sum_direct),
    Measure("long_sum_thinking", "three-digit sums, thinking", 0.0, 200, long_sum_thinking),
    Measure("long_sum_direct", "three-digit sums, `/no_think`", 0.0, 200, long_sum_direct),
    Measure("comparison_thinking", "comparison of two numbers, thinking", 0.95, 200, comparison_thinking),
    Measure("comparison_direct", "comparison of two numbers, `/no_think`", 0.0, 200, comparison_direct),
    Measure("chain_thinking", "look-up through a look-up, thinking", 0.0, 200, chain_thinking),
    Measure("chain_direct", "look-up through a look-up, `/no_think`", 0.0, 200, chain_direct),
    Measure("who_did_what", "who, what, when, where among four sentences", 0.0, 200, who_did_what),
    Measure("one_fact_thinking", "one fact, thinking", 0.0, 200, one_fact_thinking),
    Measure("eight_facts_thinking", "one among eight facts, thinking", 0.0, 200, eight_facts_thinking),
    Measure("completion", "one among four facts, sentence to complete", 0.0, 200, completion),
)

_STORY_STARTS = (
    "Once upon a time, in {p},", "Once upon a time, there was a {t} {r} called {h}.", "Long ago, in {p},",
    "{h} was a {t} {r} who lived in {p}.", "Once upon a time, a {r} named {h} lived", "In {p} there lived a {t} {r}.",
    "One winter evening, {h} the {r} was", "There once was a {t} {r} in {p}", "This is the story of {h}, a {t} {r}", "{h} had never",
)  # fmt: skip
_STORY_PLACES = (
    "a small village by the sea", "the mountains", "an old town", "a deep forest", "a kingdom far away", "a little harbour",
    "a quiet valley",
)  # fmt: skip


def story_prompts(count: int, seed: int) -> list[str]:
    """Return different beginnings of stories, with names that never occur in training."""
    rng, prompts = Rng(seed), [_STORY_STARTS[0].format(p=_STORY_PLACES[0])]
    while len(prompts) < count:
        hero = rng.pick(FIRST_NAMES[TEST])[0] if rng.chance(0.7) else name(rng, "person", TEST)
        trait, role = rng.pick(("brave", "shy", "poor", "clever", "kind")), rng.pick(("baker", "fisher", "girl", "boy", "weaver", "fox"))
        prompt = _STORY_STARTS[len(prompts) % len(_STORY_STARTS)].format(h=hero, t=trait, r=role, p=rng.pick(_STORY_PLACES))
        if prompt not in prompts:
            prompts.append(prompt)
    return prompts


def final_answer(text: str, prompt: str) -> str:
    """Return the answer after the think block, up to the end of its line."""
    text = text.rsplit("</think>", maxsplit=1)[-1].lstrip("\n") if "</think>" in text else text
    text = text.split("<|im_end|>")[0].split("<|endoftext|>")[0]
    return text.strip("\n").split("\n")[0].strip() if prompt else text


def judge(case: Case, text: str) -> bool:
    """Whether the final answer names exactly the value."""
    if "<think>" in text and "</think>" not in text:
        return False
    return re.search(rf"(?<![\w-]){re.escape(case.value)}(?![\w-])", final_answer(text, case.prompt)) is not None or (
        case.value.endswith(".") and case.value in final_answer(text, case.prompt)
    )


def doubled(text: str) -> list[str]:
    """The words that come twice in a row within a sentence: "When When"; not "knock, knock", nor "had had" and "that that"."""
    found = re.findall(r"(?<![\w-])(\w+)\s+\1(?![\w-])", text)
    return [word for word in found if word not in ("had", "that")]


def loops(text: str) -> bool:
    """Whether a word comes twice in a row, or a run of eight words, or a sentence, more than once."""
    words = text.split()
    runs = Counter(tuple(words[i : i + 8]) for i in range(len(words) - 7))
    sentences = Counter(s.strip() for s in re.split(r"[.!?]\s", text) if len(s.split()) > 4)
    return bool(doubled(text)) or any(n > 1 for n in runs.values()) or any(n > 1 for n in sentences.values())
