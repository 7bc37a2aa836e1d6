"""The byte-level BPE of the tiny model, with Qwen3's special tokens and chat format."""

import json
import re
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 4096
END, CHAT_START, CHAT_END, THINK, THINK_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"
# Like Qwen's pattern, but a word includes only a space before it. So a name has the same tokens after a quotation mark or a bracket.
PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# Qwen3's rules: an assistant turn before the last question loses its think block, the turn after it has one, and `enable_thinking=False`
# opens the answer with an empty block.
CHAT_TEMPLATE = """\
{%- set ns = namespace(last_query=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{%- set ns.last_query = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
  {%- if message.role != 'assistant' -%}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
  {%- else -%}
    {%- set content = message.content -%}
    {%- set thought = '' -%}
    {%- if message.reasoning_content is defined and message.reasoning_content is not none -%}
      {%- set thought = message.reasoning_content -%}
    {%- elif '</think>' in content -%}
      {%- set thought = content.split('</think>')[0].split('<think>')[-1] -%}
      {%- set content = content.split('</think>')[-1] -%}
    {%- endif -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- if loop.index0 > ns.last_query -%}
      {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' -}}
    {%- endif -%}
    {{- content.lstrip('\\n') + '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' -}}
  {%- if enable_thinking is defined and enable_thinking is false -%}
    {{- '<think>\\n\\n</think>\\n\\n' -}}
  {%- endif -%}
{%- endif -%}
"""


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Train a byte-level BPE of VOCAB_SIZE tokens on `texts`; every digit is a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_of])  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE - 5, initial_alphabet=alphabet, show_progress=False, min_frequency=2)
    marks = re.compile("|".join(map(re.escape, (END, CHAT_START, CHAT_END, THINK, THINK_END))))
    tokenizer.train_from_iterator([marks.sub("", text) for text in texts], trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in (END, CHAT_START, CHAT_END)])
    # Thinking is shown to users, so its marks are ordinary tokens that are decoded, as in Qwen3.
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in (THINK, THINK_END)])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 2048,
        "eos_token": CHAT_END, "pad_token": END, "bos_token": None, "unk_token": None,
        "add_bos_token": False, "add_prefix_space": False, "clean_up_tokenization_spaces": False, "errors": "replace",
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
