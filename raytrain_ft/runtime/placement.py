"""Where workers go: spread over nodes, the emptiest first, because a replica on the same node survives nothing."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytrain_ft.errors import ConfigError
from raytrain_ft.places import told
from raytrain_ft.runtime import lifeline

KNOCK_S = 5.0
OLDEST_RAY, TESTED_RAY = "2.59", "2.60.0"
ON_HEAD = {"node:__internal_head__": 0.001}
"""Resources to ask for to be placed on the head node, where Ray's own state is. For an actor that asks for nothing a soft
affinity is not heeded: Ray places it on a random node."""


def demand(options: dict[str, Any]) -> dict[str, float]:
    """The resources that one worker takes, in Ray's words."""
    resources = {"CPU": float(options.get("num_cpus") or 0), "GPU": float(options.get("num_gpus") or 0)}
    resources |= {"memory": float(options.get("memory") or 0)} | (options.get("resources") or {})
    return {name: amount for name, amount in resources.items() if amount > 0}


def room(node: dict[str, Any], wanted: dict[str, float], taken: int, vacated: int = 0, held: int = 0) -> int:
    """How many workers of ours a node could host, `taken` of which are there: what others use is not to be had. Those of the
    places that were `vacated` that Ray has given back already, it shows as free, if they are not `held` for us since."""
    if not node["Alive"]:
        return 0
    return min(_times(node["Resources"], wanted), taken + max(vacated, held + _times(node["Available"], wanted)))


def _times(resources: dict[str, float], wanted: dict[str, float]) -> int:
    # Not `//`: 1.0 // 0.2 is 4. Ray itself counts in ten-thousandths.
    return min((int(resources.get(name, 0.0) / amount + 1e-6) for name, amount in wanted.items()), default=64)


def lacking(nodes: Iterable[dict[str, Any]], wanted: dict[str, float]) -> str:
    """That no node has what one worker takes, in words, which would be found out when nobody has come for long; empty if one
    has. Perhaps another is on its way."""
    there = [node["Resources"] for node in nodes if node["Alive"]]
    if any(_times(resources, wanted) for resources in there):
        return ""
    most = ", ".join(f"{max((one.get(name, 0.0) for one in there), default=0.0):g} {name}" for name in wanted)
    asked = ", ".join(f"{amount:g} {name}" for name, amount in wanted.items())
    return f"each worker takes {asked}, and no node has all of it (the most of each: {most})"


def capacity(
    nodes: Iterable[dict[str, Any]],
    wanted: dict[str, float],
    taken: Counter[str],
    vacated: Counter[str],
    held: Counter[str],
    avoid: set[str],
) -> int:
    """How many workers of ours the cluster could host. Nodes in `avoid` are gone although Ray does not know it yet."""
    here = {node["NodeID"]: node for node in nodes if node["NodeID"] not in avoid}
    return sum(room(node, wanted, taken[name], vacated[name], held[name]) for name, node in here.items())


def choose(nodes: list[dict[str, Any]], wanted: dict[str, float], taken: Counter[str], avoid: set[str]) -> str | None:
    """The node for the next worker: the one with the fewest of ours among those with room; None if there is none."""
    free = [n for n in nodes if n["NodeID"] not in avoid and room(n, wanted, taken[n["NodeID"]]) > taken[n["NodeID"]]]
    if not free:
        return None
    return min(free, key=lambda n: (taken[n["NodeID"]], n["NodeID"]))["NodeID"]


def apart(nodes: list[dict[str, Any]], wanted: dict[str, float]) -> str | None:
    """A node where workers have least to do with it: one that has no room for any, or else for the fewest."""
    alive = [node for node in nodes if node["Alive"]]
    return min(alive, key=lambda n: (_times(n["Resources"], wanted), n["NodeID"]))["NodeID"] if alive else None


