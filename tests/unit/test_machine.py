"""What the supervisor decides, told as short stories. `test_interleavings.py` has every other order of events."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raytrain_ft.errors import IllegalEventError
from raytrain_ft.policy import commands as c
from raytrain_ft.policy import messages as m
from raytrain_ft.policy.lineage import Return, Returns
from raytrain_ft.policy.machine import handle, replay
from raytrain_ft.policy.reconcile import Changed, Copy, Marks, Share
from raytrain_ft.policy.roster import MemberState, Rules
from raytrain_ft.policy.run_state import RunState
from raytrain_ft.policy.states import ENDED, LIVE, TRANSITIONS, State, diagram
from raytrain_ft.policy.strategy import Guarantee, Strategy

ARCHITECTURE = Path(__file__).parents[2] / "docs" / "architecture.md"


class Story:
    """A run whose workers do as they are told, at once; what they are told is kept in `said`."""

    def __init__(self, workers: int = 3, *, spares: int = 0, slots: int | None = None, **rules: Any) -> None:
        numbers: dict[str, Any] = {"min_workers": 1, "max_workers": workers, "max_steps": 100, "spares": spares} | rules
        self.run = RunState(Rules(**numbers))
        self.events: list[m.Event] = []
        self.said: list[c.Command] = []
        self.tell(m.RunStarted(run_id="r"))
        self.tell(m.CapacityChanged(slots=workers + spares if slots is None else slots))

    def tell(self, *events: m.Event) -> list[c.Command]:
        """The commands that follow from these events. Time does not go back: what says no time happens at once."""
        self.said = []
        for event in events:
            event = replace(event, at=max([event.at, *(earlier.at for earlier in self.events[-1:])]))
            self.events.append(event)
            self.said += handle(self.run, event)
        return self.said

    def started(self, *members: str) -> Story:
        self.tell(*(m.WorkerStarted(member=member, node="n", pid=1) for member in members))
        return self

    def lost(self, member: str, *, preempted: bool = False) -> Story:
        self.tell(m.WorkerLost(member=member, cause="the node died", noticed_by="heartbeat", preempted=preempted))
        return self

    def fenced(self, *members: str, step: int = 5, empty: Sequence[str] = ()) -> Story:
        """These leave their step; all stand at the beginning of `step`, and those in `empty` hold nothing."""
        for member in members:
            marks = None if member in empty else Marks(member, step, (step, step), (None, None))
            self.tell(m.Fenced(member=member, incarnation=self.run.incarnation, marks=marks))
        return self

    def fenced_in(self, member: str, step: int, *, whole: bool = True) -> list[c.Command]:
        """This one has computed its gradients of the step, or some of them; returns what follows."""
        share = Share(step, (0, 30), (0, 10), whole)
        marks = Marks(member, step, (step, step), (None, None), share=share)
        return self.tell(m.Fenced(member=member, incarnation=self.run.incarnation, marks=marks))

    def reconciled(self, *members: str, empty: Sequence[str] = (), undone: int = 0) -> Story:
        for member in members:
            digests = () if member in empty else ("a", "b")
            self.tell(m.Reconciled(member=member, incarnation=self.run.incarnation, digests=digests, undone=undone))
        return self

    def filled(self, *members: str) -> Story:
        for member in members:
            self.tell(m.Filled(member=member, incarnation=self.run.incarnation, digests=("a", "b")))
        return self

    def committed(self, step: int, at: float = 0.0) -> Story:
        rank = {"rank": 0, "world_size": len(self.run.world), "epoch": 0, "start": 0, "ids_digest": "", "loss": 1.0}
        where = {"member": self.run.world[0], "incarnation": self.run.incarnation}
        self.tell(m.StepsCommitted(at=at, first_step=step, stop_step=step + 1, **where, **rank))
        return self

    def fires(self, timer: str) -> Story:
        self.tell(m.TimerFired(timer=timer, incarnation=self.run.incarnation))
        return self

    def completed(self) -> Story:
        world = self.run.world
        self.tell(*(m.Completed(member=member, incarnation=self.run.incarnation, digest="d") for member in world))
        return self

    def to(self, state: State) -> Story:
        """w2 is lost and w3 takes its place, up to this state of the recovery."""
        self.started("w3").lost("w2")
        if state == State.FENCE:
            return self
        self.fenced("w0", "w1")
        if state == State.REPLACE:
            return self
        self.reconciled("w0", "w1", "w3", empty=["w3"])
        return self if state == State.REBUILD else self.filled("w0", "w1", "w3")


def running(workers: int = 3, **rules: Any) -> Story:
    """All workers train, and have committed the first step; spares are still starting."""
    story = Story(workers, **rules)
    world = [f"w{i}" for i in range(workers)]
    story.started(*world).reconciled(*world).committed(0)
    assert (story.run.state, story.run.world) == (State.RUNNING, tuple(world))
    return story


def of(commands: Sequence[c.Command], *kinds: type) -> list[c.Command]:
    return [command for command in commands if isinstance(command, kinds)]


# ---------------------------------------------------------------- from the start to the end


def test_a_run_without_failures() -> None:
    story = Story(2, max_steps=1)
    assert story.said == [c.StartWorker("w0"), c.StartWorker("w1")]
    story.started("w0", "w1")
    assert of(story.said, c.Reconcile) == [c.Reconcile(("w0", "w1"), 1, None)]
    story.reconciled("w0", "w1")
    assert story.said == [c.Run(("w0", "w1"), 1)]
    assert story.committed(0).run.state == State.RUNNING
    assert of(story.completed().said, c.Save) == [c.Save(("w0",), ("w0", "w1"), 1)]
    story.tell(m.Saved(member="w0", incarnation=1, path="p"))
    assert story.run.state == State.FINISHED
    assert story.run.result == {"digest": "d", "path": "p"}
    assert story.said == [c.Kill("w0"), c.Kill("w1"), c.End()]
    assert story.run.recoveries == []


def test_too_few_workers_at_the_start() -> None:
    story = Story(3, slots=1, min_workers=2).started("w0").fires("schedule")
    assert story.run.failure is not None
    assert story.run.failure[0] == "TooFewWorkersError"
    assert "1 workers could be placed within 120 s" in story.run.failure[1]
    assert "Add nodes" in story.run.failure[1]


def test_workers_that_are_still_being_set_up_at_the_deadline_are_no_want_of_nodes() -> None:
    story = Story(2, min_workers=2).started("w0").fires("schedule")
    assert story.run.failure is not None
    assert "1 more was still being set up: raise RecoveryConfig(schedule_timeout=...)" in story.run.failure[1]
    assert "Add nodes" not in story.run.failure[1]


def test_enough_workers_at_the_start_though_not_all() -> None:
    story = Story(3, min_workers=2).started("w0", "w1")
    assert story.run.state == State.SCHEDULING, "the third may still come"
    assert of(story.fires("schedule").said, c.Reconcile) == [c.Reconcile(("w0", "w1"), 1, None)]


def test_workers_that_die_with_their_node_while_starting_are_one_failed_start() -> None:
    story = Story(8, max_start_failures=2)
    story.tell(*(m.WorkerLost(member=f"w{i}", cause="the node died") for i in range(8)))
    assert story.run.state == State.SCHEDULING
    story.lost("w8")
    story.tell(*(m.WorkerLost(member=member, cause="it exited") for member in list(story.run.members)))
    assert story.run.failure == ("RecoveryError", "workers cannot be started: it exited")


def test_a_user_exception_ends_the_run_at_once() -> None:
    story = running()
    story.tell(m.TaskFailed(member="w1", rank=1, step=7, kind="task", message="ZeroDivisionError: ..."))
    assert story.run.state == State.ERRORED
    assert story.run.failure == ("TaskError", "rank 1 (w1), step 7: ZeroDivisionError: ...")
    assert story.said == [c.Kill("w0"), c.Kill("w1"), c.Kill("w2"), c.End()]
    assert story.lost("w0").said == [], "what comes after the end changes nothing"


def test_a_final_state_that_cannot_be_written_ends_the_run_with_an_error_of_storage() -> None:
    story = running()
    story.tell(m.TaskFailed(member="w0", rank=None, step=9, kind="storage", message="final.arrow could not be written"))
    assert story.run.failure == ("StorageError", "rank 0 (w0), step 9: final.arrow could not be written")


def test_an_exception_of_a_worker_that_was_given_up_for_lost_is_ignored() -> None:
    story = running().lost("w1")
    story.tell(m.TaskFailed(member="w1", rank=1, step=7, kind="task", message="woke up in a strange world"))
    assert story.run.state == State.FENCE


def test_a_worker_that_cannot_be_set_up_ends_no_run_that_trains() -> None:
    """A node that came later lacks something: another worker is started, and those who train go on."""
    story = running(2, spares=1)
    broken: dict[str, Any] = {"rank": None, "step": 0, "kind": "config", "message": "node n9 does not see the run's directory"}
    story.tell(m.TaskFailed(member="w2", **broken))
    assert (story.run.state, story.run.failure) == (State.RUNNING, None)
    assert of(story.said, c.Kill, c.StartWorker) == [c.Kill("w2", avoid=True), c.StartWorker("w3")]
    for number in range(3, 20):
        story.tell(m.TaskFailed(member=f"w{number}", **broken)) if f"w{number}" in story.run.members else None
    assert story.run.state == State.RUNNING
    assert len(story.run.members) == 2, "nobody tries for ever"
    before = Story(2)
    before.tell(m.TaskFailed(member="w1", **broken))
    assert before.run.failure is not None, "before there is a world, it is for a person to look at"
    assert before.run.failure[1] == "w1, step 0: node n9 does not see the run's directory"


def test_an_error_in_a_recovery_names_the_rank_that_the_worker_was_to_have() -> None:
    story = running(spares=1).started("w3").lost("w1").fenced("w0", "w2")
    story.tell(m.TaskFailed(member="w2", rank=None, step=5, kind="mismatch", message="another model", incarnation=2))
    assert story.run.failure == ("MismatchError", "rank 2 (w2), step 5: another model")


@pytest.mark.parametrize("state", [State.REPLACE, State.REBUILD])
def test_a_newcomer_that_cannot_take_what_the_others_have_ends_no_run(state: State) -> None:
    """Its node has an older version of the code, perhaps. Whoever trained goes on, with somebody else."""
    story = running(spares=1).started("w3").lost("w1").fenced("w0", "w2")
    if state == State.REBUILD:
        story.reconciled("w0", "w3", "w2", empty=["w3"])
    assert story.run.state == state
    story.tell(m.TaskFailed(member="w3", rank=None, step=5, kind="task", message="another model", incarnation=2))
    assert (story.run.state, story.run.failure) == (State.FENCE, None)
    assert of(story.said, c.Kill, c.Fence) == [c.Kill("w3", avoid=True), c.Fence(("w0", "w2"), 3)]
    story.tell(m.TaskFailed(member="w0", rank=None, step=5, kind="task", message="of before", incarnation=2))
    assert story.run.state == State.FENCE, "what it was asked then is asked again"


@pytest.mark.parametrize("kind", ["task", "non_finite"])
def test_a_newcomer_that_fails_in_its_first_step_ends_no_run(kind: Any) -> None:
    """A file is missing on its node, perhaps. What is not finite is everybody's."""
    story = running(spares=1).to(State.RESUME)
    failed: dict[str, Any] = {"rank": 2, "step": 5, "message": "no such file"}
    story.tell(m.TaskFailed(member="w3", kind=kind, incarnation=2 if kind == "non_finite" else None, **failed))
    if kind == "non_finite":
        assert story.run.failure == ("NonFiniteLossError", "rank 2 (w3), step 5: no such file")
        return
    assert (story.run.state, story.run.failure) == (State.FENCE, None)
    assert of(story.said, c.Kill) == [c.Kill("w3", avoid=True)]
    assert story.run.recoveries[-1].lost == ["w2", "w3"]
    story.tell(m.TaskFailed(member="w0", kind="task", **failed))
    assert story.run.failure is not None, "it is the task"
    story = running(spares=1).to(State.RESUME).committed(5)
    story.tell(m.TaskFailed(member="w3", kind="task", **failed))
    assert story.run.failure is not None, "its node lacks nothing"


@pytest.mark.parametrize("then", ["in FENCE", "in REPLACE", "after another was lost"])
def test_two_newcomers_that_fail_in_the_same_first_step_end_no_run(then: str) -> None:
    """They are on one node, which lacks what only the first forward pass needs. The second says so when the recovery from the
    first has begun; or when another is lost."""
    story = running(2, max_workers=4, min_workers=2, slots=2)
    story.tell(m.CapacityChanged(slots=4))
    story.started("w2", "w3").tell(*(m.Stopped(member=one, incarnation=1, step=1) for one in ("w0", "w1")))
    story.fenced("w0", "w1", step=1)
    story.reconciled("w0", "w1", "w2", "w3", empty=["w2", "w3"]).filled("w0", "w1", "w2", "w3")
    assert (story.run.state, story.run.newcomers) == (State.RESUME, {"w2", "w3"})
    failed = m.TaskFailed(member="w3", rank=3, step=1, kind="task", message="no such file")
    story.lost("w2") if then == "after another was lost" else story.tell(replace(failed, member="w2", rank=2))
    assert story.run.state == State.FENCE
    if then == "in REPLACE":
        story.fenced("w0", "w1", "w3", step=1)
        assert (story.run.state, story.run.joining) == (State.REPLACE, ()), "a fourth is waited for"
    assert of(story.tell(failed), c.Kill) == [c.Kill("w3", avoid=True)]
    assert (story.run.failure, story.run.recoveries[-1].lost) == (None, ["w2", "w3"])
    lost = story.run.roster.gone["w3"]
    assert lost is not None
    assert lost.cause == "it failed in its first step: no such file"
    story.tell(replace(failed, member="w0", rank=0))
    assert story.run.failure is not None, "it is the task"


def first_step(story: Story) -> Story:
    """The world comes together, and trains."""
    newcomers = [one for one in story.run.joining if one not in story.run.survivors]
    return story.reconciled(*story.run.joining, empty=newcomers).filled(*(story.run.joining if newcomers else ()))


def failing_newcomers(workers: int, **rules: Any) -> tuple[Story, int]:
    """Two train, and the others are on a node where nobody comes to the end of its first step: one after the other says so.
    Returns how many have tried as well, when no more do, the run has ended, or there is no end of it."""
    story, tried = running(2, min_workers=2, max_workers=workers, slots=2, **rules), 0
    story.tell(m.CapacityChanged(slots=workers))
    run = story.run
    while tried < 60 and run.state != State.ERRORED and (run.state != State.RUNNING or len(run.members) > 2):
        story.started(*run.roster.of(MemberState.STARTING))
        match run.state:
            case State.RESIZING:
                story.tell(*(m.Stopped(member=one, incarnation=run.incarnation, step=run.step) for one in run.world))
            case State.FENCE:
                story.fenced(*run.roster.taking_part(), step=run.step)
            case State.REPLACE:
                first_step(story)
            case State.RESUME if run.newcomers:
                tried += 1
                about: dict[str, Any] = {"rank": 2, "step": run.step, "kind": "task", "message": "no such file"}
                story.tell(m.TaskFailed(member=min(run.newcomers), **about))
            case _:
                story.committed(run.step)
    return story, tried


@pytest.mark.parametrize("workers", [3, 6])
@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("fruitless", [10, 2])
def test_newcomers_that_fail_in_their_first_step_are_not_tried_for_ever(workers: int, wait: bool, fruitless: int) -> None:
    """Their node lacks something, and there is no other: those who trained go on, and are not held up again and again."""
    story, tried = failing_newcomers(workers, wait_for_replacement=wait, max_fruitless_recoveries=fruitless)
    assert (story.run.state, story.run.failure, story.run.world) == (State.RUNNING, None, ("w0", "w1"))
    assert tried >= 5, "as many rounds as of starts in vain"
    assert tried <= 5 * (workers - 2)
    assert of(story.tell(m.CapacityChanged(slots=workers + 1)), c.StartWorker), "another node came"


def test_that_newcomers_failed_is_forgotten_once_who_trained_is_lost_or_another_does_a_step() -> None:
    """A place is free then that was of use."""
    story, _ = failing_newcomers(3)
    assert of(story.lost("w1").fenced("w0", step=2).said, c.StartWorker)
    story.started(*story.run.roster.of(MemberState.STARTING))
    assert first_step(story).run.newcomers
    story.tell(m.TaskFailed(member=min(story.run.newcomers), rank=2, step=2, kind="task", message="no such file"))
    story.fenced(*story.run.roster.taking_part(), step=2).started(*story.run.roster.of(MemberState.STARTING))
    assert story.run.roster.join_failures == 1
    assert first_step(story).committed(2).run.state == State.RUNNING
    assert story.run.roster.join_failures == 0


def test_a_run_that_needs_who_cannot_do_a_first_step_ends_and_says_why() -> None:
    story = running(2, min_workers=2).lost("w1").fenced("w0")
    while story.run.roster.any_starting():
        (new,) = story.run.roster.of(MemberState.STARTING)
        first_step(story.started(new))
        story.tell(m.TaskFailed(member=new, rank=1, step=5, kind="task", message="no such file"))
        story.fenced("w0")
    failure = story.fires("replacement").run.failure
    assert failure is not None
    assert failure[0] == "RecoveryError"
    assert "The last one that was started was lost: it failed in its first step: no such file" in failure[1]


