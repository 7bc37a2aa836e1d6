"""Every error that the package raises on purpose. Each message names the offending value and what would have been accepted."""


class NanoVLLMError(Exception):
    """The root of all errors below."""


class InvalidRequestError(NanoVLLMError, ValueError):
    """A request, or an option of one, that can never be served: refused before anything is written."""


class OutOfPagesError(NanoVLLMError):
    """The page pool cannot hold what a call needs, even after evicting every page that only the prefix index holds."""


class DonatedStateError(NanoVLLMError):
    """An `EngineState` or `DecodeCarry` was used after a later call had taken over its memory."""


class ReleasedChunkError(NanoVLLMError):
    """A chunk was used, or released again, after its release."""


class ForeignChunkError(NanoVLLMError):
    """A chunk was used with an engine that did not make it."""


class CheckpointError(NanoVLLMError):
    """A model folder is missing, incomplete, malformed or of an unknown architecture."""


class ChunkFileError(NanoVLLMError):
    """A chunk file is truncated, changed, or belongs to another model."""


class TuningFileError(NanoVLLMError):
    """A file of `nanovllm tune` is missing, damaged, or for another GPU, model or version."""


class BrokenInvariantError(NanoVLLMError):
    """`check` found a state that no sequence of calls should reach; the message names the invariant."""
