"""A run that has ended, as its records tell it: the same outcome as its driver got, without a cluster."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from click.testing import CliRunner
from pages import ROOT
from ray._private.utils import check_version_info
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayError, RaySystemError, RayTaskError
from store import OWNER, own

import raytrain_ft as ft
from raytrain_ft import follow
from raytrain_ft.attaching import find
from raytrain_ft.cli.main import main
from raytrain_ft.errors import AbortedError, ConfigError, TrainingFailedError
from raytrain_ft.follow import ANSWER_S, recorded, watch
from raytrain_ft.policy import messages as m
from raytrain_ft.progress import Display
from raytrain_ft.runtime.event_log import EventLog
from raytrain_ft.runtime.placement import knock
from raytrain_ft.storage import lock
from raytrain_ft.storage.filesystem import LocalStorage


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has a connection to Ray, so it seems."""
    monkeypatch.setattr("raytrain_ft.follow.ray.is_initialized", lambda: True)


def records(directory: Path, **end: object) -> Path:
    """A run of 30 steps that has come to step 20; without an end, if none is given."""
    log = EventLog(directory / "events.jsonl")
    log.append(m.RunStarted(run_id="r", details={"name": "digits", "max_steps": 30, "checkpoints": "s3://runs?region=x"}))
    where = {"rank": 0, "world_size": 1, "incarnation": 1, "epoch": 0, "start": 0, "ids_digest": ""}
    log.append(m.StepsCommitted(at=1.0, member="w0", first_step=0, stop_step=20, loss=0.25, **where))
    times = {"snapshot_s": 0.0, "stall_s": 0.0, "persist_s": 0.0}
    log.append(m.CheckpointCommitted(at=2.0, member="w0", incarnation=1, step=20, name="step-20", bytes=1, **times))
    if end:
        log.note(str(end.pop("event")), at=3.0, **end)
    log.close()
    return directory


def test_attach_to_a_run_that_has_finished(tmp_path: Path) -> None:
    run = records(tmp_path, event="RunFinished", steps=30, digest="abc", path="final.arrow")
    result = ft.attach(run)
    assert (result.digest, result.metrics, result.path) == ("abc", {"loss": 0.25, "step": 30}, str(tmp_path))
    assert result.checkpoint == "s3://runs/step-20?region=x"
    assert result.final_state == "final.arrow"
    staged = tmp_path / "stages"
    staged.mkdir()
    records(staged, event="RunFinished", steps=30, digest="abc", path=str(staged / "final-stage-2.arrow"))
    (staged / "final.arrow").write_text("of an earlier run without stages")
    assert ft.attach(staged).final_state == str(staged / "final-stage-0.arrow")
    said = CliRunner().invoke(main, ["attach", str(run)])
    assert said.exit_code == 0
    assert "finished: step 30, loss 0.2500, 0 recoveries, digest abc" in said.output


def test_attach_to_a_run_that_was_ended(tmp_path: Path) -> None:
    run = records(
        tmp_path, event="RunFailed", state="ABORTED", error=["AbortedError", "Ctrl-C; its newest checkpoint is step-20"]
    )
    with pytest.raises(AbortedError, match="newest checkpoint is step-20"):
        ft.attach(run)
    said = CliRunner().invoke(main, ["attach", str(run)])
    assert said.exit_code == 1
    assert "AbortedError: Ctrl-C" in said.output
    assert CliRunner().invoke(main, ["stop", str(run)]).exit_code == 0, "it has ended, as was wanted"


