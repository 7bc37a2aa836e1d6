"""The pages of prompts: how many tokens they let a prompt run, and how the requests after it share them.

Pages that a prompt fills in this step are in the index of the plan's pool already, so a request that is admitted behind it shares them and
does not run their tokens again. A prompt that runs in part takes the rest of the budget, or of the pages. So a request that shares more
with it than it has filled is admitted later, by the step that ends it.
"""

from collections.abc import Sequence as Seq

from nanovllm.engine.draft import Draft, room_of
from nanovllm.engine.meeting import tokens_before
from nanovllm.engine.preemption import make_room
from nanovllm.engine.prompt_room import PromptRoom
from nanovllm.state.request import Sequence
from nanovllm.state.sequence_pages import offered, shares_tail


def place_prefill(draft: Draft, sequence: Sequence, room: PromptRoom) -> int:
    """The number of prompt tokens that run in this step, within room and pool; the first sequence gets at least one."""
    if draft.find(sequence) is None:
        return 0
    count = fitting(draft, sequence, room)
    return count if make_room(draft, sequence, sequence.num_filled + count) else 0


def fitting(draft: Draft, sequence: Sequence, room: PromptRoom) -> int:
    """The number of tokens that room and pool allow a sequence to run now: at least one, if it has any left."""
    size, count = draft.config.page_size, room.most(sequence)
    if (most := tokens_before(draft, sequence)) is not None:
        count = min(count, most)
    spare = draft.pool.num_available - shares_tail(draft.pool, sequence, size)
    if draft.pool.frames is not None:  # a prompt soon gives back frames outside its window; leave some to decoding sequences
        spare -= min(len(draft.running) - 1, spare // 2)
    return min(count, max(1, room_of(sequence, size) + spare * size))


def offer(draft: Draft, prefill: Seq[tuple[Sequence, int]]) -> None:
    """Index the pages that these prompts fill in this step.

    Requests that are admitted later in the step begin with them. Three rules make that safe. The prompts of a step run in one pass (see
    `offered`). Sequences that decode run after this pass. No sequence is preempted after its pages were offered: a step that preempted
    admits nothing, and an admission preempts nobody.
    """
    for sequence, count in prefill:
        draft.pool = offered(draft.pool, sequence, count, draft.config.page_size)
