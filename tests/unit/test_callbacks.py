"""Callbacks: every step once and in order, whatever becomes of the run and of its driver; and what is in the trackers then."""

from __future__ import annotations

import itertools
import json
import math
import struct
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from fake_crew import Cluster
from hypothesis import given, settings
from hypothesis import strategies as st
from test_interleavings import all_rules, live_through

import raytrain_ft as ft
from raytrain_ft import callbacks
from raytrain_ft.callbacks import Callback, Callbacks, RunInfo, Seen
from raytrain_ft.errors import ConfigError
from raytrain_ft.policy import messages as m
from raytrain_ft.policy.chronicle import Steps
from raytrain_ft.policy.roster import Rules
from raytrain_ft.policy.strategy import Recovery
from raytrain_ft.runtime.event_log import EventLog, encode
from raytrain_ft.runtime.follow import committed_before
from raytrain_ft.trackers import MLflow, TensorBoard, WandB


@pytest.fixture(autouse=True)
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callbacks are told of steps in the pieces in which workers tell of them, where it is not about how these are joined."""
    monkeypatch.setattr(callbacks, "SPAN_S", 0.0)


class Recorder(Callback):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.info: RunInfo | None = None
        self.told: list[Steps | Recovery] = []
        self.ended: list[str] = []

    def on_start(self, run: RunInfo) -> Seen | None:
        self.info = run

    def on_steps(self, steps: Steps) -> None:
        self.told.append(steps)

    def on_recovery(self, recovery: Recovery) -> None:
        self.told.append(recovery)

    def on_end(self, state: str) -> None:
        self.ended.append(state)

    @property
    def spans(self) -> list[tuple[int, int]]:
        return [(one.first, one.stop) for one in self.told if isinstance(one, Steps)]


def write(directory: Path, events: Iterable[m.Event]) -> None:
    """As the supervisor does; an earlier log steps aside, as the driver does it."""
    directory.mkdir(exist_ok=True)
    log = directory / "events.jsonl"
    if log.exists():
        log.rename(directory / f"events-{len(list(directory.glob('events-*.jsonl'))) + 1:03d}.jsonl")
    file = EventLog(log)
    for event in events:
        file.append(event)
    file.note("State", at=0.0, state="FINISHED", incarnation=0)
    file.close()


def follow(directory: Path, rules: Rules, callbacks: list[Callback]) -> None:
    following = Callbacks(callbacks, "digits", directory, rules)
    following.end()


def contiguous(spans: list[tuple[int, int]]) -> bool:
    return all(first < stop for first, stop in spans) and all(a[1] == b[0] for a, b in itertools.pairwise(spans))


def grow(directory: Path, rules: Rules, events: Iterable[m.Event], chance: Random, recorder: Recorder) -> None:
    """Writes the log of a run piece by piece, and follows it meanwhile."""
    following = Callbacks([recorder], "digits", directory, rules)
    following.poll()  # there is no log yet
    text = "".join(encode(event) + "\n" for event in events).encode()
    with (directory / "events.jsonl").open("wb", buffering=0) as log:
        while text:
            size = chance.randrange(1, 2000)
            log.write(text[:size])
            text = text[size:]
            following.poll()
    following.end()


def places(recorder: Recorder) -> list[tuple[Recovery, int]]:
    """Each recovery that was told of, and up to which step the run had been told of before it."""
    stops = itertools.accumulate((one.stop if isinstance(one, Steps) else 0 for one in recorder.told), max, initial=0)
    return [(one, stop) for one, stop in zip(recorder.told, stops, strict=False) if isinstance(one, Recovery)]


@settings(max_examples=150, derandomize=True)
@given(rules=all_rules(), seed=st.integers(0, 2**32))
def test_whatever_happens_every_step_and_recovery_comes_once_and_in_order(
    rules: Rules, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The log grows by pieces that end anywhere, also in the middle of a line. Steps are joined, but not over a recovery."""
    cluster = live_through(rules, seed)
    if not any(isinstance(event, m.RunStarted) for event in cluster.log[:1]):
        return
    directory, chance, recorder, pieces = tmp_path_factory.mktemp("run"), Random(seed), Recorder(), Recorder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(callbacks, "SPAN_S", chance.choice([0.0, 0.05, 1.0, math.inf]))
        grow(directory, rules, cluster.log, chance, recorder)
    follow(directory, rules, [pieces])
    assert places(recorder) == places(pieces)
    assert recorder.ended == [str(cluster.run.state)]
    assert [one for one in recorder.told if isinstance(one, Recovery)] == [
        recovery for recovery in cluster.run.recoveries if recovery.resumed is not None
    ]
    assert contiguous(recorder.spans)
    told = [event.stop_step for event in cluster.log if isinstance(event, m.StepsCommitted)]
    if recorder.spans:
        assert recorder.spans[-1][1] == max(told)


