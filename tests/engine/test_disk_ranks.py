"""KV on disk with several ranks, each with files of its own: they plan alike, whatever their disks do."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nanovllm.config import Mesh
from nanovllm.engine import disk_tier
from nanovllm.engine.disk_flush import flush_kv
from nanovllm.engine.init_state import init_state
from nanovllm.engine.requests import cancel, submit
from nanovllm.engine.step import step
from nanovllm.errors import InvalidRequestError
from nanovllm.executor.executor import runtime_of
from nanovllm.executor.page_folder import PageFolder
from nanovllm.models.model import Model
from nanovllm.ops.distributed.in_process import run_ranks
from nanovllm.sampling.params import SamplingParams
from nanovllm.state.digest import digest
from nanovllm.state.engine_state import EngineState
from nanovllm.state.invariants import check
from nanovllm.state.offload import Rates
from nanovllm.testing.models import random_model, tiny_config
from nanovllm.testing.shadows.late_disk import LateDiskTier
from nanovllm.testing.shadows.worlds import drain

# Whole engines run many steps, which the hook makes three to six times as long.
pytestmark = [pytest.mark.unhooked, pytest.mark.usefixtures("nothing_ahead")]
SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "num_kv_heads": 2, "head_dim": 8}
HEADS = tiny_config(**SIZES)
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
ALWAYS = Rates(tokens_per_second=1.0, bytes_per_second=1e15)
GIB = 1 / 256


def engine(folder: Path, mesh: Mesh | None, **options) -> tuple[Model, EngineState]:
    """A model and an engine of this rank, with 32 pages of 4 tokens, host memory and a folder."""
    model = random_model(HEADS, dtype="float64", mesh=mesh)
    state = init_state(model, **{"num_pages": 32, "page_size": 4, "host_kv_gib": GIB, "kv_dir": folder, "kv_dir_gib": GIB, **options})
    host = state.pool.host
    assert host is not None
    return model, replace(state, pool=replace(state.pool, host=replace(host, rates=ALWAYS)))


def prompt(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 64, 21).tolist()


def served(model: Model, state: EngineState, *seeds: int):
    """The state after some prompts, with their replies, and how many tokens of each prompt were not run."""
    told = []
    for seed in seeds:
        state, rid = submit(model, state, prompt(seed), GREEDY)
        state, outputs = drain(model, state)
        check(state)
        told.append((outputs[rid].token_ids, outputs[rid].num_cached_tokens))
    return state, told


def written(folder: Path, *seeds: int) -> Callable[[Mesh | None], None]:
    """What writes the KV of some prompts to a folder."""

    def run(mesh: Mesh | None) -> None:
        model, state = engine(folder, mesh)
        state, _ = served(model, state, *seeds)
        assert flush_kv(state)

    return run


def test_ranks_read_what_ranks_have_written(tmp_path: Path):
    def run(mesh: Mesh | None):
        folder = tmp_path / ("alone" if mesh is None else "ranks")
        model, state = engine(folder, mesh)
        state, first = served(model, state, 0, 1)
        assert flush_kv(state)
        model, state = engine(folder, mesh)
        state, second = served(model, state, 0, 1, 2)
        return first, second, state.stats, digest(state, whole=True)

    first, second, stats, _ = run(None)
    one, two = run_ranks(run, 2)
    assert one == two, "the ranks differ"
    assert one[:3] == (first, second, stats)
    assert [tokens for tokens, _ in second[:2]] == [tokens for tokens, _ in first] and [cached for _, cached in second] == [20, 20, 0]
    assert stats.read_tokens == 40
    files = [path.parent.parent.name for path in (tmp_path / "ranks").rglob("*.kv")]
    assert len({*files}) == 2 and len(files) == 2 * len([*(tmp_path / "alone").rglob("*.kv")])


@pytest.mark.parametrize("speeds", [(1, 1), (1, 3), (3, 1), (0, 2)])
def test_ranks_whose_reads_end_at_different_times_stay_alike(tmp_path: Path, speeds: tuple[int, int]):
    """A request goes on when all ranks have its pages, or when all have waited long enough."""
    run_ranks(written(tmp_path, 0, 1, 2), 2)

    def run(mesh: Mesh):
        model, state = engine(tmp_path, mesh)
        runtime = runtime_of(state)
        assert runtime.disk is not None and runtime.host is not None
        runtime.disk = tier = LateDiskTier(runtime.disk.folder, runtime.host)
        tier.time = 100.0 * mesh.rank  # each has a clock of its own
        tokens, digests = dict[int, list[int]](), []
        for seed in (0, 1, 2, 3):
            state, rid = submit(model, state, prompt(seed), GREEDY)
            tokens[rid] = []
        for number in range(200):
            tier.reads.run(speeds[mesh.rank])
            if number == 3:
                state = cancel(state, 2)
            state, outputs = step(model, state)
            check(state)
            digests.append(digest(state, whole=True))
            for output in outputs:
                tokens[output.request_id] += output.token_ids
            if not state.running and not state.waiting:
                break
        else:
            raise AssertionError("some requests have not ended")
        return digests, tokens, state.stats.read_tokens

    one, two = run_ranks(run, 2)
    assert one == two, "the ranks differ"
    model = random_model(HEADS, dtype="float64")
    _, expected = served(model, init_state(model, num_pages=32, page_size=4), 0, 1, 3)
    assert [one[1][rid] for rid in sorted(one[1]) if rid != 2] == [tokens for tokens, _ in expected]
    assert one[2] > 0 or 0 in speeds


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_a_page_that_one_rank_lacks_is_run_on_all(tmp_path: Path, damage: str):
    run_ranks(written(tmp_path, 0), 2)
    kept = {path.parent.parent.name for path in tmp_path.rglob("*.kv")}
    own = sorted(kept)[0]
    for path in (tmp_path / "pages" / own).rglob("*.kv"):
        path.unlink() if damage == "gone" else path.write_bytes(path.read_bytes()[:-1])

    def run(mesh: Mesh):
        model, state = engine(tmp_path, mesh)
        state, told = served(model, state, 0)
        return told, state.stats, digest(state, whole=True)

    one, two = run_ranks(run, 2)
    assert one == two, "the ranks differ"
    model = random_model(HEADS, dtype="float64")
    _, (expected,) = served(model, init_state(model, num_pages=32, page_size=4), 0)
    assert one[0] == [(expected[0], 0)] and one[1].read_tokens == 0


def test_a_rank_that_calls_the_engine_itself_flushes_alone(tmp_path: Path):
    """Its program may have failed, and the others may be in the middle of a step."""

    def run(mesh: Mesh):
        model, state = engine(tmp_path, mesh)
        state, _ = served(model, state, 0)
        ended, count = not mesh.rank, 0
        while not ended:
            ended, count = flush_kv(state, max_bytes=1), count + 1
            runtime_of(state).disk.drain()
        assert not mesh.rank or flush_kv(state)
        return count

    assert run_ranks(run, 2) == [0, 6]
    assert len({path.parent.parent.name for path in tmp_path.rglob("*.kv")}) == 1


def test_no_rank_goes_on_if_one_cannot_open_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def opened(folder: Path, max_bytes: int, page_bytes: int, identity: dict[str, object]) -> PageFolder:
        if identity["rank"] == 1:
            raise PermissionError(13, "planted")
        return PageFolder(folder, max_bytes, page_bytes, identity)

    def run(mesh: Mesh) -> str:
        with pytest.raises(InvalidRequestError, match=r"kv_dir=.* cannot be used") as caught:
            engine(tmp_path, mesh)
        return str(caught.value)

    monkeypatch.setattr(disk_tier, "PageFolder", opened)
    one, two = run_ranks(run, 2)
    assert one.endswith("by another rank of this engine") and two.endswith("planted")


def test_ranks_plan_with_the_rate_of_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rates = iter([3e9, 5e9])
    monkeypatch.setattr(disk_tier, "_read_rate", lambda files, num_ranks: next(rates) * num_ranks)

    def run(mesh: Mesh):
        host = engine(tmp_path, mesh)[1].pool.host
        assert host is not None and host.disk is not None
        return host.disk.bytes_per_second, host.disk.now

    one, two = run_ranks(run, 2)
    assert one == two and one[0] in (6e9, 1e10)
