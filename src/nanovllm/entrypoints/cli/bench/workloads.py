"""The workloads: their requests, how they are timed, and the least work of each.

An engine is any object with `generate(prompts, max_tokens, temperature) -> tokens`. It takes and returns token ids, and ignores the
end-of-sequence token.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from nanovllm.entrypoints.cli.bench.roofline import Work, decode_work, prompt_work, prompts_and_decode, together

Generate = Callable[[list[list[int]], list[int], float], list[list[int]]]
TIMED = ("b1", "b8", "b64", "offline", "prefix", "fewshot", "burst", "ttft")  # any engine can run these
WORKLOADS = (*TIMED, "host", "growth", "start", "bare")
PROMPT, SHARED = 128, 16384  # tokens of a short prompt, and of the prefix
EXAMPLES, QUESTIONS = 16, 8  # of `fewshot`: beginnings, and requests that go on from each
SHOTS = 1000  # tokens of such a beginning
LENGTHS = (64, 256, 768, 1500, 3000)  # of `ttft`, in tokens
# Tokens of the longest request, prompt and reply. `growth` has no entry: it leaves out the points that are too long.
LONGEST = {
    "b1": PROMPT + 512, "b8": PROMPT + 256, "b64": PROMPT + 256, "offline": 1024 + 1024, "prefix": SHARED + 32 + 256,
    "fewshot": SHOTS + 60 + 100, "burst": 300 + 500, "ttft": LENGTHS[-1] + 1, "host": 32 + 208, "start": PROMPT + 1,
    "bare": PROMPT + 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """The cost of an engine's calls so far: decode steps, and seconds inside the model's calls (`stopwatch.Stopwatch`)."""

    steps: int = 0
    model_seconds: float = 0.0

    def less(self, other: "Spent") -> "Spent":
        """The difference to an earlier cost."""
        return Spent(steps=self.steps - other.steps, model_seconds=self.model_seconds - other.model_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The time of one call of an engine. `spent` is None if the engine does not report its cost."""

    seconds: float
    spent: Spent | None = None

    def less(self, other: "Timing") -> "Timing":
        """The difference to a shorter call."""
        if self.spent is None or other.spent is None:
            return Timing(seconds=self.seconds - other.seconds)
        return Timing(seconds=self.seconds - other.seconds, spent=self.spent.less(other.spent))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One figure of a workload, as a median over its repeats.

    Attributes:
        workload: The name of the workload.
        what: The requests, in words.
        key: The name of the figure in JSON; it ends with the unit.
        work: The least work of the workload.
        tokens: Sampled tokens.
        seconds: The time.
        steps: Decode steps; None if the engine does not report them.
        host: The share of the time outside the model's calls; None if the engine does not report it.
    """

    workload: str
    what: str
    key: str
    work: Work
    tokens: int
    seconds: float
    steps: int | None = None
    host: float | None = None

    @property
    def figure(self) -> float:
        """Tokens per second or milliseconds, according to `key`."""
        return round(self.tokens / self.seconds, 1) if self.key.endswith("_tok_s") else round(1e3 * self.seconds, 2)


def random_tokens(random: Random, count: int, vocab_size: int) -> list[int]:
    """Random token ids from 300 to 10,000, or from the whole of a smaller vocabulary."""
    low, high = (300, 10000) if vocab_size > 10000 else (0, vocab_size - 1)
    return [random.randint(low, high) for _ in range(count)]


def measure(
    generate: Generate, which: Sequence[str], vocab_size: int, repeats: int = 3, spent: Callable[[], Spent] | None = None
) -> Iterator[Measured]:
    """Run the chosen workloads, and yield each figure when it is known.

    Args:
        generate: The engine.
        which: Names of workloads.
        vocab_size: The size of the vocabulary that prompts are made from.
        repeats: Runs of each workload; `offline`, `fewshot` and `burst` run once, the latter two after a run that does not count.
        spent: Returns the cost of the engine's calls so far; None if the engine does not report it.

    Raises:
        AssertionError: The engine returned another number of tokens than it was asked for.
    """
    random = Random(1)

    def prompt(count: int) -> list[int]:
        return random_tokens(random, count, vocab_size)

    def timed(prompts: list[list[int]], counts: list[int], temperature: float = 0.0) -> Timing:
        before, start = spent() if spent else None, time.perf_counter()
        replies = generate(prompts, counts, temperature)
        seconds, after = time.perf_counter() - start, spent() if spent else None
        if [len(r) for r in replies] != counts:
            raise AssertionError("an engine returned another number of tokens than it was asked for")
        if before is None or after is None:
            return Timing(seconds=seconds)
        return Timing(seconds=seconds, spent=after.less(before))

    timed([prompt(64)], [16])
    for size in (1, 8, 64):
        if f"b{size}" not in which:
            continue
        name, count = f"b{size}", 512 if size == 1 else 256
        timed([prompt(PROMPT) for _ in range(size)], [count] * size)
        steps, firsts = [], []
        for _ in range(repeats):
            first = timed([prompt(PROMPT) for _ in range(size)], [1] * size)
            whole = timed([prompt(PROMPT) for _ in range(size)], [count] * size)
            steps.append(whole.less(first))
            firsts.append(first)
        what = f"{size} x ({PROMPT} in, {count} out)"
        yield _measured(name, what, f"{name}_decode_tok_s", decode_work([PROMPT] * size, [count] * size), steps)
        yield _measured(name, f"{size} x ({PROMPT} in, 1 out)", f"{name}_ttft_ms", prompt_work([PROMPT] * size), firsts)
    if "offline" in which:
        draw = Random(0)
        prompts = [random_tokens(draw, draw.randint(100, 1024), vocab_size) for _ in range(256)]
        counts = [draw.randint(100, 1024) for _ in range(256)]
        work = prompts_and_decode([len(p) for p in prompts], counts)
        whole = timed(prompts, counts, 0.6)
        yield _measured("offline", "256 x (100-1024 in, 100-1024 out)", "offline_tok_s", work, [whole])
    if "prefix" in which:
        cold, warm, many = [], [], []
        for again in range(repeats):
            shared = prompt(SHARED)
            cold.append(timed([shared + prompt(16)], [1]))
            warm.append(timed([shared + prompt(16)], [1]))
            if not again:
                timed([shared + prompt(32) for _ in range(32)], [8] * 32)
            many.append(timed([shared + prompt(32) for _ in range(32)], [256] * 32))
        yield _measured("16k cold", "1 x (16,400 in, 1 out)", "ttft_16k_cold_ms", prompt_work([SHARED + 16]), cold)
        yield _measured("16k warm", "1 x (16k cached + 16 in, 1 out)", "ttft_16k_warm_ms", prompt_work([SHARED + 16], SHARED), warm)
        work = prompts_and_decode([SHARED + 32] * 32, [256] * 32, SHARED)
        yield _measured("prefix", "32 x (16k shared + 32 in, 256 out)", "shared16k_x32_tok_s", work, many)
    if "fewshot" in which:

        def fewshot() -> tuple[list[list[int]], Timing]:
            heads = [prompt(SHOTS) for _ in range(EXAMPLES)]
            prompts = [head + prompt(random.randint(30, 60)) for head in heads for _ in range(QUESTIONS)]
            return prompts, timed(prompts, [100] * len(prompts), 0.7)

        fewshot()
        prompts, whole = fewshot()
        asked = [[len(text) for text in prompts[at : at + QUESTIONS]] for at in range(0, len(prompts), QUESTIONS)]
        work = together([prompts_and_decode(lengths, [100] * QUESTIONS, SHOTS, fill=True) for lengths in asked])
        what = f"{EXAMPLES} x {QUESTIONS} x ({SHOTS:,} shared + 30-60 in, 100 out)"
        yield _measured("fewshot", what, f"fewshot_{EXAMPLES}x{QUESTIONS}_tok_s", work, [whole])
    if "burst" in which:

        def burst() -> tuple[list[list[int]], list[int], Timing]:
            prompts = [prompt(random.randint(20, 300)) for _ in range(300)]
            counts = [random.randint(10, 500) for _ in prompts]
            return prompts, counts, timed(prompts, counts, 1.0)

        burst()
        prompts, counts, whole = burst()
        work = prompts_and_decode([len(text) for text in prompts], counts)
        yield _measured("burst", "300 x (20-300 in, 10-500 out)", "burst_300_tok_s", work, [whole])
    for length in LENGTHS if "ttft" in which else ():
        firsts = [timed([prompt(length)], [1]) for _ in range(2 * repeats + 1)]
        yield _measured("ttft", f"1 x ({length:,} in, 1 out)", f"ttft_{length}_ms", prompt_work([length]), firsts)


def _measured(workload: str, what: str, key: str, work: Work, timings: Sequence[Timing]) -> Measured:
    costs = [t.spent for t in timings if t.spent is not None]
    outside = [1 - s.model_seconds / t.seconds for t, s in zip(timings, costs, strict=False)]
    return Measured(
        workload=workload,
        what=what,
        key=key,
        work=work,
        tokens=work.tokens + work.num_prompts,
        seconds=float(np.median([t.seconds for t in timings])),
        steps=int(np.median([s.steps for s in costs])) if costs else None,
        host=float(np.median(outside)) if costs else None,
    )
