"""Run the notebooks of examples/ and write their outputs into them: `make notebooks`.

What differs from run to run is left out, so that a notebook changes only if what it shows does.
"""

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

EXAMPLES = Path(__file__).parents[1] / "examples"
SECONDS = 120


def executed(path: Path) -> NotebookNode:
    """A notebook after all of its cells have run in a new kernel, without accelerator.

    Raises:
        nbclient.exceptions.CellExecutionError: A cell has failed.
    """
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "JUPYTER_PLATFORM_DIRS": "1"}
    with tempfile.TemporaryDirectory() as folder:  # for sockets, so that no port is open meanwhile
        client = NotebookClient(notebook, kernel_name="python3", timeout=SECONDS, startup_timeout=SECONDS, record_timing=False)
        manager = client.create_kernel_manager()
        manager.transport, manager.ip = "ipc", f"{folder}/kernel"
        client.execute(env=environment)
    return cleaned(notebook)


def cleaned(notebook: NotebookNode) -> NotebookNode:
    """The notebook without what depends on the machine."""
    notebook.metadata = NotebookNode(
        kernelspec=NotebookNode(display_name="Python 3", language="python", name="python3"), language_info=NotebookNode(name="python")
    )
    for cell in notebook.cells:
        cell.metadata = NotebookNode()
        if cell.cell_type == "code":
            cell.outputs = _joined(cell.outputs)
    return notebook


def _joined(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Outputs without the times that texts beside HTML tell, and with what was printed in one piece, whenever it came."""
    found = list[NotebookNode]()
    for output in outputs:
        if output.output_type == "stream" and found and found[-1].get("name") == output.name:
            found[-1].text += output.text
            continue
        if "text/html" in output.get("data", ()):
            output.data.pop("text/plain", None)
        found.append(output)
    return found


def main() -> None:
    """Run those that are named, or all."""
    for path in map(Path, sys.argv[1:]) if sys.argv[1:] else sorted(EXAMPLES.glob("*.ipynb")):
        nbformat.write(executed(path), path)
        print(f"written: {path.name}")


if __name__ == "__main__":
    main()
