"""Packages are imported in threads, which fail quietly, and Triton hashes its files once."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

PROGRAM = """
import sys
from nanovllm.ops.import_ahead import import_ahead, wait_for_triton
wait_for_triton()  # there is nothing to wait for
assert "triton.runtime" not in sys.modules
threads = import_ahead()
wait_for_triton()
from triton.runtime.cache import triton_key
triton_key()
print(triton_key.cache_info().misses)
from nanovllm.ops.sampling import triton_sampling
assert triton_sampling._draw_kernel.hash is not None
for thread in threads:
    thread.join()
print(len(threads))
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_triton_is_imported_and_has_hashed_itself(tmp_path: Path) -> None:
    """FlashInfer is a package that raises an error when it is imported."""
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer" / "__init__.py").write_text("raise ZeroDivisionError")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{PROGRAM}"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=True)
    assert (done.stdout, done.stderr) == ("1\n2\n", "")
