"""Sentences about deeds, possessions and events of invented people, and questions with who, what, when and where."""

# ruff: noqa: E501 - wordings and word lists read better as they are

from dataclasses import dataclass

from tools.tiny_model.text.facts import UNKNOWN
from tools.tiny_model.text.grammar import Rng, capital, render, with_article
from tools.tiny_model.text.words import (
    ADJECTIVES,
    ANIMALS,
    COLOURS,
    DAYS,
    EVENTS,
    GOODS,
    MONTHS,
    NOUNS,
    OBJECTS,
    TRAIN,
    first_name,
    full_name,
    name,
)

_DEEDS = """discover discovered discovered|invent invented invented|write wrote written|build built built|paint painted painted|buy bought bought|find found found
|lose lost lost|steal stole stolen|sell sold sold|repair repaired repaired|open opened opened|visit visited visited|cook cooked cooked|plant planted planted
|hide hid hidden|draw drew drawn|break broke broken|clean cleaned cleaned|win won won|bring brought brought|borrow borrowed borrowed|design designed designed
|see saw seen|catch caught caught|send sent sent|read read read|make made made|choose chose chosen|carry carried carried|save saved saved|film filmed filmed
|order ordered ordered|forget forgot forgotten|mend mended mended|take took taken|give away gave away given away|wash washed washed|record recorded recorded
|study studied studied|photograph photographed photographed|found founded founded|close closed closed|burn burned burned|test tested tested|move moved moved"""
DEEDS = tuple(tuple(_split) if len(_split := d.split()) == 3 else ("give away", "gave away", "given away") for d in _DEEDS.replace("\n", "").split("|"))
STATES = (("has", "have"), ("owns", "own"), ("likes", "like"), ("wants", "want"), ("keeps", "keep"), ("needs", "need"), ("carries", "carry"), ("wears", "wear"),
          ("loves", "love"), ("guards", "guard"), ("holds", "hold"), ("uses", "use"), ("drives", "drive"), ("hates", "hate"), ("collects", "collect"))  # fmt: skip
_MOST = (("taller", "shorter"), ("older", "younger"), ("faster", "slower"), ("stronger", "weaker"), ("richer", "poorer"), ("bigger", "smaller"), ("heavier", "lighter"))


@dataclass(frozen=True)
class Item:
    """A sentence and its questions: (question wordings, full answer, value)."""

    sentence: str
    asks: tuple[tuple[tuple[str, ...], str, str], ...]


def thing(rng: Rng, split: str = TRAIN) -> str:
    """An object with its article, or a name."""
    style = rng.random()
    if style < 0.45:
        return f"the {rng.pick(COLOURS if rng.chance(0.6) else ADJECTIVES)} {rng.pick(OBJECTS if rng.chance(0.5) else NOUNS)}"
    if style < 0.65:
        return f"the {rng.pick(NOUNS)}"
    if style < 0.8:
        return with_article(f"{rng.pick(ADJECTIVES)} {rng.pick(NOUNS)}")
    if style < 0.9:
        return f"the {rng.pick(('planet', 'island', 'city', 'ship', 'book', 'star', 'song', 'robot'))} {name(rng, 'thing', split)}"
    return name(rng, "thing", split)


def when(rng: Rng) -> str:
    """A time: "in 1921", "on Monday at 3 pm"."""
    clock = rng.pick((f"at {rng.randint(1, 12)} {rng.pick(('pm', 'am'))}", f"at {rng.randint(1, 23)}:{rng.randint(0, 5)}{rng.randint(0, 9)}", f"at {rng.randint(1, 12)} o'clock"))
    day = rng.pick((f"on {rng.pick(DAYS)}", f"on {rng.pick(DAYS)}", f"in {rng.pick(MONTHS)}", f"in {rng.randint(1000, 2100)}", f"on {rng.pick(MONTHS)} {rng.randint(1, 28)}"))
    return rng.pick((day, day, clock, f"{day} {clock}" if day.startswith("on") else day))


