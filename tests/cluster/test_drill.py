"""Drills on real clusters: what a report says is what the run's own records say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from raytrain_ft.chaos.cluster import LocalCluster
from raytrain_ft.drill import Report, drill
from raytrain_ft.drill.grounds import Laptop, Running
from raytrain_ft.errors import ConfigError, ScenarioError
from raytrain_ft.policy.history import check
from raytrain_ft.runtime.event_log import read_records
from raytrain_ft.scenario import Scenario

pytestmark = pytest.mark.long

JOB = """
name: rehearsal
workers: 3
steps: 140
batch: 48
bucket_bytes: 32768
first_bucket_bytes: 8192
checkpoint_every: null
"""
STRIKES = """
events:
  - action: kill
    who: {ranks: [0, 1]}
    when: {step: 12}
    at: {share: 50%}
  - action: freeze
    who: {rank: 2}
    when: {step: 30}
  - action: slow_down
    who: {rank: 0}
    when: {step: 60}
    factor: 3
    lasts: 1s
  - action: kill_node
    who: {rank: 0}
    when: {step: 95}
    lasts: 0.5s
pass_if:
  goodput: 5%
  pause_p95: 60s
  guarantee: exact
"""


def scenario(directory: Path, text: str) -> Scenario:
    path = directory / "scenario.yaml"
    path.write_text(text)
    return Scenario.load(path)


@pytest.fixture(scope="module")
def struck(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Scenario, int]:
    """One drill with two kills at once, a freeze, a slow worker, and the loss of a node that comes back; and how many nodes
    there were."""
    directory = tmp_path_factory.mktemp("drill")
    before = len(cluster.node_ids())
    asked = scenario(directory, JOB + STRIKES)
    return drill(asked, Laptop(cluster), storage_path=directory, quiet=True), asked, before


def test_a_drill_strikes_as_it_was_asked_and_the_run_survives(
    struck: tuple[Report, Scenario, int], cluster: LocalCluster
) -> None:
    report, _, before = struck
    assert report.passed, report.checks
    assert report.missed == ()
    assert [(strike.event, strike.action) for strike in report.strikes] == [
        (0, "kill"),
        (0, "kill"),
        (1, "freeze"),
        (2, "slow_down"),
        (3, "kill_node"),
    ]
    assert report.bit_equal
    assert len(cluster.node_ids()) == before  # one was lost, one came


def test_the_report_says_what_the_records_say(struck: tuple[Report, Scenario, int]) -> None:
    report, _, _ = struck
    records = read_records(Path(report.paths[0]) / "events.jsonl")
    accounts = [record for record in records if record["event"] == "Recovery"]
    assert check(records) == list(report.violations) == []
    assert sum(kind.count for kind in report.recoveries) == len(accounts) == report.pauses.count
    assert {kind.cause for kind in report.recoveries} == {"kill", "freeze", "kill_node"}

    lost = {member: account for account in accounts for member in account["lost"]}
    kill, other, freeze, slow, _ = report.strikes
    assert lost[kill.members[0]] == lost[other.members[0]]  # one event, one recovery
    assert [strike.detected_s is not None for strike in report.strikes] == [True, True, True, False, True]
    assert (slow.detected_s, slow.pause_s) == (None, None)
    restarts = [record["at"] for record in records if record["event"] == "SupervisorRestarted"]
    for strike in (kill, freeze):
        account = lost[strike.members[0]]
        if not [at for at in restarts if at < account["resumed"]]:  # the records' clock may differ since
            assert strike.detected_s == pytest.approx(account["detected"] - strike.at, abs=0.02)
            assert strike.pause_s == pytest.approx(account["resumed"] - strike.at, abs=0.02)
    assert kill.detected_s is not None
    assert freeze.detected_s is not None
    assert kill.detected_s < freeze.detected_s  # a closed connection is seen at once, silence has to last

    # At exact points: the strike is in the step, and inside of the back-propagation, that was asked for.
    started = {record["member"]: record["pid"] for record in records if record["event"] == "WorkerStarted"}
    markers = {path.name: path.read_text().split() for path in (Path(report.paths[0]) / "faults").iterdir()}
    for rank, strike in enumerate((kill, other)):
        marker = next(words for name, words in markers.items() if name.startswith(f"worker-{rank}-12-backward-"))
        assert started[strike.members[0]] == int(marker[1])

    state = [(r["state"], r["at"]) for r in records if r["event"] == "State"]
    running = next(at for name, at in state if name == "RUNNING")
    over = next(at for name, at in state if name == "SHUTTING_DOWN")
    if not restarts:
        assert report.training_s == pytest.approx(over - running, abs=0.02)
    assert report.training_s >= over - running - 0.02
    assert report.steps == report.max_steps == 140
    assert report.goodput == pytest.approx(report.undisturbed_s / report.training_s)
    assert 0 < report.goodput < 1  # pauses of seconds in a run of some twenty


def test_the_report_is_written_for_programs_and_for_people(struck: tuple[Report, Scenario, int]) -> None:
    report, _, _ = struck
    directory = Path(report.paths[0])
    found = json.loads((directory / "drill.json").read_text())
    assert found["passed"] is True
    assert found["goodput"] == report.goodput
    assert len(found["strikes"]) == len(report.strikes) == 5
    text = (directory / "drill.md").read_text()
    assert "# Drill rehearsal: passed" in text
    assert "| events.3 | kill_node |" in text


def test_what_was_predicted_stands_beside_what_was_measured(struck: tuple[Report, Scenario, int]) -> None:
    """Of the same events, at the costs of the very run that was struck."""
    report, _, _ = struck
    predicted = report.predicted
    assert (report.unpredicted, set(predicted)) == ("", {"goodput", "training", "recoveries", "pause", "samples_lost"})
    assert predicted["recoveries"] == sum(kind.count for kind in report.recoveries) == 3
    assert predicted["samples_lost"] == report.samples_lost == 0
    assert predicted["pause"] > 0
    assert predicted["training"] == pytest.approx(report.training_s, rel=0.5), "its own costs, added up"
    assert predicted["goodput"] == pytest.approx(report.goodput, rel=0.5)

    directory = Path(report.paths[0])
    assert json.loads((directory / "drill.json").read_text())["predicted"] == predicted
    text = (directory / "drill.md").read_text()
    assert "|  | local | predicted |" in text
    assert f"| goodput | {report.goodput:.1%} | {predicted['goodput']:.4g} |" in text
    assert "| recoveries | 3 | 3 |" in text
    assert "no prediction" not in text


def test_what_a_running_cluster_is_spared(cluster: LocalCluster, tmp_path: Path) -> None:
    """Nothing is struck without the address of the cluster, and no node that could be somebody else's."""
    address = ray.get_runtime_context().gcs_address
    for confirmation in (None, "10.0.0.1:6379", "yes"):
        with pytest.raises(ConfigError, match=f"--yes-break-this-cluster {address}"):
            Running(confirmation)
    ground = Running(address)
    for action, more, why in (
        ("unplug", "who: {rank: 0}", "not ours to cut"),
        ("bring_back", "about", "autoscaler"),
        ("kill_node", "who: {rank: 0}\n    lasts: 1s", "autoscaler"),
        ("kill_node", "who: {rank: 0}", "does not ask who else is there"),
    ):
        when = "step: 1" if "ask" in why else "seconds: 1"
        event = f"events:\n  - action: {action}\n    when: {{{when}}}\n    {more}\n".replace("    about\n", "")
        with pytest.raises(ScenarioError, match=why) as refused:
            ground.refuse(scenario(tmp_path, JOB + event))
        assert "scenario.yaml, line " in str(refused.value)
    fit = STRIKES.replace(
        "    who: {rank: 0}\n    when: {step: 95}\n    lasts: 0.5s\n", "    who: {node: 0}\n    when: {step: 95}\n"
    )
    ground.refuse(scenario(tmp_path, JOB + fit))


