"""Which function answers which path. Paths of OpenAI's interface are also served without their `/v1`, as llama.cpp does."""

from nanovllm.entrypoints.server.api import chat, completions, models, responses, tokens
from nanovllm.entrypoints.server.api.about import About
from nanovllm.entrypoints.server.app import Handler

GET, POST = ("GET",), ("POST",)
about = About(lambda: ROUTES)
OPENAI: tuple[tuple[str, tuple[str, ...], Handler], ...] = (
    ("/models", GET, models.list_models),
    ("/models/{name:path}", GET, models.get_model),
    ("/completions", POST, completions.completions),
    ("/chat/completions", POST, chat.chat_completions),
    ("/responses", POST, responses.responses),
    ("/responses/input_tokens", POST, responses.count_input_tokens),
)
OTHERS: tuple[tuple[str, tuple[str, ...], Handler], ...] = (
    ("/health", GET, models.health),
    ("/ping", ("GET", "POST"), models.health),
    ("/version", GET, models.version),
    ("/tokenize", POST, tokens.tokenize),
    ("/detokenize", POST, tokens.detokenize),
    ("/tokenizer_info", GET, tokens.tokenizer_info),
    ("/openapi.json", GET, about.openapi),
    ("/docs", GET, about.docs),
)
ROUTES = (*((f"/v1{path}", methods, handler) for path, methods, handler in OPENAI), *OPENAI, *OTHERS)
