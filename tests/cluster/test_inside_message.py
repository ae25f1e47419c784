"""A stage of a pipeline dies inside a message: some of a tensor has come to its receiver, and the rest never does.

Messages are large enough to be under way for many times as long as it takes to kill somebody, and larger than all that the
system holds of them on the way. Whoever receives one looks at its first number until it is there, and then kills itself, or
who sends. Who is left proves where that was: the receiver has a part of the tensor, or the sender never got rid of all of it.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from conftest import STAGES, pipeline, promise_kept
from toy import Toy

import raytrain_ft as ft
from raytrain_ft.policy.strategy import Guarantee, Strategy
from raytrain_ft.training.edges import CHANNELS, WHOLE_STEP, tag
from raytrain_ft.training.fence import WAIT_DEADLINE, Fence
from raytrain_ft.training.process_group import FencedGroup

pytestmark = pytest.mark.long

COPIES = 2**14
SAMPLES, WIDTH = 8, 64
NUMBERS = SAMPLES * WIDTH * COPIES
"""Of a message: 32 MiB of floats."""
LOOK_S = 1e-4


@dataclass(frozen=True)
class Strike:
    """Who dies inside which message: its sender or its receiver. Once in a run: notes say what has happened.

    Attributes:
        sender, receiver: stages, and as there is one replica, ranks.
    """

    inside: Literal["send", "receive"]
    sender: int
    receiver: int
    step: int
    kind: Literal["activation", "gradient", "tied"]
    micro_batch: int = 1

    @property
    def victim(self) -> int:
        return self.sender if self.inside == "send" else self.receiver

    @property
    def name(self) -> str:
        return f"{self.inside}-{self.sender}-{self.receiver}-{self.step}"

    def is_in(self, sender: int, receiver: int, number: int, tensor: torch.Tensor) -> bool:
        """Whether this is the message; what is said of a tied gradient before it is not."""
        mine = tag(self.step, self.micro_batch, CHANNELS.index(self.kind))
        return (sender, receiver, number) == (self.sender, self.receiver, mine) and tensor.numel() == NUMBERS

    def is_due(self, notes: Path) -> bool:
        return not (notes / f"{self.name}.struck").exists()


def strike_inside(strike: Strike, numbers: np.ndarray[Any, Any], fence: Fence, notes: Path) -> None:
    """In the receiver's process. If all of the message has come before it is seen, nobody dies, and the test finds nothing."""
    while math.isnan(numbers[0]) and not fence.tripped:
        time.sleep(LOOK_S)
    if math.isnan(numbers[0]) or not math.isnan(numbers[-1]):
        return
    victim = os.getpid() if strike.inside == "receive" else int((notes / f"{strike.name}.sender").read_text())
    note = notes / f"{strike.name}.struck"
    note.write_text(str(victim))
    if not math.isnan(numbers[-1]):  # all of it came while that was written: it was sent
        note.unlink()
        return
    os.kill(victim, signal.SIGKILL)


def say_when_sent(work: Any, note: Path) -> None:
    """In the sender's process, if it lives. Gloo does not always tell of a message that broke off."""
    with suppress(RuntimeError):
        work.wait(WAIT_DEADLINE)
        with note.open("a") as file:
            file.write("sent ")


def look_into_messages(strikes: Sequence[Strike], notes: Path) -> None:
    """In this process, from now on."""
    send, receive = FencedGroup.post_send, FencedGroup.post_receive
    if send.__name__ != "post_send":
        return  # the model is built once more
    broken_off: dict[str, np.ndarray[Any, Any]] = {}

    def watched_send(self: FencedGroup, tensor: torch.Tensor, peer: int, number: int) -> Any:
        for strike in strikes:
            if strike.is_in(self.rank(), peer, number, tensor):
                (notes / f"{strike.name}.sender").write_text(str(os.getpid()))
                work = send(self, tensor, peer, number)
                about = (work, notes / f"{strike.name}.sent")
                threading.Thread(target=say_when_sent, args=about, daemon=True).start()
                return work
        return send(self, tensor, peer, number)

    def watched_receive(self: FencedGroup, tensor: torch.Tensor, peer: int, number: int) -> Any:
        for strike in strikes:
            if strike.is_in(peer, self.rank(), number, tensor) and strike.is_due(notes):
                tensor.fill_(math.nan)  # what no message has in it
                numbers = broken_off[strike.name] = tensor.view(-1).numpy()
                work = receive(self, tensor, peer, number)
                threading.Thread(target=strike_inside, args=(strike, numbers, self.fence, notes), daemon=True).start()
                return work
            if strike.is_in(peer, self.rank(), number, tensor) and strike.name in broken_off:  # it is sent once more
                came = np.count_nonzero(~np.isnan(broken_off.pop(strike.name)))
                (notes / f"{strike.name}.came").write_text(str(came))
        return receive(self, tensor, peer, number)

    FencedGroup.post_send, FencedGroup.post_receive = watched_send, watched_receive


