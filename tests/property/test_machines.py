"""The machines of `nanovllm.testing` over our own engine."""

import os
from unittest.mock import patch

import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from nanovllm.engine import admission
from nanovllm.engine.scheduler import schedule
from nanovllm.testing.machines.cascade import CascadeChunkMachine, CascadeMachine
from nanovllm.testing.machines.chunks import ChunkMachine, ModelChunkMachine
from nanovllm.testing.machines.disk import DiskMachine
from nanovllm.testing.machines.disk_windows import DiskFrameMachine, DiskWindowMachine
from nanovllm.testing.machines.engine import EngineMachine
from nanovllm.testing.machines.failures import FailureMachine
from nanovllm.testing.machines.frames import FrameMachine
from nanovllm.testing.machines.host_memory import HostChunkMachine, HostMemoryMachine
from nanovllm.testing.machines.host_windows import HostFrameMachine, HostWindowChunkMachine, HostWindowMachine
from nanovllm.testing.machines.pages import PageMachine
from nanovllm.testing.machines.prefix import PrefixMachine
from nanovllm.testing.machines.run_ahead import AheadMachine
from nanovllm.testing.machines.scheduler import ScheduleMachine
from nanovllm.testing.machines.windows import MixedWindowMachine, WindowChunkMachine, WindowMachine
from nanovllm.testing.models import random_model, tiny_config
from nanovllm.testing.shadows.worlds import ModelWorld, SymbolicWorld
from tests.entrypoints.async_machine import AsyncMachine

pytestmark = pytest.mark.unhooked  # the import hook's checks would double the minutes that these tests take

# How many examples of how many rules. The `nightly` profile runs fifty times as many, drawn anew each time.
MORE = 50 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 1


class GrowingMachine(ScheduleMachine):
    """Requests are admitted only if those that run can grow, as in a large pool."""

    @staticmethod
    def scheduler(*args):
        with patch.multiple(admission, SMALL=0, SHARE=1):
            return schedule(*args)


class WideVocabulary(EngineMachine):
    """Replies that seldom agree, so that little is shared."""

    world = SymbolicWorld(vocab_size=16)


class RealModel(EngineMachine):
    """Two layers of Qwen3 with random weights, against uncached forwards."""

    world = ModelWorld()


class RealLlama(EngineMachine):
    """Llama in float64, where the tolerance can be tight."""

    world = ModelWorld(
        random_model(
            tiny_config("LlamaForCausalLM", vocab_size=4, hidden_size=16, intermediate_size=16, num_heads=2, num_kv_heads=2, head_dim=8),
            dtype=torch.float64,
        ),
        tolerance=1e-9,
    )


class SharedPages(CascadeMachine):
    """A real model that reads shared pages in parts, against uncached forwards."""

    world = RealLlama.world


WINDOWED = ModelWorld(
    random_model(tiny_config(vocab_size=8, hidden_size=16, intermediate_size=16, num_heads=2, num_kv_heads=1, head_dim=8, windows=(3, 0)))
)


class RealWindows(MixedWindowMachine):
    """A layer with a window and one without, against uncached forwards that keep all KV."""

    world = WINDOWED


class RealWindowChunks(WindowChunkMachine):
    """The same model against the decoder in numpy."""

    world = WINDOWED


class SharedFrames(CascadeMachine):
    """Shared pages are read once, by frames in one of the layers."""

    world = SymbolicWorld(windows=(0, 3))
    num_frames = (6, 30)


class Fp8Chunks(ChunkMachine):
    """Chunks, sessions and files of an engine whose KV is in FP8."""

    world = SymbolicWorld(kv_dtype="fp8")


class Fp8WindowChunks(WindowChunkMachine):
    """The same with a layer that has a window, whose KV has a pool of its own."""

    world = SymbolicWorld(windows=(3, 0), kv_dtype="fp8")


class Fp8Cascade(CascadeMachine):
    """Shared pages in FP8 are read once."""

    world = SymbolicWorld(kv_dtype="fp8")


class Fp8HostMemory(HostMemoryMachine):
    """KV in FP8 goes to host memory with its scales."""

    world = SymbolicWorld(kv_dtype="fp8")


