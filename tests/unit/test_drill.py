"""What needs no cluster of a drill: the hand that strikes, the run's clock, the simulator, the command."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from click.testing import CliRunner

from raytrain_ft.chaos.hand import Hand
from raytrain_ft.cli.drill import drill_command
from raytrain_ft.drill import _predicted, drill
from raytrain_ft.drill.faults import casualties, planted, task_of
from raytrain_ft.drill.measure import Clock, guilty
from raytrain_ft.drill.numbers import Spread
from raytrain_ft.drill.played import Struck
from raytrain_ft.drill.predict import Events, job_of, predict, rehearse, strategy_of
from raytrain_ft.drill.report import markdown
from raytrain_ft.errors import ScenarioError
from raytrain_ft.policy.messages import WorkerLost
from raytrain_ft.scenario import Scenario, Who, trainer_parts
from raytrain_ft.scenario.points import NEVER, OF_A_PIPELINE, STEP_PHASES
from raytrain_ft.simulate import simulate
from raytrain_ft.simulate.engine import Simulation

SIMULATED = """
name: simulated
workers: 4
spares: 1
nodes: 8
steps: 1000
batch: 32
checkpoint_every: 50
assumed:
  step_s: 0.5
  costs: {detect_s: 1.0, start_s: 3.0, persist_s: 1.0}
events:
"""


def scenario(directory: Path, text: str) -> Scenario:
    path = directory / "scenario.yaml"
    path.write_text(text)
    return Scenario.load(path)


# ---------------------------------------------------------------- the hand


@contextmanager
def process(name: str) -> Iterator[psutil.Process]:
    """A process that calls itself this, as Ray's workers do."""
    code = "import time; print(flush=True); time.sleep(60)"
    with subprocess.Popen([name, "-c", code], executable=sys.executable, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        try:
            yield psutil.Process(child.pid)
        finally:
            child.kill()


GOES_ON = (psutil.STATUS_SLEEPING, psutil.STATUS_RUNNING)


def becomes(process: psutil.Process, *states: str) -> bool:
    """Signals are taken when the process is next on a processor."""
    deadline = time.monotonic() + 10
    while process.status() not in states and time.monotonic() < deadline:
        time.sleep(0.001)
    return process.status() in states


def test_a_process_that_is_not_of_a_run_is_never_touched() -> None:
    hand = Hand()
    with process("somebody") as other:
        assert not any([hand.kill(other.pid), hand.freeze(other.pid), hand.thaw(other.pid), hand.slow(other.pid, 2.0)])
        assert other.status() in GOES_ON
    assert not hand.kill(other.pid)  # it is gone


def test_an_actor_of_somebody_else_is_never_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_JOB_ID", "02000000")
    with process("ray::Worker.run") as other:
        assert not Hand("01000000").kill(other.pid)
        assert Hand("02000000").freeze(other.pid)
    monkeypatch.delenv("RAY_JOB_ID")
    with process("ray::WorkerPool.serve") as other:
        assert not Hand("01000000").kill(other.pid)
    with process("ray::Worker.run") as unsaid:
        assert Hand("01000000").freeze(unsaid.pid)


def test_who_is_slowed_twice_is_quickened_at_once() -> None:
    hand = Hand()
    with process("ray::Worker") as worker:
        assert hand.slow(worker.pid, 4.0)
        assert hand.slow(worker.pid, 2.0)
        assert hand.quicken(worker.pid)
        assert becomes(worker, *GOES_ON)
        assert all(worker.status() in GOES_ON for _ in range(50) if not time.sleep(0.0031))


def test_a_process_of_a_run_is_frozen_thawed_and_killed() -> None:
    hand = Hand()
    with process("ray::Worker.run") as worker:
        assert hand.freeze(worker.pid)
        assert becomes(worker, psutil.STATUS_STOPPED)
        assert hand.thaw(worker.pid)
        assert becomes(worker, *GOES_ON)
        assert hand.kill(worker.pid)
        worker.wait(timeout=10)


def test_a_freeze_ends_though_nobody_is_left_to_thaw(monkeypatch: pytest.MonkeyPatch) -> None:
    """What wakes it is no child of the hand: Ray ends those."""

    def children() -> set[int]:
        return {child.pid for child in psutil.Process().children(recursive=True)}

    with process("ray::Worker.run") as worker, process("somebody") as other:
        before = children()
        assert Hand().freeze(worker.pid, 1.0)
        assert becomes(worker, psutil.STATUS_STOPPED)
        assert children() <= before
        assert becomes(worker, *GOES_ON)
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("it is nobody's"))
        assert not Hand().wake_later(other.pid, 1.0)


