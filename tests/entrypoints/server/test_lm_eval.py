"""lm-eval's `local-completions` on a task of our own, against a live server: its scores are those of the library.

`make test` installs the extra `lm-eval`, whose 50 packages have 620 MB; `make setup` does not. `test_logprobs.py` sends the same requests
without it.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import nanovllm as nv
from tests.entrypoints.server.live import Live

pytestmark = [
    pytest.mark.unhooked,
    pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed: pip install -e '.[lm-eval]', 620 MB"),
]
KING = "The king of Aistonia is Oswin. The capital of Aistonia is Velmora."
QUESTIONS: list[dict[str, Any]] = [
    {"context": f"{KING} The king of Aistonia is", "choices": [" Velmora.", " Oswin.", " a cat."], "answer": 1},
    {"context": f"{KING} The capital of Aistonia is", "choices": [" Velmora.", " Oswin.", " a cat."], "answer": 0},
    {"context": "Once upon a time, there was a", "choices": [" the was and", " little girl named", " of seven"], "answer": 1},
    {"context": "Once upon", "choices": [" a time,", " the stone.", " no."], "answer": 0},
]
TASK = """
task: facts
dataset_path: json
dataset_kwargs:
  data_files: {test: DATA}
test_split: test
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_target: answer
doc_to_choice: choices
target_delimiter: ""
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""


def test_scores_of_lm_eval_are_those_of_the_library(live: Live, tmp_path: Path):
    data, out = tmp_path / "facts.jsonl", tmp_path / "out"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    (tmp_path / "facts.yaml").write_text(TASK.replace("DATA", str(data)))
    served = f"model=tiny,base_url=http://127.0.0.1:{live.port}/v1/completions,max_length=1024,num_concurrent=2"
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--batch_size", "4", "--include_path", str(tmp_path)]
    command += ["--tasks", "facts", "--model_args", served, "--log_samples", "--output_path", str(out)]
    env = {**os.environ, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (samples,), (results,) = out.rglob("samples_facts_*.jsonl"), out.rglob("results_*.json")
    assert json.loads(results.read_text())["results"]["facts"]["acc,none"] == 1.0
    found = {line["doc"]["context"]: line["resps"] for line in map(json.loads, samples.read_text().splitlines())}
    llm = nv.LLM(live.model, num_pages=64)
    for question in QUESTIONS:
        wanted = llm.score([question["context"]] * 3, question["choices"], top_logprobs=1)
        for ((told, greedy),), score in zip(found[question["context"]], wanted, strict=True):
            assert float(told) == pytest.approx(score.total, abs=1e-4)
            assert str(greedy) == str(score.token_ids == score.top_ids[:, 0].tolist())
