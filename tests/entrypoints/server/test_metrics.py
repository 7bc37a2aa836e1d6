"""`/metrics`: what was measured is what happened, in the form that Prometheus reads, with names that the dashboards ask for."""

import hashlib
import json
import re
import threading
import time
from bisect import bisect_left
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

import nanovllm as nv
from nanovllm.entrypoints.server.answer_counts import AnswerCounts
from nanovllm.entrypoints.server.engine_metrics import BUCKETS, GAPS, MOST_HTTP, EngineMetrics, Histogram, Timeline
from nanovllm.entrypoints.server.held import Held
from nanovllm.entrypoints.server.memory_calls import memory
from nanovllm.entrypoints.server.named_chunks import NamedChunks
from nanovllm.entrypoints.server.settings import Settings
from nanovllm.executor.disk_counts import DiskCounts
from nanovllm.executor.executor import runtime_of
from nanovllm.state.request import Queue
from nanovllm.testing.models import random_model, tiny_config
from tests.entrypoints.server.live import Live

ROOT = Path(__file__).parents[3]
BODY: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 10, "temperature": 0}
# The metrics of vLLM's own dashboards, in its folder examples/observability (2026)
DASHBOARD = [
    "e2e_request_latency_seconds_bucket",
    "e2e_request_latency_seconds_sum",
    "e2e_request_latency_seconds_count",
    "prompt_tokens_total",
    "generation_tokens_total",
    "inter_token_latency_seconds_bucket",
    "inter_token_latency_seconds_sum",
    "inter_token_latency_seconds_count",
    "num_requests_running",
    "num_requests_waiting",
    "time_to_first_token_seconds_bucket",
    "time_to_first_token_seconds_sum",
    "time_to_first_token_seconds_count",
    "kv_cache_usage_perc",
    "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket",
    "request_success_total",
    "request_queue_time_seconds_sum",
    "request_prefill_time_seconds_sum",
    "request_decode_time_seconds_sum",
    "num_preemptions_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
]
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scraped(live: Live, **headers: str) -> Samples:
    answer = live.get("/metrics", **headers)
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/plain")
    families = [*text_string_to_metric_families(answer.body.decode())]
    return {(sample.name, frozenset(sample.labels.items())): sample.value for family in families for sample in family.samples}


def of(samples: Samples, name: str, **labels: str) -> float:
    wanted = {*labels.items()}
    return sum(value for (found, own), value in samples.items() if found == name and wanted <= own)


def family(name: str) -> str:
    return re.sub("_(bucket|sum|count)$", "", name)


@pytest.fixture(scope="module")
def fresh():
    with Live(num_pages=128) as server:
        yield server


def test_counts_are_those_of_the_requests(fresh: Live) -> None:
    before = scraped(fresh)
    assert of(before, "nanovllm_pages", owner="free") == 128 and of(before, "nanovllm_requests_running") == 0
    for _ in range(3):
        assert fresh.post("/v1/completions", BODY).status == 200
    fresh.events("/v1/completions", BODY | {"stream": True, "n": 2})
    assert fresh.post("/v1/completions", BODY | {"top_p": 7}).status == 400
    assert fresh.post("/v1/chunks", {"name": "a", "token_ids": [*range(100, 140)]}).status == 200
    assert fresh.get("/v1/nothing/here/" + "x" * 50).status == 404
    samples = scraped(fresh)
    assert of(samples, "nanovllm_prompt_tokens_total") == 5 * 4 and of(samples, "nanovllm_generation_tokens_total") == 5 * 10
    assert of(samples, "nanovllm_requests_finished_total", finished_reason="length") == 5
    for name in ("time_to_first_token_seconds", "request_seconds", "request_queue_seconds", "request_decode_seconds"):
        assert of(samples, f"nanovllm_{name}_count") == 5 == of(samples, f"nanovllm_{name}_bucket", le="+Inf"), name
    assert of(samples, "nanovllm_inter_token_latency_seconds_count") == 5 * 9
    assert of(samples, "nanovllm_request_prompt_tokens_sum") == 20 and of(samples, "nanovllm_request_generation_tokens_sum") == 50
    assert of(samples, "nanovllm_request_prompt_tokens_bucket", le="2.0") == 0
    assert of(samples, "nanovllm_request_prompt_tokens_bucket", le="5.0") == 5
    assert of(samples, "nanovllm_prefill_tokens_total") + of(samples, "nanovllm_reused_tokens_total") >= 20 + 40
    assert of(samples, "nanovllm_chunks") == 1 and of(samples, "nanovllm_pages", owner="chunks") == 3
    assert of(samples, "nanovllm_pages") == 128
    assert of(samples, "nanovllm_http_requests_total", handler="/v1/completions", method="POST", status="200") == 4
    assert of(samples, "nanovllm_http_requests_total", handler="/v1/completions", status="400") == 1
    assert of(samples, "nanovllm_http_requests_total", handler="other", status="404") == 1
    assert of(samples, "nanovllm_http_requests_total", handler="/metrics") >= 1
    assert all(value >= of(before, name, **dict(labels)) for (name, labels), value in samples.items() if name.endswith("_total"))