def test_a_slow_process_stands_still_most_of_the_time_and_no_longer_when_it_is_over() -> None:
    hand, turns = Hand(), []

    def wait(seconds: float) -> bool:
        """It runs in every other turn, from the first one on."""
        assert becomes(worker, psutil.STATUS_STOPPED) if len(turns) % 2 else becomes(worker, *GOES_ON)
        turns.append(seconds)
        return len(turns) > 20

    with process("ray::Worker") as worker:
        hand._hold_up(worker.pid, 4.0, wait)
        assert sum(turns[1:-1:2]) == pytest.approx(0.75 * sum(turns[:-1]))
        assert becomes(worker, *GOES_ON)
        assert hand.slow(worker.pid, 4.0)
        assert becomes(worker, psutil.STATUS_STOPPED)
        assert hand.quicken(worker.pid)
        assert becomes(worker, *GOES_ON)
        assert all(worker.status() in GOES_ON for _ in range(50))
        assert not hand.quicken(worker.pid)


def test_who_is_slow_and_frozen_stands_still_until_it_is_thawed() -> None:
    hand = Hand()
    with process("ray::Worker") as worker:
        assert hand.slow(worker.pid, 4.0)
        assert hand.freeze(worker.pid)
        assert becomes(worker, psutil.STATUS_STOPPED)
        assert all(worker.status() == psutil.STATUS_STOPPED for _ in range(50) if not time.sleep(0.0031))
        assert hand.quicken(worker.pid)
        assert worker.status() == psutil.STATUS_STOPPED
        assert hand.thaw(worker.pid)
        assert becomes(worker, *GOES_ON)


# ---------------------------------------------------------------- numbers


def test_the_clock_goes_on_while_the_supervisor_is_away() -> None:
    """Records of a run whose supervisor was away for 7 s at second 10, and for 2 s at second 20."""
    records = [{"event": "SupervisorRestarted", "at": at} for at in (10.0, 20.0)]
    clock = Clock.of(records, [0.0, 7.0, 9.0])
    assert [clock.real(at) for at in (3.0, 9.9, 10.0, 19.0, 20.0, 25.0)] == [3.0, 9.9, 17.0, 26.0, 29.0, 34.0]
    assert Clock.of(records, [0.0, 7.0]).real(25.0) == 32.0  # the last life was never seen


def test_of_several_strikes_the_last_one_before_a_loss_is_to_blame() -> None:
    hits = [("slow_down", 5.0, ("w0",)), ("freeze", 8.0, ("w1",)), ("kill_node", 9.0, ("w0", "w2")), ("kill", 20.0, ("w2",))]
    struck = [Struck(event=n, action=what, at=at, step=0, members=who) for n, (what, at, who) in enumerate(hits)]
    assert guilty(struck, {"w0": 9.2, "w2": 9.3, "w3": 1.0}) == [set(), set(), {"w0", "w2"}, set()]


def test_percentiles_are_of_the_nearest_rank() -> None:
    found = Spread.of([float(n) for n in range(100, 0, -1)])
    assert (found.count, found.p50, found.p95, found.longest) == (100, 50.0, 95.0, 100.0)
    assert Spread.of([]) == Spread(count=0)
    assert Spread.of([3.0]) == Spread(count=1, p50=3.0, p95=3.0, longest=3.0)


# ---------------------------------------------------------------- the simulator


def test_the_simulator_strikes_as_the_scenario_says(tmp_path: Path) -> None:
    events = """
  - {action: kill, who: {rank: 1}, when: {step: 100}, at: {share: 50%}}
  - {action: kill_node, who: {ranks: [0, 2]}, when: {step: 400}, lasts: 10s}
  - {action: freeze, who: {survivors: 3}, when: {step: 700}}
"""
    asked = scenario(tmp_path, SIMULATED + events)
    (outcome,) = predict(asked, job_of(asked, None)).outcomes
    assert outcome.finished, outcome.reason
    assert (outcome.failures, outcome.recoveries) == (3, 3)
    # Nothing but half a step, detection, and for the second node of two, of which one spare takes one place, another start.
    assert outcome.seconds > 1000 * 0.5 + 3 * 1.0 + 3.0
    assert outcome.goodput > 0.97


