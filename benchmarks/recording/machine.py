"""What figures depend on: the names of the GPUs, the commit and the versions.

They are asked for in a process of its own, which ends: a process that asked and stayed would hold memory of a GPU.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any


class Machine:
    """The answers of the process, which runs beside this one until it has answered."""

    def __init__(self) -> None:
        """Start the process."""
        command = [sys.executable, "-m", __spec__.name]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self._told: Mapping[str, Any] | None = None

    def told(self, *, wait: bool) -> Mapping[str, Any]:
        """The answers: `gpus`, `commit` and `versions`. Empty if they have not come and `wait` is False, or if the process has failed."""
        if self._told is None and (wait or self._process.poll() is not None):
            self._told = {}
            with suppress(json.JSONDecodeError, IndexError):
                self._told = json.loads(self._process.communicate()[0].splitlines()[-1])
        return self._told or {}


def main() -> None:
    """Print the answers."""
    import torch

    from nanovllm.entrypoints.cli.bench.environment import commit, versions

    for name in ("triton", "flashinfer"):
        with suppress(ImportError):
            import_module(name)
    gpus = [torch.cuda.get_device_name(card) for card in range(torch.cuda.device_count())]
    print(json.dumps({"gpus": gpus, "commit": commit(), "versions": versions()}))


if __name__ == "__main__":
    main()