def joining_in_vain(noticed_by: str, **rules: Any) -> Story:
    """Two train, and are joined by a third, with which no group can be built."""
    story = running(2, max_workers=3, slots=2, **rules)
    story.tell(m.CapacityChanged(slots=3))
    story.started("w2").tell(*(m.Stopped(member=one, incarnation=1, step=1) for one in ("w0", "w1")))
    story.fenced("w0", "w1", step=1)
    while "w2" in story.run.members and story.run.state == State.REPLACE:
        about = {"reason": "no group", "noticed_by": noticed_by}
        story.tell(m.Suspected(incarnation=story.run.incarnation, **about))
        if "w2" in story.run.members:
            story.fenced("w0", "w1", "w2", step=1, empty=["w2"])
    return story


@pytest.mark.parametrize(("noticed_by", "vain"), [("w2", 3), ("w0", 5)])
def test_a_newcomer_that_can_never_join_is_lost_and_the_others_train_on(noticed_by: str, vain: int) -> None:
    """It says so itself, or only the others see it; who has trained together can do so again."""
    story = joining_in_vain(noticed_by)
    assert of(story.said, c.Kill, c.Fence) == [c.Kill("w2", avoid=True), c.Fence(("w0", "w1"), vain + 2)]
    assert story.run.recoveries[-1].lost == ["w2"]
    story.fenced("w0", "w1", step=1).reconciled("w0", "w1").committed(1)
    assert (story.run.state, story.run.world) == (State.RUNNING, ("w0", "w1"))


def test_a_newcomer_stays_one_until_it_has_done_a_step() -> None:
    """Its groups are built, and its first collective fails, again and again."""
    story = running(2, max_workers=3, slots=2)
    story.tell(m.CapacityChanged(slots=3))
    story.started("w2").tell(*(m.Stopped(member=one, incarnation=1, step=1) for one in ("w0", "w1")))
    story.fenced("w0", "w1", step=1)
    while "w2" in story.run.members:
        story.reconciled("w0", "w1", "w2", empty=["w2"]).filled("w0", "w1", "w2")
        assert story.run.state == State.RESUME
        story.tell(m.Suspected(incarnation=story.run.incarnation, reason="a collective failed", noticed_by="w2"))
        if "w2" in story.run.members:
            story.fenced("w0", "w1", "w2", step=1, empty=["w2"])
    story.fenced("w0", "w1", step=1).started("w3")
    story.reconciled("w0", "w1", "w3", empty=["w3"]).filled("w0", "w1", "w3").committed(1)
    assert (story.run.state, story.run.world, story.run.newcomers) == (State.RUNNING, ("w0", "w1", "w3"), frozenset())


@pytest.mark.parametrize("trained", [False, True])
def test_where_nobody_has_trained_before_nobody_is_a_newcomer(trained: bool) -> None:
    """The first world, or all are lost and others begin where they were."""
    story = running(2, checkpoints=True) if trained else Story(2).started("w0", "w1")
    if trained:
        found(story.lost("w0").lost("w1").started("w2", "w3"), reached=5)
    world = story.run.joining
    for _ in range(6):
        story.tell(m.Suspected(incarnation=story.run.incarnation, reason="no group", noticed_by=world[0]))
        assert story.run.state in (State.FENCE, State.REPLACE)
        if story.run.state == State.FENCE:
            story.fenced(*world, empty=world)
        if trained:
            found(story, reached=5)
    assert set(world) <= set(story.run.members)


def test_who_have_trained_together_are_not_newcomers() -> None:
    story = running(max_fruitless_recoveries=4, spares=1).to(State.RESUME).committed(5)
    for incarnation in range(2, 6):
        story.tell(m.Suspected(incarnation=incarnation, reason="a collective failed", noticed_by="w3"))
        assert story.run.state == State.FENCE
        story.fenced("w0", "w1", "w3", step=6).reconciled("w0", "w1", "w3")
    story.tell(m.Suspected(incarnation=6, reason="a collective failed", noticed_by="w3"))
    assert story.run.failure is not None
    assert story.run.failure[0] == "RetryBudgetError"


def test_a_checkpoint_of_the_step_that_was_not_finite_is_passed_over() -> None:
    """The update before it may be what went wrong, and nobody sees that before the next loss."""
    story = running(checkpoints=True, roll_back=True, max_steps=100)
    stored = [m.Stored("step-000000020-e1-i1", 20), m.Stored("step-000000010-e1-i1", 10)]
    about: dict[str, Any] = {"rank": 1, "step": 20, "kind": "non_finite", "message": "nan", "incarnation": 1}
    story.tell(m.TaskFailed(member="w1", **about))
    story.fenced("w0", "w1", "w2")
    story.tell(m.CheckpointsFound(incarnation=2, stored=tuple(stored), reached=20))
    assert story.run.load == stored[1]
    story.reconciled("w0", "w1", "w2").committed(11)
    assert story.run.state == State.RUNNING
    about |= {"step": 30, "incarnation": 2}
    story.tell(m.TaskFailed(member="w1", **about))
    story.fenced("w0", "w1", "w2")
    again = m.Stored("step-000000020-e1-i2", 20)  # what was computed again is sound
    story.tell(m.CheckpointsFound(incarnation=3, stored=(again, stored[1]), reached=30))
    assert story.run.load == again


def test_a_loss_that_is_not_finite_wherever_it_begins_ends_the_run_as_that() -> None:
    """And not for want of a checkpoint."""
    story = running(checkpoints=True, roll_back=True)
    stored = (m.Stored("step-000000010-e1-i1", 10), m.Stored("step-000000005-e1-i1", 5))
    for incarnation, (step, begins) in enumerate([(12, 10), (10, 5), (5, 5)], start=1):
        about: dict[str, Any] = {"rank": 1, "step": step, "kind": "non_finite", "message": "nan", "incarnation": incarnation}
        story.tell(m.TaskFailed(member="w1", **about))
        story.fenced("w0", "w1", "w2")
        story.tell(m.CheckpointsFound(incarnation=incarnation + 1, stored=stored, reached=12))
        assert story.run.load is not None
        assert story.run.load.step == begins
        story.reconciled("w0", "w1", "w2")
    story.tell(m.TaskFailed(member="w1", rank=1, step=5, kind="non_finite", message="nan", incarnation=4))
    assert story.run.failure == ("NonFiniteLossError", "rank 1 (w1), step 5: nan")


def test_abort_is_possible_from_the_first_moment() -> None:
    run = RunState(Rules(min_workers=1, max_workers=1, max_steps=1))
    assert handle(run, m.AbortRequested(reason="Ctrl-C")) == [c.End()]
    assert (run.state, run.failure) == (State.ABORTED, ("AbortedError", "Ctrl-C"))


# ---------------------------------------------------------------- one loss


def test_a_replacement_takes_the_rank_of_who_it_replaces() -> None:
    story = running(spares=1).started("w3").lost("w1")
    assert story.said[0] == c.Kill("w1")
    assert of(story.said, c.Fence) == [c.Fence(("w0", "w2"), 2)]
    story.fenced("w0", "w2")
    assert story.run.joining == ("w0", "w3", "w2")
    story.reconciled("w0", "w3", "w2", empty=["w3"])
    (fill,) = of(story.said, c.Fill)
    copies = (Copy(0, "state", "w0", ("w3",)), Copy(1, "state", "w2", ("w3",)))
    assert fill == c.Fill(("w0", "w3", "w2"), 2, ("w0", "w3", "w2"), copies, (("w3", "w0"),))
    assert story.filled("w0", "w3", "w2").said == [c.Run(("w0", "w3", "w2"), 2)]
    (recovery,) = story.committed(5, at=9.0).run.recoveries
    assert (recovery.lost, recovery.attempts, recovery.step, recovery.resumed) == (["w1"], 1, 5, 9.0)
    assert recovery.guarantee == Guarantee.EXACT


@pytest.mark.parametrize("state", [State.FENCE, State.REPLACE, State.REBUILD, State.RESUME])
def test_a_loss_in_any_phase_goes_back_to_fence_with_the_larger_set(state: State) -> None:
    story = running(spares=2).to(state)
    assert story.run.state == state
    story.lost("w1")
    assert story.run.state == State.FENCE
    (recovery,) = story.run.recoveries
    assert recovery.lost == ["w2", "w1"]
    # In FENCE itself the question stands, and only the answer of one member less is needed.
    assert (story.run.incarnation, recovery.attempts) == ((2, 1) if state == State.FENCE else (3, 2))
    fenced_again = ["w0"] if state == State.FENCE else ["w0", "w3"]
    story.fenced(*fenced_again, empty=() if state == State.RESUME else ["w3"])
    assert story.run.state == State.REPLACE, "a new worker is awaited"
    assert story.started("w4", "w5").run.joining in [("w0", "w3", "w4"), ("w0", "w4", "w3")]


def test_answers_of_an_older_incarnation_are_ignored() -> None:
    story = running(spares=1).to(State.REBUILD).lost("w1")
    before = copy.deepcopy(story.run)
    late = [
        m.Fenced(member="w0", incarnation=2, marks=None),
        m.Reconciled(member="w0", incarnation=2, digests=("x",)),
        m.Filled(member="w0", incarnation=2, digests=("x",)),
        m.Suspected(incarnation=2, reason="a collective failed", noticed_by="w0"),
        m.Completed(member="w0", incarnation=1, digest="x"),
        m.Stopped(member="w0", incarnation=1, step=3),
        m.TimerFired(timer="fence", incarnation=2),
    ]
    assert story.tell(*late) == []
    before.story = story.run.story
    assert story.run == before


def test_a_step_committed_in_an_older_incarnation_counts_as_a_step_but_ends_no_recovery() -> None:
    """A recovery that completes the interrupted step commits it under its old number; its time tells nothing of a step."""
    story = running(spares=1).to(State.RESUME)
    where = {"rank": 0, "world_size": 3, "epoch": 0, "start": 0, "ids_digest": "", "loss": 1.0}
    story.tell(m.StepsCommitted(member="w0", incarnation=1, first_step=4, stop_step=5, longest_s=64.0, **where))
    assert (story.run.state, story.run.step, story.run.longest_step) == (State.RESUME, 5, 0.0)


def test_a_fence_that_nobody_answers() -> None:
    story = running(2)
    story.tell(m.Suspected(incarnation=1, reason="a step takes too long", noticed_by="step time"))
    assert story.run.state == State.FENCE
    story.fires("fence")
    assert story.said == [c.Kill("w0"), c.Kill("w1"), c.End()]
    assert story.run.failure is not None
    assert story.run.failure[0] == "NoSurvivorError"


def test_who_does_not_answer_the_fence_is_lost() -> None:
    story = running(spares=1).started("w3").lost("w2").fenced("w0").fires("fence")
    assert of(story.said, c.Kill) == [c.Kill("w1")]
    assert story.run.recoveries[0].lost == ["w2", "w1"]
    assert story.run.state == State.REPLACE


@pytest.mark.parametrize(("timer", "state"), [("reconcile", State.REPLACE), ("fill", State.REBUILD)])
def test_a_deadline_of_an_exchange_is_a_suspicion(timer: str, state: State) -> None:
    """Everybody waits for the one that hangs: to give up all that are silent would leave nobody."""
    story = running(spares=1).to(state).fires(timer)
    assert (story.run.state, story.run.incarnation) == (State.FENCE, 3)
    assert of(story.said, c.Kill) == []
    assert f"{timer}: no answer from w0, w1, w3 in time" in story.run.recoveries[0].cause


def test_the_deadline_of_a_fence_leaves_time_for_the_longest_step() -> None:
    story = running()
    where: dict[str, Any] = {"rank": 0, "world_size": 3, "epoch": 0, "start": 0, "ids_digest": "", "loss": 1.0}
    story.tell(m.StepsCommitted(member="w0", incarnation=1, first_step=1, stop_step=2, longest_s=20.0, **where))
    assert of(story.lost("w2").said, c.SetTimer) == [c.SetTimer("fence", 60.0, 2)]


def test_a_step_that_was_long_once_is_forgotten_in_time() -> None:
    """Storage that was slow for minutes would else let every hang last as long, for the rest of the run."""
    story = running(max_steps=10_000)
    where: dict[str, Any] = {"member": "w0", "rank": 0, "world_size": 3, "epoch": 0, "start": 0, "ids_digest": "", "loss": 1.0}
    for step in range(1, 5000):
        seconds = 300.0 if step == 1 else 0.1
        about = {"first_step": step, "stop_step": step + 1, "longest_s": seconds}
        story.tell(m.StepsCommitted(incarnation=1, **about, **where), m.StepsCommitted(incarnation=1, **about, **where))
        if step == 100:
            assert story.run.longest_step > 250, "it may come again"
    assert story.run.longest_step < 3.0
    assert of(story.lost("w2").said, c.SetTimer) == [c.SetTimer("fence", 10.0, 2)]


def test_the_deadline_of_a_fence_in_the_first_step_is_that_of_a_hang() -> None:
    """Nobody knows yet how long a forward pass takes, which nothing interrupts: who computes it is not given up for that."""
    story = Story(hang_timeout=300.0).started("w0", "w1", "w2").reconciled("w0", "w1", "w2")
    assert story.run.state == State.RESUME
    assert of(story.lost("w0").said, c.SetTimer) == [c.SetTimer("fence", 300.0, story.run.incarnation)]
    assert of(story.tell(m.SupervisorRestarted()), c.SetTimer) == [c.SetTimer("fence", 300.0, story.run.incarnation)]


def test_a_suspicion_while_workers_are_awaited_is_about_nothing() -> None:
    story = running().lost("w1").fenced("w0", "w2")
    story.tell(m.Suspected(incarnation=2, reason="a collective failed", noticed_by="w0"))
    assert (story.run.state, story.run.incarnation) == (State.REPLACE, 2)


def test_who_held_nothing_when_fenced_is_filled_whatever_it_answers_later() -> None:
    """A worker that died half-way through an update, for example, has state, but no one knows of which version."""
    story = running(spares=1).to(State.REPLACE).reconciled("w0", "w1", "w3")
    (fill,) = [command for command in story.said if isinstance(command, c.Fill)]
    assert fill.whole == (("w3", "w0"),)


def test_who_took_the_state_of_a_completed_step_takes_what_belongs_to_no_bucket_before_it_trains() -> None:
    """Also in a later incarnation, if the recovery was interrupted between the two."""
    story = running()
    story.tell(m.Suspected(incarnation=1, reason="a collective failed", noticed_by="w0"))
    for name, versions in (("w0", (6, 6)), ("w1", (5, 5)), ("w2", (5, 5))):
        marks = Marks(name, 5, versions, (None, None))
        story.tell(m.Fenced(member=name, incarnation=2, marks=marks))
    story.reconciled("w0", "w1", "w2")
    (fill,) = [command for command in story.said if isinstance(command, c.Fill)]
    assert (fill.copies, fill.whole) == ((), (("w1", "w0"), ("w2", "w0")))
    assert story.run.state == State.REBUILD
    story.tell(m.Suspected(incarnation=2, reason="a collective failed", noticed_by="w0"))
    for name in ("w0", "w1", "w2"):
        marks = Marks(name, 6, (6, 6), (None, None), restated=name == "w1")
        story.tell(m.Fenced(member=name, incarnation=3, marks=marks))
    story.reconciled("w0", "w1", "w2")
    fill = [command for command in story.said if isinstance(command, c.Fill)][-1]
    assert fill.whole == (("w1", "w0"),)
    story.filled("w0", "w1", "w2")
    assert story.run.state == State.RESUME


@pytest.mark.parametrize("workers", [2, 3])
def test_who_holds_something_else_than_it_was_sent_is_filled_anew(workers: int) -> None:
    """It is rank 0, and there may be one survivor: neither ranks nor majorities say who is right."""
    story = running(workers, spares=1).started(f"w{workers}").lost("w0")
    new, (*others,) = f"w{workers}", story.run.world[1:]
    story.fenced(*others).reconciled(*others, new, empty=[new]).filled(*others)
    story.tell(m.Filled(member=new, incarnation=story.run.incarnation, digests=("a", "x")))
    assert story.run.state == State.FENCE
    story.fenced(*others, new)
    assert (story.run.joining, set(story.run.survivors)) == ((new, *others), set(others))
    story.reconciled(*others, new)
    (fill,) = [command for command in story.said if isinstance(command, c.Fill)]
    assert [(copy.bucket, copy.targets) for copy in fill.copies] == [(0, (new,)), (1, (new,))]
    assert fill.whole == ((new, others[0]),)
    story.filled(*others, new).committed(5)
    (recovery,) = story.run.recoveries
    assert (story.run.state, recovery.attempts, recovery.repaired, recovery.guarantee) == (State.RUNNING, 2, 0, Guarantee.EXACT)
    assert story.run.void == set()


def test_a_worker_that_trains_is_not_made_a_spare_by_a_second_introduction() -> None:
    story = running().started("w0")
    assert story.run.members["w0"] == MemberState.ACTIVE


def test_a_deadline_counts_only_for_what_it_was_set_for() -> None:
    story = running(spares=1).to(State.REBUILD)
    for timer in ("schedule", "fence", "replacement", "reconcile", "save w0"):
        assert story.fires(timer).said == []
    assert (story.run.state, story.run.incarnation) == (State.REBUILD, 2)


def test_all_replicas_lost() -> None:
    story = running(2).lost("w0").lost("w1")
    assert story.run.failure is not None
    assert story.run.failure[0] == "NoSurvivorError"
    assert "Spread the workers over more nodes" in story.run.failure[1]


