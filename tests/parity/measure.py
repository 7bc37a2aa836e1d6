"""All measures of one case, and the names of those that are out of bounds."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.parity.cases import CASES
from tests.parity.chunks import ChunkErrors, chunk_errors
from tests.parity.logits import Float32Error, Ratio, bfloat16_ratios, decode_path, float32_error
from tests.parity.pair import Pair, build
from tests.parity.replies import Replies, replies


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """One case compared with transformers. `prompts` and `decode` are error ratios in bfloat16; `path` is the CPU's decode path."""

    name: str
    float32: Float32Error
    replies: Replies
    prompts: Ratio
    decode: Ratio
    chunks: ChunkErrors
    path: str

    @property
    def failures(self) -> tuple[str, ...]:
        """The names of the measures that are out of bounds."""
        bound, learned = self.float32.bound, CASES[self.name].kind == "gpt2"
        within = {
            "logits": self.float32.ours <= bound,
            "greedy tokens": self.replies.agreed == self.replies.clear,
            "clear margins": self.replies.clear > self.replies.drawn / 2,
            "log-probabilities": self.replies.logprob_error <= 2 * bound,
            "bfloat16 prompts": self.prompts.no_larger,
            "bfloat16 decode": self.decode.no_larger,
            "chunks": self.chunks.exact <= bound and self.chunks.moved <= bound,
            "refusal": ("learned positions" in self.chunks.refused) == learned == bool(self.chunks.refused),
        }
        return tuple(name for name, holds in within.items() if not holds)


def settle() -> None:
    """Prepare a process for measuring: one thread, and no progress bars of transformers."""
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


@torch.no_grad()
def measure(name: str) -> Measures:
    """Measure a case of `CASES` in a temporary folder; this takes a few seconds on one core."""
    with tempfile.TemporaryDirectory() as folder:
        return measured(name, build(CASES[name], Path(folder)))


def measured(name: str, pair: Pair) -> Measures:
    """Measure a case whose models are built."""
    error = float32_error(pair)
    prompts, decode = bfloat16_ratios(pair)
    return Measures(
        name=name,
        float32=error,
        replies=replies(pair, error.bound),
        prompts=prompts,
        decode=decode,
        chunks=chunk_errors(pair),
        path=decode_path(pair.ours),
    )