def test_parts_of_a_requests_time_add_up(fresh: Live) -> None:
    fresh.post("/v1/completions", BODY)
    sums = {name: one.sum for name, one in fresh.engine.metrics.histograms.items()}
    assert sums["queue"] + sums["inference"] == pytest.approx(sums["end_to_end"])
    assert sums["prefill"] + sums["decode"] == pytest.approx(sums["inference"])
    assert sums["queue"] + sums["prefill"] == pytest.approx(sums["time_to_first_token"])


def test_many_requests_wait_and_leave_the_queue(fresh: Live) -> None:
    before = scraped(fresh)
    threads = [threading.Thread(target=fresh.post, args=("/v1/completions", BODY | {"n": 10, "priority": i % 3})) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    samples = scraped(fresh)
    for name in ("request_queue_seconds", "request_seconds", "time_to_first_token_seconds"):
        assert of(samples, f"nanovllm_{name}_count") - of(before, f"nanovllm_{name}_count") == 40
    assert not fresh.engine.metrics._queued  # pyright: ignore[reportPrivateUsage]


def test_a_request_whose_client_leaves_is_counted_as_aborted(fresh: Live) -> None:
    before = of(scraped(fresh), "nanovllm_requests_finished_total", finished_reason="abort")
    connection = fresh.connect()
    connection.request("POST", "/v1/completions", json.dumps(BODY | {"max_tokens": 900, "ignore_eos": True, "stream": True}).encode(),
                       {"content-type": "application/json"})  # fmt: skip
    response = connection.getresponse()
    response.read(10)
    assert of(scraped(fresh), "nanovllm_requests_running") == 1
    response.close()
    connection.close()
    fresh.wait_until_idle()
    assert of(scraped(fresh), "nanovllm_requests_finished_total", finished_reason="abort") == before + 1


def test_every_front_end_gives_the_same_answer(fresh: Live) -> None:
    """Whatever a front end has answered is in the engine after a second, without a look at the metrics."""
    fresh.get("/version")
    end = time.monotonic() + 60
    while ("/version", "GET", 200) not in fresh.engine.metrics.http:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_names_of_vllm() -> None:
    with Live(settings=Settings(shutdown_seconds=1.0, metrics_names="vllm"), num_pages=64) as live:
        live.post("/v1/completions", BODY)
        samples = scraped(live)
    labels = {"model_name": "tiny", "engine": "0"}
    found = {name for name, own in samples if labels.items() <= dict(own).items()}
    assert [name for name in DASHBOARD if f"vllm:{name}" not in found] == []
    assert of(samples, "vllm:request_success_total", finished_reason="length") == 1
    assert of(samples, "vllm:cache_config_info", block_size="16", num_gpu_blocks="64") == 1
    assert of(samples, "http_requests_total", handler="/v1/completions") == 1
    assert "nanovllm_pages" in found and not any(name.startswith("nanovllm_request") for name in found)


def test_the_dashboard_asks_for_metrics_that_exist(fresh: Live) -> None:
    samples = scraped(fresh)
    dashboard = json.loads((ROOT / "deploy/grafana-dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [one["query"] for one in dashboard["templating"]["list"] if one["type"] == "query"]
    assert len(queries) > 30
    names, labels = {name for name, _ in samples}, {label for _, own in samples for label, _ in own}
    for query in queries:
        asked = re.findall(r"nanovllm_\w+", query)
        assert asked and {*asked} <= names, query
        by = [label for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(", ")]
        assert {*by} <= labels, query
        assert query.count("(") == query.count(")") and query.count("{") == query.count("}")
    shown = {family(name) for query in queries for name in re.findall(r"nanovllm_\w+", query)}
    every = {family(name) for name in names if name.startswith("nanovllm_")}
    assert every - shown == {"nanovllm_prefill_tokens_total", "nanovllm_request_inference_seconds"}


def test_metrics_need_a_key_where_others_do() -> None:
    settings = Settings(shutdown_seconds=1.0, api_keys=(hashlib.sha256(b"one").digest(),))
    with Live(settings=settings, num_pages=64) as live:
        assert live.get("/metrics").status == 401
        assert scraped(live, authorization="Bearer one")


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 300)), max_size=50), st.sampled_from([*BUCKETS.values()]))
def test_a_histogram_counts_as_prometheus_says(pairs: list[tuple[float, int]], edges: tuple[float, ...]) -> None:
    pairs += [(float(edges[0]), 1), (float(edges[-1]), 2)]
    one, other, expected = Histogram(edges), Histogram(edges), np.zeros(len(edges) + 1, int)
    for value, weight in pairs:
        expected[bisect_left(edges, value)] += weight
        for _ in range(weight):
            one.add(value)
    other.add_many(*zip(*pairs, strict=True))
    for histogram in (one, other):
        assert (histogram.counts == expected).all()
        assert histogram.sum == pytest.approx(sum(value * weight for value, weight in pairs))
    below = sum(weight for value, weight in pairs if value <= edges[3])
    assert one.counts[:4].sum() == below


