"""The live ends of a pipeline's edges, without gloo."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from raytrain_ft.training.edges import HEADER_TAG, LiveInbound, describe
from raytrain_ft.training.fence import Fence, PeerLostError


class Arrival:
    """A receive that never ends, or that of a description."""

    def __init__(self, ended: threading.Event) -> None:
        self._ended = ended

    def wait(self, timeout: Any) -> None:
        assert self._ended.wait(30)


class Group:
    """Takes the description and one receive; then the connection is reset."""

    def __init__(self) -> None:
        self.fence = Fence(1)
        self.posted = 0
        self.ended = threading.Event()

    def post_receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Arrival:
        if tag == HEADER_TAG:
            tensor.copy_(torch.tensor(describe([torch.zeros(3)])))
            done = threading.Event()
            done.set()
            return Arrival(done)
        self.posted += 1
        if self.posted > 1:
            raise PeerLostError("connection reset by peer")
        return Arrival(self.ended)


def test_a_connection_that_breaks_ends_every_wait_at_once() -> None:
    """Also that for what was posted before, whose end gloo may never tell, and for what is wanted later."""
    group: Any = Group()
    edge = LiveInbound(group, peer=1, kind="activation")
    try:
        edge.begin(0, (0, 1, 2))
        for number in (0, 1, 2):
            with pytest.raises(PeerLostError, match="nothing more comes from rank 1: connection reset"):
                within(5, lambda number=number: edge.take(number))
        edge.begin(1, (0,))
        with pytest.raises(PeerLostError, match="nothing more comes"):
            within(5, lambda: edge.take(0))
    finally:
        group.fence.trip()
        group.ended.set()


def within(seconds: float, call: Any) -> None:
    """What it raises; or AssertionError if it takes longer."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"it takes longer than {seconds:g} s"
    if raised:
        raise raised[0]
