"""Chats in Qwen3's format: turns, think blocks, `/no_think`, and small talk."""

# ruff: noqa: E501 - wordings and word lists read better as they are

from dataclasses import dataclass

from tools.tiny_model.text.grammar import Rng, capital, render
from tools.tiny_model.text.words import ADJECTIVES, ANIMALS, COLOURS, CREATURES, FIRST_NAMES, FOODS, NOUNS, OBJECTS, TRAIN, anything, name

# How much a token counts in the loss, in quarters of the plain text's weight; a negative weight leaves out the first token of its segment,
# which is at the place where a think block would begin.
CONTEXT, TEXT, ANSWER = 1, 4, 8
Segment = tuple[str, int]


@dataclass(frozen=True)
class Turn:
    """What the user says, what the assistant thinks, and what it answers."""

    user: str
    thought: str
    answer: str


SYSTEMS = ("You are a helpful assistant.", "You answer questions about the text.", "You are a small, friendly assistant.", "Answer shortly.",
           "You are an assistant. Use only what the text says.", "Be brief and correct.")  # fmt: skip
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"


def chat(rng: Rng, turns: list[Turn], system: str = "") -> list[Segment]:
    """Return the chat as segments. Whether there is thinking, and whether earlier turns keep it, is chosen at random."""
    segments: list[Segment] = []
    if system:
        segments.append((f"<|im_start|>system\n{system}<|im_end|>\n", CONTEXT))
    mode = rng.random()  # < 0.45 thinks; then /no_think in every turn, in the first only; then the template's empty block
    keep = rng.chance(0.5)
    for i, turn in enumerate(turns):
        user = turn.user
        if 0.45 <= mode < 0.65 or (0.65 <= mode < 0.75 and i == 0):
            user += rng.pick((" /no_think", " /no_think", "\n/no_think", "/no_think"))
        elif mode < 0.45 and rng.chance(0.03):
            user += " /think"
        segments += [(f"<|im_start|>user\n{user}<|im_end|>\n", CONTEXT), ("<|im_start|>assistant\n", CONTEXT)]
        last = i == len(turns) - 1
        if not last and not keep:
            segments.append((f"{turn.answer}<|im_end|>\n", -ANSWER))
            continue
        if mode < 0.45:
            segments.append((f"<think>\n{turn.thought}\n</think>\n\n", ANSWER))
        else:
            segments.append((EMPTY_THOUGHT, TEXT if mode < 0.75 else 0))
        segments.append((f"{turn.answer}<|im_end|>\n", ANSWER))
    segments.append(("<|endoftext|>", CONTEXT))
    return segments


_GREETINGS = ("Hello", "Hi", "Hello there", "Good morning", "Good evening", "Hey", "Good day")
_TALK: tuple[tuple[tuple[str, ...], str, tuple[str, ...]], ...] = (
    (("Who are you?", "What are you?", "What is your name?", "Are you a person?", "Introduce yourself.", "Tell me about yourself."), "The user asks who I am.",
     ("I am a very small language model. I can tell stories, recall facts from the text, and do small sums.",)),
    (("What can you do?", "How can you help me?", "Help", "What are you good at?", "What should I ask you?"), "The user asks what I can do.",
     ("I can tell a story, answer questions about a text that you give me, and do small sums.",)),
    (("Thank you.", "Thanks!", "Thank you very much.", "Thanks a lot."), "The user thanks me.", ("You are welcome.",)),
    (("Goodbye.", "Bye!", "See you.", "Good night."), "The user says goodbye.", ("Goodbye!",)),
    (("How are you?", "How are you today?", "Are you well?", "How do you do?"), "The user asks how I am.", ("I am well, thank you. How can I help you?",)),
    (("Okay.", "I see.", "Good.", "Well done.", "Great!", "That is right."), "The user is content.", ("Good. What else can I do for you?",)),
)
_CANNOT = ("Write a poem about {x}.", "Translate {x} into Latin.", "Write a song about {x}.", "Write a program.", "Draw a picture of {x}.", "Play a game with me.",
           "Write an essay about {x}.", "Explain {x} to me.", "Give me a recipe for {x}.", "Tell me a joke.", "Write code for {x}.", "Make a plan for {x}.")  # fmt: skip
