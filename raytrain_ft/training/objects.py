"""The state of whatever has `state_dict()` and `load_state_dict()`: taken apart for a checkpoint, compared, put back.

Two kinds of state. *Shared*: parameters of modules and what optimizers keep for them. It is the same on every rank, changes
in the weight update only, and most of it is copied while the next step computes; each rank stores a part of it. *Own*:
everything else, that is buffers, hyper-parameters, schedulers, scalers, random generators. It may differ between ranks and may
change at any time, so it is copied at once, and each rank stores its own.
"""

from __future__ import annotations

import gc
import json
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import DataLoader, RandomSampler

from raytrain_ft.errors import ConfigError, StorageError
from raytrain_ft.storage.checkpoint import Content
from raytrain_ft.storage.tensors import bytes_of
from raytrain_ft.storage.tree import flatten, json_tensor, unflatten, versions_of, with_versions
from raytrain_ft.training import naming, restore
from raytrain_ft.training.layout import check_own_memory, check_plain, is_plain
from raytrain_ft.training.loading import put_right
from raytrain_ft.training.placing import on_devices_of

GENERATORS = "generators"
"""What the state of the random generators is called among a rank's own."""
LEFT_OUT = "left-out"
"""What buffers are called there that a state dict leaves out (`persistent=False`): {object: {buffer: tensor}}."""


@dataclass(frozen=True, slots=True)
class Parts:
    """State taken apart.

    Attributes:
        skeletons: by object, its state dict as JSON, with paths in place of tensors.
        shared: tensors by path, in an order that is the same on every rank. They are the objects' own: not copied.
        own: tensors by path; copies.
        kinds: by module, (dtype, shape) of what its state dict holds, as `describe` says it.
    """

    skeletons: dict[str, Any]
    shared: dict[str, Tensor]
    own: dict[str, Tensor]
    kinds: dict[str, dict[str, list[Any]]]


def bare(value: Any) -> Any:
    """The module inside the wrappers that put a prefix to its names (DDP, DataParallel, torch.compile); others as they are."""
    while True:
        if isinstance(value, DistributedDataParallel | DataParallel):
            value = value.module
        elif isinstance(value, nn.Module) and isinstance(getattr(value, "_orig_mod", None), nn.Module):
            value = value._orig_mod
        else:
            return value


def check_objects(objects: Mapping[str, Any]) -> None:
    """Raises ConfigError for an object without state_dict() and load_state_dict(), for a module with FSDP in it, and for one
    whose state could be stored, but not be put back."""
    for name, value in objects.items():
        if not has_state(value):
            if isinstance(value, DataLoader):
                raise ConfigError(_instead_of(name, value))
            raise ConfigError(
                f"checkfreq.open({name}={type(value).__name__}): it needs state_dict() and load_state_dict(); "
                "wrap it in an object that has them"
            )
        if isinstance(value, nn.Module) and any(map(_is_fsdp, value.modules())):
            raise ConfigError(
                f"checkfreq.open({name}={type(value).__name__}): there is a FullyShardedDataParallel in it, and models that "
                "are sharded over processes cannot be stored here; use DistributedDataParallel instead, or "
                "torch.distributed.checkpoint for the checkpoints"
            )
        if isinstance(inner := bare(value), nn.Module):
            _check_writable(name, inner)


def _check_writable(name: str, module: nn.Module) -> None:
    """Of its own tensors those that its state dict gives are written to on resume; what else it gives it takes as it likes."""
    given = set(map(id, flatten(_state(module), name)[1].values()))
    for key, tensor in (*module.named_parameters(), *module.named_buffers()):
        if id(tensor) in given and is_plain(tensor):  # others are told apart when it is taken apart
            check_own_memory(f"{name}/{key}", tensor)


