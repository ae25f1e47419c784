"""A laptop cluster that does not come up, without one."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from ray._common.utils import reset_ray_address
from ray._private.utils import write_ray_address

from raytrain_ft.chaos import cluster, hosts
from raytrain_ft.chaos.cluster import LocalCluster
from raytrain_ft.chaos.hosts import HostCluster

NOBODY = 2**22 + 1
"""More than any process has for a number."""


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done to a pretended cluster, whose second node for workers does not come up."""
    done: list[str] = []

    class Cluster:
        address = "10.0.0.1:6379"

        def add_node(self, **about: Any) -> Any:
            done.append("node")
            if done.count("node") == 3:
                raise KeyboardInterrupt
            process = SimpleNamespace(process=SimpleNamespace(pid=NOBODY))
            return SimpleNamespace(node_id="n0", all_processes={"raylet": [process]})

        def shutdown(self) -> None:
            done.append("shutdown")

    monkeypatch.setattr("ray.cluster_utils.Cluster", Cluster)
    monkeypatch.setattr(cluster, "_refresh_authentication", lambda: done.append(os.environ.get("RAY_AUTH_TOKEN", "")[:4]))
    monkeypatch.setattr(hosts, "Network", lambda: network)
    network: Any = SimpleNamespace(machine=SimpleNamespace(address="10.0.0.1"))
    network.__enter__ = network.__exit__ = lambda *about: done.append("network")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "mine")
    return done


def test_nothing_stays_of_a_cluster_that_does_not_come_up(done: list[str]) -> None:
    before = dict(os.environ)
    with pytest.raises(KeyboardInterrupt), LocalCluster(3):
        pass
    assert done[1:] == ["node", "node", "node", "shutdown", "mine"]
    assert dict(os.environ) == before


def test_nor_of_the_hosts_of_one(done: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostCluster, "_add_nodes", LocalCluster._add_nodes)
    monkeypatch.setattr(HostCluster, "add_node", LocalCluster.add_node)
    with pytest.raises(KeyboardInterrupt), HostCluster(3):
        pass
    assert done[0] == "network"
    assert done[2:7] == ["node", "node", "node", "shutdown", "mine"]
    assert done[-1] == "network"


def test_nor_where_the_driver_cannot_connect(done: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**about: Any) -> None:
        raise ConnectionError("no token")

    monkeypatch.setattr(cluster.ray, "init", refuse)
    with pytest.raises(ConnectionError), LocalCluster(1):
        pass
    assert done[1:] == ["node", "node", "shutdown", "mine"]


def test_a_node_that_ends_just_now_keeps_no_cluster_from_its_end(done: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its raylet lived when it was asked who does; others are thawed all the same."""
    thawed: list[str] = []

    def processes(self: LocalCluster, node_id: str) -> list[psutil.Process]:
        thawed.append(node_id)
        raise psutil.NoSuchProcess(NOBODY)

    monkeypatch.setattr(cluster.ray, "init", lambda **about: None)
    monkeypatch.setattr(LocalCluster, "node_ids", lambda self: ["n0", "n1"])
    monkeypatch.setattr(LocalCluster, "processes", processes)
    with LocalCluster(1):
        pass
    assert thawed == ["n0", "n1"]
    assert done[1:] == ["node", "node", "shutdown", "mine"]


def test_whoever_else_is_on_this_machine_still_finds_his_own_cluster(
    done: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray writes the address of a cluster into one file for all, and deletes that in the end."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    address, logs = tmp_path / "ray" / "ray_current_cluster", []
    address.parent.mkdir()
    address.write_text("10.0.0.9:6379")

    class Cluster:
        address = "10.0.0.1:6379"

        def add_node(self, **about: Any) -> None:
            logs.append(about.get("temp_dir"))
            write_ray_address(self.address)

        def shutdown(self) -> None:
            reset_ray_address()

    monkeypatch.setattr("ray.cluster_utils.Cluster", Cluster)
    monkeypatch.setattr(cluster.ray, "init", lambda **about: None)
    with LocalCluster(0):
        own = Path(os.environ["RAY_TMPDIR"])
        assert (own / "ray" / address.name).read_text() == Cluster.address
        assert address.read_text() == "10.0.0.9:6379"
    assert address.read_text() == "10.0.0.9:6379"
    assert not own.exists()
    assert logs == [str(address.parent)], "they are kept where those of any cluster are"
