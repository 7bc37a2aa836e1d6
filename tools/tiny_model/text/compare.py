"""Comparisons of two numbers: bare numbers, and ages, heights, prices and the like, which the context states of invented names."""

# ruff: noqa: E501 - wordings and word lists read better as they are

from dataclasses import dataclass
from zlib import crc32

from tools.tiny_model.text import facts, wordings
from tools.tiny_model.text.facts import Fact
from tools.tiny_model.text.grammar import Rng, capital, render
from tools.tiny_model.text.recall import Scene, paragraphs
from tools.tiny_model.text.words import TEST, TRAIN


@dataclass(frozen=True)
class Quantity:
    """A quantity to compare: its relation, bounds, pairs of predicates for more and less, and sentences that state two values at once."""

    kind: str
    relation: wordings.Relation
    bounds: tuple[int, int]
    predicates: tuple[tuple[str, str], ...]
    noun: str = ""
    both: tuple[str, ...] = ()


def _q(kind: str, noun: str, says: str, bounds: tuple[int, int], predicates: str, which: str = "", both: str = "") -> Quantity:
    own = next((r for r in wordings.RELATIONS.get(kind, ()) if r.noun == noun), None)
    relation = own or wordings.Relation(noun, "number", tuple(filter(None, says.split(" / "))))
    pairs = tuple((more, less) for more, less in (pair.split("/") for pair in predicates.split("|")))
    return Quantity(kind, relation, bounds, pairs, which, tuple(filter(None, both.split(" / "))))


