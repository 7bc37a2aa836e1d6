"""Measure how steadily replies go on while long prompts arrive, by the bound on a step.

    python benchmarks/latency.py --model qwen3-8b --seconds 30 --knobs inf,80,50,35,20 --output benchmarks/results/latency.json

`--rows` replies decode all the time: one that ends is followed by the next. Every `--every` seconds a prompt of `--long` tokens arrives,
whose reply has 16 tokens. Each knob is a value of `max_step_ms` in milliseconds, `inf` for no bound (prompts as soon as they arrive), or,
with a `t` behind it, a value of `max_prefill_tokens`. For each knob an engine of its own is made, warmed up and measured:

- `gap_ms`: from one token of a running reply to its next: median, 90th and 99th percentile, and the longest;
- `first_token_ms`: from the arrival of a long prompt to its first token, the mean, and how many of these prompts ended;
- `tokens_per_second`: tokens of prompts and of replies, and both together;
- `max_prefill_tokens`: the bound that the engine found;
- `longest_steps`: of the longest steps, the time, the prompt tokens that ran, and the tokens of context before them.
"""

import argparse
import json
import math
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

import nanovllm as nv
from nanovllm.entrypoints.arguments import positive
from nanovllm.entrypoints.cli.bench.command import add_model_arguments, find_model
from nanovllm.entrypoints.cli.bench.environment import record
from nanovllm.entrypoints.cli.bench.workloads import random_tokens
from nanovllm.entrypoints.process import freeze

LONG_REPLY = 16  # tokens
LONGEST = 12  # steps that are reported one by one
KNOBS = ("inf", "80", "50", "35", "20")


@dataclass(frozen=True, slots=True, order=True)
class Step:
    """The seconds of a step, the prompt tokens that it ran, and how many tokens of one of these prompts came before them."""

    seconds: float
    prompt_tokens: int
    context: int

    def as_json(self) -> dict[str, float]:
        """A JSON object."""
        return {"ms": round(1e3 * self.seconds, 2), "prompt_tokens": self.prompt_tokens, "context": self.context}