def test_on_a_running_cluster_hands_on_the_nodes_strike(cluster: LocalCluster, tmp_path: Path) -> None:
    """The same with an actor on each node; a threshold that cannot be kept fails the drill. The node that is killed is that of
    rank 0."""
    events = """
events:
  - action: kill
    who: {rank: 1}
    when: {seconds: 0.5}
  - action: slow_down
    who: {rank: 0}
    when: {seconds: 1}
    factor: 2
    lasts: 0.5s
  - action: kill_node
    who: {node: 0}
    when: {step: 60}
pass_if:
  pause_p95: 1ms
"""
    ground = Running(ray.get_runtime_context().gcs_address)
    before = cluster.node_ids()
    try:
        report = drill(scenario(tmp_path, JOB + events), ground, storage_path=tmp_path, quiet=True)
        after = cluster.node_ids()
    finally:
        ground.close()
        while len(cluster.node_ids()) < len(before):  # nobody else brings one here
            cluster.add_node()
    assert [strike.action for strike in report.strikes] == ["kill", "slow_down", "kill_node"]
    kill, _, node_kill = report.strikes
    assert [node for node in before if node not in after] == [node_kill.node], "that one, and no other"
    records = read_records(Path(report.paths[0]) / "events.jsonl")
    homes = {record["member"]: record["node"] for record in records if record["event"] == "WorkerStarted"}
    assert {homes[member] for member in node_kill.members} == {node_kill.node}
    lost = [record["lost"] for record in records if record["event"] == "Recovery"]
    assert lost == [list(kill.members), list(node_kill.members)], "both were workers that trained"
    assert report.missed == ()
    assert report.bit_equal
    assert [check.name for check in report.checks if not check.kept] == ["pause p95"]
    assert not report.passed


WITH_NOTICE = """
name: notice
job: {task: tiny, arguments: {step_seconds: 0.1}}
workers: 2
nodes: 3
steps: 250
batch: 16
checkpoint_every: null
events:
  - action: drain
    who: {rank: 1}
    when: {step: 20}
    notice: 10s
  - action: bring_back
    when: {step: 60}
  - action: kill
    who: {rank: 0}
    when: {step: 150}
pass_if:
  samples_lost: 0
  guarantee: exact
"""


@pytest.mark.timeout(400)
def test_a_drain_with_notice_and_what_is_brought_back_from_the_command_line(tmp_path: Path) -> None:
    """In a process of its own, which starts a laptop cluster for itself."""
    asked = tmp_path / "scenario.yaml"
    asked.write_text(WITH_NOTICE)
    command = [sys.executable, "-m", "raytrain_ft.cli", "drill", str(asked), "--storage-path", str(tmp_path), "--quiet"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=360)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(next(tmp_path.glob("**/drill.json")).read_text())
    assert (found["passed"], found["missed"]) == (True, [])
    assert [strike["action"] for strike in found["strikes"]] == ["drain", "bring_back", "kill"]
    records = read_records(Path(found["paths"][0]) / "events.jsonl")
    drained = next(record for record in records if record["event"] == "Noticed")
    assert drained["source"] == "ray drain"
    changes = [record for record in records if record["event"] == "Recovery"]
    assert [record["left"] for record in changes if record["left"]] == [[drained["member"]]]
    assert [len(record["lost"]) for record in changes if record["lost"]] == [1]