def test_gaps_are_weighted_by_rows() -> None:
    metrics, now = EngineMetrics(), 100.0
    metrics.stepped(now, 4, 4)  # four first tokens: no gap
    for _ in range(5000):
        now += 0.002
        metrics.stepped(now, 5, 1)
    found = metrics.histograms["inter_token"]
    metrics._settle()  # pyright: ignore[reportPrivateUsage]
    assert found.counts.sum() == 20000 and metrics.generation_tokens == 25004 and found.sum == pytest.approx(40)
    assert found.counts[GAPS.index(0.002) : GAPS.index(0.005) + 1].sum() == 20000


def test_what_clients_choose_cannot_grow_the_counts() -> None:
    metrics, answers = EngineMetrics(), AnswerCounts()
    for count in range(100):
        answers.add(None, f"METHOD{count}", 404, 0.1)
    counts = answers.take()
    assert [count[:4] for count in counts] == [["other", "other", 404, 100]] and answers.take() == []
    metrics.add_http([[f"/{count}", "GET", 200, 1, 0.0] for count in range(2 * MOST_HTTP)])
    assert len(metrics.http) == MOST_HTTP
    metrics.submitted(1, Timeline(0.0, 3))
    metrics.cancelled(1)
    assert metrics.finished["abort"] == 1 and not metrics._queued  # pyright: ignore[reportPrivateUsage]


def test_a_request_leaves_the_queue_when_its_first_step_begins() -> None:
    metrics = EngineMetrics()
    early, late = Timeline(arrival=10.0, num_prompt=5), Timeline(arrival=12.5, num_prompt=5)
    metrics.submitted(1, early)
    metrics.submitted(2, late)
    metrics.left_queue(Queue(), 13.0)
    metrics.began(1, early, 13.0, 15.0)
    metrics.submitted(3, same := Timeline(arrival=14.0, num_prompt=5))
    metrics.began(3, same, 16.0, 17.0)  # it was never seen in the queue after a step
    assert metrics.histograms["queue"].sum == 3.0 + 0.5 + 2.0
    assert metrics.histograms["prefill"].sum == 2.0 + 1.0 and metrics.histograms["time_to_first_token"].sum == 5.0 + 3.0


def test_what_the_disk_lacked_and_what_was_not_written_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = DiskCounts(pages_missed=3, pages_dropped=2, frames_missed=5, frames_dropped=4, frames_damaged=1)
    with Live(num_pages=64, host_kv_gib=0.01, kv_dir=tmp_path, kv_dir_gib=0.01) as live:
        before = scraped(live)
        assert of(before, "nanovllm_disk_missed_pages_total") == of(before, "nanovllm_disk_dropped_pages_total") == 0
        disk = runtime_of(live.engine.state).disk
        assert disk is not None
        monkeypatch.setattr(disk, "counts", counts)
        after = scraped(live)
    assert of(after, "nanovllm_disk_missed_pages_total") == 3 and of(after, "nanovllm_disk_dropped_pages_total") == 2
    assert of(after, "nanovllm_disk_damaged_pages_total") == 0
    assert [of(after, f"nanovllm_disk_{name}_frames_total") for name in ("missed", "dropped", "damaged")] == [5, 4, 1]


def test_host_memory_and_the_disk_have_figures(tmp_path: Path) -> None:
    model = random_model(tiny_config())
    state = nv.init_state(model, num_pages=16, page_size=4, host_kv_gib=0.001, kv_dir=tmp_path, kv_dir_gib=0.01)
    state, chunk = nv.prefill(model, state, [*range(5, 15)])
    state = nv.offload(state, chunk)
    host, disk = state.pool.host, runtime_of(state).disk
    assert host is not None and disk is not None
    total = host.num_pages
    disk.drain()
    figures = EngineMetrics().figures(state, 1)
    assert (figures["host_pages"], figures["host_pages_used"]) == (total, 3)
    held = Held(model=model, state=state, named=NamedChunks(), metrics=EngineMetrics())
    _, told = memory(held, space="", namespace=0, everything=True)
    assert told["host_pages"] == {"total": total, "used": 3} and told["disk"] == {"bytes": disk.folder.size, "max_bytes": 10737418}
    assert disk.folder.size > 0
    plain = nv.init_state(model, num_pages=16)
    figures = EngineMetrics().figures(plain, 0)
    assert figures["host_pages"] == figures["host_pages_used"] == 0
    _, told = memory(replace(held, state=plain), space="", namespace=0, everything=True)
    assert told["host_pages"] == {"total": 0, "used": 0} and told["disk"] is None
