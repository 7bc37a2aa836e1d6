"""The model that the options name, for commands that take no random weights."""

import argparse

from nanovllm.entrypoints.arguments import rounding, source
from nanovllm.errors import CheckpointError
from nanovllm.loading.hub import is_local
from nanovllm.loading.load_model import load_model
from nanovllm.models.model import Model


def load(options: argparse.Namespace) -> Model:
    """Load the model of `add_model_options`.

    Raises:
        CheckpointError: The model cannot be loaded. The message names the commands that take the name of a shape for random weights.
    """
    try:
        where = {**source(options), **rounding(options)}
        return load_model(options.model, options.device, options.dtype, max_model_len=options.max_model_len, **where)
    except CheckpointError:
        if options.download or is_local(options.model):
            raise
        from nanovllm.entrypoints.cli.bench.model_shapes import SHAPES  # slow to import, and seldom needed

        if options.model in SHAPES:
            name = f"{options.model!r} names a shape for random weights, which only check, tune, bench and profile take"
            raise CheckpointError(f"{name}: give a folder, a repository such as Qwen/Qwen3-0.6B, or tiny") from None
        raise
