"""The log of a pipeline when a stage is lost: not written yet, compressed, synchronous, trimmed; none changes nothing."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import PIPELINE_STEPS, STAGES, pipeline, promise_kept
from toy import Leisurely, Toy
from watching import account, events, kill, steps_done, wait_for

import raytrain_ft as ft
from raytrain_ft.policy.strategy import Guarantee, Strategy
from raytrain_ft.storage.log_files import LogFiles, Record
from raytrain_ft.storage.log_format import NAME
from raytrain_ft.storage.tensor_log import TensorLog

pytestmark = pytest.mark.long

NONE_YET = ft.CheckpointConfig(every=100)
HELD_FROM, LOST_AT, LOST_NEXT = 6, 9, 14
"""Steps: from the first one on nothing is written; in the second one a stage is lost, and in the third one its neighbour."""
HELD_S = 60.0
SLOWLY_S = 0.5
"""For each record: five a step make more than a fence waits for."""
FIRST = 1
"""The incarnation that ends with the first loss."""
AGREED_BYTES = PIPELINE_STEPS * (4 + STAGES) * 8


def fault(rank: int, step: int, phase: str, micro_batch: int | None = None) -> ft.FailAt:
    return ft.FailAt(rank=rank, step=step, phase=phase, micro_batch=micro_batch)


def is_exact(result: ft.Result) -> bool:
    return {(r.strategy, r.guarantee, r.redone) for r in result.recoveries} == {(Strategy.LOGGING, Guarantee.EXACT, 0)}


# ---------------------------------------------------------------- a tail that is not written


class Held(Toy):
    """Before anybody is lost, its workers write nothing of what they log in later steps; once they are fenced they do, slowly.

    Args:
        seconds: for each record.
    """

    def __init__(self, notes: Path, seconds: float) -> None:
        super().__init__()
        self.notes, self.seconds = notes, seconds
        self.driver = os.getpid()

    def model(self, stage: int) -> torch.nn.Module:
        if os.getpid() != self.driver:  # where the model is built as well, to look at it
            hold_back(self.notes, self.seconds)
        return super().model(stage)


def hold_back(notes: Path, seconds: float) -> None:
    """In this process, from now on. At its first flush, which is that of a fence, a note says what waits to be written, and
    whether it then was in time."""
    write, flush = LogFiles.write, TensorLog.flush
    if write.__name__ != "write":
        return  # the model is built once more
    let_go = threading.Event()

    def held_write(self: LogFiles, record: Record) -> None:
        if record.incarnation == FIRST and record.key.step >= HELD_FROM:
            let_go.wait(HELD_S)
            time.sleep(seconds)
        write(self, record)

    def noted_flush(self: TensorLog, limit: float) -> bool:
        if let_go.is_set():
            return flush(self, limit)
        records = [item for item in list(self._queue) if isinstance(item, Record)]
        keys = [record.key for record in records if record.incarnation == FIRST]
        let_go.set()
        in_time = flush(self, limit)
        waiting = [(key.step, key.kind, key.sender, key.receiver) for key in keys]
        (notes / f"tail-{os.getpid()}.json").write_text(json.dumps({"waiting": waiting, "in_time": in_time}))
        return in_time

    LogFiles.write, TensorLog.flush = held_write, noted_flush


def tails(notes: Path, lost: int) -> dict[int, bool]:
    """Of the neighbours of the stage that was lost first: whether they had written in time what it needs, of which nothing was
    written when they were fenced."""
    found = {}
    for note in notes.glob("tail-*.json"):
        tail = json.loads(note.read_text())
        needed = [(step, sender) for step, kind, sender, receiver in tail["waiting"] if receiver == lost and kind != "agreed"]
        if needed:  # the one record that is missing here was about to be written
            assert {step for step, _ in needed} >= set(range(HELD_FROM + 1, LOST_AT)), tail["waiting"]
            found[needed[0][1]] = tail["in_time"]
    return found


def test_the_neighbours_of_a_lost_stage_had_not_written_what_it_needs(undisturbed_pipeline: ft.Result, tmp_path: Path) -> None:
    """They do when they are fenced. What the lost one had not written either its replacement logs in its place: the next one
    that is lost needs it."""
    faults = [fault(1, LOST_AT, "forward", 2), fault(2, LOST_NEXT, "forward", 2)]
    result = pipeline(tmp_path, "run", task=Held(tmp_path, 0), faults=faults, checkpoints=NONE_YET)
    assert tails(tmp_path, 1) == {0: True, 2: True}
    assert result.digest == undisturbed_pipeline.digest
    assert promise_kept(result) == []
    assert is_exact(result)
    assert [recovery.replayed for recovery in result.recoveries] == [LOST_AT, LOST_NEXT]


def test_the_neighbours_of_a_lost_stage_still_write_while_it_is_replayed(
    undisturbed_pipeline: ft.Result, tmp_path: Path
) -> None:
    """Their fence does not wait for all of it."""
    task, faults = Held(tmp_path, SLOWLY_S), [fault(1, LOST_AT, "forward", 2)]
    result = pipeline(tmp_path, "run", task=task, faults=faults, checkpoints=NONE_YET)
    assert tails(tmp_path, 1) == {0: False, 2: False}
    assert result.digest == undisturbed_pipeline.digest
    assert promise_kept(result) == []
    assert is_exact(result)
    assert [recovery.replayed for recovery in result.recoveries] == [LOST_AT]


# ---------------------------------------------------------------- other ways to write it


class Repeated(torch.nn.Module):
    """What it passes on can be compressed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat(1, 16)


