"""Work on two cores at once."""

from __future__ import annotations

import os
import threading
import time

import pytest

from raytrain_ft.storage import cores
from raytrain_ft.storage.cores import on_two

NEEDS_TWO = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")


@NEEDS_TWO
def test_each_thread_has_cores_of_its_own_and_this_one_has_them_all_again() -> None:
    before, both, found = os.sched_getaffinity(0), threading.Barrier(2, timeout=10), {}

    def work() -> None:
        both.wait()
        found[threading.get_ident()] = os.sched_getaffinity(0)

    on_two(work)
    mine, others = found.pop(threading.get_ident()), *found.values()
    assert len(mine) == 1
    assert (mine | others, mine & others) == (before, set())
    assert os.sched_getaffinity(0) == before


@NEEDS_TWO
@pytest.mark.parametrize("here", [True, False])
def test_what_one_of_them_raises_is_raised_when_both_have_ended(here: bool) -> None:
    before, caller, ended, both = os.sched_getaffinity(0), threading.get_ident(), [], threading.Barrier(2, timeout=10)

    def work() -> None:
        both.wait()
        if (threading.get_ident() == caller) == here:
            raise KeyError("mine")
        time.sleep(0.2)
        ended.append(1)

    with pytest.raises(KeyError, match="mine"):
        on_two(work)
    assert ended == [1]
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("lacks", ["core", "thread", "number", "right"])
def test_it_is_done_whatever_is_lacking(monkeypatch: pytest.MonkeyPatch, lacks: str) -> None:
    def refused(*_: object) -> None:
        raise {"thread": RuntimeError("can't start new thread"), "right": PermissionError(1, "no")}[lacks]

    match lacks:
        case "core":
            monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: {0})
        case "thread":
            monkeypatch.setattr(cores.threading.Thread, "start", refused)
        case "number":
            monkeypatch.setattr(cores, "_library", type("Library", (), {"sched_getcpu": lambda: -1}))
        case "right":
            monkeypatch.setattr(cores.os, "sched_setaffinity", refused)
    calls: list[int] = []
    on_two(lambda: calls.append(1))
    assert len(calls) == (2 if lacks == "right" and len(os.sched_getaffinity(0)) > 1 else 1)
