"""The formats of Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, and since version 11 of its tokenizers, for each call,
`[TOOL_CALLS]name[ARGS]{...}` or `[TOOL_CALLS]name[CALL_ID]id[ARGS]{...}`.

Described in mistral-common, https://github.com/mistralai/mistral-common (`tokens/tokenizers/instruct.py`).
"""

from dataclasses import dataclass

from nanovllm.entrypoints.server.chat_limits import MAX_NAME
from nanovllm.entrypoints.server.tools.json_calls import JsonReading

MARKER, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


@dataclass(slots=True, eq=False, repr=False)
class MistralReading(JsonReading):
    """Reads both formats.

    Attributes:
        name: The tool of a call in the newer format.
    """

    markers = (MARKER,)
    name: str = ""

    def marked(self, marker: str) -> None:
        """A list or a name comes."""
        self.phase = type(self).listed

    def listed(self) -> bool:
        """White space, then a list or a name."""
        char = self.skip_space()
        if not char:
            return self.more()
        self.phase = type(self).opening if self.literal("[") else type(self).naming
        return True

    def closing(self) -> bool:
        """White space, and a comma or the end of the list."""
        if not self.skip_space():
            return self.more()
        match self.literal(",", "]"):
            case ",":
                self.phase = type(self).opening
            case "]":
                self.mark()
                self.phase = type(self).content
            case _:
                return self.refuse()
        return True

    def naming(self) -> bool:
        """A name, up to a bracket."""
        word = self.up_to_bracket()
        if word is None:
            return False
        self.name, self.phase = word, type(self).separating
        return True if self.takes(word) else self.refuse()

    def separating(self) -> bool:
        """After the name or the id: a marker, or the arguments."""
        match self.literal(ARGS, CALL_ID):
            case None:
                return False
            case "":
                return self.begin_arguments(self.name) if self.text[self.at] == "{" else self.refuse()
            case marker:
                self.phase = type(self).arguing if marker == ARGS else type(self).identified
        return True

    def identified(self) -> bool:
        """The id of a call, up to a bracket. It is not kept: the server makes ids of its own."""
        word = self.up_to_bracket()
        self.phase = type(self).identified if word is None else type(self).separating
        return word is not None

    def arguing(self) -> bool:
        """White space, then the arguments."""
        char = self.skip_space()
        if not char:
            return self.more()
        return self.begin_arguments(self.name) if char == "{" else self.refuse()

    def up_to_bracket(self) -> str | None:
        """Hold what comes up to a bracket, which is no more than a name has. Returns None if no bracket is there yet."""
        piece = self.text[self.at : self.at + MAX_NAME + 1]
        end = min((at for at in map(piece.find, "[{") if at >= 0), default=len(piece))
        if end == len(piece) <= MAX_NAME:
            return None
        self.at += end
        self.hold(piece[:end])
        return piece[:end]
