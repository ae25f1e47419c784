"""What a run measures: a fold of its events, checked by hand and against what the machine itself knows."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_interleavings import all_rules, live_through

from raytrain_ft.policy import messages as m
from raytrain_ft.policy.machine import handle
from raytrain_ft.policy.measures import METRICS, Measures, Metric, cause_of, watcher_of
from raytrain_ft.policy.roster import Rules
from raytrain_ft.policy.run_state import RunState
from raytrain_ft.policy.states import State
from raytrain_ft.runtime import metrics

DOCS = Path(__file__).parents[2] / "docs"


def fold(rules: Rules, events: Iterable[m.Event]) -> tuple[Measures, RunState]:
    run, measures = RunState(rules), Measures()
    for event in events:
        handle(run, event)
        measures.take(event, run)
    measures.count_losses()
    return measures, run


def failures(measures: Measures) -> dict[tuple[str, ...], float]:
    """By cause and by who noticed it."""
    return {key[1:]: value for key, value in measures.totals.items() if key[0] == "train_ft_failures"}


def steps(
    at: float, first: int, stop: int, *, member: str = "w0", incarnation: int = 1, longest: float = 0.2
) -> m.StepsCommitted:
    place = {"rank": 0, "world_size": 2, "epoch": 0, "start": 0, "ids_digest": ""}
    about = {"incarnation": incarnation, "first_step": first, "stop_step": stop, "longest_s": longest}
    return m.StepsCommitted(at=at, member=member, **place, **about, loss=1.0 / stop)


def started(*, steps_committed: int = 0) -> list[m.Event]:
    """A run of two workers, from nothing to its first world; step 0 begins at 2.0 s."""
    stored = (m.Stored("a", steps_committed),) if steps_committed else ()
    joined = [m.Reconciled(at=2.0, member=member, incarnation=1, digests=("x",)) for member in ("w0", "w1")]
    ready = [m.WorkerStarted(at=1.0, member=member, node="n", pid=1) for member in ("w0", "w1")]
    return [m.RunStarted(run_id="r", stored=stored), m.CapacityChanged(slots=2), *ready, *joined]


RULES = Rules(min_workers=1, max_workers=2, max_steps=100, spares=0, checkpoints=True, wait_for_replacement=False)


def test_steps_are_counted_once_whoever_tells_of_them() -> None:
    first, second = [steps(2.5, 0, 1), steps(3.7, 1, 6), steps(4.0, 6, 7)], [(2.5, 0, 1), (3.5, 1, 5), (3.9, 5, 6)]
    told = sorted([*first, *(steps(*about, member="w1") for about in second)], key=lambda event: event.at)
    measures, run = fold(RULES, [*started(), *told])
    assert run.state == State.RUNNING
    assert measures.totals["train_ft_steps_committed",] == 7
    assert measures.totals["train_ft_steps_redone",] == 0
    assert measures.totals["train_ft_productive_seconds",] == pytest.approx(2.0)  # from 2.0 to 4.0
    assert measures.levels["train_ft_step_seconds",] == pytest.approx(0.3)
    assert measures.levels["train_ft_loss",] == pytest.approx(1 / 7)
    measures.look(5.0, run)
    assert measures.levels["train_ft_goodput_ratio",] == pytest.approx(0.4)
    assert measures.levels["train_ft_world_size",] == 2
    assert measures.levels["train_ft_run_state", "running"] == 1
    assert sum(value for key, value in measures.levels.items() if key[0] == "train_ft_run_state") == 1


def lost(at: float, member: str, silent_s: float | None = 0.2) -> m.WorkerLost:
    return m.WorkerLost(at=at, member=member, cause="the node died", noticed_by="ray", silent_s=silent_s)


def test_a_loss_is_counted_once_and_its_pause_is_no_productive_time() -> None:
    gone = [lost(4.0, "w1"), lost(4.1, "w1")]
    marks = m.Marks("w0", 5, (5,), (None,))
    back = [
        m.Fenced(at=4.2, member="w0", incarnation=2, marks=marks),
        m.Reconciled(at=4.4, member="w0", incarnation=2, digests=("x",)),
        steps(5.0, 5, 6, incarnation=2),
    ]
    measures, run = fold(RULES, [*started(), steps(3.0, 0, 5), *gone, *back])
    assert run.state == State.RUNNING
    assert measures.totals["train_ft_failures", "node", "ray"] == 1
    assert measures.totals["train_ft_recoveries", "replication", "rounding", "yes"] == 1
    assert measures.totals["train_ft_paused_seconds", "yes"] == pytest.approx(1.0)
    assert measures.observed == [
        (("train_ft_detection_seconds", "ray"), 0.2),
        (("train_ft_pause_seconds", "yes"), pytest.approx(1.0)),
    ]
    assert measures.totals["train_ft_productive_seconds",] == pytest.approx(1.0 + 0.6)  # 2.0 to 3.0, 4.4 to 5.0
    assert measures.totals["train_ft_steps_committed",] == 6


def test_steps_done_again_are_no_progress() -> None:
    """Both workers are lost at step 5; the checkpoint is of step 2."""
    written = m.CheckpointCommitted(
        at=2.9, member="w0", incarnation=1, step=2, name="a", bytes=10, snapshot_s=0.0, stall_s=0.25, persist_s=0.5
    )
    again = [
        m.WorkerStarted(at=5.0, member="w2", node="n", pid=1),
        m.WorkerStarted(at=5.0, member="w3", node="n", pid=1),
        m.CheckpointsFound(at=5.1, incarnation=2, stored=(m.Stored("a", 2),)),
        m.Reconciled(at=6.0, member="w2", incarnation=2, digests=("x",)),
        m.Reconciled(at=6.0, member="w3", incarnation=2, digests=("x",)),
    ]
    redone = [steps(6.2, 2, 3, member="w2", incarnation=2), steps(8.2, 3, 7, member="w2", incarnation=2)]
    gone = [lost(4.0, "w0", None), lost(4.0, "w1", None)]
    measures, run = fold(RULES, [*started(), steps(3.0, 0, 5), written, *gone, *again, *redone])
    assert (run.state, run.incarnation) == (State.RUNNING, 2)
    assert measures.totals["train_ft_steps_committed",] == 7
    assert measures.totals["train_ft_steps_redone",] == 3
    assert measures.totals["train_ft_productive_seconds",] == pytest.approx(1.0 + 2.0 * 2 / 4)  # two of the last four are new
    assert measures.totals["train_ft_checkpoints", "committed"] == 1
    assert measures.totals["train_ft_checkpoint_stall_seconds",] == 0.25
    assert [key[0] for key, _ in measures.observed] == ["train_ft_pause_seconds"]  # those two had never been heard
    measures.look(10.0, run)
    assert measures.levels["train_ft_checkpoint_age_seconds",] == pytest.approx(7.1)


def test_a_resumed_run_counts_from_its_checkpoint() -> None:
    measures, _ = fold(RULES, [*started(steps_committed=40), steps(3.0, 40, 45)])
    assert measures.totals["train_ft_steps_committed",] == 5


def test_who_leaves_after_a_notice_is_no_failure() -> None:
    rules = Rules(min_workers=1, max_workers=2, max_steps=100, spares=1)
    spare = [m.CapacityChanged(at=2.1, slots=3), m.WorkerStarted(at=2.6, member="w2", node="n", pid=1)]
    told = m.Noticed(at=3.0, member="w2", deadline_s=30.0, source="gcp", reason="preempted")
    another = m.WorkerStarted(at=4.0, member="w3", node="n", pid=1)
    _, run = fold(rules, [*started(), steps(2.5, 0, 1), *spare, told])
    assert run.roster.gone == {}, "it is the only spare"
    measures, run = fold(rules, [*started(), steps(2.5, 0, 1), *spare, told, another])
    assert run.roster.gone == {"w2": None}
    assert measures.totals["train_ft_departures",] == 1
    assert measures.totals["train_ft_notices", "gcp"] == 1
    assert not [key for key in measures.totals if key[0] == "train_ft_failures"]


def test_a_worker_that_could_not_be_set_up_is_a_failure_of_the_task_and_one_whose_notice_came_true_is_none() -> None:
    rules = Rules(min_workers=1, max_workers=2, max_steps=100, spares=1)
    room = m.CapacityChanged(at=2.1, slots=3)
    failed = m.TaskFailed(at=2.6, member="w2", rank=None, step=1, kind="config", message="no such process or memory")
    told = m.Noticed(at=3.0, member="w1", deadline_s=1.0, source="gcp", reason="preempted")
    measures, _ = fold(rules, [*started(), steps(2.5, 0, 1), room, failed, told, lost(4.0, "w1")])
    assert failures(measures) == {("task", "supervisor"): 1, ("preemption", "ray"): 1}


def test_a_loss_is_counted_with_the_cause_that_is_known_when_it_is_counted() -> None:
    """A process is missed at once; that it was killed for memory is known a tenth of a second later."""
    killed = m.WorkerLost(at=4.0, member="w1", cause="the process died", noticed_by="lifeline")
    why = m.CauseFound(at=4.1, lost="w1", cause="the process was killed, perhaps for memory")
    measures, _ = fold(RULES, [*started(), steps(3.0, 0, 5), killed, why])
    assert failures(measures) == {("memory", "lifeline"): 1}
    measures, run = fold(RULES, [*started(), steps(3.0, 0, 5), killed])
    handle(run, why)
    measures.take(why, run)
    measures.look(8.0, run)
    assert failures(measures) == {("process", "lifeline"): 1}, "no counter goes back"


def test_a_loss_of_an_earlier_life_of_the_supervisor_is_not_counted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[tuple[float, dict[str, str]]] = []

    def instrument(metric: Metric, run: str) -> Any:
        def give(value: float, tags: dict[str, str]) -> None:
            counted.append((value, {"name": metric.name, **tags}))

        return SimpleNamespace(set=lambda value, tags: None, inc=give, observe=give)

    monkeypatch.setattr(metrics, "_instrument", instrument)
    run, past = RunState(RULES), Measures()
    for event in (*started(), steps(3.0, 0, 5), lost(4.0, "w1")):
        handle(run, event)
        past.take(event, run)
    metrics.Publisher("digits", past).publish(5.0, run)
    assert counted == []


def test_a_checkpoint_that_failed_counts_once_whoever_tells_of_it_and_samples_that_are_read_again_are_not_lost() -> None:
    where = {"incarnation": 1, "step": 20}
    failed = [m.CheckpointFailed(at=3.0, member=f"w{rank}", **where, reason="disk full") for rank in range(2)]
    lost = [m.SamplesLost(**where, epoch=0, start=0, stop=8, why="quorum", returned=again) for again in (True, False)]
    measures, _ = fold(RULES, [*started(), steps(2.5, 0, 1), *failed, *lost])
    assert measures.totals["train_ft_checkpoints", "failed"] == 1
    assert measures.totals["train_ft_samples_lost",] == 8


def test_what_was_given_out_is_not_given_out_again() -> None:
    measures, run = fold(RULES, [*started(), steps(3.0, 0, 5), lost(3.5, "w1")])
    assert measures.increments()["train_ft_steps_committed",] == 5
    assert len(measures.observations()) == 1
    assert (measures.increments(), measures.observations()) == ({}, [])
    late = steps(3.6, 5, 6)  # of the incarnation that is over
    handle(run, late)
    measures.take(late, run)
    assert measures.increments() == {("train_ft_steps_committed",): 1}


def test_logs_are_added_up_over_workers_and_over_a_log_opened_anew() -> None:
    def log(at: float, member: str, payload: int) -> m.LogWritten:
        sizes = {"records": 1, "payload_bytes": payload, "file_bytes": payload // 2, "stalls": 1, "stalled_s": 0.5}
        return m.LogWritten(at=at, member=member, incarnation=1, step=1, **sizes)

    told = [log(3.1, "w0", 100), log(3.2, "w1", 50), log(3.3, "w0", 140), log(3.4, "w1", 20)]
    measures, run = fold(RULES, [*started(), steps(3.0, 0, 5), *told])
    assert measures.totals["train_ft_log_bytes",] == 140 + 50 + 20
    assert measures.totals["train_ft_log_stalls",] == 3
    measures.look(4.0, run)
    assert measures.levels["train_ft_log_disk_bytes",] == 80


def first_step(rules: Rules, events: Iterable[m.Event]) -> int:
    """Where the first world began."""
    run = RunState(rules)
    for event in events:
        handle(run, event)
        if run.state == State.RESUME:
            return run.step
    return 0


@settings(max_examples=300, derandomize=True)
@given(rules=all_rules(), seed=st.integers(0, 2**32))
def test_whatever_happens_the_sums_are_right(rules: Rules, seed: int) -> None:
    cluster = live_through(rules, seed)
    events = cluster.log
    measures, run = fold(rules, events)
    measures.look(cluster.now, run)
    for key in [*measures.levels, *measures.totals, *(key for key, _ in measures.observed)]:
        assert len(key) == 1 + len(METRICS[key[0]].tags), key
    assert all(METRICS[key[0]].kind == "gauge" for key in measures.levels)
    assert all(METRICS[key[0]].kind == "counter" for key in measures.totals)

    def total(name: str) -> float:
        return sum(value for key, value in measures.totals.items() if key[0] == name)

    assert all(value >= 0 for value in measures.totals.values())
    assert total("train_ft_failures") + total("train_ft_departures") == len(run.roster.gone)
    assert total("train_ft_departures") >= sum(len(recovery.left) for recovery in run.recoveries)
    assert total("train_ft_notices") == sum(isinstance(event, m.Noticed) for event in events)
    ended = [recovery.seconds for recovery in run.recoveries if recovery.seconds is not None]
    assert total("train_ft_recoveries") == len(ended)
    assert total("train_ft_paused_seconds") == pytest.approx(sum(ended))
    told = [event.stop_step for event in events if isinstance(event, m.StepsCommitted)]
    assert total("train_ft_steps_committed") == (max(0, max(told) - first_step(rules, events)) if told else 0)
    assert total("train_ft_productive_seconds") <= cluster.now + 1e-9
    lost = [e.stop - e.start for e in events if isinstance(e, m.SamplesLost) and e.at and not e.returned]
    assert total("train_ft_samples_lost") == sum(lost)


@pytest.mark.parametrize(
    ("cause", "word"),
    [
        ("the process was killed, perhaps for memory", "memory"),
        ("the node died", "node"),
        ("its process is gone", "process"),
        ("the process died (SIGKILL, a crash or an exit)", "process"),
        ("it died while the supervisor was away", "process"),
        ("silent for 1.2 s (frozen, or cut off)", "silence"),
        ("hung for 31 s in 'forward' of step 7", "hang"),
        ("no answer to setup within 120 s", "deadline"),
        ("it did not leave its step in time", "deadline"),
        ("ValueError: whatever", "other"),
        ("it could not begin: OSError: out of memory", "other"),
    ],
)
def test_tags_are_few(cause: str, word: str) -> None:
    event = m.WorkerLost(member="w17", cause=cause, noticed_by="w3")
    assert (cause_of(event), watcher_of(event)) == (word, "worker")
    assert cause_of(m.WorkerLost(member="w17", cause=cause, preempted=True)) == "preemption"


def test_the_docs_list_every_metric_as_it_is() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) \| (.*?) \| (.*?) \|$", (DOCS / "metrics.md").read_text(), re.MULTILINE)
    listed = {name: (kind, unit, tags, meaning) for name, kind, unit, tags, meaning in rows}
    ours = {
        metric.exported: (metric.kind, metric.unit, ", ".join(f"`{tag}`" for tag in ("run", *metric.tags)), metric.meaning)
        for metric in METRICS.values()
    }
    assert listed == ours