def test_all_lost_before_anybody_trained_begins_anew() -> None:
    story = Story(2).started("w0", "w1").reconciled("w0").lost("w0").lost("w1").started("w2", "w3")
    assert of(story.said, c.Reconcile) == [c.Reconcile(("w2", "w3"), story.run.incarnation, None)]


def test_a_run_that_has_lost_the_right_to_write_ends_at_once() -> None:
    """Without a last checkpoint: it would be in the way of who has the right now."""
    story = running(2, checkpoints=True)
    assert story.tell(m.RightLost(reason="run another has taken it")) == [c.Kill("w0"), c.Kill("w1"), c.End()]
    assert (story.run.state, story.run.failure) == (State.ERRORED, ("LockedError", "run another has taken it"))


# ---------------------------------------------------------------- back to a checkpoint


def stored(*steps: int) -> tuple[m.Stored, ...]:
    return tuple(m.Stored(f"at {step}", step) for step in steps)


def found(story: Story, *steps: int, reached: int = 0, error: str = "") -> Story:
    """What there is in storage, newest first."""
    story.tell(m.CheckpointsFound(incarnation=story.run.incarnation, stored=stored(*steps), reached=reached, error=error))
    return story


def test_all_replicas_lost_and_everybody_loads_the_newest_checkpoint() -> None:
    story = running(2, checkpoints=True).lost("w0").lost("w1")
    assert of(story.said, c.FindCheckpoints) == [c.FindCheckpoints(story.run.incarnation)]
    story.started("w2", "w3")
    assert story.run.joining == (), "storage has not answered yet"
    found(story, 40, 20, reached=47)
    assert of(story.said, c.Reconcile) == [c.Reconcile(("w2", "w3"), story.run.incarnation, None, "at 40")]
    recovery = story.reconciled("w2", "w3").committed(40).run.recoveries[0]
    assert (recovery.strategy, recovery.guarantee) == (Strategy.CHECKPOINT, Guarantee.EXACT)
    assert (recovery.step, recovery.redone) == (40, 7)


def test_a_checkpoint_that_came_to_be_after_everybody_went_back_is_of_another_training() -> None:
    """Who wrote it was lost, and its persister was slow. What was lost or rounded before it is told of nowhere any more."""
    before, belated = m.Stored("step 20 of 1", 20, 1), m.Stored("step 40 of 1", 40, 1)
    story = running(2, checkpoints=True).lost("w0").lost("w1").started("w2", "w3")
    went_back = story.run.incarnation
    story.tell(m.CheckpointsFound(incarnation=went_back, stored=(before,), reached=47))
    story.reconciled("w2", "w3").committed(20)
    story.lost("w2").lost("w3").started("w4", "w5")
    story.tell(m.CheckpointsFound(incarnation=story.run.incarnation, stored=(belated, before), reached=30))
    assert story.run.load == before
    commands = of(story.reconciled("w4", "w5").said, c.Run)
    assert commands[-1].rejected == (belated.name,), "nothing to fall back to: nothing is deleted for its sake"
    assert story.run.returns == [Return(went_back, 20), Return(story.run.incarnation, 20)]
    # Nor does a later run begin from it, nor one that is told of it late.
    later = RunState(story.run.rules)
    handle(later, m.RunStarted(run_id="r2", incarnation=9, stored=(belated, before), returns=tuple(story.run.returns)))
    assert later.stored == [before]
    about: dict[str, Any] = {"bytes": 1, "snapshot_s": 0, "stall_s": 0, "persist_s": 0}
    story.committed(20).tell(m.CheckpointCommitted(member="w0", incarnation=1, step=40, name=belated.name, **about))
    assert story.run.stored == [before]


def test_that_everybody_went_back_is_in_the_log_though_not_in_the_account_of_a_recovery_interrupted_once_more() -> None:
    """By which a later run knows it."""
    story = running(3, checkpoints=True, strategy="lossy", quorum=0.25, wait_for_replacement=False)
    story.lost("w0").lost("w1").lost("w2").started("w3", "w4", "w5")
    found(story, 12, reached=20).reconciled("w3", "w4", "w5")
    returns, went_back = Returns(), story.run.incarnation
    for line in (
        {"event": "CheckpointsFound", "incarnation": went_back},
        {"event": "Resumed", "incarnation": went_back, "step": story.run.recoveries[-1].step},
    ):
        returns.take(line)
    story.lost("w5").fenced_in("w3", 12)
    story.fenced_in("w4", 12)
    recovery = story.reconciled("w3", "w4").run.recoveries[-1]
    returns.take({"event": "Resumed", "incarnation": story.run.incarnation, "step": recovery.step})
    assert (recovery.strategy, recovery.step, recovery.incarnation) == (Strategy.LOSSY, 13, went_back + 1)
    assert returns.all == story.run.returns == [Return(went_back, 12)]


def test_checkpoints_that_cannot_be_written_are_told_once_in_a_row() -> None:
    story = running(2, checkpoints=True)
    about: dict[str, Any] = {"member": "w0", "incarnation": 1}
    times: dict[str, Any] = {"bytes": 1, "snapshot_s": 0, "stall_s": 0, "persist_s": 0}
    for step, member in ((5, "w0"), (5, "w1"), (10, "w0")):
        story.tell(m.CheckpointFailed(member=member, incarnation=1, step=step, reason="No space left on device"))
    words = "could not be written: No space left on device"
    assert story.run.warnings == [f"the checkpoint of step 5 {words}"]
    story.tell(m.CheckpointCommitted(step=15, name="at 15", **about, **times))
    story.tell(m.CheckpointFailed(step=20, reason="No space left on device", **about))
    assert story.run.warnings[1:] == [f"the checkpoint of step 20 {words}"]
    story.lost("w1").tell(m.CheckpointFailed(step=25, reason="its world is over", **about))
    assert len(story.run.warnings) == 2, "it was broken off"


def test_checkpoints_that_cannot_be_written_for_long_are_told_again() -> None:
    """Each counts once, however many workers tell of it, and whatever was durable late of those before it."""
    story = running(2, checkpoints=True)
    times: dict[str, Any] = {"bytes": 1, "snapshot_s": 0, "stall_s": 0, "persist_s": 0}

    def fail(*steps: int) -> None:
        for step in steps:
            for member in ("w0", "w1"):
                story.tell(m.CheckpointFailed(member=member, incarnation=1, step=step, reason="disk full"))

    fail(*range(2, 12))
    words = "the last 10 checkpoints could not be written, up to that of step 11: disk full; "
    assert story.run.warnings[1:] == [f"{words}there is no durable one"]
    fail(*range(12, 101))
    assert len(story.run.warnings) == 2
    fail(101, 102)
    assert len(story.run.warnings) == 3
    assert story.run.warnings[2].startswith("the last 100 checkpoints could not be written, up to that of step 101")
    story.tell(m.CheckpointCommitted(member="w0", incarnation=1, step=103, name="at 103", **times))
    fail(104)
    story.tell(m.CheckpointCommitted(member="w0", incarnation=1, step=103, name="at 103", **times))
    fail(104, *range(105, 114))
    assert len(story.run.warnings) == 5, "the first, and the tenth"
    assert story.run.warnings[4].endswith("up to that of step 113: disk full; the newest durable one is of step 103")


def test_that_older_checkpoints_cannot_be_deleted_is_told_once() -> None:
    """Else nobody would know why the storage fills up."""
    story = running(2, checkpoints=True)
    times: dict[str, Any] = {"bytes": 1, "snapshot_s": 0, "stall_s": 0, "persist_s": 0}
    for step, untidy in ((5, ""), (10, "of step 3: Access Denied"), (15, "of step 5: Access Denied")):
        story.tell(m.CheckpointCommitted(member="w0", incarnation=1, step=step, name=f"{step}", untidy=untidy, **times))
    (told,) = story.run.warnings
    assert told.startswith("when a checkpoint was durable, of step 3: Access Denied. Training goes on")


def test_that_samples_are_left_out_is_told_once_for_each_reason() -> None:
    story = running(2)
    where: dict[str, Any] = {"incarnation": 1, "epoch": 0, "start": 0, "stop": 4}
    for step, why in ((3, "the loss was not finite"), (4, "the loss was not finite"), (5, "w1 was lost")):
        story.tell(m.SamplesLost(step=step, why=why, **where))
    assert [words.split(". ")[0] for words in story.run.warnings] == [
        "samples of step 3 were lost: the loss was not finite",
        "samples of step 5 were lost: w1 was lost",
    ]


@pytest.mark.parametrize(
    ("step", "workers", "more"),
    [
        (40, 0, ""),
        (40, 1, ""),
        (40, 3, "; with 1 worker where 3 trained: same samples, other bits"),
        (100, 3, ""),
    ],
)
def test_where_a_later_run_goes_on_from_is_told(step: int, workers: int, more: str) -> None:
    """And that its bits will be others, if there is a step left for that."""
    run = RunState(Rules(min_workers=1, max_workers=1, max_steps=100, checkpoints=True))
    stored = m.Stored(f"step {step} of 1", step, 1, workers)
    for event in (
        m.RunStarted(run_id="r2", incarnation=9, stored=(stored,)),
        m.CapacityChanged(slots=1),
        m.WorkerStarted(member="w0", node="n", pid=1),
    ):
        handle(run, event)
    words = f"goes on from step {step} of 1, with what it holds of the optimizer's settings and of the schedule"
    assert run.warnings == [words + more]


def test_an_incarnation_that_only_a_checkpoint_tells_of_is_not_used_again() -> None:
    """The last lines of the log may have been lost with the machine that wrote it."""
    run = RunState(Rules(min_workers=1, max_workers=1, max_steps=100, checkpoints=True))
    handle(run, m.RunStarted(run_id="r2", incarnation=4, stored=(m.Stored("b", 40, 6), m.Stored("a", 20, 3))))
    assert run.incarnation == 6


def test_a_later_run_begins_from_such_a_one_rather_than_anew_and_says_so() -> None:
    """What everybody had gone back to may have been deleted for it."""
    run = RunState(Rules(min_workers=1, max_workers=1, max_steps=100, checkpoints=True))
    belated = m.Stored("step 40 of 1", 40, 1)
    handle(run, m.RunStarted(run_id="r2", incarnation=9, stored=(belated,), returns=(Return(5, 20),)))
    assert (run.stored, run.rejected) == ([belated], {})
    assert "begins from step 40 of 1, for the checkpoint that an earlier run had gone back to is gone" in run.warnings[0]


def test_if_only_such_a_one_is_there_the_run_begins_anew_again() -> None:
    story = running(2, checkpoints=True).lost("w0").lost("w1").started("w2", "w3")
    story.tell(m.CheckpointsFound(incarnation=story.run.incarnation, stored=(), reached=7))
    story.reconciled("w2", "w3").committed(0).lost("w2").lost("w3").started("w4", "w5")
    story.tell(m.CheckpointsFound(incarnation=story.run.incarnation, stored=(m.Stored("step 5 of 1", 5, 1),), reached=3))
    assert (story.run.failure, story.run.load, story.run.step) == (None, None, 0)


def test_who_is_lost_while_the_run_waits_for_a_replacement_is_counted() -> None:
    """It trained until then, though it is to load a checkpoint like a new one. A spare that is lost meanwhile did not."""
    story = running(3, checkpoints=True, strategy="checkpoint", spares=1, max_failures=2)
    story.tell(
        m.CheckpointCommitted(member="w0", incarnation=1, step=4, name="at 4", bytes=1, snapshot_s=0, stall_s=0, persist_s=0)
    )
    found(story.lost("w1").fenced("w0", "w2"), 4, reached=5)
    assert story.run.state == State.REPLACE
    story.lost("w2").lost("w3")
    assert story.run.recoveries[-1].lost == ["w1", "w2"]
    assert (story.run.state, story.run.failure) == (State.REPLACE, None)
    story.lost("w0")
    assert story.run.failure is not None
    assert story.run.failure[0] == "RetryBudgetError"


def test_all_replicas_lost_before_the_first_checkpoint_begins_anew() -> None:
    story = found(running(2, checkpoints=True).lost("w0").lost("w1").started("w2", "w3"))
    assert of(story.said, c.Reconcile) == [c.Reconcile(("w2", "w3"), story.run.incarnation, None, "")]
    assert story.run.step == 0


def test_checkpoints_that_are_not_there_any_more_do_not_begin_the_run_anew() -> None:
    """The storage that they were on is gone: what is then to be found must not look like a run that never had any."""
    story = running(2, checkpoints=True)
    about = {"bytes": 1, "snapshot_s": 0, "stall_s": 0, "persist_s": 0}
    story.tell(m.CheckpointCommitted(member="w0", incarnation=1, step=40, name="at 40", **about))
    found(story.lost("w0").lost("w1").started("w2", "w3"))
    assert story.run.failure is not None
    assert story.run.failure[0] == "NoCheckpointError"
    assert "at 40" in story.run.failure[1]
    story = running(2, checkpoints=True, strategy="snapshot")
    story.tell(m.CheckpointCommitted(member="w0", incarnation=1, step=40, name="at 40", **about))
    found(story.lost("w0").lost("w1").started("w2", "w3"))
    assert story.run.failure is None, "copies in memory go with the node that holds them"


@pytest.mark.parametrize("kind", ["task", "storage"])
def test_what_fails_on_a_node_that_is_about_to_go_is_lost_with_it(kind: Any) -> None:
    """Its disks and its network may go first. A task that fails elsewhere, too, ends the run."""
    failure = m.TaskFailed(member="w1", kind=kind, step=5, rank=None, message="OSError: stale file handle")
    story = running(3, spares=1)
    story.tell(m.Noticed(member="w1", deadline_s=120.0, source="aws", reason="a spot notice"), failure)
    assert (story.run.state, story.run.failure) == (State.FENCE, None)
    assert "about to be taken away: OSError" in story.run.recoveries[-1].cause
    story.fenced("w0", "w2").tell(m.TaskFailed(member="w0", kind=kind, step=5, rank=None, message="ValueError: no"))
    assert story.run.failure is not None
    alone = running(1, min_workers=1, checkpoints=True)
    alone.tell(m.Noticed(member="w0", deadline_s=120.0, source="aws", reason="a spot notice"))
    alone.tell(m.TaskFailed(member="w0", kind=kind, step=5, rank=None, message="OSError: stale file handle"))
    assert alone.run.state == State.REPLACE


@pytest.mark.parametrize("state", [State.FENCE, State.REPLACE, State.REBUILD])
def test_so_is_the_second_there_that_fails_when_the_recovery_has_begun(state: State) -> None:
    failure = m.TaskFailed(member="w2", kind="task", step=5, rank=None, message="OSError: stale file handle")
    story = running(4)
    story.tell(told("w2"), told("w3"), failure)
    story.fenced("w0", "w1")
    if state != State.FENCE:
        story.fenced("w3")
    if state == State.REBUILD:
        story.started("w4").reconciled("w0", "w1", "w3", "w4", empty=["w4"])
    assert story.run.state == state
    story.tell(replace(failure, member="w3"))
    assert (story.run.failure, story.run.recoveries[-1].lost) == (None, ["w2", "w3"])
    assert story.run.state == (State.REPLACE if state == State.FENCE else State.FENCE)


def test_who_cannot_hand_its_state_over_is_lost_as_if_it_had_died() -> None:
    """The object store is full, say, and there is a checkpoint."""
    story = running(2, checkpoints=True)
    story.tell(told("w0"), told("w1"))
    story.started("w2", "w3").tell(*(m.Stopped(member=member, incarnation=1, step=5) for member in ("w0", "w1")))
    story.fenced("w0", "w1").reconciled("w2", "w3", empty=["w2", "w3"])
    (giver,) = story.run.givers.values()
    assert story.run.state == State.REBUILD
    about: dict[str, Any] = {"rank": None, "step": 5, "kind": "task", "incarnation": story.run.incarnation}
    story.tell(m.TaskFailed(member=giver, message="OutOfDiskError", **about))
    story.fenced("w2", "w3", empty=["w2", "w3"])
    assert (story.run.failure, story.run.state) == (None, State.REPLACE)
    assert of(story.said, c.FindCheckpoints) == [c.FindCheckpoints(story.run.incarnation)]


def test_who_cannot_save_the_final_state_on_a_node_that_is_about_to_go_leaves_that_to_another() -> None:
    """The mount of its storage goes before its processes do. If it fails elsewhere, too, it is the storage."""
    story = running(2)
    story.tell(told("w0"))
    story.completed()
    failed: dict[str, Any] = {"rank": None, "step": 100, "kind": "storage", "message": "final.arrow could not be written"}
    assert of(story.tell(m.TaskFailed(member="w0", **failed)), c.Save) == [c.Save(("w1",), ("w0", "w1"), 1)]
    assert (story.run.state, story.run.failure) == (State.SHUTTING_DOWN, None)
    story.tell(m.TaskFailed(member="w1", **failed))
    assert story.run.failure == ("StorageError", "rank 1 (w1), step 100: final.arrow could not be written")


@pytest.mark.parametrize("left", [True, False])
def test_the_only_one_who_cannot_save_a_stage_is_replaced_before_it_is_saved(left: bool) -> None:
    """`left`: another stage has its worker still."""
    story = running(2 if left else 1, stages=2 if left else 1, min_workers=2 if left else 1, checkpoints=True)
    story.tell(told("w0"))
    story.completed()
    story.tell(m.TaskFailed(member="w0", rank=None, step=100, kind="storage", message="stale file handle"))
    assert (story.run.state, story.run.failure) == (State.FENCE if left else State.REPLACE, None)


