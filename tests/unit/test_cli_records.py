"""What the commands print that read a run's records."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from raytrain_ft.cli.main import main
from raytrain_ft.drill.measure import recoveries_of
from raytrain_ft.follow import recorded
from raytrain_ft.policy.accounts import accounts
from raytrain_ft.policy.sampling import Position, Sampling, digest_of_ids, next_batch, sample_ids, share
from raytrain_ft.policy.strategy import Recovery
from raytrain_ft.runtime.event_log import read_records
from raytrain_ft.runtime.report_data import gather

RUNS = Path(__file__).parent / "recorded"
Record = dict[str, Any]


def told(command: str, run: Path) -> Result:
    """By a command that ends as it should, with whatever exit code."""
    answer = CliRunner().invoke(main, [command, str(run)])
    assert answer.exception is None or isinstance(answer.exception, SystemExit), answer.exception
    return answer


def table(printed: str) -> dict[str, str]:
    """The rows of a table with two columns."""
    rows = [line.split("│") for line in printed.splitlines() if line.startswith("│")]
    return {name.strip(): value.strip() for _, name, value, _ in rows}


def write(run: Path, records: list[Record]) -> None:
    lines = [json.dumps(record, separators=(",", ":")) + "\n" for record in records]  # as the event log does
    (run / "events.jsonl").write_text("".join(lines))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three workers, eight losses, 90 steps of 48 samples out of 4,000; an epoch has 83."""
    return Path(shutil.copytree(RUNS / "replication", tmp_path / "run"))


def test_what_a_record_says_does_not_steer_the_terminal(tmp_path: Path) -> None:
    """Who looks into a run of others, say."""
    escape = "\x1b]52;c;aGVsbG8=\x1b\\"
    recovery = Recovery(escape, escape, lost=[escape], reason=escape, fenced=1.0, reconciled=1.0, filled=1.0, resumed=1.0)
    records = [
        {"at": 1.0, "event": "WorkerLost", "member": escape, "cause": f"{escape}[red]red[/red]"},
        {"at": 2.0, "event": f"[/x]{escape}"},
        {"at": 3.0, "event": "Recovery", **asdict(recovery)},
    ]
    write(tmp_path, records)
    for command in ("events", "recoveries", "audit"):
        printed = told(command, tmp_path).output
        assert printed
        assert "\x1b" not in printed
    assert "[/x]?]52;c;aGVsbG8=?" in told("events", tmp_path).output


def test_every_loss_is_printed_with_its_cause(tmp_path: Path) -> None:
    """Also one by a deadline, of which the log has only that this passed."""
    records = [
        {"at": 1.0, "event": "WorkerStarted", "member": "w0"},
        {"at": 2.0, "event": "WorkerLost", "member": "w1", "cause": "the process died"},
        {"at": 2.1, "event": "CauseFound", "lost": "w1", "cause": "killed for memory"},
        {"at": 3.0, "event": "TimerFired", "timer": "fence", "incarnation": 2},
        {"at": 4.0, "event": "TimerFired", "timer": "replacement", "incarnation": 2},
        {"at": 5.0, "event": "TaskFailed", "member": "w2", "cause": None, "message": "ZeroDivisionError"},
        {"at": 6.0, "event": "RunFailed", "state": "ERRORED", "error": ["TaskError", "rank 1: it isn't there"]},
    ]
    write(tmp_path, records)
    printed = CliRunner().invoke(main, ["events", str(tmp_path)]).output.splitlines()
    assert [line.split() for line in printed[:6]] == [
        ["1", "CauseFound"],
        ["1", "RunFailed"],
        ["1", "TaskFailed"],
        ["2", "TimerFired"],
        ["1", "WorkerLost"],
        ["1", "WorkerStarted"],
    ]
    assert [" ".join(line.split()) for line in printed[6:]] == [
        "2.00 s WorkerLost w1 the process died",
        "2.10 s CauseFound w1 killed for memory",
        "3.00 s TimerFired fence",
        "5.00 s TaskFailed w2 ZeroDivisionError",
        "6.00 s RunFailed TaskError: rank 1: it isn't there",
    ]


@pytest.mark.parametrize("command", ["audit", "recoveries", "events"])
def test_a_directory_that_is_no_runs_is_refused(command: str, tmp_path: Path) -> None:
    answer = told(command, tmp_path)
    assert answer.exit_code == 1
    assert "has no events.jsonl: give the directory of a run" in answer.output


# ---------------------------------------------------------------- audit


