"""Stories with characters, places and causes, and questions about them."""

from collections.abc import Sequence
from zlib import crc32

from tools.tiny_model.text import story_plots as plots
from tools.tiny_model.text.grammar import Rng, T, capital, render
from tools.tiny_model.text.words import (
    ANIMALS,
    COLOURS,
    CONTAINERS,
    CREATURES,
    FIRST_NAMES,
    FLOWERS,
    FOODS,
    INSTRUMENTS,
    JOBS,
    NUMBER_WORDS,
    OBJECTS,
    TRAIN,
    first_name,
    name,
    word_name,
)

_PRONOUNS = {"he": ("he", "him", "his"), "she": ("she", "her", "her")}
_RELATIVES = ("grandmother", "grandfather", "mother", "father", "sister", "brother", "aunt", "uncle")
_FEMALE = ("grandmother", "mother", "sister", "aunt")
_FINDERS = ("magpie", "fox", "squirrel", "goat", "crow", "hedgehog", "owl", "mouse")
_FOUND = (
    "under a bush",
    "in an old nest",
    "between two stones",
    "at the foot of a tall tree",
    "in the long grass",
    "behind the old church",
    "at the bottom of a dry well",
    "on top of the hill",
)
_KNOWN_BEFORE = ("lost", "storm", "remedy", "noise", "honest", "rescue", "craft", "garden")  # plots whose helper is no stranger

_HERO_HELPS = ("boat", "rescue", "storm", "lighthouse", "wolf", "stranger")  # plots whose hero does the helper a good turn


class Story:
    """One story: its text, its slots, and questions about it with their answers."""

    def __init__(self, rng: Rng, split: str = TRAIN, hero: str = "", thing: str = "", animal: str = "", opening: bool = True):
        hero, pronoun = _hero(rng, split, hero)
        self.plot = plot = _own(rng, hero, "plot", plots.PLOTS)
        while animal and not plot[3]:
            self.plot = plot = rng.pick(plots.PLOTS)
        self.slots = _slots(rng, split, plot, hero, pronoun, thing, animal)
        sentences = self._open(rng) if opening else []
        for beat in plot[4]:
            sentences.append(render(rng, rng.pick(beat), self.slots))
        for ending in rng.some(plots.ENDINGS, rng.pick((1, 1, 2))):
            sentences.append(render(rng, ending, self.slots))
        self.sentences = [capital(s) for s in sentences]

    def _open(self, rng: Rng) -> list[str]:
        opening = [render(rng, rng.pick(plots.OPENINGS), self.slots)]
        count = rng.pick((0, 1, 1, 2))
        habits = plots.HABITS if self.plot[0] in _KNOWN_BEFORE else plots.HABITS[:4]
        return opening + [render(rng, habit, self.slots) for habit in rng.some(habits, count)]

    def text(self, rng: Rng) -> str:
        """The story in one paragraph or in several."""
        if rng.chance(0.6):
            return " ".join(self.sentences)
        cut = rng.randint(2, max(2, len(self.sentences) - 3))
        return " ".join(self.sentences[:cut]) + "\n\n" + " ".join(self.sentences[cut:])

    def questions(self, rng: Rng) -> list[tuple[str, str, str]]:
        """Return triples (question, full answer, short answer) whose answers are in the story."""
        s, text = self.slots, " ".join(self.sentences)
        asked = [
            (
                "[Who is the story about|Who is the hero of the story|What is the name of the main character]?",
                "The story is about {hero}.",
                "{hero}",
            )
        ]
        if s["place"] in text:
            asked.append(("Where did {hero} live?", "{hero} lived in {place}.", "{place}"))
        if f"{s['helper']}, " in text and s["helper_role"] in text:
            asked.append(("[Who was {helper}|What was {helper}]?", "{helper} was {a helper_role}.", "{a helper_role}"))
        if f"{s['colour']} {s['object']}" in text:
            asked.append(("What colour was the {object}?", "The {object} was {colour}.", "{colour}"))
        if s["plot"] == "lost":
            asked.append(("Where [was the {object} found|did they find the {object}]?", "They found the {object} {found}.", "{found}"))
            asked.append(("Who helped {hero}?", "{helper} helped {hero}.", "{helper}"))
            asked.append(
                ("What did {hero} [lose|look for]?", "{hero} [lost|looked for] {his} {colour} {object}.", "{his} {colour} {object}")
            )
        if s["plot"] in ("contest", "craft", "noise", "garden"):
            asked.append(("Who helped {hero}?", "{helper} helped {hero}.", "{helper}"))
        if s["plot"] == "remedy":
            asked.append(("Who was ill?", "The {relative} of {hero} was ill.", "the {relative} of {hero}"))
        return [(render(rng, q, s), render(rng, full, s), render(rng, short, s)) for q, full, short in asked]