class Repeating(Toy):
    def model(self, stage: int) -> torch.nn.Module:
        first = [torch.nn.Linear(16, 64), torch.nn.Dropout(0.1), Repeated()]
        middle = [torch.nn.Linear(1024, 64), torch.nn.Tanh(), torch.nn.Dropout(0.1), Repeated()]
        return torch.nn.Sequential(*first, *middle, torch.nn.Linear(1024, 4))


REPEATING = {"task": Repeating(), "split": (3, 7), "checkpoints": NONE_YET}


@pytest.fixture(scope="module")
def calm(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> ft.Result:
    return pipeline(tmp_path_factory.mktemp("calm"), "run", **REPEATING)


def written(result: ft.Result) -> tuple[list[float], int]:
    """By those who were left when a stage was lost first: how large each one's files were, relative to what is in them; and how
    much all of them wrote in bubbles."""
    then = [e for e in events(Path(result.path), "LogWritten") if e["incarnation"] == FIRST]
    assert len(then) == STAGES - 1
    return [e["file_bytes"] / e["payload_bytes"] for e in then], sum(e["idle_bytes"] for e in then)


LITTLE: dict[str, Any] = {"memory_bytes": 2**14}
"""So little memory that a log writes while training goes on, not only when somebody is lost."""
HOW = {"plain": {}, "lz4": {"compression": "lz4"}, "zstd": {"compression": "zstd"}, "synchronous": {"synchronous": True}}


@pytest.mark.parametrize("how", HOW)
def test_a_stage_is_replayed_however_the_log_is_written(calm: ft.Result, tmp_path: Path, how: str) -> None:
    faults = [fault(1, 7, "forward", 2), fault(2, 14, "backward_pass", 1)]
    result = pipeline(tmp_path, "run", **REPEATING, log=ft.LogConfig(**LITTLE, **HOW[how]), faults=faults)
    assert result.digest == calm.digest
    assert promise_kept(result) == []
    assert is_exact(result)
    assert [recovery.replayed for recovery in result.recoveries] == [7, 14]
    sizes, in_bubbles = written(result)
    if "compression" in HOW[how]:
        assert min(sizes) < 0.75, "activations repeat themselves; gradients do not"
    else:
        assert min(sizes) > 1, "all bytes, and some more"
    assert (in_bubbles == 0) == (how == "synchronous"), "who writes at once waits for no bubble"


# ---------------------------------------------------------------- trimmed


def oldest(run: Path) -> int:
    """The step with which the oldest file of the log begins; -1 if there is none."""
    names = [NAME.fullmatch(path.name) for path in (run / "logs").glob("*.arrow")]
    return min((int(name["step"]) for name in names if name is not None), default=-1)


@contextmanager
def killed_once_trimmed(run: Path, rank: int, pace: Path) -> Iterator[list[tuple[int, int, int]]]:
    """Twice it is waited for the log to lose its oldest files, each time for another checkpoint; then this rank's worker is
    killed.

    Gives, of each time: a step that none of them begins after, that of the newest durable checkpoint, how many steps were done.
    """
    seen: list[tuple[int, int, int]] = []

    def look_and_strike() -> None:
        wait_for(lambda: oldest(run) == 0, "a log that begins with step 0")
        newest = 0
        for _ in range(2):
            wait_for(lambda newest=newest: oldest(run) > newest, f"step {newest} is trimmed")
            began, newest = newest, max(e["step"] for e in events(run, "CheckpointCommitted"))
            seen.append((began, newest, steps_done(run)))
        wait_for(lambda: steps_done(run) > newest, "a step to replay")
        status = account(run.name)
        kill(status, status["world"][rank])
        pace.unlink()

    striker = threading.Thread(target=look_and_strike, daemon=True)
    striker.start()
    yield seen
    striker.join(10)
    assert not striker.is_alive()


def test_a_log_is_trimmed_in_mid_run_and_a_stage_replayed_from_what_is_left(
    undisturbed_pipeline: ft.Result, tmp_path: Path
) -> None:
    pace = tmp_path / "pace"
    pace.touch()
    how = {"task": Leisurely(pace), "checkpoints": ft.CheckpointConfig(every=3), "num_spares": 1, "log": ft.LogConfig(**LITTLE)}
    with killed_once_trimmed(tmp_path / "run", 1, pace) as seen:
        result = pipeline(tmp_path, "run", **how)
    (_, _, then), (_, newest, later) = seen
    assert all(began < durable for began, durable, _ in seen), "a checkpoint has made them needless"
    assert then < later < PIPELINE_STEPS, "training went on meanwhile"
    assert result.digest == undisturbed_pipeline.digest
    assert promise_kept(result) == []
    assert is_exact(result)
    (recovery,) = result.recoveries
    assert 0 < recovery.replayed <= recovery.step - newest, "no further back than the checkpoint that was seen last"


# ---------------------------------------------------------------- none


class Block(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(torch.nn.Dropout(0.1), torch.nn.Linear(16, 16), torch.nn.Tanh())


class Everything(Toy):
    """Dropout in each part, and weights that the first one shares with the last one."""

    def model(self, stage: int) -> torch.nn.Module:
        first, last = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
        last.weight = first.weight
        return torch.nn.Sequential(first, *(Block() for _ in range(4)), last)


SCHEDULES = [("1f1b", 1), ("gpipe", 1), ("zero_bubble", 1), ("1f1b", 2), ("gpipe", 2), ("zero_bubble", 2)]


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_logging_changes_no_bit_of_any_schedule(cluster: Any, tmp_path: Path, schedule: str, chunks: int) -> None:
    split = (2, 4) if chunks == 1 else (1, 2, 3, 4, 5)
    how = {"task": Everything(), "schedule": schedule, "num_pp_chunks": chunks, "split": split, "max_grad_norm": 0.5}
    on, off = (pipeline(tmp_path, f"log-{log}", **how, log=ft.LogConfig(enabled=log)) for log in (True, False))
    assert on.digest == off.digest
    assert min(e["payload_bytes"] for e in events(Path(on.path), "LogWritten")) > AGREED_BYTES, "all stages log what they send"
    assert events(Path(off.path), "LogWritten") == []
    assert (promise_kept(on), promise_kept(off)) == ([], [])
