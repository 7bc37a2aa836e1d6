"""The process of a server's engine: it loads the model, says that it is ready, and serves front ends until SIGTERM."""

import os
import signal
import socket
import sys
from typing import Any

from nanovllm.entrypoints.llm import LLM
from nanovllm.entrypoints.process import freeze
from nanovllm.entrypoints.server.engine_loop import EngineLoop
from nanovllm.entrypoints.server.starting import DEAD, READY, tell
from nanovllm.errors import EngineDeadError, NanoVLLMError


def run_engine(model: str, options: dict[str, Any], limits: dict[str, Any], listener: socket.socket, ready: int) -> int:
    """Run an engine. Returns the process's exit code.

    Args:
        model: As in `LLM`.
        options: The options of `LLM`.
        limits: The limits of `EngineLoop`.
        listener: The socket that front ends connect to.
        ready: A file descriptor that is told `READY`, or the error of a start that failed.
    """
    try:
        llm = LLM(model, **options)
    except NanoVLLMError as error:
        return tell(ready, error)
    freeze()
    loop = EngineLoop(llm.model, llm.state, listener, **limits)
    loop.stop_on(signal.SIGTERM)
    os.write(ready, READY)
    try:
        loop.run()
    except EngineDeadError as error:
        print(f"nanovllm: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return DEAD
    return 0
