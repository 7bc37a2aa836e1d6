"""The model that the options name, for commands that take no random weights, and its engine on one or several GPUs."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nanovllm.entrypoints.arguments import rounding, source
from nanovllm.entrypoints.llm import LLM
from nanovllm.errors import CheckpointError
from nanovllm.loading.hub import is_local
from nanovllm.loading.load_model import load_model
from nanovllm.models.model import Model


def load(options: argparse.Namespace) -> Model:
    """Load the model of `add_model_options`.

    Raises:
        CheckpointError: The model cannot be loaded. The message names the commands that take the name of a shape for random weights.
    """
    with _explained(options):
        where = {**source(options), **rounding(options)}
        return load_model(options.model, options.device, options.dtype, max_model_len=options.max_model_len, **where)


def load_engine(options: argparse.Namespace, **limits: Any) -> LLM:
    """The model of `add_model_options` in an engine on as many GPUs as `add_ranks` says.

    Raises:
        NanoVLLMError: As `load` and `LLM`.
    """
    if options.tensor_parallel_size == 1:
        return LLM(load(options), **limits)
    with _explained(options):
        where = {**source(options), **rounding(options), "tensor_parallel_size": options.tensor_parallel_size}
        return LLM(options.model, device=options.device, dtype=options.dtype, **where, **limits)


@contextmanager
def _explained(options: argparse.Namespace) -> Iterator[None]:
    """Tell of a model that is not found that it is the name of a shape for random weights, if it is one."""
    try:
        yield
    except CheckpointError:
        if options.download or is_local(options.model):
            raise
        from nanovllm.entrypoints.cli.bench.model_shapes import SHAPES  # slow to import, and seldom needed

        if options.model in SHAPES:
            name = f"{options.model!r} names a shape for random weights, which only check, tune, bench and profile take"
            raise CheckpointError(f"{name}: give a folder, a repository such as Qwen/Qwen3-0.6B, or tiny") from None
        raise
