"""The job that `test_job_submit` submits: the toy task, slowly. Tells what it sees of its working directory."""

from __future__ import annotations

import argparse
import sys
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from conftest import train
from toy import Toy

import raytrain_ft as ft


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--storage-path", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--step-seconds", type=float, required=True)
    parser.add_argument("--driver-timeout", type=float, default=15.0)
    args = parser.parse_args()
    print("working directory:", *sorted(entry.name for entry in Path().iterdir()), flush=True)
    train(
        args.storage_path,
        args.name,
        task=Toy(args.step_seconds),
        workers=2,
        quiet=False,
        driver_timeout=timedelta(seconds=args.driver_timeout),
        checkpoints=ft.CheckpointConfig(every=1000),  # none but the last
    )


if __name__ == "__main__":
    main()
