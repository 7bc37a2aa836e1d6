"""What replies of nanovllm have beyond OpenAI's: think blocks, and what was reused."""

from collections.abc import Mapping
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration

PROVIDER = "nanovllm"
REASONING = "reasoning_content"


def marked(generation: ChatGeneration, message: Mapping[str, Any], told: Mapping[str, Any] | None) -> None:
    """Add to a generation what its reply, or a piece of it, has beyond OpenAI's fields.

    The think block goes to `additional_kwargs["reasoning_content"]`, from where LangChain makes a block of type `reasoning` of it.

    Args:
        generation: The generation that LangChain's base class made of the reply.
        message: The reply's message, or the delta of an event.
        told: The field `nanovllm` of the answer or the event.

    Examples:
        >>> from langchain_core.messages import AIMessage
        >>> generation = ChatGeneration(message=AIMessage("65"))
        >>> marked(generation, {"reasoning_content": "27 + 38"}, {"chunks": ["facts"], "exact": True})
        >>> generation.message.content_blocks[0], generation.message.response_metadata["nanovllm"]["exact"]
        ({'type': 'reasoning', 'reasoning': '27 + 38'}, True)
    """
    if isinstance(message.get(REASONING), str):
        generation.message.additional_kwargs[REASONING] = message[REASONING]
    generation.message.response_metadata["model_provider"] = PROVIDER
    if told:
        generation.message.response_metadata["nanovllm"] = dict(told)


def reasoning_of(message: BaseMessage) -> str | None:
    """The think block of an earlier reply, so that the template gets it again. None for other messages, and if there is none.

    Examples:
        >>> from langchain_core.messages import AIMessage
        >>> reasoning_of(AIMessage("65", additional_kwargs={"reasoning_content": "27 + 38"}))
        '27 + 38'
        >>> reasoning_of(AIMessage([{"type": "reasoning", "reasoning": "27 + 38"}, {"type": "text", "text": "65"}]))
        '27 + 38'
    """
    if not isinstance(message, AIMessage):
        return None
    if isinstance(kept := message.additional_kwargs.get(REASONING), str):
        return kept
    blocks = message.content if isinstance(message.content, list) else []
    parts = [
        block["reasoning"] for block in blocks if isinstance(block, dict) and block.get("type") == "reasoning" and "reasoning" in block
    ]
    return "".join(parts) or None
