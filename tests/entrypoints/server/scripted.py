"""A model whose replies the tests write: each is forced token by token through the real scheduler, sampler, detokenizer, parsers and HTTP.

A user's message says what the replies to it are: `say("one", "two")` is such a message, in hexadecimal digits, so that no template and no
tokenizer reads anything into it. The reply is "one"; after the result of a tool it is "two".
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from tokenizers import AddedToken

from nanovllm.entrypoints.server.settings import Settings
from nanovllm.models.model import Model
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

ReplyTo = Callable[[str], str | None]


def say(*replies: str) -> str:
    """The message of a user to which these are the replies, each after the result of a tool but for the first."""
    return f"[say {','.join(reply.encode().hex() for reply in replies)}]"


def scripted(name: str, settings: Settings | None = None, reply_to: ReplyTo | None = None) -> Live:
    """A server for a scripted model with a format of tool calls. See `scripted_model`."""
    model, forced = scripted_model(name, reply_to)
    return Live(model, settings or Settings(shutdown_seconds=1.0, model_name="scripted"), limits={"process_logits": forced}, num_pages=1024)


def scripted_model(name: str, reply_to: ReplyTo | None = None) -> tuple[Model, LogitsProcessor]:
    """A model with a format of tool calls, and what forces its replies: those of `say`, or those of a function of the prompt's text."""
    template, special, end, result = FORMATS[name]
    backend = byte_tokenizer().backend
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", *special)])
    if name in ("hermes", "qwen3_coder"):
        backend.add_tokens([AddedToken(token, special=False) for token in ("<tool_call>", "</tool_call>")])
    tokenizer = make_tokenizer(backend, {"bos_token": "<s>", "eos_token": end}, (TEMPLATES / f"{template}.jinja").read_text())
    end_id = backend.token_to_id(end)
    model = random_model(tiny_config(vocab_size=288, max_position_embeddings=4096, eos_token_ids=(end_id,)), tokenizer=tokenizer)
    return model, forcing(tokenizer, end_id, reply_to or partial(said, result=result))


def said(prompt: str, result: str) -> str | None:
    """The reply that a prompt's last `say` has for as many results of tools as came after it."""
    found = [*SCRIPT.finditer(prompt)]
    if not found:
        return None
    replies = found[-1][1].split(",")
    turn = prompt.count(result, found[-1].end())
    return bytes.fromhex(replies[min(turn, len(replies) - 1)]).decode()


def forcing(tokenizer: Tokenizer, end: int, reply_to: ReplyTo) -> LogitsProcessor:
    """What allows only the next token of each row's script, and `end` after it. A prompt without a script is left alone.

    For each row it carries the number of its script, or -1, and the length of its prompt.
    """
    scripts: list[tuple[int, ...]] = []

    def read(prompt: list[int]) -> int:
        reply = reply_to(tokenizer.decode(prompt, skip_special_tokens=False))
        if reply is None:
            return -1
        scripts.append((*tokenizer.encode(reply, add_special_tokens=False), end))
        return len(scripts) - 1

    def begin(tokens: TokensSoFar) -> Tensor:
        lengths = tokens.lengths.tolist()
        return torch.tensor([(read(ids[:length].tolist()), length) for ids, length in zip(tokens.token_ids, lengths, strict=True)])

    def force(logits: Tensor, tokens: TokensSoFar, carried: Tensor) -> tuple[Tensor, Tensor]:
        after = logits.clone()
        for row, (length, (script, start)) in enumerate(zip(tokens.lengths.tolist(), carried.tolist(), strict=True)):
            if start and script >= 0:
                reply = scripts[script]
                after[row] = -torch.inf
                after[row, reply[min(length - start, len(reply) - 1)]] = 0.0
        return after, carried

    return LogitsProcessor(force, begin)