class Toy(ft.TrainTask):
    """What a Trainer needs to look at its other arguments."""

    def model(self, stage): ...
    def optimizer(self, params): ...
    def dataset(self): ...
    def loss(self, output, batch): ...


RULES = Rules(min_workers=2, max_workers=2, max_steps=20, spares=0, checkpoints=True)


def story(
    until: int, *, stored: tuple[m.Stored, ...] = (), run_id: str = "r0", lose: int | None = None, seed: int = 3
) -> list[m.Event]:
    """The events of a run of two workers up to some step; one of them is lost at step `lose`."""
    cluster = Cluster(RULES, Random(seed), corruption=0.0, slowness=0.0)
    cluster.disk = list(reversed(stored))
    cluster.tell(m.RunStarted(run_id=run_id, stored=stored, details={"max_steps": 20, "update": "barrier"}))
    cluster.resize(4)
    while cluster.run.step < until and cluster.run.state != "FINISHED":
        if lose is not None and cluster.run.step >= lose:
            cluster.lose(cluster.run.world[1])
            lose = None
        cluster.go_on()
    if until >= RULES.max_steps:
        cluster.finish()
    return cluster.log


def test_a_resumed_run_begins_with_the_first_step_not_told(tmp_path: Path) -> None:
    write(tmp_path / "run", story(9))
    first = Recorder()
    follow(tmp_path / "run", RULES, [first])
    reached = first.spans[-1][1]
    assert first.spans[0][0] == 0
    assert first.info is not None
    assert (first.info.number, first.info.resumed, first.info.run_id) == (0, False, "r0")
    write(tmp_path / "run", story(20, stored=(m.Stored("a", 5),), run_id="r1", lose=12))
    assert committed_before(tmp_path / "run") == reached
    second = Recorder()
    follow(tmp_path / "run", RULES, [second])
    assert second.info is not None
    assert (second.info.number, second.info.resumed) == (1, True)
    assert contiguous([*first.spans, *second.spans])
    assert second.spans[-1][1] == 20
    assert len([one for one in second.told if isinstance(one, Recovery) and one.lost]) == 1
    assert second.ended == ["FINISHED"]


def test_a_run_that_begins_anew_tells_everything(tmp_path: Path) -> None:
    write(tmp_path / "run", story(9))
    write(tmp_path / "run", story(20, run_id="r1"))
    recorder = Recorder()
    follow(tmp_path / "run", RULES, [recorder])
    assert contiguous(recorder.spans)
    assert (recorder.spans[0][0], recorder.spans[-1][1]) == (0, 20)
    write(tmp_path / "run", story(5, run_id="r2"))
    write(tmp_path / "run", story(9, stored=(m.Stored("a", 2),), run_id="r3"))
    assert committed_before(tmp_path / "run") == 5  # what was before the run that began anew is another story


