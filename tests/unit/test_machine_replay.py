"""Decisions around the replay of a lost stage: its log stays, only this world's records count, a slow team gives way to one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from raytrain_ft.policy import commands as c
from raytrain_ft.policy import messages as m
from raytrain_ft.policy import replacing
from raytrain_ft.policy.machine import handle
from raytrain_ft.policy.reconcile import Marks
from raytrain_ft.policy.roster import MemberState, Rules
from raytrain_ft.policy.run_state import RunState
from raytrain_ft.policy.states import State
from raytrain_ft.policy.strategy import Guarantee, Strategy
from raytrain_ft.policy.topology import waits

STAGES = 3
BUILD_S = 20.0
STEP_S = 3.0
AT = {"node": "n9", "pid": 1}
ABOUT = {"bytes": 1, "snapshot_s": 0.0, "stall_s": 0.0, "persist_s": 0.0}


def seconds_of(commands: list[c.Command]) -> float:
    """The deadline that these set."""
    (timer,) = [command for command in commands if isinstance(command, c.SetTimer)]
    return timer.seconds


class Told:
    """A run of three stages and a spare in step 13, with a checkpoint of step 6, and what it was told."""

    def __init__(self, **rules: Any) -> None:
        self.run = RunState(
            Rules(min_workers=3, max_workers=3, max_steps=100, stages=3, logging=True, checkpoints=True, spares=2, **rules)
        )
        self.at = 0.0
        self.tell(m.RunStarted, run_id="r")
        self.tell(m.CapacityChanged, slots=5)
        for number in range(5):
            self.tell(m.WorkerStarted, member=f"w{number}", node=f"n{number}", pid=1, build_s=BUILD_S)
        self.answer(m.Reconciled, self.run.joining, digests=("d",))
        self.commit(0, 13)
        self.tell(m.CheckpointCommitted, member="w0", incarnation=1, step=6, name="c6", **ABOUT)

    def tell(self, event: Any, **about: Any) -> list[c.Command]:
        self.at += 0.1
        return handle(self.run, event(at=self.at, **about))

    def answer(self, event: Any, members: Any, **about: Any) -> list[c.Command]:
        about |= {"incarnation": self.run.incarnation}
        return [command for member in members for command in self.tell(event, member=member, **about)]

    def start(self) -> None:
        """Whoever is starting is ready."""
        for member in [member for member, state in self.run.members.items() if state == MemberState.STARTING]:
            self.tell(m.WorkerStarted, member=member, node=f"n{member[1:]}", pid=1)

    def commit(self, first: int, stop: int) -> None:
        for member in self.run.world:
            about = {"rank": 0, "world_size": 1, "epoch": 0, "start": 0, "ids_digest": "", "loss": 0.0, "longest_s": STEP_S}
            where = {"incarnation": self.run.incarnation, "first_step": first, "stop_step": stop}
            self.tell(m.StepsCommitted, member=member, **where, **about)

    def fence(self, step: int = 13) -> None:
        """Those of the first world who are left stand between two steps; others hold nothing. What comes of it is `joined`."""
        for member in [member for member, state in self.run.members.items() if state == MemberState.ACTIVE]:
            rank = int(member[1:])
            marks = Marks(member, step, (step,), (None,), rank) if rank < STAGES else None
            self.joined = self.tell(m.Fenced, member=member, incarnation=self.run.incarnation, marks=marks)

    def replay(self) -> c.Replay:
        """The replay that begins when all have joined."""
        commands = self.answer(m.Reconciled, self.run.joining, digests=("d",))
        (found,) = [command for command in commands if isinstance(command, c.Replay)]
        return found


@pytest.fixture
def lost() -> Told:
    """The middle stage is lost, and its replay begins."""
    told = Told()
    told.tell(m.WorkerLost, member="w1", cause="killed")
    told.fence()
    replay = told.replay()
    assert (replay.load, replay.until, replay.since, replay.stages) == ("c6", 13, 1, (1,))
    return told


def test_a_log_that_is_replayed_is_not_trimmed(lost: Told) -> None:
    late = {"member": "w0", "incarnation": 1, "step": 12, "name": "c12", **ABOUT}
    assert lost.run.state == State.REBUILD
    assert lost.tell(m.CheckpointCommitted, **late) == []
    assert lost.run.stored[0].name == "c12", "the next loss is replayed from there"


def test_after_going_back_only_what_is_logged_from_then_on_counts(lost: Told) -> None:
    lost.answer(m.LogMissing, ["w3"], reason="a gap", diverged=False)
    lost.fence()
    assert lost.run.seeking, "everybody goes back"
    lost.tell(m.CheckpointsFound, incarnation=lost.run.incarnation, stored=(m.Stored("c6", 6),))
    assert lost.run.load == m.Stored("c6", 6)
    assert lost.run.log.incarnation == lost.run.incarnation > 1


def test_who_goes_back_after_all_waits_for_workers_anew() -> None:
    """What was set when a replay was waited for does not cut that short: it may have had seconds left."""
    told = Told()
    for member in ("w3", "w4", "w1"):
        told.tell(m.WorkerLost, member=member, cause="killed")
    told.fence()
    assert (told.run.state, told.run.joining) == (State.REPLACE, ()), "a worker is missing"
    replacing.go_back(told.run, "the log is of more ranks")
    told.tell(m.CheckpointsFound, incarnation=told.run.incarnation, stored=(m.Stored("c6", 6),))
    told.tell(m.TimerFired, timer="replacement", incarnation=told.run.incarnation)
    assert told.run.state == State.REPLACE
    told.tell(m.TimerFired, timer="return", incarnation=told.run.incarnation)
    assert told.run.failure is not None
    assert "none came within 60 s" in told.run.failure[1]


@pytest.mark.parametrize(("checkpoint", "kept"), [(6, Guarantee.EXACT), (13, Guarantee.ROUNDING)])
def test_a_replay_that_was_not_exact_is_undone_by_going_back_to_before_it(checkpoint: int, kept: Guarantee) -> None:
    told = Told(replay_workers=2, exact_sums=False)
    told.tell(m.WorkerLost, member="w1", cause="killed")
    told.fence()
    assert not told.replay().exact
    went_back(told, checkpoint, reason="a gap", diverged=False)
    assert told.run.recoveries[0].guarantee == kept


def test_what_is_not_deterministic_is_not_exact_wherever_it_goes_back_to(lost: Told) -> None:
    went_back(lost, 6, reason="it is another than before", diverged=True)
    assert lost.run.recoveries[0].guarantee == Guarantee.ROUNDING


def test_a_divergence_that_the_step_after_the_replay_shows_takes_everybody_back(lost: Told) -> None:
    """Nothing of a replay's last update is sent in the replay. Who else has computed it holds a state like all others by then,
    from which nobody may go on."""
    lost.answer(m.Filled, lost.run.joining, digests=("d",))
    assert lost.run.state == State.RESUME
    lost.answer(m.LogMissing, ["w3"], reason="it is another than before", diverged=True)
    for rank, member in enumerate(lost.run.joining or lost.run.world):
        lost.tell(m.Fenced, member=member, incarnation=lost.run.incarnation, marks=Marks(member, 13, (13,), (None,), rank))
    assert lost.run.seeking, "everybody goes back"
    lost.tell(m.CheckpointsFound, incarnation=lost.run.incarnation, stored=(m.Stored("c6", 6),))
    lost.answer(m.Reconciled, lost.run.joining, digests=("d",))
    lost.commit(6, 7)
    (recovery,) = lost.run.recoveries
    assert (recovery.strategy, recovery.guarantee) == (Strategy.CHECKPOINT, Guarantee.ROUNDING)
    assert recovery.reason.startswith("a replay computed something else than before: everybody goes back to step 6 (c6)")


def went_back(told: Told, checkpoint: int, **why: Any) -> None:
    """A replay ends, and everybody goes back instead; the first step after that is committed."""
    told.answer(m.LogMissing, ["w3"], **why)
    told.fence()
    told.tell(m.CheckpointsFound, incarnation=told.run.incarnation, stored=(m.Stored(f"c{checkpoint}", checkpoint),))
    told.answer(m.Reconciled, told.run.joining, digests=("d",))
    told.commit(checkpoint, checkpoint + 1)
    assert told.run.recoveries[0].resumed is not None


def test_a_stage_that_is_lost_before_it_was_saved_is_replayed() -> None:
    """All steps are committed, and the others hold them; what was saved before is saved again with it."""
    told = Told()
    told.commit(13, 100)
    told.answer(m.Completed, told.run.world, digest="d")
    told.answer(m.Saved, ["w2"], path="final-stage-2.arrow")
    told.tell(m.WorkerLost, member="w1", cause="killed")
    assert told.run.state == State.FENCE
    assert told.tell(m.Saved, member="w0", incarnation=1, path="final-stage-0.arrow") == [], "it comes late"
    told.fence(100)
    replay = told.replay()
    assert (replay.load, replay.until, replay.stages) == ("c6", 100, (1,))
    told.answer(m.Filled, told.run.joining, digests=("d",))
    commands = told.answer(m.Completed, told.run.world, digest="d")
    assert [command for command in commands if isinstance(command, c.Save)] == [c.Save(told.run.world, told.run.world, 2)]
    told.answer(m.Saved, told.run.world, path="final")
    assert told.run.state == State.FINISHED
    (recovery,) = told.run.recoveries
    assert (recovery.strategy, recovery.guarantee, recovery.lost) == (Strategy.LOGGING, Guarantee.EXACT, ["w1"])
    assert recovery.resumed is not None


def test_a_log_that_failed_begins_anew_with_that_of_the_others() -> None:
    """Everybody goes back, and the next loss is replayed from there: so whoever joins is told that its log begins anew."""
    told = Told()
    told.tell(m.LogFailed, member="w0", incarnation=1, step=12, reason="disk full")
    told.tell(m.WorkerLost, member="w1", cause="killed")
    told.fence()
    assert told.run.seeking
    commands = told.tell(m.CheckpointsFound, incarnation=told.run.incarnation, stored=(m.Stored("c6", 6),))
    (joining,) = [command for command in commands if isinstance(command, c.Reconcile)]
    assert joining.since == told.run.log.incarnation == told.run.incarnation == 2
    told.tell(m.LogFailed, member="w0", incarnation=1, step=12, reason="told late, of the log before")
    assert told.run.log.since == 6
    told.tell(m.LogFailed, member="w0", incarnation=2, step=6, reason="disk full")
    assert told.run.log.since is None
    assert [words.split(":")[0] for words in told.run.warnings] == [
        "w0 cannot log what it sends to other stages (disk full)",
    ]


def test_what_was_trimmed_is_not_replayed_when_the_newest_checkpoint_is_damaged(lost: Told) -> None:
    """No replay begins that would only wait for records that were deleted."""
    lost.answer(m.Filled, lost.run.joining, digests=("d",))
    lost.tell(m.CheckpointCommitted, member="w0", incarnation=2, step=12, name="c12", **ABOUT)
    lost.tell(m.WorkerLost, member="w3", cause="killed")
    lost.fence()
    assert lost.replay().load == "c12"
    lost.tell(m.CheckpointRejected, member="w4", incarnation=lost.run.incarnation, name="c12", reason="its hash differs")
    lost.fence()
    assert lost.run.seeking, "everybody goes back"
    lost.tell(m.CheckpointsFound, incarnation=lost.run.incarnation, stored=(m.Stored("c12", 12), m.Stored("c6", 6)))
    assert lost.run.load == m.Stored("c6", 6)


def test_an_unrelated_loss_does_not_disturb_a_replay() -> None:
    """Who replays the last stage goes on with it when the first one is lost."""
    told = Told()
    told.tell(m.WorkerLost, member="w2", cause="killed")
    told.fence()
    assert told.replay().teams == (("w3",),)
    told.tell(m.WorkerLost, member="w0", cause="killed")
    told.fence()
    replay = told.replay()
    assert (replay.stages, replay.teams) == ((0, 2), (("w4",), ("w3",)))
    assert not waits(2, frozenset(replay.stages), STAGES)


def test_who_has_replayed_its_stage_is_read_by_others() -> None:
    """It has logged all again, also for helpers that lost their own stages meanwhile."""
    told = Told(replay_workers=3)
    told.tell(m.WorkerLost, member="w1", cause="killed")
    told.fence()
    assert [len(team) for team in told.replay().teams] == [3]
    world = told.run.joining
    told.tell(m.Suspected, incarnation=told.run.incarnation, reason="w0 has lost stage 0", noticed_by="aside")
    for member in world:
        marks = Marks("w3", 13, (13,), (None,), 1) if member == "w3" else None
        told.tell(m.Fenced, member=member, incarnation=told.run.incarnation, marks=marks)
    assert (told.run.replaying, told.run.seeking) == ({0, 2}, False)


def test_a_team_that_is_too_slow_is_not_tried_again() -> None:
    told = Told(replay_workers=3)
    told.tell(m.WorkerLost, member="w1", cause="killed")
    told.fence()
    assert [len(team) for team in told.replay().teams] == [3]
    told.tell(m.TimerFired, timer="fill", incarnation=told.run.incarnation)
    told.fence()
    assert [len(team) for team in told.replay().teams] == [1]


@pytest.mark.parametrize(("checkpoint", "workers"), [(6, 3), (12, 1)])
def test_nobody_helps_where_one_alone_is_done_before_the_others_have_built_the_stage(checkpoint: int, workers: int) -> None:
    told = Told(replay_workers=3, exact_sums=False)
    told.tell(m.CheckpointCommitted, member="w0", incarnation=1, step=checkpoint, name=f"c{checkpoint}", **ABOUT)
    told.tell(m.WorkerLost, member="w1", cause="killed")
    told.fence()
    replay = told.replay()
    assert (replay.load, [len(team) for team in replay.teams]) == (f"c{checkpoint}", [workers])
    assert replay.exact == (workers == 1)
    told.answer(m.Filled, told.run.joining, digests=("d",))
    told.commit(13, 14)
    assert told.run.recoveries[-1].guarantee == (Guarantee.EXACT if workers == 1 else Guarantee.ROUNDING)


def test_a_replay_that_is_too_slow_again_gives_way_to_going_back() -> None:
    """Neighbours that are replayed together begin at the checkpoint each time: a third attempt would be as slow."""
    told = Told()
    for member in ("w0", "w1"):
        told.tell(m.WorkerLost, member=member, cause="killed")
    told.fence()
    for _ in range(2):
        assert told.replay().stages == (0, 1)
        told.tell(m.TimerFired, timer="fill", incarnation=told.run.incarnation)
        told.fence()
    assert told.run.seeking
    told.tell(m.CheckpointsFound, incarnation=told.run.incarnation, stored=(m.Stored("c6", 6),))
    told.answer(m.Reconciled, told.run.joining, digests=("d",))
    told.commit(6, 7)
    assert told.run.state == State.RUNNING
    recovery = told.run.recoveries[-1]
    assert recovery.reason.startswith("the replay of stages 0, 1 was too slow: everybody goes back to step 6")
    assert recovery.guarantee == Guarantee.EXACT


def test_disturbances_do_not_make_a_replay_slow() -> None:
    """Two with helpers broke off, which were not slow; the one that goes on alone may be slow once, too."""
    told = Told(replay_workers=2)
    told.tell(m.WorkerLost, member="w1", cause="killed")
    told.fence()
    for members in (2, 2):
        assert [len(team) for team in told.replay().teams] == [members]
        told.tell(m.Suspected, incarnation=told.run.incarnation, reason="a collective failed", noticed_by="w3")
        told.fence()
    for seeking in (False, True):
        assert [len(team) for team in told.replay().teams] == [1]
        told.tell(m.TimerFired, timer="fill", incarnation=told.run.incarnation)
        told.fence()
        assert told.run.seeking is seeking


def test_a_replay_is_not_slow_when_it_is_done_and_others_hang() -> None:
    told = Told()
    told.tell(m.WorkerLost, member="w1", cause="killed")
    told.fence()
    for _ in range(3):
        told.answer(m.Filled, [member for team in told.replay().teams for member in team], digests=("d",), stage=1)
        told.tell(m.TimerFired, timer="fill", incarnation=told.run.incarnation)
        told.fence()
        assert not told.run.seeking


def test_where_nobody_may_go_back_a_slow_replay_is_tried_again() -> None:
    told = Told(strategy="replication")
    told.tell(m.WorkerLost, member="w1", cause="killed")
    told.fence()
    for _ in range(3):
        told.replay()
        told.tell(m.TimerFired, timer="fill", incarnation=told.run.incarnation)
        told.fence()
    assert told.run.state == State.REPLACE


def test_a_helper_that_is_lost_is_replaced_once() -> None:
    """Whoever it was, survivors help the next attempt as well; what a helper needs may be what brings it down, so no third."""
    told = Told(replay_workers=2)
    told.tell(m.WorkerLost, member="w1", cause="killed")
    told.fence()
    for members in (2, 2, 1):
        replay = told.replay()
        assert [len(team) for team in replay.teams] == [members]
        told.start()
        told.tell(m.Suspected, incarnation=told.run.incarnation, reason="a collective failed", noticed_by="w3")
        told.fence()
    told.replay()
    told.answer(m.Filled, told.run.joining, digests=("d",))
    told.commit(13, 14)
    told.tell(m.WorkerLost, member=told.run.world[1], cause="killed")
    told.start()
    told.fence()
    assert [len(team) for team in told.replay().teams] == [2], "another recovery"


@pytest.mark.parametrize(("helpers", "building"), [(0, False), (1, True)])
def test_nobody_who_builds_a_stage_is_given_up_for_it(helpers: int, building: bool) -> None:
    """Building is not interrupted by a fence: neither that of a newcomer that takes the lost stage's place, nor that of a
    survivor that helps to replay it, and that holds the only copy of its own stage."""
    told = Told(replay_workers=1 + helpers)
    assert seconds_of(told.tell(m.WorkerLost, member="w1", cause="killed")) == told.run.rules.fence_timeout, "all train"
    told.fence()
    assert told.run.state == State.REPLACE
    if building:
        replay = told.replay()
        assert [len(team) for team in replay.teams] == [2]
    again = told.tell(m.Suspected, incarnation=told.run.incarnation, reason="a collective failed", noticed_by="w3")
    assert seconds_of(again) == 3 * BUILD_S
    assert seconds_of(told.tell(m.SupervisorRestarted)) == 3 * BUILD_S
    told.fence()
    told.answer(m.Reconciled, told.run.joining, digests=("d",))
    told.answer(m.Filled, told.run.joining, digests=("d",))
    told.commit(13, 14)
    assert seconds_of(told.tell(m.WorkerLost, member="w0", cause="killed")) == told.run.rules.fence_timeout, "all train again"


def test_who_takes_another_stage_has_the_time_to_build_it() -> None:
    told = Told()
    told.tell(m.WorkerLost, member="w1", cause="killed")
    told.fence()
    assert told.run.state == State.REPLACE
    waits = c.SetTimer("replacement", 60.0, told.run.incarnation)
    seconds = seconds_of([command for command in told.joined if command != waits])
    assert seconds == told.run.rules.phase_timeout + 3 * BUILD_S


def test_a_checkpoint_of_before_everybody_went_back_says_nothing_of_the_log_since(lost: Told) -> None:
    """It was being stored when they went back, and is told late."""
    went_back(lost, 6, reason="a gap", diverged=False)
    assert lost.run.log.since == 6
    late = {"member": "w0", "incarnation": 1, "step": 12, "name": "c12", **ABOUT}
    assert lost.tell(m.CheckpointCommitted, **late) == []
    assert lost.run.log.since == 6
    assert lost.run.stored[0].name == "c6", "what is replayed begins with what everybody went on from"


def test_a_log_that_broke_off_is_whole_from_where_its_worker_says() -> None:
    """How far others are by then, and when it heard of the checkpoint that revived its log, nobody else knows."""
    told = Told()
    for member in ("w0", "w2"):
        told.tell(m.LogFailed, member=member, incarnation=1, step=13, reason="disk full")
    steps = ((m.CheckpointCommitted, "w0", 40, None), (m.LogWhole, "w0", 44, None), (m.CheckpointCommitted, "w0", 43, None))
    steps += ((m.LogWhole, "w2", 47, 47), (m.CheckpointCommitted, "w0", 46, 47), (m.CheckpointCommitted, "w0", 50, 50))
    for event, member, step, since in steps:
        about = {"name": f"c{step}", **ABOUT} if event is m.CheckpointCommitted else {}
        told.tell(event, member=member, incarnation=1, step=step, **about)
        assert told.run.log.since == since


def test_what_was_rounded_is_not_compared_until_the_next_checkpoint() -> None:
    """A stage whose sums were added in another order sends other bits than one that is replayed alone, and from the same
    checkpoint, computes; nor are its neighbours' what they were. That is no divergence, but it is not exact. A checkpoint of
    the step that training then went on from was taken before the loss, and told late."""
    told = Told(replay_workers=2, exact_sums=False)
    told.tell(m.WorkerLost, member="w1", cause="killed")
    told.fence()
    replay = told.replay()
    assert ([len(team) for team in replay.teams], replay.exact) == ([2], False)
    told.run.rules = replace(told.run.rules, replay_workers=1)
    for checkpoint in (None, 13, 14):
        told.answer(m.Filled, told.run.joining, digests=("d",))
        told.commit(13, 14)
        if checkpoint:
            about = {"member": "w0", "incarnation": told.run.incarnation, "name": f"c{checkpoint}", **ABOUT}
            told.tell(m.CheckpointCommitted, step=checkpoint, **about)
        told.tell(m.WorkerLost, member=told.run.world[1], cause="killed")
        told.start()
        told.fence(14 if checkpoint else 13)
        exact = checkpoint == 14
        assert told.replay().exact == exact
        assert told.run.recoveries[-1].guarantee == (Guarantee.EXACT if exact else Guarantee.ROUNDING)
    assert len(told.run.recoveries) == 4


def test_who_lost_its_seat_is_no_survivor_until_it_has_joined_again() -> None:
    """Two replicas of two stages become one; when they grow again, the recovery is interrupted before the fourth has joined."""
    run = RunState(Rules(min_workers=2, max_workers=4, max_steps=1000, stages=2, spares=0, wait_for_replacement=False))
    told = Told.__new__(Told)
    told.run, told.at = run, 0.0

    def commit(first: int, stop: int) -> None:
        for rank, member in enumerate(run.world):
            about = {
                "rank": rank // 2,
                "world_size": len(run.world) // 2,
                "epoch": 0,
                "start": 0,
                "ids_digest": "",
                "loss": 0.0,
            }
            where = {"member": member, "incarnation": run.incarnation, "first_step": first, "stop_step": stop}
            told.tell(m.StepsCommitted, longest_s=0.1, **about, **where)

    def fence(steps: dict[str, tuple[int, int]]) -> None:
        """(step, stage) of each; whoever else is asked holds nothing."""
        for member in run.roster.taking_part():
            step, stage = steps.get(member, (0, 0))
            marks = Marks(member, step, (step,), (None,), stage) if member in steps else None
            told.tell(m.Fenced, member=member, incarnation=run.incarnation, marks=marks)

    told.tell(m.RunStarted, run_id="r")
    told.tell(m.CapacityChanged, slots=4)
    for number in range(4):
        told.tell(m.WorkerStarted, member=f"w{number}", node=f"n{number}", pid=1)
    told.answer(m.Reconciled, run.joining, digests=("d",))
    commit(0, 10)
    told.tell(m.CapacityChanged, slots=3)
    told.tell(m.WorkerLost, member="w1", cause="killed")
    fence({"w0": (10, 0), "w2": (10, 0), "w3": (10, 1)})
    told.answer(m.Reconciled, run.joining, digests=("d",))
    assert len(run.world) == 2
    (left,) = {"w0", "w2"} - set(run.world)
    assert run.members[left] == MemberState.SPARE
    commit(10, 50)

    told.tell(m.CapacityChanged, slots=4)
    told.tell(m.WorkerStarted, member=next(name for name, state in run.members.items() if state == MemberState.STARTING), **AT)
    told.answer(m.Stopped, run.world, step=50)
    fence({member: (50, stage) for stage, member in enumerate(run.world)})
    assert (run.state, len(run.joining)) == (State.REPLACE, 4)
    assert left in run.joining
    told.tell(m.Suspected, incarnation=run.incarnation, reason="a collective failed", noticed_by="w3")
    fence({left: (10, 0)} | {member: (50, stage) for stage, member in enumerate(run.world)})
    assert run.failure is None
    assert left not in run.survivors, "what it holds is 40 steps old"
    told.answer(m.Reconciled, run.joining, digests=("d",))
    assert not run.void


@pytest.fixture
def as_they_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is seated by nodes. Replacements make such worlds: they take the seats that are free, wherever they are."""
    monkeypatch.setattr(replacing, "by_node", lambda members, nodes: list(members))


