"""A collective under way, whose wait can be woken: by its end, by the fence, or by a deadline."""

from __future__ import annotations

import re
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from raytrain_ft.training.fence import WAIT_DEADLINE, Fence, PeerLostError

DEVICE_POLL_S = 0.0005


class FencedWork(dist.Work):
    """A collective under way. `wait` is left by completion, by the fence or by the deadline.

    Args:
        on_device: it is NCCL's. Its future is complete as soon as it is queued, so its end is looked for instead.
    """

    def __init__(self, inner: dist.Work, fence: Fence, *, on_device: bool = False) -> None:
        super().__init__()
        self._inner: Any = inner
        self._fence = fence
        self._on_device = on_device
        self._done = threading.Event()
        self._broken_off = False
        self._future = None if on_device else self._observe()

    def _observe(self) -> torch.futures.Future:
        try:
            future = self._inner.get_future()
        except RuntimeError:
            # gloo's send and receive have no future: a thread waits for them. They belong to recoveries and pipelines.
            future = torch.futures.Future()
            threading.Thread(target=self._wait_inside, args=(future,), name="gloo-wait", daemon=True).start()
        future.add_done_callback(self._finished)
        return future

    def _finished(self, _: object) -> None:
        self._done.set()

    def _wait_inside(self, future: torch.futures.Future) -> None:
        try:
            self._inner.wait()
        except RuntimeError as error:
            future.set_exception(error.with_traceback(None))  # which would keep this work, where no collector looks
        else:
            future.set_result(None)

    def succeeded(self) -> bool:
        """Whether the result is there and sound. Never waits, and looks past the fence: used to take stock."""
        return self.is_completed() and self._failure() is None

    def _failure(self) -> RuntimeError | None:
        if not self.is_completed():
            return RuntimeError("not finished")
        if self._future is None:
            # Of NCCL's works `is_success` is not implemented. This future has a number once something went wrong, or, some time
            # after it went well, 0. What `release` broke off looks as if it had come to its end.
            result = self._inner.get_future_result()
            broken = self._broken_off or (result.done() and result.value() != 0)
            return RuntimeError("NCCL gave it up") if broken else None
        try:
            self._future.value()
        except RuntimeError as error:
            return error
        return None

    def wait(self, timeout: timedelta = WAIT_DEADLINE) -> bool:
        """Waits for the result.

        Raises:
            FencedError: the incarnation ended.
            PeerLostError: the collective failed or the deadline passed.
        """
        patience = timeout if timeout > timedelta() else WAIT_DEADLINE
        if self._on_device:
            self._look_until(time.monotonic() + patience.total_seconds())
        else:
            self._fence.wait(self._done, patience)
        error = self._failure()
        if error is not None:
            raise PeerLostError(f"a collective failed ({in_short(error)})") from error
        if self._on_device:
            self._inner.wait()  # it has ended: this only orders the streams
        return True

    def came(self, seconds: float) -> bool:
        """Whether it came to its end, be it a good one, within so many seconds; of gloo only. Raises FencedError."""
        return self._fence.came(self._done, seconds)

    def _look_until(self, deadline: float) -> None:
        while not self.is_completed() and time.monotonic() < deadline:
            self._fence.check()
            time.sleep(DEVICE_POLL_S)
        self._fence.check()  # it may be complete because it was broken off

    def is_completed(self) -> bool:
        # Not `_done`, which the fence sets as well: gloo is then still at work.
        return self._inner.is_completed() if self._future is None else self._future.done()

    def break_off(self) -> None:
        """It counts as failed from now on, unless it is complete: its group is about to be given back."""
        self._broken_off = not self.is_completed()

    def is_success(self) -> bool:
        return self.succeeded()

    def get_future(self) -> torch.futures.Future:  # type: ignore[override]
        if self._future is None:
            return super().get_future()
        return self._future


def in_short(error: Exception) -> str:
    """What gloo says, without the place in its source and without its advice."""
    return re.sub(r"^\[[^\]]*\]\s*", "", str(error)).split(". This is typically")[0][:200]
