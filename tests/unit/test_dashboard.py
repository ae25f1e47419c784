"""The Grafana dashboard: its queries ask for what we emit, by the tags that it has; the file lands where it should."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from raytrain_ft.cli import main
from raytrain_ft.policy.measures import METRICS
from raytrain_ft.runtime import dashboard

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


def test_it_is_where_rays_own_set_up_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert dashboard.directory() == tmp_path / "ray/session_latest/metrics/grafana/dashboards"
