"""Following a run by its event log, from any process that sees its directory."""

from __future__ import annotations

from pathlib import Path

from raytrain_ft.policy.chronicle import Chronicle, Steps
from raytrain_ft.policy.machine import handle
from raytrain_ft.policy.messages import RunStarted
from raytrain_ft.policy.roster import Rules
from raytrain_ft.policy.run_state import RunState
from raytrain_ft.policy.states import State
from raytrain_ft.policy.strategy import Recovery
from raytrain_ft.runtime.event_log import decode, each_record, earlier_logs


class Follower:
    """Reads a log as it grows and folds it as the supervisor does.

    Attributes:
        started: the run's first event, once it is there.
    """

    def __init__(self, log: Path, rules: Rules) -> None:
        self._log = log
        self._offset = 0
        self._run = RunState(rules)
        self._chronicle = Chronicle()
        self.started: RunStarted | None = None

    @property
    def state(self) -> State:
        """Where the run stands, as far as it was read."""
        return self._run.state

    def news(self) -> list[Steps | Recovery]:
        """What has happened since the last call, in order: steps committed for the first time, and recoveries that ended.

        Raises:
            OSError: the log cannot be read; FTError or ValidationError: it is not what the supervisor of this version writes.
        """
        found: list[Steps | Recovery] = []
        for line in self._lines():
            event = decode(line)
            if event is None:
                continue
            if isinstance(event, RunStarted):
                self.started = event
            handle(self._run, event)
            found += [
                one for one in self._chronicle.take(event, self._run) if isinstance(one, Recovery) or one.stop > one.first
            ]
        return found

    def _lines(self) -> list[str]:
        """Lines that are new and whole."""
        if not self._log.exists():
            return []
        with self._log.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.decode().splitlines()


def committed_before(directory: Path) -> int:
    """The steps that earlier runs in this directory had come to, since one of them began anew; 0 if there were none."""
    furthest = 0
    for log in earlier_logs(directory):
        for record in each_record(log):
            if record["event"] == "RunStarted" and not record["stored"]:
                furthest = 0
            elif record["event"] == "StepsCommitted":
                furthest = max(furthest, record["stop_step"])
    return furthest