def test_part_of_a_record_was_told_before(tmp_path: Path) -> None:
    class Knows(Recorder):
        def on_start(self, run: RunInfo) -> Seen | None:
            return Seen(steps=3, recoveries=0)

    about = {"rank": 0, "world_size": 2, "incarnation": 1, "epoch": 0, "start": 0, "ids_digest": "", "loss": 0.5}
    joined = [event for event in story(1) if not isinstance(event, m.StepsCommitted)]
    steps = m.StepsCommitted(at=joined[-1].at + 2.0, member="w0", first_step=0, stop_step=8, **about)
    write(tmp_path / "run", [*joined, steps])
    knows, new = Knows(), Recorder()
    follow(tmp_path / "run", RULES, [knows, new])
    assert (knows.spans, new.spans) == ([(3, 8)], [(0, 8)])
    times = [one.step_seconds for recorder in (knows, new) for one in recorder.told if isinstance(one, Steps)]
    assert times[0] == times[1]


def half_seconds(log: EventLog) -> Iterator[None]:
    """Two workers tell once a second, half a second apart; a step takes a quarter of one."""
    joined = [event for event in story(1) if not isinstance(event, m.StepsCommitted)]
    for event in joined:
        log.append(event)
    about = {"world_size": 2, "incarnation": 1, "epoch": 0, "start": 0, "ids_digest": ""}
    for number in range(1, 100):
        where = {"member": f"w{number % 2}", "rank": number % 2, "first_step": max(0, 2 * number - 4), "stop_step": 2 * number}
        log.append(m.StepsCommitted(at=joined[-1].at + 0.5 * number, **where, **about, loss=1.0 / number, longest_s=0.3))
        yield


def test_steps_of_several_workers_are_told_of_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callbacks, "SPAN_S", 0.9)
    now = [0.0]
    monkeypatch.setattr(callbacks, "time", SimpleNamespace(monotonic=lambda: now[0]))
    log, recorder = EventLog(tmp_path / "events.jsonl"), Recorder()
    following, told = Callbacks([recorder], "digits", tmp_path, RULES), half_seconds(log)
    for spans in ([], [(0, 4)], [(0, 4)], [(0, 4), (4, 8)]):
        next(told)
        following.poll()
        assert recorder.spans == spans
    for one in recorder.told:
        assert isinstance(one, Steps)
        assert (one.seconds, one.step_seconds, one.longest_s) == (pytest.approx(1.0), pytest.approx(0.25), 0.3)
    assert [one.loss for one in recorder.told if isinstance(one, Steps)] == [1 / 2, 1 / 4]
    next(told)
    following.poll()
    now[0] += 0.8
    following.poll()
    assert recorder.spans[-1] == (4, 8)
    now[0] += 0.2  # nothing follows: the run stands still
    following.poll()
    assert recorder.spans[-1] == (8, 10)
    next(told)
    following.poll()
    assert recorder.spans[-1] == (8, 10)
    following.end()
    assert (recorder.spans[-1], len(recorder.ended)) == ((10, 12), 1), "at once, and before the end"
    log.close()


def test_what_waits_for_more_is_told_before_a_damaged_log_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callbacks, "SPAN_S", 0.9)
    log, recorder = EventLog(tmp_path / "events.jsonl"), Recorder()
    following = Callbacks([recorder], "digits", tmp_path, RULES)
    next(half_seconds(log))
    following.poll()
    assert recorder.spans == []
    with log.path.open("a") as file:
        file.write("damaged\n")
    with pytest.warns(UserWarning, match="events cannot be followed"):
        following.poll()
    assert recorder.spans == [(0, 2)]
    log.close()


def test_one_that_raises_is_left_and_the_others_go_on(tmp_path: Path) -> None:
    class Broken(Recorder):
        def on_steps(self, steps: Steps) -> None:
            super().on_steps(steps)
            raise ValueError("no")

    write(tmp_path / "run", story(9))
    broken, sound = Broken(), Recorder()
    with pytest.warns(UserWarning, match="Broken is not called any more; training goes on. on_steps raised ValueError: no"):
        follow(tmp_path / "run", RULES, [broken, sound])
    assert (len(broken.told), broken.ended) == (1, [])
    assert len(sound.spans) > 3