def where(rng: Rng, split: str = TRAIN) -> str:
    """A place: "in Kelmora", "at the station", "in room 12"."""
    return rng.pick((f"in {name(rng, 'city', split)}", f"in the {rng.pick(NOUNS)}", f"at the {rng.pick(NOUNS)}", f"in room {rng.randint(1, 99)}", f"near the {rng.pick(NOUNS)}",
                     f"under the {rng.pick(OBJECTS)}", f"behind the {rng.pick(NOUNS)}"))  # fmt: skip


def deed(rng: Rng, split: str = TRAIN) -> Item:
    """Somebody did something, perhaps at a time or in a place."""
    base, past, done = rng.pick(DEEDS)
    who = full_name(rng, split) if rng.chance(0.7) else rng.pick((f"Dr. {name(rng, 'person', split)}", f"Mr. {name(rng, 'person', split)}", f"the {rng.pick(NOUNS)}"))
    what, time, place = thing(rng, split), when(rng) if rng.chance(0.4) else "", where(rng, split) if rng.chance(0.3) else ""
    s = {"w": who, "o": what, "t": time, "l": place, "past": past, "base": base, "done": done}
    adjunct = (" {t}" if time else "") + (" {l}" if place else "")
    forms = ["{w} {past} {o}" + adjunct + ".", "{w} {past} {o}" + adjunct + ".", "{o} was {done} by {w}" + adjunct + ".", "It was {w} who {past} {o}" + adjunct + "."]
    if time:
        forms.append("{t}, {w} {past} {o}" + (" {l}" if place else "") + ".")
    core = f"{who} {past} {what}"
    asks = [(("Who {past} {o}?", "Who {past} {o}?", "By whom was {o} {done}?", "[Do you know|Tell me|I want to know] who {past} {o}."), f"{capital(core)}.", who),
            (("What did {w} {base}?", "What has {w} {done}?", "[Tell me|Say|I wonder] what {w} {past}."), f"{capital(core)}.", what)]  # fmt: skip
    if time:
        asks.append((("When did {w} {base} {o}?", "When was {o} {done}?", "Tell me when {w} {past} {o}."), f"{capital(core)} {time}.", time))
    if place:
        asks.append((("Where did {w} {base} {o}?", "Where was {o} {done}?", "Tell me where {w} {past} {o}."), f"{capital(core)} {place}.", place))
    return _item(rng, forms, asks, s)


def state(rng: Rng, split: str = TRAIN) -> Item:
    """Somebody has, likes or wears something."""
    verb, base = rng.pick(STATES)
    who, what = first_name(rng, split)[0], rng.pick((thing(rng, split), thing(rng, split), with_article(rng.pick(ANIMALS)), rng.pick(GOODS)))
    s = {"w": who, "o": what, "v": verb, "base": base}
    asks = [(("Who {v} {o}?", "Who {v} {o}?", "[Tell me|Do you know] who {v} {o}."), f"{who} {verb} {what}.", who),
            (("What does {w} {base}?", "[Tell me|Do you know] what {w} {v}."), f"{who} {verb} {what}.", what)]  # fmt: skip
    return _item(rng, ["{w} {v} {o}."], asks, s)


def happening(rng: Rng, split: str = TRAIN) -> Item:
    """An event with its time and its place."""
    event = f"{rng.pick(ADJECTIVES)} {rng.pick(EVENTS)}" if rng.chance(0.4) else rng.pick(EVENTS)
    time, place = when(rng), where(rng, split)
    s = {"e": event, "t": time, "l": place}
    both = rng.chance(0.6)
    forms = ["The {e} [is|takes place|will be|starts|begins|happens] {t}" + (" {l}" if both else "") + "."]
    if both:
        forms += ["The {e} [is|takes place|will be] {l} {t}.", "{t} there is a {e} {l}." if event[0] not in "aeiou" else "{t} there is an {e} {l}."]
    asks = [(("When is the {e}?", "When does the {e} [start|begin|take place]?", "What time is the {e}?", "Tell me when the {e} is."), f"The {event} is {time}.", time)]
    if both:
        asks.append((("Where is the {e}?", "Where does the {e} take place?", "Tell me where the {e} is.", "Where will the {e} be?"), f"The {event} is {place}.", place))
    return _item(rng, forms, asks, s)


