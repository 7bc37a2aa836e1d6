"""Property tests for an engine, a model, a scheduler or a page allocator, as Hypothesis state machines.

Each machine calls the code under test in random order and compares the results with a shadow: a simple model of the same thing in plain
Python. Run a machine with `hypothesis.stateful.run_state_machine_as_test`. Subclass it to test other code. The package needs the extra
`nanovllm[testing]`.

Messages and docstrings name these invariants by number:

1. A page's reference count equals its references from live chunks, requests and the prefix index.
2. Free pages and referenced pages together are the pool, and no page is both.
3. A page is written only while it has exactly one owner.
4. A prefix key commits to the whole prefix: two prompts share KV only if all earlier tokens are equal.
5. No later call changes an older `PageState`, `PrefixIndex` or `Chunk`.
6. Every admitted workload ends. After all handles are released, free pages and evictable prefix pages are the whole pool.
7. A request is scheduled for at least one token, and for no more tokens than its pages have room for.
8. Decoding gives the same bits in any batch. Reusing an exact chunk equals a full prefill within a tolerance.
9. Tokens that were run or reused = tokens needed + tokens run again after preemption + tokens that steps ahead ran in vain.
10. The prefix index contains no approximate page.

Examples:
    >>> from hypothesis import settings
    >>> from hypothesis.stateful import run_state_machine_as_test
    >>> from nanovllm.testing import EngineMachine, ModelWorld
    >>> class MyModel(EngineMachine):
    ...     world = ModelWorld()  # a small random Qwen3; ModelWorld(model) tests another float32 or float64 model on a CPU
    >>> run_state_machine_as_test(MyModel, settings=settings(max_examples=1, stateful_step_count=4, deadline=None))
"""

from nanovllm.testing.machines.cascade import CascadeChunkMachine, CascadeMachine
from nanovllm.testing.machines.chunks import ChunkMachine, ModelChunkMachine
from nanovllm.testing.machines.engine import EngineMachine
from nanovllm.testing.machines.frames import FrameMachine
from nanovllm.testing.machines.pages import PageMachine
from nanovllm.testing.machines.prefix import PrefixMachine
from nanovllm.testing.machines.run_ahead import AheadMachine
from nanovllm.testing.machines.scheduler import ScheduleMachine
from nanovllm.testing.machines.windows import MixedWindowMachine, WindowChunkMachine, WindowMachine
from nanovllm.testing.shadows.worlds import ModelWorld, SymbolicWorld, World

__all__ = [
    "AheadMachine",
    "CascadeChunkMachine",
    "CascadeMachine",
    "ChunkMachine",
    "EngineMachine",
    "FrameMachine",
    "MixedWindowMachine",
    "ModelChunkMachine",
    "ModelWorld",
    "PageMachine",
    "PrefixMachine",
    "ScheduleMachine",
    "SymbolicWorld",
    "WindowChunkMachine",
    "WindowMachine",
    "World",
]
