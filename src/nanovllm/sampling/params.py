"""`SamplingParams`: the sampling options of one request, validated when it is built."""

import difflib
import functools
import inspect
import math
import operator
import reprlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NoReturn, TypeVar

from nanovllm.errors import InvalidRequestError
from nanovllm.sampling.grammar import Grammar
from nanovllm.types import brief

__all__ = [
    "MAX_BAD_WORDS",
    "MAX_BAD_WORD_LEN",
    "MAX_LOGPROBS",
    "MAX_STOPS",
    "MAX_STOP_LEN",
    "SamplingParams",
    "closest",
    "from_generation_config",
    "num_top_of",
    "show",
    "validate_for",
]

MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_BAD_WORDS = 128
MAX_BAD_WORD_LEN = 128  # characters
MAX_STOP_LEN = 1024  # characters of a stop string: a search reads so many again, and a stream holds so many back
MIN_TEMPERATURE = 1e-3  # below it, logits divided by the temperature leave float32's useful range in top-p; 0 is greedy
MAX_TEMPERATURE = 100.0
INT32_MAX = 2**31 - 1
TRANSFORMERS_TOP_K = 50  # its default for a model that samples and whose generation_config.json has none
DRAWN = {"temperature": (MIN_TEMPERATURE, MAX_TEMPERATURE), "top_k": (0, INT32_MAX), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0)}

C = TypeVar("C")


def show(value: object) -> str:
    """A short form of any value, for messages."""
    try:
        return reprlib.repr(value)
    except Exception:  # a __repr__ that raises, or an int with more digits than Python prints
        return f"<{type(value).__name__}>"


def closest(name: str, names: Sequence[str]) -> str | None:
    """The name that somebody who wrote `name` most likely meant; None if no name is similar."""
    alike = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return next(iter([*alike, *(other for other in names if len(name) > 3 and name in other)]), None)


def _refuse(name: str, value: object, accepted: str) -> NoReturn:
    raise InvalidRequestError(f"{name}={show(value)}: {accepted}")


def _int(name: str, value: Any, low: int, high: int, meaning: str = "") -> int:
    accepted = f"must be an integer in [{low}, {high}]{meaning}"
    if isinstance(value, bool):
        _refuse(name, value, accepted)
    try:
        number = operator.index(value)
    except TypeError:
        _refuse(name, value, accepted)
    if not low <= number <= high:
        _refuse(name, value, accepted)
    return number


def _float(name: str, value: Any, accepted: str) -> float:
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, Real)):
        _refuse(name, value, accepted)
    try:
        number = float(value)
    except OverflowError:
        _refuse(name, value, accepted)
    if not math.isfinite(number):
        _refuse(name, value, accepted)
    return number


def _float_in(name: str, value: Any, low: float, high: float, *, open_low: bool = False, meaning: str = "") -> float:
    accepted = f"must be a number in {'(' if open_low else '['}{low}, {high}]{meaning}"
    number = _float(name, value, accepted)
    if not low <= number <= high or (open_low and number == low):
        _refuse(name, value, accepted)
    return number


def _temperature(value: Any) -> float:
    accepted = f"must be 0 (greedy) or a number in [{MIN_TEMPERATURE}, {MAX_TEMPERATURE}]"
    number = _float("temperature", value, accepted)
    if number != 0 and not MIN_TEMPERATURE <= number <= MAX_TEMPERATURE:
        _refuse("temperature", value, accepted)
    return abs(number)  # -0.0 is 0


def _is_text(value: object) -> bool:
    if not isinstance(value, str) or not value:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:  # a lone surrogate, which never occurs in decoded text
        return False
    return True


def _items(name: str, value: Any, accepted: str) -> tuple[Any, ...]:
    # It must have a size, so that an endless iterator is refused instead of consumed
    if not isinstance(value, Collection) or isinstance(value, (str, bytes, bytearray, Mapping)):
        _refuse(name, value, accepted)
    try:
        return tuple(value)
    except TypeError:  # an array without dimensions
        _refuse(name, value, accepted)


def _stop(value: Any) -> tuple[str, ...]:
    accepted = (
        f"must be a non-empty string of at most {MAX_STOP_LEN} characters, or a sequence of at most {MAX_STOPS} of them, "
        "without lone surrogates"
    )
    stops = (value,) if isinstance(value, str) else _items("stop", value, accepted)
    if len(stops) > MAX_STOPS or not all(_is_text(s) and len(s) <= MAX_STOP_LEN for s in stops):
        _refuse("stop", stops, accepted)
    return stops


def _stop_token_ids(value: Any) -> tuple[int, ...]:
    ids = _items("stop_token_ids", value, "must be a sequence of token ids")
    return tuple(sorted({_int("stop_token_ids", i, 0, INT32_MAX) for i in ids}))


