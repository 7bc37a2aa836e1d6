"""A process with llama.cpp for `cpu_quantised.py`, which starts it in an environment with llama-cpp-python and gguf, without nanovllm.

    python llama_cpp_steps.py write FILE q8_0|q4_0 SHAPES    # a model with random weights, SHAPES in JSON
    python llama_cpp_steps.py run FILE THREADS

`run` prints what its build supports, then answers each line `ROWS STEPS` with the seconds of that many decode steps, as JSON.
"""

import json
import sys
import time
from typing import Any

CONTEXT = 2048  # tokens of all sequences together


def write(file: str, kind: str, shape: dict[str, Any]) -> None:
    """Write a Qwen3 model with random weights, all matrices in one format."""
    import gguf
    import numpy as np

    random, kept = np.random.default_rng(0), gguf.GGMLQuantizationType[kind.upper()]
    hidden, head_dim, layers = shape["hidden"], shape["head_dim"], shape["layers"]
    writer = gguf.GGUFWriter(file, "qwen3")
    writer.add_context_length(4096)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(shape["intermediate"])
    writer.add_head_count(shape["heads"])
    writer.add_head_count_kv(shape["kv_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(shape["theta"])
    writer.add_layer_norm_rms_eps(shape["eps"])
    writer.add_vocab_size(shape["vocab"])
    writer.add_tokenizer_model("no_vocab")

    def matrix(name: str, height: int, width: int) -> None:
        weight = random.standard_normal((height, width), dtype=np.float32) * np.float32(0.02)
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(weight, kept), raw_dtype=kept)

    def gain(name: str, width: int) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(width, np.float32))

    matrix("token_embd", shape["vocab"], hidden)
    gain("output_norm", hidden)
    for number in range(layers):
        block = f"blk.{number}"
        for name, width in (("attn_norm", hidden), ("ffn_norm", hidden), ("attn_q_norm", head_dim), ("attn_k_norm", head_dim)):
            gain(f"{block}.{name}", width)
        matrix(f"{block}.attn_q", shape["heads"] * head_dim, hidden)
        matrix(f"{block}.attn_k", shape["kv_heads"] * head_dim, hidden)
        matrix(f"{block}.attn_v", shape["kv_heads"] * head_dim, hidden)
        matrix(f"{block}.attn_output", hidden, shape["heads"] * head_dim)
        matrix(f"{block}.ffn_gate", shape["intermediate"], hidden)
        matrix(f"{block}.ffn_up", shape["intermediate"], hidden)
        matrix(f"{block}.ffn_down", hidden, shape["intermediate"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def run(file: str, threads: int) -> None:
    """Answer requests for decode steps."""
    import llama_cpp as cpp

    cpp.llama_backend_init()
    model_options = cpp.llama_model_default_params()
    model_options.use_mmap = False
    model = cpp.llama_model_load_from_file(file.encode(), model_options)
    contexts: dict[int, list[Any]] = {}
    print(json.dumps({"version": cpp.__version__, "build": cpp.llama_print_system_info().decode().strip()}), flush=True)
    for line in sys.stdin:
        rows, count = map(int, line.split())
        if rows not in contexts:
            options = cpp.llama_context_default_params()
            options.n_ctx, options.n_batch, options.n_seq_max, options.kv_unified = CONTEXT, 512, rows, True
            options.n_threads = options.n_threads_batch = threads
            contexts[rows] = [cpp.llama_init_from_model(model, options), 0]
        context, position = contexts[rows]
        batch, seconds = cpp.llama_batch_init(rows, 0, 1), []
        for step in range(position, position + count):
            batch.n_tokens = rows
            for row in range(rows):
                batch.token[row], batch.pos[row], batch.n_seq_id[row], batch.logits[row] = 17 * step + row, step, 1, 1
                batch.seq_id[row][0] = row
            start = time.perf_counter()
            failed = cpp.llama_decode(context, batch)
            cpp.llama_synchronize(context)
            seconds.append(time.perf_counter() - start)
            assert not failed, f"llama_decode returned {failed}"
        contexts[rows][1] += count
        cpp.llama_batch_free(batch)
        print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(sys.argv[2], sys.argv[3], json.loads(sys.argv[4]))
    else:
        run(sys.argv[2], int(sys.argv[3]))
