"""Reads what a checkpoint's config says about quantisation. What cannot be loaded is refused by name."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanovllm.errors import CheckpointError
from nanovllm.loading.hub import naming, read_json
from nanovllm.loading.quantisation.awq import Awq
from nanovllm.loading.quantisation.formats import MatrixFormat
from nanovllm.loading.quantisation.gptq import Gptq
from nanovllm.loading.quantisation.packed_words import PackedWords
from nanovllm.loading.quantisation.scaled_codes import ScaledCodes

HF = Mapping[str, Any]
READ = (
    "fp8, compressed-tensors, gptq and awq checkpoints can be loaded; or load the unquantised checkpoint with "
    "quantization='fp8', 'int8' or 'int4'"
)
GPTQ_FILE, MODELOPT_FILE = "quantize_config.json", "hf_quant_config.json"
# Scales for all KV of a layer, which nobody reads: KV in FP8 has finer ones here, of each token and head, made when it is written.
KV_SCALES = (".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".output_scale")
LONGEST_PATTERN = 500  # characters of a regular expression of the config
MOST_REPEATS = 5  # in such an expression: each may multiply the time of a search by the length of a name
REPEATED_GROUP = re.compile(r"\)[*+{]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantisation:
    """How a checkpoint's matrices are quantised.

    Attributes:
        method: The `quant_method`, such as `"gptq"`.
        format_of: The format of a module by its name; None if the config does not quantise it.
        extra: Suffixes of tensors that such checkpoints also hold and that the weights do not depend on.
        biases: Whether the checkpoint may hold biases of zeros that the architecture does not have.
        source: The name of the file that says so.
    """

    method: str
    format_of: Callable[[str], MatrixFormat | None]
    extra: tuple[str, ...] = ()
    biases: bool = False
    source: str = "config.json"

    @property
    def remedy(self) -> str:
        """What to do about tensors that do not fit."""
        again = ", or run `nanovllm quantize` again" if self.method == "compressed-tensors" else ""
        return f"copy or download the folder again, {self.source} included{again}"


def read_quantisation(hf: HF, folder: Path) -> Quantisation | None:
    """Read what a `config.json`, or a file of an older tool beside it, says about quantisation; None if nothing does.

    Raises:
        CheckpointError: The weights are quantised in a way that cannot be loaded.
    """
    with naming(folder):
        return _read(hf, folder)


def _read(hf: HF, folder: Path) -> Quantisation | None:
    config = hf.get("quantization_config") or hf.get("compression_config")
    if not config and (folder / GPTQ_FILE).is_file():
        with naming(folder, GPTQ_FILE):
            return replace(_gptq({"quant_method": "gptq", **read_json(folder / GPTQ_FILE)}), source=GPTQ_FILE)
    if not config and (folder / MODELOPT_FILE).is_file():
        raise CheckpointError(f"{folder / MODELOPT_FILE}: checkpoints of ModelOpt are not supported: {READ}")
    if not config:
        return None
    if not isinstance(config, Mapping):
        raise CheckpointError(f"config.json: quantization_config={config!r} is not an object")
    method = config.get("quant_method")
    match method:
        case "fp8":
            return _fp8(config)
        case "compressed-tensors":
            return _compressed(config)
        case "gptq":
            return _gptq(config)
        case "awq":
            return _awq(config)
        case _:
            raise CheckpointError(f"config.json: quant_method={method!r} is not supported: {READ}")


def _fp8(config: HF) -> Quantisation:
    block, fmt = config.get("weight_block_size"), config.get("fmt", "e4m3")
    if fmt not in ("e4m3", "float8_e4m3fn"):
        raise _refused(config, "fmt", "is not e4m3")
    if config.get("expert_dtype") not in (None, "fp8"):
        raise _refused(config, "expert_dtype", "is not fp8")
    if block is None:
        return Quantisation(method="fp8", format_of=_always(ScaledCodes(rows=0)), extra=KV_SCALES)
    if not _sizes(block):
        raise _refused(config, "weight_block_size", "is not two positive integers")
    return Quantisation(
        method="fp8", format_of=_always(ScaledCodes(rows=block[0], columns=block[1], scale="weight_scale_inv")), extra=KV_SCALES
    )


def _gptq(config: HF) -> Quantisation:
    return Quantisation(method="gptq", format_of=_overridden(config), biases=True)


def _gptq_format(config: HF) -> Gptq:
    bits, version = config.get("bits"), config.get("checkpoint_format") or config.get("format") or "gptq"
    if isinstance(bits, bool) or bits not in (4, 8):
        raise _refused(config, "bits", "is neither 4 nor 8")
    if version not in ("gptq", "gptq_v2"):
        raise CheckpointError(f"config.json: quantization_config has checkpoint_format={version!r}, expected gptq or gptq_v2: {READ}")
    symmetric = config.get("sym", True)
    if not isinstance(symmetric, bool):
        raise _refused(config, "sym", "is not true or false")
    return Gptq(bits=bits, group=_group(config), symmetric=symmetric, version=1 if version == "gptq" else 2)


def _overridden(config: HF) -> Callable[[str], MatrixFormat | None]:
    """GPTQModel's `dynamic`: for the modules of a pattern, other settings (`+:`, or no sign) or none (`-:`)."""
    usual, dynamic = _gptq_format(config), config.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise _refused(config, "dynamic", "is not an object")
    rules: list[tuple[re.Pattern[str], MatrixFormat | None]] = []
    for pattern, values in dynamic.items():
        skip = pattern.startswith("-:")
        changed = None if skip else _gptq_format({**config, **(values if isinstance(values, Mapping) else {})})
        rules.append((_pattern(pattern.removeprefix("-:").removeprefix("+:")), changed))

    def format_of(module: str) -> MatrixFormat | None:
        return next((made for pattern, made in rules if pattern.match(module)), usual)

    return format_of


