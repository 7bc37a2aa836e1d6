"""`Plan`: what one step runs, and the values after it."""

from dataclasses import dataclass

from nanovllm.state.offload import Moves
from nanovllm.state.pool import Pool
from nanovllm.state.request import Queue, Sequence


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """The work of one step, and the values after it.

    Attributes:
        pool: The pool after the step. Its index has the pages that `prefill` fills, so the step must run all of it or drop this pool.
        running: The running sequences.
        waiting: The queue.
        decode: Sequences that run one token each.
        prefill: Sequences with the number of tokens that they run.
        copies: (source, destination) pages to copy before anything is written.
        frame_copies: The same for frames.
        allocated: Pages that this plan allocates.
        frames: Frames that this plan allocates.
        stuck: Sequences that cannot get the pages that they need while the live chunks exist; they end with the tokens that they have.
        grew: Whether a decoding sequence has new pages.
        num_preempted: Sequences that this plan preempts.
        num_reused: Tokens of admitted sequences whose KV is already filled.
        moves: Copies to and from host memory, before all else. None: the engine uses no host memory.
    """

    pool: Pool
    running: tuple[Sequence, ...]
    waiting: Queue
    decode: tuple[Sequence, ...]
    prefill: tuple[tuple[Sequence, int], ...]
    copies: tuple[tuple[int, int], ...]
    frame_copies: tuple[tuple[int, int], ...]
    allocated: tuple[int, ...]
    frames: tuple[int, ...]
    stuck: tuple[Sequence, ...]
    grew: bool
    num_preempted: int
    num_reused: int
    moves: Moves | None = None

    @property
    def only_decodes(self) -> bool:
        """Whether each running sequence runs one token and nothing else happens: no preemption, no stuck sequence, no reuse."""
        return len(self.decode) == len(self.running) and not (self.stuck or self.num_preempted or self.num_reused)
