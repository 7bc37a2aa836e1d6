"""Hypothesis strategies for small engines: few pages, short pages and few token ids make sharing and eviction common."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from hypothesis import strategies as st

from nanovllm.config import EngineConfig

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Arguments of `init_state` for a small engine, and whether decode steps run ahead (`ahead`)."""

    num_pages: int
    page_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    seed: int = 0
    cascade: bool | None = None
    ahead: bool = False
    num_frames: int | None = None
    max_prefill_tokens: int | None = None

    def config(self) -> EngineConfig:
        """Return the arguments as an `EngineConfig`, as an `EngineState` has it."""
        return EngineConfig(**{name: value for name, value in self.options().items() if name != "cascade" and value is not None})

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of `init_state`."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "ahead"}


def limits(
    max_tokens: int = 18,
    max_page_size: int = 3,
    max_model_len: int = 64,
    *,
    min_tokens: int = 1,
    min_model_len: int = 2,
    cascade: Sequence[bool | None] = (None, True),
    ahead: Sequence[bool] = (False, True),
    num_frames: st.SearchStrategy[int | None] | None = None,
) -> st.SearchStrategy[Limits]:
    """Return a strategy of small engines with every kind of bottleneck; most have room for a few requests.

    Args:
        max_tokens: Largest number of tokens that a pool has room for.
        max_page_size: Largest page size, in tokens.
        max_model_len: Largest `max_model_len`; most engines have this value.
        min_tokens: Smallest number of tokens that a pool has room for.
        min_model_len: Smallest `max_model_len`.
        cascade: Values of the option `cascade`: True reads shared pages once, None lets the engine decide.
        ahead: Whether decode steps run ahead: the values to choose from.
        num_frames: A strategy for the number of frames (KV memory of sliding-window pages); None if the model has no sliding windows.
    """

    def build(page_size: int, num_tokens: int, **others: Any) -> Limits:
        return Limits(page_size=page_size, num_pages=-(-num_tokens // page_size), **others)

    return st.builds(
        build,
        page_size=st.integers(1, max_page_size),
        num_tokens=st.one_of(st.integers(max(min_tokens, max_tokens // 3), max_tokens), st.integers(min_tokens, max_tokens)),
        max_model_len=st.one_of(st.just(max_model_len), st.just(max_model_len), st.integers(min_model_len, max_model_len)),
        max_num_seqs=st.one_of(st.integers(2, 5), st.integers(1, 5)),
        max_num_batched_tokens=st.one_of(st.integers(5, 16), st.integers(1, 4)),
        seed=st.integers(0, 3),
        cascade=st.sampled_from(cascade),
        ahead=st.sampled_from(ahead),
        num_frames=st.none() if num_frames is None else num_frames,
        max_prefill_tokens=st.one_of(st.none(), st.integers(1, 8)),
    )


def pick(data: st.DataObject, items: Sequence[T]) -> T:
    """Draw one of the items by its place: a test can repeat a draw that is a number, and not one that is an object."""
    return items[data.draw(st.integers(0, len(items) - 1))]


def token_ids(vocab_size: int = 2, min_size: int = 1, max_size: int = 10) -> st.SearchStrategy[list[int]]:
    """Return a strategy of lists of token ids; the default vocabulary of two makes shared prefixes likely."""
    return st.lists(st.integers(0, vocab_size - 1), min_size=min_size, max_size=max_size)


def sampling_options(vocab_size: int = 2, max_tokens: int = 10, *, greedy_only: bool = False) -> st.SearchStrategy[dict[str, Any]]:
    """Return a strategy of keyword arguments for `SamplingParams`.

    Replies are short, greedy or seeded, some with stop ids, penalties or log-probabilities. The strategy does not build `SamplingParams`
    itself, because run-time type checks use random numbers, which Hypothesis forbids inside a strategy.
    """
    stops = st.lists(st.integers(0, vocab_size - 1), max_size=1)
    common = {
        "max_tokens": st.one_of(st.integers(max_tokens // 2, max_tokens), st.integers(1, max_tokens)),
        "stop_token_ids": st.one_of(st.just([]), stops),
    }
    greedy = st.fixed_dictionaries({"temperature": st.just(0.0), **common})
    if greedy_only:
        return greedy
    drawn = st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.5, 1.0, 2.0]),
            "top_k": st.sampled_from([0, 1, 3]),
            "top_p": st.sampled_from([1.0, 0.7]),
            "seed": st.one_of(st.none(), st.integers(0, 5)),
            "frequency_penalty": st.sampled_from([0.0, 1.5]),
            "logprobs": st.sampled_from([None, 0, 1]),
            **common,
        }
    )
    return st.one_of(greedy, drawn)
