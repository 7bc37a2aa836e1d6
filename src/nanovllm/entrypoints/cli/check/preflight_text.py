"""The outlook of a model as lines of text."""

import textwrap
from collections.abc import Iterator

from nanovllm.entrypoints.cli.check.kv_memory import MAX_NUM_SEQS
from nanovllm.entrypoints.cli.check.preflight import Outlook
from nanovllm.entrypoints.display.tables import size

WIDTH, LABEL = 140, 11


def text(look: Outlook) -> str:
    """The outlook as text: one labelled line per fact, the verdict last."""
    ranks = f", {look.ranks} ranks" if look.ranks > 1 else ""
    lines = [f"{look.model}, {look.architecture}{f', {look.dtype}' if look.dtype else ''} on {look.device}{ranks}"]
    for label, fact in _lines(look):
        lines += textwrap.wrap(fact, WIDTH, initial_indent=f"  {label:{LABEL}} ", subsequent_indent=" " * (LABEL + 3))
    if not look.problems:
        return "\n".join([*lines, "It will run."])
    return "\n".join([*lines, "It will not run:", *(f"  {problem}" for problem in look.problems)])


def _lines(look: Outlook) -> Iterator[tuple[str, str]]:
    if look.config is not None:
        special = f": {'; '.join(look.features)}" if look.features else ""
        yield "run by", f"{look.file}{special}" if look.file else "transformers' module"
    if look.code:
        yield "code", "the checkpoint brings its own; it runs only with --trust-remote-code, and only for an unknown architecture"
    if look.weights is not None and look.memory is not None:
        yield "weights", "; ".join(_weights(look))
        yield "KV", "; ".join(_kv(look))
    if look.kernels is not None:
        yield "decode", f"{look.kernels.decode}{f': {look.kernels.against}' if look.kernels.against else ''}"
        yield "prompts", look.kernels.prompts
    if look.config is not None:
        yield "context", f"{look.config.max_position_embeddings:,} tokens"
    if look.texts is not None and look.config is not None:
        yield "texts", "; ".join(_texts(look))
    for note in look.notes:
        yield "note", note


def _weights(look: Outlook) -> Iterator[str]:
    assert look.weights is not None
    w = look.weights
    count = "" if w.parameters is None else f"{w.parameters:,} parameters, "
    if w.stored is not None:
        yield f"{count}{size(w.stored)} in {w.tensors:,} tensors of {', '.join(w.stored_dtypes) or 'no dtype'}"
        count = ""
    yield f"{count}{size(w.held)} here in {look.dtype}{f', matrices in {w.quantization}' if w.quantization else ''}"
    yield f"loading needs at most {size(w.host)} of host memory"


def _kv(look: Outlook) -> Iterator[str]:
    assert look.memory is not None
    m = look.memory
    yield f"{size(m.token_bytes)} per token, {size(1000 * m.token_bytes)} per 1,000 tokens"
    if any(g.window for g in m.groups):
        for g in m.groups:
            sees = f"attend to the last {g.window:,} tokens" if g.window else "attend to all tokens"
            yield f"of which {size(g.token_bytes)} in {g.layers} layers that {sees}"
    if m.room is not None and m.left is not None and m.tokens is not None:
        enough = look.config is not None and m.tokens >= MAX_NUM_SEQS * look.config.max_position_embeddings
        room = f"room for {m.tokens:,} tokens" + (f", all that {MAX_NUM_SEQS} requests of full length need" if enough else "")
        yield f"{size(m.room.free)} of {size(m.room.total)} are free, {size(max(0, m.left))} left for KV: {room}"
        if m.window_tokens is not None:
            yield f"room for {m.window_tokens:,} tokens in sliding-window layers, which keep only the windows of requests and chunks"


def _texts(look: Outlook) -> Iterator[str]:
    assert look.texts is not None and look.config is not None
    t = look.texts
    yield "no tokenizer" if t.tokens is None else f"{t.tokens:,} token ids, and a vocabulary of {look.config.vocab_size:,}"
    if t.chat_template is not None:
        yield "a chat template" if not t.chat_template else f"no chats: {t.chat_template}"
    if t.end_tokens:
        yield f"replies end at {', '.join(f'{end or repr(end)} ({token})' for token, end in t.end_tokens)}"
