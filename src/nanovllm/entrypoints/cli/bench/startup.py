"""From the start of a process to its first token: a fresh one that imports, loads a folder, starts an engine and replies."""

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random

from safetensors import SafetensorError

from nanovllm.config import ModelConfig
from nanovllm.entrypoints.cli.bench.model_shapes import SHAPES
from nanovllm.entrypoints.cli.bench.workloads import PROMPT, random_tokens
from nanovllm.errors import NanoVLLMError
from nanovllm.loading.hub import resolve_folder
from nanovllm.loading.weights import save_params
from nanovllm.models.init_params import num_params
from nanovllm.models.model import Model
from nanovllm.models.registry import unfitted
from nanovllm.types import dtype_of

TIMEOUT = 600.0  # seconds until the first token
SPARE = 1 << 28  # bytes of disk that are left to others
# The clock runs on from process to process, so that the first interval holds the start of Python too.
PROGRAM = """\
import json, sys, time
began, folder, device, dtype, tokenizer, tuning, prompt = json.loads(sys.argv[1])
import nanovllm as nv
marks = [began, time.monotonic()]
model = nv.load_model(folder, device, dtype, tokenizer=tokenizer)
marks.append(time.monotonic())
state = nv.init_state(model, tuning=tuning)
marks.append(time.monotonic())
nv.generate(model, state, prompt, nv.SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
marks.append(time.monotonic())
print(json.dumps(marks))
"""


class StartError(NanoVLLMError):
    """The fresh process ended without a token, or had none in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Seconds from the start of a process to its first token, and what they are made of; Python and what it loads count as `imports`."""

    imports_s: float
    weights_s: float
    engine_s: float
    first_token_s: float

    @property
    def start_s(self) -> float:
        """All of them."""
        return round(self.imports_s + self.weights_s + self.engine_s + self.first_token_s, 3)


def measure_start(model: Model, name: str, tuning: Path | bool | None = None) -> Start:
    """The start of a process over the model that `name` names: the second of two, as the first one fills caches.

    Random weights are written to a folder for temporary files first and removed then (see `too_large`). `tuning`: see `init_state`.
    Raises `StartError`.
    """
    with _ended_in_order(), _folder(model, name) as folder:
        _run(model, folder, tuning)
        return _run(model, folder, tuning)


def too_large(name: str, config: ModelConfig) -> str | None:
    """Why the weights of one of `SHAPES` cannot be written to the folder for temporary files; None: they can, or are on disk already."""
    if name not in SHAPES:
        return None
    where = tempfile.gettempdir()
    size, free = num_params(config) * dtype_of(config.dtype).itemsize, shutil.disk_usage(where).free
    if size + SPARE <= free:
        return None
    return f"its weights take {size / 1e9:,.1f} GB of disk, {where} has {free / 1e9:,.1f} GB free; TMPDIR names another folder"


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """SIGTERM unwinds the stack, so that what was written is removed and the fresh process ends too."""
    if threading.current_thread() is not threading.main_thread():
        yield  # no other may say what a signal does
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _folder(model: Model, name: str) -> Iterator[Path]:
    if name not in SHAPES:
        yield resolve_folder(name)[0]
        return
    with tempfile.TemporaryDirectory(prefix="nanovllm-bench-") as made:
        folder = Path(made)
        try:
            save_params(model.params, model.config, folder, dtype_of(model.config.dtype))
            (folder / "config.json").write_text(json.dumps(model.spec.config_to_hf(unfitted(model.config))), encoding="utf-8")
        except (OSError, SafetensorError) as error:
            raise StartError(f"the weights could not be written to {folder}: {error}") from error
        yield folder


def _run(model: Model, folder: Path, tuning: Path | bool | None) -> Start:
    prompt = random_tokens(Random(6), PROMPT, model.config.vocab_size)
    where = (str(folder), str(model.device), str(model.dtype).removeprefix("torch."))
    given = (*where, model.tokenizer is not None, str(tuning) if isinstance(tuning, Path) else tuning, prompt)
    command = [sys.executable, "-c", PROGRAM, json.dumps((time.monotonic(), *given))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT)
    except subprocess.TimeoutExpired as error:
        raise StartError(f"a fresh process had no token after {TIMEOUT:g} s") from error
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise StartError(f"a fresh process ended with {done.returncode} before its first token: {said[-1] if said else 'it said nothing'}")
    marks = json.loads(done.stdout.splitlines()[-1])
    seconds = (round(after - before, 3) for before, after in pairwise(marks))
    return Start(**dict(zip(Start.__dataclass_fields__, seconds, strict=True)))
