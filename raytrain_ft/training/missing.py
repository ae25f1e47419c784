"""Notices what is trained and was not given to `open`: it would begin anew after a resume, and nothing else would tell."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from raytrain_ft.storage.tensors import bytes_of
from raytrain_ft.storage.tree import flatten
from raytrain_ft.training.forgotten import choice, sample
from raytrain_ft.training.kept import wrapped
from raytrain_ft.training.layout import is_plain

LOOKS = 5
"""After so many steps the weights are looked at: a GradScaler may leave out the first ones."""


class Missing:
    """Says what it notices, of each object once."""

    def __init__(self, tell: Callable[[str], None], objects: Mapping[str, Any]) -> None:
        self._tell, self._objects = tell, objects
        self._optimizers = {name: value for name, value in objects.items() if isinstance(value, Optimizer)}
        self._steps = 0  # in this launch
        self._by_hand = not self._optimizers  # whether something may be trained that no optimizer here has
        self._watched: dict[tuple[str, str], tuple[ref[Tensor], str]] = {}  # (module, parameter): it, and what it was like

    def begin(self) -> None:
        """Of each optimizer: does anything store its parameters?"""
        known = _memories(_stored(self._objects.values()))
        of_modules = _memories(_stored(one for one in self._objects.values() if isinstance(one, nn.Module)))
        for name, optimizer in self._optimizers.items():
            places = {place: _memory(one) for place, one in _parameters(optimizer)}
            if any(memory not in of_modules for memory in places.values()):
                self._by_hand = True  # they may be copies, of which it makes the weights of a module
            apart = [place for place, memory in places.items() if memory not in known]
            if apart:
                more = f" and {len(apart) - 1} more" if len(apart) > 1 else ""
                self._tell(
                    f"{name} trains {apart[0]}{more}, which no module and no state_dict() that checkfreq.open was given holds: "
                    "pass the module too, or that begins anew after a resume"
                )

    def updated_by_hand(self) -> None:
        """Who makes updates that no optimizer tells of may train what no optimizer has."""
        self._by_hand = True

    def stepped(self) -> None:
        """A step is over."""
        self._steps += 1
        if self._steps == 1:
            self._look_for_schedulers()
            self._look_inside()
            self._watched = {(name, key): (ref(one), sample([one])) for name, key, one in self._left_alone()}
        if self._by_hand:
            self._watched = {}
        if self._watched:
            self._look_for_changes()

    def _look_for_schedulers(self) -> None:
        """After a step, for they may be made after `open`."""
        for name, optimizer in self._optimizers.items():
            if _is_scheduled(optimizer) and not any(_holds_scheduler_of(optimizer, one) for one in self._objects.values()):
                self._tell(
                    f"a learning rate scheduler was made for {name}, and checkfreq.open was given none: pass the scheduler "
                    "too, or the schedule begins anew after a resume"
                )

    def _look_inside(self) -> None:
        """Of each optimizer, and those in it: is what it keeps stored? After a step, for that makes it."""
        stored = list(_stored(self._objects.values()))
        known = _memories(stored)
        for name, optimizer in self._optimizers.items():
            for where, one in ((name, optimizer), *((f"the {where}", one) for where, one in wrapped(optimizer))):
                apart = [kept for kept in _tensors(getattr(one, "state", None)) if _memory(kept) not in known]
                if apart and _is_of_parameter(most := max(apart, key=Tensor.numel), one) and not _has_copy(stored, most):
                    self._tell(
                        f"what {where}, of class {type(one).__name__}, keeps is in no state_dict() that checkfreq.open was "
                        f"given: let state_dict() and load_state_dict() of {name} have it too, or give both one state "
                        "(inner.state = self.state), or it begins anew after a resume"
                    )

    def _left_alone(self) -> Iterator[tuple[str, str, Tensor]]:
        """Some parameters of each module that have a gradient and are in no optimizer. Perhaps they are not trained: a loss
        leaves gradients wherever it comes along."""
        known = _memories(one for optimizer in self._optimizers.values() for _, one in _parameters(optimizer))
        for name, value in self._objects.items():
            if isinstance(value, nn.Module):
                names = {id(one): key for key, one in value.named_parameters() if one.grad is not None}
                apart = [one for one in value.parameters() if id(one) in names and _memory(one) not in known]
                yield from ((name, names[id(one)], one) for one in choice(apart))

    def _look_for_changes(self) -> None:
        """An average changes as well, but has no gradients."""
        for (name, key), (of, before) in list(self._watched.items()):
            one = of()
            if one is not None and sample([one]) != before:
                self._watched = {place: seen for place, seen in self._watched.items() if place[0] != name}
                self._tell(
                    f"{key} of {name} is trained, and is in no optimizer that checkfreq.open was given: pass its optimizer "
                    "too, or that begins anew after a resume; put updates that no optimizer makes into `with run.update():`"
                )
                break
        if self._steps > LOOKS:
            self._watched = {}


def _parameters(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """With where each is, in words."""
    for number, group in enumerate(optimizer.param_groups):
        for index, one in enumerate(group["params"]):
            yield f"parameter {index} of group {number}, of shape {list(one.shape)}", one


def _stored(objects: Iterable[Any]) -> Iterator[Tensor]:
    """What is stored of them. An optimizer may store copies that it makes of parameters, and updates."""
    for value in objects:
        if isinstance(value, nn.Module):
            yield from chain(value.parameters(), value.buffers())
        else:
            yield from flatten(value.state_dict())[1].values()


def _tensors(kept: Any) -> Iterator[Tensor]:
    """Those in what an optimizer keeps."""
    if isinstance(kept, Tensor):
        yield kept
    elif isinstance(kept, Mapping | list | tuple):
        for one in kept.values() if isinstance(kept, Mapping) else kept:
            yield from _tensors(one)


def _is_of_parameter(kept: Tensor, optimizer: Optimizer) -> bool:
    """Whether it has as many numbers as one of the parameters: a step's, or a cache, may well be made anew."""
    return kept.numel() >= min((p.numel() for group in optimizer.param_groups for p in group["params"]), default=0)