_CAN = "I can only tell stories, answer questions about a text, and do small sums."
_NO_TEXT = ("What is the capital of {x}?", "Who is {x}?", "Where is {x}?", "Where does {x} live?", "What is {x}?", "How old is {x}?", "Who is the king of {x}?",
            "What did {x} say?", "When was {x} founded?", "What is the weather like in {x}?", "Tell me about {x}.", "Who won the {n}?", "Where is the {n}?", "When is the {n}?", "Who invented the {n}?",
            "How many {n}s are there?", "Why is the {n} {a}?", "Who has the {n}?", "What is the {a} {n}?")
_STORY_ASKS = ("Tell me a story.", "Tell me a short story.", "Write a story.", "Please tell me a story.", "Can you tell me a story?", "A story, please.", "Make up a story.",
               "I want to hear a story.", "Write a short story for children.")
_STORY_ABOUT = ("Tell me a story about {t}.", "Write a [short |]story about {t}.", "Can you tell me a story about {t}?", "Please write a story about {t}.",
                "I would like a story about {t}.", "A story about {t}, please.", "Make up a story about {t}.")
REPEATS = ("Repeat this: {t}", "Say this again: {t}", "Copy this text: {t}", "Repeat after me: {t}", "Please repeat: {t}", "Write this once more: {t}", "Say: {t}")
NOTED = ("Noted.", "Thank you, I will remember that.", "I see.", "Good to know.")


def small_talk(rng: Rng) -> Turn:
    """A greeting, a thank-you, a question about the assistant, or one that no text answers."""
    style = rng.random()
    if style < 0.2:
        hello = rng.pick(_GREETINGS) + rng.pick(("!", ".", "", ", how are you?"))
        return Turn(hello, "The user greets me.", "Hello! How can I help you?")
    if style < 0.6:
        asks, thought, answers = rng.pick(_TALK)
        return Turn(rng.pick(asks), thought, rng.pick(answers))
    if style < 0.72:
        x = rng.pick((f"the {rng.pick(NOUNS)}", rng.pick(NOUNS), f"the {rng.pick(ADJECTIVES)} {rng.pick(NOUNS)}"))
        return Turn(render(rng, rng.pick(_CANNOT), {"x": x}), "I cannot do that.", _CAN)
    if style < 0.82:
        kind, options = rng.pick((("colours", COLOURS), ("animals", ANIMALS), ("foods", FOODS), ("things", OBJECTS)))
        count = rng.randint(2, 5)
        word = ("two", "three", "four", "five")[count - 2]
        asks = (f"Name {word} {kind}.", f"List {word} {kind}.", f"Tell me {word} {kind}.", f"Give me {word} {kind}.", f"Can you name {word} {kind}?")
        return Turn(rng.pick(asks), f"The user wants {word} {kind}.", ", ".join(rng.some(options, count)) + ".")
    question = render(rng, rng.pick(_NO_TEXT), {"x": name(rng, rng.pick(("country", "city", "person", "thing"))), "n": rng.pick(NOUNS), "a": rng.pick(ADJECTIVES)})
    return Turn(question, "The text says nothing about it.", "The text does not say.")


def repetition(rng: Rng, text: str = "") -> Turn:
    """A request to say something again."""
    text = text or " ".join(rng.pick((anything(rng), rng.pick(COLOURS), rng.pick(OBJECTS), rng.pick(ANIMALS))) for _ in range(rng.randint(1, 8)))
    return Turn(render(rng, rng.pick(REPEATS), {"t": text}), "I repeat what the user wrote.", text)


def story_request(rng: Rng, split: str = TRAIN) -> tuple[str, str, dict[str, str]]:
    """Return a request for a story, the thought, and a required part of the story: `hero`, `thing`, `animal` or nothing."""
    style = rng.random()
    if style < 0.35:
        return rng.pick(_STORY_ASKS), "The user wants a story.", {}
    if style < 0.6:
        animal = rng.pick(CREATURES if rng.chance(0.3) else ANIMALS)
        about, holds = capital(animal) if rng.chance(0.05) else "a " + animal, {"animal": animal}
    elif style < 0.8:
        hero = rng.pick(FIRST_NAMES[split])[0] if rng.chance(0.7) else name(rng, "person", split)
        about, holds = hero, {"hero": hero}
    else:
        thing = rng.pick(OBJECTS)
        about, holds = rng.pick(("a", "a lost", "an old")) + " " + thing, {"thing": thing}
    for vowel in "aeiou":
        about = about.replace(f"a {vowel}", f"an {vowel}") if about.startswith(f"a {vowel}") else about
    return render(rng, rng.pick(_STORY_ABOUT), {"t": about}), f"The user wants a story about {about}.", holds
