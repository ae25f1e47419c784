"""Images by DALI: the same bits for a sample of an epoch, whoever loads it, in whatever batch, after whatever happened."""

from __future__ import annotations

import errno
import importlib
import io
import os
import re
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
import sklearn.datasets
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from ray import cloudpickle
from torch import Tensor

import raytrain_ft as ft
from raytrain_ft import checkfreq
from raytrain_ft.errors import ConfigError, StorageError, TaskError, UnreachableError
from raytrain_ft.policy.sampling import Position, Sampling, next_batch, order
from raytrain_ft.training import dali
from raytrain_ft.training.arrow_dataset import ArrowDataset
from raytrain_ft.training.dali import DaliImages
from raytrain_ft.training.data import Loader
from raytrain_ft.training.determinism import check_deterministic
from raytrain_ft.training.images import ImageAugmentation, ImageFolder, View, central_view, random_view

pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed: it exists for Linux only")

SEED, BATCH, SIZE = 5, 6, 24
EVERYTHING = ImageAugmentation(scale=(0.3, 1.0), brightness=0.4, contrast=0.4, saturation=0.4)
PHOTOS = [Path(sklearn.datasets.__file__).parent / "images" / name for name in ("china.jpg", "flower.jpg")]


def photo(number: int) -> Image.Image:
    """A part of one of two photographs; another part, and size, for each number."""
    left, top = 40 * number % 500, 30 * number % 300
    return Image.open(PHOTOS[number % 2]).crop((left, top, left + 60 + 7 * number % 80, top + 50 + 11 * number % 77))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 images of two classes, JPEG and PNG, grey and with transparency among them."""
    root = tmp_path_factory.mktemp("images")
    for number in range(20):
        path = root / "ab"[number % 2] / f"{number:02d}.{['jpg', 'png', 'jpeg', 'JPG', 'PNG'][number % 5]}"
        path.parent.mkdir(exist_ok=True)
        image = photo(number)
        if number in (5, 6):
            image = image.convert("L")
        if number == 9:
            image.putalpha(100)
        image.save(path, icc_profile=None)
    (root / ".cache").mkdir()
    (root / "readme.txt").write_text("not an image")
    (root / "a" / "notes.txt").write_text("not an image")
    return root


@pytest.fixture(scope="module")
def dataset(folder: Path) -> DaliImages:
    return DaliImages(folder, SIZE, EVERYTHING)


@pytest.fixture(scope="module")
def expected(dataset: DaliImages) -> list[list[Tensor]]:
    """Per epoch and sample: its pixels, when it is loaded alone."""
    return [[dataset.load_batch(np.array([i]), epoch, SEED)[0][0] for i in range(20)] for epoch in range(3)]


def sampling(size: int = 20) -> Sampling:
    return Sampling(size, BATCH, SEED)


# ---------------------------------------------------------------- the same bits


@settings(max_examples=25)
@given(st.data())
def test_the_same_bits_in_any_world_from_any_cut(dataset: Any, expected: Any, data: st.DataObject) -> None:
    position = Position(data.draw(st.integers(0, 1)), data.draw(st.integers(0, 20)))
    world_size, count = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    batch, after = next_batch(sampling(), position)
    seen: list[int] = []
    for rank in range(world_size):
        loader = Loader(dataset, sampling())
        loader.start(position, rank, world_size, count)
        for piece in loader.next():
            assert piece.after == after
            seen += piece.ids.tolist()
            if piece.data is None:
                continue
            images, labels = piece.data
            assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
            assert torch.equal(images, torch.stack([expected[piece.batch.epoch][i] for i in piece.ids.tolist()]))
            assert labels.tolist() == [int(i >= 10) for i in piece.ids.tolist()]
        loader.stop()
    assert seen == order(sampling(), batch.epoch)[batch.start : batch.stop].tolist()


@settings(max_examples=15)
@given(st.lists(st.tuples(st.integers(0, 19), st.integers(1, 3), st.integers(0, 3)), min_size=1, max_size=4))
def test_steps_that_are_abandoned_leave_no_trace(dataset: Any, expected: Any, starts: list[tuple[int, int, int]]) -> None:
    loader = Loader(dataset, sampling(), prefetch=1)
    for consumed, world_size, steps in starts:
        loader.start(Position(0, consumed), world_size - 1, world_size)  # whatever is under way is abandoned here
        for _ in range(steps):
            (piece,) = loader.next()
            for i, image in zip(piece.ids.tolist(), piece.data[0] if piece.data else [], strict=True):
                assert torch.equal(image, expected[piece.batch.epoch][i])
    loader.stop()


def test_a_fence_does_not_wait_for_a_whole_micro_batch(dataset: DaliImages, monkeypatch: pytest.MonkeyPatch) -> None:
    loader, pieces = Loader(dataset, Sampling(20, 20, 0)), []
    real = dali._Pipelines.pixels

    def pixels(self: Any, encoded: Any, views: Any) -> Any:
        pieces.append(len(encoded))
        loader.start(Position(), 0, 1)  # as after a fence
        monkeypatch.setattr(dali._Pipelines, "pixels", real)
        return real(self, encoded, views)

    monkeypatch.setattr(dali, "_AT_ONCE", 4)
    monkeypatch.setattr(dali._Pipelines, "pixels", pixels)
    abandoned = []
    decode = dataset._decode

    def counted(ids: list[int], *rest: Any) -> Any:
        abandoned.append(threading.current_thread())
        return decode(ids, *rest)

    monkeypatch.setattr(dataset, "_decode", counted)
    loader.start(Position(), 0, 1)
    (piece,) = loader.next()
    loader.stop()
    assert len(piece.ids) == 20
    assert pieces == [4]
    assert abandoned.count(abandoned[0]) == 1


def test_what_is_loaded_is_on_the_host_whatever_the_default_device(dataset: DaliImages, folder: Path, expected: Any) -> None:
    with torch.device("meta"):
        images, labels = dataset.load_batch(np.array([3]), 0, SEED)
    assert torch.equal(images[0], expected[0][3])
    assert labels.tolist() == [ImageFolder(folder)[3]["label"]]


def test_every_sample_once_per_epoch_though_the_world_changes(dataset: DaliImages) -> None:
    position, after, seen, step = Position(), Position(), [], 0
    while position.epoch == 0:
        world_size = step % 3 + 1
        for rank in range(world_size):
            loader = Loader(dataset, sampling())
            loader.start(position, rank, world_size)
            (piece,) = loader.next()
            seen, after = seen + piece.ids.tolist(), piece.after
            loader.stop()
        position, step = after, step + 1
    assert sorted(seen) == list(range(20))


def test_batches_larger_than_a_pipeline_are_the_same_bits(dataset: Any, expected: Any) -> None:
    ids = np.random.default_rng(0).integers(0, 20, 2 * dali._AT_ONCE + 5)
    images, labels = dataset.load_batch(ids, 1, SEED)
    assert torch.equal(images, torch.stack([expected[1][i] for i in ids]))
    assert labels.tolist() == (ids >= 10).tolist()


def test_another_process_with_other_threads_sees_the_same_bits(folder: Path, expected: Any) -> None:
    program = f"""
