"""A Grafana dashboard of the metrics in `policy.measures`, as Grafana's file provider reads it.

Ray's own set-up of Grafana shows every file of one directory (`directory`), so there is nothing to register. Counters are
summed as they are rather than through `increase`, which does not see the first event of a kind: Ray shows a counter only once
it counts something.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raytrain_ft.errors import StorageError
from raytrain_ft.policy.measures import METRICS
from raytrain_ft.storage.draft import draft_of

FILE = "raytrain_ft.json"
COLUMNS = 24
RUN = '{run=~"$run"}'


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel: `queries` are (PromQL, legend); `kind` as Grafana calls it; `width` of 24 columns. `named`: what counts is
    which series there is, not its value."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    stacked: bool = False
    named: bool = False

    @property
    def meaning(self) -> str:
        """Of its metrics."""
        names = {
            name: None for query, _ in self.queries for name in re.findall(r"ray_(train_ft_\w+?)(?:_total|_bucket)?\{", query)
        }
        return "; ".join(METRICS[name].meaning for name in names)


def _latest(name: str) -> str:
    """A gauge. For some seconds after the supervisor's restart there are two of each: of its old process and of its new one."""
    return f"max by (run) (ray_train_ft_{name}{RUN})"


def _total(name: str, by: str = "run") -> str:
    return f"sum by ({by}) (ray_train_ft_{name}_total{RUN})"


def _rate(name: str) -> str:
    return f"sum by (run) (rate(ray_train_ft_{name}_total{RUN}[$__rate_interval]))"


def _quantile(share: float, name: str) -> str:
    return f"histogram_quantile({share}, sum by (le) (ray_train_ft_{name}_bucket{RUN}))"


def _quantiles(name: str) -> tuple[tuple[str, str], ...]:
    return tuple((_quantile(share, name), f"p{share * 100:g}") for share in (0.5, 0.95, 0.99))


_NOW = f"max by (run, state) (ray_train_ft_run_state{RUN}) == 1"
_LOST = 'sum by (run) (ray_train_ft_paused_seconds_total{run=~"$run",lost="yes"})'

ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Run",
        (
            Panel("State", ((_NOW, "{{run}}: {{state}}"),), "none", "stat", 6, named=True),
            Panel("Steps", ((_latest("step"), "{{run}}"), (_latest("max_steps"), "of")), "none", "stat", 6),
            Panel("Goodput", ((_latest("goodput_ratio"), "{{run}}"),), "percentunit", "stat", 3),
            Panel("Workers", ((_latest("world_size"), "{{run}}"),), "none", "stat", 3),
            Panel("Paused by losses", ((_LOST, "{{run}}"),), "s", "stat", 3),
            Panel("Samples lost", ((f"{_total('samples_lost')} or 0 * {_latest('step')}", "{{run}}"),), "none", "stat", 3),
        ),
    ),
    (
        "Training",
        (
            Panel("Steps", ((_latest("step"), "{{run}}"),), width=6),
            Panel("Steps per second", ((_rate("steps_committed"), "{{run}}"),), width=6),
            Panel("Loss", ((_latest("loss"), "{{run}}"),), width=6),
            Panel(
                "Step time",
                ((_latest("step_seconds"), "{{run}} mean"), (_latest("longest_step_seconds"), "{{run}} longest")),
                "s",
                width=6,
            ),
            Panel(
                "Goodput",
                ((_rate("productive_seconds"), "{{run}} now"), (_latest("goodput_ratio"), "{{run}} since its start")),
                "percentunit",
            ),
            Panel("Workers and spares", ((_latest("world_size"), "{{run}} workers"), (_latest("spares"), "{{run}} spares"))),
            Panel("State over time", ((f"max by (state) (ray_train_ft_run_state{RUN})", "{{state}}"),), "none", stacked=True),
        ),
    ),
    (
        "Failures and recoveries",
        (
            Panel("Workers lost, by cause", ((_total("failures", "cause, noticed_by"), "{{cause}}, {{noticed_by}}"),), width=6),
            Panel(
                "Recoveries, by strategy and guarantee kept",
                ((_total("recoveries", "strategy, guarantee, lost"), "{{strategy}}, {{guarantee}}, lost: {{lost}}"),),
                width=6,
            ),
            Panel(
                "Notices and departures",
                ((_total("notices", "source"), "{{source}}"), (_total("departures"), "{{run}} left")),
                width=6,
            ),
            Panel(
                "Steps redone, samples lost",
                ((_total("steps_redone"), "{{run}} steps"), (_total("samples_lost"), "{{run}} samples")),
                width=6,
            ),
            Panel("Detection: upper bound", _quantiles("detection_seconds"), "s"),
            Panel("Pause: first sign to next step", _quantiles("pause_seconds"), "s"),
            Panel(
                "Restarts of the supervisor, incarnation",
                ((_total("supervisor_restarts"), "{{run}} restarts"), (_latest("incarnation"), "{{run}} incarnation")),
            ),
        ),
    ),
    (
        "Checkpoints",
        (
            Panel("Interval k", ((_latest("checkpoint_interval_steps"), "{{run}}"),), "none"),
            Panel("Age of the newest", ((_latest("checkpoint_age_seconds"), "{{run}}"),), "s"),
            Panel("Standing still, share of the time", ((_rate("checkpoint_stall_seconds"), "{{run}}"),), "percentunit"),
            Panel("Size of the newest", ((_latest("checkpoint_bytes"), "{{run}}"),), "bytes"),
            Panel("Checkpoints, by outcome", ((_total("checkpoints", "run, outcome"), "{{run}} {{outcome}}"),)),
            Panel("Writing, share of the time", ((_rate("checkpoint_persist_seconds"), "{{run}}"),), "percentunit"),
        ),
    ),
    (
        "Logs of pipelines",
        (
            Panel("Logged", ((_total("log_bytes"), "{{run}}"),), "bytes"),
            Panel("On disks", ((_latest("log_disk_bytes"), "{{run}}"),), "bytes"),
            Panel("Waits for the log", ((_total("log_stalls"), "{{run}} times"), (_total("log_stall_seconds"), "{{run}} s"))),
        ),
    ),
)


