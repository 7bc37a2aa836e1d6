"""Which function answers which path. Paths of OpenAI's interface are also served without their `/v1`, as llama.cpp does."""

from nanovllm.entrypoints.server.api import chat, chunks, completions, memory, metrics, models, responses, tokens
from nanovllm.entrypoints.server.api.about import About
from nanovllm.entrypoints.server.app import Handler

GET, POST, DELETE = ("GET",), ("POST",), ("DELETE",)
about = About(lambda: ROUTES)
OPENAI: tuple[tuple[str, tuple[str, ...], Handler], ...] = (
    ("/models", GET, models.list_models),
    ("/models/{name:path}", GET, models.get_model),
    ("/completions", POST, completions.completions),
    ("/chat/completions", POST, chat.chat_completions),
    ("/responses", POST, responses.responses),
    ("/responses/input_tokens", POST, responses.count_input_tokens),
    ("/chunks", (*GET, *POST), chunks.all_chunks),
    ("/chunks/{name}", (*GET, *POST, *DELETE), chunks.one_chunk),
    ("/chunks/{name}/fork", POST, chunks.fork),
    ("/chunks/{name}/truncate", POST, chunks.truncate),
    ("/chunks/{name}/drop", POST, chunks.drop),
    ("/chunks/{name}/save", (*POST, *DELETE), chunks.save),
    ("/chunks/{name}/load", POST, chunks.load),
    ("/saved_chunks", GET, chunks.saved),
    ("/memory", GET, memory.memory),
)
OTHERS: tuple[tuple[str, tuple[str, ...], Handler], ...] = (
    ("/health", GET, models.health),
    ("/ping", ("GET", "POST"), models.health),
    ("/version", GET, models.version),
    ("/metrics", GET, metrics.metrics),
    ("/tokenize", POST, tokens.tokenize),
    ("/detokenize", POST, tokens.detokenize),
    ("/tokenizer_info", GET, tokens.tokenizer_info),
    ("/openapi.json", GET, about.openapi),
    ("/docs", GET, about.docs),
)
ROUTES = (*((f"/v1{path}", methods, handler) for path, methods, handler in OPENAI), *OPENAI, *OTHERS)