class Mixed(Told):
    """Two replicas of four stages: those of stage 0 are on one node, all others on nodes of their own."""

    def __init__(self, nodes: str, spares: str = "yz", **rules: Any) -> None:
        how = {"stages": 4, "logging": True, "checkpoints": True, "spares": len(spares), **rules}
        self.run = RunState(Rules(min_workers=8, max_workers=8, max_steps=100, **how))
        self.at = 0.0
        self.tell(m.RunStarted, run_id="r")
        self.tell(m.CapacityChanged, slots=12)
        for number, node in enumerate(nodes + spares):
            self.tell(m.WorkerStarted, member=f"w{number}", node=node, pid=1)
        self.answer(m.Reconciled, self.run.joining, digests=("d",))
        self.commit(0, 13)
        self.tell(m.CheckpointCommitted, member="w0", incarnation=1, step=6, name="c6", **ABOUT)

    def lose(self, *members: str, step: int = 13, agreed: tuple[int, tuple[float, ...]] | None = None) -> None:
        for member in members:
            self.tell(m.WorkerLost, member=member, cause="killed")
        for member in [member for member, state in self.run.members.items() if state == MemberState.ACTIVE]:
            marks = Marks(member, step, (step,), (None,), self.run.world.index(member) % 4, agreed)
            self.tell(m.Fenced, member=member, incarnation=self.run.incarnation, marks=marks)


