"""Gradients in buckets: reduced while the backward pass goes on, updated when accepted, with a mark per bucket.

A bucket's flat buffer holds ``[gradients | used | missing | tail]``: the gradients of its parameters one after the other, one
flag per parameter (how many ranks had a gradient for it), how many samples of the global batch are missing in them, and, in the
last bucket only, the *tail*: values that every rank must agree upon at the end of the step (see `tail.py`). So a step needs no
collective besides those of its gradients, unless the tail says that *more* is to be agreed upon: that is reduced next, and the
last bucket counts as reduced only then.

The local gradient stays in ``p.grad`` until the reduced one is accepted, because a failed collective leaves its buffer
undefined. Marks are plain numbers, `version` and `gradient`, which `policy.reconcile` reads.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from raytrain_ft.errors import FencedError, TaskError
from raytrain_ft.storage.log_format import array_of, checksum_of
from raytrain_ft.storage.tensors import bytes_of
from raytrain_ft.training.fence import Fence, PeerLostError
from raytrain_ft.training.lists import copy_, zero_
from raytrain_ft.training.placing import view_like

Probe = Callable[[str, int | None], None]
SAMPLED = 1024
"""Of each bucket's gradients, at least."""


class Reduction(Protocol):
    """A sum under way."""

    def wait(self) -> bool:
        """Waits until the tensor holds it. Raises `FencedError` or `PeerLostError`."""
        ...

    def is_completed(self) -> bool:
        """Whether a wait would return, or raise, at once."""
        ...

    def succeeded(self) -> bool:
        """Whether the tensor holds it. Never waits, and looks past the fence."""
        ...


class Summing(Protocol):
    """What sums tensors over ranks: a group, a team, or one alone."""

    @property
    def fence(self) -> Fence:
        """Of the incarnation."""
        ...

    def all_reduce(self, tensor: Tensor, silent: Collection[int] = (), said: int = 0) -> Reduction:
        """See `FencedGroup.all_reduce`."""
        ...


class Ending(Protocol):
    """What ranks agree upon as a step ends."""

    def needs(self, tail: Tensor) -> int:
        """See `Tail.needs`."""
        ...

    def fill_more(self, tail: Tensor, more: Tensor) -> None:
        """See `Tail.fill_more`."""
        ...


class Bucket:
    """Parameters that are reduced and updated together.

    Attributes:
        version: updates applied to it.
        gradient: the step whose reduced gradient the flat buffer holds, or None.
        dirty: an update, or its undo, began and did not end: the state is neither version.
        more: what is reduced besides the flat buffer, if its tail says that anything is.
        accepted: the optimizer reads the reduced gradients; cleared wherever others come.
        selection: its parameters, to narrow an optimizer to.
    """

    def __init__(self, index: int, params: list[Parameter], tail_size: int) -> None:
        self.index = index
        self.params = params
        self.selection = Selection(params)
        self.tail_size = tail_size
        self.version = 0
        self.gradient: int | None = None
        self.dirty = False
        self.work: Reduction | None = None
        self._pattern, self._flags = list[bool](), torch.empty(0)
        self.allocate()

    def allocate(self) -> None:
        """A new flat buffer. The old one may still be written to by an abandoned collective, so it is never used again."""
        first = self.params[0]
        size = sum(p.numel() for p in self.params)
        self.flat = torch.zeros(size + len(self.params) + 1 + self.tail_size, dtype=first.dtype, device=first.device)
        self.views: list[Tensor] = []
        offset = 0
        for p in self.params:
            self.views.append(view_like(self.flat[offset : offset + p.numel()], p))
            offset += p.numel()
        self.used = self.flat[offset : offset + len(self.params)]
        self.missing = self.flat[offset + len(self.params)]
        self.tail = self.flat[offset + len(self.params) + 1 :]
        self.more: Tensor | None = None
        self.accepted = False

    def reduced(self) -> Tensor:
        """All that was reduced, as bytes."""
        return bytes_of(self.flat if self.more is None else torch.cat([self.flat, self.more]))

    def take_reduced(self, content: Tensor) -> None:
        """Takes over what another one has `reduced`."""
        flat, more = content.view(self.flat.dtype).tensor_split([len(self.flat)])
        self.flat.copy_(flat)
        self.more = more.to(self.flat.device) if len(more) else None
        self.accepted = False

    def collect(self) -> None:
        """Copies the local gradients into the flat buffer; a parameter without one contributes nothing."""
        self.gradient = self.more = None
        self.accepted = False
        self.missing.zero_()
        found = [(view, p.grad) for view, p in zip(self.views, self.params, strict=True)]
        pairs = [(view, grad) for view, grad in found if grad is not None]
        if pairs:
            copy_([view for view, _ in pairs], [grad for _, grad in pairs])
        if len(pairs) == len(found):
            self.used.fill_(1.0)
            return
        zero_([view for view, grad in found if grad is None])
        pattern = [grad is not None for _, grad in found]
        if pattern != self._pattern:  # to fill flags one by one takes longer than the rest
            self._pattern, self._flags = pattern, torch.tensor(pattern, dtype=self.flat.dtype, device=self.flat.device)
        self.used.copy_(self._flags)

    def scale(self, factor: float) -> None:
        """Multiplies the reduced gradients, because some of the samples are missing in them."""
        for view in self.views:
            view.mul_(factor)

    def accept(self) -> None:
        """Makes the reduced gradients the ones that the optimizer reads. What no rank used keeps no gradient, as in torch."""
        if self.accepted:
            return
        # Only a rank that had no gradient needs to look at the flags, all at once: no device sync in the usual case.
        used = [True] * len(self.params) if all(p.grad is not None for p in self.params) else self.used.tolist()
        for p, view, flag in zip(self.params, self.views, used, strict=True):
            p.grad = view if p.grad is not None or flag else None
        self.accepted = True