@pytest.mark.parametrize(
    ("name", "steps", "epochs", "samples"),
    [("replication", "90", "1", "4,320"), ("checkpoint", "105", "0", "3,780"), ("logging", "105", "26", "1,680")],
)
def test_the_audit_of_a_real_run_proves_it(name: str, steps: str, epochs: str, samples: str, tmp_path: Path) -> None:
    answer = told("audit", Path(shutil.copytree(RUNS / name, tmp_path / name)))
    assert answer.exit_code == 0
    assert table(answer.output) == {
        "run finished": "yes",
        "steps audited": steps,
        "complete epochs": epochs,
        "samples used exactly once": samples,
        "samples listed as lost": "0",
        "violations": "0",
    }
    assert answer.output.splitlines()[-1] == "exactly once: proven"


def commits(records: list[Record], step: int) -> list[Record]:
    """What was told of this step, and of others with it."""
    return [r for r in records if r["event"] == "StepsCommitted" and r["first_step"] <= step < r["stop_step"]]


def _start_later(records: list[Record]) -> None:
    commits(records, 89)[-1]["start"] += 48


def _tell_twice(records: list[Record]) -> None:
    records.append(commits(records, 89)[-1])


def _tell_nothing(records: list[Record]) -> None:
    for commit in commits(records, 10):
        records.remove(commit)


def _draw_again(records: list[Record]) -> None:
    """The last batch is the one before it; the record of each rank agrees with itself."""
    names = ("dataset_size", "global_batch_size", "seed", "shuffle", "drop_last")
    sampling = Sampling(**{name: records[0]["details"][name] for name in names})
    for commit in commits(records, 89):
        commit["start"] -= 48
        batch, _ = next_batch(sampling, Position(commit["epoch"], commit["start"]))
        mine = share(batch, commit["rank"], commit["world_size"])
        commit["ids_digest"] = digest_of_ids([sample_ids(sampling, batch.epoch, mine)])


def _lose(records: list[Record], times: int = 1) -> None:
    loss = {"event": "SamplesLost", "step": 89, "incarnation": 9, "epoch": 1, "start": 288, "stop": 289, "why": "lossy"}
    records.extend([loss] * times)


SPOILED: dict[str, tuple[Callable[[list[Record]], None], list[str]]] = {
    "a batch begins later": (_start_later, ["rank 1 (w10) of incarnation 9, steps [89, 90): it drew other samples: digest"]),
    "a step told twice": (_tell_twice, ["rank 1 (w10) of incarnation 9", "step 89 was committed before by the same rank"]),
    "samples are missing": (_tell_nothing, ["step 10: no commit of it stands", "samples neither drawn nor listed as lost, at"]),
    "samples are used twice": (_draw_again, ["step 89 drew", "48 samples drawn more than once, at positions [240, 288)"]),
    "a sample is lost twice": (
        lambda records: _lose(records, 2),
        ["epoch 1: 1 samples listed as lost more than once, at positions [288, 289)"],
    ),
}


@pytest.mark.parametrize("what", SPOILED)
def test_the_audit_of_a_spoiled_run_names_the_violation(what: str, run: Path) -> None:
    spoil, words = SPOILED[what]
    records = read_records(run / "events.jsonl")
    spoil(records)
    write(run, records)
    answer = told("audit", run)
    assert answer.exit_code == 1
    assert int(table(answer.output)["violations"]) == sum(line.startswith("  ") for line in answer.output.splitlines()) > 0
    for word in words:
        assert word in answer.output
    assert answer.output.splitlines()[-1] == "exactly once: NOT proven"


def test_a_sample_that_is_listed_as_lost_is_counted_and_is_no_violation(run: Path) -> None:
    records = read_records(run / "events.jsonl")
    _lose(records)
    write(run, records)
    answer = told("audit", run)
    found = table(answer.output)
    assert (answer.exit_code, found["violations"]) == (0, "0")
    assert (found["samples used exactly once"], found["samples listed as lost"]) == ("4,319", "1")


def test_a_log_that_breaks_off_proves_what_it_holds(run: Path) -> None:
    text = (run / "events.jsonl").read_text()
    (run / "events.jsonl").write_text(text[: text.index('"RunFinished"') + 5])
    answer = told("audit", run)
    found = table(answer.output)
    assert (answer.exit_code, found["run finished"], found["steps audited"]) == (0, "no", "90")


# ---------------------------------------------------------------- recoveries


