"""Planted faults in functions on chunks: gaps, steps ahead, moved KV, sharing, labels, eviction and files."""

from dataclasses import replace
from unittest.mock import patch

import numpy as np
from hypothesis.stateful import RuleBasedStateMachine

from nanovllm import ops
from nanovllm.chunks import compose
from nanovllm.chunks import handles as chunks
from nanovllm.chunks import prefill as fill
from nanovllm.chunks.storage import blocks
from nanovllm.chunks.storage import file as chunk_file
from nanovllm.chunks.storage import format as chunk_format
from nanovllm.chunks.storage.format import Head
from nanovllm.engine import requests
from nanovllm.errors import ChunkFileError
from nanovllm.executor import eager, run_ahead
from nanovllm.executor.run_ahead import RunAhead
from nanovllm.state import prefix_cache as prefix
from nanovllm.state import request
from nanovllm.state.chunk import EXACT
from nanovllm.state.request import Sequence
from nanovllm.testing.machines.chunks import ChunkMachine, ModelChunkMachine
from nanovllm.testing.machines.run_ahead import AheadMachine
from nanovllm.testing.shadows import run_ahead_executor as ahead
from tests.property.faults.engine import Fault, writes_without_copy

# Gaps


def _forgets_gaps(offset_after):
    return lambda gaps: 0


def _keeps_gaps_behind_the_end(cut):
    return lambda chunk, length, page_size: replace(cut(chunk, length, page_size), gaps=chunk.gaps)


def _forgets_older_gaps(gapped):
    return lambda chunk, start, stop, page_size: gapped(replace(chunk, gaps=()), start, stop, page_size)


# Steps that run ahead


def _runs_ahead_of_copies(steps_ahead):
    return lambda rows, page_size: min((len(s.pages) * page_size - len(s.tokens) for s in rows), default=0)


def _keeps_what_it_ran(drop):
    def faulty(self):
        launched = self.launched
        drop(self)
        self.launched = launched

    return faulty


def _lets_ended_rows_write(retire):
    return lambda *args, **kwargs: None


def _takes_the_first_rows(narrow):
    def faulty(self, keep, rows):
        gone = narrow(self, keep, rows)
        self.places = np.arange(len(keep))
        return gone

    return faulty


def _gives_results_to_other_rows(placed):
    return lambda rows, places: [rows[place] for place in places]


# Moves


def _moves_all_but_one(move_kv):
    return lambda pages, src, dst, shift, inv_freq: move_kv(pages, src[1:], dst[1:], shift[1:], inv_freq)


def _turns_nothing(layout):
    return lambda *args: replace(made := layout(*args), shift=np.zeros_like(made.shift))


def _turns_back(layout):
    return lambda *args: replace(made := layout(*args), shift=-made.shift)


def _turns_one_too_far(layout):
    return lambda *args: replace(made := layout(*args), shift=made.shift + np.sign(made.shift))


def _runs_the_wrong_heads_again(chosen):
    return lambda model, state, sequence, sources, recompute: np.minimum(
        chosen(model, state, sequence, sources, recompute) + 1, len(sequence.tokens) - 1
    )


def _runs_behind_what_is_approximate(cut):
    return lambda chunk, length, page_size: chunk


# Sharing


def _counts_no_owner(cut_live):
    def faulty(state, chunk, length):
        after, twin = cut_live(state, chunk, length)
        return replace(after, pool=state.pool), twin

    return faulty


def _shares_a_page_that_is_written(reserve_or_require):
    return writes_without_copy(reserve_or_require) if reserve_or_require.__name__ == "reserve" else lambda pages, written: None


