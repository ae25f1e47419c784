"""Images decoded and augmented by NVIDIA DALI, in the order that the loader says.

DALI's own readers and random operators are not used: they keep an order and generators of their own, which cannot be
cut at any sample or shared out to another world. Here DALI gets encoded bytes and, per sample, a `View` drawn on the
host, and computes each image from these alone. So pixels depend on (seed, epoch, sample id), whatever batch the image
is in, and there is no state to save. DALI is imported when the first image is loaded.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from raytrain_ft.errors import ConfigError, FTError, StorageError, TaskError
from raytrain_ft.training.data import alone_inside, dataset_size, fetch
from raytrain_ft.training.images import ImageAugmentation, ImageFolder, View, central_view, random_view
from raytrain_ft.training.random import sample_seed

Device = Literal["cpu", "gpu"]

_AT_ONCE = 64  # images that a pipeline holds at a time; larger batches are done in pieces, to the same bits
_PATIENCE_S = 60.0  # for another thread's piece, which takes milliseconds
_NO_DAMAGE = ("alloc", "out of memory", "cuda")  # in what DALI says, in small letters
_inside_dali = threading.RLock()


class DaliImages:
    """A dataset of images that the loader reads in batches: (float32 [n, 3, size, size], int64 [n] labels), on the host.

    `images`: a folder as `ImageFolder` has it, or a map-style dataset of dicts that hold an encoded image (bytes, as JPEG
    or PNG) under `image` and an integer under `label`, as `ArrowDataset` is. With `augment`, the image is seen through a
    random box, flip and change of colours, redrawn in each epoch; without, through the largest square in its middle.
    Values are (pixel / 255 - mean) / std, per channel (red, green, blue).

    `device`: which of DALI's decoders; by default "gpu" where torch has one. Their pixels differ in the last bits, so
    name it if some workers of a run have a GPU and some do not. `num_threads`: DALI's, per worker.

    Raises ConfigError for what cannot be read this way or where DALI is missing, StorageError for a damaged image, TaskError
    where DALI fails for another reason, such as a lack of memory.
    """

    def __init__(
        self,
        images: Any,
        size: int = 224,
        augment: ImageAugmentation | None = None,
        *,
        image: str = "image",
        label: str = "label",
        mean: Sequence[float] = (0.485, 0.456, 0.406),
        std: Sequence[float] = (0.229, 0.224, 0.225),
        device: Device | None = None,
        num_threads: int = 2,
    ) -> None:
        if size < 1 or num_threads < 1 or device not in ("cpu", "gpu", None):
            raise ConfigError(
                f"DaliImages(size={size}, num_threads={num_threads}, device={device!r}): size and num_threads must be at "
                "least 1, and device 'cpu', 'gpu' or None."
            )
        if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
            raise ConfigError(f"DaliImages(mean={mean}, std={std}): one number per channel, and std greater than 0.")
        self.rows = ImageFolder(images) if isinstance(images, (str, Path)) else images
        self.size, self.augment, self.num_threads = size, augment, num_threads
        self.device: Device | None = device
        self.mean, self.std = tuple(mean), tuple(std)
        self.image, self.label = image, label
        self._pipelines: _Pipelines | None = None
        if dataset_size(self.rows) > 0 and not isinstance(self.rows, ImageFolder):
            self._check(0, fetch(self.rows, [0])[0], ConfigError)

    def __len__(self) -> int:
        return len(self.rows)

    def load_batch(self, ids: np.ndarray, epoch: int, seed: int, between: Callable[[], None] = lambda: None) -> list[Tensor]:
        """Images and labels of samples `ids` as of `epoch`, in that order. `between` is called before each piece, and may raise
        to leave the rest."""
        # On the host, whatever torch's default device is: that is one of the thread.
        images = torch.empty(len(ids), 3, self.size, self.size, device="cpu")
        labels = torch.empty(len(ids), dtype=torch.int64, device="cpu")
        for start in range(0, len(ids), _AT_ONCE):
            piece = ids[start : start + _AT_ONCE].tolist()
            with alone_inside(self.rows):
                rows = fetch(self.rows, piece, between)
            for index, row in zip(piece, rows, strict=True):
                self._check(index, row, StorageError)
            seeds = [sample_seed(seed, epoch, index) for index in piece]
            encoded = [np.frombuffer(row[self.image], dtype=np.uint8) for row in rows]
            between()
            with _alone_in_dali():
                images[start : start + len(piece)] = torch.from_numpy(self._decode(piece, encoded, seeds, self._view))
            labels[start : start + len(piece)] = torch.tensor([int(row[self.label]) for row in rows], device="cpu")
        return [images, labels]

    def damaged(self) -> list[str]:
        """What cannot be decoded, each with the reason. Looks at all of every image: a run may meet the damaged part of one
        only after many epochs, or never."""
        found: list[str] = []
        for index in range(len(self)):
            try:
                with alone_inside(self.rows):
                    (row,) = fetch(self.rows, [index])
                self._check(index, row, StorageError)
                encoded = np.frombuffer(row[self.image], dtype=np.uint8)
                with _alone_in_dali():
                    try:
                        self._decode([index], [encoded], [0], lambda _, size: View(0, 0, *size))
                    except TaskError as error:  # one that says that it is huge
                        found.append(str(error))
            except StorageError as error:
                found.append(str(error))
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_pipelines": None}  # every process builds its own

    def _decode(
        self, ids: list[int], encoded: list[np.ndarray], seeds: list[int], view: Callable[[int, tuple[int, int]], View]
    ) -> np.ndarray:
        """float32 [n, 3, size, size]. Raises StorageError that names the image which DALI cannot decode."""
        if self._pipelines is None:
            self._pipelines = _build(self.device or _default_device(), self)
        try:
            sizes = self._pipelines.sizes(encoded)
            return self._pipelines.pixels(encoded, [view(*args) for args in zip(seeds, sizes, strict=True)])
        except BaseException as error:
            # DALI does not use a pipeline again once it has failed, and what an interrupted one was fed would come out next.
            self._pipelines = None
            if not isinstance(error, RuntimeError):
                raise
            reason = _reason(error)
        # Out here nothing refers to the failed pipelines: their memory is free for others.
        if len(ids) == 1:
            raise self._failed(f"{self._name(ids[0])} ({encoded[0].size} bytes)", reason)
        for one in range(len(ids)):
            self._decode([ids[one]], [encoded[one]], [seeds[one]], view)
        raise TaskError(f"DALI failed on a batch, but not on any of its images alone: {reason}")

    def _failed(self, what: str, reason: str) -> StorageError | TaskError:
        """Of an image alone: it is damaged, unless DALI says that it lacks memory or a device."""
        if any(sign in reason.lower() for sign in _NO_DAMAGE):
            return TaskError(
                f"DALI cannot work on {what}, which need not be damaged: {reason}. Look at this machine's memory and GPU, and "
                "at how large the image says that it is; a smaller num_threads=, or device='cpu', takes less of them."
            )
        return StorageError(
            f"{what} cannot be decoded as an image: {reason}. Replace it, or remove it and begin a run of another name."
        )

    def _view(self, seed: int, size: tuple[int, int]) -> View:
        return central_view(*size) if self.augment is None else random_view(self.augment, seed, *size)

    def _name(self, index: int) -> str:
        return str(self.rows.path(index)) if isinstance(self.rows, ImageFolder) else f"sample {index} of the {_kind(self.rows)}"

    def _check(self, index: int, row: Any, error: type[FTError]) -> None:
        """Raises `error` unless a sample has what `load_batch` reads."""
        image, label, name = self.image, self.label, self._name(index)
        if not isinstance(row, dict) or not {image, label} <= row.keys():
            found = sorted(map(str, row)) if isinstance(row, dict) else _kind(row)
            raise error(f"{name} has {found}, but a dict with {image!r} and {label!r} is needed: name them, or mend it.")
        if not isinstance(row[image], bytes):
            raise error(f"{image!r} of {name} is a {_kind(row[image])}; it must be the bytes of an image file.")
        whole = np.asarray(row[label])
        if whole.shape != () or whole.dtype.kind not in "iu":
            raise error(f"{label!r} of {name} is {row[label]!r}; it must be one integer.")


def _kind(value: Any) -> str:
    return type(value).__name__


@contextmanager
def _alone_in_dali() -> Iterator[None]:
    if not _inside_dali.acquire(timeout=_PATIENCE_S):
        raise TaskError(
            f"Another thread of this process has been inside DALI for {_PATIENCE_S:.0f} s: DALI hangs. Restart this "
            "process, and look at the machine that it runs on."
        )
    try:
        yield
    finally:
        _inside_dali.release()


def _reason(error: RuntimeError) -> str:
    """What DALI says happened, out of the many lines around it."""
    return str(error).partition("encountered:")[2].strip().partition("\n")[0].strip(" :") or str(error)


# ---------------------------------------------------------------- pipelines


def _default_device() -> Device:
    return "gpu" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True, slots=True)
class _Pipelines:
    """DALI's two: one looks up how large images are, which a box depends on, the other decodes what is in the boxes."""

    peek: Any
    decode: Any

    def sizes(self, encoded: list[np.ndarray]) -> list[tuple[int, int]]:
        """(height, width) of each image, turned upright as its EXIF data says; only headers are read."""
        (shapes,) = self.peek.run(encoded=encoded)
        return [(int(height), int(width)) for height, width, _ in map(np.array, shapes)]

    def pixels(self, encoded: list[np.ndarray], views: list[View]) -> np.ndarray:
        """float32 [n, 3, size, size]: the images as seen through `views`."""
        (images,) = self.decode.run(
            encoded=encoded,
            anchor=np.array([(view.top, view.left) for view in views], dtype=np.int32),
            shape=np.array([(view.height, view.width) for view in views], dtype=np.int32),
            mirror=np.array([view.mirror for view in views], dtype=np.int32),
            brightness=np.array([view.brightness for view in views], dtype=np.float32),
            contrast=np.array([view.contrast for view in views], dtype=np.float32),
            saturation=np.array([view.saturation for view in views], dtype=np.float32),
        )
        # Always to the host: batches read ahead take no GPU memory, and no stream of DALI's meets one of torch's.
        return np.array(images.as_cpu().as_tensor())


