"""What must not outlive a run: its named actors.

None is killed before it has begun. Ray (2.60) forgets what it gave to an actor that is killed between two moments of its start,
when its process has been found and before it is told what to be: nobody ever ends that process, and what the actor had asked
for, a CPU for example, stays taken for as long as the node lives. Both moments are a few milliseconds apart.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import ray
from ray.util import list_named_actors

from raytrain_ft.runtime.spec import NAMESPACE

BEGIN_S = 4.0
"""How long an actor may take to begin before it is killed all the same. Its place is waited for longer (`ROOM_SECONDS`)."""


def begun(actor: Any) -> Any:
    """What Ray gives when an actor has begun: a reference, which fails if the actor has ended."""
    return actor.__ray_ready__.remote()


def named(prefix: str) -> list[str]:
    """The names of our live actors that begin like this."""
    actors: Any = list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE and actor["name"].startswith(prefix)]


def kill_named(prefix: str) -> None:
    """Ends our actors whose names begin like this."""
    actors = []
    for name in named(prefix):
        with suppress(ValueError):  # it ended meanwhile
            actors.append(ray.get_actor(name, namespace=NAMESPACE))
    if actors:
        ray.wait([begun(actor) for actor in actors], num_returns=len(actors), timeout=BEGIN_S)
    for actor in actors:
        ray.kill(actor)
