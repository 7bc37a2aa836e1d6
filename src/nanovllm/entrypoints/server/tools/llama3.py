"""The format of Llama 3.1 to 3.3: `{"name": ..., "parameters": {...}}`, several separated by `;`, maybe after `<|python_tag|>`.

Described in https://github.com/meta-llama/llama-models/blob/main/models/llama3_1/prompt_format.md and in vLLM's page on tool calling.
"""

from dataclasses import dataclass

from nanovllm.entrypoints.server.tools.json_calls import JsonReading

TAG = "<|python_tag|>"


@dataclass(slots=True, eq=False, repr=False)
class Llama3Reading(JsonReading):
    """Reads the format. An object without the tag is a call only where the reply begins, because content may hold JSON."""

    markers = (TAG,)

    def first(self) -> bool:
        """White space, then a call or content."""
        char = self.skip_space()
        if not char:
            return self.more()
        return self.begin_object() if char == "{" else self.refuse()

    def marked(self, marker: str) -> None:
        """An object comes."""
        self.phase = type(self).opening

    def closing(self) -> bool:
        """White space, and a semicolon if another call follows."""
        char = self.skip_space()
        if not char:
            return self.more()
        if self.literal(";") == "":
            return self.refuse()
        self.phase = type(self).opening
        return True
