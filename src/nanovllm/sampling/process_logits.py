"""Functions of the caller between the logits and the sample: `LogitsProcessor`, and its state in a batch of rows.

Shapes: B rows of a step; V vocabulary; W the most tokens that a row can have.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from nanovllm.errors import InvalidRequestError
from nanovllm.types import Bool, Float, Int32, Tensor, brief, brief_fields, register_value


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensSoFar:
    """The tokens of each row: its prompt, and what it has sampled.

    Attributes:
        token_ids: int32 `[B, W]`; only the first `lengths[b]` of row b are tokens.
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
    whose leaves have the rows as their first axis. The function must not change a tensor in place and must not wait for the device. To fuse
    its operations, pass what `torch.compile` made of it.

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
    return processor


def process(
    logits: Float[Tensor, "B V"], tokens: TokensSoFar, processing: Sequence[Processing]
) -> tuple[Float[Tensor, "B V"], tuple[Processing, ...]]:
    """The logits after all processors, each for its own rows, and the processors with what they carry next.

    Raises:
        InvalidRequestError: A processor returns something else than logits of the same shape, carries other shapes than before, or changes
            the logits in place.
    """
    after = []
    for one in processing:
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
    version = None if torch.compiler.is_compiling() or logits.is_inference() else logits._version
    if one.processor.init is None:
        new = function(*(logits, tokens)[: one.arguments])
    else:
        result = function(logits, tokens, one.carried)
        if not isinstance(result, tuple) or len(result) != 2:
            raise InvalidRequestError(f"{_name(function)} returns {brief(result)}: with init it must return logits and carried tensors")
        new, carried = result
        _require_like(function, carried, one.carried)
    if not isinstance(new, Tensor) or new.shape != logits.shape or not new.is_floating_point():
        raise InvalidRequestError(f"{_name(function)} returns {brief(new)}: it must return logits {list(logits.shape)}")
    if version is not None and logits._version != version:
        raise InvalidRequestError(f"{_name(function)} changed the logits in place, which other rows need: return new logits")
    return new, carried


def _num_arguments(processor: LogitsProcessor) -> int:
    """How many arguments a processor's function takes. A function of the logits alone need not take the tokens."""
    if processor.init is not None:
        return 3
    try:
        parameters = inspect.signature(processor.function).parameters.values()
    except (TypeError, ValueError):
        return 2
    return 1 if sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters) == 1 else 2


def _name(function: Callable[..., Any]) -> str:
    code = getattr(function, "__code__", None)
    return repr(function) if code is None else f"process_logits {function.__name__} ({code.co_filename}, line {code.co_firstlineno})"


def _require_like(function: Callable[..., Any], carried: Any, old: Any) -> None:
    new, spec = pytree.tree_flatten(carried)
    leaves, before = pytree.tree_flatten(old)
    alike = spec == before and all(isinstance(value, Tensor) for value in new)
    if not alike or any(a.shape != b.shape or a.dtype != b.dtype for a, b in zip(new, leaves, strict=True)):
        raise InvalidRequestError(f"{_name(function)} carries {brief(new)} after {brief(leaves)}: shapes and dtypes must stay the same")


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
    table = np.zeros((len(rows), width), np.int32)
    for row, ids in zip(table, rows, strict=True):
        row[: len(ids)] = ids
    lengths = np.array([len(ids) for ids in rows], np.int32)
    return TokensSoFar(token_ids=torch.from_numpy(table).to(device), lengths=torch.from_numpy(lengths).to(device))
