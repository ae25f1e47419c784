"""Azure: scheduled events that will end this machine: 30 s ahead for a spot machine, some minutes for others, and days if its
hardware is expected to fail.

"Scheduled Events for Linux VMs" in the Azure documentation. The list is of all machines that belong together, so an event
counts only if it names this one. Events are not acknowledged: that would let Azure begin earlier.
"""

from __future__ import annotations

import math
import time
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import TypeVar

from pydantic import BaseModel, Field, ValidationError

from raytrain_ft.errors import MetadataError
from raytrain_ft.runtime.notices.metadata import DEADLINE_S, Metadata
from raytrain_ft.runtime.notices.notice import Notice, seconds_until

HEADER = {"Metadata": "true"}
MACHINE_PATH = "/metadata/instance/compute?api-version=2021-02-01&format=json"
EVENTS_PATH = "/metadata/scheduledevents?api-version=2020-07-01"
EVENTS_DEADLINE_S = 5.0
FIRST_ANSWER_S = 180.0
"""The first request switches the events on, which Azure says may take two minutes."""
ENDING = {"Preempt": 30.0, "Terminate": 900.0, "Reboot": math.inf, "Redeploy": math.inf}
"""Kinds of events after which this process is gone, and how long before at most Azure announces them, whatever this machine's
clock says. (The time for a termination can be set, to 15 minutes at most.) A frozen machine wakes up again, after seconds."""
LONGEST_NOTICE_S = 3600.0
"""What is further away is no notice yet: a worker would leave days too early, and its node be given up for as long."""


Model = TypeVar("Model", bound=BaseModel)


class _Machine(BaseModel):
    name: str = Field(min_length=1)
    azEnvironment: str


class _ScheduledEvent(BaseModel):
    EventType: str
    Resources: list[str]
    NotBefore: str = ""


class _ScheduledEvents(BaseModel):
    Events: list[_ScheduledEvent]


class Azure:
    """The metadata of an Azure machine."""

    name = "azure"

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._machine = ""
        self._patient_until = 0.0
        self._answered = False

    def detect(self) -> bool:
        """Whether the service describes an Azure machine."""
        self._machine = self._machine or self._get(MACHINE_PATH, _Machine).name
        return True

    def poll(self) -> list[Notice]:
        """The events that end this machine soon. One may be listed long after it should have come, and hides no other."""
        self.detect()
        self._patient_until = self._patient_until or time.monotonic() + FIRST_ANSWER_S
        try:
            events = self._get(EVENTS_PATH, _ScheduledEvents, EVENTS_DEADLINE_S).Events
        except MetadataError:
            if not self._answered and time.monotonic() < self._patient_until:
                return []
            raise
        self._answered = True
        mine = [e for e in events if e.EventType in ENDING and self._machine.casefold() in map(str.casefold, e.Resources)]
        return [notice for notice in map(_notice, mine) if notice.deadline_s <= LONGEST_NOTICE_S]

    def _get(self, path: str, model: type[Model], deadline_s: float = DEADLINE_S) -> Model:
        text = self._metadata.get(path, HEADER, deadline_s).text()
        try:
            return model.model_validate_json(text)
        except ValidationError as error:
            raise MetadataError(f"{path}: not as documented: {text[:80]!r}") from error


def _notice(event: _ScheduledEvent) -> Notice:
    """Each kind is a source of its own: that a reboot was cancelled says nothing of a preemption."""
    left = _seconds_left(event.NotBefore, ENDING[event.EventType])
    return Notice(left, f"azure {event.EventType.lower()}", f"scheduled event: {event.EventType}")


def _seconds_left(not_before: str, most: float) -> float:
    """Empty says that it has begun."""
    if not not_before:
        return 0.0
    try:
        moment = parsedate_to_datetime(not_before)
    except ValueError as error:
        raise MetadataError(f"NotBefore is no date: {not_before[:40]!r}") from error
    return seconds_until(moment if moment.tzinfo else moment.replace(tzinfo=UTC), most)
