"""What a worker's node must see as the supervisor's does: the run's directory, and that of its checkpoints if it is another.

Where it does not, what workers write lies on the disks of their nodes, and no checkpoint is ever complete.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

from raytrain_ft.errors import ConfigError, StorageError
from raytrain_ft.runtime.spec import RunSpec
from raytrain_ft.storage import lock
from raytrain_ft.storage.filesystem import LocalStorage, local_path

LOOK_S = 5.0
"""A worker's start does not hang with the storage of checkpoints, without which training can do."""
CACHED_S = 60.0
"""A client of NFS may take a file that another one has made for absent so long: what it has found out about a directory is used
again, and whoever starts a run looks for checkpoints before there is a place for them."""
POLL_S = 0.5


def sees_directory(spec: RunSpec) -> bool:
    """Whether this node sees the directory to which the supervisor writes the run's records."""
    path = spec.directory / "nonce"
    return path.exists() and path.read_text() == spec.nonce


def check_directory(spec: RunSpec, host: str) -> None:
    """Raises ConfigError if this node does not see the run's directory."""
    if not sees_directory(spec):
        raise ConfigError(
            f"RunConfig.storage_path: node {host} does not see the run's directory {spec.directory}. "
            "Use a path that is shared by all nodes."
        )


def check_checkpoints(spec: RunSpec, epoch: int, host: str) -> None:
    """Whether the supervisor's right to write checkpoints, of this epoch, is seen here. Nothing is said of a storage that does
    not answer now.

    Raises:
        ConfigError: checkpoints go to a directory outside of the run's, and this node has another one there, or none.
    """
    path = local_path(spec.stored_in) if spec.stored_in is not None else None
    if path is None or path.is_relative_to(spec.directory):
        return
    storage, deadline = LocalStorage(path), time.monotonic() + CACHED_S
    while not _soon(storage, spec.run_id, epoch):
        if time.monotonic() > deadline:
            raise ConfigError(
                f"CheckpointConfig.storage_path: node {host} does not see the run's checkpoints in {path}: the {lock.FILE} "
                "that the supervisor keeps there is not there. Use a path that is shared by all nodes, or a URI such as "
                "s3://bucket/runs."
            )
        time.sleep(POLL_S)


def _soon(storage: LocalStorage, run_id: str, epoch: int) -> bool:
    """`_is_written`, or True if there is no answer."""
    found: Future[bool] = Future()
    look = threading.Thread(target=lambda: found.set_result(_is_written(storage, run_id, epoch)), name="shared", daemon=True)
    look.start()
    try:
        return found.result(LOOK_S)
    except TimeoutError:
        return True


def _is_written(storage: LocalStorage, run_id: str, epoch: int) -> bool:
    """Whether this is where the run's supervisor has the right to write, or has lost it since."""
    try:
        owner = lock.read_owner(storage)
    except StorageError:
        return True
    return owner is not None and (owner.owner == run_id or owner.epoch > epoch)
