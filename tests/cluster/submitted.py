"""The job that `test_job_submit` submits: the toy task, slow as long as a file is there. Tells what was uploaded."""

from __future__ import annotations

import argparse
import sys
import time
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from conftest import train
from toy import Toy

import raytrain_ft as ft

SLOW_S = 4.0


class Held(Toy):
    """Every step takes `SLOW_S` while the file `held` exists."""

    def __init__(self, held: Path) -> None:
        super().__init__()
        self.held = held

    def loss(self, output, batch):
        deadline = time.monotonic() + SLOW_S
        while self.held.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        return super().loss(output, batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--storage-path", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--driver-timeout", type=float, default=15.0)
    args = parser.parse_args()
    print("working directory:", *sorted(entry.name for entry in Path().iterdir()), flush=True)
    train(
        args.storage_path,
        args.name,
        task=Held(args.storage_path / "held"),
        workers=2,
        quiet=False,
        driver_timeout=timedelta(seconds=args.driver_timeout),
        checkpoints=ft.CheckpointConfig(every=1000),  # none but the last
    )


if __name__ == "__main__":
    main()