def test_what_was_committed_before_everybody_went_back_is_no_progress() -> None:
    story = running(2, spares=1, checkpoints=True, strategy="checkpoint").started("w2")
    story.tell(
        m.CheckpointCommitted(member="w0", incarnation=1, step=9, name="at 9", bytes=1, snapshot_s=0, stall_s=0, persist_s=0)
    )
    found(story.lost("w0").fenced("w1", step=15), 9, 5, reached=15)
    where = {"rank": 0, "world_size": 2, "epoch": 0, "start": 0, "ids_digest": "", "loss": 1.0}
    story.tell(m.StepsCommitted(member="w1", incarnation=1, first_step=4, stop_step=15, **where))
    assert story.run.step == 9
    recovery = story.run.recoveries[-1]
    assert recovery.redone == 6
    story.run.history.go_back(5, 15, "step 5", recovery.strategy)
    assert recovery.redone == 10, "and not another 10"


@pytest.mark.parametrize("damaged", [True, False])
def test_a_checkpoint_that_cannot_be_loaded_is_not_tried_again(damaged: bool) -> None:
    """Nor is it worth anything to retention, unless it was only out of reach."""
    story = found(running(2, checkpoints=True).lost("w0").lost("w1").started("w2", "w3"), 40, 20)
    about = {"name": "at 40", "reason": "its hash differs", "damaged": damaged}
    story.tell(m.CheckpointRejected(member="w2", incarnation=story.run.incarnation, **about))
    found(story.fenced("w2", "w3", empty=["w2", "w3"]), 40, 20)
    assert of(story.said, c.Reconcile) == [c.Reconcile(("w2", "w3"), story.run.incarnation, None, "at 20")]
    story.reconciled("w2", "w3")
    bad = {"rejected" if damaged else "unread": ("at 40",)}
    assert of(story.said, c.Run) == [c.Run(("w2", "w3"), story.run.incarnation, **bad)]  # pyright: ignore[reportArgumentType]


def rejected(story: Story, member: str, step: int, reason: str) -> Story:
    story.tell(m.CheckpointRejected(member=member, incarnation=story.run.incarnation, name=f"at {step}", reason=reason))
    return story


def test_a_run_does_not_begin_anew_because_its_checkpoints_cannot_be_loaded() -> None:
    story = found(running(2, checkpoints=True).lost("w0").lost("w1").started("w2", "w3"), 40, 20)
    rejected(story, "w2", 40, "503 SlowDown").fenced("w2", "w3", empty=["w2", "w3"])
    rejected(found(story, 40, 20), "w3", 20, "expired token").fenced("w2", "w3", empty=["w2", "w3"])
    found(story, 40, 20)
    assert story.run.failure is not None
    assert story.run.failure[0] == "NoCheckpointError"
    assert all(words in story.run.failure[1] for words in ("at 40: 503 SlowDown", "at 20: expired token"))


def test_a_run_that_resumes_does_not_begin_anew_because_its_checkpoints_cannot_be_loaded() -> None:
    story = Story(2)
    story.run = RunState(Rules(min_workers=2, max_workers=2, max_steps=100, checkpoints=True, spares=0))
    story.tell(m.RunStarted(run_id="r", incarnation=7, stored=stored(30)), m.CapacityChanged(slots=2))
    rejected(story.started("w0", "w1"), "w0", 30, "503 SlowDown").fenced("w0", "w1", empty=["w0", "w1"])
    assert story.run.failure is not None
    assert story.run.failure[0] == "NoCheckpointError"


def begun_anew(workers: int, *names: str, latest: int = 4) -> Story:
    """A later run for three, whose workers can load none of these checkpoints of an earlier one, but that before. So many
    workers made the `latest` one and those before it."""
    story = Story(3)
    story.run = RunState(Rules(min_workers=3, max_workers=3, max_steps=200, checkpoints=True, spares=0))
    found = (m.Stored("at 100", 100, 5, latest), m.Stored("at 50", 50, 4, workers), m.Stored("at 10", 10, 3, workers))
    story.tell(m.RunStarted(run_id="r2", incarnation=7, stored=found), m.CapacityChanged(slots=3))
    world = ("w0", "w1", "w2")
    story.started(*world)
    for name in names:
        rejected(story, "w0", int(name.removeprefix("at ")), "its hash differs").fenced(*world, empty=world)
    return story.reconciled(*world)


@pytest.mark.parametrize(
    ("latest", "workers", "kept"),
    [
        (0, 0, Guarantee.EXACT),
        (3, 3, Guarantee.EXACT),
        (0, 3, Guarantee.EXACT),
        (4, 0, Guarantee.ROUNDING),
        (4, 4, Guarantee.ROUNDING),
        (4, 3, Guarantee.ROUNDING),
        (3, 4, Guarantee.ROUNDING),
    ],
)
def test_a_later_run_that_begins_from_an_older_checkpoint_than_the_newest_has_gone_back(
    latest: int, workers: int, kept: Guarantee
) -> None:
    """What the earlier run had done since is done again; by fewer workers, perhaps, or by some after others."""
    story = begun_anew(workers, "at 100", latest=latest).committed(50)
    (recovery,) = story.run.recoveries
    assert (recovery.strategy, recovery.step, recovery.redone) == (Strategy.CHECKPOINT, 50, 50)
    assert recovery.guarantee == kept
    why = "at 100 cannot be loaded: everybody goes back to step 50 (at 50), 50 steps or a few more are done again"
    assert recovery.reason == why
    first, instead = story.run.warnings
    assert first.startswith("goes on from at 100, with what it holds")
    assert instead.startswith("goes on from at 50, for at 100 cannot be loaded, with what it holds")
    assert ("3 workers where 4 trained" in instead) == (workers == 4)


def test_it_may_go_back_further_and_the_next_run_does_not_begin_from_what_it_could_not_load() -> None:
    """Though it may be whole: what was stored beyond where that run went on is of no training that is audited."""
    story = begun_anew(3, "at 100", "at 50")
    assert (story.run.recoveries[-1].step, story.run.recoveries[-1].redone) == (10, 90)
    returns = Returns()
    for number, name in ((8, "at 100"), (9, "at 50")):
        returns.take({"event": "CheckpointRejected", "incarnation": number, "name": name})
    returns.take({"event": "Resumed", "incarnation": 10, "step": story.run.recoveries[-1].step})
    assert returns.all == story.run.returns[-1:] == [Return(10, 10)]
    later = RunState(story.run.rules)
    handle(later, m.RunStarted(run_id="r3", incarnation=10, stored=tuple(story.run.stored), returns=tuple(returns.all)))
    assert [one.name for one in later.stored] == ["at 10"]


def test_who_could_load_what_another_could_not_is_a_survivor() -> None:
    story = found(running(2, checkpoints=True).lost("w0").lost("w1").started("w2", "w3"), 40, 20)
    story.tell(m.CheckpointRejected(member="w2", incarnation=story.run.incarnation, name="at 40", reason="its hash differs"))
    story.fenced("w2", "w3", step=40, empty=["w2"])
    assert story.run.plan is not None
    assert story.run.plan.step == 40


def test_storage_that_does_not_answer_ends_the_run_with_a_reason() -> None:
    story = found(running(2, checkpoints=True).lost("w0").lost("w1"), error="the storage did not answer within 60 s")
    assert story.run.failure is not None
    assert story.run.failure[0] == "RecoveryError"
    assert "did not answer" in story.run.failure[1]


def test_who_computes_in_vain_is_told_so_once() -> None:
    """With "lossy" survivors compute to the end of the step; the first answers tell which one that is, and whether it helps."""
    story = running(5, strategy="lossy").lost("w4")
    assert story.fenced_in("w0", 5) == [c.Forsake(("w1", "w2", "w3"), 2, 5)]
    assert story.fenced_in("w1", 5) == []
    assert story.fenced_in("w2", 6) == [c.Forsake(("w3",), 2, None)]
    assert of(story.fenced_in("w3", 6, whole=False), c.Forsake) == []  # nobody is left who could be told
    assert story.run.plan is not None
    assert (story.run.plan.step, story.run.plan.lost) == (6, ())


def test_nobody_else_computes_on() -> None:
    assert running(3).lost("w2").fenced_in("w0", 5) == []


@pytest.mark.parametrize("strategy", ["lossy", "rollback", "skip", "checkpoint"])
def test_a_suspicion_after_a_loss_is_no_second_loss(strategy: str) -> None:
    """Everybody is there again, and has begun the step after the one in which w1 died."""
    story = running(3, strategy=strategy, checkpoints=True, spares=1, whole_update=False).started("w3").lost("w1")
    for member in ("w0", "w2"):
        story.fenced_in(member, 10)
    story.reconciled("w0", "w3", "w2", empty=["w3"]).filled("w0", "w3", "w2")
    assert story.run.state == State.RESUME
    about = {"step": 4, "name": "at 4", "bytes": 1, "snapshot_s": 0.0, "stall_s": 0.0, "persist_s": 0.0}
    story.tell(m.CheckpointCommitted(member="w0", incarnation=1, **about))
    story.tell(m.Suspected(incarnation=2, reason="a connection was reset", noticed_by="w0"))
    for rank, member in enumerate(story.run.world):
        share = Share(11, (0, 30), (10 * rank, 10 * rank + 10), whole=True)
        marks = Marks(member, 11, (12, 11), (11, None), share=share)
        story.tell(m.Fenced(member=member, incarnation=3, marks=marks))
    assert story.run.plan is not None
    assert (story.run.plan.step, story.run.plan.lost, story.run.plan.keep) == (11, (), ())


def test_strategy_checkpoint_gives_up_what_survivors_hold() -> None:
    story = running(3, checkpoints=True, strategy="checkpoint", spares=1).started("w3")
    story.tell(
        m.CheckpointCommitted(member="w0", incarnation=1, step=4, name="at 4", bytes=1, snapshot_s=0, stall_s=0, persist_s=0)
    )
    found(story.lost("w1").fenced("w0", "w2", step=7), 4)
    assert of(story.said, c.Reconcile) == [c.Reconcile(("w0", "w3", "w2"), story.run.incarnation, None, "at 4")]


def test_survivors_go_on_from_what_they_have_if_there_is_nothing_to_go_back_to() -> None:
    story = running(3, checkpoints=True, strategy="snapshot", spares=1).started("w3")
    about = {"step": 4, "name": "at 4", "bytes": 1, "snapshot_s": 0.0, "stall_s": 0.0, "persist_s": 0.0}
    story.tell(m.CheckpointCommitted(member="w0", incarnation=1, **about))
    found(story.lost("w1").fenced("w0", "w2", step=7))
    assert story.run.plan is not None
    assert story.run.plan.step == 7


def test_a_loss_that_is_not_finite_is_rolled_back_once() -> None:
    story = running(2, checkpoints=True, roll_back=True)
    nan = m.TaskFailed(member="w0", rank=0, step=5, kind="non_finite", message="the loss is nan", incarnation=1)
    story.tell(nan, replace(nan, member="w1", rank=1))
    found(story.fenced("w0", "w1"), 4).reconciled("w0", "w1").committed(4)
    assert story.run.state == State.RUNNING
    story.tell(nan)
    assert story.run.state == State.RUNNING, "that was before"
    story.tell(replace(nan, incarnation=story.run.incarnation))
    assert story.run.failure is not None
    assert story.run.failure[0] == "NonFiniteLossError"


@pytest.mark.parametrize("step", [5, 6])
def test_a_loss_that_is_not_finite_in_a_recovery_is_rolled_back_as_well(step: int) -> None:
    """w2 is lost in step 5, and the survivors complete it; or its loss was not finite before, and is not again."""
    story = running(3, checkpoints=True, roll_back=True, wait_for_replacement=False)
    if step == 6:
        story.run.rolled_back.add(5)
    story.lost("w2")
    for member in ("w0", "w1"):
        marks = Marks(member, 5, (5, 5), (5, 5))
        story.tell(m.Fenced(member=member, incarnation=2, marks=marks))
    assert story.run.plan is not None
    assert (story.run.plan.step, story.run.plan.completes) == (6, True)
    nan = m.TaskFailed(member="w1", rank=None, step=5, kind="non_finite", message="the loss is nan", incarnation=2)
    story.tell(nan)
    if step == 6:
        assert story.run.failure == ("NonFiniteLossError", "rank 1 (w1), step 5: the loss is nan")
        return
    assert (story.run.state, story.run.failure) == (State.FENCE, None)
    story.tell(replace(nan, member="w0"))
    assert (story.run.state, story.run.incarnation) == (State.FENCE, 3), "that was before"
    found(story.fenced("w0", "w1"), 4).reconciled("w0", "w1").committed(4)
    recovery = story.run.recoveries[-1]
    assert (recovery.step, recovery.attempts, recovery.strategy) == (4, 2, Strategy.CHECKPOINT)
    assert recovery.cause == "the node died; then the loss of step 5 is not finite"


def refused(story: Story, *members: str) -> Story:
    about = {"incarnation": story.run.incarnation, "reason": "SGD cannot be undone: lr=10.0 shrinks it to nothing"}
    story.tell(*(m.UndoRefused(member=member, **about) for member in members))
    return story


def test_what_cannot_be_undone_is_gone_back_from() -> None:
    story = running(3, spares=1, checkpoints=True, whole_update=False).started("w3").lost("w2").fenced("w0", "w1")
    refused(story, "w0", "w1")
    assert story.run.state == State.FENCE
    found(story.fenced("w0", "w1", "w3", empty=["w3"]), 4)
    assert of(story.said, c.Reconcile) == [c.Reconcile(("w0", "w1", "w3"), story.run.incarnation, None, "at 4")]
    recovery = story.reconciled("w0", "w1", "w3").committed(4).run.recoveries[0]
    assert (recovery.strategy, recovery.attempts, recovery.cause) == (
        Strategy.CHECKPOINT,
        2,
        "the node died; then an update cannot be undone",
    )
    assert "lr=10.0" in recovery.reason
    assert story.lost("w0").fenced("w1", "w3").run.plan is not None, "that was then"


@pytest.mark.parametrize(("checkpoint", "kept"), [(4, Guarantee.EXACT), (5, Guarantee.EXACT), (6, Guarantee.ROUNDING)])
def test_going_back_from_a_refused_undo_is_exact(checkpoint: int, kept: Guarantee) -> None:
    """One survivor has undone its update and another could not: nothing is left of either. Only a checkpoint of a later step
    may be of who went on from there."""
    story = running(3, spares=1, checkpoints=True, whole_update=False).started("w3").lost("w2")

    def partly_updated(*members: str) -> None:
        marks = [Marks(member, 5, (6, 5), (5, None)) for member in members]
        story.tell(*(m.Fenced(member=one.member, incarnation=story.run.incarnation, marks=one) for one in marks))

    partly_updated("w0", "w1")
    assert story.run.plan is not None
    assert story.run.plan.undo == (0,)
    refused(story.reconciled("w0", undone=9), "w1")
    assert story.run.recoveries[0].guarantee == Guarantee.ROUNDING
    partly_updated("w1")
    found(story.fenced("w0", "w3", empty=["w3"]), checkpoint, reached=5).reconciled("w0", "w1", "w3").committed(checkpoint)
    (recovery,) = story.run.recoveries
    assert (recovery.strategy, recovery.guarantee) == (Strategy.CHECKPOINT, kept)
    assert recovery.undone == (0 if kept == Guarantee.EXACT else 9)


@pytest.mark.parametrize("rules", [{"checkpoints": False}, {"checkpoints": True, "strategy": "replication"}])
def test_what_cannot_be_undone_ends_a_run_that_has_nothing_to_go_back_to(rules: dict[str, Any]) -> None:
    story = running(3, spares=1, whole_update=False, **rules).started("w3").lost("w2").fenced("w0", "w1")
    failure = refused(story, "w0").run.failure
    assert failure is not None
    assert failure[0] == "UndoRefusedError"
    assert "lr=10.0" in failure[1]


def test_a_run_begins_from_what_is_stored_and_goes_on_counting() -> None:
    story = Story(2)
    story.run = RunState(Rules(min_workers=2, max_workers=2, max_steps=100, checkpoints=True, spares=0))
    story.tell(m.RunStarted(run_id="r", incarnation=7, stored=stored(30, 20)), m.CapacityChanged(slots=2))
    story.started("w0", "w1")
    assert of(story.said, c.Reconcile) == [c.Reconcile(("w0", "w1"), 8, None, "at 30")]
    assert story.reconciled("w0", "w1").run.step == 30


# ---------------------------------------------------------------- fewer and more workers


def test_waits_for_a_replacement_so_that_the_result_keeps_its_bits() -> None:
    story = running().lost("w1").fenced("w0", "w2")
    assert (story.run.state, story.run.joining) == (State.REPLACE, ())
    assert story.started("w3").run.joining == ("w0", "w3", "w2")


def test_goes_on_with_fewer_when_none_comes_in_time() -> None:
    story = running().lost("w1").fenced("w0", "w2").fires("replacement").reconciled("w0", "w2").committed(5)
    assert story.run.world == ("w0", "w2")
    assert story.run.recoveries[0].guarantee == Guarantee.ROUNDING, "the same gradients are added in another order"