def _own(rng: Rng, hero: str, what: str, options: Sequence[T]) -> T:
    # Half the time what belongs to this hero's name, so that different heroes live through different stories even without sampling.
    return options[crc32(f"{hero}/{what}".encode()) % len(options)] if rng.chance(0.5) else rng.pick(options)


def _hero(rng: Rng, split: str, hero: str) -> tuple[str, str]:
    drawn, pronoun = _character(rng, split)
    return (hero, dict(FIRST_NAMES[split]).get(hero, pronoun)) if hero else (drawn, pronoun)


def _slots(rng: Rng, split: str, plot: tuple, hero_name: str, pronoun: str, thing: str, animal: str) -> dict[str, str]:
    setting = plot[2] or rng.pick(tuple(plots.PLACES))
    helper, helper_pronoun = _character(rng, split)
    while helper == hero_name:
        helper, helper_pronoun = _character(rng, split)
    if animal or (plot[3] and rng.chance(0.25)):
        role = animal or rng.pick(CREATURES if rng.chance(0.25) else ANIMALS)
        helper_role = rng.pick([a for a in ANIMALS if a != role])
    else:
        role = rng.pick(JOBS) if rng.chance(0.6) else ("boy" if pronoun == "he" else "girl")
        helper_role = rng.pick([j for j in JOBS if j != role])
    colour, obj, obj2 = _own(rng, hero_name, "colour", COLOURS), _own(rng, hero_name, "object", OBJECTS), rng.pick(OBJECTS)
    while obj2 in (obj, thing):
        obj2 = rng.pick(OBJECTS)
    spot, spot2 = rng.some(plots.SPOTS[setting], 2)
    relative = _own(rng, hero_name, "relative", _RELATIVES)
    village = name(rng, "city", split) if rng.chance(0.4) else ("the town" if setting == "plain" else "the village")
    he, him, his = _PRONOUNS[pronoun]
    hhe, hhim, hhis = _PRONOUNS[helper_pronoun]
    place = rng.pick(plots.PLACES[setting])
    if village[0].isupper() and ("village" in place or "town" in place) and rng.chance(0.8):
        place += f" called {village}"
    elif village[0].isupper():
        village = "the village"
    slots = {
        "plot": plot[0],
        "moral": plot[1],
        "hero": hero_name,
        "helper": helper,
        "role": role,
        "helper_role": helper_role,
        "he": he,
        "him": him,
        "his": his,
        "hhe": hhe,
        "hhim": hhim,
        "hhis": hhis,
        "he2": "she" if relative in _FEMALE else "he",
        "trait": _own(rng, hero_name, "trait", plots.TRAITS),
        "old_trait": rng.pick(("tired", "old", "wet", "hungry", "poor")),
        "place": place,
        "village": village,
        "spot": spot,
        "spot2": spot2,
        "spot_to": rng.pick(("to the hills", "to the secret pond", "through the fields", "to the old tower")),
        "found": rng.pick(_FOUND),
        "spot_noun": rng.pick(("sea", "stars", "mountains", "moon", "spring")),
        "colour": colour,
        "object": thing or obj,
        "object2": obj2,
        "food": _own(rng, hero_name, "food", FOODS),
        "pet": rng.pick(("cat", "dog", "goat", "parrot")),
        "relative": relative,
        "weather": rng.pick(plots.WEATHERS),
        "instrument": rng.pick(INSTRUMENTS),
        "flower": rng.pick([f for f in FLOWERS if f != colour]),
        "container": rng.pick(CONTAINERS),
        "thief": rng.pick(_FINDERS),
        "number": rng.pick(NUMBER_WORDS[2:10]),
        "ruler": rng.pick(("king", "queen", "mayor", "judge")),
    }
    # Whoever was helped is thankful.
    helped = plot[0] in _HERO_HELPS
    slots |= {"thankful": helper if helped else hero_name, "kind": hero_name if helped else helper, "hkind": hhim if helped else him}
    slots["time"] = render(rng, rng.pick(plots.TIMES), slots)
    return slots


def _character(rng: Rng, split: str) -> tuple[str, str]:
    style = rng.random()
    if style < 0.1 and split == TRAIN:
        return word_name(rng), rng.pick(("he", "she"))
    return rng.pick(FIRST_NAMES[split]) if style < 0.65 else first_name(rng, split)