def test_a_damaged_log_does_not_end_the_driver(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"event":"RunStarted","at":"soon"}\n')
    with pytest.warns(UserWarning, match="events cannot be followed"):
        follow(tmp_path, RULES, [Recorder()])


def test_only_callbacks_are_taken() -> None:
    with pytest.raises(ConfigError, match="instances of"):
        ft.Trainer(Toy(), max_steps=1, global_batch_size=1, callbacks=[print])  # pyright: ignore[reportArgumentType]


# ---------------------------------------------------------------- trackers


def told_steps(events: list[m.Event], *, after: int = 0) -> list[int]:
    """Where the points of a run's curve are."""
    furthest, found = after, []
    for event in events:
        if isinstance(event, m.StepsCommitted) and event.stop_step > furthest:
            furthest = event.stop_step
            found.append(furthest)
    return found


def scalars(directory: Path) -> tuple[list[int], list[int]]:
    """What TensorBoard itself reads: steps of the loss, steps of the recoveries."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="no tensorboard here")
    reader = accumulator.EventAccumulator(str(directory), purge_orphaned_data=True)
    reader.Reload()
    found: list[list[int]] = []
    for tag in ("train/loss", "recovery/pause_seconds"):
        found.append([event.step for event in reader.Scalars(tag)] if tag in reader.Tags()["scalars"] else [])
    return found[0], found[1]


def test_tensorboard_shows_one_curve_over_a_kill_a_resume_and_a_recovery(tmp_path: Path) -> None:
    run, board = tmp_path / "run", tmp_path / "run" / "tensorboard"
    first, second = story(9), story(20, stored=(m.Stored("a", 5),), run_id="r1", lose=12)
    write(run, first)
    following = Callbacks([TensorBoard()], "digits", run, RULES)
    following.poll()  # and then the driver is killed, in the middle of a write
    (file,) = board.iterdir()
    file.write_bytes(file.read_bytes()[:-2])
    write(run, second)
    follow(run, RULES, [TensorBoard()])
    follow(run, RULES, [TensorBoard()])  # a second driver takes the same run up when all was told
    losses, recoveries = scalars(board)
    expected = told_steps(first)[:-1]
    assert losses == [*expected, *told_steps(second, after=expected[-1])]
    assert losses == sorted(set(losses))
    assert losses[-1] == 20
    assert len(recoveries) == 1


def test_tensorboard_hides_the_curve_of_a_run_that_was_begun_anew(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write(run, story(15, seed=3))
    follow(run, RULES, [TensorBoard()])
    again = story(9, run_id="r1", seed=4)
    write(run, again)
    follow(run, RULES, [TensorBoard()])
    assert scalars(run / "tensorboard")[0] == told_steps(again)


def test_mlflow_continues_the_run(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="MLflow is not installed: pip install -e .[mlflow]")
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    run, first, second = tmp_path / "run", story(9), story(20, stored=(m.Stored("a", 5),), run_id="r1", lose=12)
    write(run, first)
    follow(run, RULES, [MLflow(uri)])
    write(run, second)
    following = Callbacks([MLflow(uri)], "digits", run, RULES)
    following.poll()  # the driver is killed
    follow(run, RULES, [MLflow(uri)])
    client = MlflowClient(uri)
    (found,) = client.search_runs([client.get_experiment_by_name("raytrain_ft").experiment_id])
    losses = [metric.step for metric in client.get_metric_history(found.info.run_id, "train/loss")]
    assert losses == [*told_steps(first), *told_steps(second, after=told_steps(first)[-1])]
    assert len(client.get_metric_history(found.info.run_id, "recovery/pause_seconds")) == 1
    assert "the process died" in found.data.tags["recovery 1"] or "it died" in found.data.tags["recovery 1"]
    assert (found.info.run_name, found.info.status) == ("digits", "FINISHED")
    assert found.data.params == {"max_steps": "20", "update": "barrier"}
    write(run, story(20, stored=(m.Stored("b", 15),), run_id="r3", lose=17))
    follow(run, RULES, [MLflow(uri)])
    tags = client.get_run(found.info.run_id).data.tags
    assert sorted(tag for tag in tags if tag.startswith("recovery ")) == ["recovery 1", "recovery 2"]
    write(run, story(9, run_id="r2"))
    follow(run, RULES, [MLflow(uri)])
    assert len(client.search_runs([found.info.experiment_id])) == 2  # it began anew
    elsewhere = f"sqlite:///{tmp_path}/other.db"  # which knows nothing of the run before
    write(run, story(9, run_id="r4"))
    follow(run, RULES, [MLflow(elsewhere)])
    other = MlflowClient(elsewhere)
    assert len(other.search_runs([other.get_experiment_by_name("raytrain_ft").experiment_id])) == 1


def records_of(data: bytes) -> Iterator[bytes]:
    """The records of a W&B store: LevelDB's log format, in blocks of 32 KiB, after a header of 7 bytes."""
    at, parts = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part of one
            yield parts
            parts = b""