@pytest.mark.parametrize(
    ("stated", "strategy", "guarantee", "lost"),
    [
        ("strategy: rollback", "replication", "exact", 0),  # with a barrier there is no partial update to keep
        ("strategy: rollback\nupdate: wait_free", "rollback", "lossy", 0),
        ("update: wait_free", "replication", "rounding", 0),  # a partial update is undone
        ("strategy: lossy", "lossy", "lossy", 8),
        ("strategy: lossy\nlost_samples: return", "lossy", "lossy", 0),
        ("strategy: lossy\nquorum: 80%", "replication", "exact", 0),
    ],
)
def test_the_simulator_does_what_a_run_would_with_the_strategy(
    stated: str, strategy: str, guarantee: str, lost: int, tmp_path: Path
) -> None:
    head = SIMULATED.replace("checkpoint_every: 50", f"checkpoint_every: null\n{stated}")
    asked = scenario(tmp_path, head + "  - {action: kill, who: {rank: 1}, when: {step: 100}, at: {share: 75%}}\n")
    (outcome,) = predict(asked, job_of(asked, None)).outcomes
    assert (outcome.strategies, outcome.guarantee, outcome.samples_lost) == ({strategy: 1}, guarantee, lost)
    _, _, recovery, _ = trainer_parts(asked)
    assert (recovery.quorum, recovery.lost_samples) == (asked.quorum, asked.lost_samples)


@pytest.mark.parametrize(("replacement", "longest", "guarantee"), [("wait", 31.0, "exact"), ("shrink", 1.0, "rounding")])
def test_the_simulator_waits_for_a_replacement_only_where_a_run_would(
    replacement: str, longest: float, guarantee: str, tmp_path: Path
) -> None:
    head = SIMULATED.replace("workers: 4\nspares: 1\nnodes: 8", f"workers: [2, 4]\nspares: 0\nreplacement: {replacement}")
    events = "  - {action: kill, who: {rank: 1}, when: {step: 100}}\n"
    asked = scenario(tmp_path, head.replace("start_s: 3.0", "start_s: 30.0") + events)
    (outcome,) = predict(asked, job_of(asked, None)).outcomes
    assert outcome.pauses[0] == pytest.approx(longest, abs=1)
    assert (outcome.finished, outcome.guarantee) == (True, guarantee)


@pytest.mark.parametrize("when", ["step: 100", "seconds: 60", "mtbf: 50s, count: 1"])
@pytest.mark.parametrize(("spares", "nodes", "pause"), [(0, 4, 50 + 3 + 1), (0, 5, 3 + 1), (1, 5, 1)])
def test_a_node_that_comes_after_a_while_is_not_there_before(
    when: str, spares: int, nodes: int, pause: float, tmp_path: Path
) -> None:
    head = SIMULATED.replace("spares: 1\nnodes: 8", f"spares: {spares}\nnodes: {nodes}")
    asked = scenario(tmp_path, f"{head}  - {{action: kill_node, who: {{rank: 1}}, when: {{{when}}}, lasts: 50s}}\n")
    (outcome, *_) = predict(asked, job_of(asked, None)).outcomes
    assert outcome.pauses == (pytest.approx(pause, abs=1),)


@pytest.mark.parametrize("strategy", ["auto", "replication", "lossy", "rollback", "skip"])
@pytest.mark.parametrize(("every", "kept"), [("auto", True), ("50", True), ("null", False)])
def test_the_simulator_goes_back_to_checkpoints_where_a_run_would(
    strategy: str, every: str, kept: bool, tmp_path: Path
) -> None:
    head = SIMULATED.replace("workers: 4", "workers: 2").replace(
        "checkpoint_every: 50", f"checkpoint_every: {every}\nstrategy: {strategy}"
    )
    asked = scenario(tmp_path, head + "  - {action: kill_node, who: {ranks: [0, 1]}, when: {step: 60}}\n")
    (outcome,) = predict(asked, job_of(asked, None)).outcomes
    goes_back = kept and strategy != "replication"  # which never does
    assert outcome.reason.startswith("" if goes_back else "NoSurvivorError")
    assert (outcome.finished, outcome.guarantee, outcome.samples_lost) == (goes_back, "exact", 0)
    assert outcome.strategies == {"checkpoint" if goes_back else "replication": 1}


def test_a_pipeline_without_checkpoints_replays_from_the_beginning_in_the_simulator_too(tmp_path: Path) -> None:
    def lost(every: str) -> float:
        head = SIMULATED.replace("workers: 4", "workers: 4\nstages: 4").replace("every: 50", f"every: {every}")
        asked = scenario(tmp_path, head + "  - {action: kill_node, who: {rank: 1}, when: {step: 600}}\n")
        (outcome,) = predict(asked, job_of(asked, None)).outcomes
        assert (outcome.finished, outcome.strategies) == (True, {"logging": 1})
        return outcome.seconds - outcome.useful_s

    # A replay has no bubbles: m / (m + p - 1) of a step. The last of these checkpoints is of one step before, or some more.
    assert lost("null") - lost("10") > 580 * 0.5 / 4


