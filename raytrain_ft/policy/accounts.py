"""The accounts of a run's recoveries, as its records tell them, with what became known afterwards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from raytrain_ft.policy.strategy import with_reason

Record = dict[str, Any]


class Accounts:
    """Takes in records in the order of the log. Any field may be missing or of any type: logs outlive versions.

    A recovery is noted when it is over. Why a worker died may become known only after that: that its process is gone is seen
    at once, and Ray says a moment later whether it was killed for memory, or its node died (`CauseFound`).

    Attributes:
        all: the `Recovery` notes so far, in order.
    """

    def __init__(self) -> None:
        self.all: list[Record] = []
        self._before = 0  # of earlier launches, whose members have the same names

    def take(self, record: Record) -> None:
        """The next line."""
        match record:
            case {"event": "RunStarted"}:
                self._before = len(self.all)
            case {"event": "Recovery"}:
                self.all.append(record)
            case {"event": "CauseFound", "lost": str(lost), "cause": str(why)}:
                self._explain(lost, why)

    def _explain(self, lost: str, why: str) -> None:
        """If its recovery is not over, the account of that will say it."""
        for index in reversed(range(self._before, len(self.all))):
            account = self.all[index]
            members, cause = account.get("lost"), account.get("cause")
            if isinstance(members, list) and lost in members and isinstance(cause, str):
                self.all[index] = account | {"cause": with_reason(cause, lost, why)}
                return


def accounts(records: Iterable[Record]) -> list[Record]:
    """The accounts of these records, of which there may be millions."""
    told = Accounts()
    for record in records:
        told.take(record)
    return told.all
