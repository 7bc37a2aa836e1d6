"""A modelled device: how long a step takes, fitted to recorded measurements of Qwen3-8B on an H200.

A step with n replies that go on, over contexts of k tokens together, takes `base + row * n + context * k` seconds. Prompts are a pass of
their own: `launch + token * (n + n * (f + n / 2) / doubling)` for n tokens after f others. Two figures are not fitted. `context` are the
bytes of a token's KV over the rate at which the device reads. `doubling` is what an engine measured at its start (`h200-latency.json`).
The others are least squares of relative errors: `base` and `row` over the decode steps of b1, b8 and b64, `launch` and `token` over the
prompts of b1, b8 and b64 and the cold prompt of 16k (`h200-8b.json`). The row `offline` is kept for a check.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).resolve().parents[1] / "results"
KV_BYTES = 36 * 2 * 8 * 128 * 2  # of a token of Qwen3-8B in bfloat16
DECODE = {"b1_decode_tok_s": (1, 128, 512), "b8_decode_tok_s": (8, 128, 256), "b64_decode_tok_s": (64, 128, 256)}
PROMPTS = {"b1_ttft_ms": (1, 128), "b8_ttft_ms": (8, 128), "b64_ttft_ms": (64, 128), "ttft_16k_cold_ms": (1, 16_400)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The seconds of a step's parts.

    Attributes:
        base: A pass over rows that decode.
        row: Each of these rows.
        context: Each token of their contexts.
        launch: A pass over prompts.
        token: Each token of a prompt without tokens before it.
        doubling: Tokens of context with which a prompt token takes twice as long.
        max_prefill_tokens: The bound on prompt tokens per step that such an engine measured for steps of 35 ms.
    """

    base: float
    row: float
    context: float
    launch: float
    token: float
    doubling: int
    max_prefill_tokens: int

    def decode(self, rows: int, context: int) -> float:
        """The seconds of a pass over `rows` replies whose contexts have `context` tokens together."""
        return self.base + self.row * rows + self.context * context if rows else 0.0

    def prefill(self, pieces: Iterable[tuple[int, int]]) -> float:
        """The seconds of a pass over pieces of prompts: for each the tokens before it, and its own."""
        work = [self.prompt(before, count) for before, count in pieces]
        return self.launch + sum(work) if work else 0.0

    def prompt(self, before: float, count: float) -> float:
        """The seconds of `count` prompt tokens after `before` others, without the launch."""
        return self.token * (count + count * (before + count / 2) / self.doubling)


def fitted(results: Path = RESULTS) -> Device:
    """The device of the recorded files."""
    run, latency = _read(results / "h200-8b.json"), _read(results / "h200-latency.json")["knobs"]["35"]
    took = {row["key"]: row["step_ms"] / 1e3 for row in run["workloads"]}
    context = KV_BYTES / (run["roofline"]["read_gb_s"] * 1e9)
    # The context of a row is on average its prompt and half of its reply.
    steps = [(took[key] - context * rows * (prompt + reply / 2), 1.0, float(rows)) for key, (rows, prompt, reply) in DECODE.items()]
    base, row = _solved(steps)
    doubling = latency["context_doubling"]
    prompts = [(took[key], 1.0, rows * (n + n * n / 2 / doubling)) for key, (rows, n) in PROMPTS.items()]
    launch, token = _solved(prompts)
    most = latency["max_prefill_tokens"]
    return Device(base=base, row=row, context=context, launch=launch, token=token, doubling=doubling, max_prefill_tokens=most)


def errors(device: Device, results: Path = RESULTS) -> dict[str, tuple[float, float]]:
    """Of each row of the fit the recorded milliseconds and the model's."""
    took = {row["key"]: row["step_ms"] for row in _read(results / "h200-8b.json")["workloads"]}
    steps = {key: device.decode(n, round(n * (prompt + reply / 2))) for key, (n, prompt, reply) in DECODE.items()}
    prompts = {key: device.prefill([(0, n)] * rows) for key, (rows, n) in PROMPTS.items()}
    return {key: (took[key], round(1e3 * seconds, 3)) for key, seconds in (steps | prompts).items()}


def _solved(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """The least squares of relative errors of `y = p x1 + q x2`."""
    values = np.array(rows)
    found = np.linalg.lstsq(values[:, 1:] / values[:, :1], np.ones(len(rows)), rcond=None)[0]
    return float(found[0]), float(found[1])


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))
