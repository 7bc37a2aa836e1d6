"""nanovllm: a language-model inference engine for one GPU, written as a functional program.

The model is a pure function of `(params, KVState, batch)`; KV pages and chunks are values that the caller threads. `LLM` is the shell for
those who just want text.
"""

from .batch import Batch
from .chunk_file import load_chunk, save_chunk
from .chunks import fork, prefill, release, truncate
from .compose import compose, drop
from .config import EngineConfig, ModelConfig, RopeConfig
from .decode import DecodeCarry, DecodeOutput, decode_step
from .engine import cancel, step, submit
from .errors import (
    BrokenInvariantError,
    CheckpointError,
    ChunkFileError,
    DonatedStateError,
    ForeignChunkError,
    InvalidRequestError,
    NanoVLLMError,
    OutOfPagesError,
    ReleasedChunkError,
    TuningFileError,
)
from .generate import Generation, generate, generate_many
from .init import init_state
from .invariants import check
from .llm import LLM, Piece
from .memory import MemoryReport, PageOwner, PageRun, memory
from .model import Model, load_model
from .models import Params, forward
from .sampling_params import SamplingParams
from .session import begin, commit
from .state.chunk import Chunk
from .state.engine_state import EngineState, Stats
from .state.kv import KVState
from .state.pages import PageState
from .state.prefix import PrefixIndex
from .state.request import Metrics, RequestOutput, StepOutput, TokenLogprobs
from .state.store import ChunkStore

__all__ = [
    "LLM",
    "Batch",
    "BrokenInvariantError",
    "CheckpointError",
    "Chunk",
    "ChunkFileError",
    "ChunkStore",
    "DecodeCarry",
    "DecodeOutput",
    "DonatedStateError",
    "EngineConfig",
    "EngineState",
    "ForeignChunkError",
    "Generation",
    "InvalidRequestError",
    "KVState",
    "MemoryReport",
    "Metrics",
    "Model",
    "ModelConfig",
    "NanoVLLMError",
    "OutOfPagesError",
    "PageOwner",
    "PageRun",
    "PageState",
    "Params",
    "Piece",
    "PrefixIndex",
    "ReleasedChunkError",
    "RequestOutput",
    "RopeConfig",
    "SamplingParams",
    "Stats",
    "StepOutput",
    "TokenLogprobs",
    "TuningFileError",
    "begin",
    "cancel",
    "check",
    "commit",
    "compose",
    "decode_step",
    "drop",
    "fork",
    "forward",
    "generate",
    "generate_many",
    "init_state",
    "load_chunk",
    "load_model",
    "memory",
    "prefill",
    "release",
    "save_chunk",
    "step",
    "submit",
    "truncate",
]
