"""`Generation`: a finished reply with its chunk; options for a list of contexts."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from nanovllm.engine.prompt import Context
from nanovllm.errors import InvalidRequestError, NanoVLLMError
from nanovllm.sampling.params import SamplingParams
from nanovllm.state.chunk import Chunk
from nanovllm.state.html import card
from nanovllm.state.logprobs import TokenLogprobs
from nanovllm.types import brief_fields


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Generation:
    """A finished reply, and the chunk that holds its KV.

    Attributes:
        chunk: The context and the reply, completely filled. It includes the tokens of a stop string. If the reply failed, its pages are
            given up, and the chunk counts as released.
        token_ids: The reply's tokens, including those of a stop string.
        text: The reply without special tokens. It ends before a stop string.
        finish_reason: "stop", "length", or "error" if the reply failed.
        logprobs: One entry per token of the reply, or None if `SamplingParams.logprobs` is None.
        num_dropped: Tokens that traced steps sampled after the session's room was used up. They are not in the reply. Steps that are not
            traced raise an error instead.
        error: Why the reply failed, or None.

    Examples:
        >>> greedy = nv.SamplingParams(temperature=0, max_tokens=12)
        >>> state, reply = nv.generate(model, state, "Hello", greedy)
        >>> reply.text, reply.finish_reason
        ('! How can I help you?', 'stop')
        >>> len(reply.chunk) == len(model.tokenizer.encode("Hello")) + len(reply.token_ids)
        True
    """

    chunk: Chunk
    token_ids: list[int]
    text: str
    finish_reason: str
    logprobs: list[TokenLogprobs] | None = None
    num_dropped: int = 0
    error: NanoVLLMError | None = None

    def __repr__(self) -> str:
        return brief_fields(self)

    def _repr_html_(self) -> str:
        figures = [
            ("ended by", self.finish_reason if self.error is None else f"{self.finish_reason}: {self.error}"),
            ("reply tokens", f"{len(self.token_ids):,}"),
            ("chunk", repr(self.chunk)),
        ]
        return card("Generation", figures, self.text)


def one_for_each(contexts: Seq[Context], sampling_params: SamplingParams | Seq[SamplingParams | None] | None) -> Seq[SamplingParams | None]:
    """One `SamplingParams` or None per context.

    Raises:
        InvalidRequestError: `contexts` is not a list, or `sampling_params` is a list of another length.
    """
    if not isinstance(contexts, list | tuple):
        raise InvalidRequestError(f"contexts must be a list of contexts, not {type(contexts).__name__}: pass one context as [context]")
    if isinstance(sampling_params, SamplingParams) or sampling_params is None:
        return [sampling_params] * len(contexts)
    if not isinstance(sampling_params, list | tuple):
        raise InvalidRequestError(f"sampling_params must be SamplingParams, None or a list of these, not {type(sampling_params).__name__}")
    if len(sampling_params) != len(contexts):
        raise InvalidRequestError(f"{len(contexts)} contexts and {len(sampling_params)} sampling_params: pass one, or one per context")
    return sampling_params
