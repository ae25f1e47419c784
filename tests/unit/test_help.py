"""What a survivor that helps with a replay cannot do is not fatal: nobody needs its help. And what comes after a replay."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from raytrain_ft.errors import FencedError, LogGapError, ReplayDivergedError, StorageError, UnreachableError
from raytrain_ft.places import Place
from raytrain_ft.policy import commands as c
from raytrain_ft.policy import messages as m
from raytrain_ft.policy.reconcile import Marks
from raytrain_ft.runtime import recovery, trainee
from raytrain_ft.runtime.calls import Calls
from raytrain_ft.runtime.connections import Connections
from raytrain_ft.runtime.contacts import Contacts
from raytrain_ft.runtime.loop import Loop
from raytrain_ft.runtime.trainee import Trainee
from raytrain_ft.training import aside
from raytrain_ft.training.edges import Past
from raytrain_ft.training.fence import Fence, PeerLostError
from raytrain_ft.training.replay import _no_checkpoints
from raytrain_ft.training.sleep import Sleep

LOAD = "step-000000006-e1-i1"
WANTED = c.Replay(("w0", "w3"), 3, (("w3", "w0"),), (1,), LOAD, until=13, since=1, exact=True)
HELP: Any = (Fence(3), WANTED)


@contextmanager
def links(*_: Any, **__: Any) -> Any:
    yield SimpleNamespace(team=None)


def helper(monkeypatch: pytest.MonkeyPatch, **fails: Exception) -> Trainee:
    """Helps w3 with stage 1; what is named in `fails` raises. `done` lists what it did, in order."""
    done: list[str] = []

    def method(name: str, result: Any = None) -> Any:
        def call(*_: Any, **__: Any) -> Any:
            done.append(name)
            if name in fails:
                raise fails[name]
            return result

        return call

    found: Any = object.__new__(Trainee)
    found._member, found._world = "w0", ("w0", "w3")
    found._spec = SimpleNamespace(rules=SimpleNamespace(stages=2, exact_sums=True), step=SimpleNamespace(micro_batches=2))
    found._heartbeat = SimpleNamespace(at=lambda *_: None)
    found._connections = SimpleNamespace(replay=links)
    found.log = SimpleNamespace(flush=method("flush", result=True), stats=SimpleNamespace(failed=""))
    found.done = done
    found.replica = SimpleNamespace(state=SimpleNamespace(digests=lambda: ("its own",), buckets=[], filled=True), stage=0)
    beside = SimpleNamespace(loader=SimpleNamespace(stop=lambda _: None))
    monkeypatch.setattr(found, "_build_replica", method("build", beside))
    monkeypatch.setattr(recovery, "load", method("load"))
    monkeypatch.setattr(trainee.replay, "replay", method("replay"))
    return found


def told(error: Exception) -> m.Event:
    """What the supervisor hears of an error in a replay."""
    events: list[m.Event] = []
    health: Any = SimpleNamespace(step=13, is_starting=lambda _: False, nodes=None)
    spec: Any = SimpleNamespace()
    calls = Calls(spec, events.append, Contacts(spec), health)
    calls.report("w0", RayTaskError("replay", "Traceback ...", error), 3, "step-000000006-e1-i1")
    return events[0]


def test_who_can_help_says_what_it_holds_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert helper(monkeypatch).help(*HELP) == ("its own",)


def test_what_a_helper_logged_for_the_lost_stage_outlives_the_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    """It alone has what it sent to its own stage: were it lost next, unwritten, nobody could replay that stage."""
    own: Any = helper(monkeypatch)
    own.help(*HELP)
    assert own.done == ["build", "load", "replay", "flush"]


def test_who_has_not_written_in_time_what_it_logged_has_not_helped(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried again with less help, rather than told to be done: with the helper, the rest would be gone."""
    monkeypatch.setattr(trainee, "FLUSH_S", 0.0)
    own: Any = helper(monkeypatch)
    own.log.flush = lambda _: False
    with pytest.raises(PeerLostError, match="w0 could not write what it logged for stage 1 within 0 s"):
        own.help(*HELP)
    own.log.stats.failed = "disk full"
    assert own.help(*HELP) == ("its own",), "nobody relies on this log any more"