def history(directory: Path, key: str = "train/loss") -> list[tuple[str, int]]:
    """(run, step) of every row with this key in the offline stores of W&B, oldest first."""
    from wandb.proto.wandb_internal_pb2 import Record

    found: list[tuple[str, int]] = []
    for path in sorted(directory.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        name = ""
        for data in records_of(path.read_bytes()):
            record: Any = Record.FromString(data)
            name = record.run.run_id or name
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            if key in items:
                found.append((name, record.history.step.num))
    return found


def test_wandb_continues_the_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: pip install -e .[wandb]")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run, first, second = tmp_path / "run", story(9), story(20, stored=(m.Stored("a", 5),), run_id="r1", lose=12)
    write(run, first)
    follow(run, RULES, [WandB(mode="offline")])
    write(run, second)
    follow(run, RULES, [WandB(mode="offline")])
    follow(run, RULES, [WandB(mode="offline")])  # nothing is left to tell
    steps = [*told_steps(first), *told_steps(second, after=told_steps(first)[-1])]
    assert history(run) == [("r0", step) for step in steps]
    ((name, at),) = history(run, "recovery/workers_lost")
    assert (name, at in steps, at > 9) == ("r0", True, True), "W&B takes no second row of a step that it has"


def test_records_that_cannot_be_read_for_a_while_cost_no_callback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "run", story(9))
    write(tmp_path / "run", story(20, stored=(m.Stored("a", 5),), run_id="r1"))
    recorder, before = Recorder(), committed_before(tmp_path / "run")
    callbacks = Callbacks([recorder], "run", tmp_path / "run", RULES)
    with monkeypatch.context() as away:
        away.setattr(Path, "open", lambda *_: (_ for _ in ()).throw(OSError(116, "Stale file handle")))
        with pytest.warns(UserWarning, match="callbacks wait for news"):
            callbacks.poll()
        with warnings.catch_warnings(action="error"):
            callbacks.poll()
    callbacks = Callbacks([recorder], "run", tmp_path / "run", RULES)
    with monkeypatch.context() as away:
        away.setattr("raytrain_ft.callbacks.committed_before", lambda _: (_ for _ in ()).throw(OSError(5, "I/O error")))
        with pytest.warns(UserWarning, match="callbacks wait for news"):
            callbacks.poll()
    assert recorder.spans == [], "what was read meanwhile is not lost"
    callbacks.end()
    assert contiguous(recorder.spans)
    assert (recorder.spans[0][0], recorder.spans[-1][1], recorder.ended) == (before, 20, ["FINISHED"])


def test_whatever_on_start_returns_the_run_goes_on(tmp_path: Path) -> None:
    """As what a write to a file returns."""

    class Notes(Callback):
        def on_start(self, run: RunInfo) -> Any:
            return 17

    callbacks = Callbacks([notes := Notes()], "run", tmp_path, RULES)
    callbacks._directory.mkdir(exist_ok=True)
    callbacks._begin(m.RunStarted(run_id="r", details={}))
    assert callbacks._seen[id(notes)] == Seen(0)
