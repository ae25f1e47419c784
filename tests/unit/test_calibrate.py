"""Calibration: the costs of a run come back from its event log, and predict it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from raytrain_ft.cli.main import main
from raytrain_ft.errors import ConfigError
from raytrain_ft.policy.sampling import Sampling
from raytrain_ft.runtime.event_log import read_records
from raytrain_ft.simulate import Costs, Failure, Job, Listed, Strategy, simulate
from raytrain_ft.simulate.calibrate import Calibration, _kind, calibrate
from raytrain_ft.simulate.engine import Simulation, rules_of
from raytrain_ft.simulate.promises import Record

COSTS = Costs(
    fence_s=0.1, rendezvous_s=0.5, fill_s=0.8, resume_s=0.2, load_s=1.5, begin_s=7.0, end_s=1.0, start_s=6.0, persist_s=0.5
)
JOB = Job(steps=300, step_s=0.4, workers=3, batch=12, costs=COSTS)
STEPS = (20.3, 55.9, 90.5, 131.2, 150.01, 190.5, 222.7, 260.4)
FAILURES = Listed(tuple(Failure(step=step, workers=(number % 3,)) for number, step in enumerate(STEPS)))


def log_of(job: Job, strategy: Strategy, failures: Listed = FAILURES) -> list[dict[str, Any]]:
    """The event log of a simulated run: of this one, the costs are known."""
    simulation = Simulation(job, strategy, failures.draw(job, np.random.default_rng(0)), 0)
    record = Record(rules_of(job, strategy), Sampling(120, job.batch, 1))
    simulation.watch = record.after
    assert simulation.run().finished
    return record.lines


def predicted(known: Calibration) -> float:
    return simulate(known.job, known.strategy, known.failures).seconds / known.measured_s


def test_the_costs_of_replication_come_back() -> None:
    known = calibrate(log_of(JOB, Strategy(kind="replication")))
    found = known.job.costs
    assert known.job.step_s == pytest.approx(JOB.step_s)
    for name in ("fence_s", "rendezvous_s", "fill_s", "resume_s", "begin_s", "end_s", "start_s"):
        assert getattr(found, name) == pytest.approx(getattr(COSTS, name), abs=1e-6), name
    assert (known.job.workers, known.job.spares, known.strategy.kind, known.strategy.every) == (3, 1, "replication", None)
    assert [failure.step for failure in known.failures.failures] == pytest.approx(STEPS, abs=0.02)
    assert predicted(known) == pytest.approx(1, abs=0.001)


@pytest.mark.parametrize("spares", [0, 1])
def test_who_took_the_place_of_one_that_left_was_no_spare(spares: int) -> None:
    left, lost = Failure(at=15.3, lost=1, notice_s=60.0), [Failure(at=60.0 + 30 * n, workers=(n,)) for n in (1, 2)]
    known = calibrate(log_of(replace(JOB, spares=spares), Strategy(kind="replication"), Listed((left, *lost))))
    assert known.job.spares == spares
    assert known.job.costs.start_s == pytest.approx(COSTS.start_s)


def test_whether_the_run_waited_for_replacements_comes_back() -> None:
    job = replace(JOB, spares=0, min_workers=2)
    for how in ("wait", "shrink"):
        known = calibrate(log_of(job, Strategy(kind="replication", replacement=how)))
        assert known.strategy.replacement == how


@pytest.mark.parametrize("kind", ["checkpoint", "lossy", "skip"])
def test_other_strategies_are_recognised_and_predicted(kind: Any) -> None:
    known = calibrate(log_of(JOB, Strategy(kind=kind, every=10 if kind == "checkpoint" else None)))
    assert known.strategy.kind == kind
    assert predicted(known) == pytest.approx(1, abs=0.02)  # "lossy": the rest of a step is taken for a rendezvous


def test_a_run_that_fell_back_to_a_checkpoint_once_is_still_one_of_its_strategy() -> None:
    """Seven losses were met by replicas, and one took all of them."""
    failures = [Failure(step=step, workers=(0, 1, 2) if number == 4 else (number % 3,)) for number, step in enumerate(STEPS)]
    simulation = Simulation(JOB, strategy := Strategy(kind="replication", every=10), iter(failures), 0)
    record = Record(rules_of(JOB, strategy), Sampling(120, JOB.batch, 1))
    simulation.watch = record.after
    assert simulation.run().strategies == {"replication": 7, "checkpoint": 1}
    known = calibrate(record.lines)
    assert (known.strategy.kind, known.strategy.every) == ("replication", 10)
    assert predicted(known) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(
    ("said", "used", "kind"),
    [
        ("auto", {"replication", "checkpoint"}, "replication"),
        ("auto", {"logging", "checkpoint"}, "logging"),
        ("checkpoint", set(), "checkpoint"),
        ("snapshot", {"snapshot"}, "elastic_horovod"),
        ("lossy", {"checkpoint"}, "lossy"),
        (None, {"checkpoint", "replication"}, "checkpoint"),
        (None, set(), "replication"),
    ],
)
def test_what_a_run_was_told_says_its_strategy_and_else_what_it_used(said: str | None, used: set[str], kind: str) -> None:
    assert _kind(said, used) == kind


def test_the_costs_of_snapshots_in_memory_come_back() -> None:
    costs = replace(COSTS, copy_s=0.3, restore_s=0.6)
    known = calibrate(log_of(replace(JOB, costs=costs), Strategy(kind="elastic_horovod", every=40)))  # once a stretch
    assert (known.strategy.kind, known.strategy.every) == ("elastic_horovod", 40)
    assert known.job.costs.copy_s == pytest.approx(0.3)
    assert known.job.costs.restore_s == pytest.approx(0.5 + 0.6 + 0.8)  # with the rendezvous and the filling
    assert predicted(known) == pytest.approx(1, abs=0.02)


def test_the_ratio_of_replay_comes_back() -> None:
    costs = Costs(load_s=1.5, replay_ratio=0.3, rendezvous_s=0.2, persist_s=0.1)
    job = Job(steps=300, step_s=0.4, workers=3, stages=3, batch=12, micro_batches=4, costs=costs)
    known = calibrate(log_of(job, Strategy(kind="logging", every=25)))
    assert (known.strategy.kind, known.strategy.every) == ("logging", 25)
    assert known.job.costs.replay_ratio == pytest.approx(0.3, rel=0.01)
    assert known.job.costs.load_s == pytest.approx(1.5, rel=0.01)
    assert predicted(known) == pytest.approx(1, abs=0.01)


def test_an_interval_that_was_asked_for_says_nothing_of_the_update() -> None:
    """Which is measured where an interval is chosen."""
    lines = log_of(JOB, Strategy(kind="checkpoint", every=10))
    fixed, chosen = ({"event": "IntervalChosen", "at": 8.0, "k": 7, "update_s": update_s} for update_s in (None, 0.1))
    known = calibrate([lines[0], fixed, *lines[1:]])
    assert (known.strategy.every, known.job.costs.update_s) == (7, 0.0)
    assert calibrate([lines[0], fixed, chosen, *lines[1:]]).job.costs.update_s == 0.1


def test_a_run_that_did_not_finish_is_refused() -> None:
    lines = [line for line in log_of(JOB, Strategy(kind="replication")) if line["event"] != "RunFinished"]
    with pytest.raises(ConfigError, match="0 RunFinished lines: calibrate on a single run that finished"):
        calibrate(lines)


def test_a_run_that_is_too_short_is_refused() -> None:
    lines = log_of(JOB, Strategy(kind="replication"))
    with pytest.raises(ConfigError, match="too few steps"):
        calibrate([line for line in lines if line["event"] != "StepsCommitted"])


RUNS = Path(__file__).parent / "recorded"
"""Event logs of runs on a local cluster of two cores, with kills: 8 of them with replication, 3 each with the others."""


@pytest.mark.parametrize(("strategy", "losses"), [("replication", 8), ("checkpoint", 3), ("logging", 3)])
def test_real_runs_are_predicted_from_their_own_costs(strategy: str, losses: int, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = CliRunner().invoke(main, ["simulate", "--from-run", str(RUNS / strategy), "--json", str(out)])
    assert result.exit_code == 0, result.output
    assert "predicted" in result.output
    found = json.loads(out.read_text())
    assert abs(found["deviation"]) < 0.05
    records = read_records(RUNS / strategy / "events.jsonl")
    known = calibrate(records)
    assert len(known.failures.failures) == losses
    assert (known.strategy.kind, known.strategy.update) == (strategy, "barrier")
    assert found["measured_s"] == next(record["at"] for record in records if record["event"] == "RunFinished")


@pytest.mark.parametrize("strategy", ["replication", "checkpoint", "logging"])
def test_a_resumed_run_is_one_of_fewer_steps(strategy: str) -> None:
    """The same run, had it gone on from a checkpoint of step 1000."""
    records = read_records(RUNS / strategy / "events.jsonl")
    later = read_records(RUNS / strategy / "events.jsonl")
    for record in later:
        record |= {name: record[name] + 1000 for name in ("step", "first_step", "stop_step") if record.get(name) is not None}
    later[0]["details"]["max_steps"] += 1000
    assert calibrate(later) == calibrate(records)


@pytest.mark.parametrize("more", [["--seeds", "1"], ["--sweep", "interval"], ["--best-interval"], ["--plots", "plots"]])
def test_whatever_else_is_asked_of_a_real_run_is_done(more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["simulate", "--from-run", str(RUNS / "checkpoint"), "--json", "out.json", *more])
    assert result.exit_code == 0, result.output
    found = json.loads(Path("out.json").read_text())
    assert [strategy["strategy"] for strategy in found["strategies"]] == ["checkpoint"]
    assert len(found["sweeps"]) == ("--sweep" in more)
    assert Path("plots", "losses.png").exists() == ("--plots" in more)


def test_a_real_run_is_asked_what_it_would_have_cost_otherwise(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    otherwise = ["--strategy", "global_checkpoint", "--every", "20", "--mtbf", "0.01", "--seeds", "3", "--json", str(out)]
    result = CliRunner().invoke(main, ["simulate", "--from-run", str(RUNS / "replication"), *otherwise])
    assert result.exit_code == 0, result.output
    (found,) = json.loads(out.read_text())["strategies"]
    assert found["lost_s"]["redone"] > 0
