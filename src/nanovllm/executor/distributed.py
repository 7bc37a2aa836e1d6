"""Ranks of one model: how they join a group, and how they agree on what they find outside, such as free memory and times.

A rank is a process with a part of the model. All ranks make the same calls, so that their host states stay equal.
"""

import json
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import torch.distributed

from nanovllm.types import Tensor

dist: Any = torch.distributed  # its types hide what groups are made of
HOST = "127.0.0.1"
NAME = "nanovllm"


@runtime_checkable
class Gathering(Protocol):
    """The part of a group that agreements need."""

    def all_gather(self, x: Tensor) -> Tensor:
        """The ranks' tensors, stacked."""
        ...


def opened_store() -> Any:
    """The store of rank 0, at which the ranks meet. It listens on this host alone, at `port`."""
    return dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)


def store_at(port: int) -> Any:
    """The store of rank 0, for another rank."""
    return dist.TCPStore(HOST, port, is_master=False)


def joined(store: Any, rank: int, size: int, device: torch.device, timeout: timedelta) -> Any:
    """Join a process group of its own, besides that of `torch.distributed.init_process_group`, so that a process may be in several.

    All ranks call this at the same time. CPU tensors go through gloo, those of a GPU through NCCL.

    Args:
        store: The ranks' store.
        rank: The number of this rank.
        size: The number of ranks.
        device: The device of this rank.
        timeout: How long a collective operation waits for the other ranks.
    """
    name, kinds = f"{NAME}-{store.port}", dist.ProcessGroup.BackendType
    shared = dist.PrefixStore(name, store)
    group = dist.ProcessGroup(shared, rank, size)
    near = dist.ProcessGroupGloo._Options()
    near._timeout, near._devices = timeout, [dist.ProcessGroupGloo.create_device(hostname=HOST)]
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("cpu", shared), rank, size, near)
    gloo._set_sequence_number_for_group()
    group._set_default_backend(kinds.GLOO)
    group._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
    if device.type == "cuda":
        far = dist.ProcessGroupNCCL.Options()
        far._timeout = timeout
        nccl = dist.ProcessGroupNCCL(dist.PrefixStore("cuda", shared), rank, size, far)
        nccl._set_sequence_number_for_group()
        group._set_default_backend(kinds.NCCL)
        group._register_backend(torch.device("cuda"), kinds.NCCL, nccl)
    group._set_group_name(name)
    dist.distributed_c10d._register_process_group(name, group)  # by this name custom ops and symmetric memory find it
    return group


def left(group: Any) -> None:
    """Give up a group whose other ranks may be gone: operations that wait for them raise."""
    with suppress(Exception):
        group.abort()


def agreed(group: Gathering, value: Any) -> Any:
    """The value of rank 0, on all ranks. It must be made of what JSON knows."""
    own = np.frombuffer(json.dumps(value).encode(), np.uint8)
    lengths = group.all_gather(torch.tensor([len(own)]))
    longest = int(lengths.max())
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(own)] = torch.from_numpy(own.copy())
    first = group.all_gather(padded)[0][: int(lengths[0])]
    return json.loads(first.numpy().tobytes())


def least(group: Gathering, value: int) -> int:
    """The least of the ranks' values, on all ranks."""
    return int(group.all_gather(torch.tensor([value])).min())