@pytest.mark.usefixtures("as_they_came")
def test_replication_and_logging_in_one_job() -> None:
    told = Mixed("abcdaefg")
    assert told.run.log.boundaries == {0}, "the others are filled from replicas"
    told.lose("w2")
    assert (told.run.replaying, told.run.seeking) == (frozenset(), False)
    told = Mixed("abcdaefg")
    told.lose("w0", "w4")
    assert told.replay().stages == (0,)


@pytest.mark.usefixtures("as_they_came")
@pytest.mark.parametrize(("checkpoint", "replayed"), [(False, {0, 1}), (True, {0})])
def test_what_a_sender_lost_that_was_filled_from_a_replica_is_not_read(checkpoint: bool, replayed: set[int]) -> None:
    """What it had not written yet is missing for good, until a checkpoint comes after it: its stage is replayed with the next
    one, which would wait for it."""
    told = Mixed("abcdabcd")
    told.lose("w1")
    told.answer(m.Reconciled, told.run.joining, digests=("d",))
    told.answer(m.Filled, told.run.joining, digests=("d",))
    told.commit(13, 20)
    assert (told.run.state, told.run.log.torn) == (State.RUNNING, {1: 13})
    if checkpoint:
        about = {"incarnation": told.run.incarnation, "step": 14, "name": "c14", **ABOUT}
        told.tell(m.CheckpointCommitted, member="w0", **about)
    told.lose("w0", "w4", step=20)
    assert told.run.replaying == replayed
    assert not told.run.seeking


