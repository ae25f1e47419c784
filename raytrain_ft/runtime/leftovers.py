"""What must not outlive a run: its named actors."""

from __future__ import annotations

from typing import Any

import ray
from ray.util import list_named_actors

from raytrain_ft.runtime.spec import NAMESPACE


def named(prefix: str) -> list[str]:
    """The names of our live actors that begin like this."""
    actors: Any = list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE and actor["name"].startswith(prefix)]


def kill_named(prefix: str) -> None:
    """Ends our actors whose names begin like this."""
    for name in named(prefix):
        try:
            ray.kill(ray.get_actor(name, namespace=NAMESPACE))
        except ValueError:
            continue  # it ended meanwhile
