"""Strikes without a cluster: what a running one is spared, and that nothing stays frozen or half done."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from click.testing import CliRunner
from ray.exceptions import GetTimeoutError

import raytrain_ft.drill as drill_module
from raytrain_ft.chaos.faults import FailAt
from raytrain_ft.cli import drill as cli_drill
from raytrain_ft.drill import engine, grounds
from raytrain_ft.drill.faults import Planted
from raytrain_ft.drill.grounds import Running
from raytrain_ft.drill.measure import measure
from raytrain_ft.drill.played import Played, Struck
from raytrain_ft.drill.report import markdown
from raytrain_ft.drill.schedule import Schedule
from raytrain_ft.drill.verdict import verdict
from raytrain_ft.drill.watch import Watch
from raytrain_ft.errors import AbortedError, ConfigError, ScenarioError
from raytrain_ft.policy.strategy import Guarantee, Recovery
from raytrain_ft.result import Result
from raytrain_ft.runtime import bystanders
from raytrain_ft.scenario import Event, Scenario, Thresholds, When, Who

MEMBERS = {"world": ["w0", "w1"], "pids": {"w0": 10, "w1": 11}, "nodes": {"w0": "n0", "w1": "n1"}, "holders": ["w0", "w1"]}
ACCOUNT = {"state": "RUNNING", "step": 3, "seconds": 1.0, "pid": 5, "node": "head"} | MEMBERS
RESULT = Result({}, "", [], "", 1.0, None)


def scenario(*events: Event) -> Scenario:
    return Scenario(name="strikes", workers=2, steps=100, batch=8, events=events)


# ---------------------------------------------------------------- what a running cluster is spared


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Jobs that others have on a cluster on which nothing is done, but written down after them."""
    found: list[str] = []
    monkeypatch.setattr(grounds.ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="10.0.0.1:6379"))
    monkeypatch.setattr(grounds, "head_nodes", list)
    monkeypatch.setattr(grounds, "driver_node", lambda: None)
    monkeypatch.setattr(grounds, "other_actors", list)
    monkeypatch.setattr(grounds, "other_jobs", lambda: [job for job in found if job != "drained"])
    monkeypatch.setattr(grounds, "drain_node", lambda *told: found.append("drained"))
    return found


def test_ray_is_told_to_drain_no_node_while_somebody_else_is_there(others: list[str]) -> None:
    ground = Running("10.0.0.1:6379")
    ground.drain("n0", 5.0)
    others.append("02000000")
    with pytest.raises(ConfigError, match="n0 was spared: job 02000000"):
        ground.drain("n0", 5.0)
    assert others == ["drained", "02000000"]