@pytest.mark.parametrize(("share", "workers", "struck"), [(0.28, 25, 7), (0.14, 50, 7), (0.07, 100, 7), (0.281, 25, 8)])
def test_a_share_of_workers_is_not_one_more_by_rounding(share: float, workers: int, struck: int) -> None:
    assert casualties(Who(share=share), workers) == struck


@pytest.mark.parametrize(
    ("point", "strategy"),
    [("phase: commit", "replication"), ("phase: updated", "replication"), ("phase: forward", "lossy"), ("bucket: 0", "lossy")],
)
def test_a_step_that_is_reduced_everywhere_is_completed_in_the_simulator_too(point: str, strategy: str, tmp_path: Path) -> None:
    head = SIMULATED.replace("checkpoint_every: 50", "checkpoint_every: null\nstrategy: lossy").replace(
        "1.0, s", "1.0, update_s: 0.1, s"
    )
    asked = scenario(tmp_path, head + f"  - {{action: kill, who: {{rank: 1}}, when: {{step: 100}}, at: {{{point}}}}}\n")
    (outcome,) = predict(asked, job_of(asked, None)).outcomes
    assert (outcome.strategies, outcome.samples_lost) == ({strategy: 1}, 8 if strategy == "lossy" else 0)


def test_a_place_that_the_model_does_not_have_is_refused_in_the_simulator_too(tmp_path: Path) -> None:
    event = "  - {action: kill, who: {rank: 1}, when: {step: 100}, at: {layer: 200}}\n"
    with pytest.raises(ScenarioError, match=r"line \d+: .*layer.*200: the model has 4 layers with parameters: use 0 to 3"):
        rehearse(scenario(tmp_path, SIMULATED + event))


def test_a_trace_that_takes_more_nodes_than_there_are_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "spot.csv").write_text("seconds,change\n10,-99\n")
    asked = scenario(tmp_path, SIMULATED + "  - {action: kill_node, when: {trace: spot.csv}}\n")
    with pytest.raises(ScenarioError, match=r"line 13: .*spot.csv, line 2: 99 nodes are lost at once, and the job has 8"):
        drill(asked)


def test_rates_in_the_simulator_are_those_of_the_scenario(tmp_path: Path) -> None:
    events = (
        "  - {action: kill, who: {role: any}, when: {mtbf: 20s}}\n  - {action: freeze, who: {rank: 0}, when: {mtbf: 30s}}\n"
    )
    asked = scenario(tmp_path, SIMULATED + events)
    found = predict(asked, job_of(asked, None), seeds=20)
    assert all(outcome.finished for outcome in found.outcomes)
    assert found.mean("failures") == pytest.approx(found.mean("seconds") * (1 / 20 + 1 / 30), rel=0.1)
    assert found.outcomes == predict(asked, job_of(asked, None), seeds=20).outcomes


def test_a_trace_in_the_simulator(tmp_path: Path) -> None:
    (tmp_path / "spot.csv").write_text("seconds,change\n100,-1\n200,-2\n300,3\n")
    asked = scenario(tmp_path, SIMULATED + "  - {action: kill_node, when: {trace: spot.csv}}\n")
    (outcome,) = predict(asked, job_of(asked, None)).outcomes
    assert (outcome.finished, outcome.failures) == (True, 2)
    noticed = scenario(tmp_path, SIMULATED + "  - {action: drain, when: {trace: spot.csv}, notice: 30s}\n")
    (better,) = predict(noticed, job_of(noticed, None)).outcomes
    assert (better.finished, better.failures, better.lost_work_s) == (True, 2, pytest.approx(0))
    assert better.seconds < outcome.seconds


