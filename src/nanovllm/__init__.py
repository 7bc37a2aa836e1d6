"""nanovllm: a language-model inference engine for one GPU or a few, written as a functional program.

The model is a pure function of `(params, KVState, batch)`. KV pages and chunks are values: every call takes the engine's state and returns
the next one. `LLM` wraps all of this for programs that only need text.
"""

from nanovllm.chunks.compose import compose, drop
from nanovllm.chunks.generate import generate, generate_many
from nanovllm.chunks.generation import Generation
from nanovllm.chunks.handles import fork, release, truncate
from nanovllm.chunks.loop import decode_loop
from nanovllm.chunks.offload import offload
from nanovllm.chunks.prefill import prefill
from nanovllm.chunks.score import score
from nanovllm.chunks.session import abandon, begin, commit
from nanovllm.chunks.storage.file import load_chunk, save_chunk
from nanovllm.chunks.storage.store import ChunkStore
from nanovllm.config import EngineConfig, Mesh, ModelConfig, RopeConfig
from nanovllm.engine.constrained import compile_grammar
from nanovllm.engine.disk_flush import flush_kv
from nanovllm.engine.init_state import init_state
from nanovllm.engine.requests import cancel, submit
from nanovllm.engine.step import step
from nanovllm.entrypoints.async_llm import AsyncLLM
from nanovllm.entrypoints.llm import LLM
from nanovllm.entrypoints.memory.pages import DiskReport, PageOwner, PageRun
from nanovllm.entrypoints.memory.report import MemoryReport, memory
from nanovllm.entrypoints.stream import Piece, Stream
from nanovllm.errors import (
    BrokenInvariantError,
    CaptureError,
    CheckpointError,
    ChunkExistsError,
    ChunkFileError,
    ChunkLimitError,
    ChunkMismatchError,
    DonatedStateError,
    EngineClosedError,
    EngineDeadError,
    ForeignChunkError,
    InvalidRequestError,
    NanoVLLMError,
    OutOfPagesError,
    QueueFullError,
    ReleasedChunkError,
    RequestFailedError,
    TuningFileError,
    UnknownChunkError,
)
from nanovllm.executor.branches import split_rows
from nanovllm.executor.capture import capture
from nanovllm.executor.decode import decode_step
from nanovllm.executor.decode_carry import DecodeCarry, DecodeOutput
from nanovllm.loading.load_model import load_model
from nanovllm.models.common.batch import Batch
from nanovllm.models.common.params import Params
from nanovllm.models.model import Model
from nanovllm.models.registry import forward
from nanovllm.ops.distributed.process_group import make_mesh
from nanovllm.sampling.grammar import Grammar
from nanovllm.sampling.params import SamplingParams
from nanovllm.sampling.process_logits import LogitsProcessor, TokensSoFar
from nanovllm.state.chunk import Chunk
from nanovllm.state.engine_state import EngineState, Stats
from nanovllm.state.invariants import check
from nanovllm.state.kv_cache import KVState
from nanovllm.state.logprobs import Score, TokenLogprobs
from nanovllm.state.pages import PageState
from nanovllm.state.prefix_cache import PrefixIndex
from nanovllm.state.request import Metrics, RequestOutput, StepOutput

__all__ = [
    "LLM",
    "AsyncLLM",
    "Batch",
    "BrokenInvariantError",
    "CaptureError",
    "CheckpointError",
    "Chunk",
    "ChunkExistsError",
    "ChunkFileError",
    "ChunkLimitError",
    "ChunkMismatchError",
    "ChunkStore",
    "DecodeCarry",
    "DecodeOutput",
    "DiskReport",
    "DonatedStateError",
    "EngineClosedError",
    "EngineConfig",
    "EngineDeadError",
    "EngineState",
    "ForeignChunkError",
    "Generation",
    "Grammar",
    "InvalidRequestError",
    "KVState",
    "LogitsProcessor",
    "MemoryReport",
    "Mesh",
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
    "QueueFullError",
    "ReleasedChunkError",
    "RequestFailedError",
    "RequestOutput",
    "RopeConfig",
    "SamplingParams",
    "Score",
    "Stats",
    "StepOutput",
    "Stream",
    "TokenLogprobs",
    "TokensSoFar",
    "TuningFileError",
    "UnknownChunkError",
    "abandon",
    "begin",
    "cancel",
    "capture",
    "check",
    "commit",
    "compile_grammar",
    "compose",
    "decode_loop",
    "decode_step",
    "drop",
    "flush_kv",
    "fork",
    "forward",
    "generate",
    "generate_many",
    "init_state",
    "load_chunk",
    "load_model",
    "make_mesh",
    "memory",
    "offload",
    "prefill",
    "release",
    "save_chunk",
    "score",
    "split_rows",
    "step",
    "submit",
    "truncate",
]
