"""Notices that the steps of a loop do not end, or that its updates are not seen: no checkpoint is made then, and nothing else
would tell."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

import torch
from torch import Tensor

FORGOTTEN = 100
"""So many updates without a batch, or batches without an update: perhaps something was not given to `open`."""
EPOCHS = 3
"""And so many whole epochs, where an epoch without an update is no mistake yet: gradients are accumulated, or infinite."""
LOOKS = 32
"""In so many batches after these, the weights are looked at; and again after as many more without an update."""
EVERY = 8
"""At every so many of them: often enough for what follows."""
CHANGES = 3
"""They have to change so often meanwhile. Others than updates change them too, but not again and again: a validation may put an
average in their place, and them back at its end."""
QUIET = 2
"""After as many hundreds on end in which the weights stayed as they were, only one in `SELDOM` is looked at."""
SELDOM = 10
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
        self._chosen: list[ref[Tensor]] = []  # what is looked at
        self._seen = ""
        self._changes = 0  # in this hundred
        self._quiet = 0  # hundreds on end without any

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
            self._look(*divmod(self._batches, FORGOTTEN))

    def _look(self, hundred: int, number: int) -> None:
        """A validation, or gradients that are accumulated, change no weights."""
        if number > LOOKS or number % EVERY or (self._quiet >= QUIET and hundred % SELDOM):
            return
        chosen = [one for one in (of() for of in self._chosen) if one is not None]
        if not number or len(chosen) < len(self._chosen):  # an update may put others in their place, which is a change too
            chosen = choice(self._parameters())
            self._chosen = [ref(one) for one in chosen]
        before, self._seen = self._seen, sample(chosen)
        self._changes = self._changes + (self._seen != before) if number else 0
        if number == LOOKS:
            self._quiet = 0 if self._changes else self._quiet + 1
        if self._changes == CHANGES:
            self.tell(NOT_SEEN)

    def updated(self, optimizer: int | None, *, reading: bool) -> None:
        """There was an update, of this optimizer (None: of none that is followed). `reading`: in a loop over a loader, which
        has yet to ask for the next batch."""
        self._batches, self._quiet, self._updated = 0, 0, True
        self._updates[optimizer] += 1
        if not reading and not self._by_hand and self._updates[optimizer] >= FORGOTTEN:
            self.tell(NO_BATCH)

    def stands_still(self, epochs: int, batches: int) -> bool:
        """Whether to give up after so many on end without an update. At once, if none could have been seen."""
        return (epochs > 0 and not (self._follows or self._updated)) or (epochs >= EPOCHS and batches >= FORGOTTEN)

    def tell(self, reason: str) -> None:
        """Says it, if nothing was said yet."""
        if not self._told:
            self._told = True
            self._tell(reason)


def choice(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Those of the parameters that are looked at."""
    trained = [one for one in parameters if one.requires_grad and type(one.detach()) is Tensor and one.numel()]
    return [*trained[:: len(trained) // LOOKED_AT + 1], *trained[-1:]]


@torch.no_grad()
def sample(chosen: Iterable[Tensor]) -> str:
    """What is another text if (but for chance) the parameters are others, though little of them is read: one element of each,
    and those of one device together, for it is waited for at each reading."""
    found: defaultdict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
    for one in chosen:
        plain = one.detach()
        found[plain.device, plain.dtype].append(plain[tuple(size // 2 for size in plain.shape)])
    return repr([torch.stack(elements).tolist() for elements in found.values()])