def _shares_the_page_where_they_meet(joined_or_move):
    def joined(sources, *more, **options):
        made, first = joined_or_move(sources, *more, **options), sources[0]
        if first.gaps or len(first.pages) == len(made.head):
            return made
        return replace(made, head=first.pages.array(), num_fresh=made.num_fresh - 1)

    def move(model, state, layout, fresh):
        shared = layout.head[layout.start // state.config.page_size :].tolist()  # its own tokens are copied to where they are
        joined_or_move(model, state, layout, (*shared, *fresh))

    return joined if joined_or_move.__name__ == "joined" else move


def _writes_the_last_token_again(decode_batch):
    def faulty(rows, *, page_size, **options):
        made = decode_batch(rows, page_size=page_size, **options)
        tables, last = made.page_tables, made.seq_lens - 1
        pages = tables[np.arange(len(rows)), np.minimum(last // page_size, tables.shape[1] - 1)]
        return replace(made, slots=pages * page_size + last % page_size)

    return faulty


def _accepts_released(require_live):
    return lambda state, chunk: None


# Labels


def _calls_all_exact(num_exact):
    return property(lambda sequence: min(sequence.num_filled, sequence.tokens.length))


def _inherits_no_label(begin_sequence):
    return lambda *args, **options: replace(begin_sequence(*args, **options), provenance=EXACT)


def _calls_what_is_cut_exact(cut):
    return lambda chunk, length, page_size: replace(cut(chunk, length, page_size), provenance=EXACT, num_exact=length)


def _keeps_the_label_of_what_it_left(restart):
    def faulty(sequence, *arguments, **options):
        return replace(restart(sequence, *arguments, **options), provenance=sequence.provenance, exact_len=sequence.exact_len)

    return faulty


# Eviction


def _leaves_those_behind(with_those_behind):
    return lambda index, held, behind: np.array(held, np.int32)


# Files


def _loses_positions(gaps):
    return property(lambda head: ())


def _believes_the_kv(read_kv):
    def faulty(*args):
        try:
            yield from read_kv(*args)
        except ChunkFileError:
            return

    return faulty


def _believes_the_head(require):
    return lambda *args: None


def _shifts_tokens_of_other_pages(load):
    scatter = chunk_file._scatter

    def shifted(kv, places, rows, *more, **options):
        scatter(kv, places, rows.roll(1, 0), *more, **options)

    def faulty(model, state, fd, path, *more, **options):
        if chunk_file.decode(model, fd, path).page_size == state.config.page_size:
            return load(model, state, fd, path, *more, **options)
        with patch.object(chunk_file, "_scatter", shifted):
            return load(model, state, fd, path, *more, **options)

    return faulty


def _loads_all_as_exact(chunk_of):
    return lambda model, state, sequence: chunk_of(model, state, replace(sequence, provenance=EXACT))


def _fault(name, faulty, *targets, machine: type[RuleBasedStateMachine] = ChunkMachine, draw=0):
    return Fault(name=name, machine=machine, targets=targets, faulty=faulty, draw=draw)


def _turning(name, faulty, *targets):
    """Return a fault that only a model with rotated keys can find."""
    return _fault(name, faulty, *targets, machine=ModelChunkMachine)


CHUNK_FAULTS: tuple[Fault, ...] = (
    _fault("tokens after a gap at wrong positions", _forgets_gaps, (request, "offset_after")),
    _fault("gaps after the end of a truncated chunk", _keeps_gaps_behind_the_end, (chunks, "cut")),
    _fault("a gap that forgets earlier gaps", _forgets_older_gaps, (compose, "gapped")),
    _fault("a step ahead that writes into a shared page", _runs_ahead_of_copies, (run_ahead, "steps_ahead"), machine=AheadMachine, draw=2),
    _fault("a step ahead of rows that changed", _keeps_what_it_ran, (RunAhead, "drop"), machine=AheadMachine),
    _fault("an ended row that goes on writing", _lets_ended_rows_write, (ahead, "retire"), machine=AheadMachine, draw=8),
    _fault("the results of a row that ended", _takes_the_first_rows, (RunAhead, "narrow"), machine=AheadMachine, draw=3),
    _fault("results in the order of the batch", _gives_results_to_other_rows, (ahead, "placed"), machine=AheadMachine, draw=2),
    _fault("a token that is not moved", _moves_all_but_one, (ops, "move_kv")),
    _turning("keys composed and not rotated", _turns_nothing, (compose, "joined")),
    _turning("keys rotated in the wrong direction", _turns_back, (compose, "joined")),
    _turning("keys shifted by one place too many", _turns_one_too_far, (compose, "shifted")),
    _fault("the wrong tokens run again", _runs_the_wrong_heads_again, (compose, "_chosen")),
    _fault("tokens recomputed after approximate tokens", _runs_behind_what_is_approximate, (compose, "cut")),
    _fault("a fork that counts no owner", _counts_no_owner, (chunks, "cut_live")),
    _fault("a page of a truncated chunk written", _shares_a_page_that_is_written, (fill, "reserve"), (fill, "require_writable")),
    _fault("a partly filled page shared by a composed chunk", _shares_the_page_where_they_meet, (compose, "joined"), (compose, "_move")),
    _fault("the last token of a chunk written again", _writes_the_last_token_again, (eager, "decode_batch")),
    _fault("a chunk released twice", _accepts_released, (chunks, "require_live")),
    _fault("a released chunk composed", _accepts_released, (compose, "require_live")),
    _fault("a released chunk saved", _accepts_released, (chunk_file, "require_live")),
    _fault("approximate KV in the index", _calls_all_exact, (Sequence, "num_exact")),
    _fault("a label not inherited", _inherits_no_label, (requests, "begin_sequence"), (fill, "begin_sequence")),
    _fault("the beginning of a chunk called exact", _calls_what_is_cut_exact, (chunks, "cut")),
    _fault("exact pages under an approximate label", _keeps_the_label_of_what_it_left, (Sequence, "restart")),
    _fault("a page evicted without the pages after it", _leaves_those_behind, (prefix, "_with_descendants")),
    _fault("positions lost on load", _loses_positions, (Head, "gaps")),
    _fault("a file's KV not checked", _believes_the_kv, (blocks, "read_kv")),
    _fault("a file's key form ignored", _believes_the_head, (chunk_format, "_require_written_so")),
    _fault("a file of another model loaded", _believes_the_head, (chunk_file, "require_model")),
    _fault("tokens shifted where page sizes differ", _shifts_tokens_of_other_pages, (chunk_file, "load")),
    _fault("a label lost on load", _loads_all_as_exact, (chunk_file, "chunk_of")),
)
