"""Serve a mix of all kinds of clients for minutes: nothing may grow, no reply may change, no step may stall.

python benchmarks/soak.py --model qwen3-0.6b --minutes 10 --output soak.json
python benchmarks/soak.py --model tiny --device cpu --minutes 0.1

Clients arrive at random (Poisson), and a fifth of them leave before their reply has ended. One thread reads all of them in turn, so that
their requests run in the same steps. The kinds are those of `KINDS`: plain greedy replies, sampled ones, stop strings, log-probabilities,
biases, penalties, functions of the logits, long prompts, conversations over chunks, forks, and decode steps of the caller's own.

It is a violation, and the exit code is 1, if

1. a greedy reply differs from the reply to the same request alone, except where two tokens are as good as tied: kernels of a GPU round
   otherwise in another batch;
2. the texts of a stream are not the text of its output;
3. a step takes longer than `--max-step-ms` and the share of its prompt tokens, which is measured at the start;
4. the memory of the host or of the device grows after the first fifth of the time;
5. pages, chunks or sessions are left at the end.
"""

import argparse
import json
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
from nanovllm.entrypoints.arguments import positive
from nanovllm.entrypoints.cli.bench.environment import record
from nanovllm.entrypoints.cli.bench.model_shapes import SHAPES, random_weights
from nanovllm.entrypoints.cli.bench.workloads import random_tokens
from nanovllm.entrypoints.display.tables import aligned
from nanovllm.entrypoints.process import freeze

REPLY = 48  # tokens
PROMPT = (8, 300)  # tokens, least and most
BIAS = 3.0
EARLY = 0.2  # the part of clients that leave before the end
ROWS = 64  # clients at once
HOLDERS = 6  # clients at once that hold chunks or sessions, which no other client can push out
ROOM = 64 << 20  # bytes that memory may grow by
TIE = {"cpu": 1e-3, "cuda": 0.15}  # natural logarithms; less between two tokens, and either may be drawn
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


