"""Post-processing of sampled tokens: append them, look for a reason to stop, and build the result."""

from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np

from nanovllm.errors import NanoVLLMError
from nanovllm.executor.executor import Drawn
from nanovllm.models.model import Model
from nanovllm.sampling.params import SamplingParams
from nanovllm.state.logprobs import RowScores, last_entries
from nanovllm.state.request import Metrics, RequestOutput, Sequence
from nanovllm.state.steady import Steady
from nanovllm.state.stop_scan import StopScan
from nanovllm.tokenizer.detokenizer import REPLACEMENT


def row_scores(sequence: Sequence, drawn: Drawn, row: int) -> RowScores:
    """The log-probabilities that row `row` of a step gives a sequence, or None if its request did not ask for them."""
    num_top = sequence.request.sampling.logprobs
    return None if num_top is None else (drawn.scores, row, num_top)


def draw_token(sequence: Sequence, token: int, drawn: Drawn, row: int, now: float) -> Sequence:
    """The sequence with all its tokens filled, and with `token`, which row `row` sampled, appended."""
    logprobs, stops, filled = sequence.logprobs, sequence.stops, sequence.tokens.length
    if (num_top := sequence.request.sampling.logprobs) is not None:
        logprobs = (logprobs, drawn.scores.of(row, num_top))
    if stops is not None:
        stops = scan(stops, [*sequence.unread(), token], sequence.request.sampling)
    return Sequence(
        request=sequence.request, tokens=sequence.tokens.append(token), pages=sequence.pages, num_filled=filled,
        most_filled=max(filled, sequence.most_filled), num_cached=sequence.num_cached, first_token=sequence.first_token or now,
        logprobs=logprobs, stops=stops, provenance=sequence.provenance, exact_len=sequence.exact_len, gaps=sequence.gaps,
        retired=sequence.retired, carried=drawn.carried_of(sequence, row),
    )  # fmt: skip


def scan_steady(running: Steady, token_ids: np.ndarray) -> tuple[Steady, dict[int, StopScan], dict[int, Exception]]:
    """Search the rows whose newest tokens, which are `token_ids`, may complete a stop string.

    Returns:
        The rows with these searches, the searches by row, and the exceptions of those rows that cannot be searched.
    """
    scans, failed = dict[int, StopScan](), dict[int, Exception]()
    for row in running.suspects(token_ids):
        try:
            stops = running.stops(row)
            if stops.may_end_with(int(token_ids[row])):
                scans[row] = scan(stops, running.reply(row, stops.num_read), running.base[row].request.sampling)
        except Exception as error:
            failed[row] = error
    return (replace(running, scans={**running.scans, **scans}) if scans else running), scans, failed


def finish_reason(sequence: Sequence, token: int, *, complete: bool = False) -> str | None:
    """Why the newest token ends the reply: "stop" or "length", or None if it goes on. `complete`: its grammar allows nothing more."""
    request = sequence.request
    if complete or token in request.stop_ids or (sequence.stops is not None and sequence.stops.found is not None):
        return "stop"
    return "length" if sequence.tokens.length >= request.max_len else None


def scan(stops: StopScan, tokens: list[int], params: SamplingParams) -> StopScan:
    """Add tokens, of which only the last may complete a stop string, and search in the text that the reply would have if it ended here.

    Text that the detokenizer holds back counts too, but not its U+FFFD, which later tokens may complete to a character. The first
    `min_tokens` tokens are not searched. A stop string that begins in their text and ends after it counts.
    """
    strings = params.stop
    early = tokens[: max(0, params.min_tokens - stops.num_read)]
    if early and len(early) < len(tokens):
        stops, tokens, early = scan(stops, early, params), tokens[len(early) :], []
    detokenizer, piece = stops.detokenizer.push(tokens)
    text, longest = stops.tail + piece, max(map(len, strings))
    begin = max(0, len(text) - longest + 1)
    if early:
        num_read, barred = stops.num_read + len(early), stops.barred
        if num_read == params.min_tokens:
            barred = stops.start + len(text) + len(detokenizer.rest().partition(REPLACEMENT)[0])
        return replace(stops, detokenizer=detokenizer, num_read=num_read, tail=text[begin:], start=stops.start + begin, barred=barred)
    enough = 0 if piece else longest + detokenizer.most_new(tokens)
    held = detokenizer.rest(enough) if enough else ""
    places = _places(strings, text, held if held and len(held) >= enough else text + held)
    if places and (held or stops.barred):  # else only the end of a held text is read: all of it may be as long as the reply
        places = _places(strings, text, text + detokenizer.rest(), stops.barred - stops.start)
    return StopScan(
        detokenizer=detokenizer, ends=stops.ends, strings=stops.strings, num_read=stops.num_read + len(tokens), tail=text[begin:],
        start=stops.start + begin, barred=stops.barred, found=stops.start + min(places) if places else None,
    )  # fmt: skip


def _places(strings: Seq[str], certain: str, shown: str, barred: int = 0) -> list[int]:
    """Where stop strings first begin in a text, if they end after its first `barred` characters.

    Those with U+FFFD are searched in the part that is certain.
    """
    begins = ((string, max(0, barred - len(string) + 1)) for string in strings)
    return [at for string, begin in begins if (at := (certain if REPLACEMENT in string else shown).find(string, begin)) >= 0]


def counted(sequence: Sequence, count: int) -> tuple[int, int]:
    """Of the next `count` tokens: how many belong to the prompt, and how many ran before a preemption."""
    start = sequence.num_filled - (sequence.todo == 0)
    if start >= sequence.most_filled and start >= sequence.request.num_prompt:
        return 0, 0
    prompt = max(0, min(sequence.request.num_prompt, start + count) - start)
    return prompt, max(0, min(sequence.most_filled, start + count) - start)


def reply_text(model: Model, sequence: Sequence) -> str:
    """The reply's text, with special tokens if the request asks for them, without its stop token, and up to a stop string."""
    if model.tokenizer is None:
        return ""
    skip = sequence.request.sampling.skip_special_tokens
    ids = sequence.tokens.array(sequence.request.num_prompt).tolist()
    if sequence.stops is not None and sequence.stops.found is not None:
        return model.tokenizer.decode(ids, skip)[: sequence.stops.found]
    if ids and ids[-1] in sequence.request.stop_ids:
        ids.pop()
    return model.tokenizer.decode(ids, skip)


def result(
    sequence: Sequence, text: str, reason: str, now: float, error: NanoVLLMError | None = None, *, out_of_pages: bool = False
) -> RequestOutput:
    """The output of a finished request, whose reply has this text."""
    request, generated = sequence.request, sequence.num_generated
    first, token_ids = sequence.first_token or now, sequence.tokens.array(request.num_prompt).tolist()
    return RequestOutput(
        request_id=request.request_id,
        prompt_token_ids=sequence.tokens.array(0, request.num_prompt),
        token_ids=token_ids,
        text=text,
        finish_reason=reason,
        num_cached_tokens=sequence.num_cached,
        logprobs=None if request.sampling.logprobs is None else last_entries(sequence.logprobs, token_ids),
        metrics=Metrics(
            time_to_first_token=first - request.arrival,
            total_time=now - request.arrival,
            decode_tokens_per_second=(generated - 1) / (now - first) if generated > 1 and now > first else 0.0,
        ),
        error=error,
        out_of_pages=out_of_pages,
    )
