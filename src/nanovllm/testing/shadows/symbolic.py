"""A symbolic model: the KV of a token is a number computed from all tokens before it, so wrong KV is found at once and exactly.

The engine, its pages and its page copies are real. Only the model and its attention are replaced. A token's number depends on its id and on
the numbers of all earlier tokens, read through the page table. It also depends on the position, if that differs from the index. The logits
depend on the newest number. Keys that move are not rotated: the model's rotation speeds are 0.

Sliding-window layers have a pool of their own, addressed by frames (the KV memory of sliding-window pages). They read the numbers in
their window. A token's number depends on the numbers that both kinds of layers read. So a frame that was freed too early, or that another
page took, gives wrong numbers like a wrong page.

With an attention plan, pages are read as a kernel would read them: each shared run of pages through the page table of its first row. A
page that the plan leaves out is not read, and a page that it lists twice counts twice. A query must see a shared run as a whole.
"""

from collections.abc import Sequence as Seq
from typing import Any, no_type_check

import numpy as np
import torch

from nanovllm.config import ModelConfig
from nanovllm.errors import BrokenInvariantError
from nanovllm.models.common.batch import Batch
from nanovllm.ops.attention.cascade import PromptCascade
from nanovllm.ops.attention.cascade_plan import CascadePlan
from nanovllm.ops.attention.plan_table import lookup
from nanovllm.ops.kv_cache.fp8 import in_fp8, split
from nanovllm.sampling.params import SamplingParams
from nanovllm.sampling.sampler import sample
from nanovllm.sampling.tensors import build
from nanovllm.state.kv_cache import KVState
from nanovllm.types import Tensor

MODULUS = (1 << 23) - 1  # numbers 1 ... MODULUS are exact in float32; 0 means that the slot was never written
START = 1
ONE = 0x38  # 1.0 in e4m3


@no_type_check  # this and the next functions are called for every slot: run-time type checks would cost more than the rest of the test
def fold(before: int, number: int) -> int:
    """Combine the hash of earlier numbers with the next number."""
    return (before * 1000003 + number) % 2147483647


@no_type_check
def number_of(before: int, token: int, offset: int = 0) -> int:
    """Return the number of a token, given the hash of the numbers before it; `offset` is its position minus its index."""
    return ((before * 31 + token * 7919 + offset * 104729 + 12345) * 2654435761 >> 7) % MODULUS + 1


@no_type_check
def folded(earlier: Seq[int], config: ModelConfig | None = None) -> int:
    """Return the hash of all earlier numbers for the next token: first the numbers for full attention, then those in the window."""
    before = START
    if config is None or not config.all_windowed:
        for number in earlier:
            before = fold(before, number)
    if config is not None and config.windows:
        for number in earlier[max(0, len(earlier) - config.widest_window + 1) :]:
            before = fold(before, number)
    return before


def numbers(tokens: Seq[int], config: ModelConfig | None = None) -> list[int]:
    """Return the numbers that a prefill of these tokens writes."""
    made, before = list[int](), START
    window, alone = (0, False) if config is None else (config.widest_window, config.all_windowed)
    for token in tokens:
        seen = START if alone else before
        for number in made[max(0, len(made) - window + 1) :] if window else ():
            seen = fold(seen, number)
        made.append(number_of(seen, int(token)))
        before = fold(before, made[-1])
    return made


def logits_of(number: int, vocab_size: int) -> list[float]:
    """Return the logits after the token with this number: multiples of 1/2048 below 2, so that sampled tokens vary."""
    return [((number * 40503 + (v + 1) * 2654435761) * 2246822519 >> 9) % 4096 / 2048 for v in range(vocab_size)]


def symbolic_forward(params: object, kv: KVState, batch: Batch, config: ModelConfig) -> tuple[Tensor, KVState]:
    """Donates `kv`: run a batch with the signature of a model's forward pass, in host memory only.

    Raises `BrokenInvariantError` if a token's position is smaller than its index.
    """
    starts = list(range(batch.seq_lens.shape[0] + 1)) if batch.cu_seqlens is None else batch.cu_seqlens.tolist()
    ids, positions = batch.input_ids.tolist(), batch.positions.tolist()
    window, views = config.widest_window, (batch, batch if batch.windowed is None else batch.windowed)
    windowed = [window > 0] if len(kv.pools) == 1 else [False, True]
    groups = [Group(pool, view, starts, window if framed else 0) for pool, view, framed in zip(kv.pools, views, windowed, strict=False)]
    logits = []
    for row, seq_len in enumerate(batch.seq_lens.tolist()):
        first = seq_len - (starts[row + 1] - starts[row])
        for group in groups:
            group.begin(row, first)
        for at in range(first, seq_len):
            token = starts[row] + at - first
            if positions[token] < at:
                raise BrokenInvariantError(f"token {at} of row {row} runs at position {positions[token]}, which must be at least {at}")
            before = START
            for group in groups:
                before = group.before(before, token, at)
            number = number_of(before, ids[token], positions[token] - at)
            seen = {group.write(token, at, number) for group in groups}
            logits.append(logits_of(seen.pop() if len(seen) == 1 else 0, config.vocab_size))
    rows = torch.tensor(logits, dtype=torch.float32)
    return (rows if batch.logit_indices is None else rows[batch.logit_indices.long()].view(-1, config.vocab_size)), kv


