"""`DiskCounts`: what was read from the disk and written to it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskCounts:
    """What a disk tier has done since its start.

    Attributes:
        pages_written: Pages that were written.
        bytes_written: Their bytes.
        pages_read: Pages that were read and whole.
        bytes_read: Their bytes.
        pages_missed: Pages that were not there any more when they were read.
        pages_damaged: Pages whose file was damaged. The files are deleted.
        pages_dropped: Pages that left host memory before they were written, or were about to leave when their turn came.
        frames_written: Frames that were written, in a model with frames apart from pages, because some layers have a sliding window.
        frames_read: Frames that were read and whole. `bytes_written` and `bytes_read` have the bytes of pages and frames.
        frames_missed: Frames that were not there any more when they were read.
        frames_damaged: Frames whose file was damaged. The files are deleted.
        frames_dropped: Frames that left host memory before they were written, or were about to leave when their turn came.
        errors: Reads and writes that failed, such as on a full disk, or for which the system gave no thread.

    Examples:
        >>> from nanovllm.executor.disk_counts import DiskCounts
        >>> DiskCounts(pages_read=2).pages_read
        2
    """

    pages_written: int = 0
    bytes_written: int = 0
    pages_read: int = 0
    bytes_read: int = 0
    pages_missed: int = 0
    pages_damaged: int = 0
    pages_dropped: int = 0
    frames_written: int = 0
    frames_read: int = 0
    frames_missed: int = 0
    frames_damaged: int = 0
    frames_dropped: int = 0
    errors: int = 0
