"""JSON schemas of answers, by name. Each lists all fields that an answer may have."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from nanovllm.entrypoints.server.memory_calls import KINDS

Schema = dict[str, Any]
STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}
OBJECT: Schema = {"type": "object"}
MAYBE_STRING: Schema = {"type": ["string", "null"]}
MAYBE_INTEGER: Schema = {"type": ["integer", "null"]}


def ref(name: str) -> Schema:
    """A reference to a schema of the document."""
    return {"$ref": f"#/components/schemas/{name}"}


def array(items: Schema) -> Schema:
    """An array."""
    return {"type": "array", "items": items}


def either(*schemas: Schema) -> Schema:
    """One of several schemas, or more."""
    return {"anyOf": [*schemas]}


def words(*values: str | None) -> Schema:
    """One of some values."""
    return {"enum": [*values]}


def obj(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """An object with these fields."""
    return {"type": "object", "properties": {**required, **(optional or {})}, "required": [*required]}


def const(value: str) -> Schema:
    """One value."""
    return {"const": value}


IDS = array(INTEGER)
# Of each: kind, owners, how many in a row. A list with a type for each place would say more, but fewer programs read its schema.
LOOKS = array({"type": "array", "items": {"anyOf": [words(*KINDS), INTEGER]}, "minItems": 3, "maxItems": 3})
TOLD_IDS = {"prompt_token_ids": IDS, "token_ids": IDS}
CHUNK = {
    "object": const("chunk"),
    "name": STRING,
    "created": INTEGER,
    "tokens": INTEGER,
    "pages": INTEGER,
    "exact": BOOLEAN,
    "operations": array(STRING),
    "loaded": BOOLEAN,
}
CUT_SHORT = obj({"choices": array(INTEGER), "message": STRING})  # replies that ended because chunks held all pages
REUSED: Schema = {  # what a reply reused of chunks, and which it kept
    "nanovllm": obj({}, {"chunks": array(STRING), "exact": BOOLEAN, "kept": ref("Chunk"), "keep_error": STRING, "cut_short": CUT_SHORT})
}
REASONS = words("stop", "length", "tool_calls", None)
STATUS = words("in_progress", "completed", "incomplete")
DETAILS = {"prompt_tokens_details": obj({"cached_tokens": INTEGER}), "completion_tokens_details": obj({"reasoning_tokens": INTEGER})}
USAGE = obj({"prompt_tokens": INTEGER, "completion_tokens": INTEGER, "total_tokens": INTEGER}, DETAILS)
REASONING = {"reasoning_content": STRING, "reasoning": STRING}
FUNCTION = obj({"name": STRING, "arguments": STRING})
DELTA_CALL = obj(
    {"index": INTEGER, "function": obj({"arguments": STRING}, {"name": STRING})}, {"id": STRING, "type": const("function")}
)  # the first of a call has its id and its name
TOKEN = {"token": STRING, "logprob": NUMBER, "bytes": IDS}
TOKENS = array(obj({**TOKEN, "top_logprobs": array(obj(TOKEN))}))
TEXT_PART = obj({"type": const("output_text"), "text": STRING, "annotations": array(OBJECT), "logprobs": TOKENS})
THOUGHT_PART = obj({"type": const("reasoning_text"), "text": STRING})


TEXT_LOGPROBS = obj(
    {
        "tokens": array(STRING),
        "token_logprobs": array({"type": ["number", "null"]}),  # null is for the first token of a prompt
        "top_logprobs": array(either({"type": "object", "additionalProperties": NUMBER}, NULL)),
        "text_offset": IDS,
    }
)
CHAT_LOGPROBS = obj({"content": TOKENS, "refusal": NULL})


def _answer(kind: str, choices: str, more: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    same = {"id": STRING, "object": const(kind), "created": INTEGER, "model": STRING, "choices": array(ref(choices))}
    return obj({**same, **more}, optional)


def _choice(inner: Mapping[str, Schema], logprobs: str) -> Schema:
    return obj({"index": INTEGER, **inner, "logprobs": either(ref(logprobs), NULL), "finish_reason": REASONS}, TOLD_IDS)


def _item(kind: str, more: Mapping[str, Schema]) -> Schema:
    return obj({"id": STRING, "type": const(kind), "status": STATUS, **more})


ANSWERS: Mapping[str, Schema] = MappingProxyType(
    {
        "Error": obj({"error": obj({"message": STRING, "type": STRING, "param": MAYBE_STRING, "code": MAYBE_STRING})}),
        "Usage": USAGE,
        "CompletionLogprobs": TEXT_LOGPROBS,
        "CompletionChoice": _choice({"text": STRING}, "CompletionLogprobs"),
        "Completion": _answer("text_completion", "CompletionChoice", {"usage": ref("Usage")}, REUSED),
        "CompletionEvent": _answer("text_completion", "CompletionChoice", {}, {"usage": either(ref("Usage"), NULL), **REUSED}),
        "ToolCall": obj({"id": STRING, "type": const("function"), "function": FUNCTION}),
        "ChatMessage": obj(
            {"role": const("assistant"), "content": MAYBE_STRING, "refusal": NULL}, {**REASONING, "tool_calls": array(ref("ToolCall"))}
        ),
        "ChatLogprobs": CHAT_LOGPROBS,
        "ChatChoice": _choice({"message": ref("ChatMessage")}, "ChatLogprobs"),
        "ChatCompletion": _answer("chat.completion", "ChatChoice", {"usage": ref("Usage")}, {"prompt_token_ids": IDS, **REUSED}),
        "ChatDelta": obj({}, {"role": const("assistant"), "content": STRING, **REASONING, "tool_calls": array(DELTA_CALL)}),
        "ChatEventChoice": _choice({"delta": ref("ChatDelta")}, "ChatLogprobs"),
        "ChatCompletionEvent": _answer(
            "chat.completion.chunk", "ChatEventChoice", {}, {"usage": either(ref("Usage"), NULL), "prompt_token_ids": IDS, **REUSED}
        ),
        "MessageItem": _item("message", {"role": const("assistant"), "content": array(TEXT_PART)}),
        "ReasoningItem": _item("reasoning", {"summary": array(OBJECT), "content": array(THOUGHT_PART)}),
        "FunctionCallItem": _item("function_call", {"call_id": STRING, "name": STRING, "arguments": STRING}),
        "OutputItem": either(ref("MessageItem"), ref("ReasoningItem"), ref("FunctionCallItem")),
        "FunctionTool": obj(
            {"type": const("function"), "name": STRING, "description": MAYBE_STRING, "parameters": OBJECT, "strict": BOOLEAN}
        ),
        "ResponseUsage": obj(
            {
                "input_tokens": INTEGER,
                "input_tokens_details": obj({"cached_tokens": INTEGER, "cache_write_tokens": INTEGER}),
                "output_tokens": INTEGER,
                "output_tokens_details": obj({"reasoning_tokens": INTEGER}),
                "total_tokens": INTEGER,
            }
        ),
        "Response": obj(
            {
                "id": STRING,
                "object": const("response"),
                "created_at": INTEGER,
                "completed_at": MAYBE_INTEGER,
                "status": words("in_progress", "completed", "incomplete", "failed"),
                "error": either(obj({"code": STRING, "message": STRING}), NULL),
                "incomplete_details": either(obj({"reason": const("max_output_tokens")}), NULL),
                "model": STRING,
                "output": array(ref("OutputItem")),
                "usage": either(ref("ResponseUsage"), NULL),
                "instructions": MAYBE_STRING,
                "max_output_tokens": MAYBE_INTEGER,
                "metadata": {"type": "object", "additionalProperties": STRING},
                "parallel_tool_calls": BOOLEAN,
                "previous_response_id": NULL,
                "reasoning": obj({"effort": MAYBE_STRING, "summary": NULL}),
                "store": {"const": False},
                "background": {"const": False},
                "temperature": NUMBER,
                "top_p": NUMBER,
                "top_logprobs": INTEGER,
                "text": obj({"format": OBJECT}),
                "tool_choice": either(STRING, OBJECT),
                "tools": array(ref("FunctionTool")),
                "truncation": words("auto", "disabled"),
            },
            REUSED,
        ),
        "ResponseEvent": obj(
            {"type": STRING, "sequence_number": INTEGER},
            {
                "response": ref("Response"),
                "item": ref("OutputItem"),
                "part": either(TEXT_PART, THOUGHT_PART),
                "item_id": STRING,
                "output_index": INTEGER,
                "content_index": INTEGER,
                "delta": STRING,
                "text": STRING,
                "name": STRING,
                "arguments": STRING,
                "logprobs": TOKENS,
            },
        ),
        "InputTokens": obj({"object": const("response.input_tokens"), "input_tokens": INTEGER}),
        "Model": obj(
            {"id": STRING, "object": const("model"), "created": INTEGER, "owned_by": STRING, "root": STRING, "parent": NULL},
            {"max_model_len": INTEGER},
        ),
        "Models": obj({"object": const("list"), "data": array(ref("Model"))}),
        "Chunk": obj(CHUNK, {"usage": ref("Usage"), "bytes": INTEGER}),
        "Chunks": obj(
            {
                "object": const("list"),
                "data": array(ref("Chunk")),
                "pages": INTEGER,
                "limits": obj({"chunks": INTEGER, "files": INTEGER, "pages": INTEGER, "page_size": INTEGER}),
            }
        ),
        "SavedChunk": obj(
            {
                "object": const("chunk.file"),
                "name": MAYBE_STRING,
                "tokens": MAYBE_INTEGER,
                "bytes": INTEGER,
                "saved": INTEGER,
                "error": either(obj({"code": words("chunk_mismatch", "chunk_file"), "message": STRING}), NULL),
            }
        ),
        "SavedChunks": obj({"object": const("list"), "data": array(ref("SavedChunk")), "has_more": BOOLEAN}),
        "DeletedChunk": obj({"object": words("chunk.deleted", "chunk.file.deleted"), "name": STRING, "deleted": {"const": True}}),
        "Memory": obj(
            {
                "object": const("memory"),
                "page_size": INTEGER,
                "page_bytes": INTEGER,
                "pages": obj({"total": INTEGER, **dict.fromkeys(KINDS, INTEGER)}),
                "host_pages": obj({"total": INTEGER, "used": INTEGER}),
                "disk": either(obj({"bytes": INTEGER, "max_bytes": INTEGER}), NULL),
                "shared": INTEGER,
                "saved": INTEGER,
                "map": obj({"pages_per_cell": INTEGER, "cells": LOOKS, "more_free": INTEGER}),
                "tree": array(obj({"level": INTEGER, "pages": STRING, "text": STRING, "looks": LOOKS})),
                "more_owners": INTEGER,
            }
        ),
        "Health": obj({"status": const("ok")}),
        "Version": obj({"version": STRING}),
        "Tokens": obj(
            {
                "count": INTEGER,
                "max_model_len": INTEGER,
                "tokens": array(either(INTEGER, obj({"id": INTEGER, "piece": either(STRING, IDS)}))),
            },
            {"token_strs": array(MAYBE_STRING)},
        ),
        "Text": obj({"prompt": STRING, "content": STRING}),
        "TokenizerInfo": obj({f"{name}_token": MAYBE_STRING for name in ("eos", "bos", "pad", "unk")} | {"chat_template": MAYBE_STRING}),
    }
)
