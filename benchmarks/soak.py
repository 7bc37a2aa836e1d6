"""Serve a mix of all kinds of clients for minutes: nothing may grow, no reply may change, no step may stall.

python -m benchmarks.soak --model qwen3-0.6b --minutes 10 --output soak.json
python -m benchmarks.soak --model tiny --device cpu --minutes 1.5

Clients arrive at random (Poisson), and a fifth of them leave before their reply has ended. One thread reads all of them in turn, so that
their requests run in the same steps. The kinds are those of `KINDS`: plain greedy replies, sampled ones, stop strings, log-probabilities,
biases, penalties, functions of the logits, long prompts, conversations over chunks, forks, and decode steps of the caller's own.

With the first client, and with every 200th after it, a wave of 16 clients arrives, whose replies are long. The engine expects no reply to
be longer than a sixteenth of the pool, and those of a wave have a twelfth of it. So it admits most of a wave, and the pool is too small for
what it admitted: some are preempted, however fast the device is. The number of pages follows from the lengths of the clients' prompts and
replies, and from the longest context of the model.

It is a violation, and the exit code is 1, if

1. a greedy reply differs from the reply to the same request alone, except where two tokens are as good as tied: kernels of a GPU round
   otherwise in another batch;
2. the texts of a stream are not the text of its output;
3. a step takes longer than `--max-step-ms` and the share of its prompt tokens, which is measured at the start;
4. the memory of the host or of the device grows after the first quarter of the time, in which graphs of callers' functions are recorded;
5. the memory of the host grows by more than 1 MiB per minute in the second half of the time (least squares), or by 4 MiB in that half if
   this is more, because a buffer that is first needed there is no leak; runs of less than two minutes are too short for this;
6. nothing was preempted in a minute or more;
7. pages, chunks or sessions are left at the end.

Of the ten longest steps it tells what the thread did in them (`benchmarks/step_watch.py`): whether the engine took the time, or the device,
or whether the thread had no processor.

The benchmark keeps its own records in arrays of fixed size, so that it does not grow itself.
"""

import argparse
import ctypes
import gc
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

import nanovllm as nv
from benchmarks.step_watch import COUNTERS, Longest, Watch, device_waits
from nanovllm.entrypoints.arguments import positive
from nanovllm.entrypoints.cli.bench.environment import record
from nanovllm.entrypoints.cli.bench.model_shapes import SHAPES, random_weights
from nanovllm.entrypoints.cli.bench.workloads import random_tokens
from nanovllm.entrypoints.display.tables import aligned
from nanovllm.entrypoints.process import freeze
from nanovllm.state.kv_cache import pages_for