def test_shrinks_at_once_if_told_so_and_grows_at_a_step_boundary() -> None:
    story = running(wait_for_replacement=False, spares=1).lost("w1").fenced("w0", "w2")
    assert story.run.joining == ("w0", "w2")
    assert of(story.said, c.StartWorker) == [], "nobody waits for it, so it need not be in the way"
    story.started("w3")
    assert story.run.state == State.REPLACE, "it came too late for this world"
    story.reconciled("w0", "w2").committed(5)
    assert story.run.state == State.RESIZING
    assert of(story.said, c.StopAtBoundary, c.StartWorker) == [c.StartWorker("w4"), c.StopAtBoundary(("w0", "w2"))]
    story.tell(*(m.Stopped(member=member, incarnation=2, step=7) for member in ("w0", "w2")))
    story.fenced("w0", "w2", step=7).reconciled("w0", "w2", "w3", empty=["w3"]).filled("w0", "w2", "w3").committed(7)
    assert (story.run.state, story.run.world) == (State.RUNNING, ("w0", "w2", "w3"))
    shrunk, grown = story.run.recoveries
    assert (shrunk.lost, grown.lost, grown.cause) == (["w1"], [], "1 more workers are ready")


def test_fewer_than_the_minimum() -> None:
    story = running(min_workers=3, wait_for_replacement=False)
    story.tell(m.CapacityChanged(slots=2))
    story.lost("w1").fenced("w0", "w2")
    assert story.run.state == State.REPLACE, "it cannot go on without one more"
    story.fires("replacement")
    assert story.run.failure is not None
    assert "2 workers are left and none came within 60 s" in story.run.failure[1]
    assert story.run.failure[1].endswith("Add nodes, or lower the minimum.")


def test_a_replacement_that_is_still_being_set_up_at_the_deadline_is_no_want_of_nodes() -> None:
    story = running(min_workers=3, slots=3).lost("w1").fenced("w0", "w2")
    assert of(story.said, c.StartWorker) == [c.StartWorker("w3")]
    story.fires("replacement")
    assert story.run.failure is not None
    assert "1 more was still being set up: raise RecoveryConfig(replacement_timeout=...)" in story.run.failure[1]
    assert "Add nodes" not in story.run.failure[1]


def test_why_none_came_is_told_if_some_were_started() -> None:
    """Nodes that have something else installed, say: more of them would not help."""
    story = running(min_workers=3, slots=3).lost("w1").fenced("w0", "w2")
    about: dict[str, Any] = {"rank": None, "step": 5, "kind": "config", "message": "node n has other code"}
    story.tell(m.TaskFailed(member="w3", **about))
    story.fires("replacement")
    assert story.run.failure is not None
    why = "it could not be set up: node n has other code"
    assert story.run.failure[1].endswith(f"The last one that was started was lost: {why}")


def grown(pause_s: float, **rules: Any) -> Story:
    """Two trained; at 10 s a third is ready, and it takes so long until all three have done a step."""
    story = running(2, max_workers=5, slots=2, **rules)
    story.tell(m.CapacityChanged(slots=5))
    story.tell(m.WorkerStarted(at=10.0, member="w2", node="n", pid=1))
    assert of(story.said, c.StopAtBoundary) == [c.StopAtBoundary(("w0", "w1"))]
    story.tell(*(m.Stopped(member=one, incarnation=1, step=1) for one in ("w0", "w1")))
    story.fenced("w0", "w1", step=1).reconciled("w0", "w1", "w2", empty=["w2"]).filled("w0", "w1", "w2")
    return story.committed(1, at=10.0 + pause_s)


def test_after_a_resize_all_train_for_some_time_before_the_next() -> None:
    """Nodes come back one after the other, and to fill a worker takes minutes: all others would stand still for each."""
    story = grown(pause_s=90.0)
    story.tell(m.WorkerStarted(at=130.0, member="w3", node="n", pid=1))
    wait = c.SetTimer("grow", 330.0, 2)
    assert (story.run.state, of(story.said, c.SetTimer, c.StopAtBoundary)) == (State.RUNNING, [wait])
    story.tell(m.WorkerStarted(at=160.0, member="w4", node="n", pid=1))
    story.tell(m.TimerFired(at=460.0, timer="grow", incarnation=2))
    assert (story.run.state, story.run.recoveries[-1].cause) == (State.RESIZING, "2 more workers are ready")


def test_until_the_world_may_grow_those_who_are_to_leave_are_not_forgotten() -> None:
    """Nobody could stay, and one spare is too few for all: before the first deadline there is a checkpoint."""
    story = grown(pause_s=90.0, checkpoints=True)
    story.tell(*(told(member, at=120.0) for member in story.run.world))
    story.tell(m.WorkerStarted(at=130.0, member="w3", node="n", pid=1))
    assert c.SetTimer("grow", 330.0, 2) in story.said
    story.tell(m.TimerFired(at=236.0, timer="leave", incarnation=2))
    assert of(story.said, c.Secure) == [c.Secure(("w0", "w1", "w2"))]


def test_the_next_resize_is_not_forgotten_with_the_supervisor() -> None:
    story = grown(pause_s=90.0)
    story.tell(m.WorkerStarted(at=130.0, member="w3", node="n", pid=1), m.SupervisorRestarted(at=200.0))
    assert c.SetTimer("grow", 260.0, 2) in story.said


def test_what_was_lost_is_replaced_at_once_even_after_a_resize() -> None:
    story = grown(pause_s=90.0)
    story.lost("w1").fenced("w0", "w2", step=2)
    story.fires("replacement").reconciled("w0", "w2").committed(2, at=150.0)
    assert story.run.state == State.RUNNING
    story.started("w3")
    assert story.run.state == State.RESIZING


def test_a_late_call_to_stop_is_a_resize_that_nobody_asked_for() -> None:
    story = running(2)
    story.tell(m.Stopped(member="w0", incarnation=1, step=3))
    assert story.run.state == State.RESIZING, "all of them will stop at this boundary"
    story.tell(m.Stopped(member="w1", incarnation=1, step=3))
    assert story.run.state == State.FENCE


def test_completing_the_last_step_needs_no_replacement() -> None:
    story = running(min_workers=3, max_steps=6).lost("w1").fenced("w0", "w2", step=6)
    assert story.run.joining == ("w0", "w2")
    story.reconciled("w0", "w2").completed()
    assert story.run.state == State.SHUTTING_DOWN
    recovery = story.run.recoveries[0]
    assert (recovery.world_before, recovery.world_after, recovery.guarantee) == (3, 2, Guarantee.EXACT)


def test_the_last_step_may_have_been_done_by_fewer_in_an_earlier_attempt() -> None:
    """w0 commits it with w2 alone, and they are fenced before anybody is told."""
    story = running(max_steps=6, wait_for_replacement=False).lost("w1").fenced("w0", "w2").reconciled("w0", "w2")
    story.lost("w2").fenced("w0", step=6).reconciled("w0").completed()
    assert (story.run.state, story.run.recoveries[0].guarantee) == (State.SHUTTING_DOWN, Guarantee.ROUNDING)


@pytest.mark.parametrize(("done", "kept"), [(True, Guarantee.ROUNDING), (False, Guarantee.EXACT)])
def test_a_step_that_an_attempt_did_with_another_number_of_workers_is_not_exact(done: bool, kept: Guarantee) -> None:
    """Three train and a fourth comes, which is lost again in its first step, when all of that is reduced. The next attempt
    begins from the step after it, with three as before. If the step is done again, nothing is left of that attempt."""
    story = Story(4, slots=3, min_workers=2).started("w0", "w1", "w2").reconciled("w0", "w1", "w2").committed(0)
    story.tell(m.CapacityChanged(slots=4))
    story.started("w3").tell(*(m.Stopped(member=member, incarnation=1, step=7) for member in ("w0", "w1", "w2")))
    story.fenced("w0", "w1", "w2", step=7).reconciled("w0", "w1", "w2", "w3", empty=["w3"]).filled("w0", "w1", "w2", "w3")
    assert (story.run.state, story.run.world) == (State.RESUME, ("w0", "w1", "w2", "w3"))
    story.tell(m.CapacityChanged(slots=3))
    story.lost("w3")
    completing(story, 7, "w0", "w1", "w2") if done else story.fenced("w0", "w1", "w2", step=7)
    (recovery,) = story.reconciled("w0", "w1", "w2").committed(7 + done).run.recoveries
    assert (recovery.world_before, recovery.world_after, recovery.attempts) == (3, 3, 2)
    assert (recovery.step, recovery.guarantee) == (7 + done, kept)


def test_a_step_that_fewer_did_before_there_were_enough_again_is_not_exact() -> None:
    story = running(4, min_workers=2, spares=1, wait_for_replacement=False).lost("w3").fenced("w0", "w1", "w2", step=7)
    story.started("w4").reconciled("w0", "w1", "w2")
    assert (story.run.state, len(story.run.world)) == (State.RESUME, 3)
    story.tell(m.Suspected(incarnation=2, reason="a collective failed", noticed_by="w0"))
    completing(story, 7, "w0", "w1", "w2").reconciled("w0", "w1", "w2", "w4", empty=["w4"])
    (recovery,) = story.filled("w0", "w1", "w2", "w4").committed(8).run.recoveries
    assert (recovery.world_before, recovery.world_after, recovery.guarantee) == (4, 4, Guarantee.ROUNDING)


def test_the_first_step_may_have_been_done_by_more_than_all_others() -> None:
    """The first world is disturbed as it comes together, and again when it has trained, of which nobody has told."""
    story = Story(3, min_workers=2).started("w0", "w1", "w2")
    story.tell(m.Suspected(incarnation=1, reason="a collective failed", noticed_by="w0"))
    story.fenced("w0", "w1", "w2", empty=["w0", "w1", "w2"]).reconciled("w0", "w1", "w2")
    assert (story.run.state, story.run.recoveries[0].world_before) == (State.RESUME, 0)
    story.tell(m.CapacityChanged(slots=2))
    story.lost("w2").fenced("w0", "w1", step=1).reconciled("w0", "w1").committed(1)
    recovery = story.run.recoveries[0]
    assert (recovery.world_before, recovery.world_after, recovery.guarantee) == (3, 2, Guarantee.ROUNDING)


# ---------------------------------------------------------------- limits


def test_the_budget_for_failures() -> None:
    story = running(max_failures=0).lost("w1")
    assert story.run.failure is not None
    assert story.run.failure[0] == "RetryBudgetError"
    assert "FailureConfig.max_failures allows 0; last cause: the node died" in story.run.failure[1]


def test_a_preemption_has_a_budget_of_its_own() -> None:
    story = running(max_failures=0, max_preemption_failures=1).lost("w1", preempted=True)
    assert story.run.state == State.FENCE
    assert story.lost("w2", preempted=True).run.state == State.ERRORED


def test_who_had_notice_and_is_lost_before_it_could_leave_was_preempted() -> None:
    story = running(max_failures=0, max_preemption_failures=1)
    story.tell(m.Noticed(member="w1", deadline_s=0.5, source="sigterm", reason="asked to end"))
    assert story.lost("w1").run.state == State.FENCE
    assert story.lost("w2").run.state == State.ERRORED  # that one is a failure


def wished(at: float = 0.0, deadline_s: float = 120.0, source: str = "request") -> m.Noticed:
    return m.Noticed(at=at, member="w1", deadline_s=deadline_s, source=source, reason="a person asked for it")


def test_a_request_that_nothing_came_of_lapses_and_makes_no_later_loss_fatal() -> None:
    """The cluster is just full and the number of workers fixed: w1 cannot be replaced, and keeps its place."""
    story = running(4, slots=4, min_workers=4)
    story.tell(wished(), m.CapacityChanged(slots=3))
    story.lost("w4")  # no node has room for it
    story.tell(m.TimerFired(at=118.0, timer="leave", incarnation=1))
    assert story.said == [c.SetTimer("leave", 2.0, 1)]
    story.tell(m.TimerFired(at=120.0, timer="leave", incarnation=1))
    assert story.tell(m.CapacityChanged(at=121.0, slots=4)) == [], "w1 has the place that is there again"
    assert not story.run.leaving
    story.lost("w2").fenced("w0", "w1", "w3")
    assert of(story.said, c.StartWorker) == [c.StartWorker("w5")]


@pytest.mark.parametrize(("source", "lapses"), [("aws spot", 60.0), ("gcp maintenance", 3600.0)])
def test_what_a_cloud_said_stands_for_as_long_as_it_may_yet_come_true(source: str, lapses: float) -> None:
    story = running(min_workers=3, slots=3)
    story.tell(wished(deadline_s=60.0, source=source))
    story.tell(m.TimerFired(at=60.0, timer="leave", incarnation=1))
    assert of(story.said, c.SetTimer) == [c.SetTimer("leave", lapses, 1)]


def test_a_restarted_supervisor_tells_again_how_often_workers_are_lost() -> None:
    story = running(spares=1, measure_failures=True).to(State.RESUME)
    told = of(story.tell(m.SupervisorRestarted(at=30.0)), c.Run)
    assert told == [c.Run(("w0", "w1", "w3"), story.run.incarnation, failure_s=30.0)]


def test_who_leaves_sleeps_until_then_by_choice_and_wakes_if_nothing_comes_of_it() -> None:
    story = running(min_workers=3, slots=3, sleeps_on_notice=True)
    assert of(story.tell(wished()), c.Sleep) == [c.Sleep(("w1",), True)]
    assert of(story.tell(m.SupervisorRestarted(at=1.0)), c.Sleep) == [c.Sleep(("w1",), True)], (
        "the old one may not have come to it"
    )
    story.tell(m.Dormant(member="w1", incarnation=1, step=6, asleep=True))
    story.tell(m.TimerFired(at=118.0, timer="leave", incarnation=1))
    story.tell(m.TimerFired(at=120.0, timer="leave", incarnation=1))
    assert of(story.said, c.Sleep) == [c.Sleep(("w1",), False)]
    assert of(story.tell(m.SupervisorRestarted(at=121.0)), c.Sleep) == [c.Sleep(("w1",), False)]
    story.tell(m.Dormant(member="w1", incarnation=1, step=9, asleep=False))
    assert of(story.tell(m.SupervisorRestarted(at=122.0)), c.Sleep) == []


@pytest.mark.parametrize("early", [False, True])
def test_a_sleeper_whose_notice_lapses_as_another_is_lost_wakes(early: bool) -> None:
    """It says that it takes part, as all do in a recovery's first step, and would sleep on after that."""
    story = running(4, min_workers=2, slots=4, sleeps_on_notice=True, wait_for_replacement=False, stages=1)
    story.run.rules = replace(story.run.rules, min_workers=4)  # nobody leaves before the deadline
    story.tell(wished(), m.Dormant(member="w1", incarnation=1, step=6, asleep=True))
    story.run.rules = replace(story.run.rules, min_workers=2)
    story.tell(m.WorkerLost(at=121.0, member="w2", cause="the node died", noticed_by="heartbeat"))
    story.fenced("w0", "w1", "w3").reconciled("w0", "w1", "w3")
    takes_part = m.Dormant(member="w1", incarnation=story.run.incarnation, step=5, asleep=False)
    if early:
        story.tell(takes_part)
    assert story.run.state == State.RESUME
    assert of(story.committed(5, at=122.0).said, c.Sleep) == [c.Sleep(("w1",), False)]
    if not early:
        story.tell(takes_part)
    story.tell(m.Dormant(member="w1", incarnation=story.run.incarnation, step=9, asleep=True))  # a person wants it to
    assert of(story.tell(m.SupervisorRestarted(at=123.0)), c.Sleep) == []


@pytest.mark.parametrize("spare", [False, True])
def test_who_leaves_for_good_goes_at_once_and_nobody_takes_its_place(spare: bool) -> None:
    story = running(4, min_workers=2, spares=int(spare))
    if spare:
        story.started("w4")
    story.tell(replace(wished(), replaced=False))
    assert of(story.said, c.StopAtBoundary, c.StartWorker) == [c.StopAtBoundary(("w0", "w1", "w2", "w3"))]
    story.tell(replace(wished(at=1.0, deadline_s=10.0), replaced=False))  # said twice, it is still one
    story.tell(*(m.Stopped(member=f"w{rank}", incarnation=1, step=5) for rank in range(4)))
    story.fenced("w0", "w1", "w2", "w3")
    assert of(story.said, c.Kill, c.StartWorker) == [c.Kill("w1")]
    assert [command.world for command in story.said if isinstance(command, c.Reconcile)] == [("w0", "w2", "w3")]
    assert (story.run.rules.max_workers, story.run.lacking()) == (3, 0)
    story.reconciled("w0", "w2", "w3").committed(5)
    assert of(story.tell(m.CapacityChanged(slots=8)), c.StartWorker, c.StopAtBoundary) == []
    assert story.lost("w3").run.state == State.FENCE
    assert of(story.fenced("w0", "w2").said, c.StartWorker) == ([] if spare else [c.StartWorker("w4")])


def test_who_could_not_leave_for_good_is_counted_again() -> None:
    """Two of four are lost meanwhile, and nobody takes their places: w1 is needed."""
    story = running(4, slots=4, min_workers=3)
    story.tell(replace(wished(deadline_s=3.0), replaced=False), m.CapacityChanged(slots=3))
    assert story.run.rules.max_workers == 3
    story.lost("w3").fenced("w0", "w1", "w2")
    assert [command.world for command in story.said if isinstance(command, c.Reconcile)] == [("w0", "w1", "w2")]
    story.reconciled("w0", "w1", "w2")
    story.committed(5, at=6.0).tell(m.TimerFired(at=6.1, timer="leave", incarnation=2))
    assert (dict(story.run.leaving), story.run.rules.max_workers) == ({}, 4)