def check_kept(optimizer: Optimizer, buckets: Sequence[Bucket]) -> None:
    """Refuses an optimizer that keeps a gradient itself. Its memory is used again in the next step, whose own gradients would
    then be in the optimizer's state, other ones on each replica.

    Raises:
        TaskError: naming what it keeps.
    """
    reused = {bucket.flat.untyped_storage().data_ptr() for bucket in buckets}
    for kept in optimizer.state.values():
        for name, value in kept.items() if isinstance(kept, dict) else ():
            if isinstance(value, Tensor) and value.numel() and value.untyped_storage().data_ptr() in reused:
                raise TaskError(
                    f"the {type(optimizer).__name__} keeps a parameter's gradient itself as {name!r}, and the next step writes "
                    "its own there: keep a copy, p.grad.clone()"
                )


def sample_of(buckets: Sequence[Bucket]) -> int:
    """A number of 48 bits that stands for the gradients: the checksum of a thousand of each bucket, from all over it. What
    computes others (another kernel, another random number) changes nearly all of them."""
    found = []
    for bucket in buckets:
        size = sum(view.numel() for view in bucket.views)
        stride = max(1, size // SAMPLED) | 1  # odd, so that no column of a matrix is left out because of its width
        found.append(bucket.flat[:size:stride].contiguous().cpu())
    return checksum_of(map(array_of, found)) % 2**48


def partition(params: Sequence[Parameter], bucket_bytes: int, first_bucket_bytes: int) -> list[list[Parameter]]:
    """Groups parameters, in reverse order of registration, into buckets of about `bucket_bytes` of one dtype and device.

    The first one is small so that the reduction starts early, as in DDP.
    """
    groups: list[list[Parameter]] = []
    room = 0
    for p in reversed(list(params)):
        size = p.numel() * p.element_size()
        kind = (p.dtype, p.device)
        if not groups or room <= 0 or (groups[-1][0].dtype, groups[-1][0].device) != kind:
            room = bucket_bytes if groups else first_bucket_bytes
            groups.append([])
        groups[-1].append(p)
        room -= size
    return groups


class Selection:
    """Some parameters in an optimizer's groups: looked for once, as long as the groups have the same lists."""

    def __init__(self, params: Iterable[Parameter]) -> None:
        self._wanted = {id(p) for p in params}
        self._found: list[tuple[list[Parameter], int, list[Parameter]]] = []

    def of(self, optimizer: Optimizer) -> list[list[Parameter]]:
        """Those of each group, in its order."""
        lists = [group["params"] for group in optimizer.param_groups]
        same = len(self._found) == len(lists) and all(
            now is known and len(now) == length for now, (known, length, _) in zip(lists, self._found, strict=True)
        )
        if not same:
            self._found = [(one, len(one), [p for p in one if id(p) in self._wanted]) for one in lists]
        return [list(some) for _, _, some in self._found]  # the optimizer may do with its list what it likes


@contextmanager
def only(optimizer: Optimizer, params: Iterable[Parameter] | Selection) -> Iterator[None]:
    """Narrows an optimizer to some of its parameters: `step()` then updates these alone, whatever its class."""
    selection = params if isinstance(params, Selection) else Selection(params)
    full = [group["params"] for group in optimizer.param_groups]
    try:
        for group, some in zip(optimizer.param_groups, selection.of(optimizer), strict=True):
            group["params"] = some
        yield
    finally:
        for group, all_of_them in zip(optimizer.param_groups, full, strict=True):
            group["params"] = all_of_them


def _weakly(reducer: Reducer) -> Callable[[Tensor], None]:
    """A hook that does not keep its reducer: torch holds hooks where Python's collector sees no cycle, so a replica that is
    not needed any more would never be freed."""
    owner = weakref.ref(reducer)

    def grad_ready(p: Tensor) -> None:
        if (found := owner()) is not None:
            found._grad_ready(p)

    return grad_ready


class Reducer:
    """Reduces the buckets of one step over the group of one incarnation, overlapped with the backward pass.

    Args:
        on_reduced: called on the training thread with each bucket whose reduced gradient was accepted, in order. Under
            `update="wait_free"` this updates the bucket at once.
        eager: look for finished reductions during the backward pass already (wait-free), not only at its end.
        fill_tail: writes this rank's contribution to the tail just before the last bucket is reduced.
        ending: says whether more is to be reduced then, and has this rank's contribution to that.
        is_silent: asked before each bucket whether this rank contributes zeros from here on.
        finishes_alone: a backward pass whose reductions fail goes on, for the gradients of this rank (lossy), to its end or
            until the fence says that nobody can use them.

    Attributes:
        complete: the backward pass of the attempt has come to its end: `p.grad` is final where nothing was accepted.
    """

    def __init__(
        self,
        buckets: list[Bucket],
        *,
        on_reduced: Callable[[Bucket], None],
        eager: bool,
        fill_tail: Callable[[Tensor], None],
        ending: Ending,
        probe: Probe,
        finishes_alone: bool = False,
        is_silent: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self.buckets = buckets
        self.complete = False
        self._finishes_alone = finishes_alone
        self._is_silent = is_silent
        self._interrupted: Exception | None = None
        self.group: Summing | None = None
        self._on_reduced = on_reduced
        self._eager = eager
        self._fill_tail, self._ending = fill_tail, ending
        self._probe = probe
        self._armed = False
        self._step = 0
        self._idle: Collection[int] = ()
        self._samples = 0
        self._missing: list[int] = []
        self._ready: set[int] = set()
        self._launched = 0
        self._accepted = 0
        self._bucket_of = {id(p): bucket.index for bucket in buckets for p in bucket.params}
        for bucket in buckets:
            for p in bucket.params:
                p.register_post_accumulate_grad_hook(_weakly(self))

    def begin(self, step: int, samples: int, idle: Collection[int] = ()) -> None:
        """Starts an attempt at `step`, of so many samples of this rank: no gradients yet. Ranks that are `idle` will have none;
        all they say is in the tail."""
        self._step, self._samples, self._idle = step, samples, idle
        self._armed = self.complete = False
        self._interrupted = None
        self._missing = [len(bucket.params) for bucket in self.buckets]
        self._ready.clear()
        self._launched = self._accepted = 0
        for bucket in self.buckets:
            bucket.work = None
            bucket.accepted = False
            for p in bucket.params:
                p.grad = None

    def arm(self, final: bool) -> None:
        """Whether the gradients that the next backward pass leaves are final in this step."""
        self._armed = final

    def _grad_ready(self, p: Tensor) -> None:
        if not self._armed:
            return
        if id(p) in self._ready:
            raise TaskError(
                f"a parameter of shape {tuple(p.shape)} got its gradient twice in one backward pass, the second time perhaps "
                "after the first was sent. With torch.utils.checkpoint, use use_reentrant=False."
            )
        self._ready.add(id(p))
        self._missing[self._bucket_of[id(p)]] -= 1
        if self._interrupted is None:
            try:
                self._reduce_ready()
            except (FencedError, PeerLostError) as error:
                self._interrupted = error
        if self._interrupted is not None and not self._goes_on_alone():
            raise self._interrupted

    def check(self) -> None:
        """Between two passes: leaves the step if what is still to be computed of it is of no use.

        Raises:
            FencedError: the incarnation is over.
        """
        assert self.group is not None
        if not self._goes_on_alone():
            self.group.fence.check()

    def _goes_on_alone(self) -> bool:
        assert self.group is not None
        return self._finishes_alone and not self.group.fence.is_vain(self._step)

    def _reduce_ready(self) -> None:
        assert self.group is not None
        self.group.fence.check()
        while self._launched < len(self.buckets) - 1 and self._missing[self._launched] == 0:
            self._launch()
        if self._eager:
            while self._accepted < self._launched and self._next().is_completed():
                self._accept()

    def _launch(self) -> None:
        bucket = self.buckets[self._launched]
        self._probe("backward", bucket.index)
        if self._is_silent(bucket.index):
            bucket.flat.zero_()
            bucket.missing.fill_(self._samples)  # said here: who died before the tail was reduced has not lived to say it there
            bucket.gradient = bucket.more = None
            bucket.accepted = False
            for p in bucket.params:
                p.grad = None  # else `accept` would take it that everybody used what this rank alone used
        else:
            bucket.collect()
        if bucket.tail_size:
            self._fill_tail(bucket.tail)
        assert self.group is not None
        bucket.work = self.group.all_reduce(bucket.flat, self._idle, bucket.tail_size)
        self._launched += 1
        self._probe("reduce", bucket.index)

    def _next(self) -> Reduction:
        work = self.buckets[self._accepted].work
        assert work is not None
        return work

    def _accept(self) -> None:
        bucket = self.buckets[self._accepted]
        self._probe("wait", bucket.index)
        self._next().wait()
        if self._begin_more(bucket):
            self._probe("wait", bucket.index)
            self._next().wait()
        bucket.gradient = self._step
        bucket.work = None
        self._accepted += 1
        self._probe("reduced", bucket.index)
        bucket.accept()
        self._on_reduced(bucket)

    def _begin_more(self, bucket: Bucket) -> bool:
        """Whether more than the flat buffer, which was just reduced, is to be reduced; that is under way then."""
        needs = self._ending.needs(bucket.tail) if bucket.tail_size else 0
        if not needs:
            return False
        assert self.group is not None
        more = bucket.flat.new_zeros(needs)
        self._ending.fill_more(bucket.tail, more)
        bucket.work, bucket.more = self.group.all_reduce(more, self._idle), more
        return True

    def finish(self) -> None:
        """Launches what is left (the last bucket always waits for the end of the backward pass) and accepts everything."""
        self.complete = True
        if self._interrupted is not None:
            raise self._interrupted
        while self._launched < len(self.buckets):
            self._launch()
        while self._accepted < len(self.buckets):
            self._accept()

    def reduce_alone(self, bucket: Bucket, group: Summing, factor: float) -> None:
        """Reduces a bucket whose reduction failed once more, over another group: the sum of its members' own gradients, times
        `factor`. Into a buffer of its own, which an interruption leaves to the abandoned group."""
        bucket.collect()
        if bucket.tail_size:
            self._fill_tail(bucket.tail)
        flat = bucket.flat.clone()
        group.all_reduce(flat).wait()
        more = self.reduce_more(flat[len(flat) - bucket.tail_size :], group, speaks=True)
        bucket.flat.copy_(flat)
        bucket.more = more
        bucket.scale(factor)
        bucket.gradient = self._step

    def reduce_more(self, tail: Tensor, group: Summing, *, speaks: bool) -> Tensor | None:
        """What is to be reduced besides what was just reduced `alone`, if anything is; zeros of who does not speak."""
        needs = self._ending.needs(tail) if len(tail) else 0
        if not needs:
            return None
        more = tail.new_zeros(needs)
        if speaks:
            self._ending.fill_more(tail, more)
        group.all_reduce(more).wait()
        return more

    def _lacks_more(self, bucket: Bucket) -> bool:
        return bool(bucket.tail_size) and bucket.more is None and self._ending.needs(bucket.tail) > 0

    def abandon(self) -> None:
        """Takes stock after a fence: a reduction that came to its end counts, any other buffer is given up."""
        for bucket in self.buckets:
            if bucket.work is None:
                continue
            if bucket.work.succeeded() and not self._lacks_more(bucket):
                bucket.gradient = self._step
            else:
                bucket.allocate()
            bucket.work = None
        self.group = None