def has_state(value: Any) -> bool:
    """Whether it has state_dict() and load_state_dict()."""
    return all(callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict"))


def _instead_of(name: str, loader: DataLoader[Any]) -> str:
    shuffle = isinstance(loader.sampler, RandomSampler)
    return (
        f"checkfreq.open({name}={type(loader).__name__}): a DataLoader does not know where it stands; use "
        f"checkfreq.Loader(dataset, global_batch_size={loader.batch_size or '...'}, shuffle={shuffle}) in its place, with the "
        "batch_size of all ranks together, without a sampler, and with its other options (num_workers, collate_fn, "
        "drop_last...) as they are"
    )


def _is_fsdp(module: nn.Module) -> bool:
    """Its state dict has whole, plain tensors, and the optimizer's has plain ones of one shape on all ranks: nothing in them
    tells. By name, for the class takes long to import, and fairscale has one too."""
    return any(kind.__name__ == "FullyShardedDataParallel" for kind in type(module).__mro__)


# ---------------------------------------------------------------- taking apart


@contextmanager
def _without_collector() -> Iterator[None]:
    """While many thousand containers are made, all of which stay: the garbage collector would look through them again and
    again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_without_collector()
@torch.no_grad()
def take_apart(objects: Mapping[str, Any]) -> Parts:
    """The state as it is now.

    Raises:
        ConfigError: it holds something that cannot be stored without pickle, a tensor that is one of many processes' parts, or
            one that has no plain bytes.
    """
    skeletons: dict[str, Any] = {}
    shared: dict[str, Tensor] = {}
    own: dict[str, Tensor] = {}
    left_out: dict[str, dict[str, Tensor]] = {}
    kinds: dict[str, dict[str, list[Any]]] = {}
    for name, value in objects.items():
        skeletons[name], tensors = flatten(_state(value), name)
        for path, tensor in tensors.items():  # before it is asked for its shape, or copied, which not all of them can be
            _check_whole(path, tensor)
            check_plain(path, tensor)
        left_out[name] = _left_out(value, name, tensors)
        if isinstance(bare(value), nn.Module):
            kinds[name] = _kinds({path[len(name) + 1 :]: tensor for path, tensor in tensors.items()})
        is_shared = _shared(name, value)
        for path, tensor in tensors.items():
            if is_shared(path, tensor):
                shared[path] = tensor
            else:
                own[path] = tensor.detach().clone()
    skeletons[LEFT_OUT], buffers = flatten({name: found for name, found in left_out.items() if found}, LEFT_OUT)
    own |= {path: buffer.detach().clone() for path, buffer in buffers.items()}
    skeletons[GENERATORS], tensors = flatten(generator_states(), GENERATORS)
    return Parts(skeletons, dict(sorted(shared.items())), own | tensors, kinds)


def _state(value: Any) -> Any:
    value = bare(value)
    return value.state_dict(keep_vars=True) if isinstance(value, nn.Module) else value.state_dict()


def _left_out(value: Any, name: str, shown: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A module's buffers that its state dict, whose tensors are given, does not have. The next step may depend on them."""
    value = bare(value)
    if not isinstance(value, nn.Module):
        return {}
    tensors = {id(tensor) for tensor in shown.values()}
    apart = {key: one for key, one in value.named_buffers() if f"{name}/{key}" not in shown and id(one) not in tensors}
    return {key: one for key, one in apart.items() if _can_be_filled(one)}


def _can_be_filled(buffer: Tensor) -> bool:
    """Others are not refused: that they are no part of the state is what the model says of them."""
    if not is_plain(buffer) or buffer.is_inference():
        return False
    is_whole = not hasattr(buffer, "to_local") and not hasattr(buffer, "local_shards")
    return is_whole and all(stride > 0 or size < 2 for stride, size in zip(buffer.stride(), buffer.shape, strict=True))


def _shared(name: str, value: Any) -> Callable[[str, Tensor], bool]:
    """Tells which tensors of its state are shared."""
    if isinstance(value, torch.optim.Optimizer):
        # a learning rate that is a tensor is changed in place, when a schedule takes its step
        settings = f"{name}/param_groups/"
        return lambda path, _: not path.startswith(settings)
    value = bare(value)
    parameters = {id(parameter) for parameter in value.parameters()} if isinstance(value, nn.Module) else set()
    return lambda _, tensor: id(tensor) in parameters


def _check_whole(path: str, tensor: Tensor) -> None:
    if hasattr(tensor, "to_local") or hasattr(tensor, "local_shards"):
        raise ConfigError(f"{path} is a {type(tensor).__name__}: models that are sharded over processes cannot be stored here")


def own_tensors(parts: Parts, rank: int) -> list[tuple[str, Tensor]]:
    """A rank's own state as tensors by name: that of rank 0 also serves ranks that did not exist when it was stored."""
    skeletons = json_tensor(parts.skeletons)
    return [(own_name(rank, "skeletons"), skeletons), *((own_name(rank, path), one) for path, one in parts.own.items())]


def own_name(rank: int, path: str) -> str:
    """Name in a checkpoint of what belongs to one rank."""
    return f"rank-{rank}/{path}"


# ---------------------------------------------------------------- comparing


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """By path, what is equal if and only if (but for chance) dtype, shape and bits are; JSON.

    Raises:
        ConfigError: a tensor has no plain bytes.
    """
    found: dict[str, str] = {}
    for path, tensor in tensors.items():
        check_plain(path, tensor)
        bits = xxhash.xxh3_64_hexdigest(bytes_of(tensor).cpu().numpy().data)
        found[path] = f"{tensor.dtype} {list(tensor.shape)} {bits}"
    return found


@_without_collector()
def describe(objects: Mapping[str, Any], parts: Parts | None = None) -> dict[str, Any]:
    """What must be the same for a state to fit: {object: {"class": ..., "tensors" or "groups": shapes}}; JSON.

    Args:
        parts: the state as it is now, if it has been taken apart already.
    """
    inner = {name: bare(value) for name, value in objects.items()}
    names = naming.known(inner)
    return {name: _describe(value, parts.kinds.get(name) if parts else None, names) for name, value in inner.items()}


def _described_tensors(value: nn.Module) -> dict[str, list[Any]]:
    tensors = flatten(_state(value))[1]
    for path, tensor in tensors.items():
        check_plain(path, tensor)
    return _kinds(tensors)


def _describe(value: Any, kinds: dict[str, list[Any]] | None, names: Mapping[int, str]) -> dict[str, Any]:
    about: dict[str, Any] = {"class": f"{type(value).__module__}.{type(value).__qualname__}"}
    if isinstance(value, nn.Module):
        about = {"class": "module", "tensors": _described_tensors(value) if kinds is None else kinds}
    elif isinstance(value, torch.optim.Optimizer):
        about["groups"] = [[[str(p.dtype), list(p.shape)] for p in group["params"]] for group in value.param_groups]
        about["names"] = naming.of_groups(value, names)
    return about


def _kinds(tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    return {path: [str(one.dtype), list(one.shape)] for path, one in tensors.items()}


def described(stored: Mapping[str, Any]) -> dict[str, Any]:
    """What `describe` has said of one object, as it was stored.

    Raises:
        TypeError, ValueError: it is none.
    """
    found = dict(stored)
    tensors, groups = dict(found.get("tensors", {})), list(found.get("groups", []))
    for called in (one for group in found.get("names", []) for one in group):
        if not isinstance(called, str | None):
            raise TypeError(f"a parameter called {called!r:.80}")
    for dtype, shape in (*tensors.values(), *(one for group in groups for one in group)):
        if not isinstance(dtype, str) or not isinstance(shape, list):
            raise TypeError(f"a tensor of {dtype!r:.80} and {shape!r:.80}")
    return found


def unlike(first: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """What one rank described otherwise than the first."""
    missing = [f"{name} (is missing on one of them)" for name in sorted(first.keys() ^ here.keys())]
    return missing + [f"{name} (differs)" for name in sorted(first.keys() & here.keys()) if first[name] != here[name]]


def differences(name: str, stored: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Every way in which the description of an object here is not the stored one."""
    found: list[str] = []
    if stored.get("class") != here["class"]:
        found.append(f"{name} is a {stored.get('class')} in the checkpoint, a {here['class']} here")
        return found
    found += _keyed(name, stored.get("tensors", {}), here.get("tensors", {}))
    before, now = stored.get("groups", []), here.get("groups", [])
    if len(before) != len(now):
        found.append(f"{name} has {len(before)} parameter groups in the checkpoint, {len(now)} here")
    for number, (old, new) in enumerate(zip(before, now, strict=False)):
        if len(old) != len(new):
            found.append(f"{name}: group {number} has {len(old)} parameters in the checkpoint, {len(new)} here")
        pairs = enumerate(zip(old, new, strict=False))
        found += [f"{name}: group {number}, parameter {i} {_versus(a, b)}" for i, (a, b) in pairs if a != b]
    return found or naming.reordered(name, stored.get("names", []), here.get("names", []))


def _keyed(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    found = [f"{name}: {key} is missing in the checkpoint" for key in new if key not in old]
    found += [f"{name}: {key} is in the checkpoint only" for key in old if key not in new]
    return found + [f"{name}: {key} {_versus(old[key], new[key])}" for key in new if key in old and old[key] != new[key]]


def _versus(old: list[Any], new: list[Any]) -> str:
    return f"is {old[0]} {old[1]} in the checkpoint, {new[0]} {new[1]} here"


# ---------------------------------------------------------------- putting back


def stored_skeletons(content: Content, rank: int) -> dict[str, Any]:
    """What `own_tensors` wrote down for this rank.

    Raises:
        StorageError: it is not there, or damaged.
    """
    try:
        found = json.loads(restore.make(content, own_name(rank, "skeletons")).numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{content.manifest.name}: the state of rank {rank} is damaged: {error}") from error
    if not isinstance(found, dict):
        raise StorageError(f"{content.manifest.name}: the state of rank {rank} is no state")
    return found


def put_together(content: Content, skeleton: Any, rank: int) -> Any:
    """The state dict that a skeleton stands for.

    Raises:
        StorageError: the checkpoint does not have what it asks for.
    """

    def tensor(path: str) -> Tensor:
        own = own_name(rank, path)
        return restore.make(content, own if own in content.pieces else path)

    return unflatten(skeleton, tensor)


def left_out(content: Content, skeletons: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """By object, the buffers that its state dict did not have; of none in a checkpoint of an earlier version.

    Raises:
        StorageError: as `put_together` does.
    """
    found = put_together(content, skeletons[LEFT_OUT], rank) if LEFT_OUT in skeletons else {}
    if not isinstance(found, dict):
        raise StorageError(f"{content.manifest.name}: the buffers of rank {rank} are no state")
    return found


def put_back(value: Any, state: Any) -> None:
    """Loads a state dict into an object. Checkpoints of an earlier version do not have the versions of a module's parts: it is
    taken for one of the code that runs now."""
    inner = bare(value)
    if isinstance(inner, nn.Module) and isinstance(state, OrderedDict) and versions_of(state) is None:
        state = with_versions(state, versions_of(inner.state_dict()))
    if not isinstance(inner, nn.Module):  # torch copies into a module's own tensors
        state = on_devices_of(state, inner.state_dict())
    with put_right(inner, state):
        inner.load_state_dict(state)


@torch.no_grad()
def put_back_left_out(value: Any, stored: Any) -> None:
    """Fills the buffers that a module's state dict leaves out. Those that have become others since (a table for longer inputs,
    say) stay as they are: who computes them anew needs none of before."""
    inner = bare(value)
    if not isinstance(inner, nn.Module) or not isinstance(stored, dict):
        return
    for key, buffer in _left_out(inner, "", flatten(_state(inner))[1]).items():
        found = stored.get(key)
        if isinstance(found, Tensor) and (found.dtype, found.shape) == (buffer.dtype, buffer.shape):
            buffer.copy_(found)


# ---------------------------------------------------------------- random generators


def generator_states() -> dict[str, Any]:
    """The states of the global generators: torch's on the CPU and on every GPU in use, numpy's, Python's."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    version, internal, following = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "numpy": [name, np.asarray(keys), int(position), int(has_gauss), float(cached)],
        "python": [version, np.asarray(internal, dtype=np.uint32), following],
    }


def set_generators(state: Mapping[str, Any]) -> None:
    """Puts the generators where they were."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])
    np.random.set_state(tuple(state["numpy"]))
    version, internal, following = state["python"]
    random.setstate((version, tuple(int(value) for value in internal), following))
