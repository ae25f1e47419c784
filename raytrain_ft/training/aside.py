"""A worker's own state out of the way, while it helps to replay another stage that does not fit beside it.

SWIFT's helpers keep theirs in memory (section 5.2), and so do these as long as there is room for both. Otherwise it goes to a
file on the node's disk, and its memory is free meanwhile. The file has no name, so nothing is left of it whatever becomes of
this process; and what comes back is compared, by its hash, with what went.
"""

from __future__ import annotations

import ctypes
import gc
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

import psutil
import xxhash
from torch import Tensor

from raytrain_ft.storage.pages import give_back
from raytrain_ft.training.state import TrainingState

NEEDED = 2.0
"""Times its own state that a helper needs for another stage: its state, of about the same size, for stages are cut to be alike;
its gradients, two thirds of that with Adam (each parameter's, and their bucket's); and what passes through it."""
MARGIN = 0.05
"""Of all memory, what is left free: Ray ends workers of a node whose memory is used up to 95 %."""
CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
    ),
)
"""What bounds the memory of a container, by cgroups of the second and the first version."""
DISK = "/var/tmp"
"""`/tmp` is memory on some systems, this is a disk."""


PART_BYTES = 16 * 2**20
"""Between two looks at the fence."""
_trim = ctypes.CDLL(None).malloc_trim


class LostAsideError(Exception):
    """What was set aside could not be had back: whoever holds it holds nothing any more."""


class Region(NamedTuple):
    """Memory, by its address and its size in bytes."""

    address: int
    size: int


def regions_of(state: TrainingState) -> list[Region]:
    """Where the weights that are trained lie, and what the optimizer keeps for them, each piece once; on the CPU, as stages
    are. Not what a stage may share with others of the same task: frozen weights and buffers."""
    params = [p for bucket in state.buckets for p in bucket.params]
    kept = (value for p in params for value in state.optimizer.state.get(p, {}).values() if isinstance(value, Tensor))
    storages = [tensor.untyped_storage() for tensor in (*params, *kept) if tensor.is_cpu]
    return sorted({Region(storage.data_ptr(), storage.nbytes()) for storage in storages if storage.nbytes()})


def fits_beside(own: int, free: int, extra: int = 0) -> bool:
    """Whether another stage fits beside one whose state has `own` bytes, with so many bytes free, if it needs so much more."""
    return free >= NEEDED * own + extra


def free_memory() -> int:
    """Bytes that this process may still use, as far as the system and its container say."""
    memory = psutil.virtual_memory()
    rooms = [memory.available - MARGIN * memory.total]
    for limit, usage, details in CGROUPS:
        most, used = _number(limit), _number(usage)
        if most is not None and used is not None and most < memory.total:
            rooms.append((1 - MARGIN) * most - used + _reclaimable(details))
    return max(0, int(min(rooms)))


def _number(path: str) -> int | None:
    """What such a file says; None for "max", and where there is none."""
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None


def _reclaimable(path: str) -> int:
    """Bytes of the container's cache of files, which the system takes back when memory is asked for."""
    try:
        lines = [line.split() for line in Path(path).read_text().splitlines()]
    except OSError:
        return 0
    return next((int(value) for name, value in lines if name in ("total_inactive_file", "inactive_file")), 0)


@contextmanager
def room_for_another(
    state: TrainingState, check: Callable[[], None], tell: Callable[[int, float], None], sharing: int = 1, extra: int = 0
) -> Iterator[None]:
    """For as long as this is entered there is room for a replica of another stage, as far as that is known: this state stays
    in memory if both fit, and is on the disk if they do not.

    Args:
        check: called again and again while it is written; may raise to leave that, and then nothing has changed.
        tell: is told, once it is back, of its bytes and of the seconds that it took to write and to read them.
        sharing: how many on this node make room at the same time, this one included: each may use its part of what is free.
        extra: bytes that the other stage needs beyond what any does.

    Raises:
        MemoryError: the other stage does not fit even so. OSError, LostAsideError: see `on_disk`.
    """
    regions = regions_of(state)
    size = sum(region.size for region in regions)
    _collect()
    free = free_memory() // sharing
    if fits_beside(size, free, extra):
        yield
        return
    if not fits_beside(size, free + size, extra):
        raise MemoryError(
            f"{free} bytes are free, and {size} more without its own state, of {NEEDED:g} times {size} and {extra}"
        )
    seconds = -time.monotonic()
    with on_disk(regions, check):
        seconds += time.monotonic()
        yield
        seconds -= time.monotonic()
    tell(size, seconds + time.monotonic())


def _collect() -> None:
    """A replica that nobody uses any more is a cycle, which the collector has to find, and the C library keeps what is free."""
    gc.collect()
    _trim(0)


@contextmanager
def on_disk(regions: Sequence[Region], check: Callable[[], None]) -> Iterator[None]:
    """For as long as this is entered, what lies there is on the disk, and its pages are the system's. The addresses stay what
    they are, and so does whoever refers to them.

    Args:
        check: called again and again while it is written; may raise to leave that.

    Raises:
        OSError: the disk does not take it; nothing has changed. LostAsideError: it does not give it back as it was.
    """
    if _is_memory(DISK):
        raise OSError(f"{DISK} is memory, not a disk")
    with tempfile.TemporaryFile(dir=DISK) as file:
        hashes = [_write(region, file, check) for region in regions]
        file.flush()
        os.fsync(file.fileno())  # what the disk refuses is known now, and the pages of its cache can be had back as well
        check()
        try:
            for region in regions:
                give_back(*region)
            yield
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # they hold what this memory was free for
            raise
        finally:
            _have_back(regions, hashes, file)


def _is_memory(path: str) -> bool:
    """Whether what is written there stays in memory."""
    mounts = {mount.mountpoint: mount.fstype for mount in psutil.disk_partitions(all=True)}
    where = Path(path).resolve()
    return next((mounts[str(one)] for one in (where, *where.parents) if str(one) in mounts), "") in ("tmpfs", "ramfs")


def _write(region: Region, file: IO[bytes], check: Callable[[], None]) -> str:
    content, hasher = _content(region), xxhash.xxh3_128()
    for start in range(0, region.size, PART_BYTES):
        check()
        part = content[start : start + PART_BYTES]
        file.write(part)
        hasher.update(part)
    return hasher.hexdigest()


def _have_back(regions: Sequence[Region], hashes: Sequence[str], file: IO[bytes]) -> None:
    try:
        _collect()
        file.seek(0)
        for region, wanted in zip(regions, hashes, strict=True):
            content = _content(region)
            if file.readinto(content) != region.size or xxhash.xxh3_128_hexdigest(content) != wanted:  # pyright: ignore
                raise OSError("it is not what was written")
    except BaseException as error:  # whatever it is, it is in memory in part at best
        raise LostAsideError(f"the state that was set aside on the disk cannot be had back: {error!r}") from error


def _content(region: Region) -> memoryview:
    """Its bytes, to be read or written."""
    return memoryview((ctypes.c_char * region.size).from_address(region.address)).cast("B")