def test_who_leads_is_not_done_before_its_helpers_have_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were one lost in between, its own stage alone would be replayed, and would miss what it had computed of another."""
    own: Any = helper(monkeypatch)

    @contextmanager
    def shared(*_: Any) -> Any:
        yield SimpleNamespace(team=SimpleNamespace(total=lambda _: own.done.append("all are done")))

    own._connections = SimpleNamespace(replay=shared)
    own.help(*HELP)
    assert own.done == ["build", "load", "replay", "flush", "all are done"]
    state = SimpleNamespace(step=13, filled=False, digests=lambda: ("d",))
    leader: Any = object.__new__(Trainee)
    leader.__dict__ |= own.__dict__ | {"_member": "w3", "_world": ("w0", "w3"), "_replayed": "", "_team": ()}
    leader._spec.rules.joined = ()
    leader.replica, leader._begin_from = SimpleNamespace(state=state, stage=1), lambda *_: None
    filled: list[bool] = []
    waits = SimpleNamespace(team=SimpleNamespace(total=lambda _: filled.append(state.filled)))
    leader._connections = SimpleNamespace(replay=lambda *_: nullcontext(waits))
    assert leader.replay(*HELP) == ("d",)
    assert (filled, state.filled) == ([False], True)


def test_checkpoints_count_in_the_quota_of_the_log_in_a_replay_too(tmp_path: Path) -> None:
    """Which takes none."""
    found: Any = object.__new__(Trainee)
    found._spec = SimpleNamespace(checkpoints=SimpleNamespace(place=Place(str(tmp_path / "checkpoints"))), directory=tmp_path)
    found._now_hosts(SimpleNamespace(checkpointer=SimpleNamespace(disk_bytes=800)))
    with _no_checkpoints(found.replica):
        assert found.replica.checkpointer is None
        assert found._checkpoint_bytes() == 800


def test_who_does_not_get_its_own_back_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were it believed, a stage of zeros would train on."""
    own = helper(monkeypatch)

    @contextmanager
    def lost(*_: Any) -> Any:
        yield
        raise aside.LostAsideError("the disk is gone")

    monkeypatch.setattr(aside, "room_for_another", lost)
    with pytest.raises(PeerLostError, match="w0 has lost stage 0: the disk is gone"):
        own.help(*HELP)
    assert own.replica.state.filled is False


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("build", MemoryError("no room for a second stage")),
        ("load", StorageError("the storage does not answer")),
        ("replay", RuntimeError("CUDA out of memory")),
    ],
)
def test_who_cannot_help_ends_no_run_and_rejects_no_checkpoint(
    monkeypatch: pytest.MonkeyPatch, where: str, error: Exception
) -> None:
    with pytest.raises(PeerLostError) as raised:
        helper(monkeypatch, **{where: error}).help(*HELP)
    event = told(raised.value)
    assert isinstance(event, m.Suspected)
    assert event.reason == f"w0 cannot help to replay stage 1: {type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("world", "began"),
    [(("w0", "w4", "w3"), ["c", "c"]), (("w0", "w1", "w3"), ["c"])],
    ids=["the helper is lost", "only somebody else is"],
)
def test_a_replay_that_was_shared_goes_on_unless_a_helper_is_lost(
    monkeypatch: pytest.MonkeyPatch, world: tuple[str, ...], began: list[str]
) -> None:
    """With it is lost what it had logged of this replay: who is lost next could not be replayed."""
    state = SimpleNamespace(step=9, filled=False, digests=lambda: ("d",))
    found: Any = object.__new__(Trainee)
    found._member, found._replayed, found._team = "w3", "", ()
    found._spec = SimpleNamespace(rules=SimpleNamespace(stages=3, joined=()), step=SimpleNamespace(micro_batches=2))
    found._connections = SimpleNamespace(replay=links)
    found._heartbeat = SimpleNamespace(at=lambda *_: None)
    found.replica = SimpleNamespace(state=state, stage=2)
    loaded: list[str] = []
    found._begin_from = lambda load, fence: loaded.append(load)

    def replay_in(world: tuple[str, ...], team: tuple[str, ...]) -> None:
        found._world = world
        found.replay(Fence(3), c.Replay(world, 3, (team,), (2,), "c", until=13, since=1, exact=True))

    def lost(*_: Any) -> None:
        raise PeerLostError("w1 is lost")

    monkeypatch.setattr(trainee.replay, "replay", lost)
    with pytest.raises(PeerLostError):
        replay_in(("w0", "w1", "w3"), ("w3", "w1"))
    monkeypatch.setattr(trainee.replay, "replay", lambda *_: None)
    replay_in(world, ("w3",))
    assert loaded == began


