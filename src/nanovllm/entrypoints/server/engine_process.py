"""The process of a server's engine: it loads the model, says that it is ready, and serves front ends until SIGTERM."""

import os
import signal
import socket
from dataclasses import replace
from typing import Any

from nanovllm.engine.disk_flush import flush_kv
from nanovllm.entrypoints.async_llm import STEP_MS
from nanovllm.entrypoints.llm import LLM
from nanovllm.entrypoints.process import freeze
from nanovllm.entrypoints.ranks.leader import start
from nanovllm.entrypoints.ranks.settings import RANK_TIMEOUT, chosen_devices, settings_of
from nanovllm.entrypoints.server.engine_loop import EngineLoop
from nanovllm.entrypoints.server.serving_tokenizer import ReplyFormats
from nanovllm.entrypoints.server.starting import DEAD, READY, tell
from nanovllm.errors import EngineDeadError, NanoVLLMError
from nanovllm.loading.load_model import load_model, resolve_device
from nanovllm.models.model import Model
from nanovllm.operator_lines import say
from nanovllm.sampling.compiled_grammar import prepare_grammars

WHERE = {
    "device": None, "dtype": None, "revision": None, "download": False, "trust_remote_code": False, "quantization": None,
    "quantize_head": False, "fp8_activations": False,
}  # fmt: skip


def run_engine(
    model: str,
    options: dict[str, Any],
    parsers: tuple[str, str],
    limits: dict[str, Any],
    listener: socket.socket,
    ready: int,
    *,
    again: bool = False,
) -> int:
    """Run an engine. Returns the process's exit code.

    Args:
        model: As in `LLM`.
        options: The options of `LLM`.
        parsers: The names of the formats of tool calls and of think blocks.
        limits: The limits of `EngineLoop`.
        listener: The socket that front ends connect to.
        ready: A file descriptor that is told `READY`, or the error of a start that failed.
        again: Whether an engine of this server before this one has failed: its chunks that have files are loaded.
    """
    try:
        llm = load_llm(model, options, *parsers)
    except NanoVLLMError as error:
        return tell(ready, error)
    prepare_grammars(llm.model.tokenizer, llm.model.config.vocab_size, llm.model.config.eos_token_ids)
    freeze()
    loop = EngineLoop(llm.model, llm.state, listener, **limits)
    loop.stop_on(signal.SIGTERM)
    try:
        loop.load_chunks(again=again)
        os.write(ready, READY)
        loop.run()
        loop.save_chunks()
        flush_kv(loop.state)
    except EngineDeadError as error:
        say(f"error: {' '.join(str(error).split())}")
        return DEAD
    return 0


def load_llm(model: str, options: dict[str, Any], tool_parser: str, reasoning_parser: str) -> LLM:
    """A model and an engine whose texts show the marks of tool calls and think blocks.

    Raises:
        NanoVLLMError: As `LLM`, or a format's name is unknown.
    """
    options = dict(options)
    size = options.pop("tensor_parallel_size", 1)
    where = {name: options.pop(name, default) for name, default in WHERE.items()}
    cuda = resolve_device(where["device"]).type == "cuda"
    if options.get("max_step_ms") is None and cuda:
        options["max_step_ms"] = STEP_MS  # as in an `AsyncLLM`
    if size > 1:
        devices = chosen_devices(size, where.pop("device"), None)
        settings = settings_of(model, devices, {**where, "max_model_len": options.get("max_model_len")}, options, RANK_TIMEOUT)
        return LLM.around(*start(replace(settings, change=(f"{__name__}:shown", (tool_parser, reasoning_parser)))))
    loaded = load_model(model, **where, max_model_len=options.get("max_model_len"))
    return LLM(shown(loaded, tool_parser, reasoning_parser), **options)


def shown(model: Model, tool_parser: str, reasoning_parser: str) -> Model:
    """A model whose texts show the marks of tool calls and think blocks.

    Raises:
        InvalidRequestError: A format's name is unknown.
    """
    if model.tokenizer is None:
        return model
    formats = ReplyFormats.of(model.tokenizer, tool_parser, reasoning_parser)
    return replace(model, tokenizer=formats.shown(model.tokenizer))