def test_who_leaves_for_good_is_one_less_than_there_were_also_if_there_might_be_more() -> None:
    """Three of at most four train, and room for a fourth comes with the request."""
    story = running(3, slots=3, min_workers=2)
    story.run.limit(1)
    story.tell(replace(wished(), replaced=False), m.CapacityChanged(slots=8))
    assert of(story.said, c.StopAtBoundary, c.StartWorker) == [c.StopAtBoundary(("w0", "w1", "w2"))]
    story.tell(*(m.Stopped(member=f"w{rank}", incarnation=1, step=5) for rank in range(3)))
    story.fenced("w0", "w1", "w2")
    assert [command.world for command in story.said if isinstance(command, c.Reconcile)] == [("w0", "w2")]
    story.reconciled("w0", "w2").committed(5)
    assert of(story.said, c.StartWorker) == []
    assert story.run.rules.max_workers == 2


def test_who_may_have_more_again_gets_all_that_was_taken() -> None:
    story = running(3, slots=3, min_workers=2)
    story.run.limit(1)
    story.tell(replace(wished(deadline_s=3.0), replaced=False))
    assert (story.run.rules.max_workers, story.run.leaving["w1"].fewer) == (2, 2)
    assert "at least 2" in story.run.why_not_fewer()
    story.tell(replace(wished(deadline_s=3.0), member="w2", replaced=False))
    assert ("w2" in story.run.leaving, "w2 stays" in str(story.run.warnings)) == (False, True)


def test_who_waits_for_workers_can_have_one_less_at_once() -> None:
    """All have gone back to a checkpoint, and nobody trains yet."""
    story = running(3, slots=3, min_workers=2, checkpoints=True, strategy="checkpoint").lost("w2").fenced("w0", "w1")
    found(story, 5)
    assert story.run.members["w1"] == MemberState.SPARE
    story.tell(replace(wished(), replaced=False))
    assert "w1" not in story.run.members
    assert story.run.rules.max_workers == 2


def test_fewer_than_asked_for_or_than_stages_cannot_be() -> None:
    assert "at least 3" in running(3, min_workers=3).run.why_not_fewer()
    assert "stages" in running(4, min_workers=2, stages=2).run.why_not_fewer()
    assert running(3, min_workers=2).run.why_not_fewer() == ""


def test_whom_a_person_put_to_sleep_no_notice_wakes() -> None:
    story = running(min_workers=3, slots=3, sleeps_on_notice=True)
    story.tell(m.Dormant(member="w1", incarnation=1, step=3, asleep=True), wished())
    story.tell(m.TimerFired(at=118.0, timer="leave", incarnation=1), m.TimerFired(at=120.0, timer="leave", incarnation=1))
    assert of(story.said, c.Sleep) == []


@pytest.mark.parametrize("wakes", [False, True])
def test_a_recovery_in_which_somebody_slept_is_exact_up_to_rounding_only(wakes: bool) -> None:
    """After it, all take part in a step; before it, one did not."""
    story = running(spares=1).started("w3")
    story.tell(m.Dormant(member="w1", incarnation=1, step=3, asleep=True))
    if wakes:
        story.tell(m.Dormant(member="w1", incarnation=1, step=5, asleep=False))
    story.lost("w2").fenced("w0", "w1").reconciled("w0", "w1", "w3", empty=["w3"]).filled("w0", "w1", "w3").committed(5)
    assert story.run.recoveries[-1].guarantee == (Guarantee.EXACT if wakes else Guarantee.ROUNDING)


@pytest.mark.parametrize("replaced", [True, False])
def test_the_loss_of_who_slept_gives_the_others_other_shares(replaced: bool) -> None:
    """Who takes its place is awake from the first step on."""
    story = running(3, checkpoints=True, min_workers=2, spares=int(replaced), wait_for_replacement=replaced)
    story.started(*(["w3"] if replaced else []))
    story.tell(m.Dormant(member="w1", incarnation=1, step=3, asleep=True))
    story.committed(9)
    world = ["w0", "w3", "w2"] if replaced else ["w0", "w2"]
    story.lost("w1").fenced("w0", "w2", step=12).reconciled(*world, empty=["w3"])
    story.filled(*world if replaced else []).committed(12)
    assert story.run.state == State.RUNNING
    assert story.run.recoveries[-1].guarantee == Guarantee.ROUNDING
    assert story.run.history.sleepers == set()
    assert story.run.history.awake_from == 12, "nobody had told of the steps from 9 on"


@pytest.mark.parametrize(("step", "guarantee"), [(5, Guarantee.ROUNDING), (8, Guarantee.EXACT)])
def test_steps_that_were_done_while_somebody_slept_are_not_done_again_to_the_bit(step: int, guarantee: Guarantee) -> None:
    story = running(checkpoints=True, strategy="checkpoint")
    story.tell(m.Dormant(member="w1", incarnation=1, step=3, asleep=True))
    story.tell(m.Dormant(member="w1", incarnation=1, step=8, asleep=False))
    stored = m.Stored(f"step-{step}", step)
    about = {"bytes": 1, "snapshot_s": 0.0, "stall_s": 0.0, "persist_s": 0.0}
    story.tell(m.CheckpointCommitted(member="w0", incarnation=1, step=step, name=stored.name, **about))
    story.lost("w2").fenced("w0", "w1", step=10)
    story.tell(m.CheckpointsFound(incarnation=2, stored=(stored,), reached=10))
    story.started("w3").reconciled("w0", "w1", "w3").committed(step)
    assert story.run.recoveries[-1].step == step
    assert story.run.recoveries[-1].guarantee == guarantee


def test_who_can_leave_at_once_does_not_sleep_first_nor_do_all_at_once() -> None:
    story = running(min_workers=3, spares=1, sleeps_on_notice=True).started("w3")
    assert of(story.tell(wished()), c.Sleep, c.StopAtBoundary) == [c.StopAtBoundary(("w0", "w1", "w2"))]
    story = running(min_workers=3, slots=3, sleeps_on_notice=True)
    story.tell(told("w0"), told("w1"))
    assert of(story.tell(told("w2")), c.Sleep) == [c.Sleep(("w0", "w1"), True)], "w2 is the last"


def test_who_had_notice_in_a_recovery_sleeps_after_it() -> None:
    story = running(min_workers=2, slots=3, wait_for_replacement=False, sleeps_on_notice=True).lost("w2")
    assert of(story.tell(wished()), c.Sleep) == []
    story.fenced("w0", "w1").reconciled("w0", "w1").committed(5)
    assert of(story.said, c.Sleep) == [c.Sleep(("w1",), True)]


def test_a_request_for_now_is_met_at_once_if_there_is_a_spare() -> None:
    story = running(min_workers=3, spares=1).started("w3")
    assert of(story.tell(wished(deadline_s=0.0)), c.StopAtBoundary) == [c.StopAtBoundary(("w0", "w1", "w2"))]


def test_a_request_does_not_make_what_a_cloud_says_lapse() -> None:
    story = running(min_workers=3)
    story.tell(wished(source="aws spot"), wished(deadline_s=30.0))
    story.tell(m.TimerFired(at=30.0, timer="leave", incarnation=1))
    assert story.run.leaving["w1"].deadline == 30.0


def told(member: str, at: float = 0.0, source: str = "aws rebalance") -> m.Noticed:
    return m.Noticed(at=at, member=member, deadline_s=120.0, source=source, reason="advice")


def test_who_says_of_all_nodes_that_they_will_be_gone_stops_nothing() -> None:
    story = running(spares=1, max_failures=0, max_preemption_failures=0).started("w3")
    story.tell(m.CapacityChanged(slots=0), *(told(member) for member in ("w0", "w1", "w2", "w3")))
    assert of(story.said, c.Kill, c.StopAtBoundary) == [c.StopAtBoundary(("w0", "w1", "w2"))], "w3 was to be told last"
    story.tell(*(m.Stopped(member=member, incarnation=1, step=5) for member in ("w0", "w1", "w2")))
    story.fenced("w0", "w1", "w2").reconciled("w0", "w1", "w2").committed(5, at=1.0)
    assert (story.run.state, story.run.world) == (State.RUNNING, ("w0", "w1", "w2")), "nobody is there who could take a place"
    story.tell(m.TimerFired(at=118.0, timer="leave", incarnation=2))
    assert story.said == [c.SetTimer("leave", 62.0, 2)]
    story.tell(m.TimerFired(at=180.0, timer="leave", incarnation=2))
    assert (story.said, story.run.leaving) == ([], {})
    assert story.run.roster.spares() == ["w3"]
    story.lost("w1")
    assert story.run.failure is not None, "what is lost later was not taken away"
    assert "max_failures allows 0" in story.run.failure[1]


@pytest.mark.parametrize("source", ["request", "aws spot", "ray drain"])
def test_whose_moment_to_leave_passed_while_the_supervisor_was_away_leaves_now(source: str) -> None:
    """Nobody else would tell it before its node is gone."""
    story = running(min_workers=2, slots=3)
    assert of(story.tell(told("w1", source=source)), c.StopAtBoundary) == []
    assert of(story.tell(m.SupervisorRestarted(at=100.0)), c.StopAtBoundary, c.SetTimer) == [c.SetTimer("leave", 18.0, 1)]
    everybody = [c.StopAtBoundary(("w0", "w1", "w2"))]
    assert of(story.tell(m.SupervisorRestarted(at=118.5)), c.StopAtBoundary) == everybody
    assert story.run.state == State.RESIZING


def test_where_nobody_could_stay_there_is_a_checkpoint_before_the_first_deadline() -> None:
    everybody = [c.Secure(("w0", "w1", "w2"))]
    story = running(min_workers=3, slots=3, checkpoints=True)
    story.tell(told("w0"))
    assert of(story.tell(told("w1")), c.Secure, c.SetTimer) == [c.SetTimer("leave", 118.0, 1)]
    assert of(story.tell(told("w2")), c.Secure, c.SetTimer) == [c.SetTimer("leave", 116.0, 1)]
    assert of(story.tell(m.TimerFired(at=116.0, timer="leave", incarnation=1)), c.Secure) == everybody
    assert of(story.said, c.SetTimer) == [c.SetTimer("leave", 2.0, 1)]
    assert of(story.tell(m.TimerFired(at=118.0, timer="leave", incarnation=1)), c.Secure) == []
    assert of(story.tell(m.SupervisorRestarted(at=118.5)), c.Secure) == everybody, "the old one may not have come to it"
    story.lost("w0").fenced("w1", "w2")
    assert of(story.said, c.Secure) == [], "there is nobody who trains"


def test_who_sleeps_could_not_stay_with_the_state() -> None:
    """Nobody keeps it up to date."""
    story = running(min_workers=3, slots=3, checkpoints=True)
    story.tell(m.Dormant(member="w2", incarnation=1, step=3, asleep=True))
    assert story.run.holders() == ["w0", "w1"]
    story.tell(told("w0"), told("w1"))
    story.tell(m.TimerFired(at=116.0, timer="leave", incarnation=1))
    assert of(story.said, c.Secure) == [c.Secure(("w0", "w1", "w2"))]


def test_a_sleeper_keeps_its_rank_though_a_spare_is_older() -> None:
    story = Story(3, spares=1).started("w1", "w2", "w3").fires("schedule")
    story.reconciled("w1", "w2", "w3").committed(0).started("w0")
    assert (story.run.world, story.run.roster.spares()) == (("w1", "w2", "w3"), ["w0"])
    story.tell(m.Dormant(member="w3", incarnation=1, step=3, asleep=True))
    story.tell(m.Suspected(reason="a connection broke", noticed_by="w1", incarnation=1))
    story.fenced("w1", "w2", "w3", empty=["w3"])
    assert story.run.joining == ("w1", "w2", "w3")


def test_a_sleeper_that_is_lost_while_it_waits_for_a_seat_sleeps_no_more() -> None:
    story = running(spares=0)
    story.tell(m.Dormant(member="w2", incarnation=1, step=3, asleep=True))
    story.lost("w0").fenced("w1")
    story.tell(m.Fenced(member="w2", incarnation=2, marks=None))
    story.lost("w2")
    assert story.run.history.sleepers == set()


def test_a_checkpoint_before_all_leave_is_begun_in_time() -> None:
    story = running(min_workers=3, slots=3, checkpoints=True)
    about = {"bytes": 1, "snapshot_s": 0.0, "stall_s": 0.0, "persist_s": 10.0}
    story.tell(m.CheckpointCommitted(member="w0", incarnation=1, step=5, name="step-5", **about))
    story.tell(told("w0"), told("w1"), told("w2"))
    assert of(story.said, c.SetTimer)[-1] == c.SetTimer("leave", 98.0, 1)
    short = [replace(told(member), deadline_s=3.0) for member in ("w0", "w1", "w2")]
    assert of(running(min_workers=3, slots=3, checkpoints=True).tell(*short), c.Secure) == [c.Secure(("w0", "w1", "w2"))]
    assert of(running(min_workers=3, slots=3).tell(*short), c.Secure) == [], "there are no checkpoints"
    assert of(running(min_workers=3, slots=3, checkpoints=True, strategy="snapshot").tell(*short), c.Secure) == []


def test_all_replicas_of_one_stage_are_enough_for_a_checkpoint_before_they_leave() -> None:
    story = running(4, min_workers=4, slots=4, stages=2, checkpoints=True)
    short = {member: replace(told(member), deadline_s=3.0) for member in ("w1", "w2", "w3")}
    assert of(story.tell(short["w1"], short["w2"]), c.Secure) == [], "w0 hosts stage 0, and w3 stage 1"
    assert of(story.tell(short["w3"]), c.Secure) == [c.Secure(("w0", "w1", "w2", "w3"))]


@pytest.mark.parametrize("ready", [1, 2])
def test_who_alone_holds_the_state_and_leaves_waits_for_nobody_who_is_still_starting(ready: int) -> None:
    """Its node is taken away in seconds, and with it the state, while some are there who could take it."""
    story = running(2, min_workers=1)
    story.tell(told("w0"), told("w1"))
    story.started(*["w2", "w3"][:ready])
    if ready == 1:
        assert story.run.state == State.RUNNING, "until it must be, both wait for the other one"
        story.tell(m.TimerFired(at=118.0, timer="leave", incarnation=1))
    story.tell(*(m.Stopped(member=member, incarnation=1, step=5) for member in ("w0", "w1")))
    story.fenced("w0", "w1")
    assert len(story.run.givers) == 1
    assert [command.world for command in of(story.said, c.Reconcile)] == [("w2", "w3")[:ready]]  # pyright: ignore


def test_the_last_holder_that_has_notice_does_not_wait_for_who_replaces_another() -> None:
    story = running(2, min_workers=1)
    story.tell(told("w0"))
    story.lost("w1").fenced("w0")
    assert story.run.roster.any_starting()
    assert [command.world for command in of(story.said, c.Reconcile)] == [("w0",)]  # pyright: ignore
    story = running(2, min_workers=1).lost("w1").fenced("w0")
    assert story.run.roster.any_starting()
    assert of(story.said, c.Reconcile) == [], "without notice it waits"


def leaving_two(**about: Any) -> Story:
    """Two of three have notice, w2 the shorter one, and there is one spare; the number of workers is fixed."""
    story = running(min_workers=3, slots=4, spares=1, **about).started("w3")
    story.tell(told("w1"))
    assert of(story.said, c.StopAtBoundary) == [c.StopAtBoundary(("w0", "w1", "w2"))]
    story.tell(replace(told("w2"), deadline_s=60.0))
    story.tell(*(m.Stopped(member=member, incarnation=1, step=5) for member in ("w0", "w1", "w2")))
    return story.fenced("w0", "w1", "w2")


def test_of_two_who_have_notice_the_more_urgent_takes_the_only_spare() -> None:
    """Without this the stop that was asked for because of the first would be for nothing."""
    story = leaving_two()
    assert (story.run.joining, story.run.recoveries[-1].left) == (("w0", "w1", "w3"), ["w2"])
    story.reconciled("w0", "w1", "w3", empty=["w3"]).filled("w0", "w1", "w3").committed(5, at=1.0)
    assert (story.run.state, [*story.run.leaving]) == (State.RUNNING, ["w1"])
    assert of(story.started("w4").said, c.StopAtBoundary) == [c.StopAtBoundary(("w0", "w1", "w3"))]


def test_of_two_who_have_notice_one_leaves_at_the_last_moment_though_there_is_nobody_for_the_other() -> None:
    story = running(min_workers=3, slots=3, spares=1)
    story.tell(told("w1"), replace(told("w2"), deadline_s=60.0), m.CapacityChanged(at=1.0, slots=4))
    assert of(story.started("w3").said, c.StopAtBoundary) == [], "perhaps there will be two"
    story.tell(m.TimerFired(at=58.0, timer="leave", incarnation=1))
    assert of(story.said, c.StopAtBoundary) == [c.StopAtBoundary(("w0", "w1", "w2"))]
    story.tell(*(m.Stopped(at=58.1, member=member, incarnation=1, step=5) for member in ("w0", "w1", "w2")))
    assert story.fenced("w0", "w1", "w2").run.joining == ("w0", "w1", "w3")
    story.reconciled("w0", "w1", "w3", empty=["w3"]).filled("w0", "w1", "w3").committed(5, at=59.0)
    assert (story.run.state, of(story.said, c.StopAtBoundary)) == (State.RUNNING, []), "nobody is there for w1 yet"


