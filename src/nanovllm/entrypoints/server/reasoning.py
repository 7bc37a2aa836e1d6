"""Think blocks in the text of a reply: a splitter that works while the reply streams.

`nanovllm.chunks.thinking` finds think blocks by token id, to leave their KV out. Here the text decides, because not all models' tags are
single tokens. Both leave out the white space that chat templates put around the tags.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from nanovllm.entrypoints.server.tools.events import Content, Event, Markup, Reasoning
from nanovllm.errors import InvalidRequestError
from nanovllm.tokenizer.stream import held_back
from nanovllm.tokenizer.tokenizer import Tokenizer

MAX_SPACE = 8  # characters of white space before an opening tag


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """How a family of models marks its think block.

    Attributes:
        name: The name for `--reasoning-parser`.
        opening: The tag that opens the block. If it is a special token it must be shown as text (`Tokenizer.showing`), as must `closing`.
        closing: The tag that closes it.
    """

    name: str
    opening: str
    closing: str


REASONING_FORMATS: Mapping[str, ReasoningFormat] = MappingProxyType(
    {
        each.name: each
        for each in (
            ReasoningFormat(name="think", opening="<think>", closing="</think>"),  # Qwen3, DeepSeek-R1 and most others
            ReasoningFormat(name="mistral", opening="[THINK]", closing="[/THINK]"),  # Magistral
            ReasoningFormat(name="seed_oss", opening="<seed:think>", closing="</seed:think>"),
        )
    }
)


def reasoning_format(name: str) -> ReasoningFormat:
    """The format of this name.

    Raises:
        InvalidRequestError: There is none.
    """
    if name not in REASONING_FORMATS:
        raise InvalidRequestError(f"reasoning parser {name!r} is unknown; choose one of {', '.join(REASONING_FORMATS)}")
    return REASONING_FORMATS[name]


def reasoning_format_of(tokenizer: Tokenizer) -> ReasoningFormat | None:
    """The format whose closing tag the model's chat template mentions, or None."""
    source = tokenizer.templates.get("default", "")
    return next((each for each in REASONING_FORMATS.values() if each.closing in source), None)


def left_open(form: ReasoningFormat, prompt: str, continued: str = "") -> bool:
    """Whether a prompt has opened the block and left it open.

    Templates of models that always think end with the opening tag. With `enable_thinking=False` they end with an empty block, which is
    closed. A tag with words after it was quoted by a message, but for those of the message that the reply continues.

    Args:
        form: The format.
        prompt: The text of the prompt, or its end.
        continued: The text of the assistant's message that the reply continues.
    """
    if continued:
        return continued.rfind(form.opening) > continued.rfind(form.closing)
    return prompt.rstrip().endswith(form.opening)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReasoningSplitter:
    """Splits one reply into reasoning and content while it streams. A value: `push` returns the next one.

    A block is only at the beginning of the reply, so content may speak of the tags. The sources of all events are the reply's text. No more
    text is held than a tag and the white space before it. A reply that ends in the block is all reasoning.

    Attributes:
        form: The format.
        state: "before": only white space came so far. "opened": a tag came, and maybe line breaks. "inside": in the
            block. "closed": the other tag came, and maybe line breaks. "after": content.
        held: Text that may belong to a tag.
    """

    form: ReasoningFormat
    state: Literal["before", "opened", "inside", "closed", "after"] = "before"
    held: str = ""

    @staticmethod
    def of(form: ReasoningFormat, *, opened: bool = False) -> "ReasoningSplitter":
        """A splitter of a reply whose prompt has `opened` the block or not."""
        return ReasoningSplitter(form=form, state="opened" if opened else "before")

    def push(self, text: str) -> "tuple[ReasoningSplitter, list[Event]]":
        """Add text. Returns the splitter and the events that are now certain."""
        if not self.held and text:  # most pieces, in less time
            if self.state == "after":
                return self, [Content(text)]
            if self.state == "inside" and "\n" not in text and self.form.closing[0] not in text:
                return self, [Reasoning(text)]
        state, text, events = self.state, self.held + text, list[Event]()
        if state == "before":
            opening = self.form.opening
            space = len(text) - len(text.lstrip())
            if space <= MAX_SPACE and opening.startswith(text[space : space + len(opening)]):
                if len(text) < space + len(opening):
                    return ReasoningSplitter(form=self.form, state=state, held=text), []
                events.append(Markup(text[: space + len(opening)]))
                state, text = "opened", text[space + len(opening) :]
            else:
                state = "after"
        if state == "opened":
            text = _without_line_breaks(text, events)
            state = "inside" if text else state
        held = ""
        if state == "inside":
            closing = self.form.closing
            at = text.find(closing)
            if at < 0:
                end = len(text) - held_back(text, (closing, "\n" + closing))
                text, held = text[:end], text[end:]
                events += [Reasoning(text)] if text else []
            else:
                end = at - text.endswith("\n", 0, at)
                events += [Reasoning(text[:end])] if end else []
                events.append(Markup(text[end : at + len(closing)]))
                state, text = "closed", text[at + len(closing) :]
        if state == "closed":
            text = _without_line_breaks(text, events)
            state = "after" if text else state
        if state == "after" and text:
            events.append(Content(text))
        return ReasoningSplitter(form=self.form, state=state, held=held), events

    def end(self) -> list[Event]:
        """The last events, if the reply ends here."""
        if not self.held:
            return []
        return [Reasoning(self.held) if self.state == "inside" else Content(self.held)]


def _without_line_breaks(text: str, events: list[Event]) -> str:
    """The text without the line breaks that it begins with, which belong to the tag before it."""
    rest = text.lstrip("\n")
    if len(rest) < len(text):
        events.append(Markup(text[: len(text) - len(rest)]))
    return rest