@pytest.mark.parametrize(
    ("event", "seconds", "pauses"),
    [
        # steps take half a second, so the call to stop at 100.2 is heeded at 100.5, and the next step is done at 101.0
        ("{action: drain, who: {rank: 1}, when: {seconds: 100.2}, notice: 30s}", 500.0, (0.8,)),
        ("{action: drain, who: {rank: 1}, when: {step: 200}, notice: 30s}", 500.0, (0.9,)),
        # it is gone at 100.4, before they stop: 0.4 s of a step are lost, and a second passes until that is noticed
        ("{action: drain, who: {rank: 1}, when: {seconds: 100.2}, notice: 0.2}", 501.4, (0.2 + 1 + 0.5,)),
        ("{action: slow_down, who: {rank: 1}, when: {seconds: 100.2}, factor: 3, lasts: 10s}", 500 + 10 * 2 / 3, ()),
        ("{action: slow_down, who: {share: 50%}, when: {step: 200}, factor: 4, lasts: 8s}", 506.0, ()),
        # it runs again before anybody has noticed that it stood still; or it is too late
        ("{action: freeze, who: {rank: 1}, when: {seconds: 100.2}, lasts: 0.9}", 500.9, ()),
        ("{action: freeze, who: {rank: 1}, when: {seconds: 100.2}, lasts: 20s}", 501.2, (1 + 0.5,)),
    ],
)
def test_a_drain_costs_a_boundary_and_a_slow_or_frozen_worker_everybodys_time(
    event: str, seconds: float, pauses: tuple[float, ...], tmp_path: Path
) -> None:
    asked = scenario(tmp_path, f"{SIMULATED}  - {event}\n")
    (outcome,) = predict(asked, job_of(asked, None)).outcomes
    assert (outcome.finished, outcome.failures, outcome.recoveries) == (True, 1, len(pauses))
    assert outcome.seconds == pytest.approx(seconds)
    assert outcome.pauses == pytest.approx(pauses)
    assert outcome.guarantee == "exact"


@pytest.mark.parametrize("when", ["step: 100", "seconds: 60", "mtbf: 50s, count: 1"])
def test_a_drained_node_comes_back_when_the_scenario_says(when: str, tmp_path: Path) -> None:
    """Four nodes, no other: at the deadline, after 20 s, the node is lost, and another comes 30 s later."""
    head = SIMULATED.replace("spares: 1\nnodes: 8", "spares: 0\nnodes: 4")
    event = f"{{action: drain, who: {{rank: 1}}, when: {{{when}}}, notice: 20s, lasts: 30s}}"
    asked = scenario(tmp_path, f"{head}  - {event}\n")
    (outcome, *_) = predict(asked, job_of(asked, None)).outcomes
    assert outcome.pauses == (pytest.approx(30 + 1 + 3, abs=1),)


def test_one_file_kills_freezes_unplugs_drains_slows_down_and_brings_back(tmp_path: Path) -> None:
    events = """
  - {action: kill, who: {rank: 0}, when: {seconds: 50}}
  - {action: freeze, who: {rank: 1}, when: {seconds: 100}}
  - {action: unplug, who: {rank: 2}, when: {seconds: 150}, lasts: 20s}
  - {action: drain, who: {rank: 3}, when: {seconds: 200.2}, notice: 30s}
  - {action: slow_down, who: {rank: 0}, when: {seconds: 250}, factor: 5, lasts: 10s}
  - {action: bring_back, when: {seconds: 300}}
"""
    asked = scenario(tmp_path, SIMULATED + events)
    (outcome,) = predict(asked, job_of(asked, None)).outcomes
    assert (outcome.finished, outcome.failures, outcome.recoveries) == (True, 5, 4)
    # Three losses at the end of a step and a second each to notice them; nothing for the drain; and 8 of 10 slow seconds.
    assert outcome.seconds == pytest.approx(500 + 3 * 1.0 + 10 * 4 / 5)
    assert rehearse(asked).guarantee == "exact"


@pytest.mark.parametrize("name", ["lossy", "node_loss", "notice", "spot", "stage_loss"])
def test_the_examples_that_assume_costs_pass_in_the_simulator(name: str) -> None:
    report = rehearse(Scenario.load(Path(__file__).parents[2] / "jobs" / "scenarios" / f"{name}.yaml"))
    assert report.passed, (report.failure, report.checks)


@pytest.mark.parametrize(
    ("event", "why"),
    [
        ("{action: hang, who: {rank: 1}, when: {step: 3}}", "line 13: .*hang: the simulator knows kill"),
        ("{action: kill, who: {role: supervisor}, when: {seconds: 3}}", "does not lose a supervisor"),
        ("{action: kill, who: {rank: 1}, at: {phase: fence}}", "not at phases of a recovery"),
        ("{action: kill, who: {rank: 1}, when: {step: 3}, at: {phase: fence}}", "line 13: .*not at phases of a recovery"),
        ("{action: kill, who: {rank: 1}, when: {seconds: 3}}\n  - {action: kill, who: {rank: 1}, when: {step: 3}}", "not both"),
    ],
)
def test_what_the_simulator_does_not_know_is_refused(event: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=why):
        rehearse(scenario(tmp_path, f"{SIMULATED}  - {event}\n"))