@pytest.mark.usefixtures("as_they_came")
def test_who_could_not_log_and_is_lost_is_waited_for_no_longer() -> None:
    """It never says that its log is whole again: who takes its place logs from the first step on."""
    told = Mixed("abcdabcd")
    told.tell(m.LogFailed, member="w1", incarnation=1, step=13, reason="disk full")
    told.lose("w1")
    assert (told.run.log.since, told.run.log.torn) == (13, {1: 13})


@pytest.mark.usefixtures("as_they_came")
def test_what_crossed_a_boundary_before_it_was_logged_is_not_read() -> None:
    """Replicas that were apart come to one node while another stage is replayed, so the log does not begin anew."""
    told = Mixed("abcdaefg", spares="efe")
    told.lose("w0", "w4", "w2")
    assert (told.run.replaying, told.run.log.since) == ({0}, 6)
    assert told.run.log.boundaries == {0, 1, 2}, "stage 2 is on one node now"
    assert told.run.log.torn == {1: 13, 2: 13, 3: 13}, "until a checkpoint comes after it"


@pytest.mark.usefixtures("as_they_came")
@pytest.mark.parametrize(("also", "step", "replayed"), [("w1", 13, {0, 1}), ("w2", 13, {0}), ("w1", 6, {0})])
def test_what_a_sender_lost_that_went_at_the_same_time_is_not_read(also: str, step: int, replayed: set[int]) -> None:
    """What it had logged was in its memory, though another replica of its stage is left. Who sent nothing to the lost stage, or
    nothing since the checkpoint, is not missed."""
    told = Mixed("abcdefgh", spares="xyz", strategy="logging")
    told.lose("w0", "w4", also, step=step)
    assert told.run.replaying == replayed
    assert not told.run.seeking