@pytest.mark.parametrize("written", [True, False])
def test_who_is_fenced_says_whether_others_can_read_what_it_has_logged(monkeypatch: pytest.MonkeyPatch, written: bool) -> None:
    """If it leaves, nobody writes the rest."""
    found: Any = object.__new__(Trainee)
    found._member, found._loop, found._connections, found._group = "w0", None, None, None
    found._probe_recovery = lambda _: None
    found._heartbeat = SimpleNamespace(idle=lambda _: None)
    found._spec = SimpleNamespace(rules=SimpleNamespace(fence_timeout=10.0))
    found.log = SimpleNamespace(flush=lambda _: written, stats=SimpleNamespace(payload_bytes=0))
    found.replica = SimpleNamespace(checkpointer=None, loader=SimpleNamespace(stop=lambda _: None), abandon=lambda: None)
    held: list[Marks | None] = [Marks("w0", 13, (13,), (None,)), None]
    monkeypatch.setattr(trainee.process_group, "abandon", lambda _: None)
    monkeypatch.setattr(recovery, "marks", lambda *_: held.pop(0))
    assert found.park(2, 1).unwritten is not written
    assert found.park(3, 2) is None, "it holds nothing"


def test_no_replay_goes_on_from_a_state_that_was_handed_over_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hand-over that is broken off leaves another state than the one at which an earlier replay was interrupted."""
    found: Any = object.__new__(Trainee)
    found._group, found._replayed, found.replica = object(), "c", SimpleNamespace(state=None, attempt=None)

    def broken(*_: Any) -> None:
        raise PeerLostError("its hashes differ")

    monkeypatch.setattr(trainee.recovery, "unpack", broken)
    with pytest.raises(PeerLostError):
        found.fill(Fence(3), c.Fill(("w0", "w3"), 3, ("w0", "w3"), (), ()), None, object())
    assert found._replayed == ""


@pytest.mark.parametrize("error", [LogGapError("a gap"), ReplayDivergedError("another"), FencedError("it is over")])
def test_what_a_helper_finds_out_about_the_log_counts(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    with pytest.raises(type(error)):
        helper(monkeypatch, replay=error).help(*HELP)


@pytest.mark.parametrize(
    ("number", "exact", "rounded", "compares"),
    [(0, True, 0, True), (1, True, 0, False), (0, False, 0, False), (0, True, 14, False), (0, True, 13, True)],
)
def test_who_has_replayed_its_stage_compares_its_next_step_as_well(
    tmp_path: Path, number: int, exact: bool, rounded: int, compares: bool
) -> None:
    """Not who has only helped with it; nor who has added sums in another order, or receives what others have added so since."""
    found: Any = object.__new__(Connections)
    found._spec, found._links, found.past = SimpleNamespace(logs=tmp_path), [], None
    pasts: list[Past | None] = []
    found._switchboard = lambda stage: SimpleNamespace(replay=lambda past, stages, team: None)
    found._board = SimpleNamespace(live=pasts.append)
    with found.replay(replace(WANTED, exact=exact), 1, 1, number):
        pass
    found.live(rounded)
    assert [past is not None and past.until for past in pasts] == [13 if compares else False]


def test_who_has_helped_still_compares_what_it_had_replayed_itself(tmp_path: Path) -> None:
    found: Any = object.__new__(Connections)
    found._spec, found._links, found.past = SimpleNamespace(logs=tmp_path), [], None
    found._switchboard = lambda stage: SimpleNamespace(replay=lambda past, stages, team: None)
    for number in (0, 1):
        with found.replay(replace(WANTED, until=13 + number), 1, 1, number):
            pass
    assert found.past.until == 13


def trains(train_step: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Does this as its first step. `ended` has how that ended: in which way, in which words, as which kind of failure."""
    found: Any = object.__new__(Trainee)
    found.ended = []
    state = SimpleNamespace(filled=True, step=13, tail=SimpleNamespace(sleep=Sleep()), buckets=())
    found.replica = SimpleNamespace(state=state, checkpointer=None, train_step=train_step)
    found.rank, found._asleep, found._loaded = 1, False, True
    found._spec = SimpleNamespace(rules=SimpleNamespace(stages=2, max_steps=20, selective=None))
    parting = SimpleNamespace(members=(0,), part=lambda *_, **__: False, connect=lambda links: links)
    found._connections = SimpleNamespace(live=lambda rounded: None, parting=lambda: parting)
    found._heartbeat = SimpleNamespace(ended=lambda status, detail, kind="": found.ended.append((status, detail, kind)))
    monkeypatch.setattr(Loop, "_share_out", lambda _: None)
    return found


