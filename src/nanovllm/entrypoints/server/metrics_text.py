"""Metrics in the text form of Prometheus, with our names or those of vLLM."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from nanovllm.entrypoints.server.engine_metrics import BUCKETS

CONTENT_TYPE = CONTENT_TYPE_LATEST.encode()
Kind = Literal["gauge", "counter", "histogram"]


@dataclass(frozen=True, slots=True)
class Spec:
    """One metric: its key in the engine's figures, its names, and what it means. `vllm` is None if vLLM has no such metric."""

    kind: Kind
    key: str
    name: str
    vllm: str | None
    help: str


SPECS = (
    Spec("gauge", "num_running", "requests_running", "num_requests_running", "Requests that run."),
    Spec("gauge", "num_waiting", "requests_waiting", "num_requests_waiting", "Requests that wait."),
    Spec("gauge", "kv_usage", "kv_cache_usage_ratio", "kv_cache_usage_perc", "The part of the KV pages that are in use, 0 to 1."),
    Spec("gauge", "num_chunks", "chunks", None, "Chunks that clients have named."),
    Spec("counter", "prompt_tokens", "prompt_tokens", "prompt_tokens", "Tokens of prompts, those reused included."),
    Spec("counter", "generation_tokens", "generation_tokens", "generation_tokens", "Tokens of replies."),
    Spec("counter", "queried_tokens", "prefix_queried_tokens", "prefix_cache_queries", "Prompt tokens of requests that have ended."),
    Spec("counter", "hit_tokens", "prefix_hit_tokens", "prefix_cache_hits", "Those of them that were found in memory."),
    Spec("counter", "prefill_tokens", "prefill_tokens", None, "Prompt tokens that were run."),
    Spec("counter", "reused_tokens", "reused_tokens", None, "Prompt tokens whose KV was found in memory, those of chunks included."),
    Spec("counter", "rerun_tokens", "rerun_tokens", None, "Tokens that were run again after a preemption."),
    Spec("counter", "preemptions", "preemptions", "num_preemptions", "How often a running request lost its pages."),
    Spec("counter", "memory_shortages", "memory_shortages", None, "How often a step ran out of device memory."),
    Spec("counter", "offloaded_tokens", "offloaded_tokens", None, "Tokens whose KV was copied to host memory."),
    Spec("counter", "loaded_tokens", "loaded_tokens", None, "Tokens whose KV was copied from host memory."),
    Spec("gauge", "host_pages", "host_pages", None, "Pages of KV that host memory has room for (--host-kv-gib)."),
    Spec("gauge", "host_pages_used", "host_used_pages", None, "Pages of host memory that have KV."),
    Spec("counter", "read_tokens", "disk_read_tokens", None, "Tokens whose KV was read from the disk."),
    Spec("gauge", "disk_bytes", "disk_bytes", None, "Bytes of pages in the folder --kv-dir, other models' included and named chunks not."),
    Spec("counter", "disk_bytes_written", "disk_written_bytes", None, "Bytes of KV that were written to the disk."),
    Spec("counter", "disk_bytes_read", "disk_read_bytes", None, "Bytes of KV that were read from the disk."),
    Spec("counter", "disk_pages_damaged", "disk_damaged_pages", None, "Pages whose file was damaged."),
    Spec("counter", "disk_pages_missed", "disk_missed_pages", None, "Pages whose file had gone when it was read."),
    Spec("counter", "disk_pages_dropped", "disk_dropped_pages", None, "Pages that left host memory before they were written."),
    Spec("counter", "disk_frames_damaged", "disk_damaged_frames", None, "Frames, the KV of layers with a window, whose file was damaged."),
    Spec("counter", "disk_frames_missed", "disk_missed_frames", None, "Frames whose file had gone when it was read."),
    Spec("counter", "disk_frames_dropped", "disk_dropped_frames", None, "Frames that left host memory before they were written."),
    Spec("counter", "disk_errors", "disk_errors", None, "Reads and writes of pages and frames that failed."),
    Spec("counter", "steps", "steps", None, "Steps of the engine."),
    Spec("histogram", "time_to_first_token", "time_to_first_token_seconds", "time_to_first_token_seconds",
         "Seconds from a request's arrival at the engine to its first token."),
    Spec("histogram", "inter_token", "inter_token_latency_seconds", "inter_token_latency_seconds", "Seconds between two tokens."),
    Spec("histogram", "end_to_end", "request_seconds", "e2e_request_latency_seconds", "Seconds from arrival to the last token."),
    Spec("histogram", "queue", "request_queue_seconds", "request_queue_time_seconds", "Seconds from arrival to the first step."),
    Spec("histogram", "prefill", "request_prefill_seconds", "request_prefill_time_seconds", "Seconds from first step to first token."),
    Spec("histogram", "decode", "request_decode_seconds", "request_decode_time_seconds", "Seconds from first to last token."),
    Spec("histogram", "inference", "request_inference_seconds", "request_inference_time_seconds", "Seconds from first to last step."),
    Spec("histogram", "prompt_tokens", "request_prompt_tokens", "request_prompt_tokens", "Tokens of a prompt."),
    Spec("histogram", "reply_tokens", "request_generation_tokens", "request_generation_tokens", "Tokens of a reply."),
)  # fmt: skip


