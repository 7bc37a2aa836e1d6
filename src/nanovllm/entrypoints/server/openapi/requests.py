"""JSON schemas of requests, made from the structs that read them."""

import inspect
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from nanovllm.entrypoints.server.chat_limits import MAX_MESSAGES, MAX_TOOLS
from nanovllm.entrypoints.server.messages import EFFORTS, ROLES
from nanovllm.entrypoints.server.openapi.answers import BOOLEAN, NULL, OBJECT, STRING, Schema, array, const, either, obj, words
from nanovllm.sampling.params import SamplingParams

TEMPLATE = "#/components/schemas/{name}"
ARGUMENT = re.compile(r"^    (\w+): (.*(?:\n {8}.*)*)", re.M)
PARTS = (obj({"type": words("text", "input_text", "output_text"), "text": STRING}), obj({"type": const("refusal"), "refusal": STRING}))
CONTENT = either(STRING, array(either(STRING, *PARTS)), NULL)
MESSAGE = obj({"role": words(*ROLES)}, {"content": CONTENT, "name": STRING, "tool_calls": array(OBJECT), "tool_call_id": STRING})
ITEM = obj(
    {},
    {
        "type": words("message", "function_call", "function_call_output", "reasoning"),
        "role": words("user", "assistant", "system", "developer"),
        "content": CONTENT,
        "call_id": STRING,
        "name": STRING,
        "arguments": STRING,
        "output": CONTENT,
        "summary": array(OBJECT),
    },
)
TOOL = obj(
    {"type": const("function")}, {"function": OBJECT, "name": STRING, "description": STRING, "parameters": OBJECT, "strict": BOOLEAN}
)
FLAG: Schema = {"type": ["boolean", "null"]}
FORMAT = either(
    obj({"type": words("text", "json_object")}), obj({"type": const("json_schema")}, {"json_schema": OBJECT, "schema": OBJECT}), NULL
)
SOME: Schema = {"type": "string", "minLength": 1}
FORM = either(
    obj({"json": either(OBJECT, BOOLEAN, STRING)}),
    obj({"regex": SOME}),
    obj({"choice": {**array(SOME), "minItems": 1}}),
    obj({"grammar": SOME}),
    obj({"json_object": {"const": True}}),
    NULL,
)
# Fields whose structs say Any, because functions of their own check them
CHECKED: Mapping[str, Schema] = MappingProxyType(
    {
        "messages": {"type": "array", "items": MESSAGE, "minItems": 1, "maxItems": MAX_MESSAGES},
        "input": either(STRING, {"type": "array", "items": ITEM, "minItems": 1, "maxItems": MAX_MESSAGES}),
        "tools": either({"type": "array", "items": TOOL, "maxItems": MAX_TOOLS}, NULL),
        "tool_choice": either(words("none", "auto", "required", None), OBJECT),
        "parallel_tool_calls": FLAG,
        "reasoning_effort": words(*EFFORTS, None),
        "chat_template_kwargs": {"type": ["object", "null"]},
        "add_generation_prompt": FLAG,
        "continue_final_message": FLAG,
        "response_format": FORMAT,
        "format": FORMAT,
        "structured_outputs": FORM,
    }
)
# Fields that other functions read than those of the structs
ELSEWHERE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "CompletionRequest": ("response_format", "structured_outputs"),
        "ChatRequest": ("response_format", "structured_outputs"),
        "ResponsesRequest": ("structured_outputs",),
    }
)
# What structs do not say of their fields
NOTES: Mapping[str, str] = MappingProxyType(
    {
        "model": "The model's name, as `/v1/models` tells it.",
        "stream": "Whether the answer comes as server-sent events.",
        "stream_interval": "How many tokens an event of a stream has, in [1, 1024]; the first token and the end come at once.",
        "n": "How many replies to each prompt, in [1, 128].",
        "repeat_penalty": "llama.cpp's name of `repetition_penalty`.",
        "priority": "Requests with lower numbers run first.",
        "return_token_ids": "Whether the answer has the token ids of the prompt and of the reply.",
        "max_completion_tokens": "The most tokens of the reply; by default what is left of the context.",
        "max_output_tokens": "The most tokens of the reply; by default what is left of the context.",
        "prompt": "A text, several texts, token ids, or several lists of token ids.",
        "add_special_tokens": "Whether texts get the model's special tokens; by default they do, unless chunks come before them.",
        "echo": "Whether the text begins with the prompt. `max_tokens` may then be 0.",
        "best_of": "How many replies to each prompt run, in [`n`, 128]: the `n` whose tokens are the most probable are returned.",
        "messages": "The conversation. Its last message is not the assistant's, unless `continue_final_message` is set.",
        "tools": "The functions that the reply may call.",
        "tool_choice": '`"none"`, `"auto"`, `"required"`, a function, or the functions that may be called.',
        "parallel_tool_calls": "Whether the reply may call several functions.",
        "reasoning_effort": '`"none"` asks the model not to think.',
        "chat_template_kwargs": "Variables of the model's chat template.",
        "include_reasoning": "Whether the answer has the text of the think block.",
        "response_format": 'Of the type `"text"`, `"json_object"` or `"json_schema"`: the form of the reply.',
        "structured_outputs": "One of `json`, `regex`, `choice`, `grammar` and `json_object`, as vLLM has them.",
        "format": 'Of the type `"text"`, `"json_object"` or `"json_schema"`: the form of the reply.',
        "input": "A text, or the items of the conversation.",
        "instructions": "The text of a system message before the input.",
        "previous_response_id": "Not supported: the server keeps no responses.",
        "store": "Taken, but nothing is kept.",
        "background": "Only false is supported.",
        "truncation": '`"auto"` drops the oldest turns of the input if they leave no room for the reply.',
        "bad_words": "Up to 128 texts of at most 128 characters that the reply cannot have, alone and after a space.",
        "top_logprobs": "How many of the most probable tokens are listed in the place of each token, in [0, 20]. Chats need `logprobs`, "
        'responses `"message.output_text.logprobs"` in `include`.',
        "logprobs": "The log-probabilities of the reply's tokens: in chats true, in completions how many of the most probable tokens are "
        "listed in the place of each token, in [0, 20]. With `echo` those of the prompt, too.",
        "cache_salt": "The KV of the prompt is shared only with requests of the same key that have the same salt.",
        "chunks": "Names of chunks before the prompt.",
        "keep": "The name under which prompt and reply become a chunk.",
        "keep_thinking": "Whether that chunk has the think block.",
        "keep_replace": "Whether it may replace another of that name.",
        "replace": "Whether the result may replace a chunk of that name.",
        "to": "The name of the result; by default it replaces the chunk.",
        "after": "The chunk before it.",
        "recompute": 'How many tokens of each chunk but the first are run again; `"all"` makes an exact chunk.',
        "spans": "Pairs of the first token to leave out and the first one after it that stays.",
        "mode": '`"recompute"` runs what follows again; `"shift"` and `"gap"` keep its KV.',
        "metadata": "Up to 16 pairs of strings, which the answer repeats.",
    }
)