@pytest.mark.parametrize(
    ("workers", "least", "seconds", "leave"),
    [
        (2, 1, {"w0": 30.0, "w1": 3600.0}, {"w0"}),
        (2, 1, {"w0": 30.0, "w1": 31.0}, {"w0"}),
        (3, 1, {"w0": 30.0, "w1": 31.0, "w2": 3600.0}, {"w0", "w1"}),
        (4, 1, {"w0": 30.0, "w1": 3600.0}, {"w0"}),
        (4, 3, {"w0": 30.0, "w1": 30.0}, {"w0"}),
        (4, 3, {"w0": 31.0, "w1": 30.0}, {"w1"}),
        (4, 1, {"w0": 30.0, "w1": 30.0}, {"w0", "w1"}),
    ],
    ids=[
        "one has time",
        "one has a moment",
        "two go at once",
        "who has time waits",
        "one can be spared",
        "the most urgent",
        "both can be spared",
    ],
)
def test_of_those_whose_time_has_come_as_many_leave_as_the_others_can_do_without(
    workers: int, least: int, seconds: dict[str, float], leave: set[str]
) -> None:
    story = running(workers, min_workers=least, slots=workers)
    world = set(story.run.world)
    room = m.CapacityChanged(slots=workers - len(seconds), last_resort=len(seconds))
    story.tell(room, *(replace(told(member, source="aws spot"), deadline_s=left) for member, left in seconds.items()))
    assert of(story.said, c.StopAtBoundary) == [], "perhaps others come"
    story.tell(m.TimerFired(at=28.0, timer="leave", incarnation=1))
    assert of(story.said, c.StopAtBoundary) == [c.StopAtBoundary(story.run.world)]
    story.tell(*(m.Stopped(at=28.2, member=member, incarnation=1, step=5) for member in story.run.world))
    story.fenced(*story.run.world)
    stay = sorted(world - leave)
    assert (set(story.run.recoveries[-1].left), sorted(story.run.joining)) == (leave, stay)
    story.reconciled(*stay).committed(5, at=28.5)
    assert (story.run.state, set(story.run.leaving)) == (State.RUNNING, seconds.keys() - leave)


@pytest.mark.parametrize(("least", "seconds"), [(3, 120.0), (3, 10.0), (2, 120.0)], ids=["advice", "urgent", "both could go"])
def test_who_is_to_leave_for_good_is_kept_by_nobody_else_s_notice(least: int, seconds: float) -> None:
    story = running(4, min_workers=least, slots=4)
    story.tell(replace(told("w2"), deadline_s=seconds), replace(wished(at=1.0, deadline_s=60.0), replaced=False))
    assert of(story.said, c.StopAtBoundary) == [c.StopAtBoundary(("w0", "w1", "w2", "w3"))]
    story.tell(*(m.Stopped(member=f"w{rank}", incarnation=1, step=5) for rank in range(4)))
    assert story.fenced("w0", "w1", "w2", "w3").run.joining == ("w0", "w2", "w3"), "perhaps another comes for w2"
    story.reconciled("w0", "w2", "w3").committed(5, at=2.0)
    assert (story.run.state, [*story.run.leaving]) == (State.RUNNING, ["w2"])


@pytest.mark.parametrize(("least", "starts"), [(3, [c.StartWorker("w3", anywhere=True)]), (2, [])])
def test_who_is_lost_while_all_nodes_are_said_to_go_is_replaced_there_if_it_is_needed(
    least: int, starts: list[c.Command]
) -> None:
    """Its process crashed, and its node is there. Mostly nothing comes of such a notice."""
    story = running(min_workers=least, slots=3)
    story.tell(m.CapacityChanged(slots=0, last_resort=3), *(told(member) for member in ("w0", "w1", "w2")))
    story.lost("w1").fenced("w0", "w2")
    assert of(story.said, c.StartWorker) == starts
    if starts:
        assert story.tell(told("w3", at=1.0)) == [], "it hears what the others have heard"
        story.started("w3")
    assert set(story.run.joining) == ({"w0", "w3", "w2"} if starts else {"w0", "w2"})


def test_a_run_begins_although_all_its_nodes_are_said_to_go() -> None:
    story = Story(2, min_workers=2, spares=0).started("w0")
    story.tell(m.CapacityChanged(slots=0), told("w0"), told("w1"))
    assert story.started("w1").reconciled("w0", "w1").committed(0).run.state == State.RUNNING
    assert story.run.world == ("w0", "w1")


def test_who_is_needed_for_the_next_world_is_not_let_go_before_it_has_come_together() -> None:
    """All wait for a replacement to go back to a checkpoint with, and hold nothing; their nodes have an hour left."""
    story = running(min_workers=3, max_workers=3, checkpoints=True, strategy="checkpoint")
    story.tell(
        m.CheckpointCommitted(member="w0", incarnation=1, step=4, name="at 4", bytes=1, snapshot_s=0, stall_s=0, persist_s=0)
    )
    found(story.lost("w1").fenced("w0", "w2"), 4, reached=5)
    assert story.run.state == State.REPLACE
    drained = [m.Noticed(member=one, deadline_s=3600.0, source="ray drain", reason="drained") for one in ("w0", "w2")]
    assert of(story.tell(*drained), c.Kill) == []
    assert of(story.started("w3").said, c.Reconcile)[0].world == ("w0", "w3", "w2")
    story.reconciled("w0", "w3", "w2").committed(4)
    assert set(story.run.leaving) == {"w0", "w2"}, "and leave as whoever trains"


@pytest.mark.parametrize("needed", [True, False])
def test_nor_is_the_spare_that_is_about_to_be_needed(needed: bool) -> None:
    """Its node is drained while the others are still leaving their step."""
    story = running(min_workers=3, spares=2).started("w3", *([] if needed else ["w4"])).lost("w1")
    drained = m.Noticed(member="w3", deadline_s=3600.0, source="ray drain", reason="drained")
    assert of(story.tell(drained), c.Kill) == ([] if needed else [c.Kill("w3")])
    story.fenced("w0", "w2")
    assert story.run.joining == ("w0", "w3" if needed else "w4", "w2")


def test_a_spare_that_had_notice_stays_until_there_is_another() -> None:
    story = running(min_workers=3, spares=1).started("w3")
    assert of(story.tell(told("w3")), c.Kill, c.StartWorker) == [c.StartWorker("w4")]
    assert of(story.started("w4").said, c.Kill) == [c.Kill("w3")]
    assert story.run.roster.spares() == ["w4"]


def test_a_spare_that_had_notice_replaces_who_is_lost_and_leaves_as_the_others_do() -> None:
    story = running(min_workers=3, spares=1).started("w3")
    story.tell(told("w3"))
    story.lost("w1").fenced("w0", "w2").reconciled("w0", "w2", "w3", empty=["w3"]).filled("w0", "w2", "w3").committed(5)
    assert story.run.world == ("w0", "w3", "w2")
    assert of(story.started("w4").said, c.StopAtBoundary) == [c.StopAtBoundary(("w0", "w3", "w2"))]


def test_a_place_is_not_left_to_a_spare_that_must_go_too() -> None:
    """A node of two workers will be gone: one trains, one is the spare. There is no other."""
    story = running(spares=1).started("w3")
    story.tell(told("w3"), told("w1"), m.TimerFired(at=118.0, timer="leave", incarnation=1))
    story.tell(*(m.Stopped(member=member, incarnation=1, step=5) for member in ("w0", "w1", "w2")))
    story.fenced("w0", "w1", "w2")
    assert of(story.said, c.Kill) == [c.Kill("w3"), c.Kill("w1")]


def test_what_ray_drains_stays_drained() -> None:
    story = running(min_workers=3, spares=0)
    story.tell(told("w1", source="ray drain"), m.CapacityChanged(slots=2))
    story.lost("w3").tell(m.TimerFired(at=118.0, timer="leave", incarnation=1))
    story.tell(m.TimerFired(at=1000.0, timer="leave", incarnation=1))
    assert "w1" in story.run.leaving


def test_the_loss_of_a_working_member_makes_starts_worth_trying_again() -> None:
    story = running(min_workers=3, max_start_failures=1, spares=1).lost("w3")
    assert of(story.said, c.StartWorker) == [], "there is no room for a spare"
    story.lost("w2").fenced("w0", "w1")
    assert of(story.said, c.StartWorker) == [c.StartWorker("w4"), c.StartWorker("w5")]


def test_recoveries_that_commit_no_step_come_to_an_end() -> None:
    story = running(max_fruitless_recoveries=2, spares=1).to(State.RESUME)
    suspected: dict[str, Any] = {"reason": "a collective failed", "noticed_by": "w0"}
    story.tell(m.Suspected(incarnation=2, **suspected))
    story.fenced("w0", "w1", "w3").reconciled("w0", "w1", "w3")
    story.tell(m.Suspected(incarnation=3, **suspected))
    assert story.run.failure is not None
    assert story.run.failure[1].startswith("2 recoveries in a row committed no step at step 1; last cause: the node died")


@pytest.mark.parametrize("told_first", [True, False], ids=["suspected first", "lost at once"])
def test_nodes_that_are_lost_one_after_the_other_are_no_recoveries_in_vain(told_first: bool) -> None:
    """A zone is taken back within minutes, and each fill takes longer than until the next node goes."""
    story = running(12, max_fruitless_recoveries=2, min_workers=1)
    world = [f"w{i}" for i in range(12)]
    while len(world) > 2:
        lost = world.pop()
        if told_first:
            story.tell(m.Suspected(incarnation=story.run.incarnation, reason="broken", noticed_by=world[0]))
            assert story.run.state == State.FENCE, story.run.failure
        story.lost(lost)
        assert story.run.state == State.FENCE, story.run.failure
        story.fenced(*world)
        if story.run.state == State.REPLACE and not story.run.joining:
            story.fires("replacement")
        assert story.run.joining == tuple(world)
    story.reconciled(*world).committed(5)
    assert (story.run.state, story.run.fruitless) == (State.RUNNING, 0)


def test_a_step_that_brings_a_worker_down_each_time_comes_to_an_end() -> None:
    story = running(12, max_fruitless_recoveries=3, min_workers=1)
    world = [f"w{i}" for i in range(12)]
    for _ in range(3):
        story.lost(world.pop()).fenced(*world).fires("replacement").reconciled(*world)
        assert story.run.state == State.RESUME
    story.lost(world.pop())
    assert story.run.failure is not None
    assert story.run.failure[0] == "RetryBudgetError"


def test_an_attempt_that_was_too_slow_has_twice_the_time_in_the_next() -> None:
    """So many read from one storage, or are sent to through one network card."""
    story, times = running(spares=1, phase_timeout=100.0).to(State.FENCE), []
    for members in (["w0", "w1"], *[["w0", "w1", "w3"]] * 5):
        story.fenced(*members, empty=["w3"])
        times += [command.seconds for command in story.said if isinstance(command, c.SetTimer) and command.timer == "reconcile"]
        story.fires("reconcile")
    assert times == [100.0, 200.0, 400.0, 800.0, 800.0, 800.0]


def test_recoveries_that_commit_a_step_each_may_go_on_for_ever() -> None:
    story = running(max_fruitless_recoveries=1, wait_for_replacement=False, spares=1)
    for i in range(8):
        story.started(f"w{i + 3}").lost(f"w{i + 2}").fenced("w0", "w1", step=i)
        story.reconciled("w0", "w1", f"w{i + 3}").filled("w0", "w1", f"w{i + 3}").committed(i)
    assert story.run.state == State.RUNNING
    assert len(story.run.recoveries) == 8


def completing(story: Story, step: int, *members: str) -> Story:
    """These have reduced all of the step, which is completed, and told under the number of before."""
    whole = {name: Marks(name, step, (step, step), (step, step)) for name in members}
    story.tell(*(m.Fenced(member=name, incarnation=story.run.incarnation, marks=marks) for name, marks in whole.items()))
    where: dict[str, Any] = {"rank": 0, "world_size": 3, "epoch": 0, "start": 0, "ids_digest": "", "loss": 1.0}
    about = {"member": members[0], "incarnation": story.run.incarnation - 1}
    story.tell(m.StepsCommitted(**about, first_step=step, stop_step=step + 1, **where))
    return story


def test_recoveries_that_complete_a_step_each_are_not_fruitless() -> None:
    """Steps are long, and losses frequent: none comes to its end undisturbed."""
    story = running(max_fruitless_recoveries=1)
    for step in range(5, 13):
        story.tell(m.Suspected(incarnation=story.run.incarnation, reason="a collective failed", noticed_by="w0"))
        assert story.run.state == State.FENCE
        completing(story, step, "w0", "w1", "w2").reconciled("w0", "w1", "w2")
    assert (story.run.state, story.run.step, story.run.fruitless) == (State.RESUME, 13, 0)


def test_recoveries_that_only_leave_steps_out_are_fruitless() -> None:
    story = running(6, strategy="skip", max_fruitless_recoveries=2)
    for rank in (5, 4):
        members = [f"w{i}" for i in range(rank)]
        story.lost(f"w{rank}")
        for member in members:
            story.fenced_in(member, 10 - rank)
        assert story.run.plan is not None
        assert story.run.plan.skips
        where: dict[str, Any] = {"rank": 0, "world_size": rank + 1, "epoch": 0, "start": 0, "ids_digest": "", "loss": 1.0}
        steps = {"first_step": 10 - rank, "stop_step": 11 - rank}
        story.tell(m.StepsCommitted(member="w0", incarnation=story.run.incarnation - 1, **steps, **where))
        story.fires("replacement").reconciled(*members)
    assert (story.run.state, story.run.step) == (State.RESUME, 7)
    failure = story.lost("w3").run.failure
    assert failure is not None
    assert failure[0] == "RetryBudgetError"


def test_steps_of_which_is_told_late_were_progress_before_this_recovery_and_not_in_it() -> None:
    story = running(spares=1).to(State.RESUME)
    suspected: dict[str, Any] = {"reason": "a collective failed", "noticed_by": "w0"}
    story.tell(m.Suspected(incarnation=2, **suspected))
    assert story.run.fruitless == 2, "as far as is known"
    where: dict[str, Any] = {"rank": 0, "world_size": 3, "epoch": 0, "start": 0, "ids_digest": "", "loss": 1.0}
    story.tell(m.StepsCommitted(member="w0", incarnation=2, first_step=5, stop_step=7, **where))
    assert story.run.fruitless == 1
    story.fenced("w0", "w1", "w3", step=7).reconciled("w0", "w1", "w3")
    story.tell(m.Suspected(incarnation=3, **suspected))
    assert story.run.fruitless == 2


def test_an_undo_is_on_record_even_if_the_recovery_that_did_it_was_interrupted() -> None:
    """w1 carries the undo out and w0 does not; afterwards w0 copies what w1 has, and no undo is in the plan."""
    story = running(2, whole_update=False, wait_for_replacement=False)
    story.tell(m.Suspected(incarnation=1, reason="a collective failed", noticed_by="w0"))
    updated = {name: Marks(name, 5, (6, 5), (5, None)) for name in ("w0", "w1")}
    story.tell(*(m.Fenced(member=name, incarnation=2, marks=marks) for name, marks in updated.items()))
    assert story.run.plan is not None
    assert story.run.plan.undo == (0,)
    story.tell(m.Suspected(incarnation=2, reason="a collective failed", noticed_by="w0"))
    story.tell(m.Reconciled(member="w1", incarnation=2, digests=("a", "b"), undone=9))
    assert story.run.recoveries[0].undone == 0, "too late to be an answer"
    undone = Marks("w1", 5, (5, 5), (None, None), changed=Changed(2, 5, 9))
    story.tell(*(m.Fenced(member=marks.member, incarnation=3, marks=marks) for marks in (updated["w0"], undone)))
    assert story.run.plan.undo == ()
    story.reconciled("w0", "w1").filled("w0", "w1").committed(5)
    assert (story.run.recoveries[0].guarantee, story.run.recoveries[0].undone) == (Guarantee.ROUNDING, 9)
    story.tell(m.Suspected(incarnation=3, reason="a collective failed", noticed_by="w0"))
    later = replace(undone, step=8, versions=(8, 8))
    story.fenced("w0", step=8).tell(m.Fenced(member="w1", incarnation=4, marks=later))
    story.reconciled("w0", "w1").committed(8)
    assert (story.run.recoveries[1].guarantee, story.run.recoveries[1].undone) == (Guarantee.EXACT, 0), "it was before this one"


def test_an_update_that_an_interrupted_recovery_kept_is_on_record() -> None:
    """All stand at the beginning of the step that is redone, and only they know that a part of it was updated."""
    story = running(3, strategy="rollback", whole_update=False, wait_for_replacement=False).lost("w2")
    share = Share(5, (0, 30), (0, 10), whole=False)
    partly = [Marks(name, 5, (6, 5), (5, None), share=share) for name in ("w0", "w1")]
    story.tell(*(m.Fenced(member=marks.member, incarnation=2, marks=marks) for marks in partly))
    assert story.run.plan is not None
    assert story.run.plan.keep == (0,)
    story.tell(m.Suspected(incarnation=2, reason="a collective failed", noticed_by="w0"))
    kept = [Marks(name, 5, (5, 5), (None, None), changed=Changed(2, 5, 0, 9)) for name in ("w0", "w1")]
    story.tell(*(m.Fenced(member=marks.member, incarnation=3, marks=marks) for marks in kept))
    recovery = story.reconciled("w0", "w1").committed(5).run.recoveries[0]
    assert (recovery.strategy, recovery.guarantee, recovery.updated_twice) == (Strategy.ROLLBACK, Guarantee.LOSSY, 9)