class Soak:
    """An engine, its clients, and what was seen of them."""

    def __init__(self, model: nv.Model, options: argparse.Namespace):
        self.options, self.random, self.device = options, Random(options.seed), model.device
        self.llm = nv.LLM(model, num_pages=options.num_pages, max_num_seqs=ROWS)
        self.most = min(self.llm.state.config.max_model_len, options.num_pages * 4)  # tokens of a prompt and its reply
        self.counts = {kind: Counter[str]() for kind in KINDS}
        self.steps: list[tuple[float, int]] = []  # seconds and prompt tokens of each
        self.memory: list[dict[str, int]] = []
        self.wrong: list[str] = []
        self.per_token = 0.0
        self.process = self.adding(self.biases())
        single = nv.LLM(model, num_pages=self.most // 16 + 2, max_num_seqs=1)
        self.cases = {kind: [self.alone(kind, single) for _ in range(options.cases)] for kind in KINDS}

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
                piece = self.read(pieces)
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

    def read(self, pieces: Iterator[nv.Piece]) -> nv.Piece:
        """The next piece. If the engine ran a step for it, keep the step's time and its prompt tokens."""
        before, start = self.llm.state, time.perf_counter()
        piece = next(pieces)
        seconds, after = time.perf_counter() - start, self.llm.state.stats
        tokens = after.prefill_tokens - before.stats.prefill_tokens
        if tokens or after.decode_tokens > before.stats.decode_tokens:
            self.steps.append((seconds, tokens))
        return piece

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
        """Run each kind once alone, and measure what a prompt token costs in a step."""
        for kind in KINDS:
            for _ in self.start(kind):
                pass
        times = []
        for length in (self.most // 4, self.most // 2, self.most - 2) * 2:
            self.steps.clear()
            case = Case(prompt=random_tokens(self.random, length, self.llm.model.config.vocab_size), params=replace(GREEDY, max_tokens=1))
            for _ in self.stream("plain", case):
                pass
            times.append(sum(seconds for seconds, _ in self.steps) / length)
        self.per_token = 2 * max(times[3:])  # beside other rows, and over longer contexts
        self.steps.clear()

    def run(self) -> None:
        """Serve clients until the time is over, and let the last ones end."""
        begin = now = time.monotonic()
        end, arrival, sample = begin + 60 * self.options.minutes, begin, begin
        clients: dict[Iterator[None], tuple[str, float]] = {}  # their kinds, and after how many reads they leave
        while clients or now < end:
            now = time.monotonic()
            while now < end and arrival <= now:
                arrival += self.random.expovariate(self.options.rate)
                kind = self.random.choice(list(KINDS))
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
                sample += max(1.0, 0.6 * self.options.minutes)
                self.memory.append(self.measure(now - begin))
            if not clients:
                time.sleep(min(0.001, max(0.0, arrival - now)))
        self.memory.append(self.measure(now - begin))

    def read_client(self, client: Any, reads: float) -> str | None:
        """Read once from a client, or close it. Returns what ended it, or None."""
        if not reads:
            client.close()
            return "left"
        try:
            return "ended" if next(client, self) is self else None
        except nv.OutOfPagesError:
            return "refused"

    def measure(self, seconds: float) -> dict[str, int]:
        """The bytes that the process and its device have in use."""
        held = {"seconds": round(seconds), "host": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")}
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            held |= {"allocated": torch.cuda.memory_allocated(self.device), "reserved": torch.cuda.memory_reserved(self.device)}
            held |= {"device": total - free}
        return held

    def report(self) -> dict[str, Any]:
        """The figures, with the violations among them."""
        state, limit = self.llm.state, self.options.max_step_ms / 1e3
        nv.check(state)
        left = {"pages": state.config.num_pages - state.pool.num_available, "chunks": len(state.chunks), "sessions": len(state.sessions)}
        wrong = [*self.wrong, *(f"{count} {what} are left at the end" for what, count in left.items() if count)]
        excess = [seconds - self.per_token * tokens for seconds, tokens in self.steps] or [0.0]
        slow = [step for step, over in zip(self.steps, excess, strict=False) if over > limit]
        if slow:
            seconds, tokens = max(slow)
            wrong.append(f"{len(slow)} steps were too long; the longest, of {tokens} prompt tokens, took {1e3 * seconds:.1f} ms")
        grown = {}
        early = [each for each in self.memory if each["seconds"] <= 12 * self.options.minutes] or self.memory[:1]
        for name in self.memory[0].keys() - {"seconds"}:
            grown[name] = max(each[name] for each in self.memory) - max(each[name] for each in early)
        wrong += [f"{name} memory grew by {size / 2**20:.1f} MiB" for name, size in sorted(grown.items()) if size > ROOM]
        p50, p99 = np.percentile([seconds for seconds, _ in self.steps] or [0.0], (50, 99))
        stats = {name: getattr(state.stats, name) for name in state.stats.__dataclass_fields__}
        return {
            "clients": {kind: dict(counts) for kind, counts in self.counts.items()},
            "steps": {"count": len(self.steps), "p50_ms": round(1e3 * p50, 2), "p99_ms": round(1e3 * p99, 2)}
            | {"worst_ms_beyond_prompts": round(1e3 * max(excess), 2), "prompt_token_us": round(1e6 * self.per_token, 2)},
            "memory_grown": grown,
            "memory": self.memory,
            "stats": stats,
            "violations": wrong,
        }


OPTIONS: dict[str, dict[str, Any]] = {
    "sampled": {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
    "logprobs": {"logprobs": 5},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.3},
}
STREAMED = ("plain", "sampled", "stop", "logprobs", "bias", "penalties", "processed", "long")
KINDS: dict[str, Callable[[Soak, str, Case], Iterator[None]]] = {
    **dict.fromkeys(STREAMED, Soak.stream), "chat": Soak.talk, "fork": Soak.fork, "session": Soak.session,
}  # fmt: skip
HOLDING = ("chat", "fork", "session")


def table(figures: dict[str, Any]) -> str:
    """The figures for a terminal."""
    columns = ("started", "ended", "left", "refused", "equal", "near ties", "different")
    rows = [(kind, *(f"{counts.get(name, 0):,}" for name in columns)) for kind, counts in figures["clients"].items()]
    steps = ", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in figures["steps"].items())
    grown = ", ".join(f"{name} {size / 2**20:+.1f} MiB" for name, size in sorted(figures["memory_grown"].items()))
    stats = ", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in figures["stats"].items())
    lines = [*aligned(("clients", *columns), rows, left=(0,)), "", f"steps: {steps}", f"memory grown: {grown}", f"engine: {stats}"]
    return "\n".join([*lines, f"violations: {len(figures['violations'])}", *(f"  {each}" for each in figures["violations"][:20])])


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
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=20.0, help="clients that arrive each second, on average (default: %(default)s)")
    parser.add_argument("--cases", type=positive, default=8, help="different requests of each kind (default: %(default)s)")
    parser.add_argument("--num-pages", type=positive, default=768, help="pages of 16 tokens, so few that some are preempted (default: 768)")
    parser.add_argument("--max-step-ms", type=float, default=100.0, help="the longest step, without its prompts (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and requests (default: 0)")
    parser.add_argument("--commit", help="commit to record (default: the commit that git reports)")
    parser.add_argument("--output", type=Path, help="write the results to this JSON file")
    options = parser.parse_args(argv)
    soak = Soak(find_model(options.model, options.device), options)
    soak.warm_up()
    freeze()
    soak.run()
    command = f"python benchmarks/soak.py --model {options.model} --minutes {options.minutes:g} --rate {options.rate:g}"
    result = record(soak.llm.model, soak.report(), command, options.commit)
    print(table(result))
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n")
    return int(bool(result["violations"]))


if __name__ == "__main__":
    raise SystemExit(main())
