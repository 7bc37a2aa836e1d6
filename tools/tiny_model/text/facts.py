"""Facts about invented things: how they are stated, listed, asked for and answered."""

# ruff: noqa: E501 - wordings and word lists read better as they are

from dataclasses import dataclass, field

from tools.tiny_model.text.grammar import Rng, capital, render
from tools.tiny_model.text.wordings import (
    APPOSED,
    ASKS,
    FOLLOW_NOUN,
    FOLLOW_SUBJECT,
    INTROS,
    LOOSE_ASKS,
    LOOSE_RESTATES,
    LOOSE_SAYS,
    PRONOUN_SAYS,
    RESTATES,
    SAYS,
    SAYS_MINE,
    Relation,
)
from tools.tiny_model.text.words import (
    ADJECTIVES,
    ANIMALS,
    ATTRIBUTES,
    COLOURS,
    CONTAINERS,
    DAYS,
    FLOWERS,
    FOODS,
    GOODS,
    INSTRUMENTS,
    JOBS,
    MONTHS,
    NOUNS,
    OBJECTS,
    SPORTS,
    TRAIN,
    WORDS,
    anything,
    code,
    first_name,
    full_name,
    name,
)

UNKNOWN = "The text does not say."


@dataclass(frozen=True)
class Fact:
    """`relation` holds between `subject` and `value`; `its` is the subject's possessive."""

    relation: Relation
    subject: str
    value: str
    its: str = "its"
    slots: dict[str, str] = field(default_factory=dict, hash=False, compare=False)

    @property
    def phrase(self) -> str:
        """The thing asked for: "the capital of Kelmia", "my name"."""
        if not self.subject:
            return f"the {self.relation.noun}"
        return f"my {self.relation.noun}" if self.subject == "I" else f"the {self.relation.noun} of {self.subject}"

    @property
    def answer(self) -> str:
        """The full answer in its one standard wording."""
        if self.subject == "I":
            return f"Your {self.relation.noun} is {self.value}."
        if self.relation.answer and self.subject:
            return capital(render(Rng(0), self.relation.answer, self.slots))
        return f"{capital(self.phrase)} is {self.value}."


_NAME_SORTS = ("city", "country", "thing", "person", "full", "any")


def _suited(rng: Rng, templates: tuple[str, ...], fact: Fact) -> str:
    """One of the templates; those that say "called" only for a value that is a name."""
    while True:
        template = rng.pick(templates)
        if fact.relation.value in _NAME_SORTS or "call" not in template:
            return template


def draw_subject(rng: Rng, kind: str, split: str = TRAIN) -> tuple[str, str]:
    """A fresh subject of the given kind and its possessive."""
    if kind == "person":
        first, pronoun = first_name(rng, split)
        return first, "his" if pronoun == "he" else "her"
    if kind == "place":
        thing = rng.pick((*CONTAINERS, "door", "room", "safe", "vault", "gate", "locker", "cabin", "tent", "car", "house"))
        style = rng.random()
        if style < 0.5:
            return f"the {rng.pick(COLOURS)} {thing}", "its"
        if style < 0.75:
            return f"{thing} {rng.randint(1, 99)}", "its"
        return f"the {thing} of {name(rng, 'person', split)}", "its"
    word = {"country": "country", "city": "city", "company": "thing", "ship": "person", "planet": "thing"}.get(kind)
    subject = name(rng, word or rng.pick(("country", "city", "person", "thing")), split)
    if kind in ("country", "city") and rng.chance(0.06):
        subject = f"{rng.pick(('New', 'Old', 'Upper', 'North', 'South', 'Port', 'Saint'))} {subject}"
    if kind == "named" and rng.chance(0.1):
        subject = f"{rng.pick(('Project', 'Team', 'Agent', 'Robot', 'Doctor', 'Lake'))} {subject}"
    return subject, "its"


def thing_relations(rng: Rng, count: int) -> tuple[Relation, ...]:
    """Relations of no subject: "the secret code", "the meeting room"."""
    nouns: set[str] = set()
    while len(nouns) < count:
        noun = rng.pick(ATTRIBUTES if rng.chance(0.5) else NOUNS)
        style = rng.random()
        if style < 0.35:
            noun = f"{rng.pick(ADJECTIVES)} {noun}"
        elif style < 0.6:
            noun = f"{rng.pick(NOUNS)} {noun}"
        nouns.add(noun)
    return tuple(Relation(noun, "any") for noun in sorted(nouns))


