"""Measure the decode step inside a program of the caller, compared with the engine's own step.

    python benchmarks/embed.py --model qwen3-0.6b --output benchmarks/results/h200-embed.json

For each number of rows it measures a step of `generate_many`, as it is and with `process_logits` (`mixed_*`). Then it measures a step of
`decode_step`: called as it is, in `torch.compile(fullgraph=True)`, in `torch.compile(mode="reduce-overhead")`, and captured by `capture`.
`compile_*` is the time of the first two calls of a compiled step, and `capture_*` the time of the capture. `loop_*` is a step of
`decode_loop`, and `beam_*` a step of a beam search with the rows as beams. Prompts have 128 tokens. Steps that the caller runs are timed
one by one, between two synchronisations, and the medians are given.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import nanovllm as nv
from nanovllm.entrypoints.arguments import positive, positives
from nanovllm.entrypoints.cli.bench.command import add_model_arguments, find_model
from nanovllm.entrypoints.cli.bench.environment import record
from nanovllm.entrypoints.process import freeze

PROMPT, REPLY, EAGER, COMPILED = 128, 128, 20, 40  # tokens of prompts and replies, and timed steps


def main() -> None:
    """Measure, print one JSON object, and write it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--batches", type=positives, default=(1, 8, 64), metavar="N,...", help="numbers of rows (default: 1,8,64)")
    parser.add_argument("--repeats", type=positive, default=1, metavar="N", help="runs whose medians are taken (default: 1)")
    parser.add_argument("--commit", help="the commit to record (default: git's)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the figures as JSON")
    options = parser.parse_args()
    model, _ = find_model(options)
    state = nv.init_state(model, max_model_len=min(2048, model.config.max_position_embeddings), check=False)
    freeze()
    figures: dict[str, float] = {}
    for rows in options.batches:
        runs: list[dict[str, float]] = []
        for _ in range(options.repeats):
            state, found = measured(model, state, rows)
            runs.append(found)
        # Only the first run compiles.
        found = {
            key: first if key.endswith("_s") else round(statistics.median(run[key] for run in runs), 3) for key, first in runs[0].items()
        }
        figures |= found
        print(json.dumps(found), flush=True)
    if options.output is not None:
        text = json.dumps(record(model, figures, " ".join(("python benchmarks/embed.py", *sys.argv[1:])), options.commit), indent=1)
        options.output.write_text(text + "\n", encoding="utf-8")


@torch.no_grad()
def measured(model: nv.Model, state: nv.EngineState, rows: int) -> tuple[nv.EngineState, dict[str, float]]:
    """The figures of one number of rows."""
    greedy, found = nv.SamplingParams(temperature=0, max_tokens=REPLY, ignore_eos=True), dict[str, float]()
    for start in (0, 3000):  # the first call loads kernels
        found[f"engine_b{rows}_ms"], state = replies(model, state, prompts(rows, start), greedy)
        found[f"mixed_b{rows}_ms"], state = replies(model, state, prompts(rows, start + 900), greedy, process_logits=mixed)
    state, carry = nv.begin(model, state, prompts(rows, 6000), greedy, room=EAGER + COMPILED + 2)

    def eager(carry: nv.DecodeCarry) -> nv.DecodeCarry:
        return nv.decode_step(model.params, carry, model.config)[0]

    @torch.compile(fullgraph=True)
    def step(params: Any, carry: nv.DecodeCarry) -> nv.DecodeCarry:
        return nv.decode_step(params, carry, model.config)[0]

    carry, found[f"eager_b{rows}_ms"] = median(eager, carry, EAGER)
    begin = time.perf_counter()
    for _ in range(2):
        carry = step(model.params, carry)
    found[f"compile_b{rows}_s"] = round(time.perf_counter() - begin, 1)
    carry, found[f"compiled_b{rows}_ms"] = median(lambda carry: step(model.params, carry), carry, COMPILED)
    state, _ = nv.commit(model, state, carry)
    for name, measure in (("reduce_overhead", reduced), ("captured", captured), ("loop", looped), ("beam", searched)):
        branching = name == "beam"
        state, carry = nv.begin(model, state, prompts(rows, 6000), greedy, room=4 * COMPILED, branching=branching)
        carry, made = measure(model, state, carry)
        found |= {f"{key}_b{rows}_{unit}": value for (key, unit), value in made.items()}
        state, _ = nv.commit(model, state, carry)
    return state, found


def replies(model: nv.Model, state: nv.EngineState, contexts: list[list[int]], *options: Any, **more: Any) -> tuple[float, nv.EngineState]:
    """The milliseconds per step of whole replies, their prompts included, and the state."""
    begin = time.perf_counter()
    state, _ = nv.generate_many(model, state, contexts, *options, **more)
    return round(1e3 * (time.perf_counter() - begin) / REPLY, 3), state


