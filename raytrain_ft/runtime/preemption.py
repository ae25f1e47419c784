"""Notices that this worker's node, or its process, will be taken away: asked for on a thread of its own.

The thread has nothing to do with training: whatever a metadata service does, it can only be slow or wrong here. What stands is
told with every heartbeat, like everything else that a worker says of itself, and nothing is decided here.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import FrameType

from raytrain_ft.errors import MetadataError
from raytrain_ft.policy.leaving import LAPSE_AFTER_S, SIGTERM
from raytrain_ft.runtime.notices.aws import Aws
from raytrain_ft.runtime.notices.azure import Azure
from raytrain_ft.runtime.notices.gcp import Gcp
from raytrain_ft.runtime.notices.metadata import Metadata
from raytrain_ft.runtime.notices.notice import Notice, NoticeSpec, Source

POLL_S = 1.0
"""Between two questions. The shortest notice that a cloud gives is 30 s."""
DETECT_AFTER_S = (0.0, 2.0, 10.0, 30.0)
"""When a worker looks for a metadata service: it may not answer at once on a machine that has just started."""
CLOUDS: Mapping[str, Callable[[Metadata], Source]] = {"aws": Aws, "gcp": Gcp, "azure": Azure}


class Preemption:
    """What this process was told of its end. Made on the main thread, which alone may take signals.

    Args:
        complain: is told, once for each source, that it does not work: (source, why).
    """

    def __init__(self, spec: NoticeSpec, complain: Callable[[str, str], None]) -> None:
        self._spec = spec
        self._complain = complain
        self._sources: list[Source] = []
        self._standing: dict[str, tuple[float, Notice]] = {}  # by source: until when, and what
        self._asked = threading.Event()  # to end, by SIGTERM
        self._failed: set[str] = set()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._watch, name="preemption", daemon=True)
        if spec.grace_s is not None:
            signal.signal(signal.SIGTERM, self._on_sigterm)
            os.register_at_fork(after_in_child=self._let_go)

    def start(self) -> None:
        """Begins to ask.

        Raises:
            ConfigError: the environment names an endpoint that cannot be this machine's.
        """
        metadata = Metadata.of_this_machine()
        self._sources = [CLOUDS[name](metadata) for name in self._spec.clouds]
        if self._sources or self._spec.grace_s is not None:
            self._thread.start()

    def notices(self) -> tuple[Notice, ...]:
        """Every notice that stands, with the seconds that are left now, the most urgent first: which of them is to be believed
        is not known here. Any thread may ask."""
        now = time.monotonic()
        told = list(self._standing.values())  # one operation, so that a signal cannot come in between
        standing = sorted((known for known in told if now < known[0] + LAPSE_AFTER_S), key=lambda known: known[0])
        return tuple(replace(notice, deadline_s=max(until - now, 0.0)) for until, notice in standing)

    def _take(self, notice: Notice) -> None:
        """The most urgent word of a source stands: it may be in more of a hurry than it said, and takes nothing back."""
        until = time.monotonic() + notice.deadline_s
        known = self._standing.get(notice.source)
        if known is None or until < known[0]:
            self._standing[notice.source] = until, notice

    def _let_go(self) -> None:
        """A process that was forked off this one has no notice to take: SIGTERM ends it at once, whatever it waits for. Python
        would only look for the signal between two instructions."""
        if signal.getsignal(signal.SIGTERM) == self._on_sigterm:  # else whoever has come later knows better
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        """Whoever asks twice is not kept waiting."""
        del frame
        if os.getpid() != self._pid:  # just forked off: before its turn came to let go
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if SIGTERM in self._standing or self._spec.grace_s is None:
            os._exit(128 + number)
        self._take(Notice(self._spec.grace_s, SIGTERM, "the process was asked to end"))
        self._asked.set()

    # ---------------------------------------------------------------- on the thread

    def _watch(self) -> None:
        sources = self._found() if self._spec.detect else self._sources
        while True:
            for source in sources:
                self._ask(source)
            self._rest(POLL_S)

    def _found(self) -> list[Source]:
        """The cloud that this machine is in, if it is in one."""
        for wait_s in DETECT_AFTER_S if self._sources else ():
            self._rest(wait_s)
            for source in self._sources:
                try:
                    if source.detect():
                        return [source]
                except MetadataError:
                    continue
        return []

    def _ask(self, source: Source) -> None:
        try:
            notices = source.poll()
        except Exception as error:  # of ours too: this thread must go on, and training must not notice
            if source.name not in self._failed:
                self._failed.add(source.name)
                self._complain(source.name, f"{type(error).__name__}: {error}"[:300])
        else:
            for notice in notices:
                self._take(notice)

    def _rest(self, seconds: float) -> None:
        """Does nothing for so long. After SIGTERM, whoever sent it expects this process to be gone at some time, whatever
        became of the run: it is then."""
        rested = time.monotonic() + seconds
        while (now := time.monotonic()) < rested:
            if not self._asked.is_set():
                self._asked.wait(rested - now)
                continue
            overdue, _ = self._standing[SIGTERM]
            if overdue <= now:
                os._exit(128 + signal.SIGTERM)
            time.sleep(min(rested, overdue) - now)
