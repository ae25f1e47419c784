"""How state travels between the members of one incarnation: from several at once, and in an order that all share.

The copies of a plan are taken in waves, in each of which nobody gives more than one: so a replacement receives from all its
sources at the same time, and a source holds one packed bucket besides its state. All members take the same waves in the same
order, and start everything of a wave before they wait for any of it: no two can wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from raytrain_ft.policy.reconcile import Copy
from raytrain_ft.training.process_group import FencedGroup


def waves(copies: Sequence[Copy]) -> Iterator[list[Copy]]:
    """Cuts a plan's copies, in their order, before each one whose source has given in this wave."""
    wave: list[Copy] = []
    for copy in copies:
        if any(copy.source == other.source for other in wave):
            yield wave
            wave = []
        wave.append(copy)
    if wave:
        yield wave


class Transfer:
    """Copies within the group of one incarnation.

    Args:
        world: the members by rank. member: this one.
        device: where messages must lie; NCCL sends from a GPU only.
        probe: told of "transfer_source" before each message of state, and of "transfer_receiver" before each is waited for.
    """

    def __init__(
        self, group: FencedGroup, world: Sequence[str], member: str, device: torch.device, probe: Callable[[str], None]
    ) -> None:
        self.group = group
        self.member = member
        self._device = device
        self._rank = {name: rank for rank, name in enumerate(world)}
        self._probe = probe

    def copy(self, copies: Sequence[Copy], give: Callable[[Copy], Tensor]) -> list[tuple[int, Tensor]]:
        """Carries out this member's part of a plan's copies.

        Args:
            give: what this member has to send for a copy whose source it is, as bytes (uint8).

        Returns:
            What it received, as bytes on the CPU, with the number of the bucket that it belongs to.

        Raises:
            FencedError: the incarnation ended; PeerLostError: a message failed.
        """
        received: list[tuple[int, Tensor]] = []
        for wave in waves(copies):
            payloads = [give(copy).to(self._device) if copy.source == self.member else None for copy in wave]
            sizes = [self._numbers(0 if payload is None else payload.numel()) for payload in payloads]
            self._move(wave, sizes)
            for i, (copy, size) in enumerate(zip(wave, sizes, strict=True)):
                if self.member in copy.targets:
                    payloads[i] = torch.empty(int(size), dtype=torch.uint8, device=self._device)
            self._move(wave, payloads, probe=self._probe)
            for copy, payload in zip(wave, payloads, strict=True):
                if payload is not None and self.member in copy.targets:
                    received.append((copy.bucket, payload.cpu()))
        return received

    def _numbers(self, number: int) -> Tensor:
        return torch.tensor([number], dtype=torch.int64, device=self._device)

    def _move(self, wave: list[Copy], messages: Sequence[Tensor | None], probe: Callable[[str], None] = lambda _: None) -> None:
        """One message for each copy, from its source to all its targets, where this member has a part in it."""
        works = []
        for copy, message in zip(wave, messages, strict=True):
            if message is None:
                continue
            if self.member == copy.source:
                for target in copy.targets:
                    probe("transfer_source")
                    works.append(self.group.send([message], self._rank[target], 0))
            elif self.member in copy.targets:
                probe("transfer_receiver")
                works.append(self.group.recv([message], self._rank[copy.source], 0))
        for work in works:
            work.wait()
