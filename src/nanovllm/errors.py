"""All errors that the package raises on purpose. Each message names the wrong value and says how to correct it."""


class NanoVLLMError(Exception):
    """The base class of all errors of the package.

    Attributes:
        request_id: The request that the error belongs to; None if it belongs to a call.

    Examples:
        >>> try:
        ...     nv.init_state(model, num_pages=0)
        ... except nv.NanoVLLMError as error:
        ...     print(type(error).__name__, "-", error)
        InvalidRequestError - num_pages=0 must be an integer of at least 1
    """

    request_id: int | None = None


class InvalidRequestError(NanoVLLMError, ValueError):
    """An argument, a request or an option that can never be served. It is raised before anything is written.

    Examples:
        >>> nv.prefill(model, state, "")
        Traceback (most recent call last):
        nanovllm.errors.InvalidRequestError: the prompt is empty: it must hold at least one token
    """


class OutOfPagesError(NanoVLLMError):
    """The page pool is too small for a call, even without idle pages of the prefix index, or the device ran out of memory.

    Examples:
        >>> small = nv.init_state(model, num_pages=2)
        >>> small, first = nv.prefill(model, small, [1] * 20)
        >>> nv.prefill(model, small, [2] * 20)
        Traceback (most recent call last):
        nanovllm.errors.OutOfPagesError: a context of 20 tokens needs 2 more pages; 0 of 2 pages are available...
    """


class RequestFailedError(NanoVLLMError):
    """A part that a request brought along failed while it ran: its `process_logits`, or the decoder that makes text of its tokens.

    `__cause__` is the exception that this part raised. The other requests go on.

    Examples:
        >>> def broken(logits):
        ...     raise ValueError("no rule for this token")
        >>> state, request_id = nv.submit(model, state, "Hello", process_logits=broken)
        >>> state, (out,) = nv.step(model, state)
        >>> out.finish_reason, type(out.error).__name__, repr(out.error.__cause__)
        ('error', 'RequestFailedError', "ValueError('no rule for this token')")
    """


class EngineDeadError(NanoVLLMError):
    """An engine has failed, and no call with its states can succeed any more. The message names the first cause.

    A device can break: CUDA reports such an error, for example an illegal memory access, in every later call of the process. End the
    process then, and start a new one. The engine of an `AsyncLLM` also ends with an exception that belongs to no request.

    Examples:
        >>> issubclass(nv.EngineDeadError, nv.NanoVLLMError)
        True
    """


class DonatedStateError(NanoVLLMError):
    """An `EngineState` or `DecodeCarry` was used after a later call took over its memory. Use the value that the later call returned.

    Examples:
        >>> later, chunk = nv.prefill(model, state, "Hello")
        >>> nv.release(state, chunk)
        Traceback (most recent call last):
        nanovllm.errors.DonatedStateError: this state is 1 call...
    """


class CaptureError(NanoVLLMError):
    """A function cannot be captured in a CUDA graph. The message names the caller's line.

    Examples:
        >>> state, carry = nv.begin(model, state, ["Hello"], nv.SamplingParams(temperature=0), room=2)
        >>> def step(carry):
        ...     carry.active.zero_()
        ...     return nv.decode_step(model.params, carry, model.config)
        >>> nv.capture(step, carry)
        Traceback (most recent call last):
        nanovllm.errors.CaptureError: step (...) changed carry.active in place: return a carry with a new tensor instead
    """


class ReleasedChunkError(NanoVLLMError):
    """A chunk was used, or released again, after its release.

    Examples:
        >>> state, chunk = nv.prefill(model, state, "Hello")
        >>> state = nv.release(state, chunk)
        >>> nv.fork(state, chunk)
        Traceback (most recent call last):
        nanovllm.errors.ReleasedChunkError: ... was released: fork it before its release if it is needed longer
    """


class UnknownChunkError(InvalidRequestError):
    """A request names a chunk that a server does not have. It was deleted, was never made, or was lost when the engine started again.

    Examples:
        >>> issubclass(nv.UnknownChunkError, nv.InvalidRequestError)
        True
    """