def _has_copy(stored: Iterable[Tensor], tensor: Tensor) -> bool:
    """Whether one of them is a copy of it, as a state dict may have: of the same bits, perhaps on another device."""
    alike = (one for one in stored if is_plain(one) and (one.dtype, one.shape) == (tensor.dtype, tensor.shape))
    return is_plain(tensor) and any(torch.equal(bytes_of(one).to(tensor.device), bytes_of(tensor)) for one in alike)


def _memories(tensors: Iterable[Tensor]) -> set[int]:
    """Where they are. With that of those which have none, or do not tell."""
    return {0, *map(_memory, tensors)}


def _memory(tensor: Tensor) -> int:
    """What it has in common with its views, and with what it is a view of; 0 if there is nothing, or it does not tell."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, ValueError, NotImplementedError, AttributeError):
        return 0


def _is_scheduled(optimizer: Optimizer) -> bool:
    """Whether a scheduler was made for it, in this launch: what schedulers leave in the groups comes from the checkpoint, too.
    torch's own mark, which may have another name one day: then nothing is noticed."""
    return bool(getattr(optimizer.step, "_wrapped_by_lr_sched", False))


def _holds_scheduler_of(optimizer: Optimizer, value: Any) -> bool:
    """Whether an object is a scheduler of this optimizer, or has one, perhaps in a list. A module's state has none, and an
    optimizer that wraps another one is no scheduler."""
    if isinstance(value, Optimizer | nn.Module):
        return False
    inside = list(getattr(value, "__dict__", {}).values())
    for one in [*inside]:
        inside += one.values() if isinstance(one, dict) else one if isinstance(one, list | tuple) else []
    return any(getattr(one, "optimizer", None) is optimizer for one in [value, *inside])