def draw_value(rng: Rng, sort: str, split: str = TRAIN) -> str:
    """Return a value of the given sort; a name is new. Sometimes the value is of another sort, so that only the context gives it."""
    if split == TRAIN and rng.chance(0.12):
        sort = rng.pick(("any", "city", "person", "word", "code"))
    if sort in ("city", "country", "thing"):
        return name(rng, sort, split)
    if sort == "person":
        return first_name(rng, split)[0]
    if sort == "full":
        return full_name(rng, split)
    lists = {"animal": ANIMALS, "flower": FLOWERS, "goods": GOODS, "day": DAYS, "food": FOODS, "job": JOBS, "colour": COLOURS, "sport": SPORTS,
             "instrument": INSTRUMENTS, "month": MONTHS, "object": OBJECTS, "word": WORDS}  # fmt: skip
    if sort in lists:
        return rng.pick(lists[sort])
    bounds = {"number": (200, 99999), "year": (1000, 2100), "age": (4, 98), "small": (2, 99), "price": (2, 999)}
    if sort in bounds:
        return str(rng.randint(*bounds[sort]))
    return code(rng) if sort == "code" else anything(rng, split)


def _loosely(rng: Rng, templates: tuple[str, ...], fact: Fact) -> str:
    template = rng.pick(templates)
    while not fact.subject and "{s}" in template:
        template = rng.pick(templates)
    words = {"n1": rng.pick(NOUNS), "n2": rng.pick(NOUNS), "a1": rng.pick(ADJECTIVES)}
    return capital(render(rng, template, {**_phrased(rng, fact), **words}))


def make_fact(relation: Relation, subject: str, value: str, its: str) -> Fact:
    """The fact with the slots that its wordings need."""
    return Fact(relation, subject, value, its, {"n": relation.noun, "s": subject, "v": value, "its": its})


def _phrased(rng: Rng, fact: Fact) -> dict[str, str]:
    if fact.subject in ("I", "") or rng.chance(0.7) or fact.subject.startswith("the "):
        return {**fact.slots, "p": fact.phrase}
    return {**fact.slots, "p": f"{fact.subject}'s {fact.relation.noun}"}


def say(rng: Rng, fact: Fact, split: str = TRAIN) -> str:
    """The fact as a sentence."""
    own = fact.relation.says
    if fact.subject != "I" and split == TRAIN and rng.chance(0.25):
        return _loosely(rng, LOOSE_SAYS, fact)
    if fact.subject == "I":
        return capital(render(rng, rng.pick(own) if own and rng.chance(0.6) else rng.pick(SAYS_MINE), fact.slots))
    if not fact.subject:
        template = _suited(rng, SAYS[split], fact)
        while "{s}" in template:
            template = _suited(rng, SAYS[split], fact)
        return capital(render(rng, template, _phrased(rng, fact)))
    if split == TRAIN and fact.relation.value in _NAME_SORTS and rng.chance(0.04):
        return capital(render(rng, rng.pick(APPOSED), fact.slots))
    template = rng.pick(own) if own and split == TRAIN and rng.chance(0.4) else _suited(rng, SAYS[split], fact)
    return capital(render(rng, template, _phrased(rng, fact)))


def say_shortly(rng: Rng, fact: Fact) -> str:
    """The fact as a sentence that needs its subject from before."""
    return render(rng, _suited(rng, PRONOUN_SAYS if fact.subject != "I" else SAYS_MINE, fact), fact.slots)


def ask(rng: Rng, fact: Fact, split: str = TRAIN) -> str:
    """A question for the fact's value."""
    own = fact.relation.asks
    if split == TRAIN and rng.chance(0.2):
        return _loosely(rng, LOOSE_ASKS, fact)
    template = rng.pick(own) if own and fact.subject and split == TRAIN and rng.chance(0.35) else _suited(rng, ASKS[split], fact)
    return capital(render(rng, template, _phrased(rng, fact)))


def ask_further(rng: Rng, fact: Fact, before: Fact, split: str = TRAIN) -> str:
    """Return a question that depends on the question before, if they share noun or subject."""
    if fact.subject not in ("I", "") and fact.relation.noun == before.relation.noun:
        return capital(render(rng, rng.pick(FOLLOW_SUBJECT), _phrased(rng, fact)))
    if fact.subject not in ("I", "") and fact.subject == before.subject:
        return capital(render(rng, rng.pick(FOLLOW_NOUN), fact.slots))
    return ask(rng, fact, split)


def restate(rng: Rng, fact: Fact, split: str = TRAIN) -> str:
    """The beginning of a sentence that the value completes."""
    if split == TRAIN and rng.chance(0.4):
        return _loosely(rng, LOOSE_RESTATES, fact)
    return capital(render(rng, rng.pick(RESTATES[split]), _phrased(rng, fact)))


def introduce(rng: Rng, kind: str, subject: str) -> str:
    """A sentence that brings in the subject."""
    return capital(render(rng, rng.pick(INTROS[kind]), {"s": subject}))
