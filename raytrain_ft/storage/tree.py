"""State dicts without pickle: the tensors apart, all else as JSON that says what it was.

A state dict is dicts, lists and tuples of plain values and tensors. `flatten` gives the tensors by path and a skeleton of JSON;
`unflatten` puts them together again. Types that are not known are refused with their path, never guessed at.
"""

from __future__ import annotations

import base64
import json
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raytrain_ft.errors import ConfigError, StorageError

DEEPEST = 100
JSON_BYTES = 1024


def flatten(value: Any, path: str = "") -> tuple[Any, dict[str, Tensor]]:
    """The skeleton of a state dict, and its tensors by path.

    Raises:
        ConfigError: it holds something else than plain values, containers, numpy arrays and tensors; it names the path.
    """
    tensors: dict[str, Tensor] = {}
    return _flatten(value, path, tensors, 0), tensors


def versions_of(state: Any) -> Any:
    """What a module's state dict says of the versions of the module's parts, {part: {"version": number}}; None if nothing."""
    return getattr(state, _VERSIONS, None)


def with_versions(state: Mapping[Any, Any], versions: Any) -> OrderedDict[Any, Any]:
    """A state dict that says so. Without them a module takes it for one of its first version, and converts or refuses it."""
    made = OrderedDict(state)
    if versions is not None:
        vars(made)[_VERSIONS] = versions
    return made


def _flatten(value: Any, path: str, tensors: dict[str, Tensor], depth: int) -> Any:
    if depth > DEEPEST:
        raise ConfigError(f"{path}: a state dict of more than {DEEPEST} levels cannot be stored; does it contain itself?")

    if type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor):
        while path in tensors:  # the keys 1 and "1" are written alike
            path += "~"
        tensors[path] = value
        return {"tensor": path}
    plain = _PLAIN if depth < DEEPEST else ()  # most of the keys and numbers, which need no call

    def inner(item: Any, key: Any) -> Any:
        part = str(key)
        if not part.isalnum() or not part.isascii():
            part = part.replace("~", "~0").replace("/", "~1").encode(errors="backslashreplace").decode()  # as in JSON pointers
        return _flatten(item, f"{path}/{part}" if path else part, tensors, depth + 1)

    def pairs(items: Iterable[tuple[Any, Any]]) -> list[Any]:
        return [
            [
                key if type(key) in plain else _flatten(key, f"{path}/(key)", tensors, depth + 1),
                item if type(item) in plain else inner(item, key),
            ]
            for key, item in items
        ]

    match value:
        case float() if type(value) is float:
            return {"float": struct.pack(">d", value).hex()}  # every bit, also of NaN and infinity, which JSON lacks
        case np.ndarray() if type(value) in _ARRAYS and value.dtype.kind in "biufc" and value.dtype.isnative:
            return {"ndarray": [str(value.dtype), list(value.shape), base64.b64encode(value.tobytes()).decode()]}
        case np.generic() if value.dtype.kind in "biufc":
            return {"scalar": [str(value.dtype), base64.b64encode(value.tobytes()).decode()]}
        case torch.dtype():
            return {"dtype": str(value)}
        case bytes():
            return {"bytes": base64.b64encode(value).decode()}
        case OrderedDict() if type(value) is OrderedDict and versions_of(value) is not None:
            return {"state_dict": [pairs(value.items()), inner(versions_of(value), _VERSIONS)]}
        case _ if type(value) in _MAPPINGS and getattr(value, "default_factory", None) is None:
            return {_MAPPINGS[type(value)]: pairs(value.items())}
        case defaultdict() if type(value) is defaultdict and value.default_factory in _FACTORIES.values():
            (factory,) = (name for name, one in _FACTORIES.items() if one is value.default_factory)
            return {f"defaultdict of {factory}": pairs(value.items())}
        case deque():
            return {"deque": [value.maxlen, [inner(item, number) for number, item in enumerate(value)]]}
        case _ if type(value) in _SEQUENCES:
            items = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
            return {
                _SEQUENCES[type(value)]: [one if type(one) in plain else inner(one, number) for number, one in enumerate(items)]
            }
    raise ConfigError(
        f"{path or 'the state'} is a {type(value).__module__}.{type(value).__name__}, which cannot be stored without pickle: "
        "let state_dict() return plain values, containers and tensors"
    )


