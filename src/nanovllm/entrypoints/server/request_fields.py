"""The fields of requests: their types, which fields are ignored, and what becomes of them as `SamplingParams`."""

from dataclasses import fields
from typing import Any, TypeVar

import msgspec

from nanovllm.entrypoints.server.errors import ApiError, api_error
from nanovllm.entrypoints.server.settings import MOST_STOP, MOST_TOKENS
from nanovllm.errors import InvalidRequestError
from nanovllm.sampling.params import MIN_TEMPERATURE, SamplingParams, closest

T = TypeVar("T", bound="Sampled")
S = TypeVar("S", bound=msgspec.Struct)
# Fields that OpenAI's clients and those of other servers send, and that cannot change the text of the reply
IGNORED = frozenset(
    {
        "user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options",
        "safety_identifier", "verbosity", "prediction", "moderation", "request_id", "session_id", "cache_salt", "return_progress",
        "timings_per_token", "cache_prompt", "id_slot", "kv_transfer_params", "spaces_between_special_tokens", "add_special_tokens",
        "stream_interval",
    }
)  # fmt: skip
# Fields that would change the reply and that this server does not have. A value that asks for nothing is let through.
REFUSED = frozenset(
    {
        "suffix", "use_beam_search", "audio", "modalities", "web_search_options", "functions", "function_call", "min_tokens", "bad_words",
        "allowed_token_ids", "prompt_logprobs", "truncate_prompt_tokens", "lora_path", "chat_template", "logprob_token_ids",
        "prompt_embeds",
    }
)  # fmt: skip
BITS = 64  # of integers
NOTHING = (None, False, 0, "", [], {}, ["text"])


class StreamOptions(msgspec.Struct):
    """How a stream tells its usage."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool | None = None


class Sampled(msgspec.Struct, kw_only=True):
    """Fields that every kind of generation has. Values that are None mean the model's or OpenAI's default."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = 1
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = 0
    return_token_ids: bool | None = None


SAME = tuple(
    {field.name for field in fields(SamplingParams)}
    & {"temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos", "presence_penalty", "frequency_penalty"}
)
DEFAULTS = SamplingParams()


def read(values: dict[str, Any], kind: type[T]) -> T:
    """The fields of a request.

    Raises:
        ApiError: A field has a wrong type, would change the reply and is not supported, or is unknown and similar to a known one.
    """
    known = kind.__struct_fields__
    for name, value in values.items():
        if name in known or name in IGNORED:
            continue
        if name in REFUSED:
            if value in NOTHING:
                continue
            raise ApiError(400, f"{name} is not supported by this server", param=name, code="unsupported_parameter")
        close = closest(name, known)
        if close is not None:
            raise ApiError(400, f"unknown field {name[:100]!r}: did you mean {close!r}?", param=name[:100], code="unknown_parameter")
    return convert(values, kind)


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
        place = str(error).partition(" - at `$")[2]
        raise ApiError(400, str(error).replace(" - at `$.", ": at `"), param=place.strip("`.") or None) from None


def sampling(asked: Sampled, generation: SamplingParams, max_tokens: int, **more: Any) -> dict[str, Any]:
    """The options of one choice that differ from `SamplingParams()`, checked.

    Args:
        asked: The request.
        generation: The model's own options, which hold where the request has none.
        max_tokens: The most tokens of the reply.
        **more: Further options of `SamplingParams`.

    Raises:
        ApiError: A value is not accepted.
    """
    options: dict[str, Any] = {name: getattr(generation, name) for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
    options |= {name: value for name in SAME if (value := getattr(asked, name)) is not None}
    options |= {"max_tokens": max_tokens, **more}
    for name in ("logit_bias", "stop_token_ids"):
        if len(getattr(asked, name) or ()) > MOST_TOKENS:
            raise ApiError(400, f"{name} has more than {MOST_TOKENS} tokens", param=name)
    if any(len(stop) > MOST_STOP for stop in (asked.stop if isinstance(asked.stop, list) else [asked.stop or ""])):
        raise ApiError(400, f"stop has a string of more than {MOST_STOP} characters", param="stop")
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
        raise api_error(error) from None
    return {name: value for field in fields(params) if (value := getattr(params, name := field.name)) != getattr(DEFAULTS, name)}


def _token_id(name: str) -> int:
    if not name.isdecimal() or len(name) > 10:
        raise InvalidRequestError(f"logit_bias={name[:100]!r}: keys must be token ids")
    return int(name)
