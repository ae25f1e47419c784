"""What a worker's start must not be spent on. In fresh processes, because it is about what they load."""

from __future__ import annotations

import inspect
import subprocess
import sys

from raytrain_ft.runtime.supervisor import Supervisor
from raytrain_ft.runtime.supervisor_actor import SupervisorActor

START = """
import gc, sys
from raytrain_ft.runtime.worker import Worker

def collections():
    return sum(generation["collections"] for generation in gc.get_stats())

before = collections()
try:
    Worker("w0", None, None, 1)  # comes no further than to where it needs its spec, which is after the imports
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

    assert asked(SupervisorActor) == {name: how for name, how in asked(Supervisor).items() if not name.startswith("_")}
