"""What this process runs: the code of raytrain_ft, and the versions of what is beneath it.

The processes of a run send each other dataclasses, which travel by the places of their fields: other code would take one for
another without a word.
"""

from __future__ import annotations

import hashlib
import pickle
import platform
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import ray
import ray.cloudpickle

from raytrain_ft.errors import ConfigError
from raytrain_ft.runtime.spec import RunSpec

LIBRARIES = ("torch", "ray", "numpy", "pyarrow", "nvidia-dali-cuda120", "nvidia-dali-cuda130")
"""What results may depend on, by the names that they are installed by."""


def digest_of(package: Path) -> str:
    """Of all modules of a package, wherever it is installed. Hidden files, as editors leave them, are none."""
    whole = hashlib.sha256()
    for name, path in sorted(_modules(package)):
        with suppress(OSError):  # it is being replaced just now
            content = path.read_bytes()
            whole.update(f"{name}\0{len(content)}\0".encode() + content)
    return whole.hexdigest()[:16]


def _modules(package: Path) -> Iterator[tuple[str, Path]]:
    for path in package.rglob("*.py"):
        inside = path.relative_to(package)
        if not any(part.startswith(".") for part in inside.parts):
            yield inside.as_posix(), path


CODE = digest_of(Path(__file__).parents[1])
"""Of the code that this process has in memory, as it was when it was imported."""


def versions() -> dict[str, str]:
    """Of all that results may depend on, as far as it is installed here. Nothing of it is loaded."""
    found = {"raytrain_ft": CODE, "python": platform.python_version()}
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def same_bits() -> str:
    """What all workers must agree in, in words, to compute the same bits and to understand each other."""
    found = versions()
    return f"Python {found['python']}, torch {found['torch']} and raytrain_ft {CODE}"


def pack(spec: RunSpec) -> bytes:
    """For a process that may have other code: it must say so before it tries to read this (see `unpack`)."""
    return ray.cloudpickle.dumps(spec)  # pyright: ignore[reportPrivateImportUsage]


def unpack(code: str, spec: bytes, whose: str) -> RunSpec:
    """What a process with this code has packed.

    Raises:
        ConfigError: this process has other code of raytrain_ft.
    """
    if code != CODE:
        raise ConfigError(
            f"node {ray.util.get_node_ip_address()} has other code of raytrain_ft ({CODE}) than {whose} ({code}): install "
            "the same commit on all nodes, change it only between runs, and run the job again under the same name"
        )
    return pickle.loads(spec)
