"""A model's tokenizer as a server needs it, and how its replies are read: tool calls and think blocks."""

from dataclasses import dataclass

from nanovllm.entrypoints.server.reasoning import ReasoningFormat, reasoning_format, reasoning_format_of
from nanovllm.entrypoints.server.tools.formats import ToolFormat, tool_format, tool_format_of
from nanovllm.tokenizer.tokenizer import Tokenizer

AUTO, NONE = "auto", "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyFormats:
    """How the replies of a model are read.

    Attributes:
        tools: The format of tool calls, or None.
        reasoning: The format of think blocks, or None.
    """

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    @staticmethod
    def of(tokenizer: Tokenizer | None, tool_parser: str = AUTO, reasoning_parser: str = AUTO) -> "ReplyFormats":
        """The formats of these names, or those that the model's chat template tells.

        Raises:
            InvalidRequestError: A name is unknown.
        """
        tools = reasoning = None
        if tool_parser not in (AUTO, NONE):
            tools = tool_format(tool_parser)
        elif tokenizer is not None and tool_parser == AUTO:
            tools = tool_format_of(tokenizer)
        if reasoning_parser not in (AUTO, NONE):
            reasoning = reasoning_format(reasoning_parser)
        elif tokenizer is not None and reasoning_parser == AUTO:
            reasoning = reasoning_format_of(tokenizer)
        return ReplyFormats(tools=tools, reasoning=reasoning)

    def shown(self, tokenizer: Tokenizer) -> Tokenizer:
        """The tokenizer with the marks of these formats as text, also where they are special tokens."""
        marks = [] if self.tools is None else [*self.tools.markers]
        marks += [] if self.reasoning is None else [self.reasoning.opening, self.reasoning.closing]
        return tokenizer.showing(marks)
