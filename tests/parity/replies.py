"""Compare greedy replies of the engine with transformers: batched, alone, in pieces, over shared pages, with and without the fast path.

Each reply is compared with transformers' logits along the reply's own tokens. So a tie that is decided differently does not end the
comparison.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from nanovllm.entrypoints.llm import LLM
from nanovllm.sampling.params import SamplingParams
from nanovllm.state.request import RequestOutput
from tests.parity.pair import Pair

PAGE_SIZE, NUM_PAGES, TOKENS = 4, 200, 64
PREFIX, SUFFIXES = 23, (3, 14, 1)  # number of tokens that the prompts share, and number of each prompt's own tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Replies:
    """Counts of greedy tokens, and the largest error of their log-probabilities.

    Attributes:
        drawn: Number of sampled tokens.
        clear: Tokens for which transformers' two largest logits differ by more than both models may err.
        agreed: Clear tokens that are also transformers' choice.
        logprob_error: Largest error of the sampled tokens' log-probabilities. It may be twice the bound on logits.
    """

    drawn: int = 0
    clear: int = 0
    agreed: int = 0
    logprob_error: float = 0.0

    def __add__(self, other: "Replies") -> "Replies":
        worst = max(self.logprob_error, other.logprob_error)
        return Replies(
            drawn=self.drawn + other.drawn, clear=self.clear + other.clear, agreed=self.agreed + other.agreed, logprob_error=worst
        )  # fmt: skip


def prompts_of(pair: Pair) -> list[list[int]]:
    """Return prompts that share their first tokens, and a prompt of a single token."""
    shared, *own = pair.draw(2, PREFIX, *SUFFIXES, 1)
    return [*(shared + ids for ids in own[:-1]), own[-1]]


def engine(pair: Pair, **options) -> LLM:
    """Return a small engine, whose steps are so short that prompts are prefilled in pieces."""
    return LLM(pair.ours, **{"num_pages": NUM_PAGES, "page_size": PAGE_SIZE, "max_num_batched_tokens": 16, **options})


def asked(llm: LLM, prompts: Sequence[Sequence[int]], count: int = TOKENS) -> list[RequestOutput]:
    """Generate greedy replies of `count` tokens with log-probabilities."""
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=0)
    return llm.generate([list(prompt) for prompt in prompts], params)


def batched(pair: Pair, count: int = TOKENS, **options) -> list[RequestOutput]:
    """Run all prompts at once."""
    return asked(engine(pair, **options), prompts_of(pair), count)


def alone(pair: Pair, count: int = TOKENS) -> list[RequestOutput]:
    """Run each prompt in one piece in an engine of its own, through the plain layers."""
    return [asked(engine(pair, compile=False, max_num_batched_tokens=256), [prompt], count)[0] for prompt in prompts_of(pair)]


def reused(pair: Pair, count: int = TOKENS) -> list[RequestOutput]:
    """Run one prompt after another in the same engine; later prompts reuse the shared prefix."""
    llm = engine(pair, compile=False)
    outputs = [asked(llm, [prompt], count)[0] for prompt in prompts_of(pair)]
    cached = [output.num_cached_tokens for output in outputs]
    if cached != [0, *[PREFIX // PAGE_SIZE * PAGE_SIZE] * (len(SUFFIXES) - 1), 0]:
        raise AssertionError(f"{cached} tokens were reused, of prefixes of {PREFIX}")
    return outputs


WAYS: dict[str, Callable[..., list[RequestOutput]]] = {
    "fast path": batched,
    "plain": partial(batched, compile=False),
    "alone": alone,
    "reused": reused,
    "cascade": partial(batched, cascade=True),
}


def judged(pair: Pair, outputs: Sequence[RequestOutput], bound: float) -> Replies:
    """Compare replies with transformers in float32; the logits of both may be off by `bound`."""
    total = Replies()
    for output in outputs:
        prompt, ids = output.prompt_token_ids.tolist(), torch.tensor(output.token_ids)
        theirs = pair.reference([prompt + output.token_ids])[0, len(prompt) - 1 : -1]
        best, second = theirs.topk(2).values.unbind(-1)
        clear, same = best - second > 2 * bound, theirs.argmax(-1) == ids
        wanted = theirs.log_softmax(-1).gather(1, ids[:, None])[:, 0]
        assert output.logprobs is not None
        error = (torch.tensor([entry.logprob for entry in output.logprobs]) - wanted).abs().max().item()
        total += Replies(drawn=len(ids), clear=int(clear.sum()), agreed=int((clear & same).sum()), logprob_error=error)
    return total


def replies(pair: Pair, bound: float) -> Replies:
    """Compare the replies of all `WAYS` and add their counts."""
    return sum((judged(pair, way(pair), bound) for way in WAYS.values()), Replies())
