"""Questions whose answer needs two facts of the context: a look-up through another look-up."""

from dataclasses import dataclass

from tools.tiny_model.text import facts, wordings
from tools.tiny_model.text.facts import Fact
from tools.tiny_model.text.grammar import Rng, capital, render
from tools.tiny_model.text.recall import Scene, paragraphs
from tools.tiny_model.text.words import TRAIN


@dataclass(frozen=True)
class Reasoned:
    """The context's paragraphs, the question, the steps, the full answer and the bare value."""

    blocks: list[str]
    question: str
    thought: str
    answer: str
    value: str


# the subject's kind, the relation that leads on, the next kind, and how the two are joined
_CHAINS = (
    ("person", "home town", "city", "the town where {s} lives"), ("person", "birthplace", "city", "the town where {s} was born"),
    ("country", "capital", "city", "the capital of {s}"), ("company", "headquarters", "city", "the city where {s} is based"),
    ("ship", "captain", "person", "the captain of {s}"), ("company", "boss", "person", "the boss of {s}"),
    ("person", "best friend", "person", "the best friend of {s}"),
)  # fmt: skip


def _relation(kind: str, noun: str) -> wordings.Relation:
    return next(r for r in wordings.RELATIONS[kind] if r.noun == noun)


def _subjects(rng: Rng, kind: str, count: int, split: str) -> list[tuple[str, str]]:
    found: dict[str, str] = {}
    while len(found) < count:
        subject, its = facts.draw_subject(rng, kind, split)
        found[subject] = its
    return list(found.items())


def chain(rng: Rng, split: str = TRAIN) -> Reasoned:
    """What is the mayor of the town where somebody lives?"""
    kind, noun, next_kind, joint = rng.pick(_CHAINS)
    relation, count = _relation(kind, noun), rng.randint(1, 4)
    last = rng.pick([r for r in wordings.RELATIONS[next_kind] if r.noun not in ("birthplace", "birthday month", "best friend")])
    lines: list[tuple[Fact, Fact]] = []
    middles = _subjects(rng, next_kind, count, split)
    ends: set[str] = set()
    for (subject, its), (middle, middle_its) in zip(_subjects(rng, kind, count, split), middles, strict=True):
        value = facts.draw_value(rng, last.value, split)
        while value in ends:
            value = facts.draw_value(rng, "any", split)
        ends.add(value)
        lines.append((facts.make_fact(relation, subject, middle, its), facts.make_fact(last, middle, value, middle_its)))
    first, second = rng.pick(lines)
    scene = Scene(
        {f.subject: k for pair in lines for f, k in zip(pair, (kind, next_kind), strict=True)}, [f for pair in lines for f in pair]
    )
    joined = render(rng, joint, first.slots)
    question = capital(render(rng, rng.pick(("What is the {n} of {j}?", "Tell me the {n} of {j}.", "I want to know the {n} of {j}.",
                                             "What do you know about the {n} of {j}?",
                                             "[Can you|Will you] name the {n} of {j}.")), {"n": last.noun, "j": joined}))  # fmt: skip
    return Reasoned(paragraphs(rng, scene, split), question, f"{first.answer} {second.answer}", f"It is {second.value}.", second.value)
