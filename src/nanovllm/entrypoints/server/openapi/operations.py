"""What the OpenAPI document says of each route that its function does not: what it takes, what it answers, and an example."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec

from nanovllm.entrypoints.server.api.chat import ChatRequest
from nanovllm.entrypoints.server.api.chunks import (
    ComposeRequest,
    CreateRequest,
    DropRequest,
    ForkRequest,
    LoadRequest,
    TruncateRequest,
)
from nanovllm.entrypoints.server.api.completions import CompletionRequest
from nanovllm.entrypoints.server.api.responses import ResponsesRequest
from nanovllm.entrypoints.server.api.tokens import DetokenizeRequest, TokenizeRequest

CHUNK = "/chunks/{name}"
HELLO = "Tell a story of a fox."


class EmptyRequest(msgspec.Struct):
    """An empty object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path.

    Attributes:
        summary: What it does, in a few words.
        takes: The struct that reads its body, or None.
        answers: The schema of its answer, a name of `ANSWERS`; None: the answer is not JSON.
        events: The schema of an event, if the answer may be a stream.
        done: Whether such a stream ends with `[DONE]`.
        example: A body.
        path: The only path of the route, without parameters, that has it; None: all have it.
        kind: The content type of an answer that is not JSON.
        open: Whether it needs no key.
    """

    summary: str
    takes: type[msgspec.Struct] | None = None
    answers: str | None = None
    events: str | None = None
    done: bool = False
    example: Mapping[str, Any] | None = None
    path: str | None = None
    kind: str = "application/json"
    open: bool = False


# By method and path, without the /v1 that paths of OpenAI's interface may have
OPERATIONS: Mapping[tuple[str, str], Operation] = MappingProxyType(
    {
        ("GET", "/models"): Operation(summary="The model that is served", answers="Models"),
        ("GET", "/models/{name:path}"): Operation(summary="The model by its name, which may have slashes", answers="Model"),
        ("POST", "/completions"): Operation(
            summary="Continue texts",
            takes=CompletionRequest,
            answers="Completion",
            events="CompletionEvent",
            done=True,
            example={"prompt": "Once upon a time", "max_tokens": 24},
        ),
        ("POST", "/chat/completions"): Operation(
            summary="Answer a conversation",
            takes=ChatRequest,
            answers="ChatCompletion",
            events="ChatCompletionEvent",
            done=True,
            example={"messages": [{"role": "user", "content": HELLO}], "max_completion_tokens": 64},
        ),
        ("POST", "/responses"): Operation(
            summary="Answer a conversation of items; nothing is kept",
            takes=ResponsesRequest,
            answers="Response",
            events="ResponseEvent",
            example={"input": HELLO, "max_output_tokens": 64},
        ),
        ("POST", "/responses/input_tokens"): Operation(
            summary="Count the tokens of the prompt of a response", takes=ResponsesRequest, answers="InputTokens", example={"input": HELLO}
        ),
        ("GET", "/memory"): Operation(summary="The pages of KV memory by owner: a map, and the tree of shared prefixes", answers="Memory"),
        ("GET", "/chunks"): Operation(summary="The chunks of the client's key", answers="Chunks"),
        ("POST", "/chunks"): Operation(
            summary="Make a chunk: a prompt whose KV stays under a name",
            takes=CreateRequest,
            answers="Chunk",
            example={"name": "story", "text": "Once upon a time, a fox lived by the sea.", "replace": True},
        ),
        ("GET", CHUNK): Operation(summary="A chunk", answers="Chunk"),
        ("DELETE", CHUNK): Operation(summary="Delete a chunk", answers="DeletedChunk"),
        ("POST", CHUNK): Operation(
            summary="Join chunks",
            path="/chunks/compose",
            takes=ComposeRequest,
            answers="Chunk",
            example={"name": "both", "names": ["story", "story"], "replace": True},
        ),
        ("POST", f"{CHUNK}/fork"): Operation(
            summary="A second name for a chunk", takes=ForkRequest, answers="Chunk", example={"to": "copy", "replace": True}
        ),
        ("POST", f"{CHUNK}/truncate"): Operation(
            summary="The first tokens of a chunk",
            takes=TruncateRequest,
            answers="Chunk",
            example={"tokens": 4, "to": "start", "replace": True},
        ),
        ("POST", f"{CHUNK}/drop"): Operation(
            summary="A chunk without spans of its tokens",
            takes=DropRequest,
            answers="Chunk",
            example={"spans": [[1, 3]], "to": "rest", "replace": True},
        ),
        ("POST", f"{CHUNK}/save"): Operation(summary="Write a chunk to a file", takes=EmptyRequest, answers="Chunk", example={}),
        ("DELETE", f"{CHUNK}/save"): Operation(summary="Delete the file of a chunk", answers="DeletedChunk"),
        ("POST", f"{CHUNK}/load"): Operation(
            summary="Read a chunk from its file", takes=LoadRequest, answers="Chunk", example={"replace": True}
        ),
        ("GET", "/saved_chunks"): Operation(summary="The chunk files of the client's key, by their headers", answers="SavedChunks"),
        ("GET", "/health"): Operation(summary="Whether requests are taken", answers="Health", open=True),
        ("GET", "/ping"): Operation(summary="Whether requests are taken", answers="Health", open=True),
        ("POST", "/ping"): Operation(summary="Whether requests are taken", answers="Health", open=True),
        ("GET", "/version"): Operation(summary="The version of nanovllm", answers="Version"),
        ("GET", "/metrics"): Operation(summary="Figures for Prometheus", kind="text/plain"),
        ("POST", "/tokenize"): Operation(
            summary="The token ids of a text or a conversation", takes=TokenizeRequest, answers="Tokens", example={"prompt": HELLO}
        ),
        ("POST", "/detokenize"): Operation(
            summary="The text of token ids", takes=DetokenizeRequest, answers="Text", example={"tokens": [39, 68, 75]}
        ),
        ("GET", "/tokenizer_info"): Operation(summary="Special tokens and the chat template", answers="TokenizerInfo"),
        ("GET", "/openapi.json"): Operation(summary="This document"),
        ("GET", "/docs"): Operation(summary="This document as a page for people", kind="text/html; charset=utf-8"),
    }
)
