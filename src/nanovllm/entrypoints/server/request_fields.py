"""The fields of requests: their types, which fields are ignored, and what becomes of them as `SamplingParams`."""

import re
import reprlib
from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from nanovllm.engine.requests import MOST_PRIORITY
from nanovllm.entrypoints.server.errors import ApiError, api_error, unsupported
from nanovllm.entrypoints.server.settings import MOST_INTERVAL, MOST_TOKENS
from nanovllm.errors import InvalidRequestError
from nanovllm.sampling.params import MIN_TEMPERATURE, SamplingParams, closest

T = TypeVar("T", bound="Sampled")
S = TypeVar("S", bound=msgspec.Struct)
# Fields that force the form of a reply (see `constraints`): OpenAI's, and those of other servers
CONSTRAINTS = (
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "json_schema", "regex",
    "ebnf", "grammar", "structural_tag",
)  # fmt: skip
# Fields that OpenAI's clients and those of other servers send, and that cannot change the text of the reply
IGNORED = frozenset(
    {
        "user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options",
        "safety_identifier", "verbosity", "prediction", "moderation", "request_id", "session_id", "return_progress",
        "timings_per_token", "cache_prompt", "id_slot", "kv_transfer_params", "spaces_between_special_tokens", "guided_decoding_backend",
        "max_tool_calls", "length_penalty", "early_stopping",
    }
)  # fmt: skip
NOTHING = (None, False, 0, "", [], ["text"])
# Fields that would change the reply and that this server, or the route, does not have. Values that ask for nothing are let through.
REFUSED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                "suffix", "use_beam_search", "audio", "modalities", "web_search_options", "functions", "function_call",
                "allowed_token_ids", "prompt_logprobs", "lora_path", "chat_template", "logprob_token_ids", "prompt_embeds", "echo",
                "documents", "thinking_token_budget", "reasoning_budget", "return_tokens_as_token_ids", "guided_whitespace_pattern",
                "add_special_tokens", "tools", "lora_request", "logits_processors", "samplers", "stop_sequences", "stop_regex", "n_probs",
                "mirostat", "dry_multiplier", "xtc_probability", "dynatemp_range", "top_a", "no_repeat_ngram_size",
            ),
            NOTHING,
        ),
        "best_of": (*NOTHING, 1),
        "tool_choice": (*NOTHING, "none", "auto"),
        "typical_p": (*NOTHING, 1),
        "tfs_z": (*NOTHING, 1),
        "num_beams": (*NOTHING, 1),
        "top_n_sigma": (*NOTHING, -1),
        "n_predict": (None, -1),
        "repeat_last_n": (None, -1),
        "do_sample": (None, True),
    }
)  # fmt: skip
BITS = 256  # of integers, which messages may name
MISSING = re.compile(r"missing required field `(\w+)`")


class StreamOptions(msgspec.Struct):
    """How a stream tells its usage."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Sampled(msgspec.Struct, kw_only=True):
    """Fields that every kind of generation has. Values that are None mean the model's or OpenAI's default."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    stream_interval: int | None = None
    n: int | None = 1
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = 0
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    chunks: list[str] | None = None
    keep: str | None = None
    keep_thinking: bool | None = None
    keep_replace: bool | None = None


SAME = tuple(
    {field.name for field in fields(SamplingParams)}
    & {
        "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos", "presence_penalty", "frequency_penalty",
        "min_tokens", "bad_words", "skip_special_tokens",
    }
)  # fmt: skip
DEFAULTS = {field.name: getattr(SamplingParams(), field.name) for field in fields(SamplingParams)}


def read(values: dict[str, Any], kind: type[T]) -> T:
    """The fields of a request.

    Raises:
        ApiError: A field has a wrong type, would change the reply and is not supported, is unknown and similar to a known one, or has
            no meaning without another.
    """
    known = kind.__struct_fields__
    for name, value in values.items():
        if name in known or name in IGNORED or name in CONSTRAINTS:
            continue
        if name in REFUSED:
            if value in REFUSED[name]:
                continue
            raise unsupported(name)
        require_far(name, (*known, *CONSTRAINTS))
    asked = convert(values, kind)
    if asked.cache_salt == "":
        raise ApiError(400, "cache_salt is empty: give a text that others cannot guess, or leave the field out", param="cache_salt")
    if asked.stream_options is not None and not asked.stream:
        raise ApiError(400, "stream_options is only allowed with stream: true", param="stream_options")
    if asked.stream_interval is not None and not 1 <= asked.stream_interval <= MOST_INTERVAL:
        raise ApiError(400, f"stream_interval={asked.stream_interval}: must be in [1, {MOST_INTERVAL}]", param="stream_interval")
    return asked


