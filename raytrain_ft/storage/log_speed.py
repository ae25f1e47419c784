"""How fast a directory takes a log, measured with a little of one."""

from __future__ import annotations

import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch

from raytrain_ft.storage.log_format import Key
from raytrain_ft.storage.tensor_log import TensorLog

RECORD_BYTES, RECORDS = 2**20, 16


def bandwidth_of(directory: Path) -> float | None:
    """Bytes per second that one writer's log takes in this directory, or in what there is of the path to it: the fastest of
    some records, for what disturbs one of them is no property of the place. None if nothing can be written there.

    What is written is deleted.
    """
    there = next(path for path in (directory, *directory.parents) if path.is_dir())
    with suppress(OSError), tempfile.TemporaryDirectory(prefix=".probe-", dir=there) as probe:
        log = TensorLog(Path(probe), "probe", synchronous=True)
        tensor, seconds = torch.ones(RECORD_BYTES, dtype=torch.uint8), []
        for number in range(RECORDS):
            began = time.perf_counter()
            log.append(Key(1, number, "activation", 0, 1), 1, [tensor])
            seconds.append(time.perf_counter() - began)
        written = log.stats.records
        log.close()
        return RECORD_BYTES / min(seconds) if written == RECORDS else None
    return None