class Copied(torch.nn.Module):
    """Makes the message large."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat(1, COPIES)


class Averaged(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(len(x), COPIES, WIDTH).mean(1)


class Wide(Toy):
    """Three stages that send each other large tensors. The bits do not depend on who looks at them."""

    def __init__(self, strikes: Sequence[Strike] = (), notes: Path | None = None) -> None:
        super().__init__()
        self.strikes, self.notes = strikes, notes
        self.driver = os.getpid()

    def model(self, stage: int) -> torch.nn.Module:
        if self.notes is not None and os.getpid() != self.driver:  # where the model is built as well, to look at it
            look_into_messages(self.strikes, self.notes)
        first = [torch.nn.Linear(16, WIDTH), torch.nn.Tanh(), torch.nn.Dropout(0.1), Copied()]
        middle = [Averaged(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Dropout(0.1), Copied()]
        return torch.nn.Sequential(*first, *middle, Averaged(), torch.nn.Linear(WIDTH, 4))


STRIKES = [
    *(Strike("send", 0, 1, 1, "activation"), Strike("receive", 1, 0, 3, "gradient")),
    *(Strike("receive", 0, 1, 1, "activation"), Strike("send", 1, 2, 2, "activation")),
    *(Strike("receive", 2, 1, 3, "gradient"), Strike("send", 1, 0, 4, "gradient")),
    *(Strike("receive", 1, 2, 1, "activation"), Strike("send", 2, 1, 3, "gradient")),
]
# with so much to log for so small a model, there would be no log
HOW = {"steps": 6, "micro_batches": 2, "global_batch_size": 2 * SAMPLES, "split": (4, 9), "strategy": "logging"}


class Corner(torch.nn.Module):
    """Uses a few numbers of a large parameter, whose gradient is as large."""

    def __init__(self, weight: torch.nn.Parameter, inputs: int) -> None:
        super().__init__()
        self.weight, self.inputs = weight, inputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight[: self.inputs, :WIDTH]


class Tied(Wide):
    """The first and the last stage share a large parameter, and send each other their parts of its gradient in every step."""

    def model(self, stage: int) -> torch.nn.Module:
        super().model(stage)
        weight = torch.nn.Parameter(0.1 * torch.randn(NUMBERS // 512, 512))
        first, middle = [Corner(weight, 16), torch.nn.Tanh()], [torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()]
        return torch.nn.Sequential(*first, *middle, Corner(weight, WIDTH), torch.nn.Linear(WIDTH, 4))


TIED = [
    *(Strike("send", 0, 2, 1, "tied", WHOLE_STEP), Strike("receive", 2, 0, 3, "tied", WHOLE_STEP)),
    *(Strike("receive", 0, 2, 2, "tied", WHOLE_STEP), Strike("send", 2, 0, 4, "tied", WHOLE_STEP)),
]


@pytest.fixture(scope="module")
def calm(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> ft.Result:
    return pipeline(tmp_path_factory.mktemp("calm"), "run", task=Wide(), **HOW)


@pytest.mark.parametrize("stage", range(STAGES))
def test_a_stage_dies_inside_what_it_sends_and_what_it_receives(calm: ft.Result, tmp_path: Path, stage: int) -> None:
    strikes = [strike for strike in STRIKES if strike.victim == stage]
    has_struck(strikes, calm, Wide(strikes, tmp_path), HOW)


@pytest.fixture(scope="module")
def calm_tied(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> ft.Result:
    return pipeline(tmp_path_factory.mktemp("calm"), "run", task=Tied(), **TOGETHER)


TOGETHER = {**HOW, "split": (2, 4)}


@pytest.mark.parametrize("stage", [0, 2])
def test_a_stage_dies_inside_a_gradient_of_what_it_shares(calm_tied: ft.Result, tmp_path: Path, stage: int) -> None:
    strikes = [strike for strike in TIED if strike.victim == stage]
    has_struck(strikes, calm_tied, Tied(strikes, tmp_path), TOGETHER)


def has_struck(strikes: Sequence[Strike], calm: ft.Result, task: Wide, how: dict[str, Any]) -> None:
    """A run in which these strike ends as the calm one."""
    tmp_path, never = task.notes, ft.CheckpointConfig(every=100)
    assert tmp_path is not None
    result = pipeline(tmp_path, "run", task=task, **how, num_spares=1, checkpoints=never)
    for strike in strikes:
        assert not strike.is_due(tmp_path), f"{strike} has struck"
        if strike.inside == "send":
            assert 0 < int((tmp_path / f"{strike.name}.came").read_text()) < NUMBERS, "some of it had come, and not all"
        else:
            assert (tmp_path / f"{strike.name}.sent").read_text() == "sent ", "once more, but not the first time"
    assert result.digest == calm.digest
    assert promise_kept(result) == []
    assert [len(recovery.lost) for recovery in result.recoveries] == [1] * len(strikes)
    assert {(r.strategy, r.guarantee) for r in result.recoveries} == {(Strategy.LOGGING, Guarantee.EXACT)}
    assert [(r.step, r.redone) for r in result.recoveries] == [(strike.step, 0) for strike in strikes]
