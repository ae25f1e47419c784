"""Google Cloud: preemption of a spot machine, 30 s ahead, and maintenance that ends the machine, 60 s ahead or more
(an hour for machines with GPUs).

"Spot VMs" and "Query the metadata server for maintenance event notices" in the Compute Engine documentation.
"""

from __future__ import annotations

from raytrain_ft.errors import MetadataError
from raytrain_ft.policy.leaving import MAINTENANCE
from raytrain_ft.runtime.notices.metadata import Metadata
from raytrain_ft.runtime.notices.notice import Notice

FLAVOR = {"Metadata-Flavor": "Google"}
PREEMPTED_PATH = "/computeMetadata/v1/instance/preempted"
MAINTENANCE_PATH = "/computeMetadata/v1/instance/maintenance-event"
PREEMPTION_NOTICE_S = 30.0
MAINTENANCE_NOTICE_S = 60.0
"""What any machine has. One with GPUs has an hour, which the service does not say: it leaves early."""
TERMINATE = "TERMINATE_ON_HOST_MAINTENANCE"
EVENTS = ("NONE", "MIGRATE_ON_HOST_MAINTENANCE", TERMINATE)
"""A machine that migrates keeps running."""


class Gcp:
    """The metadata of a Compute Engine machine."""

    name = "gcp"

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    def detect(self) -> bool:
        """Whether the service says that it is Google's."""
        self._get("/computeMetadata/v1/instance/id")
        return True

    def poll(self) -> list[Notice]:
        """A preemption if there is one, else maintenance."""
        if self._one_of(PREEMPTED_PATH, ("FALSE", "TRUE")) == "TRUE":
            return [Notice(PREEMPTION_NOTICE_S, "gcp", "the machine is being preempted")]
        if self._one_of(MAINTENANCE_PATH, EVENTS) == TERMINATE:
            return [Notice(MAINTENANCE_NOTICE_S, MAINTENANCE, "the machine will be terminated for maintenance")]
        return []

    def _one_of(self, path: str, known: tuple[str, ...]) -> str:
        value = self._get(path)
        if value not in known:
            raise MetadataError(f"{path}: none of {', '.join(known)}, but {value[:40]!r}")
        return value

    def _get(self, path: str) -> str:
        reply = self._metadata.get(path, FLAVOR)
        if reply.headers.get("metadata-flavor") != FLAVOR["Metadata-Flavor"]:
            raise MetadataError(f"{path}: status {reply.status} from what is not Google's service (no Metadata-Flavor)")
        return reply.text()
