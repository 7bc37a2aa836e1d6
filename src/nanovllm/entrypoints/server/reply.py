"""A reply while it streams: its text divided into reasoning, content and tool calls."""

from dataclasses import dataclass

from nanovllm.entrypoints.server.reasoning import ReasoningSplitter
from nanovllm.entrypoints.server.tools.events import Content, Event
from nanovllm.entrypoints.server.tools.reading import ToolParser


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplyParser:
    """Divides the text of one reply. A value: `push` returns the next one. The sources of all events are the reply's text.

    Attributes:
        splitter: Finds the think block; None: there is none.
        tools: Finds tool calls in the content; None: there are none.
    """

    splitter: ReasoningSplitter | None = None
    tools: ToolParser | None = None

    def push(self, text: str) -> "tuple[ReplyParser, list[Event]]":
        """Add text. Returns the parser and the events that are now certain."""
        splitter, events = (None, _content(text)) if self.splitter is None else self.splitter.push(text)
        tools, found = (None, events) if self.tools is None else self._called(events)
        if splitter is self.splitter and tools is self.tools:
            return self, found
        return ReplyParser(splitter=splitter, tools=tools), found

    def end(self) -> list[Event]:
        """The last events, if the reply ends here."""
        tools, found = self._called([] if self.splitter is None else self.splitter.end())
        return found + ([] if tools is None else tools.end())

    def _called(self, events: list[Event]) -> tuple[ToolParser | None, list[Event]]:
        """The events with those of tool calls in place of content."""
        tools, found = self.tools, list[Event]()
        for event in events:
            if tools is not None and isinstance(event, Content):
                tools, more = tools.push(event.source)
                found += more
            else:
                found.append(event)
        return tools, found


def _content(text: str) -> list[Event]:
    return [Content(text)] if text else []
