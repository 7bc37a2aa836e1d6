"""The environment that figures depend on: machine, versions, commit and command."""

import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nanovllm.models.model import Model


def versions() -> dict[str, str]:
    """The versions of Python, torch, and the libraries that this process has imported."""
    numbers = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "flashinfer", "transformers"):
        module = sys.modules.get(name)
        if module is not None:
            numbers[name] = str(getattr(module, "__version__", "?"))
    return numbers


def commit() -> str:
    """The commit of the running source tree, with `+` appended if files differ from it; `unknown` outside a checkout."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def record(model: Model, figures: Mapping[str, Any], command: str, at: str | None = None) -> dict[str, Any]:
    """The JSON object of one run: its environment and its figures. `at` is the commit; None asks git."""
    cuda, threads = model.device.type == "cuda", torch.get_num_threads()
    return {
        "engine": "nanovllm",
        "gpu": torch.cuda.get_device_name(model.device) if cuda else None,
        "cpu": None if cuda else f"{platform.machine()}, {threads} thread{'s' * (threads > 1)}",
        "commit": at or commit(),
        "versions": versions(),
        "command": command,
        "model": model.name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": model.quantization or None,
        **figures,
    }
