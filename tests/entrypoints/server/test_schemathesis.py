"""schemathesis sends what the OpenAPI document allows, and what it forbids, and holds every answer against the document.

For each operation these are its example, all boundary values that the document tells of its fields, and a few drawn values.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanovllm.entrypoints.server.settings import Settings
from tests.entrypoints.server.live import Live

# These two do not hold. Values may be refused for bounds that no schema tells, such as those of the vocabulary and of fields that exclude
# each other. And `/chunks/compose` is also the path of a chunk of that name, so that it allows more methods than the document lists for it.
NOT_HELD = "positive_data_acceptance,allow_header_conformance"
OPTIONS = (
    "--phases", "examples,coverage,fuzzing", "--max-examples", "8", "--generation-deterministic", "--no-shrink", "--continue-on-failure",
    "--exclude-checks", NOT_HELD, "--suppress-health-check", "all", "--request-timeout", "240", "--output-sanitize", "false", "--no-color",
)  # fmt: skip
LARGE = ("completions", "chat/completions", "responses")


@pytest.fixture(scope="module")
def any_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server that takes requests for models of any name, and saves chunks."""
    folder: Path = tmp_path_factory.mktemp("chunks")
    with Live(settings=Settings(any_model_name=True, chunk_dir=folder, shutdown_seconds=1.0)) as server:
        yield server


@pytest.mark.unhooked
@pytest.mark.parametrize("which", [*LARGE, "all others"])
def test_answers_are_as_the_document_says(any_model: Live, which: str, tmp_path: Path):
    base, aliases = f"http://127.0.0.1:{any_model.port}", "/(completions|chat|responses|models|chunks)"  # of the same functions under /v1
    others = ["--exclude-path-regex", f"^{aliases}|^/v1/({'|'.join(LARGE)})$"]
    chosen = others if which == "all others" else ["--include-path", f"/v1/{which}"]
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{base}/openapi.json", *OPTIONS, *chosen]
    given = {"SERVED": base, "SCHEMATHESIS_HOOKS": "schemathesis_hooks", "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **given}, cwd=tmp_path, check=False)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert int(re.findall(r"(\d+) generated", done.stdout)[0]) > 300
    any_model.wait_until_idle()
