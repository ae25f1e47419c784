"""A run's metrics through `ray.util.metrics`: Ray's agent on the supervisor's node shows them to Prometheus.

The supervisor publishes, and nobody else: workers pay nothing. A call costs about 2 us, and there are some forty of them each
`PUBLISH_INTERVAL_S`.
"""

from __future__ import annotations

from typing import Any

from ray.util.metrics import Counter, Gauge, Histogram

from raytrain_ft.policy import messages as m
from raytrain_ft.policy.measures import METRICS, SECONDS, Key, Measures, Metric
from raytrain_ft.policy.run_state import RunState

PUBLISH_INTERVAL_S = 4.0
"""Ray collects every 10 s and forgets a gauge that was not set again in that time."""


class Publisher:
    """One run's metrics, under its name.

    Args:
        past: what this run measured before the supervisor's own restart; it is not counted again.
    """

    def __init__(self, run: str, past: Measures) -> None:
        self._measures = past
        self._instruments = {name: _instrument(metric, run) for name, metric in METRICS.items()}
        past.count_losses()
        past.increments()
        past.observations()

    def take(self, event: m.Event, run: RunState) -> None:
        """Takes in an event, after the machine has; nothing is published yet."""
        self._measures.take(event, run)

    def publish(self, now: float, run: RunState) -> None:
        """Gives Ray the values as they are `now`, in seconds since the run began."""
        measures = self._measures
        measures.look(now, run)
        for key, value in measures.levels.items():
            self._instruments[key[0]].set(value, _tags(key))
        for key, more in measures.increments().items():
            self._instruments[key[0]].inc(more, _tags(key))
        for key, value in measures.observations():
            self._instruments[key[0]].observe(value, _tags(key))


def _instrument(metric: Metric, run: str) -> Any:
    about = {"description": metric.meaning, "tag_keys": ("run", *metric.tags)}
    if metric.kind == "histogram":
        instrument: Any = Histogram(metric.name, boundaries=list(SECONDS), **about)
    else:
        instrument = (Gauge if metric.kind == "gauge" else Counter)(metric.name, **about)
    return instrument.set_default_tags({"run": run})


def _tags(key: Key) -> dict[str, str]:
    return dict(zip(METRICS[key[0]].tags, key[1:], strict=True))
