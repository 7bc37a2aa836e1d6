"""`split_rows`: let the rows of a session go on from other rows, with shared pages. Everything happens on the device."""

from dataclasses import replace

import torch

from nanovllm.errors import InvalidRequestError
from nanovllm.executor.decode import donated, tokens_for
from nanovllm.executor.decode_carry import Branches, DecodeCarry
from nanovllm.executor.fresh_carry import note, require_carry, require_fresh
from nanovllm.models.common.batch import Batch
from nanovllm.ops.kv_cache.copy_pages import copy_pages
from nanovllm.sampling.process_logits import mapped
from nanovllm.sampling.tensors import Penalties
from nanovllm.types import Float32, Int32, Int64, Tensor, brief


@torch.no_grad()
def split_rows(
    carry: DecodeCarry,
    parents: Int32[Tensor, "B"] | Int64[Tensor, "B"],
    token_ids: Int32[Tensor, "B"] | Int64[Tensor, "B"] | None = None,
    logprobs: Float32[Tensor, "B"] | None = None,
) -> DecodeCarry:
    """Donates `carry`. Let each row go on from the tokens of the row `parents[row]`; one row may have several children.

    Full pages are shared, and the last page of each row is copied. Nothing waits for the device. The function traces with
    `torch.compile(fullgraph=True)` and can be captured, so that a step of a beam search or of a tree search is one graph.

    A row takes over the text, the KV and the penalties' counts of its parent, and the stop conditions with which `commit` ends its
    reply. It keeps its own seed and sampling options, so children of one row sample different texts. A child of a row that has stopped has
    stopped too, and keeps the newest token of its parent. After the session's room is used up, rows go on from themselves.

    Args:
        carry: A carry of a session that was begun with `branching=True`.
        parents: The parent of each row, `[B]`, on the carry's device. On a GPU a number that is no row stands for the nearest row.
        token_ids: For each row the token that takes the place of its parent's newest sampled token, int32 or int64 `[B]`. None: the
            parent's. On a GPU a number that is no token stands for the nearest token.
        logprobs: The log-probabilities of `token_ids`, for sessions that keep log-probabilities. None: NaN for other tokens than the
            parent's.

    Returns:
        The carry of the same number of rows.

    Raises:
        InvalidRequestError: The session was begun without `branching`, or an argument has another shape or dtype, or names no row or no
            token; or `token_ids` are given before a step has sampled tokens.
        DonatedStateError: The carry was donated to a step, or committed.

    Examples:
        >>> state, carry = nv.begin(model, state, ["The cat", "The dog"], nv.SamplingParams(temperature=0), room=4, branching=True)
        >>> carry = nv.split_rows(carry, torch.tensor([1, 1]))
        >>> for _ in range(4):
        ...     carry, out = nv.decode_step(model.params, carry, model.config)
        >>> state, replies = nv.commit(model, state, carry)
        >>> replies[0].text == replies[1].text, model.tokenizer.decode(replies[0].chunk.token_ids[:2])
        (True, 'The dog')
    """
    num_steps = None
    if not torch.compiler.is_compiling():
        require_carry(carry)
        _require(carry, parents, logprobs)
        if carry.log is not None and (carry.log.lease is None or carry.log.lease.checked):
            num_steps = require_fresh(carry.log)
            if num_steps == 0 and token_ids is not None:
                raise InvalidRequestError(f"token_ids={brief(token_ids)}: no step has sampled a token that they could replace")
    if carry.prompt is not None:
        raise InvalidRequestError("the prompts of this carry have not run: run the first step before split_rows")
    log, batch = carry.log, carry.batch
    assert log is not None and log.branches is not None
    if token_ids is not None:
        token_ids = tokens_for(carry, token_ids, log.branches.vocab_size)
    scored = logprobs if logprobs is not None or token_ids is None else torch.full_like(token_ids, torch.nan, dtype=torch.float32)
    num_rows, branches = batch.input_ids.shape[0], log.branches
    # Traced steps may go on beyond the room. What they sample is dropped, so it must not share the pages of what is kept.
    itself = torch.arange(num_rows, device=parents.device)
    rows = torch.where(log.num_steps > log.token_ids.shape[1], itself, parents.clamp(0, num_rows - 1).long())
    size = carry.kv.pools[0].shape[4]
    own = (batch.seq_lens - 1) // size  # the place of each row's last page in its table
    taken = own[rows]
    seq_lens, going = batch.seq_lens[rows], carry.active[rows] > 0
    tables, slots, spares = [], [], []
    for pages, table, spare, last in zip(carry.kv.pools, _tables(batch), branches.spares, last_pages(carry), strict=True):
        copy_pages(pages, last[rows].contiguous(), spare)
        tables.append(_table(table, rows, own, taken, spare, pages.shape[1] - 1))
        slots.append(spare * size + (seq_lens - 1) % size)
        spares.append(donated(spare, last))
    windowed, old = batch.windowed, batch.input_ids[rows]
    newest = old if token_ids is None else torch.where(going & (log.num_steps > 0), token_ids, old)
    penalties = None if carry.sampling.penalties is None else _penalties(carry.sampling.penalties, rows, old, newest)

    def follow(value: Tensor) -> Tensor:
        return donated(value, value[rows])

    after = replace(
        carry,
        batch=replace(
            batch,
            input_ids=donated(batch.input_ids, newest),
            positions=donated(batch.positions, batch.positions[rows]),
            seq_lens=donated(batch.seq_lens, seq_lens),
            page_tables=donated(batch.page_tables, tables[0]),
            slots=donated(batch.slots, slots[0]),
            windowed=windowed
            and replace(windowed, page_tables=donated(windowed.page_tables, tables[1]), slots=donated(windowed.slots, slots[1])),
        ),
        active=donated(carry.active, carry.active[rows]),
        sampling=replace(carry.sampling, penalties=penalties),
        processing=tuple(replace(one, carried=mapped(follow, one.carried)) for one in carry.processing),
        token_ids=None if carry.token_ids is None else donated(carry.token_ids, _placed(carry.token_ids[rows], seq_lens, newest)),
        log=replace(
            log,
            token_ids=donated(log.token_ids, _with_newest(log.token_ids[rows], log.num_steps, token_ids, going)),
            logprobs=log.logprobs
            if log.logprobs is None
            else donated(log.logprobs, _with_newest(log.logprobs[rows], log.num_steps, scored, going)),
            num_steps=donated(log.num_steps, log.num_steps + 0),  # another tensor, by which the lease tells the carries apart
            branches=Branches(
                origins=donated(branches.origins, branches.origins[rows]),
                spares=tuple(spares),
                ran=branches.ran.add_(1),
                num_splits=donated(branches.num_splits, branches.num_splits + 1),
                vocab_size=branches.vocab_size,
            ),
        ),
    )
    if num_steps is not None and after.log is not None:
        note(after.log, num_steps)
    return after


