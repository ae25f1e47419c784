"""For tests of parts."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _no_thread_writes_on() -> Iterator[None]:
    """A thread that renews the right to write does so into the next test, too, and may be recorded or counted there."""
    before = {*threading.enumerate()}
    yield
    left = [thread for thread in threading.enumerate() if thread.name == "writer-lock" and thread not in before]
    assert not left, "the test holds a right to write that it has not released"
