"""Post-processing of sampled tokens: append them, look for a reason to stop, and build the result."""

from collections.abc import Sequence as Seq
from dataclasses import replace

from nanovllm.errors import NanoVLLMError
from nanovllm.executor.executor import Drawn
from nanovllm.models.model import Model
from nanovllm.state.request import Metrics, RequestOutput, Sequence, StopScan, TokenLogprobs
from nanovllm.tokenizer.tokenizer import REPLACEMENT


def draw_token(sequence: Sequence, token: int, drawn: Drawn, row: int, now: float) -> Sequence:
    """The sequence with all its tokens filled, and with `token`, which row `row` sampled, appended."""
    logprobs, stops, filled = sequence.logprobs, sequence.stops, sequence.tokens.length
    if sequence.request.sampling.logprobs is not None:
        logprobs = (logprobs, _entry(drawn, row, token, sequence.request.sampling.logprobs))
    if stops is not None:
        stops = scan(stops, token, sequence.request.sampling.stop)
    return Sequence(
        request=sequence.request, tokens=sequence.tokens.append(token), pages=sequence.pages, num_filled=filled,
        most_filled=max(filled, sequence.most_filled), num_cached=sequence.num_cached, first_token=sequence.first_token or now,
        logprobs=logprobs, stops=stops, provenance=sequence.provenance, exact_len=sequence.exact_len, gaps=sequence.gaps,
        retired=sequence.retired, carried=drawn.carried_of(sequence, row),
    )  # fmt: skip


def finish_reason(sequence: Sequence, token: int) -> str | None:
    """Why the newest token ends the reply: "stop" or "length", or None if the reply goes on."""
    request = sequence.request
    if token in request.stop_ids or (sequence.stops is not None and sequence.stops.found is not None):
        return "stop"
    return "length" if sequence.tokens.length >= request.max_len else None


def scan(stops: StopScan, token: int, strings: Seq[str]) -> StopScan:
    """Add a token's text and search for a stop string in the text that the reply would have if it ended here.

    Text that the detokenizer holds back counts too, but not its U+FFFD, which later tokens may complete to a character.
    """
    detokenizer, piece = stops.detokenizer.push([token])
    text = stops.tail + piece
    shown = text if piece else text + detokenizer.rest()
    places = [at for string in strings if (at := (text if REPLACEMENT in string else shown).find(string)) >= 0]
    begin = max(0, len(text) - max(map(len, strings)) + 1)
    return StopScan(
        detokenizer=detokenizer, tail=text[begin:], start=stops.start + begin, found=stops.start + min(places) if places else None
    )


def counted(sequence: Sequence, count: int) -> tuple[int, int]:
    """Of the next `count` tokens: how many belong to the prompt, and how many ran before a preemption."""
    start = sequence.num_filled - (sequence.todo == 0)
    if start >= sequence.most_filled and start >= sequence.request.num_prompt:
        return 0, 0
    prompt = max(0, min(sequence.request.num_prompt, start + count) - start)
    return prompt, max(0, min(sequence.most_filled, start + count) - start)


def reply_text(model: Model, sequence: Sequence) -> str:
    """The reply's text, without special tokens, without its stop token, and up to a stop string."""
    if model.tokenizer is None:
        return ""
    ids = sequence.tokens.array(sequence.request.num_prompt).tolist()
    if sequence.stops is not None and sequence.stops.found is not None:
        return model.tokenizer.decode(ids)[: sequence.stops.found]
    if ids and ids[-1] in sequence.request.stop_ids:
        ids.pop()
    return model.tokenizer.decode(ids)


def result(sequence: Sequence, text: str, reason: str, now: float, error: NanoVLLMError | None = None) -> RequestOutput:
    """The output of a finished request, whose reply has this text."""
    request, generated = sequence.request, sequence.num_generated
    first = sequence.first_token or now
    return RequestOutput(
        request_id=request.request_id,
        prompt_token_ids=sequence.tokens.array(0, request.num_prompt),
        token_ids=sequence.tokens.array(request.num_prompt).tolist(),
        text=text,
        finish_reason=reason,
        num_cached_tokens=sequence.num_cached,
        logprobs=None if request.sampling.logprobs is None else _unroll(sequence.logprobs),
        metrics=Metrics(
            time_to_first_token=first - request.arrival,
            total_time=now - request.arrival,
            decode_tokens_per_second=(generated - 1) / (now - first) if generated > 1 and now > first else 0.0,
        ),
        error=error,
    )


def _entry(drawn: Drawn, row: int, token: int, num_top: int) -> TokenLogprobs:
    """The log-probabilities of one sampled token and of the `num_top` most probable ones."""
    logprob = float("nan") if drawn.logprobs is None else float(drawn.logprobs[row])
    entry = TokenLogprobs(token_id=token, logprob=logprob)
    if num_top and drawn.top_ids is not None and drawn.top_logprobs is not None:
        pairs = zip(drawn.top_ids[row, :num_top].tolist(), drawn.top_logprobs[row, :num_top].tolist(), strict=True)
        entry = replace(entry, top=tuple(pairs))
    return entry


def _unroll(entries: tuple | None) -> list[TokenLogprobs]:
    """The entries of a linked list, oldest first."""
    newest_first = []
    while entries is not None:
        entries, entry = entries
        newest_first.append(entry)
    return newest_first[::-1]
