"""`nanovllm eval-reuse`: what reuse of KV costs in quality, measured on facts and chats against a full prefill of the same tokens."""

from nanovllm.entrypoints.cli.eval_reuse.experiments import evaluate
from nanovllm.entrypoints.cli.eval_reuse.facts import Fact
from nanovllm.entrypoints.cli.eval_reuse.measure import Reading, kl_divergence
from nanovllm.entrypoints.cli.eval_reuse.plot import draw
from nanovllm.entrypoints.cli.eval_reuse.report import Report, Row, table
from nanovllm.entrypoints.cli.eval_reuse.settings import Settings

__all__ = ["Fact", "Reading", "Report", "Row", "Settings", "draw", "evaluate", "kl_divergence", "table"]
