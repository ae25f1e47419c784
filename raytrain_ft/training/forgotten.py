"""Notices that the steps of a loop do not end, or that its updates are not seen: no checkpoint is made then, and nothing else
would tell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

FORGOTTEN = 100
"""So many updates without a batch, or batches without an update: perhaps something was not given to `open`."""
LOOKS = 32
"""At so many batches on end after these, the weights are looked at; and again after as many more without an update."""
CHANGES = 3
"""They have to change so often meanwhile. Others than updates change them too, but not again and again: a validation may put an
average in their place, and them back at its end."""
LOOKED_AT = 32
"""So many of a model's parameters, about: an optimizer changes all, or all of its last layers."""

NO_BATCH = (
    f"{FORGOTTEN} updates were made since a batch was last asked of a checkfreq.Loader that checkfreq.open was given, so no "
    "step ends, and no checkpoint begins. If this is the training: checkfreq.open(..., loader=loader), or in a loop without a "
    "Loader run.commit() before each batch. itertools.cycle(loader) reads the loader once and then repeats the batches that it "
    "has kept: use run.batches(loader, until_step=...)"
)
NOT_GIVEN = "batches were read and no update was seen: pass the optimizer"
NOT_SEEN = (
    f"no update was seen in the last {FORGOTTEN} batches, and the weights change all the same, so no step ends, and no "
    "checkpoint begins. An optimizer that was made anew after checkfreq.open is not the one that it was given, and what is no "
    "torch.optim.Optimizer, such as a wrapper without Optimizer.__init__, is not followed: make it before checkfreq.open and "
    "pass it there, and use `with run.update():` around updates that torch's optimizers do not make themselves"
)


class Forgotten:
    """Counts since the last update, and since a step could last end. Says what it notices, once."""

    def __init__(self, tell: Callable[[str], None], parameters: Callable[[], Iterable[Tensor]], *, follows: bool) -> None:
        """`parameters`: gives those that are stored; `follows`: whether there is an optimizer that tells of its updates."""
        self._tell, self._parameters, self._follows = tell, parameters, follows
        self._told = self._by_hand = self._updated = False
        self._batches = 0  # since the last update
        self._updates: Counter[int | None] = Counter()  # by optimizer, since a batch was asked for
        self._seen = ""
        self._changes = 0

    def asked(self, *, by_hand: bool) -> None:
        """A batch is asked for, whereby a step would end. `by_hand`: the loop said so itself; it may make as many updates in
        between as it likes."""
        self._by_hand |= by_hand
        self._updates.clear()
        self._batches += 1
        if not self._follows and not self._updated:
            if self._batches == FORGOTTEN:
                self.tell(NOT_GIVEN)
        elif not self._told and self._batches >= FORGOTTEN:
            self._look(self._batches % FORGOTTEN)

    def _look(self, number: int) -> None:
        """A validation, or gradients that are accumulated, change no weights."""
        if number > LOOKS:
            return
        before, self._seen = self._seen, _sample(self._parameters())
        self._changes = self._changes + (self._seen != before) if number else 0
        if self._changes == CHANGES:
            self.tell(NOT_SEEN)

    def updated(self, optimizer: int | None, *, reading: bool) -> None:
        """There was an update, of this optimizer (None: of none that is followed). `reading`: in a loop over a loader, which
        has yet to ask for the next batch."""
        self._batches, self._updated = 0, True
        self._updates[optimizer] += 1
        if not reading and not self._by_hand and self._updates[optimizer] >= FORGOTTEN:
            self.tell(NO_BATCH)

    def tell(self, reason: str) -> None:
        """Says it, if nothing was said yet."""
        if not self._told:
            self._told = True
            self._tell(reason)


def _sample(parameters: Iterable[Tensor]) -> str:
    """What is another text if (but for chance) the parameters are others, though little of them is read."""
    trained = [plain for one in parameters if one.requires_grad and type(plain := one.detach()) is Tensor and plain.numel()]
    chosen = [*trained[:: len(trained) // LOOKED_AT + 1], *trained[-1:]]
    with torch.no_grad():
        return repr([one[tuple(size // 2 for size in one.shape)].item() for one in chosen])
