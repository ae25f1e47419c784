"""The history checker finds no fault with real logs, and with each that was spoiled in one place the promise that it breaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from raytrain_ft.policy.history import VOICES, check
from raytrain_ft.policy.strategy import Recovery, Strategy
from raytrain_ft.runtime.event_log import read_records

RUNS = Path(__file__).parent / "recorded"
Record = dict[str, Any]


@pytest.fixture
def records() -> list[Record]:
    """Three workers, eight losses, copies from replicas."""
    return read_records(RUNS / "replication" / "events.jsonl")


def of(records: list[Record], event: str) -> list[Record]:
    return [record for record in records if record["event"] == event]


@pytest.mark.parametrize("run", ["replication", "checkpoint", "logging"])
def test_a_real_log_is_accepted(run: str) -> None:
    assert check(read_records(RUNS / run / "events.jsonl")) == []


def _lists_a_sample_as_lost(records: list[Record]) -> None:
    commit = of(records, "StepsCommitted")[-1]
    where = {"step": commit["first_step"], "epoch": commit["epoch"], "start": commit["start"], "stop": commit["start"] + 1}
    for _ in range(2):
        records.append({"event": "SamplesLost", "incarnation": commit["incarnation"], "why": "lossy", **where})


SPOILED: dict[str, tuple[str, Callable[[list[Record]], Any]]] = {
    "a rank drew other samples": ("I1", lambda r: of(r, "StepsCommitted")[-1].update(ids_digest="0")),
    "a sample was lost twice": ("I1", _lists_a_sample_as_lost),
    "a replacement was filled with other bits": ("I2", lambda r: of(r, "Filled")[-1].update(digests=["0"])),
    "a replica ended with other bits": ("I2", lambda r: of(r, "Completed")[0].update(digest="0")),
    "a step's loss is another for another rank": ("I3", lambda r: of(r, "StepsCommitted")[4].update(loss=0.5)),
    "everybody went back, and nobody looked": ("I4", lambda r: of(r, "Recovery")[2].update(strategy="checkpoint")),
    "the phases of a recovery are not in order": ("I6", lambda r: of(r, "Recovery")[2].update(fenced=0.0)),
    "a recovery took too long": ("I6", lambda r: of(r, "Recovery")[3].update(resumed=1000.0)),
    "a recovery did not end, and the run did": ("I6", lambda r: of(r, "Recovery")[3].update(resumed=None)),
    "the last recovery did not end, and the run did": ("I6", lambda r: of(r, "Recovery")[-1].update(resumed=None)),
    "a run without an end": ("I6", lambda r: r.remove(of(r, "RunFinished")[0])),
    "a run with two ends": ("I6", lambda r: r.append({"event": "RunFailed", "error": ["RecoveryError", "no nodes"]})),
    "a loss without a cause": ("I8", lambda r: of(r, "WorkerLost")[2].update(cause="")),
    "a recovery without a cause": ("I8", lambda r: of(r, "Recovery")[2].update(cause="")),
    "a failure without a reason": ("I8", lambda r: r.append({"event": "RunFailed", "error": ["RecoveryError", ""]})),
}


@pytest.mark.parametrize("what", SPOILED)
def test_a_spoiled_log_is_not(records: list[Record], what: str) -> None:
    promise, spoil = SPOILED[what]
    spoil(records)
    assert any(violation.startswith(promise) for violation in check(records)), what


def test_a_difference_that_was_seen_before_anybody_trained_is_none(records: list[Record]) -> None:
    filled = of(records, "Filled")[-1]
    filled["digests"] = ["0"]
    records.remove(next(r for r in of(records, "Resumed") if r["incarnation"] == filled["incarnation"]))
    assert [violation for violation in check(records) if violation.startswith("I2")] == []


GONE_BACK: dict[str, Callable[[list[Record]], Any]] = {
    "what was committed is not found": lambda r: of(r, "CheckpointsFound")[-1].update(stored=[]),
    "only an older one is found": lambda r: of(r, "CheckpointsFound")[-1]["stored"].pop(0),
    "it went back further than it needed to": lambda r: of(r, "Recovery")[-1].update(step=40),
    "it went back less far than it could": lambda r: of(r, "Recovery")[-1].update(step=62),
}


@pytest.mark.parametrize("what", GONE_BACK)
def test_everybody_goes_back_to_the_newest_checkpoint(what: str) -> None:
    records = read_records(RUNS / "checkpoint" / "events.jsonl")
    GONE_BACK[what](records)
    assert any(violation.startswith("I4") for violation in check(records))


def test_what_could_not_be_loaded_is_no_place_to_go_back_to() -> None:
    records = read_records(RUNS / "checkpoint" / "events.jsonl")
    newest = of(records, "CheckpointsFound")[-1]["stored"][0]["name"]
    at = records.index(of(records, "CheckpointsFound")[-1]) + 1
    records.insert(at, {"event": "CheckpointRejected", "member": "w0", "incarnation": 4, "name": newest, "reason": "damaged"})
    assert any(violation.startswith("I4") for violation in check(records)), "it went there all the same"
    of(records, "Recovery")[-1].update(step=40)
    assert not [violation for violation in check(records) if violation.startswith("I4")]


@pytest.mark.parametrize(("step", "is_right"), [(50, True), (10, False), (100, False)])
def test_a_run_that_cannot_load_what_it_was_to_begin_from_goes_back_to_the_one_before(step: int, is_right: bool) -> None:
    """Nobody looks for others: it knows what there is."""
    stored = [{"name": f"at {at}", "step": at, "incarnation": 5} for at in (100, 50, 10)]
    recovery = Recovery("at 100 cannot be loaded", "w0", incarnation=9, attempts=1, strategy=Strategy.CHECKPOINT, step=step)
    recovery.resumed = 1.0
    records: list[Record] = [
        {"event": "RunStarted", "incarnation": 7, "stored": stored},
        {"event": "CheckpointRejected", "member": "w0", "incarnation": 8, "name": "at 100", "reason": "damaged"},
        {"event": "Resumed", "incarnation": 9, "step": step, "world_size": 3},
        {"event": "Recovery", **asdict(recovery)},
    ]
    assert (not [violation for violation in check(records) if violation.startswith("I4")]) == is_right
    records[2]["incarnation"] = 8  # they had trained: then somebody has to look
    assert [violation for violation in check(records) if "nobody had looked" in violation]


@pytest.mark.parametrize(("incarnation", "is_right"), [(1, True), (2, True), (3, False)])
def test_what_was_stored_late_by_who_had_gone_back_is_no_place_to_go_back_to(incarnation: int, is_right: bool) -> None:
    """By incarnations before the one in which everybody went back to step 40; that one itself went on to step 60 and more."""
    records = read_records(RUNS / "checkpoint" / "events.jsonl")
    stored = of(records, "CheckpointsFound")[-1]["stored"]
    stored.insert(0, {"name": "belated", "step": 65, "incarnation": incarnation})
    assert (not [violation for violation in check(records) if violation.startswith("I4")]) == is_right


def test_nor_is_it_if_that_recovery_was_interrupted_once_more() -> None:
    """Its account has what its last attempt did."""
    records = read_records(RUNS / "checkpoint" / "events.jsonl")
    of(records, "Recovery")[1].update(strategy="lossy", step=41, completes=True)
    of(records, "CheckpointsFound")[-1]["stored"].insert(0, {"name": "belated", "step": 65, "incarnation": 2})
    assert not [violation for violation in check(records) if violation.startswith("I4")]


def test_what_everybody_had_gone_back_from_in_an_earlier_run_is_none_either() -> None:
    records = read_records(RUNS / "checkpoint" / "events.jsonl")
    of(records, "CheckpointsFound")[0]["stored"].insert(0, {"name": "belated", "step": 25, "incarnation": 0 + 1})
    assert [violation for violation in check(records) if violation.startswith("I4")]
    of(records, "RunStarted")[0]["returns"] = [{"incarnation": 2, "step": 20}]
    assert not [violation for violation in check(records) if violation.startswith("I4")]


def test_what_could_not_be_loaded_later_was_a_place_to_go_back_to() -> None:
    records = read_records(RUNS / "checkpoint" / "events.jsonl")
    newest = of(records, "CheckpointsFound")[-1]["stored"][0]["name"]
    later = of(records, "Recovery")[-1]["incarnation"] + 1
    at = records.index(of(records, "Recovery")[-1]) + 1
    about = {"member": "w0", "incarnation": later, "name": newest, "reason": "damaged"}
    records.insert(at, {"event": "CheckpointRejected", **about})
    assert not [violation for violation in check(records) if violation.startswith("I4")]


def test_of_a_step_that_was_stored_twice_the_later_one_is_found() -> None:
    """The earlier one is of a training that was given up, and may be gone."""
    records = read_records(RUNS / "checkpoint" / "events.jsonl")
    found = of(records, "CheckpointsFound")[-1]["stored"][0]["name"]
    newest = next(record for record in of(records, "CheckpointCommitted") if record["name"] == found)
    given_up = newest | {"name": f"{newest['name']}-of-before", "incarnation": newest["incarnation"] - 1}
    records.insert(records.index(newest), given_up)
    assert not [violation for violation in check(records) if violation.startswith("I4")]


@pytest.mark.parametrize(("step", "accepted"), [(0, True), (-1, False)], ids=["newer", "older"])
def test_what_has_taken_the_place_of_the_newest_may_be_untold(step: int, accepted: bool) -> None:
    """Its writer died between the commit and the telling."""
    records = read_records(RUNS / "checkpoint" / "events.jsonl")
    found = of(records, "CheckpointsFound")[-1]
    newest = found["stored"][0]
    found["stored"] = [{"name": "step-of-who-died", "step": newest["step"] + step}]
    hidden = [violation for violation in check(records) if "is not found" in violation]
    assert bool(hidden) != accepted


def test_where_a_recovery_was_not_exact_losses_may_differ(records: list[Record]) -> None:
    of(records, "StepsCommitted")[4].update(loss=0.5)
    of(records, "Recovery")[0].update(guarantee="rounding")
    assert not [violation for violation in check(records) if violation.startswith("I3")]


@pytest.mark.parametrize("event", VOICES)
def test_who_was_lost_has_no_say_afterwards(records: list[Record], event: str) -> None:
    lost = of(records, "WorkerLost")[0]
    last = of(records, "Resumed")[-1]["incarnation"]
    late = {**of(records, "StepsCommitted")[-1], **of(records, "Completed")[-1], **of(records, "Filled")[-1]}
    late |= {"name": "step-000000105-e1-i9", "step": 105}
    records.append(late | {"event": event, "member": lost["member"], "incarnation": last})
    (found,) = [violation for violation in check(records) if violation.startswith("I5")]
    assert lost["member"] in found


def test_what_a_worker_did_before_it_was_lost_may_come_late(records: list[Record]) -> None:
    lost = of(records, "WorkerLost")[0]["member"]
    commit = next(record for record in records if record["event"] == "StepsCommitted" and record["member"] == lost)
    records.remove(commit)
    records.append(commit)
    assert check(records) == []


def test_a_run_that_failed_may_have_failed_in_a_recovery(records: list[Record]) -> None:
    records.remove(of(records, "RunFinished")[0])
    of(records, "Recovery")[-1].update(resumed=None)
    records.append({"event": "RunFailed", "error": ["RecoveryError", "no nodes"]})
    assert not [violation for violation in check(records) if violation.startswith("I6")]
