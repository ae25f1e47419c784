"""Training on images that DALI decodes: a worker lost while it loads or computes changes no bit of the end."""

from __future__ import annotations

from pathlib import Path

import pytest
import sklearn.datasets
import torch
from conftest import promise_kept, train
from PIL import Image
from torch import nn
from torch.nn.functional import cross_entropy

import raytrain_ft as ft
from raytrain_ft import FailAt
from raytrain_ft.errors import StorageError
from raytrain_ft.policy.audit import audit
from raytrain_ft.runtime.event_log import read_run

pytestmark = [pytest.mark.long, pytest.mark.example]

pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed: it exists for Linux only")

SETTINGS = {"steps": 10, "global_batch_size": 12, "gradient_accumulation_steps": 2}


class Photos(ft.TrainTask):
    """Which of two photographs is this a part of? A small convolutional net with BatchNorm."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def model(self, stage: int) -> nn.Module:
        return nn.Sequential(
            *(nn.Conv2d(3, 16, 3, stride=2, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.1)),
            *(nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 2)),
        )

    def optimizer(self, params):
        return torch.optim.AdamW(params, lr=1e-2)

    def dataset(self):
        augment = ft.ImageAugmentation(scale=(0.3, 1.0), brightness=0.3, contrast=0.3, saturation=0.3)
        return ft.DaliImages(self.folder, size=24, augment=augment)

    def loss(self, output, batch):
        return cross_entropy(output, batch[1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """50 images, so that 10 steps of 12 end in the third epoch, and every fifth step is a short one."""
    root = tmp_path_factory.mktemp("photos")
    for number in range(50):
        photo = Path(sklearn.datasets.__file__).parent / "images" / ["china.jpg", "flower.jpg"][number % 2]
        path = root / photo.stem / f"{number:02d}.{['png', 'jpg'][number % 3 == 0]}"
        path.parent.mkdir(exist_ok=True)
        left, top = 17 * number % 560, 13 * number % 340
        Image.open(photo).crop((left, top, left + 40 + number, top + 80 - number)).save(path)
    return root


def test_workers_lost_while_loading_and_computing(cluster, undisturbed, folder: Path, tmp_path: Path) -> None:
    task = Photos(str(folder))
    expected = undisturbed(task=task, **SETTINGS)
    faults = [FailAt(rank=1, step=3, phase="data"), FailAt(rank=1, step=6, phase="forward")]
    result = train(tmp_path, "images", task=task, faults=faults, **SETTINGS)
    assert result.digest == expected.digest
    assert promise_kept(result) == []
    assert [len(recovery.lost) for recovery in result.recoveries] == [1, 1]


def test_a_run_is_continued(cluster, undisturbed, folder: Path, tmp_path: Path) -> None:
    """It ended in the middle of an epoch; one worker is killed once it goes on."""
    task, checkpoints = Photos(str(folder)), ft.CheckpointConfig(every=2)
    train(tmp_path, "images", task=task, checkpoints=checkpoints, **SETTINGS | {"steps": 6})
    fault = FailAt(rank=1, step=8, phase="data")
    result = train(tmp_path, "images", task=task, faults=[fault], checkpoints=checkpoints, **SETTINGS)
    assert result.digest == undisturbed(task=task, **SETTINGS).digest
    assert audit(read_run(Path(result.path))).ok


class Linear(Photos):
    """Without what depends on how samples are shared out."""

    def model(self, stage: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * 24 * 24, 2))


def test_a_run_is_continued_by_other_numbers_of_workers(cluster, undisturbed, folder: Path, tmp_path: Path) -> None:
    """The pixels are the same: what was cut out, and how colours were changed, is each sample's own affair."""
    task, checkpoints = Linear(str(folder)), ft.CheckpointConfig(every=2)
    train(tmp_path, "images", task=task, checkpoints=checkpoints, **SETTINGS | {"steps": 6})
    result = train(tmp_path, "images", task=task, workers=2, checkpoints=checkpoints, **SETTINGS)
    assert audit(read_run(Path(result.path))).ok
    ours, theirs = (ft.load_model(task, one) for one in (result, undisturbed(task=task, **SETTINGS)))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)  # the same sums in another order


def test_a_damaged_image_ends_the_run_and_is_named(cluster, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "photos" / "x").mkdir(parents=True)
    for number in range(50):
        content = next((folder / "flower").iterdir()).read_bytes()
        (tmp_path / "photos" / "x" / f"{number:02d}.jpg").write_bytes(content if number != 33 else b"not an image")
    with pytest.raises(StorageError, match=r"33\.jpg \(12 bytes\) cannot be decoded"):
        train(tmp_path, "damaged", task=Photos(str(tmp_path / "photos")), **SETTINGS)