# {t}: a sort of things, drawn each time. For a founding year, more is younger.
QUANTITIES = (
    _q("person", "age", "", (2, 110), "is older/is younger", "", "{a} is {x} years old and {b} is {y}. / {a} is {x}, {b} is {y}. / {a} is {x} years old. {b} is {y} years old. / {a} turned {x} and {b} turned {y}."),
    _q("person", "height", "{s} is {v} centimetres tall. / {s} is {v} cm tall. / {s} measures {v} centimetres.", (70, 220), "is taller/is shorter|is taller/is smaller", "",
       "{a} is {x} cm tall and {b} is {y} cm tall. / {a} is {x} centimetres tall, {b} is {y}. / {a} measures {x} cm. {b} measures {y} cm."),
    _q("person", "weight", "{s} weighs {v} kilos. / {s} weighs {v} kg.", (3, 180), "is heavier/is lighter", "", "{a} weighs {x} kilos, {b} weighs {y} kilos. / {a} weighs {x} kg and {b} {y} kg."),
    _q("person", "number of {t}", "{s} has {v} {t}. / {s} found {v} {t}. / There are {v} {t} in the house of {s}.", (2, 9999), "has more {t}/has fewer {t}", "",
       "{a} has {x} {t}. {b} has {y} {t}. / {a} has {x} {t} and {b} has {y}. / {a} owns {x} {t}, {b} owns {y} {t}."),
    _q("person", "score", "{s} scored {v} points. / {s} got {v} points. / {s} has {v} points.", (2, 999), "has more points/has fewer points|has the higher score/has the lower score", "",
       "{a} scored {x} points and {b} scored {y}. / {a} has {x} points, {b} has {y} points."),
    _q("person", "distance", "{s} ran {v} miles. / {s} walked {v} miles.", (2, 300), "went farther/went less far", "", "{a} ran {x} miles and {b} ran {y} miles. / {a} walked {x} miles, {b} walked {y}."),
    _q("person", "fortune", "{s} owns {v} coins. / {s} saved {v} coins.", (2, 99999), "is richer/is poorer", "", "{a} has {x} coins and {b} has {y} coins. / {a} owns {x} coins, {b} owns {y}."),
    _q("person", "salary", "{s} earns {v} a month.", (100, 9999), "earns more/earns less", "", "{a} earns {x}, {b} earns {y}."),
    _q("city", "population", "", (80, 99999), "is larger/is smaller|is bigger/is smaller|has more people/has fewer people", "city", "{x} people live in {a} and {y} in {b}. / {a} has {x} people, {b} has {y}."),
    _q("country", "population", "", (80, 99999), "is larger/is smaller|has more people/has fewer people", "country"),
    _q("country", "founding year", "", (800, 2100), "is younger/is older|was founded later/was founded earlier", "country", "{a} was founded in {x} and {b} in {y}. / {a} was founded in {x}, {b} was founded in {y}."),
    _q("company", "founding year", "", (800, 2100), "is younger/is older|was founded later/was founded earlier", "company"),
    _q("company", "number of workers", "", (5, 99999), "is larger/is smaller|has more workers/has fewer workers", "company"),
    _q("place", "price", "", (2, 9999), "is dearer/is cheaper|costs more/costs less|is more expensive/is cheaper", "", "{^a} costs {x} coins, {b} costs {y} coins. / {^a} costs {x} and {b} costs {y}."),
    _q("place", "weight", "{^s} weighs {v} kilos.", (2, 999), "is heavier/is lighter", "", "{^a} weighs {x} kilos and {b} weighs {y}."),
    _q("planet", "number of moons", "", (2, 150), "has more moons/has fewer moons", "planet", "{a} has {x} moons and {b} has {y}."),
    _q("ship", "length", "The ship {s} is {v} metres long. / {s} is {v} metres long.", (5, 400), "is longer/is shorter", "ship", "{a} is {x} metres long, {b} is {y} metres long."),
    _q("ship", "speed", "{s} makes {v} miles an hour.", (2, 120), "is faster/is slower", "ship", "{a} makes {x} miles an hour and {b} makes {y}."),
    _q("named", "height", "The tower {s} is {v} metres high. / {s} is {v} metres high.", (3, 900), "is higher/is lower|is taller/is lower", "tower", "{a} is {x} metres high and {b} is {y}."),
    _q("named", "height", "Mount {s} is {v} metres high. / The mountain {s} rises to {v} metres.", (200, 9000), "is higher/is lower", "mountain"),
    _q("named", "length", "The river {s} is {v} miles long. / {s} is {v} miles long.", (3, 4000), "is longer/is shorter", "river", "{a} is {x} miles long, {b} is {y} miles long."),
    _q("named", "depth", "The lake {s} is {v} metres deep.", (2, 900), "is deeper/is shallower", "lake"),
    _q("named", "number of pages", "The book {s} has {v} pages. / {s} has {v} pages.", (8, 2000), "has more pages/has fewer pages|is thicker/is thinner", "book", "{a} has {x} pages, {b} has {y} pages."),
    _q("named", "speed", "The train {s} makes {v} miles an hour.", (5, 400), "is faster/is slower", "train"),
)  # fmt: skip
THINGS = ("apples", "coins", "books", "stones", "eggs", "pears", "keys", "cards", "stamps", "shells", "nuts", "candles", "letters", "marbles", "flowers",
          "goats", "hens", "cows", "brothers", "cats", "boats", "tickets", "friends", "sheep", "trees")  # fmt: skip

# {q}: who, which, which city; {p}: is older, has more apples.
_ASKS = {
    TRAIN: ("{^q} {p}, {a} or {b}?", "{^q} {p}, {a} or {b}?", "{^q} {p}, {a} or {b}?", "{^q} {p}: {a} or {b}?", "[Which of them|Which of the two|Which one] {p}, {a} or {b}?",
            "{a} or {b}: {q} {p}?", "[Tell me|Say|I wonder|I want to know|Find out] {q} {p}, {a} or {b}.", "[Do you know|Can you say] {q} {p}, {a} or {b}?", "Of {a} and {b}, {q} {p}?", "{q} {p}, {a} or {b}",
            "Compare {a} and {b}: {q} {p}?", "{a} and {b}: {q} {p}?", "Name the one that {p}, {a} or {b}.", "Look at {a} and {b}. {^q} {p}?", "{^q} {p} of the two, {a} or {b}?",
            "What do you [think|say], {q} {p}, {a} or {b}?", "[So|And|Now|Well|Please], {q} {p}, {a} or {b}?"),
    TEST: ("Between {a} and {b}, {q} {p}?", "Could you tell me {q} {p}, {a} or {b}?", "I would like to know {q} {p}, {a} or {b}.", "Please name the one that {p}: {a} or {b}."),
}  # fmt: skip
_ALONE = ("{^q} {p}?", "{^q} {p}?", "[Which of them|Which one|Which of the two] {p}?", "[Tell me|Say|I wonder] {q} {p}.", "{q} {p}")
_BARE_ASKS = {
    TRAIN: ("Which is {w}, {a} or {b}?", "Which number is {w}: {a} or {b}?", "What is {w}, {a} or {b}?", "Which one is {w}, {a} or {b}?", "{a} or {b}: which is {w}?", "which is {w}, {a} or {b}",
            "Which of {a} and {b} is {w}?", "[Tell me|Say] which number is {w}, {a} or {b}.", "Compare {a} and {b}. Which is {w}?", "Find the {w} number: {a}, {b}.", "What number is {w}, {a} or {b}?",
            "Name the {w} one of {a} and {b}.", "{a}, {b}: which number is {w}?", "Which is the {w} number, {a} or {b}?"),
    TEST: ("Between {a} and {b}, which is {w}?", "Could you tell me which is {w}, {a} or {b}?", "I would like to know which number is {w}, {a} or {b}.", "Please name the {w} number: {a} or {b}."),
}  # fmt: skip
_MORE, _LESS = ("larger", "bigger", "greater", "higher"), ("smaller", "lower", "lesser")


