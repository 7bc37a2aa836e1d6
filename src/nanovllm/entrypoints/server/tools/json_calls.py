"""Calls that are JSON objects: `{"name": ..., "arguments": {...}}`, with `parameters` in place of `arguments` in some formats."""

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass

from nanovllm.entrypoints.server.chat_limits import MAX_HELD, MAX_WORD
from nanovllm.entrypoints.server.tools.json_scan import Found, Scan
from nanovllm.entrypoints.server.tools.reading import Reading, Rope, joined

BEGIN = Scan()
ARGUMENTS = frozenset({"arguments", "parameters"})
KEYS = frozenset({"name", "arguments", "type", "id"})  # `"type": "function"` in Llama's form, and ids that a model repeats from its prompt


@dataclass(slots=True, eq=False, repr=False)
class JsonReading(Reading, ABC):
    """The phases of formats whose calls are objects, each after white space.

    Attributes:
        scan: The scanner of the object that is being read.
        opened: Whether it goes on after `Found.KEY` or `Found.VALUE`.
        key: The key whose value comes; "" while a key is read.
        keys: The keys so far, arguments by one name.
        word: The key or name that is being read, as JSON.
        tool: The tool, once its name was read.
        before: If the arguments came before the name: what was held before them.
        arguments: And they themselves.
        done: Whether the call has ended.
        bare: Whether the object is the arguments themselves.
    """

    scan: Scan = BEGIN
    opened: bool = False
    key: str = ""
    keys: frozenset[str] = frozenset()
    word: str | None = None
    tool: str = ""
    before: Rope = None
    arguments: Rope = None
    done: bool = False
    bare: bool = False

    def opening(self) -> bool:
        """White space, then an object."""
        char = self.skip_space()
        if not char:
            return self.more()
        return self.begin_object() if char == "{" else self.refuse()

    @abstractmethod
    def closing(self) -> bool:
        """What follows an object."""

    def begin_object(self, *, bare: bool = False) -> bool:
        """Read the object that begins here."""
        self.scan, self.opened, self.key, self.keys, self.word = BEGIN, False, "", frozenset(), None
        self.tool, self.before, self.arguments, self.done, self.bare = "", None, None, False, bare
        self.phase = type(self).object
        return True

    def begin_arguments(self, name: str) -> bool:
        """Read the arguments of a call that begin here, and whose tool is known."""
        self.begin_call(name)
        return self.begin_object(bare=True)

    def object(self) -> bool:
        """The inside of an object."""
        start, end = self.at, len(self.text)
        if not self.open:
            room = MAX_HELD - self.num_held if self.word is None else min(MAX_HELD - self.num_held, MAX_WORD - len(self.word))
            if room <= 0:
                return self.refuse()
            end = min(end, start + room)
        self.scan, self.at, found = self.scan.run(self.text, start, end, opened=self.opened)
        self.opened = False
        piece = self.text[start : self.at]
        if self.open:
            self.argue(piece, piece)
        else:
            self.hold(piece)
            if self.word is not None:
                self.word += piece
        if found is Found.MORE:
            return True
        if found is Found.BAD:
            return self.refuse()
        if self.bare:
            if found is Found.END:
                self.end_call(complete=True)
                self.phase = type(self).content
            self.opened = found in (Found.KEY, Found.VALUE)
            return True
        if found is Found.KEY:
            self.key, self.word, self.opened = "", "", True
        elif found is Found.STRING:
            word, self.word = self.word, None
            if word is not None:
                return self.named(json.loads(word)) if self.key == "name" else self.keyed(json.loads(word))
        elif found is Found.VALUE:
            self.opened = True
            return self.valued(self.text[self.at])
        elif found is Found.END:
            return self.ended()
        elif self.key == "arguments":
            self.argued()
        return True

    def release(self) -> str:
        """With arguments that came before the name."""
        earlier, self.before, self.arguments = joined(self.before) + joined(self.arguments), None, None
        return earlier + Reading.release(self)

    def keyed(self, key: str) -> bool:
        """A key was read."""
        key = "arguments" if key in ARGUMENTS else key
        if key in self.keys or key not in KEYS:
            return self.refuse()
        self.key, self.keys = key, self.keys | {key}
        return True

    def valued(self, char: str) -> bool:
        """A value begins."""
        if self.key == "name":
            self.word = ""
            return True if char == '"' else self.refuse()
        if self.key == "arguments":
            if char != "{":
                return self.refuse()
            if self.tool:
                self.begin_call(self.tool)
            else:
                self.before, self.held = self.held, None
        return True

    def named(self, name: str) -> bool:
        """The name was read."""
        if not self.takes(name):
            return self.refuse()
        self.tool = name
        if self.arguments is not None:
            self.whole_call()
        return True

    def argued(self) -> None:
        """The arguments were read."""
        if self.open:
            self.end_call(complete=True)
            self.done = True
        else:
            self.arguments, self.held = self.held, None

    def ended(self) -> bool:
        """The object was read. One with a name alone is a call without arguments."""
        if not self.tool:
            return self.refuse()
        if not self.done:
            self.whole_call()
        self.mark()
        self.phase = type(self).closing
        return True

    def whole_call(self) -> None:
        """Give out the call whose arguments came before its name, or that has none."""
        after, arguments = "", joined(self.arguments)
        if arguments:
            after, self.held, self.before, self.arguments = joined(self.held), self.before, None, None
        self.begin_call(self.tool)
        self.argue(arguments or "{}", arguments)
        self.end_call(complete=True)
        self.hold(after)
        self.done = True
