"""The input of `/v1/responses`: any list of items becomes messages, or is refused with the path of the fault."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from nanovllm.entrypoints.server.fields import InvalidParamError
from nanovllm.entrypoints.server.input_items import input_messages

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
PART = st.fixed_dictionaries({"type": st.sampled_from(["input_text", "output_text", "reasoning_text", "input_image"]), "text": TEXTS})
ITEM = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning", "item_reference"]),
        "role": st.sampled_from(["user", "assistant", "system", "developer", "tool"]),
        "content": TEXTS | st.lists(PART, max_size=2) | st.none(),
        "summary": st.lists(PART, max_size=2),
        "call_id": TEXTS,
        "name": TEXTS,
        "arguments": st.sampled_from(["{}", '{"city": "Zürich"}', "[]", ""]),
        "output": TEXTS | st.lists(PART, max_size=2),
    },
)


@given(value=st.lists(ITEM | TEXTS, max_size=6) | ITEM | TEXTS, instructions=st.none() | TEXTS)
def test_any_input_is_read_or_refused_with_a_path(value: Any, instructions: str | None):
    try:
        messages = input_messages(value, instructions)
    except InvalidParamError as error:
        assert error.param.startswith("input") and str(error).startswith(error.param)
        return
    assert messages[-1]["role"] != "assistant"
    assert all(isinstance(message["content"], str) for message in messages)
    given_calls = sum(item.get("type") == "function_call" for item in value) if isinstance(value, list) else 0
    assert sum(len(message.get("tool_calls", ())) for message in messages) == given_calls
