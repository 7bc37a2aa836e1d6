"""A transformers class that can run a checkpoint, and how what it lacks is reported."""

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
    """The class that runs a checkpoint, its config, and the files of Python that came with it and were run."""

    model: type[PreTrainedModel]
    config: PreTrainedConfig
    code: tuple[Path, ...]

    @property
    def decoder(self) -> PreTrainedConfig:
        """The part of the config that is the decoder's."""
        return self.config.get_text_config(decoder=True)


def refuse(found: Found, why: str, cause: Exception | None = None) -> NoReturn:
    """Raise the `CheckpointError` that says why a class cannot be run."""
    raise CheckpointError(f"{found.model.__name__} is not built in, and cannot be run through transformers: {why}") from cause


def canonical(hf: HF) -> bytes:
    """The whole of a config, whatever the order of its keys."""
    return json.dumps(hf, sort_keys=True).encode()


def note(text: str) -> None:
    """One line on stderr, there before anything else happens."""
    print(f"nanovllm: {text}", file=sys.stderr, flush=True)


@contextmanager
def as_checkpoint_error(what: str) -> Iterator[None]:
    """What transformers, or a checkpoint's code, raises inside becomes a `CheckpointError` that begins with `what`."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:300]}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """transformers says nothing of its own inside: no log below an error, no bars. Its switches are the process's; they are put back."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
