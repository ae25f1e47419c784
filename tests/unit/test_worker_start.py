"""What a worker's start must not be spent on. In fresh processes, because it is about what they load."""

from __future__ import annotations

import inspect
import subprocess
import sys
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from raytrain_ft.errors import FencedError, StorageError
from raytrain_ft.policy.commands import Run
from raytrain_ft.runtime.software import CODE, pack
from raytrain_ft.runtime.supervisor import Supervisor
from raytrain_ft.runtime.supervisor_actor import SupervisorActor
from raytrain_ft.runtime.worker import SAVE_AGAIN_S, Worker
from raytrain_ft.training.fence import Fence

START = """
import gc, sys
from types import SimpleNamespace
from raytrain_ft.runtime.software import CODE, pack
from raytrain_ft.runtime.worker import Worker

def collections():
    return sum(generation["collections"] for generation in gc.get_stats())

before = collections()
try:
    Worker(CODE, pack(SimpleNamespace(name="run")), "w0", None, 1)  # comes no further than to where it needs more of its spec
except AttributeError:
    pass
print("torch" in sys.modules, collections() - before, gc.get_freeze_count(), gc.isenabled())
"""


def test_no_garbage_is_looked_for_in_what_a_worker_loads() -> None:
    done = subprocess.run([sys.executable, "-c", START], capture_output=True, text=True, timeout=120, check=True)
    loaded, collections, kept, enabled = done.stdout.split()
    assert (loaded, enabled) == ("True", "True")
    assert int(collections) < 10, "an import of torch alone has hundreds of them"
    assert int(kept) > 100_000


HANDLE = """
import sys
import raytrain_ft.runtime.worker, raytrain_ft.runtime.trainee
before = set(sys.modules)
import raytrain_ft.runtime.supervisor_actor
print(*sorted(set(sys.modules) - before))
"""


def test_the_handle_of_the_supervisor_brings_nothing_else_with_it() -> None:
    done = subprocess.run([sys.executable, "-c", HANDLE], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["raytrain_ft.runtime.supervisor_actor"]


def test_the_actor_offers_what_the_supervisor_can_be_asked() -> None:
    def asked(kind: type) -> dict[str, inspect.Signature]:
        return {name: inspect.signature(value) for name, value in vars(kind).items() if inspect.iscoroutinefunction(value)}

    offered = asked(SupervisorActor)
    del offered["end"]  # of the process
    assert offered == {name: how for name, how in asked(Supervisor).items() if not name.startswith("_")}


def test_a_fence_comes_before_a_worker_begins_to_train_or_after() -> None:
    """In between, the heartbeat would say that it trains in an incarnation that has ended, and nothing would end that."""
    submitted: list[str] = []
    fencing = threading.Thread(target=lambda: worker.fence(3))

    def submit(job: Any, *_: object) -> Future[None]:
        submitted.append(job)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def running(*_: object) -> None:
        fencing.start()
        fencing.join(0.2)  # as long as it can be expected to take, if nothing keeps it

    worker: Any = object.__new__(Worker)
    worker._lock, worker._fence, worker._parking = threading.RLock(), Fence(2), {}
    worker._training = SimpleNamespace(submit=submit)
    worker._trainee = SimpleNamespace(park="park", run="run", rank=0)
    worker._heartbeat = SimpleNamespace(is_running=lambda _: False, running=running)
    worker.run(Run(("w0",), 2, None, (), False))
    fencing.join(30)
    assert submitted == ["run", "park"]
    assert worker._trains.incarnation == 2
    assert worker._trains.tripped


@pytest.mark.parametrize("end", ["room", "full", "fence"])
def test_a_final_state_is_written_again_that_could_not_be(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For half as long as the supervisor waits; and not once others are to be waited for, for then it may be no end."""
    tries: list[str] = []
    now = [0.0]

    def submit(_: Any, path: str) -> Future[str]:
        tries.append(path)
        done: Future[str] = Future()
        if end == "room" and len(tries) == 3:
            done.set_result(path)
        else:
            done.set_exception(StorageError("final.arrow could not be written: No space left on device"))
        return done

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if end == "fence":
            worker._fence.trip()

    monkeypatch.setattr("raytrain_ft.runtime.worker.time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    worker: Any = object.__new__(Worker)
    worker._lock, worker._fence = threading.RLock(), Fence(2)
    worker._spec = SimpleNamespace(rules=SimpleNamespace(phase_timeout=20.0))
    worker._training, worker._trainee = SimpleNamespace(submit=submit), SimpleNamespace(save=None)
    if end == "room":
        assert (worker.save("final.arrow"), len(tries)) == ("final.arrow", 3)
        return
    with pytest.raises(FencedError if end == "fence" else StorageError):
        worker.save("final.arrow")
    assert now[0] == (SAVE_AGAIN_S if end == "fence" else 10 + SAVE_AGAIN_S)


def test_who_cannot_begin_has_a_name_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray asks for it before it passes the error on. Without one it starts the process again, and tells nobody why."""

    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("raytrain_ft.runtime.supervisor.Supervisor.__init__", fail)
    monkeypatch.setattr("raytrain_ft.runtime.worker.load_compiler_late", fail)
    spec: Any = SimpleNamespace(name="run")
    named: list[str] = []
    for kind, arguments in ((SupervisorActor, (CODE, pack(spec))), (Worker, (CODE, pack(spec), "w0", None, 1))):
        actor: Any = object.__new__(kind)
        with pytest.raises(OSError, match="no space"):
            actor.__init__(*arguments)
        named.append(repr(actor))
    assert named == ["run supervisor", "run w0"]