def _awq(config: HF) -> Quantisation:
    version = str(config.get("version", "gemm")).lower()
    if config.get("bits", 4) != 4:
        raise _refused(config, "bits", "is not 4")
    if version != "gemm":
        raise _refused(config, "version", "is not gemm")
    zeros = config.get("zero_point", True)
    if not isinstance(zeros, bool):
        raise _refused(config, "zero_point", "is not true or false")
    return Quantisation(method="awq", format_of=_always(Awq(group=_group(config), zeros=zeros)))


def _compressed(config: HF) -> Quantisation:
    kv_only = bool(config.get("kv_cache_scheme")) and not config.get("config_groups")  # then the weights are plain
    groups = {} if kv_only else config.get("config_groups")
    if config.get("sparsity_config") and config["sparsity_config"].get("format", "dense") != "dense":
        raise _refused(config, "sparsity_config", "is not dense")
    transforms = config.get("transform_config")
    if transforms.get("config_groups", transforms) if isinstance(transforms, Mapping) else transforms:
        raise CheckpointError(
            "config.json: quantization_config has a transform_config: rotations of activations (QuIP, SpinQuant) are not supported; "
            "load a checkpoint without transforms, or the unquantised one with quantization='fp8', 'int8' or 'int4'"
        )
    if not isinstance(groups, Mapping) or not (groups or kv_only):
        raise _refused(config, "config_groups", "has no groups")
    rules = []
    for name, group in groups.items():
        targets = group.get("targets") if isinstance(group, Mapping) else None
        if not isinstance(targets, Sequence) or isinstance(targets, str) or not all(isinstance(each, str) for each in targets):
            raise CheckpointError(f"config.json: quantization_config: {name} has targets={targets!r}, expected a list of strings")
        if group.get("weights") is not None:
            rules.append(
                ([_target(each) for each in targets], _compressed_format(name, group, group.get("format") or config.get("format")))
            )
    ignored = [_target(each) for each in config.get("ignore") or ()]

    def format_of(module: str) -> MatrixFormat | None:
        if any(each(module) for each in ignored):
            return None
        return next((made for targets, made in rules if any(each(module) for each in targets)), None)

    return Quantisation(method="compressed-tensors", format_of=format_of, extra=KV_SCALES)