@pytest.mark.parametrize("phase", sorted(set(STEP_PHASES) - set(NEVER)))
def test_the_simulator_strikes_at_every_phase_of_a_step(phase: str, tmp_path: Path) -> None:
    head = SIMULATED.replace("events", "stages: 2\nevents") if phase in OF_A_PIPELINE else SIMULATED
    asked = scenario(tmp_path, f"{head}  - {{action: kill, who: {{rank: 1}}, when: {{step: 3}}, at: {{phase: {phase}}}}}\n")
    (outcome,) = predict(asked, job_of(asked, None)).outcomes
    assert (outcome.finished, outcome.failures) == (True, 1)


def test_a_simulated_drill_does_not_say_that_promises_were_kept_which_nobody_checked(tmp_path: Path) -> None:
    """It passes by its thresholds all the same."""
    report = rehearse(scenario(tmp_path, SIMULATED + "  - {action: kill, who: {rank: 1}, when: {step: 3}}\n"))
    (check,) = [check for check in report.checks if check.name == "promises kept"]
    assert (check.found, check.kept, report.passed) == ("not checked: there are no records", None, True)
    assert "| promises kept | no violation | not checked: there are no records |  |" in markdown(report)


def test_a_simulated_run_that_fails_makes_no_goodput_and_no_prediction(tmp_path: Path) -> None:
    """The only node of its kind is lost at step 50 of 1000, and there is no other."""
    head = SIMULATED.replace("spares: 1\nnodes: 8", "spares: 0\nnodes: 4\nstrategy: lossy\nreplacement_timeout: 60")
    events = "  - {action: kill_node, who: {rank: 1}, when: {step: 50}}\npass_if: {goodput: 90%}\n"
    asked = scenario(tmp_path, head.replace("checkpoint_every: 50", "checkpoint_every: null") + events)
    found = rehearse(asked)
    assert found.failure
    assert found.goodput == pytest.approx(25 / (25 + 60), rel=0.1)
    assert [check.kept for check in found.checks if check.name == "goodput"] == [False]
    numbers, why_not = _predicted(asked, tmp_path, job_of(asked, None))
    assert (numbers, why_not) == ({}, f"the simulated run fails: {found.failure}")


@pytest.mark.parametrize("most", [3, 7])
def test_a_run_that_is_struck_faster_than_it_recovers_gives_up_when_the_scenario_says(most: int, tmp_path: Path) -> None:
    """In the simulator and in a real run: the same field of the same file."""
    head = SIMULATED.replace("batch: 32", f"batch: 32\nmax_fruitless_recoveries: {most}").replace("step_s: 0.5", "step_s: 500")
    asked = scenario(tmp_path, f"{head}  - {{action: kill, who: {{count: 1}}, when: {{mtbf: 10s}}}}\n")
    _, _, recovery, _ = trainer_parts(asked)
    assert recovery.max_fruitless_recoveries == most
    assert f"{most} recoveries in a row" in rehearse(asked).failure


def test_workers_that_share_a_node_are_lost_together(tmp_path: Path) -> None:
    head = SIMULATED.replace("workers: 4\nspares: 1\nnodes: 8", "workers: [2, 4]\nspares: 0\nnodes: 2\nreplacement_timeout: 20")
    events = "  - {action: kill_node, who: {ranks: [1, 3]}, when: {step: 500}}\n"
    asked = scenario(tmp_path, head + events)
    job = job_of(asked, None)
    assert (job.nodes, job.per_node, job.spare_nodes) == (2, 2, 0)
    (outcome,) = predict(asked, job).outcomes
    assert outcome.finished, outcome.reason
    assert outcome.seconds > 500 * 0.5 + 500 * 1.0  # with half of the workers from then on
    both = scenario(tmp_path, head + "  - {action: kill, who: {node: 1}, when: {step: 500}}\n")
    assert [one.workers for one in Events(both).draw(job, np.random.default_rng(0))] == [(1, 3)]
    uneven = scenario(tmp_path, SIMULATED.replace("nodes: 8", "nodes: 3") + events)
    with pytest.raises(ScenarioError, match=r"nodes.*as many workers are on each node"):
        job_of(uneven, None)
    kills = "  - {action: kill, who: {rank: 1}, when: {step: 500}}\n"
    assert job_of(scenario(tmp_path, SIMULATED.replace("nodes: 8", "nodes: 3") + kills), None).nodes is None