def exposition(figures: Mapping[str, Any], *, names: str, model_name: str) -> bytes:
    """The answer to `GET /metrics`.

    Args:
        figures: What `EngineMetrics.figures` returned.
        names: "nanovllm": our own names. "vllm": those of vLLM where it has such a metric, and ours elsewhere.
        model_name: The model's name for clients.
    """
    return generate_latest(_Collected(families(figures, names=names, model_name=model_name)))  # pyright: ignore[reportArgumentType]


class _Collected:
    """Families as `generate_latest` takes them."""

    def __init__(self, found: Iterator[Metric]) -> None:
        self._found = found

    def collect(self) -> Iterator[Metric]:
        """The families."""
        return self._found


def families(figures: Mapping[str, Any], *, names: str, model_name: str) -> Iterator[Metric]:
    """The metrics one by one, as in `exposition`."""
    vllm = names == "vllm"
    fixed = {"model_name": model_name, **({"engine": "0"} if vllm else {})}
    labels, values = tuple(fixed), tuple(fixed.values())

    def named(ours: str, theirs: str | None) -> str:
        return f"vllm:{theirs}" if vllm and theirs is not None else f"nanovllm_{ours}"

    pages: Mapping[str, int] = figures["pages"]
    total = sum(pages.values())
    plain = {**figures, "kv_usage": (pages["running"] + pages["chunks"]) / total}
    for spec in SPECS:
        name = named(spec.name, spec.vllm)
        if spec.kind == "histogram":
            family = HistogramMetricFamily(name, spec.help, labels=labels)
            counts, added = figures["histograms"][spec.key]
            edges = [*(f"{float(edge)!r}" for edge in BUCKETS[spec.key]), "+Inf"]
            family.add_metric(values, [*zip(edges, accumulate(counts), strict=True)], sum_value=added)
        else:
            family = (GaugeMetricFamily if spec.kind == "gauge" else CounterMetricFamily)(name, spec.help, labels=labels)
            family.add_metric(values, plain[spec.key])
        yield family
    ended = CounterMetricFamily(
        named("requests_finished", "request_success"), "Requests that have ended, by reason.", labels=(*labels, "finished_reason")
    )  # fmt: skip
    for reason, count in figures["finished"].items():
        ended.add_metric((*values, reason), count)
    yield ended
    owners = GaugeMetricFamily(
        "nanovllm_pages", "KV pages by owner: running requests, chunks, the index alone, none.", labels=(*labels, "owner")
    )
    for owner, count in pages.items():
        owners.add_metric((*values, owner), count)
    yield owners
    if vllm:
        info = GaugeMetricFamily("vllm:cache_config_info", "The engine's KV memory.", labels=(*labels, "block_size", "num_gpu_blocks"))
        info.add_metric((*values, str(figures["page_size"]), str(total)), 1)
        yield info
    prefix = "" if vllm else "nanovllm_"
    told = ("handler", "method", "status")
    answers = CounterMetricFamily(f"{prefix}http_requests", "HTTP requests by path, method and status.", labels=told)
    seconds = CounterMetricFamily(f"{prefix}http_request_seconds", "Seconds of these requests together.", labels=told)
    for path, method, status, count, spent in figures["http"]:
        for family, value in ((answers, count), (seconds, spent)):
            family.add_metric((path, method, str(status)), value)
    yield answers
    yield seconds