@pytest.mark.usefixtures("as_they_came")
def test_a_sender_is_replayed_as_well_if_the_one_step_since_the_checkpoint_is_completed() -> None:
    """Nobody has committed it, but all agreed on it: who is replayed does it again."""
    told = Mixed("abcdefgh", spares="xyz", strategy="logging")
    told.lose("w0", "w4", "w1", step=6, agreed=(6, (0.5,)))
    assert told.run.replaying == {0, 1}
    assert told.replay().until == 7


@pytest.mark.usefixtures("as_they_came")
def test_a_stage_that_lacks_what_a_lost_sender_logged_goes_back_at_once() -> None:
    """If the log does not reach far enough to replay the sender as well: a replay would only find the gap, after a while."""
    told = Mixed("abcdaefg")
    told.lose("w0", "w4", "w1")
    assert told.run.seeking


@pytest.mark.usefixtures("as_they_came")
def test_stages_whose_log_was_not_needed_go_back_together_if_all_replicas_are_lost_at_once() -> None:
    told = Mixed("abcdaefg")
    told.lose("w2", "w6")
    assert told.replay().stages == (1, 2, 3), "from what stage 0 sent to them"
    told = Mixed("abcdefgh")
    assert told.run.log.boundaries == frozenset()
    told.lose("w2", "w6")
    assert told.run.seeking, "everybody goes back to the checkpoint"


