"""What a survivor that helps with a replay cannot do is not fatal: nobody needs its help."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from raytrain_ft.errors import FencedError, LogGapError, ReplayDivergedError, StorageError
from raytrain_ft.policy import messages as m
from raytrain_ft.runtime import recovery, trainee
from raytrain_ft.runtime.calls import Calls
from raytrain_ft.runtime.contacts import Contacts
from raytrain_ft.runtime.trainee import Trainee
from raytrain_ft.training.fence import Fence, PeerLostError

HELP: Any = (Fence(3), frozenset({1}), "step-000000006-e1-i1", 13, ("w3", "w0"), 1, True)


@contextmanager
def links(*_: Any, **__: Any) -> Any:
    yield None


def helper(monkeypatch: pytest.MonkeyPatch, **fails: Exception) -> Trainee:
    """Helps w3 with stage 1; what is named in `fails` raises."""

    def method(name: str, result: Any = None) -> Any:
        def call(*_: Any, **__: Any) -> Any:
            if name in fails:
                raise fails[name]
            return result

        return call

    found: Any = object.__new__(Trainee)
    found._member, found._world = "w0", ("w0", "w3")
    found._spec = SimpleNamespace(rules=SimpleNamespace(stages=2), step=SimpleNamespace(micro_batches=2))
    found._connections = SimpleNamespace(replay=links)
    found.replica = SimpleNamespace(state=SimpleNamespace(digests=lambda: ("its own",)))
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
    calls = Calls(spec, events.append, lambda: 0.0, Contacts(spec), health)
    calls.report("w0", RayTaskError("replay", "Traceback ...", error), 3, "step-000000006-e1-i1")
    return events[0]


def test_who_can_help_says_what_it_holds_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert helper(monkeypatch).help(*HELP) == ("its own",)


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


@pytest.mark.parametrize("error", [LogGapError("a gap"), ReplayDivergedError("another"), FencedError("it is over")])
def test_what_a_helper_finds_out_about_the_log_counts(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    with pytest.raises(type(error)):
        helper(monkeypatch, replay=error).help(*HELP)
