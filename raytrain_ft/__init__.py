"""Fault-tolerant, elastic PyTorch training on Ray.

Names are imported when they are first used, so that `raytrain_ft.training` and `raytrain_ft.storage` work without Ray.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_EXPORTS = {
    "ArrowDataset": "raytrain_ft.training.arrow_dataset",
    "Callback": "raytrain_ft.callbacks",
    "CheckpointConfig": "raytrain_ft.ray_config",
    "DaliImages": "raytrain_ft.training.dali",
    "FailAt": "raytrain_ft.chaos.faults",
    "FailureConfig": "raytrain_ft.ray_config",
    "ImageAugmentation": "raytrain_ft.training.images",
    "LAMB": "raytrain_ft.training.lamb",
    "LogConfig": "raytrain_ft.config",
    "MLflow": "raytrain_ft.trackers",
    "ParallelismConfig": "raytrain_ft.config",
    "RecoveryConfig": "raytrain_ft.config",
    "Result": "raytrain_ft.result",
    "RunConfig": "raytrain_ft.ray_config",
    "ScalingConfig": "raytrain_ft.ray_config",
    "TensorBoard": "raytrain_ft.trackers",
    "TrainTask": "raytrain_ft.task",
    "Trainer": "raytrain_ft.trainer",
    "WandB": "raytrain_ft.trackers",
    "Undo": "raytrain_ft.training.undo",
    "attach": "raytrain_ft.attaching",
    "leave": "raytrain_ft.steer",
    "load_model": "raytrain_ft.result",
    "resume": "raytrain_ft.steer",
    "stop": "raytrain_ft.attaching",
    "suspend": "raytrain_ft.steer",
    "undo": "raytrain_ft.undo",
}

__all__ = sorted(_EXPORTS)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'raytrain_ft' has no attribute {name!r}")
    module = import_module(_EXPORTS[name])
    return module if name == "undo" else getattr(module, name)


def __dir__() -> list[str]:
    return __all__
