"""What a worker's start must not be spent on. A fresh process, because it is about what that loads."""

from __future__ import annotations

import subprocess
import sys

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
