"""What a reply consists of, as events. The `source` of all events, in order, is the reply's text: nothing is lost."""

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    source: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of a think block."""

    source: str


@dataclass(frozen=True, slots=True)
class Markup:
    """Text that belongs to the format, such as a tag, and to nobody's content."""

    source: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """A call to a tool begins.

    Attributes:
        index: The call's place among those of the reply.
        name: The tool, one of those of the request.
        source: The text that has been read for it.
    """

    index: int
    name: str
    source: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of a call's arguments.

    Attributes:
        index: The call.
        text: A part of a JSON object. The parts of a complete call together are the object.
        source: The text that has been read for it, which differs in formats whose arguments are not JSON.
    """

    index: int
    text: str
    source: str


@dataclass(frozen=True, slots=True)
class CallEnds:
    """A call ends.

    Attributes:
        index: The call.
        complete: Whether its arguments are a whole JSON object. If not, the reply ended or went wrong within them, and what follows them
            is content.
        source: The text that has been read for it.
    """

    index: int
    complete: bool
    source: str = ""


Event = Content | Reasoning | Markup | CallBegins | ArgumentsDelta | CallEnds


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A complete call: the tool's name, and the arguments as JSON."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A whole reply.

    Attributes:
        content: The text for the user. It includes the text of calls that are not complete.
        reasoning: The text of the think block.
        calls: The complete calls.
    """

    content: str
    reasoning: str
    calls: tuple[Call, ...]


def whole_reply(events: Iterable[Event]) -> Reply:
    """The reply that all events of a stream make."""
    content, reasoning, calls = list[str](), list[str](), list[Call]()
    name, sources, arguments = "", list[str](), list[str]()
    for event in events:
        match event:
            case Content():
                content.append(event.source)
            case Reasoning():
                reasoning.append(event.source)
            case CallBegins():
                name, sources, arguments = event.name, [event.source], []
            case ArgumentsDelta():
                sources.append(event.source)
                arguments.append(event.text)
            case CallEnds() if event.complete:
                calls.append(Call(name=name, arguments="".join(arguments)))
            case CallEnds():
                content += [*sources, event.source]
            case Markup():
                pass
    return Reply(content="".join(content), reasoning="".join(reasoning), calls=tuple(calls))


def merged(events: Iterable[Event]) -> list[Event]:
    """The events with neighbours of one kind joined, so that they do not depend on the pieces in which the text came."""
    joined = list[Event]()
    for event in events:
        last = joined[-1] if joined else None
        match last, event:
            case (Content(), Content()) | (Reasoning(), Reasoning()) | (Markup(), Markup()):
                joined[-1] = replace(last, source=last.source + event.source)
            case ArgumentsDelta(), ArgumentsDelta() if last.index == event.index:
                joined[-1] = replace(last, text=last.text + event.text, source=last.source + event.source)
            case _:
                joined.append(event)
    return joined
