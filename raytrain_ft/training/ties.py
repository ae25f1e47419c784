"""Parameters that several stages of a pipeline share, such as an embedding that is the output layer as well.

Each of these stages has a copy. Copies begin alike. At the end of a step, before all agree, each stage sends the others its own
part of the gradient; all add the parts in the same order, and make the same update. So copies stay the same to the bit, and
there is nothing about them that a lost stage does not find in the log of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from raytrain_ft.errors import ConfigError, TaskError
from raytrain_ft.storage.tensors import bytes_of
from raytrain_ft.training.edges import WHOLE_STEP
from raytrain_ft.training.links import TiedEdge
from raytrain_ft.training.pipeline import cut, sequential
from raytrain_ft.training.settings import PipelineSettings, Tie
from raytrain_ft.training.state import TrainingState

Place = tuple[int, str]
"""A stage, and the name of a parameter there."""
COMPARED_EVERY = 100
"""So many steps lie between two in which stages compare their copies."""

# ---------------------------------------------------------------- what is shared


def find_ties(task: Any, stages: int, cuts: Sequence[int] | None, chunks: int = 1) -> tuple[Tie, ...]:
    """What the stages of a model share: found in a model that is cut, and told by a task that gives the stages.

    Raises:
        ConfigError: the task names parameters that are not there, or not alike.
    """
    if cuts is None:
        return _told(task, stages, chunks)
    models = cut(sequential(task.model(0)), cuts, stages)
    places: dict[int, list[tuple[Place, nn.Parameter]]] = {}
    for stage, model in enumerate(models):
        for name, p in model.named_parameters():
            places.setdefault(id(p), []).append(((stage, name), p))
    _refuse_statistics(models)
    ties = tuple(_tie(found) for found in places.values() if len(found) > 1 and found[0][1].requires_grad)
    if not ties and task.tied():
        raise ConfigError(
            "TrainTask.tied() says that stages share parameters, but no two layers of the model that is cut do: it is for "
            'stages that the task gives (split="task"). In a model that is cut, let one layer have the parameter of the other'
        )
    return ties


def _refuse_statistics(models: Sequence[nn.Module]) -> None:
    """What a forward pass changes would be another thing in each stage."""
    kind = nn.modules.batchnorm._NormBase  # pyright: ignore[reportPrivateUsage]
    seen: dict[int, int] = {}
    for stage, model in enumerate(models):
        for name, module in model.named_modules():
            if isinstance(module, kind) and module.track_running_stats and seen.setdefault(id(module), stage) != stage:
                raise ConfigError(
                    f"stages {seen[id(module)]} and {stage} share {name}, a {type(module).__name__} with running statistics, "
                    "which each would have of its own: use a layer for each stage, or one without statistics"
                )


def _tie(found: Sequence[tuple[Place, nn.Parameter]]) -> Tie:
    p = found[0][1]
    return Tie(dict(sorted(place for place, _ in found)), p.numel() * p.element_size())


def _told(task: Any, stages: int, chunks: int) -> tuple[Tie, ...]:
    wanted = task.tied()
    if not isinstance(wanted, list | tuple) or not all(
        isinstance(names, list | tuple) and all(isinstance(name, str) for name in names) for names in wanted
    ):
        raise ConfigError(f"TrainTask.tied() returns {wanted!r}: use a list of lists of names, one list for each parameter")
    if not wanted:
        return ()
    params = {
        f"{part}.{name}": ((part % stages, name if chunks == 1 else f"{part // stages}.{name}"), p)
        for part in range(stages * chunks)
        for name, p in task.model(part).named_parameters()
        if p.requires_grad
    }
    seen: set[str] = set()
    for names in wanted:
        where = f"TrainTask.tied() names {', '.join(names) or 'nothing'}"
        for name in names:
            if name not in params:
                raise ConfigError(
                    f"{where}: there is no {name!r} to train. A name is the number that TrainTask.model is asked for, a "
                    f"dot, and that of a parameter there, such as {next(iter(params))!r}"
                )
        if len({params[name][0][0] for name in names}) != len(names) or len(names) < 2:
            raise ConfigError(
                f"{where}: give two or more parameters, each of another stage: what a stage has "
                f"twice need not be named; several chunks of one stage cannot share a parameter"
            )
        if len({(params[name][1].shape, params[name][1].dtype) for name in names}) > 1:
            kinds = ", ".join(f"{tuple(params[name][1].shape)} {params[name][1].dtype}" for name in names)
            raise ConfigError(f"{where}, which are {kinds}: what is shared has one shape and dtype")
        if twice := seen.intersection(names):
            raise ConfigError(f"{where}: {min(twice)} was named before; name all that are one in one place")
        seen.update(names)
    return tuple(_tie([params[name] for name in names]) for names in wanted)


@torch.no_grad()
def begin_alike(model: nn.Module, stage: int, pipeline: PipelineSettings, build: Callable[[int], nn.Module]) -> None:
    """Gives a stage's copies the first weights of the first stage that shares them. A model that is cut has them already.

    Args:
        build: builds a stage with its first weights.
    """
    for first in {min(tie.names) for tie in pipeline.ties if stage in tie.names} - {stage}:
        donor = build(first)
        for tie in pipeline.ties:
            if stage in tie.names and min(tie.names) == first:
                model.get_parameter(tie.names[stage]).copy_(donor.get_parameter(tie.names[first]))


Way = tuple[type[torch.optim.Optimizer], list[dict[str, Any]]]
"""How a parameter is updated: by which optimizer, and with which settings."""


def ways(pipeline: PipelineSettings, stage: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Way | None]:
    """How a stage updates what is shared, for each tie; None if it has no part in it."""
    found: list[Way | None] = []
    for tie in pipeline.ties:
        p = model.get_parameter(tie.names[stage]) if stage in tie.names else None
        groups = [group for group in optimizer.param_groups if any(p is other for other in group["params"])]
        settings = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        found.append(None if p is None else (type(optimizer), settings))
    return found


def check_alike(pipeline: PipelineSettings, found: Sequence[Sequence[Way | None]]) -> None:
    """Refuses optimizers that would train the copies of a parameter in different ways.

    Args:
        found: the `ways` of every stage.

    Raises:
        ConfigError: naming the parameter.
    """
    for number, tie in enumerate(pipeline.ties):
        first, *others = tie.names
        for stage in others:
            one, other = found[first][number], found[stage][number]
            if one != other:
                raise ConfigError(
                    f"stages {first} and {stage} share {tie.names[first]} ({tie.names[stage]} in the latter), but "
                    f"TrainTask.optimizer updates it in another way in each: {one} and {other}. Copies of a parameter must be "
                    "updated alike"
                )


# ---------------------------------------------------------------- in a step


class _Part:
    """A stage's part in the gradient of what it shares.

    Attributes:
        used: whether anything depended on the parameter there.
        digest: of the values before the update, in some steps; else 0.
    """

    def __init__(self, param: nn.Parameter, gradient: Tensor, step: int) -> None:
        self.gradient = gradient
        self.used = param.grad is not None
        # 63 bits: it travels as an int64
        self.digest = xxhash.xxh3_64_intdigest(bytes_of(param).numpy().data) >> 1 if step % COMPARED_EVERY == 0 else 0


def _packed(parts: Sequence[_Part]) -> list[Tensor]:
    """The parts as a few tensors, however many there are: what is known of each, and the gradients by dtype."""
    about = torch.tensor([[part.used, part.digest] for part in parts], dtype=torch.int64)
    return [about, *(torch.cat([parts[n].gradient.reshape(-1) for n in numbers]) for numbers in _by_dtype(parts))]


def _unpacked(tensors: Sequence[Tensor], like: Sequence[_Part]) -> list[_Part]:
    """What `_packed` made of parts of these shapes."""
    about, *packed = tensors
    found = [copy(part) for part in like]
    for part, (used, digest) in zip(found, about.tolist(), strict=True):
        part.used, part.digest = bool(used), digest
    for numbers, flat in zip(_by_dtype(like), packed, strict=True):
        sizes = [like[number].gradient.numel() for number in numbers]
        for number, piece in zip(numbers, flat.split(sizes), strict=True):
            found[number].gradient = piece.view_as(like[number].gradient)
    return found


def _by_dtype(parts: Sequence[_Part]) -> list[list[int]]:
    kinds = sorted({str(part.gradient.dtype) for part in parts})
    return [[number for number, part in enumerate(parts) if str(part.gradient.dtype) == kind] for kind in kinds]


class Shared:
    """A stage's copies of what it shares, and where their gradients are."""

    def __init__(self, stage: int, pipeline: PipelineSettings, state: TrainingState) -> None:
        params = dict(state.model.named_parameters())
        places = {id(p): (bucket, i) for bucket in state.buckets for i, p in enumerate(bucket.params)}
        self._stage = stage
        self._buckets = state.buckets
        self._copies = [(tie, *places[id(params[tie.names[stage]])]) for tie in pipeline.ties if stage in tie.names]

    @torch.no_grad()
    def add_up(self, step: int, edges: Sequence[TiedEdge], probe: Callable[[str], None]) -> None:
        """Gives every copy the whole gradient of its parameter.

        Raises:
            FencedError, PeerLostError: it broke off: some have their own part still, so the step is not complete.
            LogGapError: a replay lacks a record. TaskError: the copies are not alike any more.
        """
        if not edges:
            return
        own = [_Part(bucket.params[i], bucket.views[i].clone(), step) for _, bucket, i in self._copies]
        parts = {(self._stage, number): part for number, part in enumerate(own)}
        for edge in edges:
            edge.outbound.give(WHOLE_STEP, _packed([own[number] for number in self._numbers(edge.stage)]))
        probe("tied")
        probe("wait")
        for edge in edges:
            numbers = self._numbers(edge.stage)
            theirs = _unpacked(edge.inbound.take(WHOLE_STEP), [own[number] for number in numbers])
            for number, part in zip(numbers, theirs, strict=True):
                self._check(number, own[number], edge.stage, part, step)
                parts[edge.stage, number] = part
        for number, (tie, bucket, i) in enumerate(self._copies):
            all_of_them = [parts[stage, number] for stage in sorted(tie.names)]
            view = bucket.views[i].copy_(all_of_them[0].gradient)
            for part in all_of_them[1:]:
                view.add_(part.gradient)
            bucket.params[i].grad = view if any(part.used for part in all_of_them) else None

    def _numbers(self, stage: int) -> list[int]:
        """Which of the copies another stage has, too; there the order is the same."""
        return [number for number, (tie, _, _) in enumerate(self._copies) if stage in tie.names]

    def _check(self, number: int, own: _Part, stage: int, theirs: _Part, step: int) -> None:
        if own.digest != theirs.digest:
            names = self._copies[number][0].names
            raise TaskError(
                f"step {step}: stages {self._stage} and {stage} share {names[self._stage]} ({names[stage]} in the latter), but "
                "their copies are no longer the same: do optimizer and scheduler treat them alike in both stages?"
            )

    def counted(self) -> list[Tensor]:
        """The gradients whose squares are this stage's part of the norm: what is shared counts once, in its first stage."""
        elsewhere = {(bucket.index, i) for tie, bucket, i in self._copies if min(tie.names) != self._stage}
        return [view for bucket in self._buckets for i, view in enumerate(bucket.views) if (bucket.index, i) not in elsewhere]
