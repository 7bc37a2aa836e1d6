"""The tuning files of the package. An engine uses one if its user's cache has no file.

Such a file is for a GPU, a dtype and the shapes of a model. It names no versions and no hash of the kernels' sources, because an edit of a
kernel would switch it off unseen. Edits can make its tile configurations slower than the defaults. They cannot make them wrong: every one
is validated when it is read, and kernels that cannot be built with it are built with the defaults.
"""

from pathlib import Path

from nanovllm.models.model import Model
from nanovllm.models.tuning.file import file_name, target_of

FOLDER = Path(__file__).parents[2] / "assets" / "tuning"


def shipped_path(model: Model) -> Path | None:
    """The package's file for a model on its GPU, or None. Files are found by name, so a start takes no longer with many of them."""
    path = FOLDER / file_name(target_of(model))
    return path if path.exists() else None