_VERSIONS = "_metadata"
"""The attribute where torch keeps them."""
_PLAIN = frozenset((type(None), bool, int, str))
_ARRAYS = (np.ndarray, np.memmap)
"""Others are more than their numbers (a mask, say), which would be lost."""
_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter", defaultdict: "defaultdict"}
_FACTORIES: dict[str, type] = {one.__name__: one for one in (int, float, str, list, dict, set)}
"""What a defaultdict may make: anything else would come back without it."""
_SEQUENCES: dict[type, str] = {
    list: "list",
    tuple: "tuple",
    torch.Size: "Size",
    set: "set",
    frozenset: "frozenset",
}
_MAKE: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": lambda pairs: Counter(dict(pairs)),
    "defaultdict": lambda pairs: defaultdict(None, pairs),
    **{f"defaultdict of {name}": partial(defaultdict, factory) for name, factory in _FACTORIES.items()},
    "list": list,
    "tuple": tuple,
    "Size": torch.Size,
    "set": set,
    "frozenset": frozenset,
}


def unflatten(skeleton: Any, tensor: Callable[[str], Tensor]) -> Any:
    """The state dict of a skeleton; `tensor` gives the tensor of a path.

    Raises:
        StorageError: it is no skeleton.
    """
    try:
        return _unflatten(skeleton, tensor)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, struct.error) as error:
        raise StorageError(f"the stored state cannot be put together: {type(error).__name__}: {error}") from error


def _unflatten(node: Any, tensor: Callable[[str], Tensor]) -> Any:
    if not isinstance(node, dict):
        return node
    ((kind, value),) = node.items()
    match kind:
        case "float":
            return struct.unpack(">d", bytes.fromhex(value))[0]
        case "tensor":
            return tensor(value)
        case "ndarray":
            return np.frombuffer(base64.b64decode(value[2]), dtype=np.dtype(value[0])).reshape(value[1]).copy()
        case "scalar":
            return np.frombuffer(base64.b64decode(value[1]), dtype=np.dtype(value[0]))[0]
        case "dtype":
            return _dtype(value)
        case "bytes":
            return base64.b64decode(value)
        case "deque":
            return deque((_unflatten(item, tensor) for item in value[1]), value[0])
        case "state_dict":
            return with_versions(_unflatten({"dict": value[0]}, tensor), _versions(_unflatten(value[1], tensor)))
        case _ if kind in _MAPPINGS.values() or kind.startswith("defaultdict of "):
            return _MAKE[kind]([(_key(_unflatten(key, tensor)), _unflatten(item, tensor)) for key, item in value])
        case _ if kind in _SEQUENCES.values():
            return _MAKE[kind]([_unflatten(item, tensor) for item in value])
    raise ValueError(f"unknown kind {kind!r}")


def _key(key: Any) -> Any:
    hash(key)
    return key


def _versions(found: Any) -> Any:
    if not isinstance(found, dict) or not all(isinstance(about, dict) for about in found.values()):
        raise ValueError(f"{found!r:.200} says no versions of parts")
    return found


def _dtype(text: str) -> torch.dtype:
    found = getattr(torch, text.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{text!r} is no dtype")
    return found


def json_tensor(value: Any) -> Tensor:
    """A value as JSON in bytes: uint8 [size]. Blanks make it longer, so that a counter that grows a digit is no other shape."""
    content = json.dumps(value).encode()
    return torch.frombuffer(bytearray(content.ljust(-(-len(content) // JSON_BYTES) * JSON_BYTES)), dtype=torch.uint8)
