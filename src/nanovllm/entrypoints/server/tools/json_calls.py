"""Calls that are JSON objects: `{"name": ..., "arguments": {...}}`, with `parameters` in place of `arguments` in some formats."""

import json
from dataclasses import dataclass, field
from typing import NamedTuple

from nanovllm.entrypoints.server.chat_limits import MAX_HELD, MAX_WORD
from nanovllm.entrypoints.server.tools.json_scan import Found, Scan
from nanovllm.entrypoints.server.tools.reading import Reading, Rope, joined

ARGUMENTS = frozenset({"arguments", "parameters"})
IGNORED = frozenset({"type", "id"})  # `"type": "function"` in Llama's form, and ids that a model repeats from its prompt


class ObjectSoFar(NamedTuple):
    """What is known of the object that is being read.

    Attributes:
        scan: The scanner.
        opened: Whether it goes on after `Found.KEY` or `Found.VALUE`.
        key: The key whose value comes; "" while a key is read.
        keys: The keys so far, arguments by one name.
        word: The key or name that is being read, as JSON.
        name: The tool.
        before: If the arguments came before the name: what was held before them.
        arguments: And they themselves.
        done: Whether the call has ended.
        bare: Whether the object is the arguments themselves.
    """

    scan: Scan = Scan()
    opened: bool = False
    key: str = ""
    keys: frozenset[str] = frozenset()
    word: str | None = None
    name: str = ""
    before: Rope = None
    arguments: Rope = None
    done: bool = False
    bare: bool = False


@dataclass(slots=True, eq=False, repr=False)
class JsonReading(Reading):
    """The phases of formats whose calls are objects, each after white space.

    Attributes:
        so_far: The object that is being read.
    """

    so_far: ObjectSoFar = field(default_factory=ObjectSoFar)

    def opening(self) -> bool:
        """White space, then an object."""
        char = self.skip_space()
        if not char:
            return self.more()
        return self.begin_object() if char == "{" else self.refuse()

    def closing(self) -> bool:
        """What follows an object."""
        raise NotImplementedError

    def begin_object(self) -> bool:
        """Read the object that begins here."""
        self.so_far, self.phase = ObjectSoFar(), type(self).object
        return True

    def begin_arguments(self, name: str) -> bool:
        """Read the arguments of a call that begin here, and whose tool is known."""
        self.begin_call(name)
        self.so_far, self.phase = ObjectSoFar(bare=True), type(self).object
        return True

    def object(self) -> bool:
        """The inside of an object."""
        o, start = self.so_far, self.at
        room = len(self.text) if self.open else MAX_HELD - self.num_held
        if o.word is not None:
            room = min(room, MAX_WORD - len(o.word))
        if room <= 0:
            return self.refuse()
        scan, self.at, found = o.scan.run(self.text, start, min(len(self.text), start + room), opened=o.opened)
        piece = self.text[start : self.at]
        self.argue(piece, piece) if self.open else self.hold(piece)
        word = None if o.word is None else o.word + piece
        o = o._replace(scan=scan, opened=found in (Found.KEY, Found.VALUE), word=word)
        self.so_far = o
        if o.bare:
            if found is Found.END:
                self.end_call(complete=True)
                self.phase = type(self).content
            return self.refuse() if found is Found.BAD else True
        match found:
            case Found.BAD:
                return self.refuse()
            case Found.KEY:
                self.so_far = o._replace(key="", word="")
            case Found.STRING if word is not None:
                self.so_far = o._replace(word=None)
                return self.named(json.loads(word)) if o.key == "name" else self.keyed(json.loads(word))
            case Found.VALUE:
                return self.valued(self.text[self.at])
            case Found.CLOSED if o.key == "arguments":
                self.argued()
            case Found.END:
                return self.ended()
        return True

    def release(self) -> str:
        """With arguments that came before the name."""
        o, self.so_far = self.so_far, self.so_far._replace(before=None, arguments=None)
        return joined(o.before) + joined(o.arguments) + Reading.release(self)

    def keyed(self, key: str) -> bool:
        """A key was read."""
        o, key = self.so_far, "arguments" if key in ARGUMENTS else key
        if key in o.keys or key not in {"name", "arguments", *IGNORED}:
            return self.refuse()
        self.so_far = o._replace(key=key, keys=o.keys | {key})
        return True

    def valued(self, char: str) -> bool:
        """A value begins."""
        o = self.so_far
        if o.key == "name":
            self.so_far = o._replace(word="")
            return True if char == '"' else self.refuse()
        if o.key == "arguments":
            if char != "{":
                return self.refuse()
            if o.name:
                self.begin_call(o.name)
            else:
                self.so_far, self.held = o._replace(before=self.held), None
        return True

    def named(self, name: str) -> bool:
        """The name was read."""
        if not self.takes(name):
            return self.refuse()
        self.so_far = self.so_far._replace(name=name)
        if self.so_far.arguments is not None:
            self.whole_call()
        return True

    def argued(self) -> None:
        """The arguments were read."""
        if self.open:
            self.end_call(complete=True)
            self.so_far = self.so_far._replace(done=True)
        else:
            self.so_far, self.held = self.so_far._replace(arguments=self.held), None

    def ended(self) -> bool:
        """The object was read. One with a name alone is a call without arguments."""
        if not self.so_far.name:
            return self.refuse()
        if not self.so_far.done:
            self.whole_call()
        self.mark()
        self.so_far, self.phase = ObjectSoFar(), type(self).closing
        return True

    def whole_call(self) -> None:
        """Give out the call whose arguments came before its name, or that has none."""
        o, after = self.so_far, ""
        if o.arguments is not None:
            after, arguments = joined(self.held), joined(o.arguments)
            self.held, self.so_far = o.before, o._replace(before=None, arguments=None)
        else:
            arguments = ""
        self.begin_call(o.name)
        self.argue(arguments or "{}", arguments)
        self.end_call(complete=True)
        self.hold(after)
        self.so_far = self.so_far._replace(done=True)
