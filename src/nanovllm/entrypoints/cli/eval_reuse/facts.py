"""Random texts with facts about invented countries. A model cannot know the answers; it can only read them in the context."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

HEAD = "Here are my notes."
PARAGRAPH = "\n\n"
ASIDES = (
    "Once upon a time, there was a brave boy called {name}. He lived with his brother in a small house with a pink door. One warm day, "
    "{name} found a grey wolf behind the woodpile. It could not walk, because there was a thorn in its paw.",
    "Long ago, in a small village by the sea, there lived a gentle girl called {name}. She loved stew and the sound of the wind. One warm "
    "day, an empty boat drifted to the shore near the village. In the boat lay a red lantern.",
    "{name} was a shy weaver who lived in a small village by the sea. One winter evening, there was a knock at the door. An old man stood "
    "in the snow and asked for a cup of tea. In the morning he was gone, and on the table lay a silver coin.",
)
_ONSETS = ("b", "br", "c", "d", "dr", "f", "g", "gl", "k", "l", "m", "n", "p", "pl", "r", "s", "st", "t", "tr", "v", "w", "z", "th")
_VOWELS = ("a", "e", "i", "o", "u", "ia", "ea", "oo")
_CODAS = ("", "", "l", "n", "r", "s", "m", "nd", "rn", "st")


def _name(*endings: str) -> Callable[[Random], str]:
    def draw(random: Random) -> str:
        syllables = (random.choice(_ONSETS) + random.choice(_VOWELS) + random.choice(_CODAS) for _ in range(random.choice((1, 2))))
        return ("".join(syllables) + random.choice(endings)).capitalize()

    return draw


def _one_of(words: str) -> Callable[[Random], str]:
    return lambda random: random.choice(words.split())


def _number(low: int, high: int) -> Callable[[Random], str]:
    return lambda random: str(random.randint(low, high))


_place, _thing = _name("burg", "ville", "ton", "haven", "port", "mora"), _name("ite", "um", "ex")
draw_subject, draw_person = _name("ia", "land", "ova", "mark", "esia"), _name("a", "o", "en", "us", "wyn")
RELATIONS: tuple[tuple[str, Callable[[Random], str]], ...] = (
    ("capital", _place),
    ("king", draw_person),
    ("queen", draw_person),
    ("currency", _thing),
    ("longest river", _place),
    ("highest mountain", _place),
    ("language", _name("ese", "ish", "ian")),
    ("national animal", _one_of("fox owl bear cat dog wolf goat horse duck frog swan eagle lion seal")),
    ("national flower", _one_of("rose tulip lily daisy poppy violet orchid iris lotus jasmine")),
    ("main export", _one_of("salt wool silk tea coffee sugar timber iron copper coal glass paper cotton wine")),
    ("population", _number(1000, 99999)),
    ("founding year", _number(1000, 2000)),
)
MAX_FACTS = len(RELATIONS) // 2  # most facts of a passage: a second passage about the same subject needs as many others


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One fact: "The `noun` of `subject` is `value`." """

    noun: str
    subject: str
    value: str

    @property
    def sentence(self) -> str:
        """The fact in full."""
        return f"The {self.noun} of {self.subject} is {self.value}."

    @property
    def leaning(self) -> str:
        """The fact without its subject, which an earlier sentence names."""
        return f"Its {self.noun} is {self.value}."

    @property
    def question(self) -> str:
        """A question whose answer is the value."""
        return f"What is the {self.noun} of {self.subject}?"

    @property
    def beginning(self) -> str:
        """The beginning of a sentence that the value completes."""
        return f"The {self.noun} of {self.subject} is"


@dataclass(frozen=True, slots=True, kw_only=True)
class Passages:
    """A context and its questions.

    Attributes:
        head: The heading.
        texts: The passages after it, in order.
        asked: The facts to ask for.
        lead: The text before each question.
    """

    head: str
    texts: tuple[str, ...]
    asked: tuple[Fact, ...]
    lead: str


def draw_facts(random: Random, count: int, about: tuple[Fact, ...] = ()) -> tuple[Fact, ...]:
    """`count` random facts of one subject: a new subject, or the subject of `about`, whose facts are not repeated."""
    subject = about[0].subject if about else draw_subject(random)
    used = {fact.noun for fact in about}
    some = random.sample([relation for relation in RELATIONS if relation[0] not in used], count)
    return tuple(Fact(noun=noun, subject=subject, value=draw(random)) for noun, draw in some)


def tell(facts: tuple[Fact, ...]) -> str:
    """The facts as self-contained sentences."""
    return " ".join(fact.sentence for fact in facts)


def lean(facts: tuple[Fact, ...]) -> str:
    """The facts as sentences that do not name their subject."""
    return " ".join(fact.leaning for fact in facts)


def alone(random: Random, count: int, facts: int, questions: int, separator: str = PARAGRAPH, *, behind: bool = False) -> Passages:
    """`count` self-contained passages, each about another subject. Questions ask for facts of all passages. `behind`: see `_parted`."""
    passages = [draw_facts(random, facts) for _ in range(count)]
    asked = random.sample([fact for some in passages for fact in some], questions)
    return _parted([(separator, tell(some)) for some in passages], asked, separator, behind)


def leaning(random: Random, count: int, facts: int, questions: int, separator: str = PARAGRAPH, *, behind: bool = False) -> Passages:
    """`count` passages in pairs. The second of a pair follows a space and does not name its subject. `behind`: see `_parted`.

    Questions ask for facts of the second passages.
    """
    texts, candidates = [], []
    for _ in range(count // 2):
        first = draw_facts(random, facts)
        second = draw_facts(random, facts, about=first)
        texts += [(separator, tell(first)), (" ", lean(second))]
        candidates += second
    if count % 2:
        texts.append((separator, tell(draw_facts(random, facts))))
    return _parted(texts, random.sample(candidates, questions), separator, behind)


def _parted(told: list[tuple[str, str]], asked: list[Fact], separator: str, behind: bool) -> Passages:
    """Split a text into passages. `told` has a separator and a text for each passage; the questions follow `separator`.

    Each separator belongs to the passage after it, or with `behind` to the passage before it.
    """
    if not behind:
        return Passages(head=HEAD, texts=tuple(part + text for part, text in told), asked=tuple(asked), lead=separator)
    parts = *(part for part, _ in told), separator
    head, *texts = (text + part for text, part in zip((HEAD, *(text for _, text in told)), parts, strict=True))
    return Passages(head=head, texts=tuple(texts), asked=tuple(asked), lead="")


def aside(random: Random) -> str:
    """Some sentences that have no relation to any fact."""
    return random.choice(ASIDES).format(name=draw_person(random))
