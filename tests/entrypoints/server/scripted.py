"""A model whose replies the tests write: each is forced token by token through the real scheduler, sampler, detokenizer, parsers and HTTP.

A user's message says what the replies to it are: `say("one", "two")` is such a message, in hexadecimal digits, so that no template and no
tokenizer reads anything into it. The reply is "one"; after the result of a tool it is "two".
"""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from tokenizers import AddedToken

from nanovllm.entrypoints.server.settings import Settings
from nanovllm.sampling.process_logits import LogitsProcessor, TokensSoFar
from nanovllm.testing.models import byte_tokenizer, random_model, tiny_config
from nanovllm.tokenizer.tokenizer import Tokenizer, make_tokenizer
from nanovllm.types import Tensor
from tests.entrypoints.server.live import Live

TEMPLATES = Path(__file__).parent / "templates"
SCRIPT = re.compile(r"\[say ([0-9a-f,]*)\]")
# by format: its template, its special tokens, the token that ends a reply, and what its template writes before a tool's result
FORMATS = {
    "hermes": ("tagged_calls", (), "<|im_end|>", "<tool_response>"),
    "qwen3_coder": ("tagged_parameters", (), "<|im_end|>", "<tool_response>"),
    "llama3": ("header_roles", ("<|python_tag|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "<|eot_id|>", "ipython<|end"),
    "mistral": ("bracketed_calls", ("[TOOL_CALLS]", "[ARGS]", "[INST]", "[/INST]", "</s>"), "</s>", "[TOOL_RESULTS]"),
}


def say(*replies: str) -> str:
    """The message of a user to which these are the replies, each after the result of a tool but for the first."""
    return f"[say {','.join(reply.encode().hex() for reply in replies)}]"


def scripted(name: str, settings: Settings | None = None) -> Live:
    """A server for a scripted model with a format of tool calls."""
    template, special, end, result = FORMATS[name]
    backend = byte_tokenizer().backend
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", *special)])
    if name in ("hermes", "qwen3_coder"):
        backend.add_tokens([AddedToken(token, special=False) for token in ("<tool_call>", "</tool_call>")])
    tokenizer = make_tokenizer(backend, {"bos_token": "<s>", "eos_token": end}, (TEMPLATES / f"{template}.jinja").read_text())
    end_id = backend.token_to_id(end)
    model = random_model(tiny_config(vocab_size=288, max_position_embeddings=4096, eos_token_ids=(end_id,)), tokenizer=tokenizer)
    processor = LogitsProcessor(forced(tokenizer, end_id, result), prompt_lengths)
    limits = {"process_logits": processor}
    return Live(model, settings or Settings(shutdown_seconds=1.0, model_name="scripted"), limits=limits, num_pages=1024)


def prompt_lengths(tokens: TokensSoFar) -> Tensor:
    """What the processor carries: how long each row's prompt is."""
    return tokens.lengths.clone()


def forced(tokenizer: Tokenizer, end: int, result: str) -> Callable[[Tensor, TokensSoFar, Tensor], tuple[Tensor, Tensor]]:
    """A function that allows only the next token of each row's script, and `end` after it. A prompt without a script is left alone."""

    @cache
    def script(prompt: tuple[int, ...]) -> tuple[int, ...] | None:
        text = tokenizer.decode(prompt, skip_special_tokens=False)
        found = [*SCRIPT.finditer(text)]
        if not found:
            return None
        replies = found[-1][1].split(",")
        turn = text.count(result, found[-1].end())
        return (*tokenizer.encode(bytes.fromhex(replies[min(turn, len(replies) - 1)]), add_special_tokens=False), end)

    def force(logits: Tensor, tokens: TokensSoFar, lengths: Tensor) -> tuple[Tensor, Tensor]:
        after = logits.clone()
        for row, (ids, length, start) in enumerate(zip(tokens.token_ids.tolist(), tokens.lengths.tolist(), lengths.tolist(), strict=True)):
            if start and (reply := script(tuple(ids[:start]))) is not None:
                after[row] = -torch.inf
                after[row, reply[min(length - start, len(reply) - 1)]] = 0.0
        return after, lengths

    return force


