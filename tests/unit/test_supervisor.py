"""Parts of the supervisor, without a cluster."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from disks import small_file_system

from benchmarks.control_plane import WithoutRay, spec_of
from raytrain_ft.errors import ConfigError, LockedError, NoCheckpointError, StorageError
from raytrain_ft.follow import recorded
from raytrain_ft.places import Place
from raytrain_ft.policy import messages as m
from raytrain_ft.policy.lineage import Return
from raytrain_ft.policy.reconcile import Plan
from raytrain_ft.policy.roster import MemberState, Rules
from raytrain_ft.policy.run_state import RunState
from raytrain_ft.policy.sampling import Sampling
from raytrain_ft.policy.states import ENDED, State
from raytrain_ft.progress import Display
from raytrain_ft.runtime import event_log, library, notes, software, supervisor
from raytrain_ft.runtime.contacts import Contacts
from raytrain_ft.runtime.event_log import EventLog
from raytrain_ft.runtime.library import Library
from raytrain_ft.runtime.right import Right
from raytrain_ft.runtime.spec import RunSpec
from raytrain_ft.runtime.supervisor import Supervisor
from raytrain_ft.storage import durable, lock
from raytrain_ft.storage.filesystem import LocalStorage


def bare(**parts: Any) -> Any:
    """A supervisor that has these parts and does nothing by itself."""
    made = Supervisor.__new__(Supervisor)
    for name, part in parts.items():
        setattr(made, f"_{name}", part)
    return made


def test_what_it_is_told_happened_now() -> None:
    """Across its own restarts: `start` is that of the run."""
    one = bare(start=time.monotonic() - 1000.0, events=asyncio.Queue())
    one.tell(m.AbortRequested(reason="enough"))
    told = one._events.get_nowait()
    assert (told.reason, 1000.0 <= told.at < 1010.0) == ("enough", True)


def end(machine: RunState, at: float) -> None:
    machine.recoveries[-1].attempts = 1
    machine.history.close(at)


def test_a_recovery_that_is_over_is_made_plain_data_once(monkeypatch: Any) -> None:
    machine = RunState(Rules(min_workers=1, max_workers=2, max_steps=10))
    spec: Any = SimpleNamespace()
    one = notes.Notes(spec, log=spec, machine=machine, now=lambda: 0.0, written=Counter())
    made: list[Any] = []
    asdict = notes.asdict
    monkeypatch.setattr(notes, "asdict", lambda recovery: (made.append(recovery), asdict(recovery))[1])
    for number in range(100):
        recovery = machine.history.begin(number, f"loss {number}", "ray", 2)
        assert one.recoveries()[-1]["resumed"] is None
        recovery.lost.append(f"w{number}")
        end(machine, number + 0.5)
        assert one.recoveries() == one.recoveries() == [asdict(known) for known in machine.recoveries]
    assert len(made) == 200, "once while it goes on, and once when it is over"
    assert [known["lost"] for known in one.recoveries(98)] == [["w98"], ["w99"]]
    assert one.recoveries(101) == [], "who asks knows more, as of a supervisor that could not write its log"
    made.clear()
    machine.history.explain("w7", "killed, perhaps for memory")
    one.explained("w7")
    assert one.recoveries()[7]["cause"].endswith("; w7: killed, perhaps for memory"), "it was known late"
    assert one.recoveries() == [asdict(known) for known in machine.recoveries]
    assert made == [machine.recoveries[7]], "the others are as they were"
    machine.history.begin(100, "loss 100", "ray", 2).lost.append("w100")
    machine.history.explain("w100", "killed, perhaps for memory")
    one.explained("w100")
    assert one.recoveries()[-1]["cause"].endswith("; w100: killed, perhaps for memory"), "it is not over yet"


@pytest.mark.parametrize("ends", [False, True])
def test_a_request_is_answered_once_it_is_in_the_log(ends: bool) -> None:
    """A supervisor that is lost before that knows nothing of it, and nobody would ask again. Or the run is over first."""

    async def play() -> None:
        events: asyncio.Queue[m.Event] = asyncio.Queue()
        life: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        one = bare(start=0.0, events=events, life=life, machine=SimpleNamespace(state=State.RUNNING))
        asked = asyncio.ensure_future(one.abort("enough"))
        while events.empty():
            await asyncio.sleep(0)
        assert not (await asyncio.wait([asked], timeout=0.05))[0]
        if ends:
            life.set_result(None)
        else:
            events.get_nowait()
            events.task_done()
        await asyncio.wait_for(asked, 5.0)

    asyncio.run(play())


@pytest.mark.parametrize("state", sorted(ENDED))
def test_who_ends_a_run_that_has_ended_is_answered_at_once(state: State) -> None:
    """And not when it is drawn: whoever is not answered for long kills it."""

    async def play() -> None:
        life: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        one = bare(start=0.0, events=asyncio.Queue(), life=life, machine=SimpleNamespace(state=state))
        await asyncio.wait_for(one.abort("enough"), 5.0)

    asyncio.run(play())


def test_the_last_replica_that_is_awake_is_not_put_to_sleep() -> None:
    """Then all would take part again, which is not what was asked for. A request counts at once, before the worker tells."""
    asked: list[tuple[Any, ...]] = []
    machine = SimpleNamespace(world=("w0", "w1", "w2"), members={"w0", "w1", "w2", "w3"})
    spec = SimpleNamespace(rules=SimpleNamespace(stages=1))

    async def told_at_once() -> None:
        """Nobody is slow to answer."""

    def tell(*told: Any) -> list[asyncio.Task[None]]:
        asked.append(told)
        return [asyncio.get_running_loop().create_task(told_at_once())]

    one = bare(machine=machine, spec=spec, crew=SimpleNamespace(sleep=tell), asleep=set())

    def sleep(rank: int, asleep: bool) -> None:
        asyncio.run(one.sleep(rank, asleep, False))

    sleep(0, True)
    one._note_sleep(m.Dormant(at=1.0, member="w2", incarnation=1, step=3, asleep=True))  # as the log of an earlier life says
    with pytest.raises(ConfigError, match="rank 1 of 3 workers is the last that is awake: resume another one first"):
        sleep(1, True)
    sleep(2, True)  # it sleeps already
    sleep(0, False)
    sleep(1, True)
    assert [told[:2] for told in asked] == [(("w0",), True), (("w2",), True), (("w0",), False), (("w1",), True)]
    one._note_sleep(m.Dormant(at=2.0, member="w2", incarnation=1, step=4, asleep=False))
    machine.world = ("w2", "w3")  # w0 and w1 are gone, and what they were asked for
    sleep(0, True)
    with pytest.raises(ConfigError, match="rank 1 of 2 workers is the last"):
        sleep(1, True)
    machine.members.remove("w2")  # it is lost, and a recovery is under way
    with pytest.raises(ConfigError, match="rank 0 was lost, and another worker takes its place: ask again"):
        sleep(0, False)


def test_what_a_run_tells_of_its_checkpoints_has_no_credentials(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In its account, at its end, and in the first line of its log."""
    place = Place("s3://key:sesame@bucket/runs/digits/checkpoints?region=x&token=sesame")
    spec = dict.fromkeys(RunSpec.__slots__)  # pyright: ignore
    spec |= {"name": "digits", "checkpoints": SimpleNamespace(place=place), "directory": Path("/runs/digits")}
    spec["rules"], spec["sampling"] = Rules(min_workers=1, max_workers=2, max_steps=30), Sampling(8, 4, 0)
    about: Any = RunSpec(**spec | {"step": SimpleNamespace(update="barrier", returns_lost=False)})  # pyright: ignore
    machine = RunState(about.rules)
    machine.state, machine.stored = State.ABORTED, (m.Stored("step-000000020-e1-i1", 20),)
    parts = {
        "machine": machine,
        "spec": about,
        "health": SimpleNamespace(tidings=SimpleNamespace(loss=0.5)),
        "followed_at": 0.0,
        "ended_at": 1.0,
    }
    one = bare(**parts, notes=SimpleNamespace(recoveries=lambda known: []))
    monkeypatch.setattr(supervisor.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node"))
    account = one.account()
    assert account["checkpoint"] == "s3://bucket/runs/digits/checkpoints/step-000000020-e1-i1?region=x"
    Display("digits", 30).show_end(account)
    told = capsys.readouterr().out
    assert "goes on from s3://bucket/runs/digits/checkpoints/step-000000020-e1-i1?region=x" in told
    details = notes.details_of(about)
    assert details["checkpoints"] == "s3://bucket/runs/digits/checkpoints?region=x"
    assert details["software"] == software.versions()
    assert "sesame" not in f"{told} {account} {details} {about}"
    assert account["loss"] == 0.5
    machine.load, about_no_step = m.Stored("step-000000020-e1-i1", 20, loss=0.25), SimpleNamespace(loss=None)
    assert one.account()["loss"] == 0.5
    one._health.tidings = about_no_step
    assert one.account()["loss"] == 0.25, "the checkpoint's, of a run that was at its end when it began"


def test_nothing_is_asked_for_while_a_place_is_looked_for() -> None:
    """A last resort, or the place of who is gone: what waits for room would take it first."""
    machine = RunState(Rules(min_workers=1, max_workers=2, max_steps=30))
    machine.roster.resized(0)
    contacts = Contacts(SimpleNamespace())  # pyright: ignore[reportArgumentType]
    one = bare(machine=machine, contacts=contacts)
    assert one._missing() == 3
    contacts.place("w0", None)
    assert one._missing() == 0
    contacts.place("w0", "n0")
    assert one._missing() == 3


class Away:
    """A library whose storage is away."""

    epoch = 0
    closed = False

    async def open(self) -> None:
        raise StorageError("it is away")

    async def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("state", sorted(ENDED))
def test_a_run_that_has_ended_needs_no_storage(state: State) -> None:
    one = bare(machine=SimpleNamespace(state=state), library=Away(), restarted=True, spec=SimpleNamespace(lease=0.0))
    assert asyncio.run(one._open_library()) == ()


async def is_kept() -> bool:
    return True


def without_workers(one: Any, ended: list[str]) -> None:
    """Has it end those whom it would find, and nobody else."""

    async def end() -> None:
        ended.append("all")

    one._end_workers = end


@pytest.mark.parametrize("was_over", [True, False])
def test_a_run_fails_once(was_over: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[str] = []
    log: Any = SimpleNamespace(note=lambda name, **fields: noted.append(name))
    machine: Any = SimpleNamespace(state=State.RUNNING)
    spec: Any = SimpleNamespace(lease=0.0, logs=tmp_path / "logs")
    spec.logs.mkdir()
    monkeypatch.setattr(supervisor.sealed, "remove", lambda of: noted.append("task"))
    written = Counter({"RunFinished": 1} if was_over else {})
    about = {"machine": machine, "spec": spec, "notes": notes.Notes(spec, log, machine, lambda: 0.0, written), "start": 0.0}
    away, right = Away(), SimpleNamespace(release=lambda: noted.append("right"), is_kept=is_kept)
    one = bare(**about, library=away, restarted=True, right=right, events=asyncio.Queue())
    one.account = dict
    without_workers(one, noted)
    assert asyncio.run(one._live()) == {"failure": ("StorageError", "it is away")}
    assert away.closed, "the next one would wait for the right to write"
    assert noted == [*([] if was_over else ["RunFailed"]), "all", "task", "right"], "workers first: they would log on"
    assert not spec.logs.exists()


@pytest.mark.parametrize(("state", "first"), [(State.RUNNING, ["all"]), (State.FINISHED, [])])
def test_who_could_still_log_is_ended_before_the_logs_are_removed(
    state: State, first: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an error of the supervisor's own, such as a disk that stays full. Workers of a run that came to its end have ended."""
    ended: list[str] = []
    spec: Any = SimpleNamespace(logs=tmp_path / "logs")
    spec.logs.mkdir()
    monkeypatch.setattr(supervisor.sealed, "remove", lambda of: ended.append("task"))
    one = bare(machine=SimpleNamespace(state=state), spec=spec, right=SimpleNamespace(is_kept=is_kept))
    without_workers(one, ended)
    asyncio.run(one._remove_what_recovers())
    assert ended == [*first, "task"]
    assert not spec.logs.exists()


def test_a_place_where_no_checkpoint_can_be_written_ends_a_run_before_any_worker_starts() -> None:
    """It has no crew yet. Whoever called `fit` gets this error."""
    checkpoints = SimpleNamespace(place=Place("/proc/nowhere/run/checkpoints"), resume="auto")  # where not even root can write
    spec: Any = SimpleNamespace(checkpoints=checkpoints, rules=SimpleNamespace(strategy="auto"), run_id="r", lease=60.0)
    machine, right = SimpleNamespace(state=State.INITIALIZING), SimpleNamespace(release=lambda: None)
    one = bare(machine=machine, spec=spec, library=Library(spec), restarted=False, right=right)
    one.account = dict
    kind, message = asyncio.run(one._live())["failure"]
    assert kind == "StorageError"
    assert message.startswith("/proc/nowhere/run/checkpoints/writer-1.claim could not be written: ")
    assert not hasattr(one, "_crew")


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC])
def test_what_is_said_of_a_disk_holds_at_the_start_of_a_run_too(number: int) -> None:
    """Then it goes on no more than it has begun."""
    told = durable.advice(OSError(number, ""))
    assert "earlier checkpoints are untouched" in told
    assert "training goes on" not in told


def test_a_supervisor_ends_also_if_it_cannot_end_its_workers(monkeypatch: Any) -> None:
    killed: list[str] = []

    def refuse(prefix: str) -> None:
        raise RuntimeError(f"Ray does not answer about {prefix}")

    async def leave() -> None:
        spec = SimpleNamespace(driver_timeout=0.0, member_name=lambda name: f"run:{name}")
        one = bare(life=asyncio.create_task(asyncio.sleep(0)), followed_at=0.0, spec=spec)
        with pytest.raises(RuntimeError, match="does not answer about run:"):
            await one._leave()

    monkeypatch.setattr(supervisor, "kill_named", refuse)
    monkeypatch.setattr(supervisor.ray, "kill", killed.append)
    monkeypatch.setattr(supervisor.ray, "get_runtime_context", lambda: SimpleNamespace(current_actor="itself"))
    asyncio.run(leave())
    assert killed == ["itself"]


def test_the_end_of_a_run_does_not_wait_for_a_storage_that_hangs(monkeypatch: Any) -> None:
    async def close() -> None:
        shelf = Library(SimpleNamespace())  # pyright: ignore
        hangs = threading.Event()
        monkeypatch.setattr(shelf, "_lock", SimpleNamespace(release=lambda: hangs.wait(30)))
        try:
            await asyncio.wait_for(shelf.close(), 5)
        finally:
            hangs.set()

    monkeypatch.setattr(library, "CLOSE_SECONDS", 0.1)
    asyncio.run(close())


@pytest.mark.parametrize(("failures", "error"), [([StorageError("503")], ""), ([NoCheckpointError("damaged")], "damaged")])
def test_storage_that_fails_once_is_asked_again_before_a_run_ends(monkeypatch: Any, failures: list[Any], error: str) -> None:
    """What is damaged is not."""
    there = (m.Stored("step 9", 9),)
    told: list[Any] = []

    def listed() -> tuple[m.Stored, ...]:
        if failures:
            raise failures.pop()
        return there

    async def look() -> None:
        shelf = Library(SimpleNamespace())  # pyright: ignore
        monkeypatch.setattr(shelf, "_look", lambda incarnation: listed())
        shelf.find(3, 12, told.append)
        await asyncio.wait_for(asyncio.gather(*shelf._tasks), 5)

    monkeypatch.setattr(library, "AGAIN_SECONDS", 0.01)
    asyncio.run(look())
    assert told == [m.CheckpointsFound(incarnation=3, stored=() if error else there, reached=12, error=error)]


def test_a_supervisor_looks_for_checkpoints_to_go_back_to(tmp_path: Path) -> None:
    """What was rejected, or given up as everybody went back, does not count among those that it needs."""
    spec: Any = SimpleNamespace(returns=(Return(4, 10),))
    machine = RunState(Rules(min_workers=1, max_workers=2, max_steps=10))
    counts = bare(machine=machine, spec=spec)._counts
    assert (counts(m.Stored("a", 20, 3)), counts(m.Stored("b", 20, 5))) == (False, True), "before the run has begun"
    machine.returns = [*spec.returns, Return(6, 15)]
    assert (counts(m.Stored("b", 20, 5)), counts(m.Stored("c", 15, 5))) == (False, True)
    machine.rejected["c"] = "its hash differs"
    assert not counts(m.Stored("c", 15, 5))


def full(path: Path) -> Path:
    """Leaves no room on this file system; returns the file that takes it."""
    filler = path / "filler"
    with filler.open("wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(4096))
            except OSError:
                return filler


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A full disk with the directory of run "mine", whose driver had the right to write and has left it to the supervisor."""
    monkeypatch.setattr(lock, "LEASE_S", 0.8)
    monkeypatch.setattr(lock, "RENEW_S", 0.1)
    with small_file_system(tmp_path / "disk", "1M") as path:
        lock.acquire(LocalStorage(path), "mine").hand_over()
        full(path)
        yield path


def right_of(path: Path) -> Right:
    spec: Any = SimpleNamespace(directory=path, run_id="mine")
    return Right(spec)


def test_a_supervisor_that_finds_its_disk_full_renews_the_right_when_there_is_room(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else another run gets it after the lease, and two write to one directory."""
    monkeypatch.setattr(lock, "LEASE_S", 8.0)  # however long this process is held up
    storage = LocalStorage(small_disk)

    async def live() -> None:
        right = right_of(small_disk)
        before = lock.read_owner(storage)
        watching = asyncio.create_task(right.until_lost())
        await asyncio.sleep(0.5)
        assert lock.read_owner(storage) == before, "it is full"
        (small_disk / "filler").unlink()
        with pytest.raises(LockedError, match="run mine"):
            await asyncio.to_thread(elsewhere, storage)
        assert not watching.done()
        watching.cancel()
        right.release()

    def elsewhere(storage: LocalStorage) -> None:
        """Another run comes, on a machine that does not see whether this process lives."""
        found = lock.read_owner(storage)
        assert found is not None
        lock._await_end(storage, found)

    asyncio.run(live())
    lock.acquire(storage, "the next").release()


def test_a_supervisor_takes_the_right_back_from_nobody(small_disk: Path) -> None:
    storage, right = LocalStorage(small_disk), right_of(small_disk)
    (small_disk / "filler").unlink()
    lock.acquire(storage, "another").release()
    reason = asyncio.run(asyncio.wait_for(right.until_lost(), 10))
    assert "run another" in reason
    with pytest.raises(LockedError, match="run another"):
        right_of(small_disk)  # as the next supervisor of this run finds it
    right.release()
    found = lock.read_owner(storage)
    assert found is not None
    assert (found.owner, found.epoch) == ("another", 2)


def test_at_the_end_it_is_looked_up_whose_the_directory_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known of it is some seconds old, and another run's logs are not this one's to delete."""
    storage = LocalStorage(tmp_path)
    lock.acquire(storage, "mine").hand_over()
    right = right_of(tmp_path)
    assert asyncio.run(right.is_kept())
    assert right._lock is not None
    right._lock.hand_over()  # nobody renews it: the mount was away
    lock._write(storage, lock.Owner("another", 2, "elsewhere", 1, 1.0))
    assert not right.lost
    assert not asyncio.run(right.is_kept())

    def away(storage: LocalStorage) -> None:
        raise StorageError("it is away")

    monkeypatch.setattr(lock, "read_owner", away)
    assert not asyncio.run(right.is_kept())


@pytest.mark.parametrize("ours", [True, False])
def test_the_files_of_who_has_the_right_now_are_left_alone(tmp_path: Path, ours: bool) -> None:
    (tmp_path / "events.jsonl").write_text('{"event":"RunStarted","run_id":"another"}\n')
    noted: list[str] = []
    log: Any = SimpleNamespace(note=lambda name, **fields: noted.append(name))
    machine = RunState(Rules(min_workers=1, max_workers=2, max_steps=10))
    spec: Any = SimpleNamespace(directory=tmp_path)

    async def is_kept() -> bool:
        return ours

    kept = notes.Notes(spec, log, machine, lambda: 0.0, Counter())
    asyncio.run(bare(right=SimpleNamespace(is_kept=is_kept), notes=kept, spec=spec)._draw())
    drawn = [path.name for path in tmp_path.iterdir() if path.name != "events.jsonl"]
    assert bool(drawn or noted) == ours


@pytest.mark.parametrize("ours", [True, False])
def test_what_a_drawing_left_that_was_killed_is_removed_by_the_next(
    ours: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts = {".report.html.0123456789abcdef", ".timeline.json.0123456789abcdef"}
    others = {".nonce.0123456789abcdef", "report.html", ".report.html.of-one-who-draws-now"}
    for name in drafts | others:
        (tmp_path / name).touch()
    for name in drafts:
        os.utime(tmp_path / name, (0.0, time.time() - 2 * 3600.0))
    monkeypatch.setattr(supervisor, "draw", lambda directory: "")

    async def is_kept() -> bool:
        return ours

    right, spec = SimpleNamespace(is_kept=is_kept), SimpleNamespace(directory=tmp_path)
    asyncio.run(bare(right=right, notes=SimpleNamespace(drawn=str), spec=spec)._draw())
    assert {path.name for path in tmp_path.iterdir()} == (others if ours else drafts | others)


def test_records_of_earlier_runs_are_put_aside_under_a_name_of_their_own(tmp_path: Any) -> None:
    """Also if somebody has deleted some of them: the next number is above all that are there."""
    for number in (2, 3):
        (tmp_path / f"events-{number:03d}.jsonl").write_text(f"{number}\n")
    (tmp_path / "events.jsonl").write_text('{"event":"RunStarted","run_id":"before"}\n')
    (tmp_path / "report.html").write_text("what happened before")
    spec: Any = SimpleNamespace(directory=tmp_path, run_id="now", nonce="n")
    assert list(notes.past_of(spec)) == []
    assert (tmp_path / "report-004.html").read_text() == "what happened before", "the next one would be written over it"
    assert sorted(path.name for path in tmp_path.glob("events*")) == [f"events-00{number}.jsonl" for number in (2, 3, 4)]
    assert (tmp_path / "events-003.jsonl").read_text() == "3\n"
    assert "before" in (tmp_path / "events-004.jsonl").read_text()


@pytest.mark.parametrize("cut", ['{"event":"RunStarted","run_i', "\0\0\0\0\n", "[]\n", '"word"\n'])
def test_a_log_whose_first_line_was_cut_is_put_aside(cut: str, tmp_path: Any) -> None:
    """A full disk, or a crash of the machine: the next run of this name begins all the same."""
    (tmp_path / "events.jsonl").write_text(cut)
    spec: Any = SimpleNamespace(directory=tmp_path, run_id="now", nonce="n")
    assert list(notes.past_of(spec)) == []
    assert (tmp_path / "events-001.jsonl").read_text() == cut
    assert not (tmp_path / "events.jsonl").exists()


@pytest.mark.parametrize("broken", ["read_past", "_named", "ftruncate"])
@pytest.mark.parametrize("came_back", [True, False])
def test_a_supervisor_that_comes_back_waits_for_a_storage_that_is_away(
    came_back: bool, broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it failed instead, Ray would not start it again, and a passing error of a file server would end the run."""
    log = EventLog(tmp_path / "events.jsonl")
    log.append(m.RunStarted(run_id=spec_of(tmp_path).run_id))
    log.append(m.CapacityChanged(slots=1))
    log.close()
    place: Any = {"read_past": notes, "_named": event_log, "ftruncate": event_log.os}[broken]
    monkeypatch.setattr(place, broken, away_for(3, getattr(place, broken), after=1 if broken == "_named" else 0))
    monkeypatch.setattr(supervisor, "LOG_RETRY_S", 0.01)
    context = SimpleNamespace(was_current_actor_reconstructed=came_back)
    monkeypatch.setattr(supervisor.ray, "get_runtime_context", lambda: context)

    async def live() -> State:
        one = WithoutRay(spec_of(tmp_path))
        await one.close()
        return one.machine.state

    if came_back:
        assert asyncio.run(live()) == State.SCHEDULING
    else:
        with pytest.raises(OSError, match="Stale file handle"):
            asyncio.run(live())
        lock.acquire(LocalStorage(tmp_path), "the next").release()  # without waiting


def test_a_supervisor_whose_log_is_damaged_leaves_the_right_to_who_comes_next(tmp_path: Path) -> None:
    """Not only the last line is, so it cannot go on, and Ray does not start it again."""
    log = EventLog(tmp_path / "events.jsonl")
    log.append(m.RunStarted(run_id=spec_of(tmp_path).run_id))
    log.close()
    with log.path.open("a") as file:
        file.write('{damaged\n{"event":"State"}\n')

    async def live() -> None:
        WithoutRay(spec_of(tmp_path))

    with pytest.raises(StorageError, match="line 2 is damaged"):
        asyncio.run(live())
    owner = lock.read_owner(LocalStorage(tmp_path))
    assert owner is not None
    assert owner.renewed < 0


def test_a_log_that_is_slow_to_sync_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file server that hangs. A second sync is begun after the first one only."""
    hangs, begun = threading.Event(), list[int]()

    def sync(file: int) -> None:
        begun.append(file)
        hangs.wait(10)

    monkeypatch.setattr(event_log.os, "fdatasync", sync)
    monkeypatch.setattr(supervisor, "LOG_SYNC_S", 0.01)
    log = EventLog(tmp_path / "events.jsonl")

    async def until_begun(times: int) -> None:
        while len(begun) < times:
            await asyncio.sleep(0.01)

    async def live() -> None:
        syncing = asyncio.create_task(bare(log=log)._sync_log())
        try:
            await asyncio.sleep(0.1)
            assert begun == [], "there is no news"
            log.append(m.CapacityChanged(slots=1))
            await asyncio.wait_for(until_begun(1), 10)
            for slots in range(10):
                log.append(m.CapacityChanged(slots=slots))
                await asyncio.sleep(0.01)
                assert len(begun) == 1
            hangs.set()
            await asyncio.wait_for(until_begun(2), 10)
            await asyncio.sleep(0.1)
            assert len(begun) == 2, "there is no more news"
        finally:
            hangs.set()
            syncing.cancel()

    asyncio.run(live())
    log.close()


def test_a_supervisor_that_comes_back_does_not_hold_the_whole_log_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 workers write 16 million records in a month. Each is let go of before the next is read."""
    log = EventLog(tmp_path / "events.jsonl", lambda: 0.0)
    log.append(m.RunStarted(run_id=spec_of(tmp_path).run_id))
    for number in range(1, 1001):
        log.append(m.CapacityChanged(at=float(number), slots=number))
        log.note("State", at=float(number))
    log.close()
    read = notes.read_past
    held: list[int] = []

    def watched(path: Path) -> Iterator[Any]:
        yield from read(path)
        gc.collect()
        held.append(sum(type(one) is m.CapacityChanged for one in gc.get_objects()))

    monkeypatch.setattr(notes, "read_past", watched)

    async def live() -> tuple[float, int]:
        one = WithoutRay(spec_of(tmp_path))
        await one.close()
        return one.now(), one.machine.roster.slots

    before = sum(type(one) is m.CapacityChanged for one in gc.get_objects())
    now, slots = asyncio.run(live())
    assert slots == 1000
    assert 1000.0 <= now < 1010.0, "its clock goes on from the last one"
    assert held[0] - before < 10


def away_for(times: int, work: Any, after: int = 0) -> Any:
    """What fails so often, and then works; at first it works `after` times."""
    outcomes = [*[False] * times, *[True] * after]

    def fail(*args: Any, **more: Any) -> Any:
        if outcomes and not outcomes.pop():
            raise OSError(errno.ESTALE, "Stale file handle")
        return work(*args, **more)

    return fail


@pytest.mark.parametrize("is_there", [True, False])
def test_a_supervisor_that_comes_back_to_an_empty_directory_does_not_begin_anew_there(
    is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its mount is away, and the workers train. One that was lost before it had logged anything has left its mark."""
    context = SimpleNamespace(was_current_actor_reconstructed=True)
    monkeypatch.setattr(supervisor.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(supervisor, "PATIENCE_S", 0.05)
    monkeypatch.setattr(supervisor, "LOG_RETRY_S", 0.01)
    if is_there:
        (tmp_path / "nonce").write_text(spec_of(tmp_path).nonce)

    async def live() -> State:
        one = WithoutRay(spec_of(tmp_path))
        await one.close()
        return one.machine.state

    if is_there:
        assert asyncio.run(live()) == State.INITIALIZING
    else:
        with pytest.raises(FileNotFoundError, match="is it mounted"):
            asyncio.run(live())


def test_a_supervisor_that_comes_back_makes_nothing_where_its_mount_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take the right anew there, with the first epoch, and find the right of this very run when the mount is back."""
    spec = spec_of(tmp_path / "mount" / "run")
    storage, away = LocalStorage(spec.directory), tmp_path / "away"
    lock.acquire(storage, "a launch before").release()
    lock.acquire(storage, spec.run_id).hand_over()
    (spec.directory / "nonce").write_text(spec.nonce)
    spec.directory.rename(away)
    context = SimpleNamespace(was_current_actor_reconstructed=True)
    monkeypatch.setattr(supervisor.ray, "get_runtime_context", lambda: context)

    def mount(seconds: float) -> None:
        assert not spec.directory.exists(), "nothing was made there"
        away.rename(spec.directory)

    async def live() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(supervisor.time, "sleep", mount)
            one = WithoutRay(spec)
        assert one._right._lock is not None
        assert (one._right._lock.owner.epoch, one._right._lock.new) == (2, False)
        await one.close()

    asyncio.run(live())


def test_a_supervisor_that_comes_back_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(was_current_actor_reconstructed=True)
    monkeypatch.setattr(supervisor.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(supervisor, "PATIENCE_S", 0.05)
    monkeypatch.setattr(supervisor, "LOG_RETRY_S", 0.01)
    with pytest.raises(OSError, match="Stale file handle"):
        supervisor._patiently(away_for(10_000, dict))


def test_whether_a_run_has_a_log_is_not_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a storage that is away: it would begin anew over the records of who trains."""
    spec: Any = SimpleNamespace(directory=tmp_path, run_id="now", nonce="n")
    (tmp_path / "events.jsonl").write_text('{"event":"RunStarted","run_id":"now"}\n')
    read = Path.open

    def open_but_the_log(path: Path, *args: Any, **more: Any) -> Any:
        return away_for(1, read)() if path.name == "events.jsonl" else read(path, *args, **more)

    monkeypatch.setattr(Path, "open", open_but_the_log)
    monkeypatch.setattr(Path, "exists", lambda path: False)  # as Python 3.14 says of what it cannot tell
    with pytest.raises(OSError, match="Stale file handle"):
        list(notes.past_of(spec))
    assert not (tmp_path / "nonce").exists()


def test_what_a_lost_worker_logged_stays_until_a_checkpoint_makes_it_needless(tmp_path: Path) -> None:
    """Who took its place has not logged it again. Steps are told in records: that the world had come to step 13 may not be
    known yet when a checkpoint of step 11 is."""
    machine = RunState(Rules(min_workers=2, max_workers=2, max_steps=100, stages=2))
    machine.members["w0"], machine.step, machine.plan = MemberState.ACTIVE, 10, Plan(13)
    one = bare(machine=machine, spec=SimpleNamespace(logs=tmp_path), lost_at={})
    names = ["w0-1-0-8-1.arrow", "w1-1-0-8-0.arrow", "w1-1-1-12-all.arrow"]
    for name in names:
        (tmp_path / name).write_bytes(b"")
    for step in (11, 12, 13):
        one._trim_logs_of_the_lost(step)
        assert sorted(path.name for path in tmp_path.iterdir()) == names
        machine.step = 20
    one._trim_logs_of_the_lost(14)
    assert [path.name for path in tmp_path.iterdir()] == names[:1], "who lives trims its own"


async def for_ever(*_: object) -> Any:
    """Nothing comes of it."""
    await asyncio.Event().wait()


async def at_once() -> None:
    """There is nothing to wait for."""


class Lives(WithoutRay):
    """A supervisor's whole life, with nobody to command, and a storage that takes its time."""

    def __init__(self, spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
        context = SimpleNamespace(was_current_actor_reconstructed=False, get_node_id=lambda: "node")
        monkeypatch.setattr(supervisor.ray, "get_runtime_context", lambda: context)
        monkeypatch.setattr(supervisor, "Demand", lambda *_: SimpleNamespace(keep=for_ever, close=at_once))
        monkeypatch.setattr(supervisor, "draw", lambda directory: "")
        super().__init__(spec)
        monkeypatch.setattr(self._health, "watch_cluster", for_ever)
        self._crew.close()
        self._crew = SimpleNamespace(carry_out=lambda command: None, settled=at_once, close=lambda: None)
        self.found = asyncio.Event()
        about = {"epoch": 1, "open": self._open, "close": at_once}
        self._library: Any = SimpleNamespace(**about, keep_holder=for_ever, until_lost=for_ever)

    async def _open(self) -> tuple[m.Stored, ...]:
        await self.found.wait()
        return ()

    async def _live(self) -> dict[str, Any]:
        return await Supervisor._live(self)


def test_what_is_asked_for_before_a_run_begins_is_not_the_first_line_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By which everybody knows what run it is of: one that was ended so early had no end for those who looked for it."""

    async def live() -> None:
        one = Lives(spec_of(tmp_path), monkeypatch)
        asking = asyncio.create_task(one.abort("enough"))
        await asyncio.sleep(0.05)
        one.found.set()
        await asyncio.wait_for(one.run(), 30)
        await asking
        await one.close()

    asyncio.run(live())
    told = [record["event"] for record in event_log.read_records(tmp_path / "events.jsonl")]
    assert [name for name in told if name in ("RunStarted", "AbortRequested")] == ["RunStarted", "AbortRequested"]
    ended = recorded(tmp_path)
    assert ended is not None
    assert ended["state"] == "ABORTED"
