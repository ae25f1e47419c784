"""A run's metrics as Ray's agents show them over HTTP; and every query of the dashboard, asked of a real Prometheus."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest
import ray
from conftest import train
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

import raytrain_ft as ft
from raytrain_ft.policy.measures import METRICS
from raytrain_ft.runtime import dashboard
from raytrain_ft.runtime.event_log import read_records

STEPS = 24
PROMETHEUS = shutil.which("prometheus")
PATIENCE_S = 15.0
NOT_HERE = {
    "ray_train_ft_samples_lost_total",
    "ray_train_ft_steps_redone_total",
    "ray_train_ft_supervisor_restarts_total",
    "ray_train_ft_checkpoint_interval_steps",
    *("ray_train_ft_log_bytes_total", "ray_train_ft_log_disk_bytes"),
    *("ray_train_ft_log_stalls_total", "ray_train_ft_log_stall_seconds_total"),
}
"""Metrics of what does not happen in this run: they are absent rather than 0."""


def addresses() -> list[str]:
    return [f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in ray.nodes() if node["Alive"]]


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


def scrape(run: str) -> list[Sample]:
    """All samples of a run, from the agents of all nodes."""
    families = [
        family for address in addresses() for family in text_string_to_metric_families(fetch(f"http://{address}/metrics"))
    ]
    return [sample for family in families for sample in family.samples if sample.labels.get("run") == run]


@pytest.fixture(scope="module")
def run(cluster, tmp_path_factory: pytest.TempPathFactory) -> ft.Result:
    """A run that loses a worker and writes checkpoints."""
    faults = [ft.FailAt(rank=1, step=14, phase="forward")]
    path = tmp_path_factory.mktemp("metrics")
    return train(path, "measured", steps=STEPS, faults=faults, checkpoints=ft.CheckpointConfig(every=6))


def test_the_agent_shows_what_the_run_did(run: ft.Result) -> None:
    samples = scrape("measured")
    records = read_records(Path(run.path) / "events.jsonl")

    def values(name: str) -> dict[tuple[str, ...], float]:
        tags = METRICS[name.removeprefix("ray_").removesuffix("_total").removesuffix("_count")].tags
        return {tuple(s.labels[tag] for tag in tags): s.value for s in samples if s.name == name}

    plain = {metric.exported for metric in METRICS.values() if metric.kind != "histogram"}
    assert plain - {sample.name for sample in samples} == NOT_HERE
    assert {state for (state,), value in values("ray_train_ft_run_state").items() if value} == {"finished"}
    assert values("ray_train_ft_step") == {(): STEPS} == values("ray_train_ft_steps_committed_total")
    assert values("ray_train_ft_world_size") == {(): 3}
    assert values("ray_train_ft_loss") == {(): pytest.approx(run.metrics["loss"])}

    (recovery,) = [recovery for recovery in run.recoveries if recovery.lost]
    assert recovery.seconds is not None
    assert values("ray_train_ft_failures_total") == {("process", "ray"): 1}
    assert values("ray_train_ft_recoveries_total") == {("replication", str(recovery.guarantee), "yes"): 1}
    assert values("ray_train_ft_paused_seconds_total") == {("yes",): pytest.approx(recovery.seconds)}
    assert values("ray_train_ft_pause_seconds_count") == {("yes",): 1}
    assert values("ray_train_ft_detection_seconds_count") == {("ray",): 1}
    lost = next(record for record in records if record["event"] == "WorkerLost")
    assert 0 <= lost["silent_s"] < 2

    written = [record for record in records if record["event"] == "CheckpointCommitted"]
    assert values("ray_train_ft_checkpoints_total") == {("committed",): len(written)}
    assert values("ray_train_ft_checkpoint_bytes") == {(): written[-1]["bytes"]}
    assert values("ray_train_ft_checkpoint_stall_seconds_total") == {(): pytest.approx(sum(r["stall_s"] for r in written))}

    (goodput,), (productive,) = (values(f"ray_train_ft_{n}").values() for n in ("goodput_ratio", "productive_seconds_total"))
    assert 0 < productive < run.seconds - recovery.seconds + 1
    assert goodput == pytest.approx(productive / run.seconds, rel=0.01)


@pytest.fixture
def prometheus(run: ft.Result, tmp_path: Path) -> Iterator[str]:
    """A real server that has read our metrics at least twice."""
    if PROMETHEUS is None:
        pytest.skip("no Prometheus here (apt-get install prometheus)")
    targets = json.dumps(addresses())
    scraped = f"scrape_configs:\n- job_name: ray\n  scrape_interval: 1s\n  static_configs:\n  - targets: {targets}\n"
    (tmp_path / "prometheus.yml").write_text(scraped)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    files = [f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen([PROMETHEUS, *files, f"--web.listen-address={address}"], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            try:
                if ask(address, "min(count_over_time(ray_train_ft_step[1h])) > 1"):
                    break
            except OSError:
                pass
            time.sleep(0.2)
        yield address
    finally:
        server.terminate()
        server.wait(10)


def ask(address: str, query: str) -> list[dict]:
    answer = json.loads(fetch(f"http://{address}/api/v1/query?{urlencode({'query': query})}"))
    assert answer["status"] == "success", answer
    return answer["data"]["result"]


def test_prometheus_answers_every_query_of_the_dashboard(prometheus: str) -> None:
    values = {"$run": "measured", "$__rate_interval": "1m"}
    for panel in dashboard.build()["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"]
            for name, value in values.items():
                query = query.replace(name, value)
            absent = " or " not in query and any(name in query for name in NOT_HERE)
            assert bool(ask(prometheus, query)) != absent, (panel["title"], query)
    assert ask(prometheus, 'sum(ray_train_ft_steps_committed_total{run="measured"})')[0]["value"][1] == str(STEPS)
