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

pytestmark = pytest.mark.long

STEPS = 24
PROMETHEUS = shutil.which("prometheus")
PATIENCE_S = 15.0
NOT_HERE = {
    "ray_train_ft_samples_lost_total",
    "ray_train_ft_steps_redone_total",
    "ray_train_ft_supervisor_restarts_total",
    *("ray_train_ft_notices_total", "ray_train_ft_departures_total"),
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
def prometheus(cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str | None]:
    """The address of a real server that reads all agents; None if there is none on this machine."""
    if PROMETHEUS is None:
        yield None
        return
    path = tmp_path_factory.mktemp("prometheus")
    targets = json.dumps(addresses())
    scraped = f"scrape_configs:\n- job_name: ray\n  scrape_interval: 500ms\n  static_configs:\n  - targets: {targets}\n"
    (path / "prometheus.yml").write_text(scraped)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    files = [f"--config.file={path}/prometheus.yml", f"--storage.tsdb.path={path}/data"]
    with (path / "log").open("w") as log:
        server = subprocess.Popen([PROMETHEUS, *files, f"--web.listen-address={address}"], stdout=log, stderr=log)
    yield address
    server.terminate()
    server.wait(30)


@pytest.fixture(scope="module")
def measured(prometheus: str | None, tmp_path_factory: pytest.TempPathFactory) -> tuple[ft.Result, list[Sample], float | None]:
    """A run that loses a worker and writes checkpoints, what the agents say right after it, and when Prometheus has read it.
    Ray forgets the gauges of a process some 20 s after its end."""
    faults = [ft.FailAt(rank=1, step=14, phase="forward")]
    path = tmp_path_factory.mktemp("metrics")
    result = train(path, "measured", steps=STEPS, faults=faults, checkpoints=ft.CheckpointConfig(every=6))
    return result, scrape("measured"), None if prometheus is None else read_at(prometheus)


def read_at(prometheus: str) -> float:
    """When the server had read the run's end, and each counter twice."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        now = time.time()
        try:
            ended = ask(prometheus, 'ray_train_ft_run_state{run="measured",state="finished"} == 1', now)
            if ended and ask(prometheus, "min(count_over_time(ray_train_ft_steps_committed_total[1m])) > 1", now):
                return now
        except OSError:
            pass  # it has only just been started
        time.sleep(0.2)
    raise AssertionError(f"Prometheus has not read the run's end within {PATIENCE_S:g} s")


def ask(prometheus: str, query: str, at: float) -> list[dict]:
    answer = json.loads(fetch(f"http://{prometheus}/api/v1/query?{urlencode({'query': query, 'time': at})}"))
    assert answer["status"] == "success", answer
    return answer["data"]["result"]


def test_the_agent_shows_what_the_run_did(measured: tuple[ft.Result, list[Sample], float | None]) -> None:
    run, samples, _ = measured
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
    lost = next(record for record in records if record["event"] == "WorkerLost")
    assert lost["noticed_by"] in ("lifeline", "ray")  # the latter where the kernel does not allow the former
    assert 0 <= lost["silent_s"] < 2
    assert values("ray_train_ft_failures_total") == {("process", lost["noticed_by"]): 1}
    assert values("ray_train_ft_recoveries_total") == {("replication", str(recovery.guarantee), "yes"): 1}
    assert values("ray_train_ft_paused_seconds_total") == {("yes",): pytest.approx(recovery.seconds)}
    assert values("ray_train_ft_pause_seconds_count") == {("yes",): 1}
    assert values("ray_train_ft_detection_seconds_count") == {(lost["noticed_by"],): 1}

    written = [record for record in records if record["event"] == "CheckpointCommitted"]
    assert values("ray_train_ft_checkpoints_total") == {("committed",): len(written)}
    assert values("ray_train_ft_checkpoint_bytes") == {(): written[-1]["bytes"]}
    assert values("ray_train_ft_checkpoint_interval_steps") == {(): 6}, "which was asked for"
    assert values("ray_train_ft_checkpoint_stall_seconds_total") == {(): pytest.approx(sum(r["stall_s"] for r in written))}

    (goodput,), (productive,) = (values(f"ray_train_ft_{n}").values() for n in ("goodput_ratio", "productive_seconds_total"))
    assert 0 < productive < run.seconds - recovery.seconds + 1
    assert goodput == pytest.approx(productive / run.seconds, rel=0.01)


def test_prometheus_answers_every_query_of_the_dashboard(
    prometheus: str | None, measured: tuple[ft.Result, list[Sample], float | None]
) -> None:
    at = measured[2]
    if prometheus is None or at is None:
        pytest.skip("no Prometheus here (apt-get install prometheus)")
    values = {"$run": "measured", "$__rate_interval": "1m"}
    for panel in dashboard.build()["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"]
            for name, value in values.items():
                query = query.replace(name, value)
            absent = " or " not in query and any(name in query for name in NOT_HERE)
            assert bool(ask(prometheus, query, at)) != absent, (panel["title"], query)
    assert ask(prometheus, 'sum(ray_train_ft_steps_committed_total{run="measured"})', at)[0]["value"][1] == str(STEPS)
