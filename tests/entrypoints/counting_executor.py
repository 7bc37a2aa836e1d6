"""An executor without a model: each token is the one before it plus one. So every reply is known from the last token of its prompt."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np

from nanovllm.executor.executor import Drawn, Executor
from nanovllm.models.model import Model
from nanovllm.state.kv_cache import KVState
from nanovllm.state.request import Sequence


def counted_reply(prompt: Seq[int], length: int, vocab_size: int) -> list[int]:
    """The reply of a `CountingExecutor` to a prompt."""
    return [(prompt[-1] + 1 + i) % vocab_size for i in range(length)]


@dataclass(slots=True)
class CountingExecutor(Executor):
    """Samples the token before plus one. The carry is the list of the newest tokens of the rows. It runs requests, not sessions or scores.

    Attributes:
        before: Called before each prefill and each decode step. What it raises, the step raises.
        num_steps: The number of decode steps so far.
    """

    before: Callable[[], None] = lambda: None
    num_steps: int = 0

    def prefill(self, model: Model, kv: KVState, rows: Seq[tuple[Sequence, int]], **_: Any) -> tuple[Drawn | None, KVState]:
        """Donates `kv`. Sample for each sequence that is complete."""
        self.before()
        whole = [sequence for sequence, count in rows if count == sequence.todo]
        return (self._drawn(model, self._last(whole)) if whole else None), kv

    def load(self, model: Model, kv: KVState, rows: Seq[Sequence], **_: Any) -> Any:
        """The newest token of each row."""
        return self._last(rows)

    def refresh(self, model: Model, carry: Any, rows: Seq[Sequence], **_: Any) -> Any:
        """Donates `carry`. The newest token of each row."""
        return self._last(rows)

    def narrow(self, model: Model, carry: Any, keep: Seq[int], rows: Seq[Sequence], **_: Any) -> Any:
        """Donates `carry`. The newest tokens of the rows that go on."""
        return [carry[row] for row in keep]

    def decode(self, model: Model, carry: Any, masks: Any = None) -> tuple[Any, Drawn]:
        """Donates `carry`. Sample a token of every row."""
        self.before()
        self.num_steps += 1
        drawn = self._drawn(model, carry)
        return drawn.token_ids.tolist(), drawn

    def take_discarded_count(self) -> int:
        """No token is discarded."""
        return 0

    def score(self, *_: Any, **__: Any) -> Any:
        """Not done here."""
        raise NotImplementedError

    def begin(self, *_: Any, **__: Any) -> Any:
        """Not done here."""
        raise NotImplementedError

    def end(self, ticket: int) -> None:
        """Not done here."""
        raise NotImplementedError

    def captured(self, function: Any, carry: Any, *inputs: Any) -> Any:
        """Not done here."""
        raise NotImplementedError

    @staticmethod
    def _last(rows: Seq[Sequence]) -> list[int]:
        return [int(sequence.tokens.array()[-1]) for sequence in rows]

    @staticmethod
    def _drawn(model: Model, last: list[int]) -> Drawn:
        return Drawn(token_ids=(np.array(last, np.int32) + 1) % model.config.vocab_size)