class Group:
    """One KV pool while a batch runs. Its layers read the last `window` tokens of a row; 0 means all."""

    @no_type_check
    def __init__(self, pool, view, starts, window: int):
        self.memory, self.size, self.window = memory_of(pool), pool.shape[4], window
        self.tables, self.slots = view.page_tables.tolist(), view.slots.tolist()
        self.plan = PlannedReads(view.plan, self.tables, starts, self.size) if view.plan else None
        self.row, self.sum, self.page = 0, START, None

    @no_type_check
    def begin(self, row: int, first: int) -> None:
        """Begin a row, whose first token to run has index `first`."""
        self.row, self.sum = row, START
        for at in range(0 if self.plan is None and not self.window else first, first):
            self.sum = fold(self.sum, read(self.memory, self.tables[row][at // self.size], at % self.size))

    @no_type_check
    def before(self, before: int, token: int, at: int) -> int:
        """Add the numbers that a token reads from this pool to the hash `before`, which includes the numbers of the pools before."""
        table, since = self.tables[self.row], max(0, at - self.window + 1) if self.window else 0
        self.page = table[at // self.size]
        if self.plan is not None:
            before, self.page = self.plan.follow(self.memory, token, at, since, before)
        elif self.window:
            for place in range(since, at):
                before = fold(before, read(self.memory, table[place // self.size], place % self.size))
        else:
            before = self.sum  # a pool with full attention is the first pool, so the hash starts here
        return before

    @no_type_check
    def write(self, token: int, at: int, number: int) -> int:
        """Write the token's number into its slot, and return the number that the token then reads at its own index."""
        slot = self.slots[token]
        self.memory[:, slot // self.size, :, :, slot % self.size, :] = number
        seen = 0 if self.page is None else read(self.memory, self.page, at % self.size)
        self.sum = fold(self.sum, seen)
        return seen


class PlannedReads:
    """The pages that each token of a batch reads according to an attention plan. `starts` has the first token of each row."""

    @no_type_check
    def __init__(self, handle: int, tables: list[list[int]], starts: list[int], size: int):
        plan, self.size = lookup(handle), size
        if not isinstance(plan, CascadePlan | PromptCascade):
            raise BrokenInvariantError(f"plan {handle} is a {type(plan).__name__}, which the symbolic model cannot follow")
        row_of = [row for row in range(len(starts) - 1) for _ in range(starts[row], starts[row + 1])]
        self.runs = {token: [] for token in range(len(row_of))}  # per token: first page, pages, whether other rows read them too
        for run in plan.runs:
            tokens = run.rows.tolist()
            rows = [row_of[token] for token in tokens]
            part = run.start, tables[rows[0]][run.start : run.stop], rows[0] != rows[-1]
            for token in tokens:
                self.runs[token].append(part)

    @no_type_check
    def follow(self, memory: np.ndarray, token: int, at: int, since: int = 0, before: int = START) -> tuple[int, int | None]:
        """Add the numbers that a token reads to the hash `before`, and return the hash and the page of the token's own slot.

        The token has index `at` and sees tokens from index `since` on. The page is None if the plan leaves it out.
        """
        own, size = None, self.size
        for start, pages, shared in sorted(self.runs[token]):
            stop = (start + len(pages)) * size
            if shared and stop > at + 1:
                raise BrokenInvariantError(f"token {at} sees only a part of the shared pages {pages}, which end at token {stop}")
            for place in range(max(start * size, since), min(stop, at + 1)):
                page = pages[place // size - start]
                if place == at:
                    own = page
                else:
                    before = fold(before, read(memory, page, place % size))
        return before, own


class Fp8Memory:
    """A pool in FP8 as an array of numbers `[L, N, 2, K, S, D]`. A number that is written becomes codes of 1 and the scale.

    Values are copied bit by bit. Keys that move are rounded again, to scales that differ in the last bits: such keys count as their values.
    """

    @no_type_check
    def __init__(self, pool):
        codes, scales = split(pool)
        self.codes, self.scales = codes.view(torch.uint8).numpy(), scales.numpy()
        self.numbers = torch.arange(256, dtype=torch.uint8).view(pool.dtype).float().numpy()  # by code

    @no_type_check
    def __getitem__(self, index):
        found = self.numbers[self.codes[index]] * self.scales[index]  # ... 2 K D
        values = found[..., 1:, :, :]
        return np.where(np.abs(found - values) <= 1e-5 * values, values, found)

    @no_type_check
    def __setitem__(self, index, number):
        self.codes[index], self.scales[index] = ONE, number


def memory_of(pool: Tensor) -> Any:
    """Return a pool in host memory as an array of numbers, in which slots can be read and written."""
    return Fp8Memory(pool) if in_fp8(pool) else pool.numpy()


@no_type_check
def read(memory: np.ndarray, page: int, offset: int) -> int:
    """Return the number in a slot; 0 if layers, keys and values, heads or dimensions differ."""
    values = memory[:, page, :, :, offset, :]
    first = int(values.flat[0])
    return first if (values == first).all() else 0


def next_token(
    tokens: Seq[int], num_prompt: int, params: SamplingParams, seed: int, vocab_size: int, config: ModelConfig | None = None
) -> int:
    """Return the token that a request alone in a fresh engine samples after `tokens`; the first `num_prompt` are its prompt."""
    ids = np.array(tokens, np.int32)
    logits = torch.tensor([logits_of(numbers(tokens, config)[-1], vocab_size)], dtype=torch.float32)
    sampling = build([(params, seed, ids[:num_prompt], ids[num_prompt:])], vocab_size, "cpu")
    return int(sample(logits, sampling, torch.tensor([len(tokens)], dtype=torch.int32)).token_ids[0])