import sys, hashlib, numpy as np
from raytrain_ft.training.dali import DaliImages
from raytrain_ft.training.images import ImageAugmentation
assert "ray" not in sys.modules and "nvidia.dali" not in sys.modules
images = DaliImages({str(folder)!r}, {SIZE}, {EVERYTHING!r}, num_threads=1).load_batch(np.arange(20), 0, {SEED})[0]
sys.stdout.buffer.write(images.numpy().tobytes())
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=120)
    assert found.stdout == torch.stack(expected[0]).numpy().tobytes(), found.stderr.decode()


def test_a_program_may_end_while_the_loader_reads_ahead(folder: Path) -> None:
    program = f"""
import sys
from raytrain_ft.policy.sampling import Position, Sampling
from raytrain_ft.training.dali import DaliImages
from raytrain_ft.training.data import Loader
loader = Loader(DaliImages({str(folder)!r}, 512), Sampling(20, 20, 0), prefetch=100)
loader.start(Position(), 0, 1)
loader.next()
sys.exit(7)
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=120)
    assert (found.returncode, found.stderr) == (7, b"")


def test_another_epoch_or_seed_is_another_view(dataset: Any, expected: Any) -> None:
    for i in range(20):
        assert not torch.equal(expected[0][i], expected[1][i])
        assert not torch.equal(expected[0][i], dataset.load_batch(np.array([i]), 0, SEED + 1)[0][0])


def test_without_augmentation_every_epoch_is_the_same(folder: Path) -> None:
    plain = DaliImages(folder, SIZE)
    first, second = (plain.load_batch(np.arange(20), epoch, SEED)[0] for epoch in (0, 7))
    assert torch.equal(first, second)


# ---------------------------------------------------------------- the right pixels


def reference(image: Image.Image, box: tuple[int, int, int, int]) -> Tensor:
    """float32 [3, SIZE, SIZE] from 0 to 1, by Pillow."""
    resized = image.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=box)
    return torch.tensor(np.asarray(resized), dtype=torch.float32).permute(2, 0, 1) / 255


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_pixels_are_those_of_pillow(suffix: str, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    path = tmp_path / "x" / f"0.{suffix}"
    photo(3).save(path, quality=95, icc_profile=None)
    image = Image.open(path)
    unit: dict[str, Any] = {"mean": (0, 0, 0), "std": (1, 1, 1)}
    side, (width, height) = min(image.size), image.size
    left, top = (width - side) // 2, (height - side) // 2
    ((ours,), _) = DaliImages(tmp_path, SIZE, **unit).load_batch(np.arange(1), 0, 0)
    theirs = reference(image, (left, top, left + side, top + side))
    assert (ours - theirs).abs().mean() < 0.01
    ((normal,), _) = DaliImages(tmp_path, SIZE).load_batch(np.arange(1), 0, 0)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    torch.testing.assert_close(normal, (ours - mean[:, None, None]) / std[:, None, None], rtol=1e-4, atol=1e-4)
    flipping = ImageAugmentation(scale=(1, 1), ratio=(width / height, width / height), flip=1.0)
    ((flipped,), _) = DaliImages(tmp_path, SIZE, flipping, **unit).load_batch(np.arange(1), 0, 0)
    assert (flipped.flip(2) - reference(image, (0, 0, width, height))).abs().mean() < 0.01


def test_images_lying_on_their_side_are_turned_upright(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held upright
    photo(1).resize((120, 60)).save(tmp_path / "x" / "0.jpg", exif=exif, quality=95)
    unit: dict[str, Any] = {"mean": (0, 0, 0), "std": (1, 1, 1)}
    ((ours,), _) = DaliImages(tmp_path, SIZE, **unit).load_batch(np.arange(1), 0, 0)
    upright = Image.open(tmp_path / "x" / "0.jpg").rotate(-90, expand=True)
    assert upright.size == (60, 120)
    assert (ours - reference(upright, (0, 30, 60, 90))).abs().mean() < 0.015


def test_colours(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    Image.new("RGB", (30, 30), (100, 50, 150)).save(tmp_path / "x" / "0.png")

    def seen(**spread: Any) -> Tensor:
        augment = ImageAugmentation(flip=0.0, **spread)
        images = [
            DaliImages(tmp_path, 4, augment, mean=(0, 0, 0), std=(1, 1, 1)).load_batch(np.arange(1), e, 0) for e in range(6)
        ]
        return torch.stack([image[0][0, :, 2, 2] * 255 for image in images])  # [6, 3]

    assert torch.equal(seen().round(), torch.tensor([100.0, 50, 150]).expand(6, 3))
    bright = seen(brightness=0.5) / torch.tensor([100, 50, 150])
    assert (bright.amax(1) - bright.amin(1)).max() < 1e-3, "one factor for all channels"
    assert 0.5 <= bright.min() < 0.9 < 1.1 < bright.max() <= 1.5
    spread = seen(saturation=1.0)
    assert len({tuple(row) for row in spread.tolist()}) == 6
    assert (spread.diff(dim=1).sign() == torch.tensor([-1, 1])).all()


@settings(max_examples=300)
@given(st.integers(0, 2**64 - 1), st.integers(1, 3000), st.integers(1, 3000), st.floats(0.01, 1), st.floats(0.05, 20))
def test_views_are_inside_the_image(seed: int, height: int, width: int, small: float, ratio: float) -> None:
    augmentation = ImageAugmentation((small, 1.0), (ratio, ratio * 1.5), 0.5, 0.4, 0.3, 0.2)
    view = random_view(augmentation, seed, height, width)
    for box in (view, central_view(height, width)):
        assert 0 <= box.top < box.top + box.height <= height
        assert 0 <= box.left < box.left + box.width <= width
    assert abs(view.brightness - 1) <= 0.4
    assert abs(view.contrast - 1) <= 0.3
    assert abs(view.saturation - 1) <= 0.2
    assert view == random_view(augmentation, seed, height, width)


def test_views_are_spread_as_asked_and_never_change_between_releases() -> None:
    augmentation = ImageAugmentation(brightness=0.5)
    views = [random_view(augmentation, seed, 400, 400) for seed in range(2000)]
    areas = np.array([view.height * view.width for view in views]) / 400**2
    assert areas.min() < 0.1
    assert areas.max() > 0.9
    assert abs(np.mean([view.mirror for view in views]) - 0.5) < 0.05
    assert abs(np.mean([view.brightness for view in views]) - 1) < 0.02
    assert abs(np.mean([np.log(view.width / view.height) for view in views])) < 0.02
    assert random_view(augmentation, 1, 300, 400) == View(11, 154, 257, 213, True, 1.3487087496857768)


# ---------------------------------------------------------------- Arrow and Parquet


def write(path: Path, columns: dict[str, Any]) -> Path:
    table = pa.table(columns)
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pyarrow.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=3)
    return path


@pytest.mark.parametrize("suffix", [".arrow", ".parquet"])
def test_images_in_arrow_files_are_those_of_the_folder(suffix: str, folder: Path, expected: Any, tmp_path: Path) -> None:
    rows = [ImageFolder(folder)[i] for i in range(20)]
    columns = {"jpeg": [row["image"] for row in rows], "class": [row["label"] for row in rows]}
    path = write(tmp_path / f"images{suffix}", columns)
    dataset = DaliImages(ft.ArrowDataset(path), SIZE, EVERYTHING, image="jpeg", label="class")
    images, labels = dataset.load_batch(np.arange(20), 2, SEED)
    assert torch.equal(images, torch.stack(expected[2]))
    assert labels.tolist() == columns["class"]


def test_arrow_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    columns = {"image": [b"hello"], "label": [1], "path": ["x.jpg"], "weight": [0.5]}
    rows = ft.ArrowDataset(write(tmp_path / "images.arrow", columns))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"label": "class"}, r"\['image', 'label', 'path', 'weight'\], but a dict with 'image' and 'class'"),
        ({"image": "path"}, "'path' of sample 0 of the ArrowDataset is a str"),
        ({"label": "weight"}, "'weight' of sample 0 of the ArrowDataset is tensor"),
    ]
    for names, words in cases:
        with pytest.raises(ConfigError, match=words):
            DaliImages(rows, SIZE, **names)
    with pytest.raises(StorageError, match="sample 0 of the ArrowDataset"):
        DaliImages(rows, SIZE).load_batch(np.arange(1), 0, 0)


class Rows:
    """Samples of one's own, of which some are not what they should be."""

    path = "where they come from"

    def __init__(self, good: dict[str, Any], bad: Any, at: int = 2) -> None:
        self.rows = [bad if i == at else good for i in range(4)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"image": None}, "'image' of sample 2 of the Rows is a NoneType"),
        ({"image": "x.jpg"}, "'image' of sample 2 of the Rows is a str"),
        ({"label": 1.7}, r"'label' of sample 2 of the Rows is 1\.7"),
        ({"image": ...}, r"sample 2 of the Rows has \['label'\], but a dict with 'image'"),
        (None, "sample 2 of the Rows has NoneType"),
        ({"image": b"hello"}, r"sample 2 of the Rows \(5 bytes\) cannot be decoded"),
    ],
)
def test_a_sample_that_cannot_be_used_is_named(bad: Any, words: str, folder: Path) -> None:
    good = ImageFolder(folder)[0]
    row = bad and {name: value for name, value in (good | bad).items() if value is not ...}
    dataset = DaliImages(Rows(good, row), SIZE)
    with pytest.raises(StorageError, match=words):
        dataset.load_batch(np.arange(4), 0, 0)
    if "label" not in (bad or ()):
        (found,) = dataset.damaged()
        assert re.search(words, found)
    assert dataset.load_batch(np.array([0, 3]), 0, 0)[1].tolist() == [0, 0]