def _bad_words(value: Any) -> tuple[str, ...]:
    accepted = (
        f"must be a sequence of at most {MAX_BAD_WORDS} strings of at most {MAX_BAD_WORD_LEN} characters, each with a character that is "
        "not white space, without lone surrogates"
    )
    if isinstance(value, Collection) and len(value) > MAX_BAD_WORDS:
        _refuse("bad_words", value, accepted)
    words = _items("bad_words", value, accepted)
    if not all(_is_text(word) and len(word) <= MAX_BAD_WORD_LEN and word.strip() for word in words):
        _refuse("bad_words", words, accepted)
    return tuple(dict.fromkeys(words))


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...] | None:
    accepted = "must be None or a mapping from token id to a number in [-100, 100]"
    pairs = tuple(value.items()) if isinstance(value, Mapping) else _items("logit_bias", value, accepted)
    biases: dict[int, float] = {}
    for pair in pairs:  # pairs are accepted too, because `dataclasses.replace` passes the normalised form back
        if not isinstance(pair, tuple) or len(pair) != 2:
            _refuse("logit_bias", value, accepted)
        token_id = _int("a key of logit_bias", pair[0], 0, INT32_MAX)
        biases[token_id] = _float_in(f"logit_bias[{token_id}]", pair[1], -100.0, 100.0)
    return tuple(sorted(biases.items())) or None


def _explains_unknown_keywords(cls: type[C]) -> type[C]:
    """Turn an unknown keyword of a dataclass into an `InvalidRequestError` that names it and the closest valid keyword."""
    init = cls.__init__
    names = tuple(inspect.signature(init).parameters)[1:]

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **options: Any) -> None:
        for name in options:
            if name not in names:
                close = closest(name, names)
                hint = "." if close is None else f": did you mean {close!r}?"
                raise InvalidRequestError(f"unknown sampling option {show(name)}{hint} Valid options: {', '.join(names)}")
        init(self, *args, **options)

    type.__setattr__(cls, "__init__", __init__)
    return cls


