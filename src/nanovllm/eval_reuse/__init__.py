"""`nanovllm eval-reuse`: what reuse of KV costs in quality, measured on facts and chats against a full prefill of the same tokens."""

from .experiments import evaluate
from .facts import Fact
from .measure import Reading, kl_divergence
from .plot import draw
from .report import Report, Row, table
from .settings import Settings

__all__ = ["Fact", "Reading", "Report", "Row", "Settings", "draw", "evaluate", "kl_divergence", "table"]