REPLY = 48  # tokens
PROMPT = (8, 300)  # tokens, least and most
LONGEST = 3072  # tokens of a long prompt with its reply, unless the model's contexts are shorter
PAGE = 16  # tokens
BIAS = 3.0
EARLY = 0.2  # the part of clients that leave before the end
ROWS = 64  # clients at once
HOLDERS = 6  # clients at once that hold chunks or sessions, which no other client can push out
WAVE = 16  # clients of a wave
WAVE_REPLY = 12  # the tokens of the pool, divided by this, are the reply of a client of a wave
WAVE_EVERY = 200  # clients from one wave to the next
PREEMPTING = 1.0  # minutes from which on a run without preemption is a violation
ROOM = 64 << 20  # bytes that memory may grow by
SLOPE = 1 << 20  # bytes per minute that the host's memory may grow by in the second half of the time
JUMP = 4 << 20  # bytes by which it may grow there whatever the time
SLOPED = 2.0  # minutes from which on this is checked
TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of the GNU C library
TIE = {"cpu": 1e-3, "cuda": 0.15}  # natural logarithms; less between two tokens, and either may be drawn
UNCOUNTED = (0.0,) * len(COUNTERS)
GREEDY = nv.SamplingParams(temperature=0.0, max_tokens=REPLY, ignore_eos=True)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A request and its reply alone, if it is greedy.

    Attributes:
        prompt: The prompt's token ids.
        params: The options.
        process_logits: That function.
        want: The reply's tokens; None if it is sampled.
        tops: The most probable tokens at each place of the reply, with their log-probabilities after biases and functions of the logits,
            and before penalties.
    """

    prompt: list[int]
    params: nv.SamplingParams
    process_logits: Callable[[torch.Tensor], torch.Tensor] | None = None
    want: list[int] | None = None
    tops: list[dict[int, float]] = field(default_factory=list)

    def margin(self, at: int, token: int) -> float:
        """By how much the reply's token at `at` is more probable than another, after all options.

        A token that is not among `tops` counts as the least probable one of them: it is at most as probable before penalties.
        """
        assert self.want is not None
        before, params = Counter(self.want[:at]), self.params
        least = min(self.tops[at].values())

        def score(token: int) -> float:
            penalty = params.frequency_penalty * before[token] + params.presence_penalty * (token in before)
            return self.tops[at].get(token, least) - penalty

        return score(self.want[at]) - score(token)


class Steps:
    """The times of steps, in a fixed number of bytes.

    Attributes:
        per_token: Seconds that a prompt token may take.
        limit: Seconds that a step may take beside its prompt tokens.
        count: The number of steps.
        seconds: Their time together.
        num_slow: How many took longer than the limit.
        slowest: The seconds and prompt tokens of the longest of these.
        excess: The most seconds that a step took beside its prompt tokens.
        bins: How many steps took how long. Each bin is 1% longer than the one before it.
        longest: The longest steps, and what the thread did in them.
        begin: When the first step may start, in seconds of `time.perf_counter`.
    """

    FIRST, RATIO = 1e-6, 1.01

    def __init__(self, per_token: float, limit: float):
        self.per_token, self.limit = per_token, limit
        self.count, self.seconds, self.num_slow, self.slowest, self.excess = 0, 0.0, 0, (0.0, 0), 0.0
        self.bins = np.zeros(2048, np.int64)  # up to twelve minutes
        self.longest, self.begin = Longest(), time.perf_counter()

    def add(
        self, seconds: float, tokens: int, rows: int = 0, start: float = 0.0, before: Sequence[float] = UNCOUNTED,
        after: Sequence[float] = UNCOUNTED,
    ) -> None:  # fmt: skip
        """Add a step with so many prompt tokens and rows that decode, its start, and the counters of `Watch` before and after it."""
        self.count += 1
        self.seconds += seconds
        at = int(math.log(max(seconds, self.FIRST) / self.FIRST) / math.log(self.RATIO))
        self.bins[min(at, len(self.bins) - 1)] += 1
        over = seconds - self.per_token * tokens
        self.excess = max(self.excess, over)
        if over > self.longest.least:
            did = [late - early for early, late in zip(before, after, strict=True)]
            self.longest.add((over, start - self.begin, seconds, tokens, rows), did)
        if over > self.limit:
            self.num_slow += 1
            self.slowest = max(self.slowest, (seconds, tokens))

    def percentile(self, part: float) -> float:
        """The seconds that so many percent of the steps take at most, within half a percent."""
        at = int(np.searchsorted(np.cumsum(self.bins), max(1.0, part / 100 * self.count)))
        return self.FIRST * self.RATIO ** (at + 0.5) if self.count else 0.0


class Timed(nv.LLM):
    """An `LLM` that measures its steps. A read of a stream may run many, if its request waits."""

    steps, watch = Steps(0.0, math.inf), Watch()

    def _step(self) -> set[int]:
        before, counters, start = self.state.stats, self.watch.now(), time.perf_counter()
        ended = super()._step()
        seconds, after = time.perf_counter() - start, self.state.stats
        tokens, rows = after.prefill_tokens - before.prefill_tokens, after.decode_tokens - before.decode_tokens
        if tokens or rows:
            self.steps.add(seconds, tokens, rows, start, counters, self.watch.now())
        return ended


class Memory:
    """Samples of the memory in use, in a fixed number of bytes: once it is full, the newest sample replaces the one before it."""

    def __init__(self, names: Sequence[str], most: int = 512):
        self.names, self.rows, self.count = ("seconds", *names), np.zeros((most, 1 + len(names))), 0

    def add(self, sample: Sequence[float]) -> None:
        """Add a sample: the seconds since the start of the run, and the bytes of each name."""
        self.count = min(self.count + 1, len(self.rows))
        self.rows[self.count - 1] = sample

    def column(self, name: str) -> np.ndarray:
        """The values of one name."""
        return self.rows[: self.count, self.names.index(name)]

    def slope(self, name: str, begin: float, end: float) -> float:
        """Bytes per minute by which the memory grows between two times in seconds, by least squares."""
        seconds, values = self.column("seconds"), self.column(name)
        inside = (begin <= seconds) & (seconds <= end)
        if inside.sum() < 3:
            return 0.0
        minutes, values = seconds[inside] / 60, values[inside]
        return float(np.polyfit(minutes - minutes.mean(), values - values.mean(), 1)[0])

    def told(self) -> list[dict[str, float]]:
        """The samples for a JSON file."""
        rows = self.rows[: self.count].tolist()
        return [dict(zip(self.names, (round(seconds, 1), *map(int, sizes)), strict=True)) for seconds, *sizes in rows]


class Soak:
    """An engine, its clients, and what was seen of them."""

    def __init__(self, model: nv.Model, options: argparse.Namespace):
        self.options, self.random, self.device = options, Random(options.seed), model.device
        self.most = min(model.config.max_position_embeddings, LONGEST)  # tokens of a prompt and its reply
        self.num_pages = options.num_pages or self.few_pages()
        self.llm = Timed(model, num_pages=self.num_pages, page_size=PAGE, max_num_seqs=ROWS)
        self.counts = {kind: Counter[str]() for kind in KINDS}
        self.memory = Memory(("host", *(("allocated", "reserved", "device") if self.device.type == "cuda" else ())))
        self.wrong: list[str] = []
        self.process = self.adding(self.biases())
        single = nv.LLM(model, num_pages=pages_for(self.most, PAGE) + 2, page_size=PAGE, max_num_seqs=1)
        self.cases = {kind: [self.alone(kind, single) for _ in range(options.cases)] for kind in KINDS}

    def few_pages(self) -> int:
        """Pages for the chunks and sessions that nobody can push out, and for two long prompts beside them."""
        held = pages_for(min(PROMPT[1], self.most // 2) + REPLY, PAGE) + 3  # a few are copied, and a second row of a session has its own
        return HOLDERS * held + 2 * pages_for(self.most, PAGE)

    def biases(self) -> dict[int, float]:
        """What to add to the logits of some tokens."""
        return {token: self.random.choice((-BIAS, BIAS)) for token in random_tokens(self.random, 200, self.llm.model.config.vocab_size)}

    def adding(self, biases: dict[int, float]) -> Callable[[torch.Tensor], torch.Tensor]:
        """A function that adds biases to the logits. Requests share one, because each function has CUDA graphs of its own."""
        added = torch.zeros(self.llm.model.config.vocab_size, device=self.device)
        added[list(biases)] = torch.tensor(list(biases.values()), device=self.device)
        return lambda logits: logits + added

    def alone(self, kind: str, llm: nv.LLM) -> Case:
        """Draw a case of a kind, and run its request alone in an engine that serves one request at a time."""
        vocabulary, most = self.llm.model.config.vocab_size, min(PROMPT[1], self.most // 2)
        length = self.most - REPLY - 1 if kind == "long" else self.random.randint(min(PROMPT[0], most), most)
        case = Case(prompt=random_tokens(self.random, length, vocabulary), params=replace(GREEDY, **OPTIONS.get(kind, {})))
        if kind == "wave":
            reply = min(self.num_pages * PAGE // WAVE_REPLY, self.most // 2 - 1)
            case = replace(case, params=replace(case.params, max_tokens=reply))
        if kind == "sampled":
            return replace(case, params=replace(case.params, seed=self.random.randrange(2**31)))
        asked, process = replace(case.params, logprobs=20), None
        if kind == "bias":  # alone the biases are a function of the logits, because log-probabilities are those before `logit_bias`
            biases = self.biases()
            case, process = replace(case, params=replace(case.params, logit_bias=biases)), self.adding(biases)
        if kind == "processed":
            case = replace(case, process_logits=self.process)
            process = self.process
        if kind == "stop":
            text = llm.generate([case.prompt], case.params)[0].text
            case = replace(case, params=replace(case.params, stop=(text[len(text) // 2 :][:3] or ".", "\n\n\n")))
            asked = replace(case.params, logprobs=20)
        (out,) = llm.generate([case.prompt], asked, process_logits=process)
        assert out.logprobs is not None
        return replace(case, want=out.token_ids, tops=[dict(each.top) for each in out.logprobs])

    # Clients: generators that yield after each read. One that is closed early lets everything go.

    def stream(self, kind: str, case: Case, chunk: nv.Chunk | None = None) -> Iterator[None]:
        """Read a reply piece by piece; with a chunk, the prompt's tokens after it follow it."""
        prompt = case.prompt if chunk is None else [chunk, case.prompt[len(chunk) :]]
        with closing(self.llm.stream(prompt, case.params, process_logits=case.process_logits)) as pieces:
            text, output = "", None
            while output is None:
                piece = next(pieces)
                text, output = text + piece.text, piece.output
                yield
        if text != output.text:
            self.wrong.append(f"{kind}: a stream's texts are {text!r}, its output's is {output.text!r}")
        self.compare(kind, case, output.token_ids)

    def talk(self, kind: str, case: Case) -> Iterator[None]:
        """Keep the beginning of a conversation as a chunk, and go on from it twice."""
        chunks = list[nv.Chunk]()
        try:
            chunks.append(self.prefill(case.prompt[: len(case.prompt) // 2]))
            yield from self.stream(kind, case, chunks[0])
            chunks.append(self.prefill([*case.prompt[len(chunks[0]) :], *(case.want or ())], after=chunks[0]))
            yield
            more = Case(prompt=[*chunks[1].token_ids.tolist(), *case.prompt[:4]], params=replace(case.params, max_tokens=8))
            yield from self.stream(kind, more, chunks[1])
        finally:
            self.release(chunks)

    def fork(self, kind: str, case: Case) -> Iterator[None]:
        """Read the same reply from a chunk, from its fork, and from a longer chunk that was cut, at the same time."""
        chunks = list[nv.Chunk]()
        clients: list[Any] = []
        try:
            chunks.append(self.prefill(case.prompt[:-3]))
            self.llm.state, twin = nv.fork(self.llm.state, chunks[0])
            chunks.append(twin)
            self.llm.state, cut = nv.truncate(self.llm.state, twin, max(1, len(twin) // 2))
            chunks.append(cut)
            clients += [self.stream(kind, case, chunk) for chunk in chunks]
            while clients:
                clients = [client for client in clients if next(client, self) is not self]
                yield
        finally:
            for client in clients:
                client.close()
            self.release(chunks)

    def session(self, kind: str, case: Case) -> Iterator[None]:
        """Run decode steps of two rows by hand, and commit them."""
        assert case.want is not None
        model, contexts = self.llm.model, [case.prompt, case.prompt[:5]]
        self.llm.state, carry = nv.begin(model, self.llm.state, contexts, case.params, room=len(case.want))
        try:
            for _ in case.want:
                carry, _ = nv.decode_step(model.params, carry, model.config)
                yield
        except GeneratorExit:
            self.llm.state = nv.abandon(self.llm.state, carry)
            raise
        self.llm.state, made = nv.commit(model, self.llm.state, carry)
        self.release([generation.chunk for generation in made])
        self.compare(kind, case, made[0].token_ids)

    def prefill(self, tokens: list[int], after: nv.Chunk | None = None) -> nv.Chunk:
        """Make a chunk."""
        self.llm.state, chunk = nv.prefill(self.llm.model, self.llm.state, tokens, after)
        return chunk

    def release(self, chunks: list[nv.Chunk]) -> None:
        """Release chunks."""
        for chunk in chunks:
            self.llm.state = nv.release(self.llm.state, chunk)

    def compare(self, kind: str, case: Case, got: list[int]) -> None:
        """Compare a reply with that of the request alone."""
        if case.want is None:
            return
        at = next((i for i, (a, b) in enumerate(zip(got, case.want, strict=False)) if a != b), None)
        if got == case.want:
            self.counts[kind]["equal"] += 1
        elif at is not None and (margin := case.margin(at, got[at])) < TIE[self.device.type]:
            self.counts[kind]["near ties"] += 1
        else:
            self.counts[kind]["different"] += 1
            lead = "" if at is None else f", {margin:.3f} less probable"
            self.wrong.append(f"{kind}: a prompt of {len(case.prompt)} tokens got {got} and alone {case.want}{lead}")

    # The run

    def start(self, kind: str) -> Iterator[None]:
        """Start a client of a kind."""
        self.counts[kind]["started"] += 1
        return KINDS[kind](self, kind, self.random.choice(self.cases[kind]))

    def warm_up(self) -> None:
        """Run each kind once alone, and as many prompt tokens at once as the pool holds. Measure what a prompt token costs in a step.

        The step of many prompts needs more of the device's memory than all others. It would come by chance after some minutes.
        """
        for kind in KINDS:
            for _ in self.start(kind):
                pass
        vocabulary, count = self.llm.model.config.vocab_size, max(1, self.num_pages * PAGE // self.most - 1)
        self.llm.generate([random_tokens(self.random, self.most - 2, vocabulary) for _ in range(count)], replace(GREEDY, max_tokens=1))
        times = []
        for length in (self.most // 4, self.most // 2, self.most - 2) * 2:
            self.llm.steps = Steps(0.0, math.inf)
            case = Case(prompt=random_tokens(self.random, length, vocabulary), params=replace(GREEDY, max_tokens=1))
            for _ in self.stream("plain", case):
                pass
            times.append(self.llm.steps.seconds / length)
        per_token = 2 * max(times[3:])  # beside other rows, and over longer contexts
        self.llm.steps = Steps(per_token, self.options.max_step_ms / 1e3)

    def run(self) -> None:
        """Serve clients until the time is over, and let the last ones end."""
        begin = now = time.monotonic()
        self.llm.steps.begin = time.perf_counter()
        end, arrival, sample, arrivals = begin + 60 * self.options.minutes, begin, begin, 0
        clients: dict[Iterator[None], tuple[str, float]] = {}  # their kinds, and after how many reads they leave
        while clients or now < end:
            now = time.monotonic()
            while now < end and arrival <= now:
                arrival += self.random.expovariate(self.options.rate)
                if arrivals % WAVE_EVERY == 0 and "wave" in KINDS:
                    self.begin_wave(clients)
                arrivals += 1
                kind = self.random.choice([kind for kind in KINDS if kind != "wave"])
                crowded = kind in HOLDING and sum(each in HOLDING for each, _ in clients.values()) >= HOLDERS
                if len(clients) < ROWS and not crowded:
                    reads = self.random.randint(1, REPLY) if self.random.random() < EARLY else np.inf
                    clients[self.start(kind)] = kind, reads
            for client, (kind, reads) in list(clients.items()):
                how = self.read_client(client, reads)
                if how is None:
                    clients[client] = kind, reads - 1
                else:
                    del clients[client]
                    self.counts[kind][how] += 1
            if now >= sample:
                sample += max(0.02, 0.6 * self.options.minutes)
                self.memory.add(self.measure(now - begin))
            if not clients:
                time.sleep(min(0.001, max(0.0, arrival - now)))
        self.memory.add(self.measure(now - begin))

    def begin_wave(self, clients: dict[Iterator[None], tuple[str, float]]) -> None:
        """Start a wave of clients with long replies, of which a part leaves early. If the last wave still goes on, do nothing."""
        if any(kind == "wave" for kind, _ in clients.values()):
            return
        for _ in range(WAVE):
            reads = self.random.randint(1, self.cases["wave"][0].params.max_tokens) if self.random.random() < EARLY else np.inf
            clients[self.start("wave")] = "wave", reads

    def read_client(self, client: Any, reads: float) -> str | None:
        """Read once from a client, or close it. Returns what ended it, or None."""
        if not reads:
            client.close()
            return "left"
        try:
            return "ended" if next(client, self) is self else None
        except nv.OutOfPagesError:
            return "refused"

    def measure(self, seconds: float) -> list[float]:
        """A sample of `Memory`: the time, and the bytes that the process and its device have in use.

        The process gives back first what it does not use, because a leak would grow into that unseen.
        """
        gc.collect()
        if TRIM is not None:
            TRIM(0)
        held = [seconds, int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")]
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            held += [torch.cuda.memory_allocated(self.device), torch.cuda.memory_reserved(self.device), total - free]
        return held

    def report(self) -> dict[str, Any]:
        """The figures, with the violations among them."""
        state, steps, minutes = self.llm.state, self.llm.steps, self.options.minutes
        nv.check(state)
        left = {"pages": state.config.num_pages - state.pool.num_available, "chunks": len(state.chunks), "sessions": len(state.sessions)}
        wrong = [*self.wrong, *(f"{count} {what} are left at the end" for what, count in left.items() if count)]
        if steps.num_slow:
            seconds, tokens = steps.slowest
            wrong.append(f"{steps.num_slow} steps were too long; the longest, of {tokens} prompt tokens, took {1e3 * seconds:.1f} ms")
        grown = {}
        early = max(1, int((self.memory.column("seconds") <= 15 * minutes).sum()))
        for name in self.memory.names[1:]:
            values = self.memory.column(name)
            grown[name] = int(values.max() - values[:early].max())
        wrong += [f"{name} memory grew by {size / 2**20:.1f} MiB" for name, size in sorted(grown.items()) if size > ROOM]
        slope = self.memory.slope("host", 30 * minutes, 60 * minutes)
        if minutes >= SLOPED and slope > max(SLOPE, JUMP / (minutes / 2)):
            wrong.append(f"host memory grew by {slope / 2**20:.2f} MiB per minute in the second half")
        stats = {name: getattr(state.stats, name) for name in state.stats.__dataclass_fields__}
        if minutes >= PREEMPTING and "wave" in KINDS and not state.stats.preemptions:
            wrong.append(f"nothing was preempted in {self.num_pages} pages")
        return {
            "clients": {kind: dict(counts) for kind, counts in self.counts.items()},
            "num_pages": self.num_pages,
            "steps": {"count": steps.count, "p50_ms": round(1e3 * steps.percentile(50), 2), "p99_ms": round(1e3 * steps.percentile(99), 2)}
            | {"worst_ms_beyond_prompts": round(1e3 * steps.excess, 2), "prompt_token_us": round(1e6 * steps.per_token, 2)},
            "longest_steps": steps.longest.told(),
            "preemptions_per_100_clients": round(100 * state.stats.preemptions / max(1, self.num_clients()), 2),
            "memory_grown": grown,
            "host_mib_per_minute": round(slope / 2**20, 3),
            "memory": self.memory.told(),
            "stats": stats,
            "violations": wrong,
        }

    def num_clients(self) -> int:
        """How many clients have started."""
        return sum(counts["started"] for counts in self.counts.values())


OPTIONS: dict[str, dict[str, Any]] = {
    "sampled": {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
    "logprobs": {"logprobs": 5},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.3},
}
STREAMED = ("plain", "sampled", "stop", "logprobs", "bias", "penalties", "processed", "long")
KINDS: dict[str, Callable[[Soak, str, Case], Iterator[None]]] = {
    **dict.fromkeys((*STREAMED, "wave"), Soak.stream), "chat": Soak.talk, "fork": Soak.fork, "session": Soak.session,
}  # fmt: skip
HOLDING = ("chat", "fork", "session")


def table(figures: dict[str, Any]) -> str:
    """The figures for a terminal."""
    columns = ("started", "ended", "left", "refused", "equal", "near ties", "different")
    rows = [(kind, *(f"{counts.get(name, 0):,}" for name in columns)) for kind, counts in figures["clients"].items()]
    steps = ", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in figures["steps"].items())
    grown = ", ".join(f"{name} {size / 2**20:+.1f} MiB" for name, size in sorted(figures["memory_grown"].items()))
    grown += f"; host {figures['host_mib_per_minute']:+.2f} MiB per minute in the second half"
    stats = ", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in figures["stats"].items())
    stats += f"; {figures['preemptions_per_100_clients']:.1f} preemptions for 100 clients, in {figures['num_pages']:,} pages"
    lines = [*aligned(("clients", *columns), rows, left=(0,)), "", f"steps: {steps}", f"memory grown: {grown}", f"engine: {stats}"]
    lines += ["", *_longest(figures["longest_steps"]), ""]
    return "\n".join([*lines, f"violations: {len(figures['violations'])}", *(f"  {each}" for each in figures["violations"][:20])])


def _longest(steps: list[dict[str, Any]]) -> list[str]:
    """The longest steps, one line each."""
    names = ("second", "ms", "prompt_tokens", "decode_rows", "mostly", "processor_ms", "device_wait_ms", "collection_ms")
    names += ("voluntary_switches", "involuntary_switches", "major_faults")
    rows = [[f"{step[name]:,}" if name != "mostly" else step[name] for name in names] for step in steps]
    head = [name.replace("_", " ") for name in names]
    return ["the longest steps beside the share of their prompts:", *aligned(head, rows, left=(names.index("mostly"),))]


def find_model(name: str, device: str | None) -> nv.Model:
    """The model of this name, or random weights of its shapes with the packaged model's tokenizer."""
    if name not in SHAPES:
        return nv.load_model(name, device)
    return replace(random_weights(name, device=device), tokenizer=nv.load_model("tiny", "cpu").tokenizer)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", help=f"tiny, a folder, or random weights of a shape: {', '.join(SHAPES)}")
    parser.add_argument("--device", help="cpu or cuda (default: a GPU if torch sees one)")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long; from 2 on the slope of memory counts (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=20.0, help="clients that arrive each second, on average (default: %(default)s)")
    parser.add_argument("--cases", type=positive, default=8, help="different requests of each kind (default: %(default)s)")
    parser.add_argument("--num-pages", type=positive, help="pages of 16 tokens (default: so few that some requests are preempted)")
    parser.add_argument("--max-step-ms", type=float, default=100.0, help="the longest step, without its prompts (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and requests (default: 0)")
    parser.add_argument("--commit", help="commit to record (default: the commit that git reports)")
    parser.add_argument("--output", type=Path, help="write the results to this JSON file")
    options = parser.parse_args(argv)
    soak = Soak(find_model(options.model, options.device), options)
    with soak.llm.watch.installed(device_waits() if soak.device.type == "cuda" else ()):
        soak.warm_up()
        freeze()
        soak.run()
    command = f"python -m benchmarks.soak --model {options.model} --minutes {options.minutes:g} --rate {options.rate:g}"
    result = record(soak.llm.model, soak.report(), command, options.commit)
    print(table(result))
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n")
    return int(bool(result["violations"]))


if __name__ == "__main__":
    raise SystemExit(main())
