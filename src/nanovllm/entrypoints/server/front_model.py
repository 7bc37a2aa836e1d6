"""What a front end needs of a checkpoint: its tokenizer, its chat template and its sampling options, without the weights."""

from typing import Any

from nanovllm.entrypoints.server.app import Server
from nanovllm.entrypoints.server.engine_client import EngineClient
from nanovllm.entrypoints.server.serving_tokenizer import ReplyFormats
from nanovllm.entrypoints.server.settings import Settings
from nanovllm.loading.hub import resolve_folder
from nanovllm.loading.load_model import read_config, read_generation_config, with_ends
from nanovllm.loading.tokenizer_files import load_tokenizer
from nanovllm.sampling.compiled_grammar import prepare_grammars
from nanovllm.sampling.params import from_generation_config


def load_front(settings: Settings, model: str, options: dict[str, Any]) -> Server:
    """What the functions of a front end share, for a model. It also prepares for grammars, which takes no longer than an engine's start.

    Args:
        settings: The operator's choices.
        model: As in `load_model`.
        options: Options of `LLM`, of which `revision` and `trust_remote_code` are read.

    Raises:
        CheckpointError: The checkpoint cannot be read.
    """
    trusted = bool(options.get("trust_remote_code"))
    folder, _ = resolve_folder(model, revision=options.get("revision"), with_code=trusted)
    _, config = read_config(folder, trust_remote_code=trusted)
    tokenizer = load_tokenizer(folder, config.vocab_size)
    formats = ReplyFormats.of(tokenizer, settings.tool_parser, settings.reasoning_parser)
    shown = formats.shown(tokenizer)
    options_of_model, ends = read_generation_config(folder)
    prepare_grammars(shown, config.vocab_size, with_ends(config, ends).eos_token_ids)
    return Server(
        settings=settings,
        engine=EngineClient(),
        tokenizer=shown,
        formats=formats,
        generation=from_generation_config(options_of_model),
    )
