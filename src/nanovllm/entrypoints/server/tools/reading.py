"""How a reply is read while it streams: content up to a marker, then the phases of a format.

A `Reading` is changed in place, but only by the one call that has copied it, so that parsers are values. A phase is a method that reads
`text` from `at` on. It may choose the next phase. It returns False if it needs more text; what it has left is read again with the next
piece, so it leaves no more than a marker. Every character is read a bounded number of times.
"""

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any, ClassVar

from nanovllm.entrypoints.server.chat_limits import MAX_CALLS, MAX_HELD, MAX_LEAD
from nanovllm.entrypoints.server.tools.events import ArgumentsDelta, CallBegins, CallEnds, Content, Event, Markup
from nanovllm.entrypoints.server.tools.json_scan import SPACE
from nanovllm.tokenizer.stream import held_back

Rope = tuple[Any, str] | None  # parts of a text as a linked list, newest first: (older, part)


def joined(rope: Rope) -> str:
    """The text of a rope."""
    parts = list[str]()
    while rope is not None:
        rope, part = rope
        parts.append(part)
    return "".join(reversed(parts))


@dataclass(slots=True, eq=False, repr=False)
class Reading:
    """What all formats share. Without markers everything is content.

    Attributes:
        tools: The JSON schema of each tool's arguments, by the tool's name.
        most: How many calls are read; further ones are content.
        phase: The phase; None: the first one.
        rest: Text that was not read yet.
        text: While text is read: the whole of it.
        at: How far it has been read.
        found: Where each marker is next.
        held: Text that was read and belongs to no event yet.
        num_held: Its characters.
        lead: White space before the first content or after a call, which may only separate calls; None after other content.
        num_begun: The number of calls so far.
        open: Whether the last call has not ended.
        tail: Whether the held text follows a call, as a part of the format.
        events: The events since the call began that reads.
    """

    markers: ClassVar[tuple[str, ...]] = ()
    tools: Mapping[str, Mapping[str, Any]]
    most: int = MAX_CALLS
    phase: Callable[[Any], bool] | None = None
    rest: str = ""
    text: str = ""
    at: int = 0
    found: dict[str, int] = field(default_factory=dict)
    held: Rope = None
    num_held: int = 0
    lead: str | None = ""
    num_begun: int = 0
    open: bool = False
    tail: bool = False
    events: list[Event] = field(default_factory=list)

    # What parsers call

    def after(self, text: str) -> "tuple[Reading, list[Event]]":
        """The reading after more text, and the events of it."""
        new = copy(self)
        new.text, new.at, new.found, new.events = self.rest + text, 0, {}, []
        while new.at < len(new.text) and (new.first() if new.phase is None else new.phase(new)):
            pass
        new.rest, new.text = new.text[new.at :], ""
        return new, new.events

    def last(self) -> list[Event]:
        """The events if the reply ends here."""
        new = copy(self)
        new.events = []
        if new.open:
            new.end_call(complete=False)
            new.lead = None
        text = new.release() + new.rest
        if new.tail and new.phase != type(new).content:
            new.events += [Markup(text)] if text else []
        else:
            new.say(text)
        if new.lead:
            new.events.append(Markup(new.lead) if new.num_begun else Content(new.lead))
        return new.events

    # Phases

    def first(self) -> bool:
        """The beginning of the reply."""
        self.phase = type(self).content
        return True

    def content(self) -> bool:
        """Content, up to a marker."""
        for marker in self.markers:
            if self.found.get(marker, -1) < self.at:
                found = self.text.find(marker, self.at)
                self.found[marker] = len(self.text) if found < 0 else found
        marker = min(self.markers, key=self.found.__getitem__, default="")
        stop = self.found.get(marker, len(self.text))
        if stop == len(self.text) or self.num_begun >= self.most:
            longest = max(map(len, self.markers), default=0)
            stop = len(self.text) - held_back(self.text[max(self.at, len(self.text) - longest) :], self.markers)
            self.say(self.text[self.at : stop])
            self.at = stop
            return False
        self.say(self.text[self.at : stop])
        self.at = stop + len(marker)
        self.hold((self.lead or "") + marker)
        self.lead, self.tail = None, False
        self.marked(marker)
        return True

    def marked(self, marker: str) -> None:
        """Choose the phase after a marker."""

    # What phases do

    def end_with(self, tag: str) -> bool:
        """White space and a closing tag, then content. What comes in place of the tag is content, too."""
        if not self.skip_space():
            return self.more()
        match self.literal(tag):
            case None:
                return False
            case "":
                return self.refuse()
        self.mark()
        self.phase = type(self).content
        return True

    def say(self, text: str) -> None:
        """Give text out as content."""
        if self.lead is not None:
            text = self.lead + text
            if len(text) <= MAX_LEAD and not text.strip(SPACE):
                self.lead = text
                return
            self.lead = None
        if text:
            self.events.append(Content(text))

    def hold(self, text: str) -> None:
        """Hold text that has been read."""
        if text:
            self.held, self.num_held = (self.held, text), self.num_held + len(text)

    def release(self) -> str:
        """The text that was held, which is held no more."""
        text, self.held, self.num_held = joined(self.held), None, 0
        return text

    def refuse(self) -> bool:
        """What is held is content after all, and so is what follows."""
        if self.open:
            self.end_call(complete=False)
            self.lead = None
        self.tail = False
        self.say(self.release())
        self.phase = type(self).content
        return True

    def mark(self) -> None:
        """What is held belongs to the format."""
        text = self.release()
        if text:
            self.events.append(Markup(text))

    def takes(self, name: str) -> bool:
        """Whether a call to this tool can begin."""
        return name in self.tools and self.num_begun < self.most

    def begin_call(self, name: str) -> None:
        """Begin a call, whose source is what was held."""
        self.events.append(CallBegins(self.num_begun, name, self.release()))
        self.num_begun, self.open = self.num_begun + 1, True

    def argue(self, text: str, source: str) -> None:
        """Give out more of the arguments."""
        if text or source:
            self.events.append(ArgumentsDelta(self.num_begun - 1, text, source))

    def end_call(self, *, complete: bool, source: str = "") -> None:
        """End the call."""
        self.events.append(CallEnds(self.num_begun - 1, complete, source))
        self.open, self.tail, self.lead = False, complete, ""

    def skip_space(self) -> str:
        """Hold white space. Returns the character after it; "" if there is none yet, or if too much is held."""
        end = min(len(self.text), self.at + MAX_HELD - self.num_held)
        start = at = self.at
        while at < end and self.text[at] in SPACE:
            at += 1
        self.hold(self.text[start:at])
        self.at = at
        return self.text[at : at + 1] if at < end else ""

    def more(self) -> bool:
        """The answer of a phase that needs more text: if that would be held with too much, the text is refused."""
        return self.refuse() if self.num_held >= MAX_HELD else False

    def literal(self, *literals: str) -> str | None:
        """Hold the one of some literals that comes next. Returns "" if none of them comes, None if that is not certain yet."""
        for literal in literals:
            if self.text.startswith(literal, self.at):
                self.at += len(literal)
                self.hold(literal)
                return literal
        left = self.text[self.at : self.at + max(map(len, literals))]
        return None if any(literal.startswith(left) for literal in literals) else ""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ToolParser:
    """Reads the tool calls of one reply while it streams. A value: `push` returns the next one.

    Time is linear in the text, however it is divided. Content is given out at once, but for what may become a marker, and but for at most
    64 characters of white space that may only separate calls. A call is held until its tool is known. What turns out not to be a
    call is content, in order.

    Attributes:
        reading: How far the reply has been read.
    """

    reading: Reading

    def push(self, text: str) -> "tuple[ToolParser, list[Event]]":
        """Add text. Returns the parser and the events that are now certain."""
        reading, events = self.reading.after(text)
        return ToolParser(reading), events

    def end(self) -> list[Event]:
        """The last events, if the reply ends here."""
        return self.reading.last()
