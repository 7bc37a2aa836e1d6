"""Small sums, comparisons and counting, each with the steps that lead to the right answer."""

# ruff: noqa: E501 - wordings and word lists read better as they are

from dataclasses import dataclass
from zlib import crc32

from tools.tiny_model.text.compare import compare, compare_bare
from tools.tiny_model.text.grammar import Rng, capital, render
from tools.tiny_model.text.words import ANIMALS, DAYS, FIRST_NAMES, FOODS, MONTHS, NUMBER_WORDS, OBJECTS, TEST, TRAIN


@dataclass(frozen=True)
class Task:
    """A question, the steps to its answer, the full answer, and the bare result."""

    question: str
    steps: str
    answer: str
    result: str


def held_out_sum(a: int, b: int) -> bool:
    """Whether the pair is kept for tests."""
    return crc32(f"{min(a, b)}+{max(a, b)}".encode()) % 10 == 0


def add_steps(a: int, b: int) -> str:
    """Column by column, from the right."""
    lines, carry, places = [], 0, max(len(str(a)), len(str(b)))
    for place in range(places):
        x, y = a // 10**place % 10, b // 10**place % 10
        total = x + y + carry
        line = f"{x} + {y}" + (" + 1" if carry else "") + f" = {total}"
        carry = total // 10
        lines.append(line + (f", write {total % 10}, carry 1." if carry else f", write {total}."))
    if carry:
        lines.append("Write 1.")
    return "\n".join([*lines, f"So {a} + {b} = {a + b}."])


def subtract_steps(a: int, b: int) -> str:
    """Column by column, from the right; `a` is at least `b`."""
    lines, borrow = [], 0
    for place in range(len(str(a))):
        x, y = a // 10**place % 10, b // 10**place % 10
        need = y + borrow
        text = f"{y}" + (" + 1" if borrow else "")
        if x < need:
            lines.append(f"{x} - {text}: borrow, 1{x} - {need} = {10 + x - need}, write {10 + x - need}.")
            borrow = 1
        else:
            lines.append(f"{x} - {text}: write {x - need}.")
            borrow = 0
    return "\n".join([*lines, f"So {a} - {b} = {a - b}."])


_ADD_ASKS = {
    TRAIN: ("What is {a} + {b}?", "What is {a} + {b}?", "{a} + {b} = ?", "{a} + {b}", "What is {a} plus {b}?", "Add {a} and {b}.", "How much is {a} + {b}?",
            "Calculate {a} + {b}.", "What is the sum of {a} and {b}?", "Can you add {a} and {b}?", "{a} plus {b} is what?", "{a} and {b} together?",
            "what is {a}+{b}?", "{a}+{b}", "{a}+{b}=", "{a}+{b}=?", "What's {a}+{b}?", "what is {a} + {b}", "[Compute|Solve|Find|Count] {a} + {b}.", "What do you get for {a}+{b}?"),
    TEST: ("Work out {a} + {b}.", "Please add {a} and {b}.", "How much is {a} plus {b}?", "Tell me {a} + {b}."),
}  # fmt: skip
_SUB_ASKS = ("What is {a} - {b}?", "{a} - {b} = ?", "{a} - {b}", "What is {a} minus {b}?", "Subtract {b} from {a}.", "How much is {a} - {b}?",
             "Take {b} away from {a}.", "{a}-{b}", "what is {a}-{b}?", "{a}-{b}=?", "Calculate {a} - {b}.", "Work out {a} - {b}.", "Tell me {a} - {b}.")  # fmt: skip
_STORY_ADD = ("{n} has {a} {t} and gets {b} more. How many {t} does {n} have now?", "There are {a} {t} in one box and {b} in another. How many {t} are there?",
              "{n} finds {a} {t} in the morning and {b} in the evening. How many {t} are that?", "{n} buys {a} {t} and {m} buys {b} {t}. How many {t} do they have together?")
_STORY_SUB = ("{n} has {a} {t} and gives {b} to {m}. How many {t} are left?", "There were {a} {t}. {b} of them are gone. How many {t} are left?",
              "{n} had {a} {t} and lost {b}. How many {t} does {n} still have?")
_THINGS = ("apples", "coins", "books", "stones", "eggs", "pears", "keys", "cards", "stamps", "shells", "nuts", "candles", "letters", "marbles", "flowers")


def _numbers(rng: Rng, split: str, digits: int = 2) -> tuple[int, int]:
    while True:
        top = 10**digits - 1 if split == TEST or rng.chance(0.65) else rng.pick((9, 20, 999, 999, 999))
        low = 10 ** (digits - 1) if split == TEST else 1
        a, b = rng.randint(low, top), rng.randint(low, top)
        if held_out_sum(a, b) == (split == TEST):
            return a, b