def test_what_was_undone_before_everybody_went_back_is_not_told_again_by_who_did_it() -> None:
    """It has loaded the checkpoint since; a further loss comes before a step is committed."""
    story = running(2, checkpoints=True, wait_for_replacement=False, whole_update=False)
    suspected: dict[str, Any] = {"reason": "a collective failed", "noticed_by": "w0"}

    def fenced(*marks: Marks) -> None:
        story.tell(*(m.Fenced(member=one.member, incarnation=story.run.incarnation, marks=one) for one in marks))

    story.tell(m.Suspected(incarnation=1, **suspected))
    fenced(*(Marks(name, 5, (6, 5), (5, None)) for name in ("w0", "w1")))
    changed = Changed(2, 5, 9)
    refused(story, "w0")
    fenced(Marks("w0", 5, (6, 5), (5, None)), Marks("w1", 5, (5, 5), (None, None), changed=changed))
    (recovery,) = story.run.recoveries
    assert recovery.undone == 9
    found(story, 4, reached=5).reconciled("w0", "w1")
    assert recovery.undone == 0
    story.tell(m.Suspected(incarnation=3, **suspected))
    fenced(Marks("w0", 4, (4, 4), (None, None)), Marks("w1", 4, (4, 4), (None, None), changed=changed))
    story.reconciled("w0", "w1").committed(4)
    assert (recovery.attempts, recovery.guarantee, recovery.undone) == (3, Guarantee.EXACT, 0)


# ---------------------------------------------------------------- the end of the run


def test_the_final_state_is_saved_by_the_lowest_rank_that_is_left() -> None:
    story = running(max_steps=1).completed().lost("w2")
    assert of(story.said, c.Save, c.StartWorker) == [], "the one that saves is there, and no replacement is needed"
    assert of(story.lost("w0").said, c.Save) == [c.Save(("w1",), ("w0", "w1", "w2"), 1)]
    assert story.fires("save ('w0',)").said == [], "that one is gone"
    assert of(story.fires("save ('w1',)").said, c.Kill) == [c.Kill("w1")]
    assert story.run.failure is not None
    kind, why = story.run.failure
    assert (kind, why.partition(" (")[0]) == ("NoSurvivorError", "nobody holds the state of step 1 any more")


@pytest.mark.parametrize("stored", [(), (m.Stored("c1", 1),)])
def test_if_everybody_is_lost_who_could_save_the_run_goes_back(stored: tuple[m.Stored, ...]) -> None:
    """To the newest checkpoint, or to its beginning, as it would have one step before: but not for ever."""
    story = running(1, max_steps=1, checkpoints=True).completed()
    for number in (2, 3):
        assert of(story.lost(f"w{number - 2}").said, c.Fence, c.FindCheckpoints) == [c.FindCheckpoints(number)]
        story.tell(m.CheckpointsFound(incarnation=number, stored=stored))
        story.started(f"w{number - 1}").reconciled(f"w{number - 1}").completed()
        assert of(story.said, c.Save) == [c.Save((f"w{number - 1}",), (f"w{number - 1}",), number)]
    assert [recovery.strategy for recovery in story.run.recoveries] == [Strategy.CHECKPOINT] * 2
    story.lost("w2")
    assert story.run.failure is not None
    assert story.run.failure[1].startswith("3 times, every worker was lost before the final state was saved")


def test_a_stage_that_was_saved_may_be_lost() -> None:
    """It is in storage: it is not asked again, whoever else is, and its loss does not end the run."""
    story = running(4, stages=2, max_steps=1).completed()
    world = ("w0", "w1", "w2", "w3")
    assert of(story.said, c.Save) == [c.Save(("w0", "w1"), world, 1)]
    story.tell(m.Saved(member="w1", incarnation=1, path="final-stage-1.arrow"))
    assert of(story.lost("w1").said, c.Save) == of(story.lost("w3").said, c.Save) == []
    assert of(story.lost("w0").said, c.Save) == [c.Save(("w2",), world, 1)], "the other stage has a replica left"
    assert of(story.tell(m.SupervisorRestarted()), c.Save) == [c.Save(("w2",), world, 1)]
    story.tell(m.Saved(member="w2", incarnation=1, path="final-stage-0.arrow"))
    assert story.run.state == State.FINISHED


def test_who_saves_is_not_asked_again_when_another_saver_is_lost() -> None:
    """It would write twice, and the end of the run would come in the middle of the second time. A supervisor that comes back
    cannot know whether it was asked."""
    story = running(4, stages=2, max_steps=1).completed()
    world = ("w0", "w1", "w2", "w3")
    assert of(story.lost("w1").said, c.Save) == [c.Save(("w3",), world, 1)]
    assert of(story.tell(m.SupervisorRestarted()), c.Save) == [c.Save(("w0", "w3"), world, 1)]


def test_a_stage_that_was_not_saved_may_not() -> None:
    """It must be had from somewhere again, and here there is neither a log nor a checkpoint."""
    story = running(2, stages=2, max_steps=1).completed()
    story.tell(m.Saved(member="w1", incarnation=1, path="final-stage-1.arrow"))
    assert story.lost("w0").run.state == State.FENCE
    story.tell(m.Fenced(member="w1", incarnation=2, marks=Marks("w1", 1, (1,), (None,), 1)))
    assert story.run.failure is not None
    kind, why = story.run.failure
    assert kind == "NoSurvivorError"
    assert why.startswith("nobody holds stage 0, and no log reaches back to a checkpoint of it (the node died)")


def test_a_stage_that_was_not_saved_is_loaded_and_all_are_saved_anew() -> None:
    story = running(2, stages=2, max_steps=1, checkpoints=True, spares=1).started("w2").completed()
    story.tell(m.Saved(member="w1", incarnation=1, path="final-stage-1.arrow"))
    wait = of(story.lost("w0").said, c.Fence, c.SetTimer)
    assert wait == [c.Fence(("w1",), 2), c.SetTimer("fence", 60.0, 2)], "who is saving does not leave that"
    story.tell(m.Fenced(member="w1", incarnation=2, marks=Marks("w1", 1, (1,), (None,), 1)))
    story.tell(m.CheckpointsFound(incarnation=2, stored=(m.Stored("c1", 1),)))
    story.reconciled("w2", "w1").completed()
    assert of(story.said, c.Save) == [c.Save(("w2", "w1"), ("w2", "w1"), 2)]
    late = story.tell(*(m.Saved(member=member, incarnation=1, path="of before") for member in ("w0", "w1")))
    assert (late, story.run.state) == ([], State.SHUTTING_DOWN)
    story.tell(*(m.Saved(member=member, incarnation=2, path=member) for member in ("w1", "w2")))
    assert story.run.state == State.FINISHED
    assert [recovery.strategy for recovery in story.run.recoveries] == [Strategy.CHECKPOINT]


def test_a_stage_that_is_lost_whenever_it_is_saved_ends_the_run() -> None:
    story = running(2, stages=2, max_steps=1, checkpoints=True, spares=1).started("w2").completed()
    for number, (lost, next_one) in enumerate((("w0", "w2"), ("w2", "w3")), start=2):
        story.lost(lost)
        story.tell(m.Fenced(member="w1", incarnation=number, marks=Marks("w1", 1, (1,), (None,), 1)))
        story.tell(m.CheckpointsFound(incarnation=number, stored=(m.Stored("c1", 1),)))
        if next_one not in story.run.joining:
            story.started(next_one)
        story.reconciled(next_one, "w1").completed()
    story.lost("w3")
    assert story.run.failure is not None
    assert story.run.failure[0] == "NoSurvivorError"
    assert story.run.failure[1].startswith("3 times, every worker of a stage was lost before the final state was saved")


def test_if_everybody_is_lost_who_saves_a_pipeline_all_of_it_is_loaded() -> None:
    story = running(2, stages=2, max_steps=1, checkpoints=True, spares=2).started("w2", "w3").completed()
    said = story.fires("save ('w0', 'w1')").said
    assert of(said, c.Kill, c.FindCheckpoints) == [c.Kill("w0"), c.Kill("w1"), c.FindCheckpoints(2)]
    assert story.run.state == State.REPLACE


def test_replicas_that_differ_at_the_end() -> None:
    story = running(2, max_steps=1)
    story.tell(*(m.Completed(member=member, incarnation=1, digest=f"of {member}") for member in ("w0", "w1")))
    assert story.run.failure is not None
    assert "the replicas differ at the end of the run" in story.run.failure[1]


# ---------------------------------------------------------------- the supervisor's own loss


def test_a_supervisor_that_comes_back_reads_the_log_and_asks_again() -> None:
    story = running(spares=1).to(State.FENCE).fenced("w0")
    run = replay(story.run.rules, story.events)
    assert run == story.run
    commands = handle(run, m.SupervisorRestarted())
    watched = [c.Watch(member, run.roster.nodes[member]) for member in ("w0", "w1", "w3")]
    assert of(commands, c.Kill, c.Watch) == [c.Kill("w2"), *watched]
    assert of(commands, c.Fence) == [c.Fence(("w0", "w1"), 3)], "an incarnation is never fenced twice: workers refuse"


def test_what_was_asked_is_asked_again() -> None:
    growing = Story(2).started("w0").fires("schedule").reconciled("w0").committed(0).started("w1")
    ending = running(max_steps=1).completed()
    for story, state, again in (
        (Story(1), State.SCHEDULING, [c.SetTimer("schedule", 120.0, 0)]),
        (running(spares=1).to(State.RESUME), State.RESUME, [c.Run(("w0", "w1", "w3"), 2)]),
        (running(), State.RUNNING, []),
        (growing, State.RESIZING, [c.StopAtBoundary(("w0",))]),
        (ending, State.SHUTTING_DOWN, [c.Save(("w0",), ("w0", "w1", "w2"), 1), c.SetTimer("save ('w0',)", 60.0, 1)]),
    ):
        assert story.run.state == state
        commands = story.tell(m.SupervisorRestarted())
        assert [command for command in commands if not isinstance(command, c.Kill | c.Watch)] == again


def test_what_workers_say_again_after_a_restart_is_no_news() -> None:
    story = running(max_steps=1).completed()
    assert story.completed().said == []
    assert story.run.state == State.SHUTTING_DOWN


# ---------------------------------------------------------------- the table


def test_an_illegal_event_raises_with_the_story_and_changes_nothing() -> None:
    story = running()
    before = copy.deepcopy(story.run)
    with pytest.raises(IllegalEventError, match=r"Saved\(member=w0, incarnation=1\) cannot come in state RUNNING") as raised:
        story.tell(m.Saved(member="w0", incarnation=1, path="p"))
    assert "WorkerStarted(member=w2)" in str(raised.value), "the story so far"
    assert story.run == before


def test_the_table_is_complete() -> None:
    """Every event has a place in it, nothing may come after the end, and every live state can be left."""
    events = {cls for cls in vars(m).values() if isinstance(cls, type) and issubclass(cls, m.Event) and cls is not m.Event}
    assert set(TRANSITIONS) == events
    for by_state in TRANSITIONS.values():
        assert not set(by_state) & ENDED
    for state in LIVE:
        assert any(by_state.get(state, set()) - {state} for by_state in TRANSITIONS.values())
        assert m.WorkerLost in {event for event, by_state in TRANSITIONS.items() if state in by_state}


def test_the_diagram_in_the_documentation_is_that_of_the_table() -> None:
    text = diagram()
    for state in State:
        assert re.search(rf"\b{state}\b", text)
    assert "RUNNING --> FENCE : Stopped, Suspected, TaskFailed, WorkerLost\n" in text
    if ARCHITECTURE.exists():
        _, drawn, _ = ARCHITECTURE.read_text().split("<!-- state diagram -->")
        assert drawn.strip() == f"```mermaid\n{text}```", "put in what `python -m raytrain_ft.policy.states` prints"


def test_a_new_spare_is_started_when_training_goes_on_again() -> None:
    story = running(spares=1).to(State.RESUME)
    assert of(story.said, c.StartWorker) == []
    assert of(story.committed(5).said, c.StartWorker) == [c.StartWorker("w4")]


def test_members_are_what_the_run_makes_of_them() -> None:
    story = running(spares=1).to(State.REBUILD)
    assert story.run.members == dict.fromkeys(("w0", "w1", "w3"), MemberState.ACTIVE)
    story.lost("w1").fenced("w0", "w3", empty=["w3"])
    assert story.run.members["w3"] == MemberState.SPARE, "its filling was interrupted: it holds nothing"


# ---------------------------------------------------------------- an end before its time


def stopped(story: Story, *members: str) -> list[c.Command]:
    return story.tell(*(m.Stopped(member=member, incarnation=story.run.incarnation, step=5) for member in members))


def checkpointed(story: Story, *members: str) -> list[c.Command]:
    return story.tell(*(m.Checkpointed(member=member, incarnation=story.run.incarnation) for member in members))


def test_who_is_asked_to_end_stops_at_a_boundary_and_stores_it() -> None:
    story = running(checkpoints=True)
    assert story.tell(m.AbortRequested(reason="Ctrl-C")) == [
        c.SetTimer("stop", story.run.rules.stop_timeout, None),
        c.StopAtBoundary(("w0", "w1", "w2")),
    ]
    assert story.run.state == State.STOPPING
    assert story.tell(m.AbortRequested(reason="Ctrl-C again")) == []
    assert stopped(story, "w2", "w0") == []
    assert stopped(story, "w1") == [c.Checkpoint(("w0", "w1", "w2"), 1)]
    times = {"snapshot_s": 0.0, "stall_s": 0.0, "persist_s": 0.0}
    story.tell(m.CheckpointCommitted(member="w0", incarnation=1, step=5, name="step-5", bytes=1, **times))
    assert checkpointed(story, "w0", "w1") == []
    assert checkpointed(story, "w2")[-1] == c.End()
    assert (story.run.state, story.run.failure) == (State.ABORTED, ("AbortedError", "Ctrl-C; its newest checkpoint is step-5"))


@pytest.mark.parametrize("rules", [{"checkpoints": False}, {"checkpoints": True, "strategy": "snapshot"}])
def test_a_run_that_can_store_nothing_ends_at_once(rules: dict[str, Any]) -> None:
    story = running(**rules)
    story.tell(m.AbortRequested(reason="Ctrl-C"))
    assert story.run.state == State.ABORTED


def test_a_recovery_that_is_under_way_comes_before_the_end() -> None:
    story = running(spares=1, checkpoints=True).to(State.REPLACE)
    story.tell(m.AbortRequested(reason="Ctrl-C"))
    assert story.run.state == State.REPLACE
    story.reconciled("w0", "w1", "w3", empty=["w3"]).filled("w0", "w1", "w3").committed(5)
    assert story.run.state == State.STOPPING
    assert story.said == [c.StopAtBoundary(("w0", "w1", "w3"))]
    assert story.run.recoveries[-1].resumed is not None


def test_a_loss_while_stopping_is_recovered_from_and_then_the_run_ends() -> None:
    story = running(spares=1, checkpoints=True).started("w3")
    story.tell(m.AbortRequested(reason="Ctrl-C"))
    stopped(story, "w0", "w1", "w2")
    story.lost("w2").fenced("w0", "w1").reconciled("w0", "w1", "w3", empty=["w3"]).filled("w0", "w1", "w3").committed(5)
    assert story.run.state == State.STOPPING
    assert stopped(story, "w0", "w1", "w3") == [c.Checkpoint(("w0", "w1", "w3"), 2)]


@pytest.mark.parametrize("state", [State.RUNNING, State.FENCE, State.REPLACE, State.REBUILD, State.RESUME])
def test_the_end_has_a_deadline_whatever_the_incarnation(state: State) -> None:
    story = running(spares=1, checkpoints=True)
    if state != State.RUNNING:
        story.to(state)
    story.tell(m.AbortRequested(reason="Ctrl-C"))
    assert story.run.state not in ENDED
    story.tell(m.TimerFired(timer="stop", incarnation=None))
    assert story.run.state == State.ABORTED


def test_a_supervisor_that_comes_back_while_the_run_stops_asks_again() -> None:
    story = running(checkpoints=True)
    story.tell(m.AbortRequested(reason="Ctrl-C"))
    stopped(story, "w0", "w1", "w2")
    checkpointed(story, "w0")
    said = story.tell(m.SupervisorRestarted())
    assert said[-2:] == [c.SetTimer("stop", story.run.rules.stop_timeout, None), c.StopAtBoundary(("w0", "w1", "w2"))]
    assert stopped(story, "w0", "w1", "w2") == [c.Checkpoint(("w0", "w1", "w2"), 1)]
    assert checkpointed(story, "w1", "w2") == [], "what w0 said before the restart counts no more"
    assert checkpointed(story, "w0")[-1] == c.End()


def test_the_final_state_is_still_saved() -> None:
    story = running(checkpoints=True).completed()
    story.tell(m.AbortRequested(reason="Ctrl-C"))
    story.tell(m.Saved(member="w0", incarnation=1, path="final.arrow"))
    assert story.run.state == State.FINISHED


def test_what_was_given_up_and_not_replaced_is_nobodys_state() -> None:
    """All go back to a checkpoint, and another is lost before w0 is told: what w0 holds is of a training that was given up."""
    story = running(2, spares=2, checkpoints=True, strategy="checkpoint").started("w2", "w3")
    found = {"stored": (m.Stored("step-1", 1),), "reached": 5}
    story.lost("w1").fenced("w0")
    story.tell(m.CheckpointsFound(incarnation=story.run.incarnation, **found))
    assert story.run.joining == ("w0", "w2")
    story.reconciled("w2").lost("w2")
    story.fenced("w0", step=5)
    assert story.run.survivors == {}
    assert of(story.said, c.FindCheckpoints)
