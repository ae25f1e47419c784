"""What strikes from outside: kills, freezes, thaws and slows the processes of a run, on the machine that it is on.

On a laptop the driver uses it itself; on a cluster it is an actor on each node that the run is on.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import psutil

from raytrain_ft.chaos import faults

OURS = re.compile(r"ray::(Worker|SupervisorActor)\b")
"""How Ray names the processes of a run: by the actor's class, and the method that it is in."""
JOB = "RAY_JOB_ID"
"""Where a process that Ray started says for which job; one that Ray had started beforehand does not say."""
SLICE_S = 0.02
"""A process that is slowed runs and stands still in turns that are about as short as this."""

QUICKEN_S = 5.0
WAKER = "import sys, time, psutil; who = psutil.Process(int(sys.argv[1])); time.sleep(float(sys.argv[2])); who.resume()"
"""psutil makes sure, by when it was started, that it is still the same process."""


class Hand:
    """Strikes. Touches no process but those of a run, whatever number it is given: numbers of processes are used again.

    Args:
        job: whose runs these are, in Ray's words; "" is anybody's, where there is nobody else.
    """

    def __init__(self, job: str = "") -> None:
        self._job = job
        self._slowed: dict[int, tuple[threading.Event, threading.Thread]] = {}
        self._frozen: set[psutil.Process | None] = set()  # whom nothing but `thaw` wakes
        self._lock = threading.Lock()  # of freezing and thawing: none of the turns of who is slow comes in between

    def kill(self, pid: int) -> bool:
        """SIGKILLs a process of a run; False if it is gone."""
        return self._signal(pid, signal.SIGKILL)

    def freeze(self, pid: int, lasts: float | None = None) -> bool:
        """SIGSTOPs a process of a run, also one that is slow; False if it is gone.

        Args:
            lasts: seconds after which it runs again, also if whoever should thaw it is gone by then.
        """
        if lasts is not None:
            self.wake_later(pid, lasts)
        with self._lock:
            frozen = self._signal(pid, signal.SIGSTOP)
            self._frozen |= {self._ours(pid)} if frozen else set()
        return frozen

    def wake_later(self, pid: int, seconds: float) -> bool:
        """Leaves a process behind that SIGCONTs this one after so long, and outlives the hand and the driver, also where they
        are killed: it is nobody's child, since Ray ends those of its workers. False if it is gone."""
        if self._ours(pid) is None:
            return False
        waker = [sys.executable, "-c", WAKER, str(pid), str(seconds)]
        quiet: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        subprocess.run(["/bin/sh", "-c", '"$@" &', "sh", *waker], check=True, start_new_session=True, **quiet)
        return True

    def thaw(self, pid: int) -> bool:
        """SIGCONTs a process of a run; False if it is gone."""
        with self._lock:
            self._frozen.discard(self._ours(pid))
            return self._signal(pid, signal.SIGCONT)

    def kill_node(self) -> None:
        """SIGKILLs the raylet that started this process, and every process that it started."""
        faults.kill_node(os.getppid())

    def slow(self, pid: int, factor: float) -> bool:
        """From now on a process runs so many times slower than it would, until `quicken`; False if it is gone."""
        if self._ours(pid) is None:
            return False
        self.quicken(pid)
        ended = threading.Event()
        thread = threading.Thread(target=self._hold_up, args=(pid, factor, ended.wait), name=f"slow-{pid}", daemon=True)
        self._slowed[pid] = (ended, thread)
        thread.start()
        return True

    def quicken(self, pid: int) -> bool:
        """The process runs at full speed again; False if it was not slowed."""
        if pid not in self._slowed:
            return False
        ended, thread = self._slowed.pop(pid)
        ended.set()
        thread.join(timeout=QUICKEN_S)
        return True

    def _ours(self, pid: int) -> psutil.Process | None:
        try:
            process = psutil.Process(pid)
            if not OURS.match(" ".join(process.cmdline())):
                return None
            stranger = self._job and process.environ().get(JOB, self._job) != self._job
        except psutil.Error:
            return None
        return None if stranger else process

    def _signal(self, pid: int, number: int) -> bool:
        process = self._ours(pid)
        try:
            if process is not None:
                process.send_signal(number)  # psutil makes sure that it is still the same process
        except psutil.NoSuchProcess:
            return False
        return process is not None

    def _hold_up(self, pid: int, factor: float, wait: Callable[[float], bool]) -> None:
        """Lets a process run a 1/factor of the time, in short turns; at the end it runs, whatever happens."""
        run, stand = SLICE_S / factor, SLICE_S * (1 - 1 / factor)
        try:
            while not wait(run) and self._signal(pid, signal.SIGSTOP):
                wait(stand)
                if not self._let_run(pid):
                    return
        finally:
            self._let_run(pid)

    def _let_run(self, pid: int) -> bool:
        """The turn in which it stands still is over, unless it was frozen meanwhile; False if it is gone."""
        with self._lock:
            process = self._ours(pid)
            return process is not None and (process in self._frozen or self._signal(pid, signal.SIGCONT))