def test_a_run_that_had_to_be_killed_was_not_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its supervisor does not answer any more, and wrote nothing down."""
    records(tmp_path)
    account = {"name": "digits", "run_id": "r", "directory": str(tmp_path), "state": "RUNNING", "failure": None}
    account |= {"step": 20, "max_steps": 30, "stop_timeout": 0.0, "recoveries": [], "loss": 1.0, "result": {}, "seconds": 9.0}
    account["checkpoint"] = None
    monkeypatch.setattr("raytrain_ft.attaching.find", lambda run: (object(), account))
    for name in ("abort", "clean_up"):
        monkeypatch.setattr(f"raytrain_ft.attaching.{name}", lambda *about: None)
    said = CliRunner().invoke(main, ["stop", str(tmp_path)])
    assert said.exit_code == 1
    assert "TrainingFailedError: the run 'digits' did not end by itself in time: it was killed at about step 20" in said.output


def test_a_run_that_was_at_its_end_when_it_began_has_the_loss_of_its_checkpoint(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    stored = m.Stored("step-20", 20, 1, 2, 0.25), m.Stored("step-10", 10)
    log.append(m.RunStarted(run_id="r", stored=stored, details={"name": "digits", "max_steps": 20}))
    log.note("RunFinished", at=3.0, steps=20, digest="d", path="final.arrow")
    log.close()
    assert ft.attach(tmp_path).metrics == {"loss": 0.25, "step": 20}


def test_a_run_without_an_end_is_no_outcome(tmp_path: Path) -> None:
    assert recorded(records(tmp_path)) is None


@pytest.mark.parametrize(
    "command", ["list", "attach digits", "stop digits", "suspend digits 0", "resume digits 0", "leave digits 0"]
)
def test_the_address_of_a_job_server_is_none_of_a_cluster(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Submitting needs it (docs/submit.md), and a shell keeps it. The exit code is not that of a run that failed."""
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:8265")
    said = CliRunner().invoke(main, command.split())
    assert said.exit_code == 2, said.output
    assert "ConfigError: RAY_ADDRESS=http://127.0.0.1:8265: there is no Ray cluster to be reached" in said.output


@pytest.mark.parametrize("command", ["list", "attach digits"])
def test_a_cluster_that_does_not_answer_is_said_so_at_once(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        began = time.monotonic()
        said = CliRunner().invoke(main, command.split())
    assert said.exit_code == 2, said.output
    assert f"ConfigError: RAY_ADDRESS={address}: no Ray cluster answers there" in said.output
    assert time.monotonic() - began < 10


def test_what_ray_alone_can_understand_is_left_to_it() -> None:
    for address in ("", "auto", "local", "ray://127.0.0.1:10001", "http://127.0.0.1:8265"):
        knock(address)
    with pytest.raises(ConfigError, match=r"^127\.0\.0\.1:99999: no Ray cluster answers there"):
        knock("127.0.0.1:99999")


def test_a_cluster_that_refuses_is_no_run_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**about: object) -> None:
        raise RayError("no token")

    monkeypatch.setattr("raytrain_ft.attaching.ray.init", refuse)
    said = CliRunner().invoke(main, ["attach", "digits"])
    assert said.exit_code == 2, said.output
    assert "no token" in said.output