def mixed(logits: torch.Tensor) -> torch.Tensor:
    """Each two neighbouring rows get the mean of both, as in classifier-free guidance. A row without a neighbour keeps its logits."""
    pairs = logits[: len(logits) // 2 * 2].unflatten(0, (-1, 2))
    return torch.cat((pairs.mean(1, keepdim=True).expand_as(pairs).flatten(0, 1), logits[pairs.shape[0] * 2 :]))


def reduced(model: nv.Model, state: nv.EngineState, carry: nv.DecodeCarry) -> tuple[nv.DecodeCarry, dict[tuple[str, str], float]]:
    """A step that `torch.compile` captures."""

    @torch.compile(fullgraph=True, mode="reduce-overhead")
    def step(params: Any, carry: nv.DecodeCarry) -> tuple[nv.DecodeCarry, torch.Tensor]:
        carry, out = nv.decode_step(params, carry, model.config)
        return carry, out.token_ids

    for _ in range(4):  # compiled, warmed up, recorded
        carry, _ = step(model.params, carry)
    carry, taken = median(lambda carry: step(model.params, carry)[0], carry, COMPILED)
    return carry, {("reduce_overhead", "ms"): taken}


def captured(model: nv.Model, state: nv.EngineState, carry: nv.DecodeCarry) -> tuple[nv.DecodeCarry, dict[tuple[str, str], float]]:
    """A step that `nv.capture` captures, with all its results."""
    begin = time.perf_counter()
    step = nv.capture(lambda carry: nv.decode_step(model.params, carry, model.config), carry)
    seconds = round(time.perf_counter() - begin, 3)
    carry, _ = step(carry)
    carry, taken = median(lambda carry: step(carry)[0], carry, COMPILED)
    return carry, {("captured", "ms"): taken, ("capture", "s"): seconds}


def looped(model: nv.Model, state: nv.EngineState, carry: nv.DecodeCarry) -> tuple[nv.DecodeCarry, dict[tuple[str, str], float]]:
    """A step of a loop that is one call, without its capture."""

    def body(carry: nv.DecodeCarry) -> tuple[nv.DecodeCarry, torch.Tensor]:
        carry, out = nv.decode_step(model.params, carry, model.config)
        return carry, out.token_ids

    step = nv.capture(body, carry)
    carry, taken = median(lambda carry: nv.decode_loop(model, state, carry, 32, step)[0], carry, 3)
    return carry, {("loop", "ms"): round(taken / 32, 3)}


def searched(model: nv.Model, state: nv.EngineState, carry: nv.DecodeCarry) -> tuple[nv.DecodeCarry, dict[tuple[str, str], float]]:
    """A step of a beam search, captured."""

    def body(carry: nv.DecodeCarry, scores: torch.Tensor) -> tuple[nv.DecodeCarry, torch.Tensor]:
        width, chosen = len(scores), []

        def widest(logits: torch.Tensor) -> torch.Tensor:
            found = logits.float().log_softmax(1).topk(width, 1)
            chosen.append((scores.unsqueeze(1) + found.values, found.indices))
            return logits

        carry, _ = nv.decode_step(model.params, carry, model.config, process_logits=widest)
        totals, tokens = chosen[0]
        best = totals.flatten().topk(width)
        return nv.split_rows(carry, best.indices // width, tokens.flatten()[best.indices].int()), best.values

    scores = torch.zeros(carry.active.shape, device=carry.active.device)
    step = nv.capture(body, carry, scores)

    def run(carry: nv.DecodeCarry) -> nv.DecodeCarry:
        nonlocal scores
        carry, scores = step(carry, scores)
        return carry

    carry, taken = median(run, carry, COMPILED)
    return carry, {("beam", "ms"): taken}


def median(step: Callable[[nv.DecodeCarry], nv.DecodeCarry], carry: nv.DecodeCarry, count: int) -> tuple[nv.DecodeCarry, float]:
    """Run a step `count` times. Returns the carry, and the median of the times in milliseconds."""
    wait = torch.cuda.synchronize if carry.active.is_cuda else lambda: None
    times = []
    for _ in range(count):
        wait()
        begin = time.perf_counter()
        carry = step(carry)
        wait()
        times.append(time.perf_counter() - begin)
    return carry, round(1e3 * sorted(times)[count // 2], 3)


def prompts(rows: int, start: int) -> list[list[int]]:
    """Prompts that share nothing."""
    return [[(start + 7 * row + place * (row + 1)) % 4000 for place in range(PROMPT)] for row in range(rows)]


if __name__ == "__main__":
    main()
