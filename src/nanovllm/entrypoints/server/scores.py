"""Log-probabilities as frames carry them: made from the library's values in an engine's process."""

from array import array
from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np

from nanovllm.chunks.score import score
from nanovllm.entrypoints.server.held import Held
from nanovllm.entrypoints.server.wire import Scored
from nanovllm.state.logprobs import RowScores, Score, TokenLogprobs

FOLLOWING = 5  # the least number of tokens among which the most probable one is looked for: more than these hardly tie


def of_step(scored: RowScores, count: int) -> Scored | None:
    """Those of the `count` tokens that a step gave to one request."""
    if scored is None:
        return None
    step, row, num_top = scored
    rows = slice(row, row + count)
    values = np.full(count, np.nan) if step.logprobs is None else step.logprobs[rows]
    if step.top_ids is None or step.top_logprobs is None:
        return Scored(_bytes(values, "<f4"))
    return Scored(_bytes(values, "<f4"), _bytes(step.top_ids[rows, :num_top], "<i4"), _bytes(step.top_logprobs[rows, :num_top], "<f4"))


def of_entries(entries: Seq[TokenLogprobs] | None) -> Scored | None:
    """Those of the tokens of a whole reply."""
    if entries is None:
        return None
    values, top = array("f", [entry.logprob for entry in entries]), [pair for entry in entries for pair in entry.top]
    return Scored(values.tobytes(), array("i", [token for token, _ in top]).tobytes(), array("f", [value for _, value in top]).tobytes())


def of_score(found: Score) -> Scored:
    """Those of the tokens of a continuation."""
    return Scored(_bytes(found.logprobs, "<f4"), _bytes(found.top_ids, "<i4"), _bytes(found.top_logprobs, "<f4"))


def score_prompts(held: Held, *, prompts: list[bytes], top: int, namespace: int) -> tuple[Held, list[Scored]]:
    """The log-probabilities of all tokens of prompts but their first, and the `top` most probable tokens in their places.

    Args:
        held: The engine.
        prompts: The int32 token ids of each prompt, at least two.
        top: How many.
        namespace: Whose indexed KV is shared.
    """
    ids = [np.frombuffer(prompt, np.int32) for prompt in prompts]
    state, found = score(held.model, held.state, [one[:1] for one in ids], [one[1:] for one in ids], top_logprobs=top, namespace=namespace)
    return replace(held, state=state), [of_score(each) for each in found]


def score_and_follow(held: Held, *, prompts: list[bytes], top: int, namespace: int) -> tuple[Held, list[tuple[Scored, int, Scored]]]:
    """As `score_prompts`, for prompts of at least one token, and for each the token that follows in a greedy reply, with its own.

    The prompts run once: the logits of their last tokens are there anyway. The token is -1 if all tokens that were looked at are equally
    probable, so that one that comes before them may be, too.
    """
    ids = [np.frombuffer(prompt, np.int32) for prompt in prompts]
    asked = [np.append(one[1:], np.int32(0)) for one in ids]  # what stands for the token that follows does not run
    state, found = score(held.model, held.state, [one[:1] for one in ids], asked, top_logprobs=max(top, FOLLOWING), namespace=namespace)
    return replace(held, state=state), [_divided(each, top) for each in found]


def _divided(found: Score, top: int) -> tuple[Scored, int, Scored]:
    """The scores of a prompt, and the most probable token after it: of equals the lowest, as a greedy reply takes it."""
    top_ids, values = found.top_ids[:, :top], found.top_logprobs[:, :top]
    best = found.top_ids[-1][found.top_logprobs[-1] == found.top_logprobs[-1, 0]]
    prompt = Scored(_bytes(found.logprobs[:-1], "<f4"), _bytes(top_ids[:-1], "<i4"), _bytes(values[:-1], "<f4"))
    own = Scored(_bytes(found.top_logprobs[-1, :1], "<f4"), _bytes(top_ids[-1], "<i4"), _bytes(values[-1], "<f4"))
    return prompt, -1 if len(best) == found.top_ids.shape[1] else int(best.min()), own


def _bytes(values: np.ndarray, kind: str) -> bytes:
    return values.astype(kind, copy=False).tobytes()