def build() -> dict[str, Any]:
    """The dashboard as Grafana's JSON model."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        panels.append({"type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": _place(0, y, COLUMNS, 1)})
        y, x = y + 1, 0
        for panel in row:
            height = 4 if panel.kind == "stat" else 8
            if x + panel.width > COLUMNS:
                y, x = y + height, 0
            panels.append(_panel(panel, _place(x, y, panel.width, height)))
            x += panel.width
        y += 4 if row[0].kind == "stat" else 8
    for number, panel in enumerate(panels, 1):
        panel["id"] = number
    return {
        "uid": "raytrain-ft",
        "title": "raytrain_ft: fault-tolerant training",
        "tags": ["ray", "raytrain_ft"],
        "schemaVersion": 36,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [_datasource(), _runs()]},
        "panels": panels,
    }


def _place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _panel(panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    stat = panel.kind == "stat"
    drawn = {"lineWidth": 1, "fillOpacity": 10, "showPoints": "never", "spanNulls": False}
    if panel.stacked:
        drawn |= {"stacking": {"mode": "normal"}, "fillOpacity": 60, "lineInterpolation": "stepAfter"}
    named = {"textMode": "name" if panel.named else "auto", "reduceOptions": {"calcs": ["lastNotNull"]}}
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.meaning,
        "gridPos": place,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "targets": [
            {"refId": chr(ord("A") + number), "expr": query, "legendFormat": legend, "instant": stat, "range": not stat}
            for number, (query, legend) in enumerate(panel.queries)
        ],
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": {} if stat else drawn}, "overrides": []},
        "options": named if stat else {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}


def _runs() -> dict[str, Any]:
    return {
        "name": "run",
        "label": "Run",
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": {"query": "label_values(ray_train_ft_run_state, run)", "refId": "run"},
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
        "sort": 1,
    }


def directory() -> Path:
    """Where the Grafana that Ray has set up looks, by the variables and the directory that Ray itself goes by. Private to Ray:
    there is no public call for that.

    Raises:
        StorageError: this version of Ray has no such names.
    """
    try:
        from ray._common.utils import get_default_ray_temp_dir
        from ray._private.ray_constants import SESSION_LATEST
        from ray.dashboard.modules.metrics import metrics_head

        chosen = os.environ.get(metrics_head.GRAFANA_DASHBOARD_OUTPUT_DIR_ENV_VAR)
        root = os.environ.get(metrics_head.METRICS_OUTPUT_ROOT_ENV_VAR)
        session = Path(get_default_ray_temp_dir()) / SESSION_LATEST
    except (AttributeError, ImportError, TypeError) as error:
        raise StorageError(f"this version of Ray does not say where its Grafana looks: {error}") from error
    return Path(chosen) if chosen else Path(root or session / "metrics") / "grafana" / "dashboards"


def write(out: Path) -> Path:
    """Writes the dashboard into this directory, which must exist; Grafana never sees half of it.

    Raises:
        StorageError: it does not exist, or cannot be written.
    """
    path = out / FILE
    try:
        with draft_of(path) as file:
            file.write(json.dumps(build(), indent=1) + "\n")
    except OSError as error:
        raise StorageError(f"the dashboard cannot be written to {out}: {error.strerror}") from error
    return path