@pytest.mark.parametrize(("cpus", "spared"), [(4, True), (0, False)])
def test_a_drill_does_not_take_its_own_node_down(
    cpus: int, spared: bool, others: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `ray job submit --entrypoint-num-cpus 1`; on a head node without room for workers it is safe."""
    node = {"NodeID": "n0", "NodeManagerAddress": "10.0.0.2", "Alive": True, "Resources": {"CPU": cpus} if cpus else {}}
    monkeypatch.setattr(grounds, "driver_node", bystanders.driver_node)
    monkeypatch.setattr(bystanders.ray, "nodes", lambda: [node])
    context = SimpleNamespace(gcs_address="10.0.0.1:6379", get_node_id=lambda: "n0")
    monkeypatch.setattr(grounds.ray, "get_runtime_context", lambda: context)
    ground = Running("10.0.0.1:6379")
    asked = scenario(Event(action="kill_node", who=Who(node=0), when=When(seconds=1)))
    if not spared:
        ground.refuse(asked)
        return
    with pytest.raises(ScenarioError, match=r"this drill itself runs on node 10\.0\.0\.2"):
        ground.refuse(asked)
    with pytest.raises(ConfigError, match="n0 was spared: this drill itself"):
        ground.kill_node("n0")


def test_only_a_node_that_is_gone_afterwards_was_killed(others: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as raylet:
        node = {"NodeID": "n0", "Alive": True, "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": raylet.getsockname()[1]}
        monkeypatch.setattr(grounds.placement, "nodes", lambda: [node])
        monkeypatch.setattr(grounds.ray, "wait", lambda calls, timeout: others.append(calls[0]))
        monkeypatch.setattr(grounds.ray, "kill", lambda hand: others.append("the hand was ended"))

        def ground(strike: Callable[[], str]) -> Running:
            ground = Running("10.0.0.1:6379")
            ground._hands["n0"] = SimpleNamespace(kill_node=SimpleNamespace(remote=strike))
            return ground

        harmless = ground(lambda: "struck")
        monkeypatch.setattr(grounds, "other_jobs", list)
        assert not harmless.kill_node("n0")
        assert others == ["struck", "the hand was ended"]
        assert ground(lambda: str(raylet.close())).kill_node("n0")
        assert not ground(lambda: "again").kill_node("n0"), "it is gone"
        assert not ground(lambda: "unknown").kill_node("n1")


def test_a_worker_does_not_take_a_node_of_a_running_cluster_down(others: list[str]) -> None:
    ground = Running("10.0.0.1:6379")
    with pytest.raises(ScenarioError, match="does not ask who else is there"):
        ground.refuse(scenario(Event(action="kill_node", who=Who(rank=0), when=When(step=9))))
    ground.refuse(scenario(Event(action="kill_node", who=Who(node=0), when=When(step=9))))
    ground.refuse(scenario(Event(action="kill", who=Who(rank=0), when=When(step=9))))


def test_it_is_asked_again_who_is_there_before_the_run_that_is_struck(
    others: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    played: list[str] = []
    (tmp_path / "events.jsonl").write_text("")

    class Runs:
        def __init__(self, *about: object, **more: object) -> None: ...

        def play(self, name: str, *struck: object) -> Played:
            played.append(name)
            others.append("02000000")
            return Played(path=tmp_path, result=RESULT)

    monkeypatch.setattr(drill_module, "Runs", Runs)
    asked = scenario(Event(action="kill_node", who=Who(node=0), when=When(seconds=1)))
    with pytest.raises(ScenarioError, match="job 02000000 is alive"):
        drill_module.drill(asked, Running("10.0.0.1:6379"), storage_path=tmp_path, quiet=True)
    assert len(played) == 1


def test_actors_that_outlived_their_job_are_somebody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose driver is gone, for example; not our own, nor Ray's, nor what is on the head node, which stays."""

    def job(namespace: str, *, dead: bool) -> Any:
        return SimpleNamespace(is_dead=dead, config=SimpleNamespace(ray_namespace=namespace))

    def actor(name: str, job: str, node: str, state: str = "ALIVE") -> dict[str, Any]:
        return {"Name": name, "ActorClassName": "A", "JobID": job, "State": state, "Address": {"NodeID": node}}

    jobs = {"01": job("own", dead=False), "02": job("gone", dead=True), "03": job("_ray_internal_dashboard", dead=False)}
    actors = [
        *(
            actor("worker", "02", "n1"),
            actor("", "02", "n1"),
            actor("supervisor", "02", "head"),
            actor("late", "02", "n1", "DEAD"),
        ),
        *(actor("ours", "01", "n1"), actor("rays", "03", "n1"), actor("coming", "02", "", "RESTARTING")),
    ]
    monkeypatch.setattr(bystanders, "_jobs", lambda: jobs)
    monkeypatch.setattr(bystanders, "_actors", lambda: actors)
    monkeypatch.setattr(bystanders, "head_nodes", lambda: [{"NodeID": "head"}])
    monkeypatch.setattr(bystanders.ray, "get_runtime_context", lambda: SimpleNamespace(get_job_id=lambda: "01"))
    assert bystanders.other_jobs() == []
    assert bystanders.other_actors() == ["worker", "A", "coming"]


# ---------------------------------------------------------------- the engine


class Ground:
    """Writes down what it is told. Nodes are spared once somebody has come."""

    name = "nowhere"

    def __init__(self) -> None:
        self.done: list[tuple[Any, ...]] = []
        self.clock = time.monotonic

    def refuse(self, scenario: Scenario) -> None: ...

    def prepare(self, nodes: list[str]) -> None: ...

    def hand(self, node: str, what: str, pid: int, *more: float) -> bool:
        self.done.append((what, node, pid))
        return True

    def kill_node(self, node: str) -> bool:
        raise ConfigError(f"node {node} was spared: somebody came")

    def lives(self, node: str) -> bool:
        return True

    def unplug(self, node: str) -> None: ...

    def plug(self, node: str) -> None: ...

    def drain(self, node: str, seconds: float) -> None:
        self.done.append(("drain", node))

    def add_node(self) -> str:
        return "a node joined"

    def struck_at(self, marker: list[str]) -> float:
        return float(marker[0])


class Seen(Watch):
    """The run stands as `ACCOUNT` says, all the time."""

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        super().__init__(name, clock)
        self.account = dict(ACCOUNT)

    def look(self, seconds: float) -> bool:
        time.sleep(0.01)
        return True

    def abort(self, reason: str) -> None: ...


def play(
    path: Path,
    asked: Scenario,
    *planted: Planted,
    until: Callable[[Played], object],
    monkeypatch: pytest.MonkeyPatch,
    ground: Any = None,
) -> tuple[Played, Any]:
    """A run that is struck as the scenario says, and is over when as much has happened."""

    def fit() -> Result:
        deadline = time.monotonic() + 30
        while not until(rehearsal.played) and time.monotonic() < deadline:
            time.sleep(0.01)
        return RESULT

    monkeypatch.setattr(engine, "Watch", Seen)
    ground, trainer = ground or Ground(), SimpleNamespace(fit=fit)
    rehearsal = engine.Rehearsal(ground, cast("Any", trainer), path, Schedule(asked), planted)
    return rehearsal.play(), ground


def test_nodes_that_a_recorded_market_gives_are_left_to_the_autoscaler_of_a_running_cluster(
    others: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "spot.csv").write_text("seconds,change\n0.01,-1\n0.05,2\n")
    asked = scenario(Event(action="kill_node", when=When(trace=str(tmp_path / "spot.csv"))))
    ground = Running("10.0.0.1:6379")
    ground.refuse(asked)
    monkeypatch.setattr(ground, "prepare", lambda nodes: None)
    monkeypatch.setattr(ground, "kill_node", lambda node: True)
    played, _ = play(tmp_path, asked, until=lambda played: len(played.struck) == 2, monkeypatch=monkeypatch, ground=ground)
    assert (played.error, played.missed) == (None, [])
    assert [strike.note for strike in played.struck] == ["", "left to the cluster's autoscaler"]


def test_a_drained_node_that_must_be_spared_is_noted_and_the_drill_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = scenario(
        Event(action="freeze", who=Who(node=0), when=When(seconds=0.01), lasts=60),
        Event(action="drain", who=Who(node=1), when=When(seconds=0.02), notice=0.05),
    )
    played, ground = play(tmp_path, asked, until=lambda played: played.missed, monkeypatch=monkeypatch)
    assert played.missed == [1]
    assert [strike.note for strike in played.struck if strike.event == 1] == [
        "",
        "drain was not carried out: node n1 was spared: somebody came",
    ]
    assert ground.done == [("freeze", "n0", 10), ("drain", "n1"), ("thaw", "n0", 10)]


@pytest.mark.parametrize("lives", [False, True])
def test_a_drained_node_that_outlives_its_end_was_not_lost(
    lives: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is gone already is as it should be: its raylet ends when nobody is left on it."""
    ground, ended = Ground(), []
    monkeypatch.setattr(ground, "kill_node", lambda node: ended.append(node))
    monkeypatch.setattr(ground, "lives", lambda node: lives)
    asked = scenario(Event(action="drain", who=Who(node=1), when=When(seconds=0.01), notice=0.05))
    played, _ = play(tmp_path, asked, until=lambda played: ended, monkeypatch=monkeypatch, ground=ground)
    assert played.missed == ([0] if lives else [])
    notes = [strike.note for strike in played.struck]
    assert notes == ["", *(["drain was not carried out: node n1 is still there"] if lives else [])]


def test_fewer_nodes_than_a_recorded_market_takes_are_struck_and_that_is_said(
    others: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "spot.csv").write_text("seconds,change\n0.01,-3\n")
    asked = scenario(Event(action="kill_node", when=When(trace=str(tmp_path / "spot.csv"))))
    ground = Ground()
    monkeypatch.setattr(ground, "kill_node", lambda node: True)
    played, _ = play(tmp_path, asked, until=lambda played: len(played.struck) == 2, monkeypatch=monkeypatch, ground=ground)
    assert (played.error, played.missed) == (None, [0])


def test_who_is_named_is_struck_together_with_the_others_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ACCOUNT, "pids", {"w0": 10, "w1": 0})  # w1 has yet to start
    asked = scenario(
        Event(action="kill", who=Who(ranks=(0, 1)), when=When(seconds=0.01)),
        Event(action="kill", who=Who(rank=0), when=When(seconds=0.02)),
    )
    played, ground = play(tmp_path, asked, until=lambda played: played.struck, monkeypatch=monkeypatch)
    assert (played.missed, ground.done) == ([0], [("kill", "n0", 10)])


def test_a_node_that_was_drained_in_vain_made_a_pause_when_it_went(tmp_path: Path) -> None:
    """Nobody could take the place of its worker, which trained on until then."""
    records: list[dict[str, Any]] = [
        {"event": "Noticed", "at": 10.0, "member": "w0"},
        {"event": "WorkerLost", "at": 70.0, "member": "w0", "cause": "gone"},
        {"event": "Recovery", **asdict(Recovery("gone", "heartbeat", lost=["w0"], detected=70.0, resumed=71.5))},
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    drained = Struck(event=0, action="drain", at=9.0, step=3, members=("w0",), node="n0")
    report = measure(scenario(), "nowhere", Played(path=tmp_path, struck=[drained]), Played(path=tmp_path))
    assert [strike.pause_s for strike in report.strikes] == [1.5]
    assert report.pauses.longest == 1.5


def test_a_node_whose_end_comes_after_that_of_the_run_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = scenario(Event(action="drain", who=Who(node=1), when=When(seconds=0.01), notice=60))
    played, ground = play(tmp_path, asked, until=lambda played: played.struck, monkeypatch=monkeypatch)
    assert [strike.note for strike in played.struck] == ["", "the run ended before this node was to be taken"]
    assert (played.missed, ground.done) == ([], [("drain", "n1")])


class Full(Ground):
    """Has room for no more nodes."""

    def add_node(self) -> str:
        raise ConfigError("there is no room for another node")


def test_a_drill_that_breaks_off_tells_what_it_struck_until_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = scenario(
        Event(action="freeze", who=Who(node=0), when=When(seconds=0.01), lasts=60),
        Event(action="bring_back", when=When(seconds=0.05)),
    )
    played, ground = play(tmp_path, asked, until=lambda played: played.error, monkeypatch=monkeypatch, ground=Full())
    assert str(played.error) == "there is no room for another node"
    assert [strike.action for strike in played.struck] == ["freeze"]
    assert ground.done == [("freeze", "n0", 10), ("thaw", "n0", 10)]
    assert 1 in played.missed


@pytest.mark.parametrize("struck", [True, False])
def test_only_where_nothing_was_struck_an_error_is_a_refusal(
    struck: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its exit code a drill says whether anything was done to the cluster."""
    (tmp_path / "events.jsonl").write_text("")
    killed = Struck(event=0, action="kill", at=1.0, step=3, members=("w0",))
    ended = Played(path=tmp_path, error=ConfigError("no such node"), struck=[killed] if struck else [])
    runs = [Played(path=tmp_path, result=RESULT), ended]
    monkeypatch.setattr(drill_module, "Runs", lambda *about, **more: SimpleNamespace(play=lambda *how: runs.pop(0)))
    (tmp_path / "asked.yaml").write_text("name: strikes\nworkers: 2\nsteps: 100\nbatch: 8\n")
    monkeypatch.setattr(cli_drill, "_drill", lambda asked, *how: drill_module.drill(asked, Ground(), storage_path=tmp_path))
    found = CliRunner().invoke(cli_drill.drill_command, [str(tmp_path / "asked.yaml")])
    assert found.exit_code == (cli_drill.FAILED if struck else cli_drill.REFUSED), found.output
    said = (tmp_path / "drill.json").read_text() if struck else found.output  # a narrow table breaks its lines
    assert "no such node" in said


@pytest.mark.parametrize(
    ("happened", "words"),
    [
        ({"event": "Recovery", **asdict(Recovery("its process is gone", "Ray", lost=["w1"]))}, "w1: its process is gone"),
        ({"event": "SamplesLost"}, "samples were lost"),
        ({"event": "Recovery", **asdict(Recovery("another node came", "Ray"))}, ""),
    ],
)
def test_a_run_that_was_disturbed_by_itself_is_the_measure_of_nothing(
    happened: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "events.jsonl").write_text(json.dumps(happened) + "\n")
    runs = [Played(path=tmp_path, result=RESULT), Played(path=tmp_path, error=ConfigError("it was played"))]
    monkeypatch.setattr(drill_module, "Runs", lambda *about, **more: SimpleNamespace(play=lambda *how: runs.pop(0)))
    (tmp_path / "asked.yaml").write_text("name: strikes\nworkers: 2\nsteps: 100\nbatch: 8\n")
    monkeypatch.setattr(cli_drill, "_drill", lambda asked, *how: drill_module.drill(asked, Ground(), storage_path=tmp_path))
    found = CliRunner().invoke(cli_drill.drill_command, [str(tmp_path / "asked.yaml")])
    assert found.exit_code == cli_drill.REFUSED, found.output
    assert (f"the undisturbed run was disturbed ({words})" if words else "it was played") in found.output
    assert len(runs) == (1 if words else 0), "else the second run is not worth its time"


def test_a_supervisor_that_froze_at_a_point_is_thawed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FailAt(role="supervisor", phase="RUNNING", action="sigstop")
    planted = Planted(0, Event(action="freeze", who=Who(role="supervisor"), lasts=0.05), fault)
    (tmp_path / "faults").mkdir()
    (tmp_path / "faults" / fault.name).write_text("1.0 5 1.0 head")
    played, ground = play(tmp_path, scenario(), planted, until=lambda played: played.struck, monkeypatch=monkeypatch)
    assert played.struck[0].members == ("supervisor",)
    assert ground.done == [("wake_later", "head", 5), ("thaw", "head", 5)]


def test_what_comes_at_random_and_cannot_strike_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kills at once would leave nobody: the failures are rarer than they were asked for, and that is said; here there were
    none at all."""
    (tmp_path / "events.jsonl").write_text("")
    asked = scenario(Event(action="kill", who=Who(count=2), when=When(mtbf=0.01)))
    played, ground = play(tmp_path, asked, until=lambda played: played.dropped, monkeypatch=monkeypatch)
    assert (played.struck, played.missed, ground.done) == ([], [0], [])
    assert played.dropped > 0
    report = measure(asked, "nowhere", played, played)
    assert report.dropped == played.dropped
    assert f"| came at random, and could not strike | {played.dropped} |" in markdown(report)


def test_a_run_that_nothing_was_done_to_did_not_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chance may leave one event out, and that is said; but not all of them."""
    (tmp_path / "events.jsonl").write_text("")
    late = Event(action="kill", who=Who(role="any"), when=When(mtbf=1e9))
    for events, kept in (((late,), False), ((late, Event(action="kill", who=Who(rank=0), when=When(seconds=0.01))), True)):
        asked, ends = scenario(*events), time.monotonic() + (30 if kept else 0.3)
        over = lambda played, ends=ends: played.struck or time.monotonic() > ends  # noqa: E731
        played, _ = play(tmp_path, asked, until=over, monkeypatch=monkeypatch)
        assert (played.missed, played.absent) == ([], [0])
        (check,) = [one for one in verdict(measure(asked, "nowhere", played, played), asked) if one.name == "struck as asked"]
        assert (check.found, check.kept) == ("never came, at random: events.0", kept)
    calm = verdict(measure(scenario(), "nowhere", Played(path=tmp_path), Played(path=tmp_path)), scenario())
    assert [check.kept for check in calm if check.name == "struck as asked"] == [True], "it asks for nothing"


def test_promises_of_a_run_that_failed_were_not_checked(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text("")
    report = measure(scenario(), "nowhere", Played(path=tmp_path, error=AbortedError("it ended")), Played(path=tmp_path))
    (check,) = [one for one in verdict(report, scenario()) if one.name == "promises kept"]
    assert (check.found, check.kept) == ("not checked: the run failed", False)


GREW = Recovery("another node came", "Ray", guarantee=Guarantee.ROUNDING, world_before=2, world_after=4)


@pytest.mark.parametrize("action", ["freeze", "unplug"])
@pytest.mark.parametrize(("lasts", "at", "kept"), [(None, 3.0, False), (None, 29.0, True), (2.0, 3.0, True)])
def test_who_falls_silent_for_good_must_be_noticed(
    action: Any, lasts: float | None, at: float, kept: bool, tmp_path: Path
) -> None:
    """Unless the run ends before anybody could; a spare, for example, for whom nobody waits."""
    states = {"RUNNING": 1.0, "SHUTTING_DOWN": 30.0, "FINISHED": 40.0}
    records = [{"event": "State", "at": since, "state": state, "incarnation": 1} for state, since in states.items()]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    asked = scenario(Event(action=action, who=Who(role="spare"), when=When(seconds=2.0), lasts=lasts))
    asked = asked.model_copy(update={"pass_if": Thresholds(detection_p95=1.0)})
    played = Played(path=tmp_path, struck=[Struck(event=0, action=action, at=at, step=3, members=("w2",))])
    (check,) = [one for one in verdict(measure(asked, "nowhere", played, played), asked) if one.name == "detection p95"]
    assert (check.found, check.kept) == ("none" if kept else "none; never noticed: events.0", kept)


@pytest.mark.parametrize(
    ("calm", "grew", "struck", "why"),
    [
        ((2, 4), True, (4, 4), "the undisturbed run began with a world of 2, this one with 4"),
        ((2, 4), True, (2, 4), "the undisturbed run had worlds of 2, 4"),
        ((4,), True, (4, 4), "the undisturbed run kept no more than rounding"),
        ((4,), False, (4, 4), ""),
    ],
)
def test_an_undisturbed_run_of_other_workers_is_no_measure(
    calm: tuple[int, ...], grew: bool, struck: tuple[int, ...], why: str, tmp_path: Path
) -> None:
    """As where an autoscaler has brought nodes meanwhile: neither the bits nor the time are those of one world."""
    runs = []
    for name, sizes, recoveries in (("struck", struck, []), ("calm", calm, [GREW] if grew else [])):
        records = [{"event": "Resumed", "incarnation": n, "step": 0, "world_size": size} for n, size in enumerate(sizes)]
        records += [{"event": "Recovery", **asdict(recovery)} for recovery in recoveries]
        (tmp_path / name).mkdir()
        (tmp_path / name / "events.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        runs.append(Played(path=tmp_path / name, result=Result({}, "", [], name, 1.0, None)))
    report = measure(scenario(), "nowhere", *runs)
    assert (report.bit_equal, report.incomparable) == (False, why)
    assert any(violation.startswith("I3 the final state") for violation in report.violations) == (not why)
    asked = scenario().model_copy(update={"pass_if": Thresholds(goodput=0.5)})
    (check,) = [one for one in verdict(replace(report, goodput=0.9), asked) if one.name == "goodput"]
    assert (check.found, check.kept) == (f"not comparable: {why}" if why else "90.0%", not why)
    assert (f"not comparable: {why}" in markdown(report)) == bool(why)


def test_a_loss_is_the_strikes_though_their_clocks_differ(tmp_path: Path) -> None:
    """The only strike that ever hit it, by a clock that is 0.3 s ahead; and one that nobody ever noticed has no time."""
    records: list[dict[str, Any]] = [
        {"event": "WorkerLost", "at": 8.7, "member": "w0", "cause": "gone"},
        {"event": "Recovery", **asdict(Recovery("gone", "heartbeat", lost=["w0"], detected=8.7, resumed=10.0))},
        {"event": "Recovery", **asdict(Recovery("it was late", "heartbeat", detected=20.0, resumed=21.0))},
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    hits = [("kill", 9.0, "w0"), ("kill", 30.0, "w1"), ("freeze", 31.0, "w2"), ("kill", 32.0, "supervisor")]
    struck = [Struck(event=n, action=what, at=at, step=3, members=(who,)) for n, (what, at, who) in enumerate(hits)]
    asked = scenario().model_copy(update={"pass_if": Thresholds(detection_p95=1.0)})
    for some, found, kept in ((struck[:1], "0 s", True), (struck, "0 s; never noticed: events.1", False)):
        report = measure(asked, "nowhere", Played(path=tmp_path, struck=some), Played(path=tmp_path))
        assert (report.strikes[0].detected_s, report.strikes[0].pause_s) == (0.0, 1.0)
        assert {kind.cause for kind in report.recoveries} == {"kill", "false alarm"}
        (check,) = [one for one in verdict(report, asked) if one.name == "detection p95"]
        assert (check.found, check.kept) == (found, kept)


def test_who_was_frozen_is_thawed_before_an_interrupted_run_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()

    class Interrupted(Seen):
        def look(self, seconds: float) -> bool:
            if ground.done:
                raise KeyboardInterrupt
            return super().look(seconds)

        def abort(self, reason: str) -> None:
            assert ground.done[-1] == ("thaw", "n0", 10)
            ended.set()

    def fit() -> Result:
        ended.wait(10)
        raise AbortedError("the drill was interrupted")

    monkeypatch.setattr(engine, "Watch", Interrupted)
    ground, asked = Ground(), scenario(Event(action="freeze", who=Who(node=0), when=When(seconds=0.01), lasts=60))
    trainer: Any = SimpleNamespace(fit=fit)
    with pytest.raises(KeyboardInterrupt):
        engine.Rehearsal(ground, trainer, tmp_path, Schedule(asked)).play()
    assert ended.is_set()


@pytest.mark.parametrize("ignored", [False, True])
def test_a_terminal_that_is_closed_ends_a_drill_as_ctrl_c_does(
    ignored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else who is frozen stays so; not under nohup, where it goes on."""

    class Closed(Ground):
        def hand(self, node: str, what: str, pid: int, *more: float) -> bool:
            super().hand(node, what, pid, *more)
            if what == "freeze":
                assert more == (60,), "whoever is left behind wakes it then"
                signal.raise_signal(signal.SIGHUP)
            return True

    asked, ground = scenario(Event(action="freeze", who=Who(node=0), when=When(seconds=0.01), lasts=60)), Closed()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else lambda *_: pytest.fail("not heeded"))
    try:
        with nullcontext() if ignored else pytest.raises(KeyboardInterrupt):
            play(tmp_path, asked, until=lambda _: ground.done, monkeypatch=monkeypatch, ground=ground)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert ground.done == [("freeze", "n0", 10), ("thaw", "n0", 10)]


def test_the_account_of_a_run_that_has_ended_says_nothing_of_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its seconds stand still."""
    watch, state = Watch("run", lambda: 100.0), "FINISHED"
    monkeypatch.setattr("raytrain_ft.drill.watch.ray.get_actor", lambda *name, **more: SimpleNamespace(status=status))
    monkeypatch.setattr("raytrain_ft.drill.watch.ray.wait", lambda calls, timeout: (calls, []))
    monkeypatch.setattr("raytrain_ft.drill.watch.ray.get", lambda call: {**ACCOUNT, "state": state})
    status = SimpleNamespace(remote=object)
    assert watch.look(0.0)
    assert (watch.offsets, watch.account and watch.account["state"]) == ({}, "FINISHED")
    state = "RUNNING"
    assert watch.look(0.0)
    assert watch.offsets == {("head", 5): 99.0}


@pytest.mark.parametrize("up", [False, True])
def test_no_order_is_left_with_a_hand_that_is_not_up(up: bool, others: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would carry it out whenever its process has started: somebody is struck who was taken for spared."""
    ground = Running("10.0.0.1:6379")
    orders = {what: SimpleNamespace(remote=lambda *about, what=what: what) for what in ("__ray_ready__", "kill")}
    hand = ground._hands["n0"] = SimpleNamespace(**orders)
    monkeypatch.setattr(grounds.ray, "wait", lambda calls, timeout: (calls, []) if up else ([], calls))
    monkeypatch.setattr(grounds.ray, "get", lambda call, timeout: others.append(call) or True)
    assert ground.hand("n0", "kill", 10) == up
    assert others == (["kill"] if up else [])
    assert ground._hands == {"n0": hand}, "the same one may be up the next time"


def test_an_order_that_is_not_carried_out_in_time_is_taken_back(others: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def late(call: str, timeout: float) -> bool:
        raise GetTimeoutError

    ground = Running("10.0.0.1:6379")
    orders = {what: SimpleNamespace(remote=lambda *about, what=what: what) for what in ("__ray_ready__", "kill")}
    hand = ground._hands["n0"] = SimpleNamespace(**orders)
    monkeypatch.setattr(grounds.ray, "wait", lambda calls, timeout: (calls, []))
    monkeypatch.setattr(grounds.ray, "get", late)
    monkeypatch.setattr(grounds.ray, "cancel", others.append)
    assert not ground.hand("n0", "kill", 10)
    assert others == ["kill"]
    assert ground._hands == {"n0": hand}, "who is slowed is quickened by the same one"


@pytest.mark.parametrize(
    ("event", "ended"),
    [
        (Event(action="freeze", who=Who(node=0), when=When(seconds=0.01), lasts=60), ("thaw", "n0", 10)),
        (Event(action="freeze", who=Who(role="supervisor"), when=When(seconds=0.01), lasts=60), ("thaw", "head", 5)),
        (Event(action="unplug", who=Who(node=0), when=When(seconds=0.01), lasts=60), ("plug", "n0")),
    ],
)
def test_what_was_struck_in_the_moment_of_an_interruption_is_undone(
    event: Event, ended: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C comes when the strike is carried out, and its call has not returned."""

    class Interrupted(Ground):
        def hand(self, node: str, what: str, pid: int, *more: float) -> bool:
            super().hand(node, what, pid)
            if what == "freeze":
                raise KeyboardInterrupt
            return True

        def unplug(self, node: str) -> None:
            self.done.append(("unplug", node))
            raise KeyboardInterrupt

        def plug(self, node: str) -> None:
            self.done.append(("plug", node))

    ground = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        play(tmp_path, scenario(event), until=lambda _: ground.done, monkeypatch=monkeypatch, ground=ground)
    assert ground.done[1:] == [ended]


def test_nobody_is_thawed_who_could_not_be_frozen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(Ground):
        def hand(self, node: str, what: str, pid: int, *more: float) -> bool:
            super().hand(node, what, pid)
            return False

    asked = scenario(Event(action="freeze", who=Who(node=0), when=When(seconds=0.01), lasts=0.01))
    ground = Gone()
    play(tmp_path, asked, until=lambda _: len(ground.done) > 2, monkeypatch=monkeypatch, ground=ground)
    assert {what for what, *_ in ground.done} == {"freeze"}


@pytest.mark.parametrize("action", ["freeze", "unplug"])
def test_who_is_back_counts_again_as_one_who_is_left(action: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anybody has noticed: else whoever else is struck at random would be taken for the last one, and be spared."""
    asked = scenario(
        Event(action=action, who=Who(node=0), when=When(seconds=0.01), lasts=0.05),
        Event(action="kill", who=Who(rank=1), when=When(mtbf=0.02)),
    )
    struck = lambda played: any(strike.action == "kill" for strike in played.struck)  # noqa: E731
    began = time.monotonic()
    played, _ = play(tmp_path, asked, until=lambda it: struck(it) or time.monotonic() > began + 3, monkeypatch=monkeypatch)
    assert struck(played)


def test_who_fell_silent_still_has_the_training_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FailAt(rank=0, step=1, phase="backward", action="silence")
    planted = Planted(0, Event(action="silence", who=Who(rank=0), when=When(step=1)), fault)
    (tmp_path / "faults").mkdir()
    (tmp_path / "faults" / fault.name).write_text("1.0 10 1.0 n0")
    began, asked = time.monotonic(), scenario(Event(action="kill", who=Who(rank=1), when=When(mtbf=0.05)))
    over = lambda played: len(played.struck) > 1 or time.monotonic() > began + 3  # noqa: E731
    played, _ = play(tmp_path, asked, planted, until=over, monkeypatch=monkeypatch)
    assert [strike.action for strike in played.struck][:2] == ["silence", "kill"]


def test_who_was_struck_is_known_by_its_node_where_processes_of_several_have_the_same_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in pods, each of which counts from 1 on; and the ranks are others' by now."""
    monkeypatch.setitem(ACCOUNT, "pids", {"w0": 10, "w1": 10})
    fault = FailAt(rank=1, step=1, phase="forward", action="sigstop")
    planted = Planted(0, Event(action="freeze", who=Who(rank=1), when=When(step=1), lasts=0.05), fault)
    (tmp_path / "faults").mkdir()
    (tmp_path / "faults" / fault.name).write_text("1.0 10 1.0 n0")
    played, ground = play(tmp_path, scenario(), planted, until=lambda played: played.struck, monkeypatch=monkeypatch)
    assert [strike.members for strike in played.struck] == [("w0",)]
    assert ground.done[-1] == ("thaw", "n0", 10)


def test_a_failure_that_waits_for_others_has_not_struck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FailAt(rank=0, step=1, phase="forward", together=2)
    planted = Planted(0, Event(action="kill", who=Who(ranks=(0, 1)), when=When(step=1)), fault)
    (tmp_path / "faults").mkdir()
    (tmp_path / "faults" / fault.name).write_text("")
    began = time.monotonic()
    over = lambda _: time.monotonic() > began + 0.2  # noqa: E731
    played, _ = play(tmp_path, scenario(), planted, until=over, monkeypatch=monkeypatch)
    assert (played.struck, played.missed) == ([], [0])