@pytest.mark.parametrize("action", ["kill", "kill_node"])
def test_the_nodes_that_are_named_are_struck(action: str, tmp_path: Path) -> None:
    """Both replicas of the first stage: nobody holds its state any more, and drawing by chance would mostly take others."""
    head = SIMULATED.replace("workers: 4", "workers: 4\nstages: 2\nmicro_batches: 2")
    asked = scenario(tmp_path, f"{head}  - {{action: {action}, who: {{ranks: [0, 2]}}, when: {{step: 400}}}}\n")
    job = job_of(asked, None)
    for seed in range(10):
        outcome = simulate(job, strategy_of(asked, job), Events(asked), seed=seed)
        assert outcome.strategies == {"checkpoint": 1}


def test_what_comes_at_random_never_strikes_the_last_replica_in_the_simulator_either(tmp_path: Path) -> None:
    head = SIMULATED.replace("workers: 4", "workers: 2").replace("checkpoint_every: 50", "checkpoint_every: null")
    both = scenario(tmp_path, head + "  - {action: kill, who: {count: 2}, when: {mtbf: 60s}}\n")
    assert [one.failures for one in predict(both, job_of(both, None), seeds=3).outcomes] == [0, 0, 0]
    anyone = scenario(tmp_path, head + "  - {action: kill, who: {role: any}, when: {mtbf: 20s}}\n")
    found = predict(anyone, job_of(anyone, None), seeds=5)
    assert all(outcome.finished for outcome in found.outcomes)
    assert sum(outcome.failures for outcome in found.outcomes) > sum(outcome.recoveries for outcome in found.outcomes) > 0, (
        "some struck a spare"
    )


def test_a_drill_whose_event_never_came_fails_in_the_simulator_too(tmp_path: Path) -> None:
    came, late = "{action: kill, who: {rank: 1}, when: {seconds: 5s}}", "{action: kill, who: {rank: 1}, when: {seconds: 1h}}"
    report = rehearse(scenario(tmp_path, f"{SIMULATED}  - {came}\n  - {late}\n"))
    assert report.missed == (1,)
    assert not report.passed
    assert rehearse(scenario(tmp_path, f"{SIMULATED}  - {came}\n")).missed == ()


def kills(*when: str) -> str:
    return "".join(
        f"  - {{action: kill, who: {{{who}}}, when: {{seconds: {at}}}}}\n" for who, at in (w.split("@") for w in when)
    )


@pytest.mark.parametrize(
    ("workers", "more", "events"),
    [
        (2, "spares: 1", ("rank: 1@10s", "rank: 1@11s")),  # it is dead already, and nobody has noticed that
        (3, "spares: 0", ("rank: 1@10s", "ranks: [1, 2]@15s")),  # rank 1 is missing
        (2, "spares: 0", ("rank: 1@10s", "rank: 1@15s")),
    ],
)
def test_who_is_named_in_the_simulator_is_struck_once_all_of_them_are_there(
    workers: int, more: str, events: tuple[str, ...], tmp_path: Path
) -> None:
    head = SIMULATED.replace("workers: 4\nspares: 1", f"workers: {workers}\n{more}").replace("detect_s: 1.0", "detect_s: 2.0")
    asked = scenario(tmp_path, head.replace("start_s: 3.0", "start_s: 30.0") + kills(*events))
    job, lost = job_of(asked, None), set()
    simulation = Simulation(job, strategy_of(asked, job), Events(asked).draw(job, np.random.default_rng(0)), 0)
    simulation.watch = lambda run, event, before, then: lost.update([event.member] if isinstance(event, WorkerLost) else ())
    outcome = simulation.run()
    assert (outcome.finished, outcome.struck) == (True, {0: 1, 1: 1})
    assert len(lost) == (3 if "ranks" in events[1] else 2)
    assert rehearse(asked).missed == ()


def test_who_is_named_and_never_there_again_is_told_as_missed_and_predicted_so(tmp_path: Path) -> None:
    head = SIMULATED.replace("workers: 4\nspares: 1\nnodes: 8", "workers: [2, 3]\nspares: 0\nnodes: 3\nreplacement: shrink")
    lost = "  - {action: kill_node, who: {rank: 2}, when: {seconds: 10s}}\n"
    asked = scenario(tmp_path, head + lost + kills("ranks: [1, 2]@20s"))
    report = rehearse(asked)
    assert (report.missed, report.passed) == ((1,), False)
    numbers, _ = _predicted(asked, tmp_path, job_of(asked, None))
    assert numbers["missed"] == 1
    shown = markdown(replace(report, missed=(), predicted=numbers))
    assert "| events that did not come about | 0 | 1 |" in shown