@pytest.mark.parametrize("command", ["attach digits", "drill jobs/scenarios/node_loss.yaml --on cluster"])
def test_a_cluster_of_other_versions_is_said_to_be_one(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not that there is none, or that it may have another token."""
    cluster = {"ray_version": "2.58.0", "python_version": "3.10.4"}
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("raytrain_ft.attaching.ray.init", lambda **about: check_version_info(cluster, "node 10.0.0.2"))
    said = CliRunner().invoke(main, command.split())
    assert said.exit_code == 2, said.output
    assert "this process and the cluster have other versions of Ray or Python: The cluster was started with" in said.output
    assert "Ray: 2.58.0 Python: 3.10.4" in said.output
    assert "no Ray cluster" not in said.output
    assert "token" not in said.output


@pytest.mark.parametrize("command", ["stop", "attach"])
def test_a_run_that_is_about_to_begin_once_more_has_not_ended(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its driver has the right to write by then. Its supervisor has not put the records of the launch before aside yet."""
    monkeypatch.setattr(lock, "RENEW_S", 0.1)
    run = records(tmp_path, event="RunFinished", steps=30, digest="abc", path="final.arrow")
    right = lock.acquire(LocalStorage(run), "r2")
    try:
        said = CliRunner().invoke(main, [command, str(run)])
    finally:
        right.release()
    assert said.exit_code == 2, said.output
    assert "RunActiveError: a new launch of the run 'digits' is about to begin (process" in said.output
    assert CliRunner().invoke(main, [command, str(run)]).exit_code == 0, "it came to nothing"


def test_who_was_about_to_begin_and_is_gone_does_not_hide_how_the_run_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = records(tmp_path, event="RunFinished", steps=30, digest="abc", path="final.arrow")
    own(LocalStorage(run), replace(OWNER, owner="r"))
    assert ft.attach(run).digest == "abc", "its own supervisor is still there"
    monkeypatch.setattr(lock, "LEASE_S", 0.3)
    own(LocalStorage(run), replace(OWNER, owner="r2"))
    assert ft.attach(run).digest == "abc", "elsewhere, and it renews nothing"


@pytest.mark.usefixtures("connected")
def test_how_a_run_was_ended_is_shown_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The supervisor may be asked again and again before its process is gone."""
    account: dict[str, object] = {
        "recoveries": [],
        "warnings": [],
        "world_size": 2,
        "loss": None,
        "step": 3,
        "seconds": 1.0,
        "checkpoint": "c",
    }
    states = ("STOPPING", "ABORTED", "ABORTED", "ABORTED")
    monkeypatch.setattr(follow, "_ask_to_end", lambda *_: None)
    monkeypatch.setattr(follow, "watch", lambda *_, **__: ({**account, "state": state} for state in states))
    with Display("run", 9) as display:
        last = follow.abort(None, "Ctrl-C", 5.0, display)
    assert last is not None
    assert last["state"] == "ABORTED"
    assert capsys.readouterr().out.count("ended at step 3/9; run again under the same name, it goes on from c") == 1


@pytest.mark.usefixtures("connected")
@pytest.mark.parametrize(
    ("states", "seconds", "last"),
    [
        (["STOPPING", "ABORTED", "ABORTED", "ABORTED", "ABORTED"], 100.0, 4),
        (["STOPPING"] * 100, 10.0, 4),
        (["STOPPING"] + ["ABORTED"] * 100, 100.0, 7),
    ],
    ids=["draws", "does not end", "draws for ever"],
)
def test_a_run_that_has_ended_is_not_killed_while_it_draws(
    states: list[str], seconds: float, last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That takes minutes, of a log of weeks. There is a bound for it nevertheless."""
    clock = [0.0]

    def accounts(*_: object, **__: object) -> Iterator[dict[str, object]]:
        for number, state in enumerate(states):
            yield {"number": number, "state": state}
            clock[0] += seconds

    monkeypatch.setattr(follow, "_ask_to_end", lambda *_: None)
    monkeypatch.setattr(follow, "watch", accounts)
    monkeypatch.setattr(follow, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    account = follow.abort(None, "Ctrl-C", 0.0, None)
    assert account is not None
    assert account["number"] == last


class Called:
    """A remote method."""

    def options(self, **about: object) -> Called:
        return self

    def remote(self, *args: object) -> None:
        return None


def no_ray(*args: object, **more: object) -> None:
    raise RaySystemError("GCS is away")


@pytest.mark.usefixtures("connected")
def test_that_nothing_could_be_cleaned_up_is_told_beside_the_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run has ended, and as well as it did: Ray's own state is away in the moment after that."""
    ended: dict[str, object] = {"name": "digits", "run_id": "r", "directory": "/runs/digits", "state": "FINISHED"}
    ended |= {"max_steps": 30, "step": 30, "recoveries": [], "warnings": [], "world_size": 2, "loss": 0.5, "seconds": 9.0}
    ended |= {"checkpoint": None, "failure": None, "result": {"digest": "abc", "path": "final.arrow"}}
    monkeypatch.setattr("raytrain_ft.attaching.find", lambda run: (SimpleNamespace(end=Called()), ended))
    monkeypatch.setattr("raytrain_ft.attaching.watch", lambda *_, **__: iter([ended]))
    monkeypatch.setattr("raytrain_ft.follow.ray.wait", lambda *_, **__: None)
    monkeypatch.setattr("raytrain_ft.follow.ray.kill", lambda actor: None)
    monkeypatch.setattr(follow, "kill_named", no_ray)
    with pytest.warns(UserWarning, match=r"processes of the run may be left: RaySystemError: .*GCS is away.*by themselves"):
        assert ft.attach("digits", quiet=True).digest == "abc"


@pytest.mark.usefixtures("connected")
def test_what_ended_a_run_is_told_though_ray_answers_nothing_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C, and a cluster that is gone: it is the first of the two that `fit` raises."""
    monkeypatch.setattr("raytrain_ft.follow.ray.get", no_ray)
    assert follow.abort(SimpleNamespace(abort=Called()), "Ctrl-C", 5.0, None) is None


def test_a_name_that_could_be_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="use up to 100 letters"):
        ft.attach(tmp_path / "no run here")
    said = CliRunner().invoke(main, ["attach", "../etc"])
    assert said.exit_code == 2
    assert f"'../etc', seen from {Path.cwd()}, is no directory of a run" in said.output


def supervisor_that(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run "digits" is alive, and this comes of asking its supervisor."""

    def answer(call: object, timeout: float) -> None:
        raise error

    asked = SimpleNamespace(follow=SimpleNamespace(remote=object))
    monkeypatch.setattr("raytrain_ft.attaching._connect", lambda: None)
    monkeypatch.setattr("raytrain_ft.attaching._names", lambda: ["digits"])
    monkeypatch.setattr("raytrain_ft.attaching.ray.get_actor", lambda name, namespace: asked)
    monkeypatch.setattr("raytrain_ft.follow.ray.get", answer)


@pytest.mark.parametrize("error", [GetTimeoutError("no answer"), ActorUnavailableError("restarting", None)])
@pytest.mark.parametrize("command", ["stop", "attach"])
def test_a_supervisor_that_does_not_answer_is_none_that_is_gone(
    command: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor_that(error, monkeypatch)
    said = CliRunner().invoke(main, [command, "digits"])
    assert said.exit_code == 1, said.output
    assert "TrainingFailedError: the supervisor of the run 'digits' is there, but has not answered for 0 s" in said.output
    assert "the storage of its records" in said.output


@pytest.mark.parametrize("command", ["stop", "attach"])
def test_a_supervisor_that_is_gone_is_no_run(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor_that(ActorDiedError(), monkeypatch)
    said = CliRunner().invoke(main, [command, "digits"])
    assert said.exit_code == 2, said.output
    assert "ConfigError: no run named 'digits' is alive on this cluster" in said.output


class Silent:
    """A supervisor that answers only the first time that it is followed, or so many times."""

    def __init__(self, lease: float, words: int = 1) -> None:
        self.run = SimpleNamespace(remote=lambda: "ended")
        self.follow = SimpleNamespace(remote=lambda known: "account")
        self.answers = iter([{"lease": lease, "recoveries": [], "recoveries_before": 0}] * words)
        self.now = 0.0

    def get(self, asked: object, timeout: float) -> dict[str, object]:
        self.now += timeout
        for answer in self.answers:
            return answer
        raise GetTimeoutError


@pytest.mark.usefixtures("connected")
def test_recoveries_that_are_over_are_told_once_and_all_of_them_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be thousands, and five accounts a second. An account is whole nevertheless."""
    happened = [{"cause": f"loss {number}", "resumed": float(number)} for number in range(1000)]
    told: list[int] = []

    def follow_from(known: int) -> dict[str, object]:
        over = [recovery for recovery in happened if recovery["resumed"] is not None]
        recoveries = over[known:] + happened[len(over) :]
        told.append(len(recoveries))
        return {"recoveries": recoveries, "recoveries_before": len(happened) - len(recoveries)}

    supervisor = SimpleNamespace(
        run=SimpleNamespace(remote=lambda: None), follow=SimpleNamespace(remote=lambda known: follow_from(known))
    )
    ended = [False]
    monkeypatch.setattr("raytrain_ft.follow.ray.wait", lambda asked, timeout: (asked, []) if ended[0] else ([], asked))
    monkeypatch.setattr("raytrain_ft.follow.ray.get", lambda asked, timeout: asked or {"recoveries": happened})
    accounts = watch(supervisor)

    def next_recoveries() -> object:
        return next(accounts)["recoveries"]

    assert next_recoveries() == happened
    happened.append({"cause": "loss 1000", "resumed": None})
    assert next_recoveries() == happened
    assert next_recoveries() == happened
    happened[-1] = {"cause": "loss 1000", "resumed": 1000.0}
    assert next_recoveries() == happened
    happened.append({"cause": "loss 1001", "resumed": 1001.0})
    assert next_recoveries() == happened
    assert told == [1000, 1, 1, 1, 1]
    del happened[999:]  # the supervisor was lost, and could not write its log before
    assert next_recoveries() == happened
    happened[7] = {"cause": "loss 7; w7: killed, perhaps for memory", "resumed": 7.0}
    ended[0] = True
    assert next_recoveries() == happened, "with what became known late"


@pytest.mark.usefixtures("connected")
def test_who_only_keeps_a_run_going_is_told_of_no_recovery(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(follow, "RENEW_S", 0.01)
    monkeypatch.setattr("raytrain_ft.follow.ray.get", lambda call, timeout: None)
    with follow.kept_going(SimpleNamespace(follow=SimpleNamespace(remote=asked.append))):
        deadline = time.monotonic() + 30
        while not asked and time.monotonic() < deadline:
            time.sleep(0.01)
    assert asked[0] > 10**9


@pytest.mark.usefixtures("connected")
@pytest.mark.parametrize(("lease", "patience"), [(30.0, 120.0), (600.0, 600.0)])
def test_a_silent_supervisor_is_waited_for_as_long_as_its_workers_train_on(
    lease: float, patience: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else who follows would end what is well."""
    silent = Silent(lease)
    monkeypatch.setattr("raytrain_ft.follow.ray.wait", lambda asked, timeout: ([], asked))
    monkeypatch.setattr("raytrain_ft.follow.ray.get", silent.get)
    monkeypatch.setattr("raytrain_ft.follow.time", SimpleNamespace(monotonic=lambda: silent.now))
    with pytest.raises(TrainingFailedError, match=f"has not answered for {patience:g} s"):
        list(watch(silent))
    assert patience <= silent.now - ANSWER_S <= patience + 2 * ANSWER_S


@pytest.mark.usefixtures("connected")
@pytest.mark.parametrize(("start", "patience"), [(60.0, 120.0), (900.0, 900.0)])
def test_a_supervisor_that_has_not_begun_is_waited_for_as_long_as_the_user_allows_for_the_start(
    start: float, patience: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray may be installing the job's packages on its node."""
    silent = Silent(30.0, words=0)
    monkeypatch.setattr("raytrain_ft.follow.ray.wait", lambda asked, timeout: ([], asked))
    monkeypatch.setattr("raytrain_ft.follow.ray.get", silent.get)
    monkeypatch.setattr("raytrain_ft.follow.time", SimpleNamespace(monotonic=lambda: silent.now))
    with pytest.raises(
        TrainingFailedError, match=rf"has not answered for {patience:g} s, and nothing has begun.*schedule_timeout"
    ):
        list(watch(silent, start_s=start))
    assert patience <= silent.now - ANSWER_S <= patience + 2 * ANSWER_S


def test_who_is_not_connected_any_more_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A callback has called `ray.shutdown`, say. Ray, if it is asked for anything then, starts a cluster of its own here."""
    connected, asked, silent = [True], list[object](), Silent(30.0)

    def wait(calls: object, timeout: float) -> tuple[object, object]:
        assert connected
        return [], calls

    def get(call: object, timeout: float) -> dict[str, object]:
        assert connected
        return silent.get(call, timeout)

    supervisor = SimpleNamespace(run=silent.run, follow=silent.follow, abort=Called(), end=Called())
    monkeypatch.setattr("raytrain_ft.follow.ray.is_initialized", lambda: bool(connected))
    monkeypatch.setattr("raytrain_ft.follow.ray.wait", wait)
    monkeypatch.setattr("raytrain_ft.follow.ray.get", get)
    monkeypatch.setattr(follow, "RENEW_S", 0.01)
    accounts = watch(supervisor)
    next(accounts)
    connected.clear()
    with pytest.raises(TrainingFailedError, match=r"not connected to Ray any more: did it call ray\.shutdown\(\)"):
        next(accounts)
    assert follow.abort(supervisor, "Ctrl-C", 5.0, None) is None
    with pytest.warns(UserWarning, match="not connected to Ray any more"):
        follow.clean_up("r", supervisor)
    with follow.kept_going(SimpleNamespace(follow=SimpleNamespace(remote=asked.append))):
        time.sleep(0.1)
    assert asked == []


def test_a_name_is_that_of_the_run_that_is_alive_though_one_here_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "digits"
    here.mkdir()
    records(here, event="RunFinished", steps=30, digest="abc", path="final.arrow")
    monkeypatch.chdir(tmp_path)
    there: list[dict[str, str]] = [{"name": "digits", "directory": "/mnt/shared/digits"}]
    supervisor = SimpleNamespace(follow=SimpleNamespace(remote=lambda: None))
    monkeypatch.setattr("raytrain_ft.attaching.alive", lambda: there)
    monkeypatch.setattr("raytrain_ft.attaching.ray.is_initialized", lambda: True)
    monkeypatch.setattr("raytrain_ft.attaching.ray.get_actor", lambda name, namespace: supervisor)
    monkeypatch.setattr("raytrain_ft.follow.ray.get", lambda asked, timeout: there[0])
    said = CliRunner().invoke(main, ["stop", "digits"])
    assert said.exit_code == 2, said.output
    assert "'digits' that is alive on this cluster is in /mnt/shared/digits, not in" in " ".join(said.output.split())
    assert find(here)[1]["state"] == "FINISHED", "a path is no name"
    there[0]["directory"] = str(here)
    assert find("digits")[1]["state"] == "FINISHED"
    monkeypatch.setattr("raytrain_ft.attaching.alive", lambda: (_ for _ in ()).throw(ConfigError("no cluster")))
    assert find("digits")[1]["state"] == "FINISHED"


@pytest.mark.parametrize("command", ["suspend digits 0", "resume digits 0", "leave digits 0"])
def test_a_supervisor_that_fails_at_a_request_is_told_in_a_line(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the exit code of what could not be done, and nothing that steers the terminal."""

    def get(*_: object, **__: object) -> None:
        where = 'ray::Supervisor.sleep()\n  File "supervisor.py", line 7, in sleep\n    x\n'
        raise RayTaskError("sleep", f"{where}KeyError: '\x1b]0;w0'", KeyError("w0"))

    alive = (MagicMock(), {"world": ["w0"]})
    monkeypatch.setattr("raytrain_ft.steer.find", lambda run: alive)
    monkeypatch.setattr("raytrain_ft.steer.ray.get", get)
    said = CliRunner().invoke(main, command.split())
    assert (said.exit_code, said.stderr) == (2, "ConfigError: the supervisor failed at this request: KeyError: '?]0;w0'\n")
