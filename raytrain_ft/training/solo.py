"""A group of one: what it holds is already the sum."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from raytrain_ft.training.fence import Fence


class Solo:
    """The group of a rank that is alone."""

    def __init__(self, fence: Fence) -> None:
        self.fence = fence

    def all_reduce(self, tensor: Tensor, silent: Collection[int] = (), said: int = 0) -> Finished:
        """Nothing to do."""
        del tensor, silent, said
        self.fence.check()
        return Finished(self.fence)


class Finished:
    """A collective of one."""

    def __init__(self, fence: Fence) -> None:
        self._fence = fence

    def wait(self) -> bool:
        self._fence.check()
        return True

    def is_completed(self) -> bool:
        return True

    def succeeded(self) -> bool:
        return True