def sampling_notes() -> dict[str, str]:
    """What the library's documentation says of each sampling option."""
    found = ARGUMENT.findall(inspect.getdoc(SamplingParams) or "")
    return {name: re.sub(r"; kept as [^.]*|\s+(?=\s)", "", text.replace("\n", " ")) for name, text in found}


def request_schemas(structs: Iterable[type[msgspec.Struct]]) -> dict[str, Schema]:
    """The schemas of structs and of the structs in them, by name."""
    _, schemas = msgspec.json.schema_components([*structs], ref_template=TEMPLATE)
    notes = {**sampling_notes(), **NOTES}
    return {name: _described(schema, ELSEWHERE.get(name, ()), notes) for name, schema in schemas.items()}


def _described(schema: dict[str, Any], more: Iterable[str], notes: Mapping[str, str]) -> Schema:
    properties = {}
    for name, given in {**schema.get("properties", {}), **{name: {} for name in more}}.items():
        checked = {} if given.keys() - {"default"} else CHECKED.get(name, {})
        if name == "messages" and "default" in given:
            checked = either(checked, NULL)
        note = {"description": notes[name]} if name in notes else {}
        properties[name] = {**checked, **given, **note}
    first, _, _ = schema.get("description", "").partition(". ")
    return {**schema, "properties": properties, "description": f"{first.rstrip('.')}."}
