"""The calls that all ranks make: their functions by name, and how a call that rank 0 has sent is made on another rank."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from nanovllm.chunks.compose import compose, drop
from nanovllm.chunks.generate import generate, generate_many
from nanovllm.chunks.handles import detach, fork, release, truncate
from nanovllm.chunks.offload import offload
from nanovllm.chunks.prefill import prefill
from nanovllm.chunks.score import score
from nanovllm.chunks.storage.file import gather_rows, load
from nanovllm.chunks.storage.reserved import fill, reserve
from nanovllm.engine.disk_flush import flush_pages
from nanovllm.engine.donation import model_key
from nanovllm.engine.requests import cancel, submit, submit_many
from nanovllm.engine.step import step
from nanovllm.entrypoints.conversation import answer_of
from nanovllm.entrypoints.ranks.codec import decode, encode
from nanovllm.entrypoints.ranks.examined import examine_parts
from nanovllm.errors import InvalidRequestError
from nanovllm.models.model import Model
from nanovllm.state.chunk import Chunk
from nanovllm.state.engine_state import EngineState

CALLS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        function.__name__: function
        for function in (
            submit, submit_many, cancel, step, prefill, generate, generate_many, fork, truncate, release, detach, compose, drop, score,
            offload, load, reserve, fill, flush_pages, gather_rows, answer_of, examine_parts,
        )
    }
)  # fmt: skip
OWN = ("model", "state")  # arguments that every rank has itself
DESCRIPTOR = "fd"  # the argument that is an open file, which goes to other processes beside the bytes
WITHOUT: Mapping[str, bytes] = MappingProxyType({name: encode([name, {}]) for name in CALLS})


def encoded(state: EngineState, name: str, arguments: Mapping[str, Any]) -> tuple[bytes, list[int]] | None:
    """A call as bytes, with the files that belong to it.

    Returns:
        None for a call that will raise an error on this rank: the others need not make it. Its state was donated, the model is another one,
        or a chunk belongs to another engine or was released.

    Raises:
        InvalidRequestError: An argument cannot be sent.
    """
    given, lease = arguments["state"], state.runtime.lease
    if given.runtime.lease is not lease or given.epoch != lease.epoch:
        return None
    if "model" in arguments and (not isinstance(model := arguments["model"], Model) or model_key(model) != lease.model):
        return None
    if arguments.get("process_logits") is not None:
        why = "a function cannot be sent to the other ranks of this engine"
        raise InvalidRequestError(f"process_logits: {why}: run the whole program on every rank, with torchrun")
    sent = {key: value for key, value in arguments.items() if key not in (*OWN, DESCRIPTOR)}
    if not sent:
        return WITHOUT[name], []
    if any(chunk.engine != lease.engine or chunk.liveness not in given.chunks for chunk in _chunks(sent)):
        return None
    return encode([name, sent]), [arguments[DESCRIPTOR]] if DESCRIPTOR in arguments else []


def called(model: Model, state: EngineState, data: bytes, files: list[int]) -> tuple[EngineState, Any]:
    """Make a call that `encoded` describes.

    Returns:
        The next state, and what else the call returns.
    """
    name, arguments = decode(data, lambda liveness: state.chunks[liveness])
    function = CALLS[name]
    own: dict[str, Any] = {"state": state} if name in STATE_ALONE else {"model": model, "state": state}
    opened = {DESCRIPTOR: files[0]} if files else {}
    result = function(**own, **opened, **arguments)
    return result if isinstance(result, tuple) else (result, None)


STATE_ALONE = frozenset(("cancel", "fork", "truncate", "release", "offload", "flush_pages", "gather_rows"))


def _chunks(value: Any) -> list[Chunk]:
    if isinstance(value, Chunk):
        return [value]
    if isinstance(value, dict):
        return [chunk for each in value.values() for chunk in _chunks(each)]
    if isinstance(value, list | tuple) and set(map(type, value)) != {int}:
        return [chunk for each in value for chunk in _chunks(each)]
    return []
