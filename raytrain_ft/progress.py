"""What a person sees of a run: a progress bar on a terminal, plain lines in a job's log, an account of every recovery."""

from __future__ import annotations

import sys
import time
import warnings
from contextlib import suppress
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from raytrain_ft.errors import plain
from raytrain_ft.policy.states import ENDED, RECOVERING, State
from raytrain_ft.policy.strategy import PHASES, Recovery
from raytrain_ft.policy.units import counted
from raytrain_ft.result import recovery_of

LINE_INTERVAL_S = 5.0


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Nobody reads any more. (rich would end the program.)"""
        raise BrokenPipeError


class Display:
    """Shows the account that the supervisor gives of itself."""

    def __init__(self, name: str, max_steps: int, *, quiet: bool = False) -> None:
        self._name = printable(name)
        self._max_steps = max_steps
        self._quiet = quiet
        self._console = _Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._shown = self._warned = 0
        self._last_line = 0.0
        self._state = ""

    def __enter__(self) -> Display:
        if self._console.is_terminal and not self._quiet:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, TextColumn("{task.fields[note]}"), console=self._console)
            self._bar.start()
            self._task = self._bar.add_task(self._name, total=self._max_steps, note="")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            with suppress(OSError, ValueError):
                self._bar.stop()

    def show(self, account: dict[str, Any]) -> None:
        """Brings what is shown up to date."""
        if self._quiet:
            return
        for fields in account["recoveries"][self._shown :]:
            recovery = recovery_of(fields)
            if recovery.resumed is None and account["state"] not in ENDED:
                break
            self._shown += 1
            self._print(describe(recovery))
        for words in account["warnings"][self._warned :]:
            self._warned += 1
            self.say(words)
        size, starts = account["world_size"], account["state"] in RECOVERING and not account["recoveries"]
        state = "starting" if starts else account["state"].lower().replace("_", " ")
        words = [state, counted(size, "worker") * bool(size)]
        words += [f"loss {account['loss']:.4f}"] if account["loss"] is not None else []
        note = "  ".join(word for word in words if word)
        if self._bar is not None:
            self._bar.update(self._task, completed=account["step"], note=note)
        elif state != self._state or time.monotonic() - self._last_line > LINE_INTERVAL_S:
            self._last_line = time.monotonic()
            self._print(f"[{self._name}] {account['seconds']:7.1f} s  step {account['step']}/{self._max_steps}  {note}")
        self._state = state

    def say(self, text: str) -> None:
        """A line of its own."""
        if not self._quiet:
            self._print(f"[{self._name}] {text}")

    def _print(self, line: str) -> None:
        """Prints it if that can be done: a run does not end with whoever reads of it, or with the disk it is written to."""
        encoding = self._console.encoding
        try:
            self._console.print(printable(line.encode(encoding, "backslashreplace").decode(encoding)), markup=False)
        except (OSError, ValueError) as error:
            self._quiet, self._bar = True, None
            warnings.warn(f"the run's progress cannot be shown any more: {error!r}", stacklevel=2)

    def show_end(self, account: dict[str, Any]) -> None:
        """Of a run that was ended before its time: what to do with it."""
        if account["state"] == State.ABORTED:
            begin = f"goes on from {account['checkpoint']}" if account["checkpoint"] else "begins anew: it has no checkpoint"
            self.say(f"ended at step {account['step']}/{self._max_steps}; run again under the same name, it {begin}")


def printable(text: str) -> str:
    """What files and others say may be anything, but it does not get to steer the terminal."""
    return "".join(character if character.isprintable() or character == "\n" else "?" for character in plain(text))


def describe(recovery: Recovery) -> str:
    """A short account of one recovery: what died, how it was noticed, what was done, what it cost, what was kept."""
    lost = f"lost {', '.join(recovery.lost)}" if recovery.lost else "nobody lost"
    lost += f"; {', '.join(recovery.left)} left" if recovery.left else ""
    lines = [f"  recovery: {recovery.cause}"]
    lines.append(f"    noticed by {recovery.noticed_by}; {lost}; workers {recovery.world_before} -> {recovery.world_after}")
    undone = f"; {counted(recovery.undone, 'parameter')} undone" if recovery.undone else ""
    undone += f"; {counted(recovery.updated_twice, 'parameter')} updated twice" if recovery.updated_twice else ""
    undone += f"; {counted(recovery.samples_lost, 'sample')} lost" if recovery.samples_lost else ""
    repaired = f"; {counted(recovery.repaired, 'bucket')} repaired after a hash mismatch" if recovery.repaired else ""
    lines.append(f"    {recovery.strategy}: {recovery.reason}{undone}{repaired}")
    lines.append(f"    {_times(recovery)}")
    again = f", after {recovery.attempts} attempts" if recovery.attempts > 1 else ""
    lines.append(f"    goes on with step {recovery.step}{again}; kept: {_KEPT[recovery.guarantee.value]}")
    return "\n".join(lines)


_KEPT = {
    "exact": "exact (every bit as without the failure)",
    "rounding": "same samples, other bits (an undo, another order, or other shares)",
    "lossy": "lossy (samples lost, or parameters updated twice)",
}


def _times(recovery: Recovery) -> str:
    parts = [f"{PHASES[name]} +{(end - begin) * 1000:.0f} ms" for name, begin, end in recovery.phases]
    total = "" if recovery.seconds is None else f" = {recovery.seconds:.2f} s"
    return ", ".join(parts) + total
