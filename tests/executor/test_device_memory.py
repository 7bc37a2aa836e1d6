"""The memory that the system reports, in a container and outside of one."""

from pathlib import Path

import pytest
import torch

from nanovllm.executor import device_memory
from nanovllm.executor.device_memory import Room

CPU = torch.device("cpu")


def test_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meminfo, cgroup = tmp_path / "meminfo", tmp_path / "cgroup"
    monkeypatch.setattr(device_memory, "MEMINFO", meminfo)
    monkeypatch.setattr(device_memory, "CGROUP", cgroup)
    assert device_memory.room(CPU) is None
    meminfo.write_text("MemTotal:     1000 kB\nMemAvailable:  600 kB\nHugePages: x\n")
    assert device_memory.room(CPU) == Room(total=1024000, free=614400)
    cgroup.mkdir()
    for name, told in {"max": "max", "current": "100000", "stat": "anon 1\ninactive_file 30000\n"}.items():
        (cgroup / f"memory.{name}").write_text(told)
    assert device_memory.room(CPU) == Room(total=1024000, free=614400)
    (cgroup / "memory.max").write_text("500000\n")
    assert device_memory.room(CPU) == Room(total=500000, free=430000)
