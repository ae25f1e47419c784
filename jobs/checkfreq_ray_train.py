"""CheckFreq in Ray Train's TorchTrainer: its restarts go on at the exact next sample.

    python jobs/checkfreq_ray_train.py
    ray job submit --working-dir . -- python jobs/checkfreq_ray_train.py --path /shared/runs/checkfreq

Worker 1 kills itself once, in the midst of the job. Ray Train starts both workers again, and the loop goes on from the newest
checkpoint. The lines that CheckFreq asks for are marked with "#+". Needs scikit-learn.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

JOBS = str(Path(__file__).resolve().parent)


def train_loop(config: dict[str, Any]) -> None:
    """What every worker runs."""
    import ray.train
    import ray.train.torch
    import torch
    import torch.nn.functional as F

    sys.path.insert(0, config["jobs"])
    from train_digits import accuracy, digits, small_resnet

    import raytrain_ft.checkfreq as checkfreq  # +

    torch.manual_seed(0)
    model = ray.train.torch.prepare_model(small_resnet())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=config["epochs"])
    loader = checkfreq.Loader(digits("train"), global_batch_size=128, seed=0)  # +
    rank = ray.train.get_context().get_world_rank()
    killed = Path(config["path"]) / "killed"

    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    with checkfreq.open(config["path"], every=5, **objects) as run:  # +
        print(f"rank {rank} begins with step {run.step}", flush=True)
        for epoch in loader.epochs(config["epochs"]):  # +
            for images, labels in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images), labels)
                (loss * loader.share).backward()  # +
                optimizer.step()
                if rank == 1 and run.step == 40 and not killed.exists():
                    killed.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            scheduler.step()
            ray.train.report({"epoch": epoch, "step": run.step, "loss": loss.item()})
    checkpoint = run.ray_checkpoint() if rank == 0 else None  # + only if Ray Train is to have one, too
    ray.train.report({"step": run.step, "accuracy": accuracy(model.module)}, checkpoint=checkpoint)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", default=None, help="directory of the run, shared by all nodes; default: a new one")
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()

    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    with tempfile.TemporaryDirectory(prefix="checkfreq-") as directory:
        path = str(Path(args.path or f"{directory}/digits").absolute())
        try:
            ray.init(num_cpus=3, include_dashboard=False)  # a cluster of its own
        except ValueError:  # there is one here, which has as many CPUs as it has
            ray.init()
        result = TorchTrainer(
            train_loop,
            train_loop_config={"path": path, "epochs": args.epochs, "jobs": JOBS},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=2),
            # Ray Train's own directory is beside the run's, for all nodes must see both.
            run_config=RunConfig(name="digits", storage_path=f"{path}-ray", failure_config=FailureConfig(max_failures=2)),
        ).fit()
        print(result.metrics)
        ray.shutdown()


if __name__ == "__main__":
    main()
