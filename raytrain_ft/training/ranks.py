"""The processes that train together, as torch.distributed has them (torchrun, Ray Train), or one process alone.

What they tell each other here is small and rare: JSON, in tensors of bytes over a gloo group of their own, so that it neither
needs a GPU nor disturbs the collectives of the training. Nothing is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from raytrain_ft import errors
from raytrain_ft.errors import FTError, StorageError

T = TypeVar("T")


class Ranks:
    """This process among those that train together. Every method is a collective: all ranks call it, in the same order.

    Attributes:
        rank, count: this process's number, and of how many; 0 of 1 without torch.distributed.
    """

    def __init__(self, timeout: timedelta) -> None:
        """Joins. A rank that does not come within `timeout` makes every method here raise StorageError, but for `meet`."""
        self.rank, self.count = current()
        self._timeout, self._patience = timeout, max(timeout, default_pg_timeout)
        self._group, self._meeting = self._new_group(self._timeout), self._new_group(self._patience)

    def _new_group(self, timeout: timedelta) -> Any:
        return dist.new_group(backend="gloo", timeout=timeout) if self.count > 1 else None

    def first_says(self, value: Any) -> Any:
        """Rank 0's value, on every rank; what the others give is ignored.

        Raises:
            StorageError: rank 0 cannot be reached.
        """
        return self._broadcast(value, self._group, self._timeout)

    def meet(self, value: Any) -> Any:
        """As `first_says`, in the midst of training: a rank that evaluates is waited for as long as torch's collectives do."""
        return self._broadcast(value, self._meeting, self._patience)

    def _broadcast(self, value: Any, group: Any, timeout: timedelta) -> Any:
        if group is None:
            return value
        content = _bytes(value) if self.rank == 0 else torch.empty(0, dtype=torch.uint8, device="cpu")
        size = torch.tensor([len(content)], device="cpu")
        self._carefully(lambda: dist.broadcast(size, 0, group=group), timeout)
        if self.rank != 0:
            content = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        self._carefully(lambda: dist.broadcast(content, 0, group=group), timeout)
        return _value(content)

    def all_say(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of ranks.

        Raises:
            StorageError: a rank cannot be reached.
        """
        if self._group is None:
            return [value]
        content = _bytes(value)
        sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.count)]
        self._carefully(
            lambda: dist.all_gather(sizes, torch.tensor([len(content)], device="cpu"), group=self._group), self._timeout
        )
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8, device="cpu")
        padded[: len(content)] = content
        found = [torch.empty(longest, dtype=torch.uint8, device="cpu") for _ in range(self.count)]
        self._carefully(lambda: dist.all_gather(found, padded, group=self._group), self._timeout)
        return [_value(one[: int(size)]) for one, size in zip(found, sizes, strict=True)]

    def failures(self, error: FTError | None) -> list[FTError]:
        """The errors of all ranks that have one: this rank's own first, then in the order of ranks.

        Raises:
            StorageError: a rank cannot be reached.
        """
        said = self.all_say(None if error is None else [type(error).__name__, str(error)])
        found = [] if error is None else [error]
        for rank, other in enumerate(said):
            if other is not None and rank != self.rank:
                kind: type[FTError] = getattr(errors, other[0], StorageError)
                found.append(kind(f"rank {rank}: {other[1]}"))
        return found

    def agree(self, error: FTError | None) -> None:
        """Raises on every rank if one of them has an error: its own, or else that of the first that has one."""
        for failure in self.failures(error):
            raise failure

    def first_does(self, work: Callable[[], T]) -> T:
        """What rank 0's work gives, or its error, on every rank."""
        value, error = tried(work) if self.rank == 0 else (None, None)
        self.agree(error)
        return self.first_says(value)

    def all_do(self, work: Callable[[], T]) -> T:
        """What this rank's work gives; an error of one is an error of all."""
        value, error = tried(work)
        self.agree(error)
        return value  # pyright: ignore[reportReturnType]

    def leave(self) -> None:
        """Gives the groups up. A process that ends with a collective broken off in one of them may be aborted by torch."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
            dist.destroy_process_group(self._meeting)
            self._group = self._meeting = None

    def _carefully(self, collective: Any, timeout: timedelta) -> None:
        try:
            collective()
        except RuntimeError as error:
            raise StorageError(
                f"rank {self.rank} of {self.count}: the others could not be reached within {timeout}; "
                "is one of them lost, or not inside checkfreq.open? Or does it still read a large checkpoint? Then give "
                f"checkfreq.open a longer timeout=... ({error})"
            ) from error


def tried(work: Callable[[], T]) -> tuple[T | None, FTError | None]:
    """What the work gives, or its error."""
    try:
        return work(), None
    except FTError as error:
        return None, error


def current() -> tuple[int, int]:
    """(rank, world size) by torch.distributed; (0, 1) if that is not in use."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _value(content: Tensor) -> Any:
    return json.loads(content.numpy().tobytes())