def held_out_pair(a: int, b: int) -> bool:
    """Whether the two numbers together are kept for tests."""
    return crc32(f"{min(a, b)}<{max(a, b)}".encode()) % 10 == 0


def _number(rng: Rng, low: int, high: int) -> int:
    # Short numbers as often as long ones.
    digits = rng.randint(len(str(low)), len(str(high)))
    return rng.randint(max(low, 10 ** (digits - 1)), min(high, 10**digits - 1))


def pair(rng: Rng, low: int, high: int, split: str = TRAIN) -> tuple[int, int]:
    """Two different numbers within the bounds: near each other, of different length, or any."""
    while True:
        style = rng.random()
        a, b = _number(rng, low, high), _number(rng, low, high)
        if style < 0.25:
            b = a + rng.randint(-9, 9)
        elif style < 0.4:  # one digit is another
            digits = list(str(a))
            digits[rng.randint(0, len(digits) - 1)] = rng.pick("123456789")
            b = int("".join(digits))
        elif style < 0.6:
            a, b = rng.randint(low, high), rng.randint(low, high)
        if a != b and low <= b <= high and held_out_pair(a, b) == (split == TEST):
            return a, b


def steps(a: int, b: int, word: str, more: bool) -> str:
    """Which of the two is more, what the word asks for, and the number chosen."""
    best = max(a, b) if more else min(a, b)
    signs = ("less", "more") if a < b else ("more", "less")
    return f"{a} is {signs[0]}, {b} is {signs[1]}.\n{capital(word)} means {'more' if more else 'less'}: {best}."


def compare_bare(rng: Rng, split: str = TRAIN) -> tuple[str, str, str, str]:
    """Which of two bare numbers is larger or smaller: question, steps, full answer, bare result."""
    a, b = pair(rng, 1, rng.pick((20, 99, 999, 999, 99999)), split)
    more = rng.chance(0.5)
    best = max(a, b) if more else min(a, b)
    if split == TRAIN and rng.chance(0.12):
        word = rng.pick(_MORE if more else _LESS)
        answer = f"{'Yes' if best == a else 'No'}, {best} is {word}."
        return f"Is {a} {word} than {b}?", steps(a, b, word, more), answer, answer
    word = rng.pick((*_MORE, "more") if more else (*_LESS, "less"))
    frame = rng.pick(_BARE_ASKS[split])
    while word in ("more", "less") and "number" in frame:
        frame = rng.pick(_BARE_ASKS[split])
    return render(rng, frame, {"w": word, "a": str(a), "b": str(b)}), steps(a, b, word, more), f"{best} is {word}.", str(best)


@dataclass(frozen=True)
class Compared:
    """The context's paragraphs, the question, the steps, the full answer and the bare value."""

    blocks: list[str]
    question: str
    thought: str
    answer: str
    value: str


def _subjects(rng: Rng, kind: str, count: int, split: str, plain: bool) -> list[tuple[str, str]]:
    found: dict[str, str] = {}
    while len(found) < count:
        subject, its = facts.draw_subject(rng, kind, split)
        found[subject.rsplit(" ", maxsplit=1)[-1] if plain else subject] = its
    return list(found.items())


