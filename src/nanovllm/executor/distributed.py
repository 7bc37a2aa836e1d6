"""Ranks of one model: how they join a group, and how they agree on what they find outside, such as free memory and times.

A rank is a process with a part of the model. All ranks make the same calls, so that their host states stay equal.
"""

import json
import socket
import uuid
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed

from nanovllm.config import Mesh
from nanovllm.ops.attention.plan_table import lookup
from nanovllm.ops.distributed.group import Group

V = TypeVar("V")
dist: Any = torch.distributed  # its types hide what groups are made of
HOST = "127.0.0.1"
NAME = "nanovllm"


def opened_store() -> Any:
    """The store of rank 0, at which the ranks meet. It listens on this host alone, at `port`, and holds the name of the group."""
    listener = socket.create_server((HOST, 0))  # a store that opens its own socket listens on all addresses
    port = listener.getsockname()[1]
    store = dist.TCPStore(HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    store.set(NAME, f"{NAME}-{uuid.uuid4().hex}")  # not the port, which a later store of this process may have again
    return store


def store_at(port: int) -> Any:
    """The store of rank 0, for another rank."""
    return dist.TCPStore(HOST, port, is_master=False)


def joined(store: Any, rank: int, size: int, device: torch.device, timeout: timedelta) -> tuple[Any, Any]:
    """Join a process group of its own, besides that of `torch.distributed.init_process_group`, so that a process may be in several.

    All ranks call this at the same time. CPU tensors go through gloo, those of a GPU through NCCL.

    Args:
        store: The ranks' store, of `opened_store`.
        rank: The number of this rank.
        size: The number of ranks.
        device: The device of this rank.
        timeout: How long a collective operation waits for the other ranks.

    Returns:
        The group, and its store, which must live as long as the group.
    """
    from nanovllm.ops.distributed.process_group import nccl_options
    from nanovllm.ops.distributed.renumbered_store import Renumbered

    name, kinds = store.get(NAME).decode(), dist.ProcessGroup.BackendType
    shared = dist.PrefixStore(name, store)
    own = Renumbered(shared)  # rank 0 may have been in other groups before, and then counts otherwise than the others
    group = dist.ProcessGroup(own, rank, size)
    near = dist.ProcessGroupGloo._Options()
    near._timeout, near._devices = timeout, [dist.ProcessGroupGloo.create_device(hostname=HOST)]
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("cpu", shared), rank, size, near)
    gloo._set_sequence_number_for_group()
    group._set_default_backend(kinds.GLOO)
    group._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
    if device.type == "cuda":
        nccl = dist.ProcessGroupNCCL(dist.PrefixStore("cuda", shared), rank, size, nccl_options(timeout))
        nccl._set_sequence_number_for_group()
        group._set_default_backend(kinds.NCCL)
        group._register_backend(torch.device("cuda"), kinds.NCCL, nccl)
    group._set_group_name(name)
    dist.distributed_c10d._register_process_group(name, group)  # by this name custom ops and symmetric memory find it
    return group, own


def limited(group: Any, device: torch.device, timeout: timedelta) -> None:
    """Change how long later operations of a group wait for the other ranks."""
    for kind in {"cpu", device.type}:
        group._get_backend(torch.device(kind))._set_default_timeout(timeout)


def left(mesh: Mesh) -> None:
    """Give up the other ranks, which may be gone: operations that wait for them raise."""
    lookup(mesh.group, Group).give_up()


def given_up(mesh: Mesh, seconds: float) -> bool:
    """Wait at most so long until nothing of a group works any more that was left. Returns whether that is so."""
    return lookup(mesh.group, Group).given_up(seconds)


def gathered(mesh: Mesh, data: bytes) -> list[bytes]:
    """The bytes of all ranks, which call this at the same time."""
    group = lookup(mesh.group, Group)
    lengths = group.all_gather(torch.tensor([len(data)])).flatten().tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    if data:
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return [row[:length].numpy().tobytes() for row, length in zip(group.all_gather(padded), lengths, strict=True)]


def agreed(mesh: Mesh | None, value: V) -> V:
    """The value of rank 0, on all ranks, which call this at the same time. It must be made of what JSON knows. Without a mesh: `value`."""
    return value if mesh is None else json.loads(gathered(mesh, json.dumps(value).encode())[0])


def of_each_rank(mesh: Mesh, value: int) -> list[int]:
    """The values of all ranks, which call this at the same time."""
    return lookup(mesh.group, Group).all_gather(torch.tensor([value])).flatten().tolist()


def least(mesh: Mesh | None, values: list[int]) -> list[int]:
    """The least of the ranks' values in each place, on all ranks, which call this at the same time. Without a mesh: `values`."""
    if mesh is None:
        return values
    return lookup(mesh.group, Group).all_gather(torch.tensor(values)).amin(0).tolist()