@dataclass(slots=True)
class Load:
    """The requests of one measurement: replies that run all the time, and long prompts that arrive at fixed times.

    Attributes:
        model: The model.
        state: The newest state.
        options: The command line.
        random: For the prompts.
        last: When each running reply got its newest token, by request id; None before its first.
        since: When each long prompt arrived, by request id.
        gaps: Seconds between two tokens of replies that run all the time.
        firsts: Seconds to the first tokens of long prompts.
        steps: All steps.
        prompts: Random prompts by length, made ahead, because that takes as long as a step.
    """

    model: nv.Model
    state: nv.EngineState
    options: argparse.Namespace
    random: Random
    last: dict[int, float | None] = field(default_factory=dict)
    since: dict[int, float] = field(default_factory=dict)
    gaps: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    prompts: dict[int, deque[list[int]]] = field(default_factory=dict)

    def submit(self, num_prompt: int, max_tokens: int) -> int:
        """Queue a request for a random prompt. Returns its id."""
        made = self.prompts.get(num_prompt)
        prompt = made.popleft() if made else self.random_prompt(num_prompt)
        params = nv.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.state, request_id = nv.submit(self.model, self.state, prompt, params)
        return request_id

    def random_prompt(self, num_tokens: int) -> list[int]:
        """Random tokens."""
        return random_tokens(self.random, num_tokens, self.model.config.vocab_size)

    def make_ahead(self, seconds: float) -> None:
        """Make the prompts that so many seconds can need."""
        for length, count in ((self.options.long, int(seconds / self.options.every) + 2), (self.options.prompt, 2 * self.options.rows)):
            self.prompts[length] = deque(self.random_prompt(length) for _ in range(count))

    def step(self) -> None:
        """Run a step, and put a new reply in the place of each that ended."""
        before, start = self.state, time.perf_counter()
        self.state, outputs = nv.step(self.model, self.state)
        now = time.perf_counter()
        context = max([s.num_filled for s in before.running if s.todo > 1], default=0)
        self.steps.append(Step(now - start, self.state.stats.prefill_tokens - before.stats.prefill_tokens, context))
        for out in outputs:
            if out.request_id in self.since and out.token_ids:
                self.firsts.append(now - self.since.pop(out.request_id))
            if out.request_id in self.last:
                before = self.last[out.request_id]
                if before is not None:
                    self.gaps.append(now - before)
                self.last[out.request_id] = now
                if out.finish_reason is not None:
                    del self.last[out.request_id]
                    self.last[self.submit(self.options.prompt, self.options.reply)] = None

    def fill(self) -> None:
        """Begin the replies, at different lengths so that they do not end together, and run them until all have a token."""
        for row in range(self.options.rows):
            self.last[self.submit(self.options.prompt, max(2, self.options.reply * (row + 1) // self.options.rows))] = None
        while any(value is None for value in self.last.values()):
            self.step()

    def run(self, seconds: float) -> float:
        """Run for so many seconds, in which long prompts arrive. Returns the seconds that it took."""
        start, arrivals = time.perf_counter(), 0
        while (passed := time.perf_counter() - start) < seconds:
            if passed >= arrivals * self.options.every:
                arrival = start + arrivals * self.options.every
                self.since[self.submit(self.options.long, LONG_REPLY)] = arrival
                arrivals += 1
            self.step()
        return time.perf_counter() - start


def measure(model: nv.Model, knob: str, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one knob."""
    bound: dict[str, Any] = {"max_prefill_tokens": int(knob[:-1])} if knob.endswith("t") else {"max_step_ms": float(knob)}
    longest = options.long + LONG_REPLY
    pages = 2 * (options.rows * (options.prompt + options.reply) + 4 * longest) // 16
    model_len = min(model.config.max_position_embeddings, max(longest, options.prompt + options.reply) + 1)
    state = nv.init_state(model, num_pages=pages, max_model_len=model_len, max_num_seqs=2 * options.rows, **bound)
    load = Load(model, state, options, Random(0))
    load.fill()
    load.run(min(2 * options.every, options.seconds))
    load.gaps.clear()
    load.firsts.clear()
    load.steps.clear()
    load.make_ahead(options.seconds)
    before = load.state.stats
    took = load.run(options.seconds)
    after, limits = load.state.stats, load.state.config
    prompts, replies = ((getattr(after, name) - getattr(before, name)) / took for name in ("prefill_tokens", "decode_tokens"))
    return {
        "gap_ms": {name: _milliseconds(load.gaps, part) for name, part in (("p50", 50), ("p90", 90), ("p99", 99), ("max", 100))},
        "first_token_ms": round(1e3 * float(np.mean(load.firsts)), 1) if load.firsts else None,
        "num_first_tokens": len(load.firsts),
        "tokens_per_second": {"prompts": round(prompts, 1), "replies": round(replies, 1), "all": round(prompts + replies, 1)},
        "max_prefill_tokens": limits.max_prefill_tokens,
        "context_doubling": limits.context_doubling,
        "longest_steps": [one.as_json() for one in sorted(load.steps, reverse=True)[:LONGEST]],
    }


def _milliseconds(seconds: list[float], part: float) -> float | None:
    return round(1e3 * float(np.percentile(seconds, part)), 2) if seconds else None


def knob(text: str) -> str:
    """A value of `--knobs`.

    Raises:
        ArgumentTypeError: It is neither a number of milliseconds, nor a number of tokens and a `t`.
    """
    try:
        holds = int(text[:-1]) > 0 if text.endswith("t") else float(text) > 0 and not math.isnan(float(text))
    except ValueError:
        holds = False
    if not holds:
        raise argparse.ArgumentTypeError(f"{text!r} must be milliseconds, inf, or tokens as in 1024t")
    return text


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument(
        "--knobs", type=lambda text: [knob(one) for one in text.split(",")], default=list(KNOBS), help=f"(default: {','.join(KNOBS)})"
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="measured time for each knob (default: %(default)s)")
    parser.add_argument("--rows", type=positive, default=32, help="replies that go on (default: %(default)s)")
    parser.add_argument("--prompt", type=positive, default=128, help="tokens of their prompts (default: %(default)s)")
    parser.add_argument("--reply", type=positive, default=2048, help="their tokens (default: %(default)s)")
    parser.add_argument("--long", type=positive, default=16384, help="tokens of the long prompts (default: %(default)s)")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two of them (default: %(default)s)")
    parser.add_argument("--commit", help="commit to record (default: the commit that git reports)")
    parser.add_argument("--output", type=Path, help="write the results to this JSON file")
    options = parser.parse_args(arguments)
    model, name = find_model(options)
    freeze()
    results = {}
    for one in options.knobs:
        results[one] = measure(model, one, options)
        print(one, json.dumps(results[one]), flush=True)
    settings = " ".join(f"--{each} {getattr(options, each)}" for each in ("seconds", "rows", "prompt", "reply", "long", "every"))
    command = f"python benchmarks/latency.py --model {name} {settings} --knobs {','.join(options.knobs)}"
    result = record(model, {"knobs": results}, command, options.commit)
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
