"""The time from the start of a process to its first token, measured in a new process that loads a model and starts an engine."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

from safetensors import SafetensorError

from nanovllm.config import ModelConfig
from nanovllm.entrypoints.cli.bench.model_shapes import SHAPES
from nanovllm.entrypoints.cli.bench.workloads import PROMPT, random_tokens
from nanovllm.entrypoints.process import ended_in_order
from nanovllm.errors import NanoVLLMError
from nanovllm.loading.hub import resolve_folder
from nanovllm.loading.weights import save_params
from nanovllm.models.init_params import num_params
from nanovllm.models.model import Model
from nanovllm.models.registry import unfitted
from nanovllm.types import dtype_of

TIMEOUT = 600.0  # seconds until the first token
SPARE = 1 << 28  # bytes of disk that stay free
CACHES = ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "TORCHINDUCTOR_CACHE_DIR")  # where kernels are kept
NONE: Mapping[str, Any] = MappingProxyType({})
# The monotonic clock is the same in both processes, so the first interval includes the start of Python.
PROGRAM = """\
import json, sys, time
began, folder, device, dtype, tokenizer, limits, rounding, prompt = json.loads(sys.argv[1])
import nanovllm as nv
marks = [began, time.monotonic()]
model = nv.load_model(folder, device, dtype, tokenizer=tokenizer, **rounding)
marks.append(time.monotonic())
state = nv.init_state(model, **limits)
marks.append(time.monotonic())
nv.generate(model, state, prompt, nv.SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
marks.append(time.monotonic())
print(json.dumps(marks))
"""


class StartError(NanoVLLMError):
    """The new process ended without a token, or reached the time limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The parts of the time from the start of a process to its first token, in seconds.

    Attributes:
        imports_s: Starting Python and importing.
        weights_s: Loading the model.
        engine_s: Starting the engine.
        first_token_s: Running the prompt up to its first token.
    """

    imports_s: float
    weights_s: float
    engine_s: float
    first_token_s: float

    @property
    def start_s(self) -> float:
        """The sum of all parts, in seconds."""
        return round(self.imports_s + self.weights_s + self.engine_s + self.first_token_s, 3)


def measure_start(
    model: Model, name: str, limits: Mapping[str, Any] = NONE, rounding: Mapping[str, Any] = NONE, *, bare: bool = False
) -> Start:
    """Measure the start of a process for a model. The process runs twice, and the second run counts, because the first fills caches.

    Python's bytecode is one of them, which an installation normally has. So both runs keep it in a temporary folder, whatever the
    environment says.

    With `bare` it runs once, as on a machine that has built no kernels: all caches are empty folders, which are removed at the end.

    Random weights are written to a temporary folder first, not quantised, and removed at the end. `too_large` checks that they fit.

    Args:
        model: The model.
        name: The name that it was loaded by, or a key of `SHAPES`.
        limits: Options of `init_state`.
        rounding: The values of `arguments.rounding`, with which the new process loads the model.
        bare: Whether all caches are empty.

    Raises:
        StartError: The weights could not be written, or the process gave no token.
    """
    with ended_in_order(), _folder(model, name) as folder:
        if bare:
            with tempfile.TemporaryDirectory(prefix="nanovllm-bare-", ignore_cleanup_errors=True) as empty:
                return _run(model, folder, limits, rounding, os.environ | dict.fromkeys(CACHES, empty))
        with tempfile.TemporaryDirectory(prefix="nanovllm-bytecode-") as bytecode:
            environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
            environment["PYTHONPYCACHEPREFIX"] = bytecode
            _run(model, folder, limits, rounding, environment)
            return _run(model, folder, limits, rounding, environment)


def too_large(name: str, config: ModelConfig) -> str | None:
    """The reason why the weights of one of `SHAPES` do not fit into the temporary folder; None if they fit or are already on disk."""
    if name not in SHAPES:
        return None
    where = tempfile.gettempdir()
    size, free = num_params(config) * dtype_of(config.dtype).itemsize, shutil.disk_usage(where).free
    if size + SPARE <= free:
        return None
    return f"its weights take {size / 1e9:,.1f} GB of disk, {where} has {free / 1e9:,.1f} GB free; set TMPDIR to another folder"


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


def _run(model: Model, folder: Path, limits: Mapping[str, Any], rounding: Mapping[str, Any], environment: Mapping[str, str]) -> Start:
    prompt = random_tokens(Random(6), PROMPT, model.config.vocab_size)
    where = (str(folder), str(model.device), str(model.dtype).removeprefix("torch."))
    given = (*where, model.tokenizer is not None, dict(limits), dict(rounding), prompt)
    command = [sys.executable, "-c", PROGRAM, json.dumps((time.monotonic(), *given), default=str)]  # a path as text
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT, env=environment)
    except subprocess.TimeoutExpired as error:
        raise StartError(f"a new process gave no token within {TIMEOUT:g} s") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        last = lines[-1] if lines else "it printed no error"
        raise StartError(f"a new process exited with status {done.returncode} before its first token: {last}")
    marks = json.loads(done.stdout.splitlines()[-1])
    seconds = (round(after - before, 3) for before, after in pairwise(marks))
    return Start(**dict(zip(Start.__dataclass_fields__, seconds, strict=True)))