def _compressed_format(name: str, group: HF, stored: Any) -> MatrixFormat:
    weights = group["weights"]
    bits, kind, strategy = weights.get("num_bits"), weights.get("type", "int"), weights.get("strategy")
    size, block, symmetric = weights.get("group_size"), weights.get("block_structure"), weights.get("symmetric", True)
    where = f"config.json: quantization_config: {name} has"
    if strategy is None:
        strategy = "group" if size not in (None, -1) else "channel" if size == -1 else "tensor"
    wide = 0 if strategy in ("channel", "tensor") or size in (None, -1) else size
    grouped = strategy == "group" and size != -1
    if (wide or grouped) and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise CheckpointError(f"{where} group_size={size!r}, expected a positive integer or -1")
    match (stored, kind, bits):
        case ("pack-quantized", "int", 4 | 8) if strategy in ("channel", "group", "tensor"):
            if strategy == "tensor":
                raise CheckpointError(f"{where} packed weights with a scale per tensor: {READ}")
            return PackedWords(bits=bits, group=wide, zeros=not symmetric)
        case ("float-quantized" | "naive-quantized", "float", 8):
            dtype, zeros = "F8_E4M3", False
        case ("int-quantized" | "naive-quantized", "int", 8):
            dtype, zeros = "I8", not symmetric
        case _:
            raise CheckpointError(f"{where} format={stored!r} with num_bits={bits!r} and type={kind!r}, which is not supported: {READ}")
    match strategy:
        case "tensor":
            return ScaledCodes(dtype=dtype, rows=0, zeros=zeros)
        case "channel" | "group":
            return ScaledCodes(dtype=dtype, columns=wide, zeros=zeros)
        case "block" if _sizes(block):
            return ScaledCodes(dtype=dtype, rows=block[0], columns=block[1], zeros=zeros)
        case _:
            raise CheckpointError(f"{where} strategy={strategy!r} with block_structure={block!r}, which is not supported: {READ}")


def _target(text: str) -> Callable[[str], bool]:
    """Whether a module is meant by `text`: `re:` and a pattern, its name, or `Linear`, which means all."""
    if text.startswith("re:"):
        pattern = _pattern(text.removeprefix("re:"))
        return lambda module: pattern.match(module) is not None
    return lambda module: text in ("Linear", module)


def _pattern(text: str) -> re.Pattern[str]:
    """Compile a regular expression that cannot take long to search. Raises `CheckpointError`."""
    shown = f"config.json: quantization_config: the pattern {text[:100]!r}"
    if len(text) > LONGEST_PATTERN or REPEATED_GROUP.search(text) or sum(map(text.count, "*+{")) > MOST_REPEATS:
        raise CheckpointError(f"{shown} is too long, repeats a group, or has more than {MOST_REPEATS} repeats")
    try:
        return re.compile(text)
    except re.error as error:
        raise CheckpointError(f"{shown} is not a regular expression: {error}") from None


def _group(config: HF) -> int:
    size = config.get("group_size", config.get("q_group_size", -1))
    if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
        raise _refused(config, "group_size", "is not a positive integer or -1")
    return max(size, 0)


def _sizes(block: Any) -> bool:
    return isinstance(block, Sequence) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)


def _always(made: MatrixFormat) -> Callable[[str], MatrixFormat | None]:
    return lambda module: made


def _refused(config: HF, key: str, why: str) -> CheckpointError:
    return CheckpointError(f"config.json: quantization_config has {key}={config.get(key)!r}, which {why}: {READ}")