class ChunkExistsError(InvalidRequestError):
    """A request gives a new chunk of a server a name that another has, without asking that it be replaced.

    Examples:
        >>> issubclass(nv.ChunkExistsError, nv.InvalidRequestError)
        True
    """


class ChunkLimitError(InvalidRequestError):
    """The chunks that clients have named would be too many for a server, or hold too many of its pages.

    Examples:
        >>> issubclass(nv.ChunkLimitError, nv.InvalidRequestError)
        True
    """


class ForeignChunkError(NanoVLLMError):
    """A chunk was used with an engine that did not make it.

    Examples:
        >>> state, chunk = nv.prefill(model, state, "Hello")
        >>> other = nv.init_state(model, num_pages=64)
        >>> nv.fork(other, chunk)
        Traceback (most recent call last):
        nanovllm.errors.ForeignChunkError: ... belongs to another engine: ...
    """


class CheckpointError(NanoVLLMError):
    """A model folder is missing, incomplete or malformed, or has an unknown architecture.

    Examples:
        >>> nv.load_model("./missing")
        Traceback (most recent call last):
        nanovllm.errors.CheckpointError: ...
    """


class ChunkFileError(NanoVLLMError):
    """A chunk file, or the index of a `ChunkStore`, is damaged, belongs to another model, or cannot be read or written.

    Examples:
        >>> nv.load_chunk(model, state, "missing.safetensors")
        Traceback (most recent call last):
        nanovllm.errors.ChunkFileError: missing.safetensors: could not be opened: No such file or directory
    """


class ChunkMismatchError(ChunkFileError):
    """A chunk file is whole, but does not fit an engine: it is of another model, or its KV has another dtype.

    Examples:
        >>> state, facts = nv.prefill(model, state, "The king of Aistonia is Oswin.")
        >>> nv.save_chunk(state, facts, "facts.safetensors")
        >>> nv.load_chunk(model, nv.init_state(model, num_pages=64, kv_dtype="fp8"), "facts.safetensors")
        Traceback (most recent call last):
        nanovllm.errors.ChunkMismatchError: facts.safetensors: its KV is torch.float32, but this engine's is torch.float8_e4m3fn: ...
    """


class TuningFileError(NanoVLLMError):
    """A file of `nanovllm tune` is missing, damaged, or made for another GPU, model or version.

    Examples:
        >>> issubclass(nv.TuningFileError, nv.NanoVLLMError)
        True
    """


class BrokenInvariantError(NanoVLLMError):
    """`nv.check` found a state that no sequence of calls should reach. The message names the invariant.

    Examples:
        >>> nv.check(state)  # raises nothing, because the state is valid
    """


class QueueFullError(NanoVLLMError):
    """An `AsyncLLM` has as many requests as it takes (`max_num_waiting`). The same call may succeed later.

    Examples:
        >>> import asyncio
        >>> params = nv.SamplingParams(temperature=0, max_tokens=64)
        >>> async def main():
        ...     async with nv.AsyncLLM(model, num_pages=64, max_num_seqs=1, max_num_waiting=0) as llm:
        ...         await asyncio.gather(llm.generate("Hello", params), llm.generate("Once upon a time", params))
        >>> asyncio.run(main())
        Traceback (most recent call last):
        nanovllm.errors.QueueFullError: no room for 1 more besides the 1 that run or wait: ...
    """


class EngineClosedError(NanoVLLMError):
    """An `LLM` or `AsyncLLM` was closed, before a call or during it.

    Examples:
        >>> import asyncio
        >>> async def main():
        ...     llm = nv.AsyncLLM(model, num_pages=64)
        ...     await llm.close()
        ...     await llm.generate("Hello")
        >>> asyncio.run(main())
        Traceback (most recent call last):
        nanovllm.errors.EngineClosedError: this AsyncLLM was closed: make a new one
    """
