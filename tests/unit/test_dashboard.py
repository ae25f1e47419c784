"""The Grafana dashboard: its queries ask for what we emit, by the tags that it has; the file lands where it should."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from ray._common.utils import get_default_ray_temp_dir
from ray._private.ray_constants import SESSION_LATEST
from ray.dashboard.modules.metrics import metrics_head
from ray.dashboard.subprocesses.module import SubprocessModuleConfig

from raytrain_ft.cli.main import main
from raytrain_ft.policy.measures import METRICS
from raytrain_ft.runtime import dashboard

OUTPUT, ROOT = VARIABLES = ("RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR", "RAY_METRICS_OUTPUT_ROOT")
"""As Ray's documentation and ours call them."""
EXPORTED = {metric.exported: metric for metric in METRICS.values()}
PANELS = [panel for panel in dashboard.build()["panels"] if panel["type"] != "row"]
QUERIES = [(panel["title"], target["expr"], target["legendFormat"]) for panel in PANELS for target in panel["targets"]]


def asked_for(query: str) -> set[str]:
    """The metrics in a query, without what Prometheus adds to a histogram's name."""
    return {re.sub(r"_bucket$", "", name) for name in re.findall(r"\bray_\w+", query)}


@pytest.mark.parametrize(("title", "query", "legend"), QUERIES, ids=[f"{title} {legend}" for title, _, legend in QUERIES])
def test_a_query_asks_for_what_there_is(title: str, query: str, legend: str) -> None:
    metrics = [EXPORTED[name] for name in asked_for(query)]
    assert metrics
    tags = {"run", *(tag for metric in metrics for tag in metric.tags)}
    grouped = {tag for group in re.findall(r"by \((.*?)\)", query) for tag in group.split(", ")}
    filtered = set(re.findall(r'(\w+)=~?"', query))
    assert (grouped | filtered) - {"le"} <= tags
    assert set(re.findall(r"{{(\w+)}}", legend)) <= grouped
    histograms = "histogram_quantile" in query
    assert all((metric.kind == "histogram") == histograms for metric in metrics)
    assert all((metric.kind == "counter") == ("_total" in query) for metric in metrics if len(metrics) == 1)


def test_every_metric_is_shown_and_explained() -> None:
    assert {part for panel in PANELS for part in panel["description"].split("; ")} == {
        part for metric in METRICS.values() for part in metric.meaning.split("; ")
    }
    assert {name for _, query, _ in QUERIES for name in asked_for(query)} == set(EXPORTED)


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    panels = dashboard.build()["panels"]
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < dashboard.COLUMNS
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_the_command_writes_where_grafana_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR", str(tmp_path / "grafana"))
    refused = CliRunner().invoke(main, ["dashboard"])
    assert refused.exit_code == 1
    assert "give --out DIR" in refused.output
    (tmp_path / "grafana").mkdir()
    assert CliRunner().invoke(main, ["dashboard"]).exit_code == 0
    assert CliRunner().invoke(main, ["dashboard", "--out", str(tmp_path / "new")]).exit_code == 0
    for place in ("grafana", "new"):
        assert [path.name for path in (tmp_path / place).iterdir()] == [dashboard.FILE]
        assert json.loads((tmp_path / place / dashboard.FILE).read_text()) == dashboard.build()


@pytest.fixture
def ray_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ray's files go there, unless a test says otherwise. No path in a variable is that of another Ray on this machine."""
    for name in (*VARIABLES, "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    return tmp_path


def provisioned() -> Path:
    """Where Grafana looks once the dashboard of a new Ray session has written its files, as a head node begins one."""
    temp = Path(get_default_ray_temp_dir())
    session = temp / "session_2026-11-26"
    session.mkdir(parents=True)
    (temp / SESSION_LATEST).symlink_to(session.name)
    settings: dict[str, Any] = {field.name: "" for field in fields(SubprocessModuleConfig)}
    settings |= {"temp_dir": str(temp), "session_dir": str(session)}
    head = metrics_head.MetricsHead(SubprocessModuleConfig(**settings))
    head._create_default_grafana_configs()
    (file,) = Path(head._grafana_config_output_path).glob("provisioning/dashboards/*.yml")
    (provider,) = yaml.safe_load(file.read_text())["providers"]
    return Path(provider["options"]["path"])


@pytest.mark.parametrize(
    "chosen",
    [{}, {OUTPUT: "own"}, {ROOT: "metrics"}, {OUTPUT: "own", ROOT: "metrics"}, {"RAY_TMPDIR": "elsewhere"}],
    ids=lambda chosen: ", ".join(chosen) or "no variable",
)
def test_it_is_written_where_rays_own_set_up_has_grafana_look(
    chosen: dict[str, str], ray_at: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, place in chosen.items():
        monkeypatch.setenv(name, str(ray_at / place))
    looks = provisioned()
    assert any(looks.glob("*.json")), "Ray's own are there"
    done = CliRunner().invoke(main, ["dashboard"])
    assert done.exit_code == 0, done.output
    assert json.loads((looks / dashboard.FILE).read_text()) == dashboard.build()


def test_it_is_written_into_a_systems_own_temporary_directory(ray_at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As some clusters of a batch system have: there Ray begins its sessions, too."""
    monkeypatch.delenv("RAY_TMPDIR")
    monkeypatch.setenv("TMPDIR", str(ray_at / "scratch"))
    assert provisioned().samefile(dashboard.directory())


def test_a_ray_that_does_not_say_where_is_told_of(ray_at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(metrics_head, "METRICS_OUTPUT_ROOT_ENV_VAR")
    refused = CliRunner().invoke(main, ["dashboard"])
    assert refused.exit_code == 1
    assert "this version of Ray does not say" in refused.output
    assert "give --out DIR" in refused.output
    assert CliRunner().invoke(main, ["dashboard", "--out", str(ray_at / "new")]).exit_code == 0