def _others(rng: Rng, kind: str, told: list[Fact], noun: str) -> list[Fact]:
    # Facts of other sorts about the same subjects, without numbers.
    relations = [r for r in wordings.RELATIONS.get(kind, ()) if r.noun != noun and r.noun not in ("founder", "best friend", "neighbour")]
    out: list[Fact] = []
    for fact in rng.some(told, rng.randint(1, len(told))) if relations else []:
        relation = rng.pick(relations)
        value = facts.draw_value(rng, relation.value)
        if not any(c.isdigit() for c in value) and value not in [f.subject for f in told]:
            out.append(facts.make_fact(relation, fact.subject, value, fact.its))
    return out


def compare(rng: Rng, split: str = TRAIN, questions: int = 1, short: bool = False) -> list[Compared]:
    """Ask which of two subjects is older, more expensive, has more of something. `short`: both in one sentence, if there are wordings."""
    quantity = rng.pick(QUANTITIES)
    things = rng.pick(THINGS)
    own = quantity.relation
    relation = wordings.Relation(own.noun.replace("{t}", things), own.value, tuple(s.replace("{t}", things) for s in own.says), own.asks, own.answer)
    low, high = quantity.bounds
    short = short and bool(quantity.both)
    count = 2 if short else rng.pick((2, 2, 3, 4, 5) if split == TRAIN else (2, 3, 4))
    numbers = list(pair(rng, low, high, split))
    while len(numbers) < count:
        number = _number(rng, low, high)
        if number not in numbers:
            numbers.append(number)
    subjects = _subjects(rng, quantity.kind, count, split, plain=quantity.kind == "named")
    told = [facts.make_fact(relation, s, str(v), its) for (s, its), v in zip(subjects, numbers, strict=True)]
    asked = told[:2]
    if short:
        blocks = [render(rng, rng.pick(quantity.both), {"a": subjects[0][0], "b": subjects[1][0], "x": str(numbers[0]), "y": str(numbers[1]), "t": things})]
    else:
        told = told + (_others(rng, quantity.kind, told, own.noun) if split == TRAIN and rng.chance(0.25) else [])
        rng.shuffle(told)
        blocks = paragraphs(rng, Scene({f.subject: quantity.kind for f in told}, told), split, "prose" if split == TEST else "")
    found = []
    for at in range(questions):
        if at:  # another question about the same text
            asked = rng.some([f for f in told if f.relation is relation], 2) if not short else asked
        found.append(_posed(rng, quantity, things, blocks, asked, alone=count == 2, split=split))
    return found


def _posed(rng: Rng, quantity: Quantity, things: str, blocks: list[str], asked: list[Fact], alone: bool, split: str) -> Compared:
    first, second = asked if rng.chance(0.5) else asked[::-1]
    more = rng.chance(0.5)
    predicate = rng.pick(quantity.predicates)[0 if more else 1].replace("{t}", things)
    verb, word = predicate.split(" ", maxsplit=1)
    a, b = int(first.value), int(second.value)
    winner = first if (a > b) == more else second
    answer = f"{capital(winner.subject)} {predicate}."
    ask = "who" if quantity.kind == "person" else (f"which {quantity.noun}" if quantity.noun and rng.chance(0.5) else "which")
    slots = {"q": ask, "p": predicate, "a": first.subject, "b": second.subject}
    if split == TRAIN and verb in ("is", "has") and not word.startswith("the ") and rng.chance(0.1):
        question = f"Is {first.subject} {word} than {second.subject}?" if verb == "is" else f"Does {first.subject} have {word} than {second.subject}?"
        answer = f"{'Yes' if winner is first else 'No'}, {winner.subject} {predicate}."
    else:
        question = render(rng, rng.pick(_ALONE if alone and split == TRAIN and rng.chance(0.2) else _ASKS[split]), slots)
        if not question.startswith(("who", "which")):
            question = capital(question)
    thought = f"{first.answer} {second.answer}\n{steps(a, b, word, more)}\n{winner.value} belongs to {winner.subject}."
    return Compared(blocks, question, thought, answer, winner.subject)
