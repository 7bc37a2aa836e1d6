"""The examples run as they stand. Those that compile run on a model of one layer here: eight take minutes to compile on a CPU."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import nanovllm as nv
from nanovllm.testing.models import random_model, save_hf_folder, tiny_config

EXAMPLES = Path(__file__).parents[1] / "examples"
COMPILED = ("compiled_mix.py", "compiled_score.py")
PLAIN = ("hello.py", "stream.py", "branches.py", "beam_search.py", "best_of_n.py", "agent_rollback.py", "steering_vectors.py")


def run(name: str, *arguments: str) -> str:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    if name in COMPILED:
        del environment["PYTHONWARNINGS"]  # the compiler's own
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr[-4000:]
    assert name in COMPILED or result.stderr == ""
    return result.stdout


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory) -> str:
    return str(save_hf_folder(tmp_path_factory.mktemp("model"), tiny_config(num_layers=1)))


def test_every_example_is_tested():
    assert sorted(p.name for p in EXAMPLES.glob("*.py")) == sorted([*PLAIN, *COMPILED])


def test_hello():
    out = run("hello.py")
    assert out.splitlines()[0].startswith("1: ")
    assert "reused_tokens=24" in out


def test_stream():
    out = run("stream.py")
    assert "Velmora" in out
    assert "[left early: 0 requests run, 256 of 256 pages are available]" in out


def test_branches():
    out = run("branches.py")
    assert out.startswith("trunk: Chunk(")
    assert "128 reply tokens run" in out


def numbers(line: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", line)]


def test_beam_search():
    *beams, pages, tokens = run("beam_search.py").splitlines()
    scores = [float(line.split()[0]) for line in beams]
    assert len(scores) == 4 and scores == sorted(scores, reverse=True)
    held, alone = numbers(pages)[:2]
    assert held < alone
    ran, looked_at = numbers(tokens)
    assert 10 * ran < looked_at


def test_best_of_n():
    first, second, last, pages, tokens, more = run("best_of_n.py").splitlines()
    scores = [float(line.split()[0]) for line in (first, second, last)]
    assert scores == sorted(scores, reverse=True)
    count, held, alone = numbers(pages)
    assert count == 12 and held < alone
    assert numbers(tokens)[0] < numbers(tokens)[1]
    assert more.startswith("the best goes on: ")


def test_agent_rollback():
    *steps, story, pages, tokens = run("agent_rollback.py").splitlines()
    path = []
    for line in steps:  # the lines tell the whole walk: what was tried, taken, and taken back
        depth, said = line.split(maxsplit=1)
        assert int(depth) == len(path) + 1
        if said.startswith("a dead end"):
            path.pop()
        elif said.startswith("ok"):
            path.append(said.removeprefix("ok").strip().strip("'"))
    assert len(path) == 5
    assert all(sentence in story for sentence in path)
    words = re.findall(r"\w{4,}", story.lower())
    assert len(words) == len(set(words))
    assert any("NO" in line for line in steps) and any("dead end" in line for line in steps)
    assert numbers(pages)[0] == 6 and numbers(pages)[1] < numbers(pages)[2]
    assert numbers(tokens)[0] < numbers(tokens)[1]


def test_steering_vectors():
    asked, *lines = run("steering_vectors.py").splitlines()
    steps = [re.match(r"strength (\S+): Velmora (\S+), Oswin (\S+), the most probable token is '(.*)'", line) for line in lines[:6]]
    first, second = ([float(step[at]) for step in steps if step] for at in (2, 3))
    assert asked == "The capital of Aistonia is ..."
    assert first == sorted(first, reverse=True) and second == sorted(second)
    assert first[0] > 0.9 and second[-1] > 0.9 and [step[4] for step in steps if step][:: len(steps) - 1] == [" V", " O"]
    assert lines[6] == "the tokens that decide between the answers:"
    saliency = [float(line.split()[0]) for line in lines[7:]]
    assert saliency == sorted(saliency, reverse=True) and saliency[-1] > 0
    assert {"' V'", "' capital'"} <= {re.findall(r"'.*'", line)[0] for line in lines[7:]}


def best_by_full_runs(model: nv.Model, prompt: list[int], width: int, steps: int) -> list[tuple[float, tuple[int, ...]]]:
    """Beam search without branches: every context runs from its beginning, in an engine of its own."""
    beams: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for _ in range(steps):
        ways = []
        for score, tokens in beams:
            if tokens and tokens[-1] in model.config.eos_token_ids:
                ways.append((score, tokens))
                continue
            look = nv.SamplingParams(temperature=0, max_tokens=1, logprobs=width)
            _, gen = nv.generate(model, nv.init_state(model, num_pages=16), [*prompt, *tokens], look)
            ways += [(score + logprob, (*tokens, token)) for token, logprob in gen.logprobs[0].top]
        beams = sorted(ways, reverse=True)[:width]
    return beams


@pytest.mark.parametrize(("width", "steps", "ends"), [(3, 6, ()), (5, 5, (2, 3, 5, 7, 11, 13)), (1, 4, ()), (20, 2, ())])
def test_beam_search_finds_what_full_runs_find(width, steps, ends):
    """With as many beams as there are tokens, two steps look at every continuation of two tokens: the best of all 400."""
    model = random_model(tiny_config(vocab_size=20, eos_token_ids=ends))
    search = runpy.run_path(str(EXAMPLES / "beam_search.py"))["search"]
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    state, base = nv.prefill(model, nv.init_state(model, num_pages=64, page_size=4), prompt)
    state, beams, _ = search(model, state, base, width, steps)
    expected = best_by_full_runs(model, prompt, width, steps)
    assert [beam.token_ids for beam in beams] == [tokens for _, tokens in expected]
    assert [beam.score for beam in beams] == pytest.approx([score for score, _ in expected], abs=1e-4)
    assert not ends or any(len(beam.token_ids) < steps for beam in beams)
    assert state.stats.prefill_tokens + state.stats.decode_tokens - len(prompt) <= 2 * width * (steps - 1) + 2
    for beam in beams:
        assert beam.chunk.token_ids.tolist() == [*prompt, *beam.token_ids[:-1]]
        state = nv.release(state, beam.chunk)
    assert list(state.chunks.values()) == [base]
    nv.check(state)


@pytest.mark.compile
def test_compiled_mix(one_layer):
    assert "both: " in run("compiled_mix.py", one_layer)


@pytest.mark.compile
def test_compiled_score(one_layer):
    scores = [float(line.split()[0]) for line in run("compiled_score.py", one_layer).splitlines()]
    assert scores == sorted(scores, reverse=True)
    assert len(scores) == 4
