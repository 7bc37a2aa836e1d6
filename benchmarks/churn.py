"""Measure how many tokens run twice because requests are preempted, and what that and admission cost, with an executor that runs nothing.

    python benchmarks/churn.py --output benchmarks/results/churn.json

All requests of a workload are submitted at once. A pool holds about `--rows` of them at their mean length. For each workload it tells:

1. `rerun_percent`: tokens run again after preemption, of all tokens run;
2. `preemptions`;
3. `rows`: the mean number of replies per step, and `steps`;
4. `seconds`: a model of the time, in which a step takes 5 ms, 20 us for each reply and 28 us for each prompt token, as 8B does on an H200.

A reply of the workloads `uniform`, `long` and `longer` ends at its limit; those of the others end at lengths that the engine does not know.
"""

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any, cast

import numpy as np
from host import VOCABULARY, Nothing, engine_of

import nanovllm as nv
from nanovllm.entrypoints.arguments import positive, positives
from nanovllm.entrypoints.cli.bench.environment import record
from nanovllm.entrypoints.cli.bench.workloads import random_tokens
from nanovllm.executor.executor import Drawn

STOP = 1
STEP_S, ROW_S, PROMPT_S = 5e-3, 20e-6, 28e-6

Draw = Callable[[Random, float], tuple[int, int, int]]


def _short(random: Random) -> int:
    return random.randint(16, 64)


# For each workload a function that draws the tokens of a prompt, of its reply, and the limit of the reply. Its second argument says where
# the request is among all: 0 for the first, nearly 1 for the last.
WORKLOADS: Mapping[str, Draw] = MappingProxyType(
    {
        "uniform": lambda random, _: (random.randint(100, 1024), reply := random.randint(100, 1024), reply),
        "long": lambda random, _: (_short(random), reply := random.randint(512, 1024), reply),
        "longer": lambda random, _: (_short(random), reply := random.randint(1024, 2048), reply),
        "early": lambda random, _: (random.randint(16, 512), min(4096, 1 + int(random.expovariate(1 / 300))), 4096),
        "mixed": lambda random, _: (random.randint(16, 512), min(1024, 1 + int(random.expovariate(1 / 600))), 1024),
        "unseen": lambda random, _: (_short(random), random.randint(600, 1000), 4096),
        "quarter": lambda random, _: (_short(random), random.choice([10, 10, 10, 1500]), 4096),
        "half": lambda random, _: (_short(random), random.choice([10, 2000]), 4096),
        "rare": lambda random, _: (_short(random), 3500 if random.random() < 0.05 else random.randint(20, 200), 4096),
        "shift": lambda random, place: (_short(random), 20 if place < 0.5 else random.randint(1200, 1800), 4096),
        "waves": lambda random, place: (_short(random), random.randint(*((20, 60) if int(place * 8) % 2 else (800, 1500))), 4096),
        "drift": lambda random, place: (_short(random), min(4096, 1 + int(random.expovariate(1 / (50 + 1500 * place)))), 4096),
        "pareto": lambda random, _: (_short(random), min(4000, int(50 * random.paretovariate(1.0))), 4096),
        "thinking": lambda random, _: (random.randint(50, 300), min(8192, int(random.lognormvariate(6.8, 0.9))), 8192),
        "unseen_long": lambda random, _: (_short(random), random.randint(2900, 3100), 4096),
    }
)


class Ending(Nothing):
    """An executor that runs nothing, and samples a stop token at the end of each reply, which only it knows."""

    def __init__(self, lengths: dict[int, int]) -> None:
        super().__init__()
        self.lengths, self.rows, self.prompt_tokens = lengths, 0, 0

    def prefill(self, model: nv.Model, kv: Any, rows: Any, *, draw: bool = True, frames: Any = None) -> tuple[Drawn | None, Any]:
        """Count the tokens; return the next token of the rows whose prompt is complete."""
        self.prompt_tokens += sum(count for _, count in rows)
        whole = [sequence for sequence, count in rows if count == sequence.todo]
        return (self._drawn(*self._places(whole)) if draw and whole else None), kv

    def load(self, model: nv.Model, kv: Any, rows: Any, *, frames: Any = None) -> Any:
        """Return for each row the length of its reply, and how far it is."""
        return self._places(rows)

    def refresh(self, model: nv.Model, carry: Any, rows: Any, *, frames: Any = None) -> Any:
        """Return the carry."""
        return carry

    def narrow(self, model: nv.Model, carry: Any, keep: Any, rows: Any, *, grew: bool = False, frames: Any = None) -> Any:
        """Return the carry of the remaining rows."""
        return carry[0][keep], carry[1][keep]

    def decode(self, model: nv.Model, carry: Any, masks: Any = None) -> tuple[Any, Drawn]:
        """Count the rows; return their next tokens."""
        self.steps.append(0.0)
        self.rows += len(carry[0])
        return (carry[0], carry[1] + 1), self._drawn(*carry)

    def _places(self, rows: Any) -> tuple[np.ndarray, np.ndarray]:
        return np.array([self.lengths[s.request.request_id] for s in rows]), np.array([s.num_generated for s in rows])

    def _drawn(self, lengths: np.ndarray, done: np.ndarray) -> Drawn:
        return Drawn(token_ids=np.where(done + 1 >= lengths, STOP, 0).astype(np.int32))


def run(draw: Draw, count: int, rows: int, seed: int = 0) -> dict[str, float]:
    """Serve `count` requests of a workload, in a pool for about `rows` of them. Returns the figures of the module's docstring."""
    random, drawn = Random(seed), [draw(Random(seed + i), i / count) for i in range(count)]
    mean = sum(prompt + reply for prompt, reply, _ in drawn) / count
    engine, _ = engine_of(int(mean * rows) // 16)
    model, state, lengths = engine.model, engine.state, dict[int, int]()
    state.runtime.executor = cast(Any, executor := Ending(lengths))
    for prompt, reply, limit in drawn:
        params = nv.SamplingParams(temperature=0.0, max_tokens=limit, ignore_eos=True, stop_token_ids=(STOP,))
        state, request_id = nv.submit(model, state, [2 + t for t in random_tokens(random, prompt, VOCABULARY - 2)], params)
        lengths[request_id] = reply
    steps = 0
    while state.running or state.waiting:
        state, _ = nv.step(model, state)
        steps += 1
    ran = state.stats.prefill_tokens + state.stats.decode_tokens
    return {
        "rerun_percent": round(100 * state.stats.rerun_tokens / ran, 2),
        "preemptions": state.stats.preemptions,
        "rows": round(executor.rows / steps, 1),
        "steps": steps,
        "seconds": round(STEP_S * steps + ROW_S * executor.rows + PROMPT_S * executor.prompt_tokens, 2),
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=positive, default=256, help="requests per workload (default: %(default)s)")
    parser.add_argument("--rows", type=positives, default=(24, 64), help="pool sizes in requests (default: 24,64)")
    parser.add_argument("--commit", help="commit to record (default: the commit that git reports)")
    parser.add_argument("--output", type=Path, help="write the results to this JSON file")
    options = parser.parse_args()
    figures = {f"{name}_x{rows}": run(draw, options.requests, rows) for name, draw in WORKLOADS.items() for rows in options.rows}
    command = f"python benchmarks/churn.py --requests {options.requests} --rows {','.join(map(str, options.rows))}"
    result = record(engine_of(1)[0].model, figures, command, options.commit)
    print(json.dumps(result, indent=2))
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