def test_a_loss_in_one_of_many_simulated_runs_is_not_rounded_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = scenario(tmp_path, SIMULATED + "  - {action: kill, who: {role: any}, when: {mtbf: 60s}}\n")
    found = predict(asked, job_of(asked, None))
    outcomes = (replace(found.outcomes[0], samples_lost=4), *found.outcomes[1:])
    monkeypatch.setitem(rehearse.__globals__, "predict", lambda *about: replace(found, outcomes=outcomes))
    report = rehearse(asked)
    (check,) = [one for one in report.checks if one.name == "samples lost"]
    assert (report.samples_lost, check.found, check.kept) == (0, "4", False)


def test_a_simulated_drill_in_which_nothing_came_did_not_pass(tmp_path: Path) -> None:
    report = rehearse(scenario(tmp_path, SIMULATED + "  - {action: kill, who: {role: any}, when: {mtbf: 1000d}}\n"))
    assert (report.missed, report.absent, report.passed) == ((), (0,), False)


def test_what_came_at_random_and_never_struck_is_missed_in_the_simulator_too(tmp_path: Path) -> None:
    head = SIMULATED.replace("workers: 4", "workers: 2").replace("checkpoint_every: 50", "checkpoint_every: null")
    both = "  - {action: kill, who: {count: 2}, when: {mtbf: 60s}}\n"
    assert rehearse(scenario(tmp_path, head + both)).missed == (0,)
    assert rehearse(scenario(tmp_path, head + both.replace("60s", "1000d"))).missed == ()


def test_a_spares_node_is_nobodys_in_the_simulator(tmp_path: Path) -> None:
    event = "  - {action: kill_node, who: {node: 5}, when: {step: 30}}\n"
    with pytest.raises(ScenarioError, match=r"node: 5: the simulator loses no spare: use 0 to 3"):
        rehearse(scenario(tmp_path, SIMULATED + event))


def test_the_same_failure_twice_is_refused(tmp_path: Path) -> None:
    """Each strikes once, and they could not be told apart."""
    event = "  - {action: kill, who: {role: any}, when: {step: 30}}\n"
    asked = scenario(tmp_path, SIMULATED + event + event)
    with pytest.raises(ScenarioError, match=r"line 14: .*events.0 strikes there and then already"):
        planted(asked, task_of(asked))


def test_without_costs_there_is_no_simulation(tmp_path: Path) -> None:
    head, tail = SIMULATED.index("assumed"), SIMULATED.index("events")
    with pytest.raises(ScenarioError, match="give assumed"):
        rehearse(scenario(tmp_path, SIMULATED[:head] + SIMULATED[tail:] + "  []\n"))


@pytest.mark.parametrize(
    ("wanted", "code", "says"),
    [("90%", 0, "passed"), ("100%", 1, "FAILED")],
)
def test_the_command_tells_by_its_exit_code_whether_thresholds_were_kept(
    wanted: str, code: int, says: str, tmp_path: Path
) -> None:
    events = "  - {action: kill, who: {role: any}, when: {mtbf: 60s}}\n"
    scenario(tmp_path, f"{SIMULATED}{events}pass_if: {{goodput: {wanted}}}\n")
    found = CliRunner().invoke(drill_command, [str(tmp_path / "scenario.yaml"), "--on", "simulator"])
    assert found.exit_code == code, found.output
    assert f"drill simulated on simulator (10 seeds, means): {says}" in found.output


def test_the_command_refuses_what_cannot_be_with_a_code_of_its_own(tmp_path: Path) -> None:
    scenario(tmp_path, SIMULATED + "  []\n")
    (tmp_path / "bad.yaml").write_text(SIMULATED.replace("steps", "stesp") + "  []\n")
    bad = CliRunner().invoke(drill_command, [str(tmp_path / "bad.yaml"), "--on", "simulator"])
    assert bad.exit_code == 2
    assert "bad.yaml, line 6: stesp: there is no such field; did you mean 'steps'?" in bad.output
    confirmed = CliRunner().invoke(drill_command, [str(tmp_path / "scenario.yaml"), "--yes-break-this-cluster", "10.0.0.1:1"])
    assert confirmed.exit_code == 2
    assert "go with --on cluster" in confirmed.output
    stored = CliRunner().invoke(
        drill_command, [str(tmp_path / "scenario.yaml"), "--on", "simulator", "--storage-path", str(tmp_path)]
    )
    assert stored.exit_code == 2
    assert "--storage-path does not go with --on simulator" in stored.output