def connect(address: str | None = None, **options: Any) -> None:
    """Connects this process to Ray, as `ray.init` does, which may start a cluster if no address is given.

    Raises:
        ConfigError: nobody is there, or who is there refuses this process.
    """
    knock()
    try:
        ray.init(address=address, **options)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:  # or RAY_ADDRESS is a job server's
        if words := other_versions(error):
            raise ConfigError(words) from error
        named = os.environ.get("RAY_ADDRESS", "")
        if isinstance(error, ConnectionError) and not named:
            what = "there is no Ray cluster here: set RAY_ADDRESS, or run this on one of its nodes"
        else:
            what = (
                f"RAY_ADDRESS={told(named)}: there is no Ray cluster to be reached. Run this on one of its nodes without "
                "RAY_ADDRESS, or submit it as a job"
            )
        raise ConfigError(f"{what}. If it is there, it may have another token: {_token()}. {told(str(error))}") from error


def other_versions(error: BaseException) -> str:
    """That the cluster has another Ray or Python than this process, in words, if that is why Ray does not let it in; else
    empty."""
    words = " ".join(str(error).partition("Version mismatch:")[2].split())
    if not words:
        return ""
    return (
        f"this process and the cluster have other versions of Ray or Python: {told(words)}. Use the cluster's versions here, "
        "or submit this as a job, which has them"
    )


def _token() -> str:
    """Where Ray looks for this process's token, in words."""
    mode = os.environ.get("RAY_AUTH_MODE", "")
    path = os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token"
    place = "RAY_AUTH_TOKEN" if os.environ.get("RAY_AUTH_TOKEN") else path
    return f"RAY_AUTH_MODE is {mode or 'not set'}, and the token is looked for in {place}"


def knock(address: str | None = None) -> None:
    """Whether anybody answers where Ray is about to connect to: Ray tries for more than a minute, and says little.

    Args:
        address: of a cluster's head, by default that of ``RAY_ADDRESS``. What is not of the form "host:port" is left to Ray.

    Raises:
        ConfigError: nobody answers there.
    """
    named = "RAY_ADDRESS=" if address is None else ""
    address = os.environ.get("RAY_ADDRESS", "") if address is None else address
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"{named}{address}: no Ray cluster answers there ({error}). Is it up, and does a firewall let you through? On one "
            "of its nodes no address is needed."
        ) from error


async def reaction(node: dict[str, Any]) -> Literal["answer", "refusal", "silence"]:
    """What comes from a node's raylet if one knocks: a refusal if it was killed, nothing if there is no cable."""
    try:
        _, writer = await lifeline.connect(node["NodeManagerAddress"], node["NodeManagerPort"])
    except ConnectionRefusedError:
        return "refusal"
    except (OSError, TimeoutError):
        return "silence"
    writer.close()
    return "answer"


async def is_silent(node: dict[str, Any]) -> bool:
    """Whether not even a refusal comes from where a node is."""
    return await reaction(node) == "silence"


def pinned_to(node: str) -> NodeAffinitySchedulingStrategy:
    """Ray's scheduling strategy for an actor that asks for no resources: a soft one is not heeded for those."""
    return NodeAffinitySchedulingStrategy(node, soft=False)


def strategy_for(node: str) -> NodeAffinitySchedulingStrategy:
    """Ray's scheduling strategy for a chosen node."""
    # Another run may take the same place at the same moment: then Ray looks elsewhere, instead of waiting for it for ever.
    return NodeAffinitySchedulingStrategy(node, soft=True, _spill_on_unavailable=True)


def nodes() -> list[dict[str, Any]]:
    """The cluster's nodes as Ray sees them, with what is free on each. Private to Ray: there is no public call for that."""
    from ray._private.state import available_resources_per_node

    available = available_resources_per_node()
    return [{**node, "Available": available.get(node["NodeID"], {})} for node in ray.nodes()]


def check_ray() -> None:
    """Whether this version of Ray has the call that room is counted with. Without it no worker would ever be started, and
    nobody told why.

    Raises:
        ConfigError: it has not.
    """
    try:
        nodes()
    except (AttributeError, ImportError, TypeError) as error:
        raise ConfigError(
            f"Ray {ray.__version__} does not tell what is free on each node, at least not as Ray {TESTED_RAY} does "
            f"({type(error).__name__}: {error}). raytrain_ft needs Ray {OLDEST_RAY} or newer, and was tested with "
            f"{TESTED_RAY}: install that one on all nodes"
        ) from error
    except (RayError, RuntimeError):  # Ray's own state does not answer now
        pass
