"""The format of Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as often as there are calls.

Described in the model card of NousResearch/Hermes-2-Pro-Llama-3-8B and in the chat templates of Qwen2.5 and Qwen3.
"""

from dataclasses import dataclass

from nanovllm.entrypoints.server.tools.json_calls import JsonReading

OPENING, CLOSING = "<tool_call>", "</tool_call>"


@dataclass(slots=True, eq=False, repr=False)
class HermesReading(JsonReading):
    """Reads the format."""

    markers = (OPENING,)

    def marked(self, marker: str) -> None:
        """An object comes."""
        self.phase = type(self).opening

    def closing(self) -> bool:
        """White space and the closing tag. A call whose tag is missing is one all the same."""
        return self.end_with(CLOSING)
