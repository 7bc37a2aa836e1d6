"""Measure what the tasks of an event loop cost the engine's thread of an `AsyncLLM`.

    python benchmarks/async_host.py [--repeats 5] [--rows 256] [--output FILE]

An executor stands in for the model and samples token 0. A step lasts as long as the host needs (`wait0`), or 1.24 ms longer (`wait1240`).
The interpreter is free during these 1.24 ms, as it is while a GPU works. `plain` is a loop of `nv.step` without an event loop. The others
are an `AsyncLLM` with as many rows. The given number of them are streams, whose readers only count tokens; the rest are one call of
`generate`. A number is the median time from one decode step to the next in a run, in microseconds, and the least of all repeats.
"""

import argparse
import asyncio
import json
import time
from pathlib import Path
from random import Random
from typing import Any, cast

import numpy as np
from host import MICRO, VOCABULARY, Nothing, engine_of

import nanovllm as nv
from nanovllm.entrypoints.arguments import positive
from nanovllm.entrypoints.cli.bench.environment import record
from nanovllm.entrypoints.cli.bench.workloads import random_tokens
from nanovllm.entrypoints.process import freeze

STREAMS = (0, 1, 64, 256)
STEPS = 256
PARAMS = nv.SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)


class Waiting(Nothing):
    """The executor that runs nothing, with a wait of some seconds in each decode step."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def decode(self, model: nv.Model, carry: Any, masks: Any = None) -> Any:
        """Record the time, wait, and return zeros."""
        done = super().decode(model, carry, masks)
        if self.seconds:
            time.sleep(self.seconds)
        return done


def plain(model: nv.Model, prompts: list[list[int]], seconds: float) -> float:
    """Microseconds of a step in a loop of `nv.step`."""
    state, executor = nv.init_state(model, num_pages=8_192), Waiting(seconds)
    state.runtime.executor = cast(Any, executor)
    for prompt in prompts:
        state, _ = nv.submit(model, state, prompt, PARAMS)
    while state.running or state.waiting:
        state, _ = nv.step(model, state)
    return _step(executor)


async def asynchronous(model: nv.Model, prompts: list[list[int]], streams: int, seconds: float) -> float:
    """Microseconds of a step in an `AsyncLLM` with so many streams among its rows."""
    executor = Waiting(seconds)
    async with nv.AsyncLLM(model, num_pages=8_192) as llm:
        llm.state.runtime.executor = cast(Any, executor)

        async def read(prompt: list[int]) -> int:
            return sum([len(piece.token_ids) async for piece in llm.stream(prompt, PARAMS)])

        calls = [read(prompt) for prompt in prompts[:streams]]
        counts = await asyncio.gather(llm.generate(prompts[streams:], PARAMS), *calls)
        assert counts[1:] == [STEPS] * streams
    return _step(executor)


def _step(executor: Waiting) -> float:
    return MICRO * float(np.median(np.diff(executor.steps)))


def measure(repeats: int, rows: int) -> dict[str, float]:
    """Run all measurements."""
    freeze()
    model, random, times = engine_of(1)[0].model, Random(0), {}
    for wait in (0, 1240):
        for _ in range(repeats):
            prompts = [random_tokens(random, 32, VOCABULARY) for _ in range(rows)]
            times.setdefault(f"plain_x{rows}_wait{wait}_us", []).append(plain(model, prompts, wait / MICRO))
            for streams in [n for n in STREAMS if n <= rows]:
                taken = asyncio.run(asynchronous(model, prompts, streams, wait / MICRO))
                times.setdefault(f"async_x{rows}_streams{streams}_wait{wait}_us", []).append(taken)
    return {name: round(min(values), 1) for name, values in times.items()}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=positive, default=5, help="repeats, of which the least is reported (default: %(default)s)")
    parser.add_argument("--rows", type=positive, default=256, help="requests that run together (default: %(default)s)")
    parser.add_argument("--commit", help="commit to record (default: the commit that git reports)")
    parser.add_argument("--output", type=Path, help="write the results to this JSON file")
    options = parser.parse_args()
    command = f"python benchmarks/async_host.py --repeats {options.repeats} --rows {options.rows}"
    result = record(engine_of(1)[0].model, measure(options.repeats, options.rows), command, options.commit)
    print(json.dumps(result, indent=2))
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