def last_pages(carry: DecodeCarry) -> list[Int32[Tensor, "B"]]:
    """For each KV pool the page of each row that holds its newest token."""
    places = (carry.batch.seq_lens.long() - 1) // carry.kv.pools[0].shape[4]
    return [table.gather(1, places.unsqueeze(1)).squeeze(1) for table in _tables(carry.batch)]


def _tables(batch: Batch) -> tuple[Int32[Tensor, "B P"], ...]:
    return (batch.page_tables,) if batch.windowed is None else (batch.page_tables, batch.windowed.page_tables)


def _table(
    table: Int32[Tensor, "B P"], rows: Tensor, own: Tensor, taken: Tensor, spare: Int32[Tensor, "B"], dummy: int
) -> Int32[Tensor, "B P"]:
    """The pages of each row after a split: the parent's full pages, the copy of its last page, then the row's own pages that follow."""
    columns = torch.arange(table.shape[1], device=table.device)
    ahead = columns - (taken - own).unsqueeze(1)  # the row's own unused pages move to the places after the parent's last page
    unused = torch.where(ahead < table.shape[1], table.gather(1, ahead.clamp(0, table.shape[1] - 1)), dummy)
    after = torch.where(columns == taken.unsqueeze(1), spare.unsqueeze(1), unused)
    return torch.where(columns < taken.unsqueeze(1), table[rows], after)


def _placed(table: Tensor, seq_lens: Tensor, token_ids: Tensor) -> Tensor:
    """The table of all tokens, with the newest token of each row replaced."""
    return table.scatter(1, (seq_lens - 1).clamp(max=table.shape[1] - 1).long().unsqueeze(1), token_ids.unsqueeze(1))


def _with_newest(table: Tensor, num_steps: Tensor, values: Tensor | None, going: Tensor) -> Tensor:
    """A table of the log, with the column of the newest step replaced in rows that have not stopped."""
    if values is None:
        return table
    newest = torch.arange(table.shape[1], device=table.device) == num_steps - 1
    return torch.where(newest & going.unsqueeze(1), values.to(table.dtype).unsqueeze(1), table)


def _penalties(penalties: Penalties, rows: Tensor, old: Tensor, new: Tensor) -> Penalties:
    """The penalties of the parents, whose newest token is another now."""
    counts, one = penalties.counts[rows], torch.ones_like(rows, dtype=torch.int32).unsqueeze(1)
    counts = counts.scatter_add(1, old.long().unsqueeze(1), -one).scatter_add(1, new.long().unsqueeze(1), one)
    return replace(
        penalties,
        prompt_mask=donated(penalties.prompt_mask, penalties.prompt_mask[rows]),
        counts=donated(penalties.counts, counts),
    )


def _require(carry: DecodeCarry, parents: Tensor, logprobs: Tensor | None) -> None:
    if carry.log is None or carry.log.branches is None:
        raise InvalidRequestError(f"carry={carry!r} cannot be split: call begin(..., branching=True)")
    rows = carry.active.shape[0]
    for name, value in (("parents", parents), ("logprobs", logprobs)):
        if value is None and name != "parents":
            continue
        if not isinstance(value, Tensor) or value.shape != (rows,) or value.device != carry.active.device:
            raise InvalidRequestError(f"{name}={brief(value)} must be a tensor of shape [{rows}] on {carry.active.device}")
    if parents.dtype not in (torch.int32, torch.int64):
        raise InvalidRequestError(f"parents={brief(parents)} must be int32 or int64")
    if logprobs is not None and not logprobs.is_floating_point():
        raise InvalidRequestError(f"logprobs={brief(logprobs)} must be floating-point")
    if not parents.is_cuda and not bool(((parents >= 0) & (parents < rows)).all()):
        raise InvalidRequestError(f"parents={parents.tolist()} must be rows from 0 to {rows - 1}")