def test_who_computes_something_else_in_its_first_step_has_not_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no error of the task: everybody goes back."""

    def train_step(_: Any) -> None:
        raise ReplayDivergedError("another than before")

    found = trains(train_step, monkeypatch)
    found.run(Fence(3), c.Run(("w0", "w3"), 3))
    assert found.ended == [("diverged", "another than before", "")]
    assert not found.replica.state.filled, "nobody goes on from what it has"


@pytest.mark.parametrize("fenced", [False, True])
def test_a_data_set_that_cannot_be_read_is_no_error_of_the_task(fenced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """That would come again. Its storage may be there when the run is begun once more, or when the recovery is over."""
    fence, words = Fence(3), "/data/1.png could not be read at two attempts"

    def train_step(_: Any) -> None:
        if fenced:
            fence.trip()
        raise UnreachableError(words)

    found = trains(train_step, monkeypatch)
    found.run(fence, c.Run(("w0", "w3"), 3))
    assert found.ended == ([] if fenced else [("failed", words, "storage")])


def builder(built: Any) -> Trainee:
    """Hosts stage 0, and builds what this gives."""
    found: Any = object.__new__(Trainee)
    found._member, found._used, found._replayed = "w0", True, ""
    sleep = SimpleNamespace(wanted=False, at_once=False)
    found.closing, found.may_close = threading.Event(), threading.Event()
    checkpointer = SimpleNamespace(close=lambda: (found.closing.set(), found.may_close.wait(60.0)))
    found.replica = SimpleNamespace(
        stage=0, checkpointer=checkpointer, state=SimpleNamespace(tail=SimpleNamespace(sleep=sleep))
    )
    found._build_replica = built
    return found


def test_a_data_set_that_cannot_be_read_while_another_stage_is_built_is_no_damaged_checkpoint() -> None:
    """It is tried again, by the budget for recoveries; the checkpoint that would have been loaded then was never looked at."""

    def fail(stage: int) -> Any:
        raise StorageError("/data/train.arrow is damaged or cannot be read")

    one = builder(fail)
    before = one.replica
    with pytest.raises(PeerLostError, match=r"w0 cannot build stage 1 now: /data/train.arrow"):
        one._take_stage(1)
    assert one.replica is before
    assert not one.closing.is_set(), "it still writes the checkpoints of the replica that stays"


def test_who_builds_another_stage_does_not_wait_for_the_checkpoint_of_the_one_before() -> None:
    """Storage may hang, for a minute and more, and a fence would not end that wait."""
    asked = SimpleNamespace(ask=lambda *about: None)
    one = builder(
        lambda stage: SimpleNamespace(stage=stage, checkpointer=None, state=SimpleNamespace(tail=SimpleNamespace(sleep=asked)))
    )
    one._take_stage(1)
    assert one.replica.stage == 1
    assert one.closing.wait(60.0)
    one.may_close.set()