@_explains_unknown_keywords
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The sampling options of one request.

    Values are normalised, so that equal options compare equal and have equal hashes. NumPy scalars are accepted like Python numbers; bools
    are not numbers.

    Args:
        temperature: Divides the logits: 0 is greedy decoding, otherwise a number in [0.001, 100].
        top_k: Sample from the k most probable tokens only; 0 is off.
        top_p: Nucleus sampling: sample from the most probable tokens whose probabilities add up to this share, in (0, 1]; 1 is off.
        min_p: Drop tokens below `min_p` times the highest probability, in [0, 1]; 0 is off.
        max_tokens: The most tokens of the reply, at least 1.
        stop: A string of at most 1,024 characters, or up to 16, before which the reply ends; kept as a tuple.
        stop_token_ids: Token ids that end the reply; kept as a sorted tuple.
        ignore_eos: Whether the reply goes on after the model's end-of-sequence token.
        seed: The same seed gives the same random numbers, whatever else runs in the batch; in [0, 2**63). On a GPU kernels round
            differently for other numbers of rows, so a choice between two nearly equal tokens can still differ. None: the engine
            chooses one.
        repetition_penalty: Makes tokens of the prompt and the output less probable if above 1 (Keskar et al., 2019); in (0, 10].
        presence_penalty: Subtracted from the logit of each token in the output (OpenAI's API reference); in [-2, 2].
        frequency_penalty: Subtracted once per occurrence of a token in the output (OpenAI's API reference); in [-2, 2].
        logit_bias: A mapping from token id to a number in [-100, 100] that is added to its logit, or None; kept as sorted pairs.
        logprobs: How many of the most probable tokens to report per sampled token, up to 20. 0: only the sampled token's log-probability.
            None: no log-probabilities.
        min_tokens: Until the reply has so many tokens, it cannot end by an end token, by one of `stop_token_ids` or by a stop string; at
            most `max_tokens`. Only a grammar that allows nothing else ends it earlier.
        bad_words: Up to 128 strings of at most 128 characters that the reply cannot have, alone and after a space, as the tokenizer spells
            them; kept as a tuple. Another spelling of the same text is not recognised. A grammar that allows nothing else is obeyed.
        skip_special_tokens: Whether the text leaves special tokens out. The token that ends the reply is never part of the text.
        grammar: The language of the reply, or None: any text. The reply ends with "stop" where the grammar allows nothing more. Needs the
            extra `grammar`.

    Raises:
        InvalidRequestError: An option is unknown, or its value is not accepted. The message names the value and the accepted ones.

    Examples:
        >>> params = nv.SamplingParams(temperature=0.7, top_p=0.9, stop="END")
        >>> params.stop
        ('END',)
        >>> params == nv.SamplingParams(temperature=0.7, top_p=0.9, stop=["END"])
        True
        >>> nv.SamplingParams(top_p=2)
        Traceback (most recent call last):
            ...
        nanovllm.errors.InvalidRequestError: top_p=2: must be a number in (0.0, 1.0]
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 16
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] | None = None
    logprobs: int | None = None
    min_tokens: int = 0
    bad_words: Sequence[str] = ()
    skip_special_tokens: bool = True
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        if not (self.grammar is None or isinstance(self.grammar, Grammar)):
            _refuse("grammar", self.grammar, "must be None or a Grammar: make one by Grammar.json_schema(...) or another of its methods")
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(value := getattr(self, name), bool):
                _refuse(name, value, "must be True or False")
        max_tokens = _int("max_tokens", self.max_tokens, 1, INT32_MAX)
        normal = {
            "temperature": _temperature(self.temperature),
            "top_k": _int("top_k", self.top_k, 0, INT32_MAX, " (0: all tokens)"),
            "top_p": _float_in("top_p", self.top_p, 0.0, 1.0, open_low=True),
            "min_p": _float_in("min_p", self.min_p, 0.0, 1.0),
            "max_tokens": max_tokens,
            "min_tokens": _int("min_tokens", self.min_tokens, 0, max_tokens, ", at most max_tokens"),
            "stop": _stop(self.stop),
            "stop_token_ids": _stop_token_ids(self.stop_token_ids),
            "seed": None if self.seed is None else _int("seed", self.seed, 0, 2**63 - 1, "; without a seed the engine chooses one"),
            "repetition_penalty": _float_in("repetition_penalty", self.repetition_penalty, 0.0, 10.0, open_low=True),
            "presence_penalty": _float_in("presence_penalty", self.presence_penalty, -2.0, 2.0),
            "frequency_penalty": _float_in("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            "logit_bias": None if self.logit_bias is None else _logit_bias(self.logit_bias),
            "logprobs": None if self.logprobs is None else _int("logprobs", self.logprobs, 0, MAX_LOGPROBS, " or None"),
            "bad_words": _bad_words(self.bad_words),
        }
        for name, value in normal.items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        values = ((name, getattr(self, name)) for name in self.__dataclass_fields__)
        told = (f"{name}={brief(value) if isinstance(value, tuple) and len(value) > MAX_STOPS else repr(value)}" for name, value in values)
        return f"SamplingParams({', '.join(text if len(text) < 400 else f'{text[:400]}...' for text in told)})"


def num_top_of(name: str, value: Any) -> int:
    """How many of the most probable tokens to report, from the argument called `name`.

    Raises:
        InvalidRequestError: The value is not an integer from 0 to `MAX_LOGPROBS`.
    """
    return _int(name, value, 0, MAX_LOGPROBS)


def validate_for(params: SamplingParams, vocab_size: int) -> None:
    """Check the token ids in `params` against a vocabulary.

    Raises:
        InvalidRequestError: A token id is outside `[0, vocab_size)`. The message names the first one.
    """
    for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", dict(params.logit_bias or ()))):
        for token_id in ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequestError(f"{name} holds the token id {token_id}; the vocabulary has the ids 0 to {vocab_size - 1}")


def from_generation_config(config: Mapping[str, Any]) -> SamplingParams:
    """The options that a Hugging Face `generation_config.json` asks for: greedy unless its `do_sample` is true, as in transformers.

    It reads `temperature`, `top_k`, `top_p`, `min_p`, `repetition_penalty` and `max_new_tokens`. Null and absent keys keep our defaults,
    except that a model that samples has a `top_k` of 50, as in transformers. Some numbers are valid in other engines but not in
    `SamplingParams`. They keep their meaning: a temperature near 0 and a `top_p` of 0 are greedy, and a negative `top_k` is off. Others
    move to the nearest accepted value.

    Raises:
        InvalidRequestError: A value is not a number, or `repetition_penalty` or `max_new_tokens` is not accepted by `SamplingParams`.
    """
    same = {"repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens"}
    options: dict[str, Any] = {ours: config[theirs] for theirs, ours in same.items() if config.get(theirs) is not None}
    drawn: dict[str, Any] = {"top_k": TRANSFORMERS_TOP_K}
    for name, (low, high) in DRAWN.items():
        if config.get(name) is not None:
            drawn[name] = _moved(config[name], low, high)
    if not config.get("do_sample") or 0 in (drawn.get("temperature"), drawn.get("top_p")):
        return SamplingParams(temperature=0.0, **options)
    return SamplingParams(**options, **drawn)


def _moved(value: Any, low: int | float, high: int | float) -> Any:
    """0 for a number below `low`, `high` for a number above it. Other values are returned unchanged, for `SamplingParams` to refuse."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return 0 if value < low else high if value > high else value
