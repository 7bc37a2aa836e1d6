"""Functions of the caller between the logits and the sample: `LogitsProcessor`, and its state in a batch of rows.

Shapes: B rows of a step; V vocabulary; W the most tokens that a row can have.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from nanovllm.errors import InvalidRequestError
from nanovllm.types import Bool, Float, Int32, Tensor, brief, brief_fields, function_name, register_value


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensSoFar:
    """The tokens of each row: its prompt, and what it has sampled.

    Attributes:
        token_ids: int32 `[B, W]`; only the first `lengths[b]` of row b are tokens. W is the same in `init` and in every step: in `submit`
            and `LLM` one more than `max_model_len`, and in the other calls a power of two with room for the replies.
        lengths: int32 `[B]`.

    Examples:
        >>> tokens = nv.TokensSoFar(token_ids=torch.tensor([[5, 6, 0], [7, 8, 9]]).int(), lengths=torch.tensor([2, 3]).int())
        >>> tokens.last().tolist()
        [6, 9]
    """

    token_ids: Int32[Tensor, "B W"]
    lengths: Int32[Tensor, "B"]

    def __repr__(self) -> str:
        return brief_fields(self)

    def last(self) -> Int32[Tensor, "B"]:
        """The newest token of each row.

        Returns:
            int32 `[B]`.

        Examples:
            >>> nv.TokensSoFar(token_ids=torch.tensor([[5, 6, 0]]).int(), lengths=torch.tensor([2]).int()).last().tolist()
            [6]
        """
        return self.token_ids.gather(1, (self.lengths - 1).clamp(min=0).long().unsqueeze(1)).squeeze(1)

    def valid(self) -> Bool[Tensor, "B W"]:
        """Which entries of `token_ids` are tokens.

        Returns:
            bool `[B, W]`.

        Examples:
            >>> nv.TokensSoFar(token_ids=torch.tensor([[5, 6, 0]]).int(), lengths=torch.tensor([2]).int()).valid().tolist()
            [[True, True, False]]
        """
        return torch.arange(self.token_ids.shape[1], device=self.lengths.device) < self.lengths.unsqueeze(1)


@dataclass(frozen=True, slots=True)
class LogitsProcessor:
    """A pure function from the logits of a step to the logits that tokens are sampled from, with tensors that it carries along.

    Without `init` the function is `function(logits, tokens)` and returns logits. With `init` it is `function(logits, tokens, carried)` and
    returns the logits and the next carried tensors. Logits are `[B, V]`, tokens are a `TokensSoFar`, and the carried tensors are a pytree
    whose leaves have the rows as their first axis; their other axes must be the same for every prompt. The function must not change a
    tensor in place and must not wait for the device. To fuse its operations, pass what `torch.compile` made of it.

    Two processors are equal if their functions are the same objects. Requests with equal processors share one call per step, and on a GPU
    one CUDA graph: make the function once, not for each request.

    Attributes:
        function: The function.
        init: From a `TokensSoFar` of prompts to the first carried tensors. None: nothing is carried.

    Examples:
        A processor that forbids the token that was sampled last:

        >>> def no_repeats(logits, tokens):
        ...     return logits.scatter(1, tokens.last().long().unsqueeze(1), -torch.inf)
        >>> greedy = nv.SamplingParams(temperature=0, max_tokens=4)
        >>> state, reply = nv.generate(model, state, "very very very", greedy, process_logits=nv.LogitsProcessor(no_repeats))
        >>> len(reply.token_ids)
        4
    """

    function: Callable[..., Any]
    init: Callable[[TokensSoFar], Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Processing:
    """A processor in a batch of rows.

    Attributes:
        processor: The processor. It belongs to the pytree's structure, like `arguments`.
        arguments: How many arguments its function takes: the logits, then the tokens, then what it carries.
        uses: Which rows it serves, bool `[B]`; None: all.
        carried: What it carries, a pytree of tensors with B rows.
    """

    processor: LogitsProcessor
    arguments: int
    uses: Bool[Tensor, "B"] | None = None
    carried: Any = None

    def __repr__(self) -> str:
        return brief_fields(self)


register_value(TokensSoFar)
register_value(Processing, static=("processor", "arguments"))


def as_processor(process_logits: Any) -> LogitsProcessor | None:
    """The processor that an argument `process_logits` stands for: None, a processor, or a function of the logits, or of logits and tokens.

    Raises:
        InvalidRequestError: It is something else.
    """
    if process_logits is None:
        return None
    given = process_logits
    function, init = (given.function, given.init) if isinstance(given, LogitsProcessor) else (given, None)
    if not callable(function) or not (init is None or callable(init)):
        raise InvalidRequestError(f"process_logits={given!r} must be a function of the logits, or a LogitsProcessor of functions")
    processor = given if isinstance(given, LogitsProcessor) else LogitsProcessor(function)
    try:
        hash(processor)
    except TypeError as error:
        raise InvalidRequestError(f"process_logits={given!r} must be hashable, because requests share a call by it") from error
    require_arguments(function, (1, 2) if init is None else (3,))
    return processor


WANTED = {
    (1,): "the logits alone: give begin(..., process_logits=...) a function that also takes the tokens",
    (1, 2): "the logits, or the logits and the tokens; for a function that carries tensors pass LogitsProcessor(function, init)",
    (3,): "the logits, the tokens and what it carries, because it has an init",
}  # by the numbers of arguments that a function may take


def require_arguments(function: Callable[..., Any], counts: tuple[int, ...]) -> None:
    """Raise `InvalidRequestError` if a function can be called with none of these numbers of arguments."""
    taken = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        signature = inspect.signature(taken)
    except (TypeError, ValueError):
        return
    for count in counts:
        try:
            signature.bind(*range(count))
            return
        except TypeError:
            continue
    raise InvalidRequestError(f"process_logits {function_name(function)} takes the arguments {signature}: it must take {WANTED[counts]}")


class Culprit(str):
    """A note on an exception: for which requests it was raised (none: all that the processor serves), and by which processor, if any."""

    processor: LogitsProcessor | None
    request_ids: tuple[int, ...]


@contextmanager
def blamed(processor: LogitsProcessor, request_ids: Sequence[int] = ()) -> Iterator[None]:
    """Add a `Culprit` to the notes of an exception that the block raises."""
    try:
        yield
    except Exception as error:
        blame(error, f"in process_logits {function_name(processor.function)}", processor, request_ids)
        raise


def blame(error: Exception, where: str, processor: LogitsProcessor | None, request_ids: Sequence[int]) -> None:
    """Add a `Culprit` to the notes of an exception."""
    note = Culprit(where)
    note.processor, note.request_ids = processor, tuple(request_ids)
    error.add_note(note)


def process(
    logits: Float[Tensor, "B V"], tokens: TokensSoFar, processing: Sequence[Processing]
) -> tuple[Float[Tensor, "B V"], tuple[Processing, ...]]:
    """The logits after all processors, each for its own rows, and the processors with what they carry next.

    Raises:
        InvalidRequestError: A processor returns something else than logits of the same shape, carries other shapes than before, or changes
            the logits in place.
    """
    if not torch.compiler.is_compiling() and logits.is_inference():  # such tensors do not count the writes to them
        with torch.inference_mode(False), torch.no_grad():
            return process(logits.clone(), tokens, processing)
    after = []
    for one in processing:
        if torch.compiler.is_compiling():
            new, carried = _called(one, logits, tokens)
        else:
            with blamed(one.processor):
                new, carried = _called(one, logits, tokens)
        if one.uses is not None:
            uses = one.uses
            new = torch.where(uses.unsqueeze(1), new, logits)
            carried = mapped(lambda value, old, uses=uses: torch.where(_like(uses, value), value, old), carried, one.carried)
        logits = new
        after.append(replace(one, carried=carried))
    return logits, tuple(after)


def mapped(function: Callable[..., Tensor], *carried: Any) -> Any:
    """A function of the tensors of trees of the same structure, leaf by leaf. None for processors that carry nothing."""
    return None if carried[0] is None else pytree.tree_map(function, *carried)


def _called(one: Processing, logits: Tensor, tokens: TokensSoFar) -> tuple[Tensor, Any]:
    function, carried = one.processor.function, one.carried
    version = None if torch.compiler.is_compiling() else logits._version
    if one.processor.init is None:
        new = function(*(logits, tokens)[: one.arguments])
    else:
        result = function(logits, tokens, one.carried)
        if not isinstance(result, tuple) or len(result) != 2:
            raise InvalidRequestError(
                f"process_logits {function_name(function)} returns {brief(result)}: with init it must return logits and carried tensors"
            )
        new, carried = result
        _require_like(function, carried, one.carried)
    require_logits(function, new, logits)
    if version is not None and logits._version != version:
        raise InvalidRequestError(
            f"process_logits {function_name(function)} changed the logits in place, which other rows need: return new logits"
        )
    return new, carried


def _num_arguments(processor: LogitsProcessor) -> int:
    """How many arguments a processor's function takes. A function of the logits alone need not take the tokens.

    A second parameter that has a default, and is not called `tokens`, is an option of the caller.
    """
    if processor.init is not None:
        return 3
    function = processor.function.forward if isinstance(processor.function, torch.nn.Module) else processor.function
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 2
    takes = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    one = len(takes) == 1 or (len(takes) > 1 and takes[1].default is not takes[1].empty and takes[1].name != "tokens")
    return 1 if one else 2


def require_logits(function: Callable[..., Any], new: Any, logits: Tensor) -> None:
    """Raise `InvalidRequestError` if a function made something else than logits out of logits."""
    if not isinstance(new, Tensor) or new.shape != logits.shape or not new.is_floating_point():
        shape = list(logits.shape)
        raise InvalidRequestError(f"process_logits {function_name(function)} returns {brief(new)}: it must return logits {shape}")


def require_alike(processor: LogitsProcessor, carried: Any, other: Any) -> None:
    """Raise `InvalidRequestError` if `init` made values of other shapes for one prompt than for another."""
    (mine, spec), (others, before) = pytree.tree_flatten(carried), pytree.tree_flatten(other)
    if spec != before or any(a.shape != b.shape or a.dtype != b.dtype for a, b in zip(mine, others, strict=True)):
        raise InvalidRequestError(
            f"process_logits {function_name(processor.init)} returns rows {brief(mine)} for one prompt and {brief(others)} for another: "
            "their shapes must not depend on the prompt"
        )


def _require_like(function: Callable[..., Any], carried: Any, old: Any) -> None:
    new, spec = pytree.tree_flatten(carried)
    leaves, before = pytree.tree_flatten(old)
    if spec != before:
        raise InvalidRequestError(
            f"process_logits {function_name(function)} carries a tree of {len(new)} tensors after one of {len(leaves)}, or with other "
            "containers: the tree that init returns must stay the same"
        )
    alike = all(isinstance(value, Tensor) for value in new)
    if not alike or any(a.shape != b.shape or a.dtype != b.dtype for a, b in zip(new, leaves, strict=True)):
        raise InvalidRequestError(
            f"process_logits {function_name(function)} carries {brief(new)} after {brief(leaves)}: shapes and dtypes must stay the same"
        )


def _like(uses: Tensor, value: Tensor) -> Tensor:
    return uses.view(-1, *[1] * (value.dim() - 1))


def processing_of(processor: LogitsProcessor, carried: Any, uses: Tensor | None = None) -> Processing:
    """A processor in a batch, with what it carries."""
    return Processing(processor=processor, arguments=_num_arguments(processor), uses=uses, carried=carried)


def first_carried(processor: LogitsProcessor, tokens: TokensSoFar) -> Any:
    """What a processor carries into the first step of rows with these tokens.

    Raises:
        InvalidRequestError: `init` returns something else than tensors with one row for each row of tokens.
    """
    if processor.init is None:
        return None
    carried, rows = processor.init(tokens), tokens.lengths.shape[0]
    leaves = pytree.tree_leaves(carried)
    if not leaves or any(not isinstance(leaf, Tensor) or leaf.dim() < 1 or leaf.shape[0] != rows for leaf in leaves):
        raise InvalidRequestError(f"init returns {brief(leaves)}: every leaf must be a tensor whose first axis has {rows} rows")
    return carried


def tokens_of(rows: Sequence[np.ndarray], width: int, device: torch.device) -> TokensSoFar:
    """The tokens of rows, each an int32 array of at most `width` tokens."""
    lengths = np.array([len(ids) for ids in rows], np.int32)
    used = np.zeros((len(rows), max(lengths, default=0)), np.int32)
    for row, ids in zip(used, rows, strict=True):
        row[: len(ids)] = ids
    table = torch.zeros(len(rows), width, dtype=torch.int32, device=device)  # only the used part is copied to the device
    table[:, : used.shape[1]] = torch.from_numpy(used).to(device)
    return TokensSoFar(token_ids=table, lengths=torch.from_numpy(lengths).to(device))
