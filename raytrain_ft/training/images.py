"""Encoded images in folders, and what is random about an image: pure functions of a seed, with nothing decoded here.

Which part of an image is seen, and in which colours, is drawn on the host and handed to whatever decodes, so that it
depends on (seed, epoch, sample id) alone. Must not know of DALI, nor of batches.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from raytrain_ft.errors import ConfigError, StorageError, UnreachableError

SUFFIXES = (".jpg", ".jpeg", ".png")
_PAUSE_S = 1.0  # before a file that could not be read is read again
_ABSENT = (FileNotFoundError, NotADirectoryError, PermissionError)  # which another attempt does not change
_TRIES = 10  # boxes drawn before the fallback, as torchvision's RandomResizedCrop has it


# ---------------------------------------------------------------- files


class ImageFolder:
    """The files root/<class>/<name>.jpg, .jpeg or .png (upper case too), by number: {"image": bytes, "label": int}.

    Classes are the directories in `root`, in the order of their names, and labels number them; samples come class
    after class, by name within each. Everything else is passed over, as is what begins with a dot. Attributes:
    `classes`, their names. Raises ConfigError for a folder without classes or a class without images, StorageError for
    a file that cannot be read, UnreachableError where storage does not answer: for a file, not at a second attempt either.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).expanduser().absolute()
        try:
            self.classes = sorted(_visible(self.root, directories=True))
            self._files = [
                (f"{name}{os.sep}{file}", label)
                for label, name in enumerate(self.classes)
                for file in sorted(_images(self.root / name))
            ]
        except _ABSENT as error:
            raise ConfigError(f"The image folder {self.root} cannot be read: {error}. Every node must see it.") from error
        except OSError as error:  # a mount that does not answer now
            raise UnreachableError(f"The image folder {self.root} cannot be read now: {error}. Look at its storage.") from error
        if not self.classes:
            raise ConfigError(f"{self.root} has no class: images are expected in {self.root}/<class>/<name>.jpg.")

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": self._content(self.path(index)), "label": self._files[index][1]}

    def _content(self, path: Path) -> bytes:
        try:
            return path.read_bytes()
        except _ABSENT as error:
            raise StorageError(
                f"{path} cannot be read: {error}. It was there when the folder was listed: put it back."
            ) from error
        except OSError:
            time.sleep(_PAUSE_S)  # one failure of a node's mount need not end the run
        try:
            return path.read_bytes()
        except OSError as error:
            raise UnreachableError(f"{path} could not be read at two attempts: {error}. Look at its storage.") from error

    def path(self, index: int) -> Path:
        return self.root / self._files[index][0]

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.root,))  # a worker lists the folder itself instead of being sent the list


def _visible(directory: Path, *, directories: bool) -> Iterator[str]:
    """Names of the subdirectories, or of the files, in `directory`; in no order.

    Raises:
        ConfigError: a link leads nowhere: without what it stands for, the labels of others would be other numbers.
    """
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_symlink() and not (link := Path(entry.path)).exists():
                raise ConfigError(f"{link} is a link to {link.readlink()}, which is not there: mount it, or remove the link")
            if entry.is_dir() if directories else entry.is_file():
                yield entry.name


def _images(directory: Path) -> list[str]:
    names = [name for name in _visible(directory, directories=False) if name.lower().endswith(SUFFIXES)]
    if not names:
        raise ConfigError(
            f"The class {directory} has no image: files ending in {', '.join(SUFFIXES)} are expected. Remove the "
            "directory, or put its images there."
        )
    return names


# ---------------------------------------------------------------- what is random about an image


@dataclass(frozen=True, slots=True)
class ImageAugmentation:
    """How an image may be changed at random.

    Attributes:
        scale: the box that is cut out has between these fractions of the image's area.
        ratio: and between these ratios of width to height; evenly on a logarithmic scale. It is then resized.
        flip: the probability of a horizontal flip.
        brightness, contrast, saturation: the factor is drawn from 1 - this to 1 + this; from 0 to 1, 0 for no change.

    Raises ConfigError for values outside these ranges.
    """

    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0

    def __post_init__(self) -> None:
        for name, (low, high), limit in (("scale", self.scale, 1.0), ("ratio", self.ratio, 1000.0)):
            if not 0 < low <= high <= limit:
                raise ConfigError(f"ImageAugmentation({name}={(low, high)}): give (low, high), 0 < low <= high <= {limit:g}.")
        for name in ("flip", "brightness", "contrast", "saturation"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"ImageAugmentation({name}={getattr(self, name)!r}): give a number from 0 to 1.")


@dataclass(frozen=True, slots=True)
class View:
    """How one image is seen: a box in pixels, mirrored or not, and factors for its colours."""

    top: int
    left: int
    height: int
    width: int
    mirror: bool = False
    brightness: float = 1.0
    contrast: float = 1.0
    saturation: float = 1.0


def central_view(height: int, width: int) -> View:
    """The largest square in the middle, as it is: what an image without augmentation is seen by."""
    side = min(height, width)
    return View((height - side) // 2, (width - side) // 2, side, side)


def random_view(augmentation: ImageAugmentation, seed: int, height: int, width: int) -> View:
    """A view of an image of this size, drawn from `seed` (64 bits) alone.

    Philox's raw stream never changes between releases of numpy (as in `sampling.order`). Each draw has its own place
    in the stream, so that, say, another `flip` leaves the boxes as they were.
    """
    raw = np.random.Philox(key=np.array([seed, 0], dtype=np.uint64)).random_raw(4 + 4 * _TRIES)
    draws = ((raw >> np.uint64(11)) * 2.0**-53).tolist()  # float64 in [0, 1)
    top, left, box_height, box_width = _box(augmentation, draws[4:], height, width)
    a = augmentation
    factors = [
        1 + spread * (2 * draw - 1) for spread, draw in zip((a.brightness, a.contrast, a.saturation), draws[1:4], strict=True)
    ]
    return View(top, left, box_height, box_width, draws[0] < a.flip, *factors)


def _box(augmentation: ImageAugmentation, draws: list[float], height: int, width: int) -> tuple[int, int, int, int]:
    """(top, left, height, width) of the first box drawn that fits into the image, else of the largest in the middle."""
    (small, large), (low, high) = augmentation.scale, augmentation.ratio
    for i in range(0, 4 * _TRIES, 4):
        area = height * width * (small + (large - small) * draws[i])
        ratio = math.exp(math.log(low) + (math.log(high) - math.log(low)) * draws[i + 1])
        h, w = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < h <= height and 0 < w <= width:
            return int(draws[i + 2] * (height - h + 1)), int(draws[i + 3] * (width - w + 1)), h, w
    ratio = min(max(width / height, low), high)
    h, w = max(1, min(height, round(width / ratio))), max(1, min(width, round(height * ratio)))
    return (height - h) // 2, (width - w) // 2, h, w