# ---------------------------------------------------------------- what cannot be used


@pytest.mark.parametrize("damage", [b"", b"hello", "short", "headless"])
def test_a_damaged_image_is_named_and_the_others_still_load(damage: Any, folder: Path, expected: Any, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    for i in range(4):
        content = ImageFolder(folder)[i]["image"]
        if i == 2:
            content = {"short": content[: len(content) // 2], "headless": content[100:]}.get(damage, damage)
        (tmp_path / "x" / f"{i}.jpg").write_bytes(content)
    dataset = DaliImages(tmp_path, SIZE, EVERYTHING)
    for _ in range(2):
        with pytest.raises(StorageError, match=r"x/2\.jpg \(\d+ bytes\) cannot be decoded as an image"):
            dataset.load_batch(np.array([0, 3, 2, 1]), 0, SEED)
    images, _ = dataset.load_batch(np.array([3, 0, 1]), 0, SEED)
    assert torch.equal(images, torch.stack([expected[0][i] for i in (3, 0, 1)]))
    loader = Loader(dataset, Sampling(4, 4, 0))
    loader.start(Position(), 0, 1)
    with pytest.raises(StorageError, match=r"2\.jpg"):
        loader.next()
    loader.stop()


def test_damage_is_found_wherever_in_an_image_it_is(folder: Path, tmp_path: Path) -> None:
    """Of a portrait, the square in the middle does not reach what is missing at its end."""
    (tmp_path / "x").mkdir()
    whole = Image.open(io.BytesIO(ImageFolder(folder)[0]["image"])).resize((100, 400))
    for number in range(3):
        whole.save(tmp_path / "x" / f"{number}.jpg", quality=95)
    cut = tmp_path / "x" / "1.jpg"
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size * 9 // 10])
    dataset = DaliImages(tmp_path, SIZE, device="cpu")
    dataset.load_batch(np.arange(3), 0, 0)
    (found,) = dataset.damaged()
    assert "1.jpg" in found
    assert "cannot be decoded" in found


def test_a_link_that_leads_nowhere_is_refused(tmp_path: Path) -> None:
    """Without the class, labels of the next ones would be other numbers."""
    for name in ("a", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.jpg").write_bytes(b"x")
    for link in (tmp_path / "b", tmp_path / "a" / "1.jpg"):
        link.symlink_to(tmp_path / "away" / link.name)
        with pytest.raises(ConfigError, match=f"{link} is a link to .*away/{link.name}, which is not there"):
            ImageFolder(tmp_path)
        link.unlink()
    assert ImageFolder(tmp_path).classes == ["a", "c"]
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "1.parquet").symlink_to(tmp_path / "away.parquet")
    with pytest.raises(ConfigError, match=r"1\.parquet is a link to .*away\.parquet, which is not there"):
        ArrowDataset(tmp_path / "rows")


def test_folders_that_cannot_be_used_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere cannot be read.*Every node"):
        DaliImages(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="has no class"):
        DaliImages(tmp_path)
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "notes.txt").write_text("not an image")
    with pytest.raises(ConfigError, match=r"x has no image: files ending in \.jpg"):
        DaliImages(tmp_path)
    image = tmp_path / "x" / "0.png"
    photo(0).save(image)
    dataset = DaliImages(tmp_path, SIZE)
    image.unlink()
    with pytest.raises(StorageError, match=r"0\.png cannot be read.*put it back"):
        dataset.load_batch(np.arange(1), 0, 0)
    with pytest.raises(ConfigError, match="has 20 samples, but the run was planned for 19"):
        Loader(DaliImages(folder, SIZE), sampling(19))


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_storage_that_fails_once_does_not_end_a_run(
    number: int, folder: Path, dataset: DaliImages, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = 1

    def failing(real: Any) -> Any:
        def call(path: Any) -> Any:
            nonlocal failures
            failures -= 1
            if failures >= 0:
                raise OSError(number, os.strerror(number), str(path))
            return real(path)

        return call

    monkeypatch.setattr("raytrain_ft.training.images._PAUSE_S", 0.01)
    monkeypatch.setattr(Path, "read_bytes", failing(Path.read_bytes))
    assert torch.equal(dataset.load_batch(np.array([3]), 0, SEED)[0][0], expected[0][3])
    failures = 2
    with pytest.raises(UnreachableError, match=r"12\.jpeg could not be read at two attempts: .*Look at its storage"):
        dataset.load_batch(np.array([6]), 0, SEED)
    failures = 1
    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", failing(os.scandir))
        with pytest.raises(UnreachableError, match="cannot be read now"):
            ImageFolder(folder)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ImageAugmentation(scale=(0.0, 1.0)), "scale"),
        (lambda: ImageAugmentation(ratio=(2.0, 1.0)), "ratio"),
        (lambda: ImageAugmentation(flip=1.5), r"flip=1\.5"),
        (lambda: ImageAugmentation(contrast=float("nan")), "contrast=nan"),
        (lambda: DaliImages("x", 0), "size=0"),
        (lambda: DaliImages("x", 8, device="tpu"), "tpu"),  # type: ignore[arg-type]
        (lambda: DaliImages("x", 8, std=(1, 1, 0)), "std"),
        (lambda: DaliImages(iter([])), "not map-style"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_augment_of_the_task_is_refused_beside_it(dataset: DaliImages) -> None:
    with pytest.raises(ConfigError, match="DaliImages augments and collates by itself"):
        Loader(dataset, sampling(), augment=lambda sample, generator: sample)
    with pytest.raises(ConfigError, match="DaliImages augments and collates by itself"):
        Loader(dataset, sampling(), collate=list)


def test_where_dali_is_missing_it_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        if name.startswith("nvidia"):
            raise ModuleNotFoundError("No module named 'nvidia.dali'")
        return importlib.import_module(name)

    monkeypatch.setattr(dali, "import_module", missing)
    dali._import.cache_clear()
    dataset = DaliImages(folder, SIZE)
    with pytest.raises(ConfigError, match=r"No module named 'nvidia.dali'.*pip install nvidia-dali"):
        dataset.load_batch(np.arange(1), 0, 0)


def test_a_failure_that_is_no_images_fault(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = dali._Pipelines.pixels

    def fail_on_batches(self: Any, encoded: Any, views: Any) -> Any:
        if len(encoded) > 1:
            raise RuntimeError("Error in operator, encountered:\n\nout of memory\nand more")
        return pixels(self, encoded, views)

    monkeypatch.setattr(dali._Pipelines, "pixels", fail_on_batches)
    with pytest.raises(TaskError, match=r"not on any of its images alone: out of memory$"):
        DaliImages(folder, SIZE).load_batch(np.arange(3), 0, 0)


@pytest.mark.parametrize("interrupted", ["peek", "decode"])
@pytest.mark.parametrize("method", ["schedule_run", "outputs"])
def test_what_an_interrupted_call_was_fed_does_not_come_out_of_the_next(
    interrupted: str, method: str, folder: Path, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between what DALI is fed and what it gives back, as Ctrl-C may come."""
    dataset = DaliImages(folder, SIZE, EVERYTHING)
    dataset.load_batch(np.array([0]), 0, SEED)
    pipeline = getattr(dataset._pipelines, interrupted)

    def interrupt(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(pipeline, method, interrupt)
        with pytest.raises(KeyboardInterrupt):
            dataset.load_batch(np.array([1]), 0, SEED)
    for i in (2, 3, 4):
        assert torch.equal(dataset.load_batch(np.array([i]), 0, SEED)[0][0], expected[0][i])


def test_lack_of_memory_is_not_told_as_a_damaged_image(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, most = weakref.WeakSet[Any](), [0]
    build = dali._build

    def counted(*args: Any) -> Any:
        built = build(*args)
        held.add(built.decode)
        most[0] = max(most[0], len(held))
        return built

    def fail(*_: Any) -> Any:
        raise RuntimeError("Error in operator, encountered:\n\nCUDA runtime API error cudaErrorMemoryAllocation (2):\nmore")

    monkeypatch.setattr(dali, "_build", counted)
    monkeypatch.setattr(dali._Pipelines, "pixels", fail)
    with pytest.raises(TaskError, match=r"cannot work on .*00\.jpg \(\d+ bytes\).*cudaErrorMemoryAllocation.*device='cpu'"):
        DaliImages(folder, SIZE).load_batch(np.arange(3), 0, 0)
    assert most == [1], "what has failed holds no memory while it is tried again"
    assert ["cannot work on" in words for words in DaliImages(folder, SIZE).damaged()] == [True] * 20, "and all are looked at"


# ---------------------------------------------------------------- in a task


def test_the_check_before_a_run(dataset: DaliImages) -> None:
    check_deterministic(dataset, sampling())

    class Random(DaliImages):
        def load_batch(self, ids: np.ndarray, epoch: int, seed: int) -> list[Tensor]:
            return [torch.rand(len(ids))]

    with pytest.raises(ConfigError, match=r"dataset\.load_batch draws from"):
        check_deterministic(Random(dataset.rows), sampling())


def test_sending_it_to_a_worker_is_cheap(dataset: DaliImages, expected: Any) -> None:
    dataset.load_batch(np.arange(2), 0, SEED)  # there is a pipeline now
    sent = cloudpickle.dumps(dataset)  # type: ignore[attr-defined]
    assert len(sent) < 2000
    received = cloudpickle.loads(sent)
    assert len(received) == 20
    assert torch.equal(received.load_batch(np.array([7]), 1, SEED)[0][0], expected[1][7])


# ---------------------------------------------------------------- in any loop


def looped(dataset: DaliImages, epoch: int = 0, consumed: int = 0) -> checkfreq.Loader:
    """As a new launch has it."""
    loader = checkfreq.Loader(dataset, global_batch_size=BATCH, seed=SEED)
    loader.load_state_dict({"epoch": epoch, "consumed": consumed})
    return loader


def pixels(expected: list[list[Tensor]], epoch: int, start: int, stop: int) -> Tensor:
    """What the samples at these positions of an epoch look like."""
    return torch.stack([expected[epoch][i] for i in order(sampling(), epoch)[start:stop].tolist()])


@settings(max_examples=15)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_a_loop_goes_on_with_the_same_pixels_at_any_step(dataset: Any, expected: Any, launches: list[int]) -> None:
    state = {"epoch": 0, "consumed": 0}
    for count in launches:
        loader = looped(dataset, **state)
        while count and loader.position.epoch < 3:
            for images, labels in loader:
                epoch, start = state["epoch"], state["consumed"]
                assert torch.equal(images, pixels(expected, epoch, start, start + BATCH))
                assert len(labels) == len(images)
                state, count = loader.state_dict(), count - 1
                if not count:
                    break


RANK = """
import sys
import torch, torch.distributed as dist
from raytrain_ft import DaliImages, ImageAugmentation, checkfreq
from raytrain_ft.errors import ConfigError
rank, directory, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=2)
dataset = DaliImages(folder, %d, %s)
loader = checkfreq.Loader(dataset, global_batch_size=%d, seed=%d)
loader.load_state_dict({"epoch": 0, "consumed": 6})
batches = iter(loader)
found = torch.stack([next(batches)[0] for _ in range(2)])
torch.save({"images": found, "state": loader.state_dict()}, f"{directory}/{rank}.pt")
try:
    next(iter(checkfreq.Loader(dataset, global_batch_size=1)))
except ConfigError as error:
    print(error)
dist.destroy_process_group()
"""


def test_a_loop_in_another_world_sees_the_same_pixels(dataset: DaliImages, expected: Any, folder: Path, tmp_path: Path) -> None:
    first = looped(dataset)
    assert torch.equal(next(iter(first))[0], pixels(expected, 0, 0, 6))
    assert first.state_dict() == {"epoch": 0, "consumed": 6}

    command = [sys.executable, "-c", RANK % (SIZE, EVERYTHING, BATCH, SEED)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path), str(folder)],
            env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all("each batch has 1 samples for 2 ranks" in words for words in said)
    there = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    for step, start in enumerate((6, 12)):
        seen = torch.cat([there[rank]["images"][step] for rank in range(2)])
        assert torch.equal(seen, pixels(expected, 0, start, start + 6))

    assert there[0]["state"] == there[1]["state"] == {"epoch": 0, "consumed": 18}
    (last,) = looped(dataset, **there[0]["state"])
    assert torch.equal(last[0], pixels(expected, 0, 18, 20))


def test_a_loop_that_is_interrupted_has_the_bits_of_one_that_is_not(dataset: DaliImages, tmp_path: Path) -> None:
    def launch(directory: Path, interrupted_at: int | None = None) -> list[Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout(0.1), torch.nn.Linear(3 * SIZE * SIZE, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        loader = checkfreq.Loader(dataset, global_batch_size=BATCH, seed=SEED)
        with checkfreq.open(directory, every=2, model=model, optimizer=optimizer, loader=loader) as run:
            for images, labels in run.batches(loader, until_step=10):
                if run.step == interrupted_at:
                    raise KeyboardInterrupt
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(images), labels).backward()
                optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    undisturbed = launch(tmp_path / "undisturbed")
    with pytest.raises(KeyboardInterrupt):
        launch(tmp_path / "run", interrupted_at=7)
    for ours, theirs in zip(launch(tmp_path / "run"), undisturbed, strict=True):
        assert torch.equal(ours, theirs)


def test_options_of_torchs_loader_are_refused_beside_it(dataset: DaliImages) -> None:
    with pytest.raises(ConfigError, match=r"DaliImages, num_workers=\.\.\., pin_memory=\.\.\.\).*leave them out"):
        checkfreq.Loader(dataset, global_batch_size=BATCH, num_workers=2, pin_memory=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: the decoder on the GPU")
def test_on_a_gpu_batches_do_not_matter_either(folder: Path, expected: Any) -> None:
    dataset = DaliImages(folder, SIZE, EVERYTHING, device="gpu")
    images, _ = dataset.load_batch(np.arange(20), 0, SEED)
    assert images.device.type == "cpu"
    for i in range(20):
        assert torch.equal(images[i], dataset.load_batch(np.array([i]), 0, SEED)[0][0])
    assert (images - torch.stack(expected[0])).abs().mean() < 0.05