@pytest.mark.parametrize(("unwritten", "replayed"), [(True, {1, 2}), (False, {2})])
def test_what_was_not_written_when_its_sender_left_is_not_read(unwritten: bool, replayed: set[int]) -> None:
    """It left on notice, and its disk was slow: nobody logs that again. Who stays writes it in the end."""
    told = Told()

    def fence(step: int) -> None:
        for member in told.run.roster.taking_part():
            about = (member, step, (step,), (None,), told.run.world.index(member))
            told.tell(m.Fenced, member=member, incarnation=told.run.incarnation, marks=Marks(*about, unwritten=unwritten))

    told.tell(m.Noticed, member="w1", deadline_s=120.0, source="request", reason="maintenance")
    told.answer(m.Stopped, told.run.world, step=13)
    fence(13)
    told.answer(m.Reconciled, told.run.joining, digests=("d",))
    told.answer(m.Filled, told.run.joining, digests=("d",))
    told.commit(13, 20)
    assert (told.run.world, told.run.recoveries[-1].left) == (("w0", "w3", "w2"), ["w1"])
    told.tell(m.WorkerLost, member="w2", cause="killed")
    fence(20)
    assert told.run.replaying == replayed
    assert not told.run.seeking


def test_who_could_not_log_and_leaves_is_waited_for_no_longer() -> None:
    """It hands its state over, and never says that its log is whole again."""
    told = Told()
    told.tell(m.LogFailed, member="w1", incarnation=1, step=12, reason="disk full")
    told.tell(m.Noticed, member="w1", deadline_s=120.0, source="request", reason="maintenance")
    told.answer(m.Stopped, told.run.world, step=13)
    for member in told.run.roster.taking_part():
        marks = Marks(member, 13, (13,), (None,), told.run.world.index(member))
        told.tell(m.Fenced, member=member, incarnation=told.run.incarnation, marks=marks)
    told.answer(m.Reconciled, told.run.joining, digests=("d",))
    told.answer(m.Filled, told.run.joining, digests=("d",))
    told.commit(13, 20)
    assert (told.run.world, told.run.log.since) == (("w0", "w3", "w2"), 13)


def test_a_spare_that_could_not_log_and_is_lost_is_waited_for_no_longer() -> None:
    told = Told()
    told.tell(m.LogFailed, member="w3", incarnation=1, step=12, reason="disk full")
    assert told.run.log.since is None
    told.tell(m.WorkerLost, member="w3", cause="killed")
    assert (told.run.state, told.run.log.since) == (State.RUNNING, 13)


@pytest.mark.parametrize(("node", "beside"), [("n0", 2), ("n2", 1)])
def test_helpers_know_how_many_share_their_node(node: str, beside: int) -> None:
    """They need memory at the same time."""
    told = Told(replay_workers=3)
    told.run.roster.nodes["w2"] = node
    told.tell(m.WorkerLost, member="w1", cause="killed")
    told.fence()
    replay = told.replay()
    assert replay.teams[0][1:] == ("w0", "w2")
    assert [replay.helpers_beside(member) for member in ("w0", "w2")] == [beside, beside]
