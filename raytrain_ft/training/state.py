"""What the training state is, bucket by bucket: how it is hashed, packed and unpacked.

The state of a bucket is its parameters and what the optimizer keeps for them; the last bucket also bears what belongs to no
bucket: frozen parameters and buffers. Everything else that a replacement needs is small: `Extras`.

A packed bucket describes itself: a JSON header and raw bytes, never pickle.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from raytrain_ft.errors import ConfigError, StorageError, TaskError
from raytrain_ft.policy.sampling import Position
from raytrain_ft.storage.tensors import DTYPES, bytes_of
from raytrain_ft.storage.tree import flatten, unflatten
from raytrain_ft.training.buckets import Bucket, partition
from raytrain_ft.training.param_groups import ParamGroups
from raytrain_ft.training.placing import laid_out_like, on_devices_of
from raytrain_ft.training.tail import Tail, here, places

HEADER_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Extras:
    """The part of the training state that belongs to no tensor of a bucket.

    Attributes:
        step: steps committed.
        position: of the data.
        groups: the optimizer's hyper-parameters, per parameter group.
        scheduler: the LR scheduler's state, or None.
    """

    step: int
    position: Position
    groups: tuple[dict[str, Any], ...]
    scheduler: dict[str, Any] | None


class TrainingState:
    """The model, its optimizer and schedule, and where they stand.

    Attributes:
        stage: the stage of a pipeline whose model this is; None without one.
        step: steps committed.
        loss: mean loss over the global batch of the latest update.
        position: of the data, after `step` steps.
        agreed: in a pipeline, what all stages agreed upon at the end of a step: (step, numbers).
        filled: whether it holds the run's state; a replacement does not until it was filled.
        restated: whether the state of some bucket is another replica's, and what belongs to none is not yet.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any | None,
        *,
        bucket_bytes: int,
        first_bucket_bytes: int,
        stage: int | None = None,
        seats: int = 1,
    ) -> None:
        self.stage = stage
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self._groups = ParamGroups(optimizer)
        self.step = 0
        self.loss = float("nan")
        self.position = Position()
        self.agreed: tuple[int, tuple[float, ...]] | None = None
        self.filled = self.restated = False
        trained = [p for p in model.parameters() if p.requires_grad]
        groups = partition(trained, bucket_bytes, first_bucket_bytes)
        last = len(groups) - 1
        self.tail = Tail(model, seats)
        self.buckets = [Bucket(i, params, self.tail.size if i == last else 0) for i, params in enumerate(groups)]
        self._frozen = [(f"frozen.{name}", p) for name, p in model.named_parameters() if not p.requires_grad]
        self._buffers = [(f"buffer.{name}", place) for name, place in places(model)]

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return self.buckets[0].flat.device

    def slots(self, bucket: Bucket) -> Iterator[tuple[str, Any]]:
        """Name and value (a tensor, or a plain number) of everything in the state of a bucket, in a fixed order."""
        for i, p in enumerate(bucket.params):
            yield f"param.{i}", p.data
            state = self.optimizer.state.get(p, {})
            for key in sorted(state):
                yield f"state.{i}.{key}", state[key]
        if bucket is self.buckets[-1]:
            yield from ((name, tensor.data) for name, tensor in self._frozen)
            for i, (_, p) in enumerate(self._frozen):  # which an optimizer may move all the same, as that of a teacher
                state = self.optimizer.state.get(p, {})
                yield from ((f"of_frozen.{i}.{key}", state[key]) for key in sorted(state))
            yield from ((name, here(place)) for name, place in self._buffers)
            yield "loss", self.loss

    def digest(self, bucket: Bucket) -> str:
        """Hash of a bucket's state: equal if and only if (but for chance) names, shapes, dtypes and bits are."""
        hasher = xxhash.xxh3_128()
        for name, value in self.slots(bucket):
            hasher.update(json.dumps(_describe(name, value)).encode())
            if isinstance(value, Tensor):
                hasher.update(bytes_of(value).cpu().numpy().data)
        return hasher.hexdigest()

    def digests(self) -> tuple[str, ...]:
        """The hash of every bucket."""
        return tuple(self.digest(bucket) for bucket in self.buckets)

    def final_digest(self) -> str:
        """Hash of the whole training state: of every bucket, and of what belongs to none, as far as it has bits to compare."""
        extras, hasher = self.extras(), xxhash.xxh3_128()
        for number, part in enumerate((asdict(extras.position), *extras.groups, extras.scheduler or {})):
            for key in sorted(part, key=str):
                with suppress(ConfigError):  # a function, say: it is no state, and no two are equal
                    skeleton, tensors = flatten(part[key], f"{number}.{key}")
                    hasher.update(json.dumps([key, skeleton]).encode())
                    for tensor in tensors.values():
                        hasher.update(bytes_of(tensor.detach()).cpu().numpy().data)
        return ":".join((*self.digests(), hasher.hexdigest()))

    def pack(self, bucket: Bucket) -> Tensor:
        """The state of a bucket as one uint8 tensor that describes itself."""
        return packed(list(self.slots(bucket)))

    @torch.no_grad()
    def unpack(self, bucket: Bucket, content: Tensor) -> None:
        """Takes over a packed state, creating the optimizer's state as it is there (no dummy step).

        Raises:
            StorageError: the packed state belongs to another model; nothing was changed.
        """
        own = {name: value for name, value in self.slots(bucket) if name.startswith(_EXISTING)}
        self._check(bucket, _head(content)[0], own)
        frozen = [p for _, p in self._frozen] if bucket is self.buckets[-1] else []
        params = {"state": bucket.params, "of_frozen": frozen}
        states: dict[Tensor, dict[str, Any]] = {p: {} for p in (*bucket.params, *frozen)}
        for name, value in unpacked(content):
            if name == "loss":
                self.loss = value
            elif name in own:
                own[name].copy_(value)
            else:
                kind, index, key = name.split(".", 2)
                p = params[kind][int(index)]
                states[p][key] = at_home(self.optimizer, p, key, value)
        for p, state in states.items():
            self.optimizer.state.pop(p, None)
            if state:
                self.optimizer.state[p] = state

    def _check(self, bucket: Bucket, described: list[Any], own: dict[str, Tensor]) -> None:
        theirs = {name: (dtype, tuple(shape)) for name, dtype, shape, _ in described if name.startswith(_EXISTING)}
        ours = {name: (str(value.dtype), tuple(value.shape)) for name, value in own.items()}
        if theirs != ours:
            differing = sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name))
            raise StorageError(
                f"bucket {bucket.index}: the state received is of another model: {differing[:5]} differ. "
                "Is the same code installed on every node?"
            )

    def extras(self) -> Extras:
        """What a replacement needs besides the buckets."""
        groups = tuple({k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups)
        return Extras(self.step, self.position, groups, self.scheduler.state_dict() if self.scheduler else None)

    def check_groups(self) -> None:
        """Raises `TaskError` if the optimizer's parameter groups are not those that it was made with."""
        self._groups.check(self.optimizer, self.model)

    def take(self, extras: Extras) -> None:
        """Takes over what belongs to no bucket; afterwards this worker holds the run's state.

        Raises:
            TaskError: the optimizer has another number of groups here; nothing was changed.
        """
        groups = self.optimizer.param_groups
        if len(groups) != len(extras.groups):
            raise TaskError(
                f"the {type(self.optimizer).__name__} has {len(extras.groups)} parameter groups where its state comes from, "
                f"and {len(groups)} here: TrainTask.optimizer must make the same ones whenever it is called, and everywhere"
            )
        self.step, self.position, self.agreed = extras.step, extras.position, None
        for group, values in zip(groups, extras.groups, strict=True):
            group.update(on_devices_of(values, group))
        if self.scheduler is not None and extras.scheduler is not None:
            self.scheduler.load_state_dict(extras.scheduler)
        for bucket in self.buckets:
            bucket.version, bucket.gradient, bucket.dirty = extras.step, None, False
        self.filled, self.restated = True, False


_EXISTING = ("param.", "frozen.", "buffer.")
"""Slots whose tensors every worker has from the start; the optimizer's come into being with the first update."""
_COUNTERS = ("step", "mu_product")


def packed(slots: Sequence[tuple[str, Any]]) -> Tensor:
    """Named tensors and plain values as one uint8 tensor on the CPU that describes itself.

    Raises:
        ConfigError: a value cannot be stored.
    """
    header = json.dumps([_describe(name, value) for name, value in slots]).encode()
    length = len(header).to_bytes(HEADER_LENGTH_BYTES, "little")
    parts = [torch.frombuffer(bytearray(length + header), dtype=torch.uint8)]
    parts += [bytes_of(value).cpu() for _, value in slots if isinstance(value, Tensor)]
    return torch.cat(parts)


def unpacked(content: Tensor) -> Iterator[tuple[str, Any]]:
    """What was packed, one by one; tensors in memory of their own."""
    described, start = _head(content)
    for name, dtype, shape, skeleton in described:
        if dtype is None:
            yield name, unflatten(skeleton, {}.__getitem__)  # there are no tensors in it
            continue
        size = torch.Size(shape).numel() * DTYPES[dtype].itemsize
        yield name, content[start : start + size].clone().view(DTYPES[dtype]).reshape(shape)
        start += size


def _head(content: Tensor) -> tuple[list[Any], int]:
    """What there is, and where the first tensor's bytes begin."""
    length = int.from_bytes(bytes(content[:HEADER_LENGTH_BYTES].tolist()), "little")
    start = HEADER_LENGTH_BYTES + length
    return json.loads(bytes(content[HEADER_LENGTH_BYTES:start].numpy())), start


def at_home(optimizer: torch.optim.Optimizer, p: Tensor, key: str, value: Any) -> Any:
    """A value of the optimizer's state where torch keeps it: a step counter on the CPU unless a kernel reads it on the device,
    everything else where its parameter is (as in `Optimizer.load_state_dict`), and laid out as that is."""
    if not isinstance(value, Tensor):
        return value
    on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    return value if key in _COUNTERS and not on_device else laid_out_like(value.to(p.device), p)


def plain(value: Any, path: str) -> Any:
    """The skeleton (see `storage.tree`) of what an optimizer keeps for a parameter besides tensors.

    Raises:
        ConfigError: it cannot be stored, or there is a tensor in it.
    """
    skeleton, inner = flatten(value, path)
    if inner:
        raise ConfigError(
            f"{min(inner)} is a tensor that the optimizer keeps in a {type(value).__name__}: it could neither be stored nor "
            'sent to a replacement. Let it keep each tensor under a key of its own: state[p]["GG_0"], state[p]["GG_1"]'
        )
    return skeleton


def kept(optimizer: torch.optim.Optimizer, name: str, p: Tensor) -> list[tuple[str, Any]]:
    """What an optimizer keeps for the parameter of this name, by its keys in order: tensors, and what has a skeleton.

    Raises:
        ConfigError: it can neither be stored nor sent.
    """
    state = optimizer.state.get(p, {})
    for key, value in state.items():
        if not isinstance(key, str) or "/" in key:
            raise ConfigError(
                f"{type(optimizer).__name__} keeps {key!r} for {name}: what it keeps is stored by name, without '/'"
            )
        if not isinstance(value, Tensor):
            plain(value, f"optimizer/{name}/{key}")
    return sorted(state.items())


def _describe(name: str, value: Any) -> list[Any]:
    if isinstance(value, Tensor):
        return [name, str(value.dtype), list(value.shape), None]
    return [name, None, None, plain(value, name)]