def _build(device: Device, settings: DaliImages) -> _Pipelines:
    """Both pipelines, for batches of up to _AT_ONCE images. Raises ConfigError where DALI is missing."""
    fn, types, new_pipeline = _import()

    def pipeline(on_gpu: bool) -> Any:
        # A queue of one and no pipelining: what is fed is what comes out; the loader's thread is what reads ahead.
        device_id = torch.cuda.current_device() if on_gpu else None
        return new_pipeline(_AT_ONCE, settings.num_threads, device_id, seed=0, prefetch_queue_depth=1)

    def given(name: str, dtype: Any, ndim: int) -> Any:
        return fn.external_source(name=name, dtype=dtype, ndim=ndim)

    peek, decode = pipeline(False), pipeline(device == "gpu")
    with peek:
        peek.set_outputs(fn.peek_image_shape(given("encoded", types.UINT8, 1)))
    with decode:
        images = fn.decoders.image_slice(
            given("encoded", types.UINT8, 1),
            given("anchor", types.INT32, 1),  # integers are pixels
            given("shape", types.INT32, 1),
            axis_names="HW",
            device="mixed" if device == "gpu" else "cpu",
            output_type=types.RGB,
            jpeg_fancy_upsampling=True,  # on a GPU too, as on a CPU
            hw_decoder_load=0.0,  # else the batch decides which images go to the hardware, and so their last bits
        )
        images = fn.resize(images, size=[settings.size, settings.size], interp_type=types.INTERP_LINEAR, antialias=True)
        factors = {name: given(name, types.FLOAT, 0) for name in ("brightness", "contrast", "saturation")}
        images = fn.color_twist(images, dtype=types.FLOAT, **factors)
        images = fn.crop_mirror_normalize(
            images,
            dtype=types.FLOAT,
            output_layout="CHW",
            mirror=given("mirror", types.INT32, 0),
            mean=[255 * value for value in settings.mean],
            std=[255 * value for value in settings.std],
        )
        decode.set_outputs(images)
    peek.build()
    decode.build()
    return _Pipelines(peek, decode)


@cache
def _import() -> tuple[Any, Any, Any]:
    """DALI's (fn, types, Pipeline). Raises ConfigError where DALI is missing."""
    try:
        fn, types, pipeline = (import_module(f"nvidia.dali.{name}") for name in ("fn", "types", "pipeline"))
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"DaliImages needs NVIDIA DALI, which cannot be imported here ({error}): pip install nvidia-dali-cuda120 on "
            "every node. It exists for Linux only; elsewhere use a map-style dataset that decodes with torchvision."
        ) from error
    # DALI pulls down its pipelines when the interpreter exits, and aborts if the loader's thread is in one. Registered
    # after DALI's own handler, so called before it: waits for that thread to come out, and lets nobody in again.
    atexit.register(_inside_dali.acquire, timeout=_PATIENCE_S)
    return fn, types, pipeline.Pipeline