def require_far(name: str, known: tuple[str, ...]) -> None:
    """Refuse an unknown field that was most likely meant to be a known one.

    Raises:
        ApiError: The names are similar.
    """
    if (close := closest(name, known)) is not None:
        raise ApiError(400, f"unknown field {name[:100]!r}: did you mean {close!r}?", param=name[:100], code="unknown_parameter")


def convert(values: dict[str, Any], kind: type[S]) -> S:
    """The fields of a request, of which unknown ones are ignored.

    Raises:
        ApiError: A field has a wrong type, or is missing.
    """
    for name, value in values.items():
        if isinstance(value, int) and value.bit_length() > BITS:
            raise ApiError(400, f"{name[:100]} has more than {BITS} bits", param=name[:100])
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        place, missing = str(error).partition(" - at `$")[2].strip("`."), MISSING.search(str(error))
        param = ".".join(filter(None, (place, missing and missing[1])))
        told = f"{param} is missing" if missing else str(error).replace(" - at `$.", ": at `")
        told += f", which is {reprlib.repr(values[place])}" if place in values and not missing else ""
        raise ApiError(400, told, param=param or None) from None


def sampling(asked: Sampled, generation: SamplingParams, max_tokens: int, *, limit: str = "max_tokens", **more: Any) -> dict[str, Any]:
    """The options of one choice that differ from `SamplingParams()`, checked.

    Args:
        asked: The request.
        generation: The model's own options, which hold where the request has none.
        max_tokens: The most tokens of the reply.
        limit: The name of the field that says so, for errors.
        **more: Further options of `SamplingParams`.

    Raises:
        ApiError: A value is not accepted.
    """
    options: dict[str, Any] = {name: getattr(generation, name) for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
    options |= {name: value for name in SAME if (value := getattr(asked, name)) is not None}
    options |= {"max_tokens": max_tokens, **more}
    if abs(asked.priority or 0) >= MOST_PRIORITY:
        raise ApiError(400, f"priority={asked.priority} must be between -2**53 and 2**53", param="priority")
    for name in ("logit_bias", "stop_token_ids"):
        if len(getattr(asked, name) or ()) > MOST_TOKENS:
            raise ApiError(400, f"{name} has more than {MOST_TOKENS} tokens", param=name)
    if (penalty := asked.repetition_penalty or asked.repeat_penalty) is not None:
        options["repetition_penalty"] = penalty
    if 0 < options["temperature"] < MIN_TEMPERATURE:
        options["temperature"] = 0.0  # many clients write a tiny number for greedy decoding
    if options["top_k"] == -1:
        options["top_k"] = 0  # vLLM's way to switch it off
    if asked.seed is not None:
        options["seed"] = asked.seed % (1 << 63)  # OpenAI's seeds are signed
    try:
        if asked.logit_bias is not None:
            options["logit_bias"] = {_token_id(name): value for name, value in asked.logit_bias.items()}
        params = SamplingParams(**options)
    except InvalidRequestError as error:
        raise api_error(InvalidRequestError(str(error).replace("max_tokens", limit))) from None
    values = {name: value for name, default in DEFAULTS.items() if (value := getattr(params, name)) != default}
    if params.logit_bias is not None:
        values["logit_bias"] = dict(params.logit_bias)
    if params.grammar is not None:
        values["grammar"] = {"form": params.grammar.form, "source": params.grammar.source}
    return values


def _token_id(name: str) -> int:
    if not name.isdecimal() or len(name) > 10:
        raise InvalidRequestError(f"logit_bias={name[:100]!r}: keys must be token ids")
    return int(name)
