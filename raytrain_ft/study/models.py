"""The two models of the study, small enough for a laptop: many small layers, and few layers of which one is huge.

Both learn from scikit-learn's handwritten digits: 1,797 real scans of 8 x 8 pixels, which come with the package.

* `resnet`: a residual network on the images, ten classes; in the place of the paper's ResNet-50 on TinyImageNet.
* `nt3`: CANDLE NT3's layers (ECP-CANDLE, Pilot1/NT3: two 1-D convolutions, three dense layers, two classes), smaller. Its gene
  sequences have to be downloaded, so a signal here is a scan, pixel row after pixel row (64 values), and the question is
  whether the digit is odd. The first dense layer holds 96 % of the parameters (NT3's: 99.9 %).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raytrain_ft.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Data:
    """Samples float32 [n, 1, ...] and labels int64 [n]; a quarter of all was held out and is the same for every seed."""

    inputs: Tensor
    labels: Tensor
    held_out_inputs: Tensor
    held_out_labels: Tensor


class Residual(nn.Module):
    """Two convolutions with BatchNorm and a shortcut around them: [n, channels, h, w] -> the same shape."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(*_convolution(channels, channels), nn.ReLU(), *_convolution(channels, channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.inner(x))


def _convolution(inputs: int, outputs: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(outputs)


def resnet() -> nn.Module:
    """[n, 1, 8, 8] -> [n, 10] logits. 29 layers with parameters, none of which holds more than an eighth of them."""
    return nn.Sequential(
        *(*_convolution(1, 12), nn.ReLU(), *(Residual(12) for _ in range(3))),
        *(*_convolution(12, 24, stride=2), nn.ReLU(), *(Residual(24) for _ in range(3))),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10)),
    )


def nt3() -> nn.Module:
    """[n, 1, 64] -> [n, 2] logits. Five layers with parameters; the third holds 96 % of them."""
    return nn.Sequential(
        *(nn.Conv1d(1, 32, 5), nn.ReLU(), nn.Conv1d(32, 32, 3), nn.ReLU(), nn.MaxPool1d(2), nn.Flatten()),
        *(nn.Linear(32 * 29, 200), nn.ReLU(), nn.Dropout(0.1), nn.Linear(200, 20), nn.ReLU(), nn.Dropout(0.1)),
        nn.Linear(20, 2),
    )


MODELS = {"resnet": resnet, "nt3": nt3}


@lru_cache(maxsize=len(MODELS))
def data(model: str) -> Data:
    """The samples that a model learns from.

    Raises:
        ConfigError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise ConfigError("the study's images come with scikit-learn: pip install scikit-learn") from error
    pixels, digits = load_digits(return_X_y=True)
    parts = train_test_split(pixels, digits, test_size=0.25, random_state=0, stratify=digits)
    inputs, held_out = (torch.tensor(part, dtype=torch.float32) / 16 for part in parts[:2])
    labels, held_out_labels = (torch.tensor(part, dtype=torch.int64) for part in parts[2:])
    if model == "nt3":
        return Data(inputs[:, None], labels % 2, held_out[:, None], held_out_labels % 2)
    return Data(inputs.reshape(-1, 1, 8, 8), labels, held_out.reshape(-1, 1, 8, 8), held_out_labels)
