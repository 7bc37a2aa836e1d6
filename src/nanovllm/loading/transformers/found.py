"""`Found`: a transformers class that can run a checkpoint, and how its limits are reported."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from nanovllm.errors import CheckpointError
from nanovllm.models.common.hf_config import HF


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The class that runs a checkpoint.

    Attributes:
        model: The class.
        config: Its config.
        code: The Python files of the checkpoint that were run, if any.
    """

    model: type[PreTrainedModel]
    config: PreTrainedConfig
    code: tuple[Path, ...]

    @property
    def decoder(self) -> PreTrainedConfig:
        """The decoder's part of the config."""
        return self.config.get_text_config(decoder=True)


def refuse(found: Found, why: str, cause: Exception | None = None) -> NoReturn:
    """Raise the `CheckpointError` that says why a class cannot run."""
    raise CheckpointError(f"{found.model.__name__} is not built in, and cannot be run through transformers: {why}") from cause


def canonical(hf: HF) -> bytes:
    """The bytes of a whole config, independent of the order of its keys."""
    return json.dumps(hf, sort_keys=True).encode()


def note(text: str) -> None:
    """Print one line to stderr, flushed before anything else happens."""
    print(f"nanovllm: {text}", file=sys.stderr, flush=True)


@contextmanager
def as_checkpoint_error(what: str) -> Iterator[None]:
    """Turn an exception of transformers, or of a checkpoint's code, into a `CheckpointError` that begins with `what`."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:300]}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers: no logs below an error, and no progress bars. Its switches are global, and are restored afterwards."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