def addition(rng: Rng, split: str = TRAIN, digits: int = 2) -> Task:
    """A sum, bare or in a little story; `digits` says how long the numbers of a test are."""
    a, b = _numbers(rng, split, digits)
    if split == TRAIN and rng.chance(0.25):
        n, m, t = rng.pick(FIRST_NAMES[split])[0], rng.pick(FIRST_NAMES[split])[0], rng.pick(_THINGS)
        question = render(rng, rng.pick(_STORY_ADD), {"n": n, "m": m, "t": t, "a": str(a), "b": str(b)})
        return Task(question, add_steps(a, b), f"{a} + {b} = {a + b}.", str(a + b))
    return Task(render(rng, rng.pick(_ADD_ASKS[split]), {"a": str(a), "b": str(b)}), add_steps(a, b), f"{a} + {b} = {a + b}.", str(a + b))


def subtraction(rng: Rng) -> Task:
    """A difference that is not negative."""
    a, b = sorted(_numbers(rng, TRAIN), reverse=True)
    if rng.chance(0.25):
        n, m, t = rng.pick(FIRST_NAMES[TRAIN])[0], rng.pick(FIRST_NAMES[TRAIN])[0], rng.pick(_THINGS)
        question = render(rng, rng.pick(_STORY_SUB), {"n": n, "m": m, "t": t, "a": str(a), "b": str(b)})
    else:
        question = render(rng, rng.pick(_SUB_ASKS), {"a": str(a), "b": str(b)})
    return Task(question, subtract_steps(a, b), f"{a} - {b} = {a - b}.", str(a - b))


def product(rng: Rng) -> Task:
    """A digit times a number of one or two digits."""
    a, b = rng.randint(2, 9), rng.randint(2, 9) if rng.chance(0.6) else rng.randint(11, 99)
    question = render(rng, rng.pick(("What is {a} x {b}?", "What is {a} times {b}?", "{a} * {b} = ?", "Multiply {a} by {b}.", "How much is {a} x {b}?")),
                      {"a": str(a), "b": str(b)})  # fmt: skip
    tens, ones = b // 10 * 10, b % 10
    steps = f"So {a} x {b} = {a * b}."
    if tens:
        steps = f"{a} x {tens} = {a * tens}.\n{a} x {ones} = {a * ones}.\n{a * tens} + {a * ones} = {a * b}.\n" + steps
    return Task(question, steps, f"{a} x {b} = {a * b}.", str(a * b))


def comparison(rng: Rng) -> Task:
    """Which of two numbers, or of two people with their ages and the like, is more or less."""
    if rng.chance(0.5):
        return Task(*compare_bare(rng))
    found = compare(rng, short=True)[0]
    while "\n" in "".join(found.blocks):
        found = compare(rng, short=True)[0]
    return Task(f"{' '.join(found.blocks)} {found.question}", found.thought, found.answer, found.value)


def counting(rng: Rng) -> Task:
    """How many things a list holds."""
    things = rng.some(rng.pick((ANIMALS, OBJECTS, FOODS)), rng.randint(2, 9))
    question = render(rng, rng.pick(("How many things are in this list: {l}?", "Count these: {l}.", "{l}. How many are that?")), {"l": ", ".join(things)})
    steps = "\n".join(f"{i} {thing}" for i, thing in enumerate(things, 1))
    return Task(capital(question), steps, f"There are {NUMBER_WORDS[len(things)]}.", NUMBER_WORDS[len(things)])


def sequence(rng: Rng) -> Task:
    """What comes after a day, a month or a number; even or odd."""
    style = rng.random()
    if style < 0.3:
        i = rng.randint(0, 6)
        return Task(f"Which day comes {rng.pick(('after', 'next after'))} {DAYS[i]}?", f"After {DAYS[i]} comes {DAYS[(i + 1) % 7]}.", f"{DAYS[(i + 1) % 7]} comes after {DAYS[i]}.", DAYS[(i + 1) % 7])
    if style < 0.5:
        i = rng.randint(0, 11)
        return Task(f"Which month comes after {MONTHS[i]}?", f"After {MONTHS[i]} comes {MONTHS[(i + 1) % 12]}.", f"{MONTHS[(i + 1) % 12]} comes after {MONTHS[i]}.", MONTHS[(i + 1) % 12])
    number = rng.randint(1, 200)
    if style < 0.75:
        kind = "even" if number % 2 == 0 else "odd"
        return Task(f"Is {number} even or odd?", f"The last digit is {number % 10}, which is {kind}.", f"{number} is {kind}.", kind)
    return Task(f"Which number comes after {number}?", f"{number} + 1 = {number + 1}.", f"After {number} comes {number + 1}.", str(number + 1))


def draw_task(rng: Rng) -> Task:
    """Any of the tasks, sums most often."""
    style = rng.random()
    if style < 0.45:
        return addition(rng)
    make = (subtraction, subtraction, product, comparison, comparison, counting, sequence)
    return rng.pick(make)(rng)
