"""Where another Python process finds the modules that this one finds."""

import os
import sys


def import_paths() -> str:
    """`sys.path`, as changed by this program, as a value of `PYTHONPATH`. The process should run with `-P`, to look nowhere else first.

    An empty entry, as of an interpreter or with `-c`, is the current folder. It is left out if that was deleted.
    """
    return os.pathsep.join(filter(None, (path or _current_folder() for path in sys.path)))


def _current_folder() -> str:
    try:
        return os.getcwd()
    except OSError:
        return ""