def location(rng: Rng, split: str = TRAIN) -> Item:
    """A thing is in a place."""
    what, place = f"the {rng.pick((*ADJECTIVES, *COLOURS))} {rng.pick((*OBJECTS, *NOUNS))}" if rng.chance(0.6) else f"the {rng.pick(NOUNS)}", where(rng, split)
    asks = [(("Where is {o}?", "Where can I find {o}?", "Tell me where {o} is.", "Where did they put {o}?"), f"{capital(what)} is {place}.", place)]
    return _item(rng, ["{o} [is|lies|stands|was left|can be found] {l}.", "You find {o} {l}.", "{l} [lies|is] {o}."], asks, {"o": what, "l": place})


def rank(rng: Rng, split: str = TRAIN) -> Item:
    """One is taller than the other."""
    word, other = rng.pick(_MOST)
    a, b = first_name(rng, split)[0], name(rng, "person", split)
    if rng.chance(0.5):
        word, other = other, word
    s = {"a": a, "b": b, "w": word, "x": other}
    asks = [(("Who is {w}?", "Who is {w}, {a} or {b}?", "Who is {w}, {b} or {a}?"), f"{a} is {word}.", a), (("Who is {x}?", "Who is {x}, {a} or {b}?", "Who is {x}, {b} or {a}?"), f"{b} is {other}.", b)]
    return _item(rng, ["{a} is {w} than {b}."], asks, s)


def _item(rng: Rng, forms: list[str], asks: list, slots: dict[str, str]) -> Item:
    sentence = capital(render(rng, rng.pick(forms), slots))
    return Item(sentence, tuple((tuple(capital(render(rng, q, slots)) for q in questions), answer, value) for questions, answer, value in asks))


@dataclass(frozen=True)
class Told:
    """A text of such items, a question, the thought, the full answer and the bare value."""

    text: str
    question: str
    thought: str
    answer: str
    value: str


def draw_told(rng: Rng, count: int, split: str = TRAIN, questions: int = 1) -> list[Told]:
    """`count` items in one text and some questions; now and then one that the text does not answer."""
    kinds = (deed, deed, deed, state, state, happening, location)
    make = rng.pick(kinds) if rng.chance(0.5) else None
    items = [rank(rng, split)] if count == 1 and rng.chance(0.15) else [(make or rng.pick(kinds))(rng, split) for _ in range(count)]
    sentences = [item.sentence for item in items]
    style = rng.random()
    text = " ".join(sentences) if style < 0.75 else "\n".join(("- " if style < 0.9 else "") + s for s in sentences)
    found = []
    for _ in range(questions):
        if rng.chance(0.08) and not (count == 1 and "than" in sentences[0]):
            wordings, _, _ = rng.pick((make or rng.pick(kinds))(rng, split).asks)
            found.append(Told(text, rng.pick(wordings), "The text says nothing about it.", UNKNOWN, ""))
            continue
        wordings, answer, value = rng.pick(rng.pick(items).asks)
        if any(answer != other and (set(wordings) & set(w)) for item in items for w, other, _ in item.asks):
            continue  # two answers would be right
        said = answer[0].lower() + answer[1:] if answer.startswith(("The ", "A ", "An ", "It ")) else answer
        found.append(Told(text, rng.pick(wordings), f"The text says that {said}", answer, value))
    return found or draw_told(rng, count, split, questions)