@pytest.mark.parametrize(
    ("name", "number", "words"),
    [
        ("replication", 8, ["noticed by ray; lost w7; workers 3 -> 3", "replication: nobody had updated anything in step 72"]),
        ("checkpoint", 3, ["everybody goes back to step 20 (step-000000020-e1-i1), 11 steps or a few more are done again"]),
        ("logging", 3, ["Connection closed by peer [192.0.2.2]:7320; then the process died", "noticed by w5; lost w2"]),
    ],
)
def test_every_recovery_of_a_real_run_is_told(name: str, number: int, words: list[str], tmp_path: Path) -> None:
    """Two of these logs are older than some of what a recovery tells now."""
    answer = told("recoveries", Path(shutil.copytree(RUNS / name, tmp_path / name)))
    assert answer.exit_code == 0
    assert answer.output.splitlines()[-1] == f"{number} recoveries"
    for word in ("  recovery: ", "kept: exact (every bit as without the failure)", "resumed +"):
        assert answer.output.count(word) == number
    for word in words:
        assert word in answer.output


def test_a_recovery_that_did_not_end_is_told_too(run: Path) -> None:
    records = read_records(run / "events.jsonl")
    of_all = [record for record in records if record["event"] == "Recovery"]
    of_all[-1].update(resumed=None, guarantee="lossy", samples_lost=16)
    write(run, records)
    answer = told("recoveries", run)
    assert answer.exit_code == 0
    assert answer.output.count("resumed +") == len(of_all) - 1
    assert "; 16 samples lost\n" in answer.output
    assert answer.output.count("kept: lossy (samples lost, or parameters updated twice)") == 1


def test_recoveries_of_earlier_launches_are_told_too(run: Path) -> None:
    """Else nobody would learn that the bits were not kept, in a run that was submitted again since."""
    (run / "events.jsonl").rename(run / "events-001.jsonl")
    write(run, [{"at": 0.0, "event": "RunStarted", "run_id": "again"}])
    lines = told("recoveries", run).output.splitlines()
    assert (lines[0], lines[-2], lines[-1]) == (
        "launch 1 of 2 (events-001.jsonl)",
        "launch 2 of 2 (events.jsonl)",
        "8 recoveries in 2 launches",
    )


def test_why_a_worker_died_is_told_though_it_became_known_after_the_recovery(run: Path) -> None:
    """By all who read the records, as in the account that the supervisor gives."""
    records = read_records(run / "events.jsonl")
    number = next(index for index, record in enumerate(records) if record["event"] == "Recovery")
    recovery, why = records[number], "the process was killed, perhaps for memory"
    (lost,) = recovery["lost"]
    records.insert(number + 1, {"event": "CauseFound", "at": recovery["resumed"] + 0.1, "lost": lost, "cause": why})
    write(run, records)
    words = f"{recovery['cause']}; {lost}: {why}"
    assert words in " ".join(told("recoveries", run).output.split())
    assert f"CauseFound {lost} {why}" in " ".join(told("events", run).output.split())
    assert gather(records).recoveries[0].cause == words
    assert recoveries_of(records)[0].cause == words
    account = recorded(run)
    assert account is not None
    assert account["recoveries"][0]["cause"] == words
    assert [one["cause"] for one in account["recoveries"][1:]] == [
        record["cause"] for record in records if record["event"] == "Recovery"
    ][1:]


def test_a_cause_is_added_once_and_to_a_recovery_of_its_own_launch() -> None:
    recovery: Record = {"event": "Recovery", "lost": ["w1"], "cause": "it died"}
    why: Record = {"event": "CauseFound", "lost": "w1"}
    told = [recovery, {"event": "RunStarted"}, why | {"cause": "x"}, recovery, why | {"cause": "y"}, why | {"cause": "y"}]
    assert [one["cause"] for one in accounts(told)] == ["it died", "it died; w1: y"]
    for odd in (recovery | {"lost": 5}, recovery | {"cause": None}, {"event": "Recovery"}):
        assert accounts([odd, why | {"cause": "y"}, why]) == [odd]


@pytest.mark.parametrize(("number", "words"), [(0, "0 recoveries"), (1, "1 recovery"), (2, "2 recoveries")])
def test_how_many_recoveries_there_were_is_said_last(run: Path, number: int, words: str) -> None:
    records = read_records(run / "events.jsonl")
    of_all = [record for record in records if record["event"] == "Recovery"]
    write(run, [record for record in records if record not in of_all[number:]])
    answer = told("recoveries", run)
    assert (answer.exit_code, answer.output.splitlines()[-1]) == (0, words)
