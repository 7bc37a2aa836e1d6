"""The formats of tool calls by name, and which one a model has."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from nanovllm.entrypoints.server.chat_limits import MAX_CALLS
from nanovllm.entrypoints.server.tools import hermes, llama3, mistral, qwen3_coder
from nanovllm.entrypoints.server.tools.reading import Reading, ToolParser
from nanovllm.errors import InvalidRequestError
from nanovllm.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """A format of tool calls.

    Attributes:
        name: Its name for `--tool-parser`.
        markers: The texts that mark calls. Those that are special tokens of a model must be shown as text (`Tokenizer.showing`).
        reading: How it is read.
        id_length: The characters of a call's id, letters and digits alone, if the model's templates demand a length.
    """

    name: str
    markers: tuple[str, ...]
    reading: type[Reading]
    id_length: int | None = None

    def parser(self, tools: Mapping[str, Mapping[str, Any]], *, most: int = MAX_CALLS) -> ToolParser:
        """A parser of one reply.

        Args:
            tools: The JSON schema of each tool's arguments, by name. Calls of other tools are content.
            most: How many calls are read. 1 if the request says `parallel_tool_calls: false`.
        """
        return ToolParser(self.reading(tools=tools, most=min(most, MAX_CALLS)))


FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {
        each.name: each
        for each in (
            ToolFormat(name="hermes", markers=(hermes.OPENING, hermes.CLOSING), reading=hermes.HermesReading),
            ToolFormat(name="qwen3_coder", markers=(hermes.OPENING, hermes.CLOSING), reading=qwen3_coder.Qwen3CoderReading),
            ToolFormat(name="llama3", markers=(llama3.TAG,), reading=llama3.Llama3Reading),
            ToolFormat(
                name="mistral", markers=(mistral.MARKER, mistral.ARGS, mistral.CALL_ID), reading=mistral.MistralReading, id_length=9
            ),
        )
    }
)


def tool_format(name: str) -> ToolFormat:
    """The format of this name.

    Raises:
        InvalidRequestError: There is none.
    """
    if name not in FORMATS:
        raise InvalidRequestError(f"tool parser {name!r} is unknown; choose one of {', '.join(FORMATS)}")
    return FORMATS[name]


def tool_format_of(tokenizer: Tokenizer) -> ToolFormat | None:
    """The format that the model's chat template asks for, or None if it mentions none that is known here.

    A template shows its format where it explains it to the model and where it writes the calls of earlier messages.
    """
    source = tokenizer.templates.get("tool_use", tokenizer.templates.get("default", ""))
    if qwen3_coder.FUNCTION in source and qwen3_coder.PARAMETER in source:
        return FORMATS["qwen3_coder"]
    if mistral.MARKER in source:
        return FORMATS["mistral"]
    if hermes.OPENING in source and '"arguments' in source.replace("\\", ""):
        return FORMATS["hermes"]
    if llama3.TAG in source or ("ipython" in source and '"parameters": ' in source.replace("\\", "")):
        return FORMATS["llama3"]
    return None