class Fp8HostChunks(HostChunkMachine):
    """Chunks in FP8 go to host memory with their scales."""

    world = SymbolicWorld(kv_dtype="fp8")


class RealHostMemory(HostMemoryMachine):
    """A real model whose KV comes back from host memory, against uncached forwards."""

    world = RealLlama.world


class Fp8HostWindows(HostWindowMachine):
    """Pages and frames in FP8 go to host memory with their scales."""

    world = SymbolicWorld(windows=(3, 0), kv_dtype="fp8")


class RealHostWindows(HostWindowMachine):
    """A real model with a window in one layer, whose KV comes back from host memory, against uncached forwards."""

    world = WINDOWED


class Fp8Disk(DiskMachine):
    """KV in FP8 goes to the disk with its scales."""

    world = SymbolicWorld(kv_dtype="fp8")


class Fp8DiskWindows(DiskWindowMachine):
    """Pages and frames in FP8 go to the disk with their scales."""

    world = SymbolicWorld(windows=(3, 0), kv_dtype="fp8")


class RealDiskWindows(DiskWindowMachine):
    """A real model with a window in one layer, whose KV comes back from the disk, against uncached forwards."""

    world = WINDOWED


class RealFp8(EngineMachine):
    """A real model over KV in FP8, against a forward pass of all tokens over KV in FP8. One rounding that differs is within the bound."""

    world = ModelWorld(tolerance=0.2, kv_dtype="fp8")


@pytest.mark.parametrize(
    ("machine", "examples", "rules"),
    [
        (PageMachine, 60, 40),
        (PrefixMachine, 60, 40),
        (ScheduleMachine, 60, 50),
        (GrowingMachine, 20, 50),
        (ChunkMachine, 60, 30),
        (ModelChunkMachine, 20, 30),
        (EngineMachine, 25, 50),
        (WideVocabulary, 8, 50),
        (RealModel, 5, 40),
        (RealLlama, 3, 40),
        (AheadMachine, 5, 50),
        (FailureMachine, 5, 50),
        (HostMemoryMachine, 25, 50),
        (Fp8HostMemory, 6, 50),
        (RealHostMemory, 2, 40),
        (HostChunkMachine, 25, 30),
        (Fp8HostChunks, 6, 30),
        (HostWindowMachine, 15, 50),
        (HostFrameMachine, 8, 50),
        (HostWindowChunkMachine, 20, 30),
        (Fp8HostWindows, 4, 50),
        (RealHostWindows, 2, 40),
        (DiskMachine, 25, 50),
        (Fp8Disk, 6, 50),
        (DiskWindowMachine, 25, 50),
        (DiskFrameMachine, 10, 50),
        (Fp8DiskWindows, 6, 50),
        (RealDiskWindows, 2, 40),
        (CascadeMachine, 3, 50),
        (CascadeChunkMachine, 6, 30),
        (SharedPages, 2, 40),
        (FrameMachine, 40, 40),
        (WindowMachine, 6, 50),
        (MixedWindowMachine, 6, 50),
        (WindowChunkMachine, 10, 30),
        (RealWindows, 2, 40),
        (RealWindowChunks, 5, 30),
        (SharedFrames, 3, 50),
        (Fp8Chunks, 20, 30),
        (Fp8WindowChunks, 4, 30),
        (Fp8Cascade, 4, 50),
        (RealFp8, 3, 40),
        (AsyncMachine, 30, 50),
    ],
)
def test_machine(machine, examples, rules):
    run_state_machine_as_test(machine, settings=settings(max_examples=examples * MORE, stateful_step_count=rules, deadline=None))


def test_an_evicted_page_takes_the_pages_behind_it_out_of_the_index():
    """A run can own a page whose prefix is another's: it stays the run's, but nothing leads to it any more."""
    machine = PrefixMachine()
    machine.start(num_pages=4, page_size=2)
    machine.serve(prompts=[[0, 0]])
    machine.begin(index=True, most=0, tokens=[0, 0, 0, 0])
    machine.agrees()
    machine.begin(index=False, most=9, tokens=[0, 1, 0])
    machine.agrees()
    machine.old_values_stand()
    machine.teardown()
