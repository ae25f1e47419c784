"""CheckFreq in an ordinary PyTorch loop, alone or under torchrun: kill it at any time, start it again, and it goes on.

    python jobs/checkfreq_plain.py
    torchrun --nproc-per-node 2 jobs/checkfreq_plain.py
    ray job submit --working-dir . -- python jobs/checkfreq_plain.py --path /shared/runs/checkfreq

The lines that CheckFreq asks for are marked with "#+". Needs scikit-learn, which brings the images with it.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from train_digits import accuracy, digits, small_resnet

import raytrain_ft.checkfreq as checkfreq  # +


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", default="runs/checkfreq", help="directory of the run")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--overhead", type=float, default=0.035, help="share of the time that checkpoints may cost")
    args = parser.parse_args()

    distributed = "RANK" in os.environ
    if distributed:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: nn.Module = small_resnet()
    if distributed:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    loader = checkfreq.Loader(digits("train"), global_batch_size=128, seed=0)  # + instead of DataLoader

    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    with checkfreq.open(args.path, overhead=args.overhead, **objects) as run:  # +
        print(f"begins with step {run.step}", flush=True)
        for epoch in loader.epochs(args.epochs):  # + instead of range(args.epochs)
            for images, labels in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images), labels)
                (loss * loader.share).backward()  # + an epoch's last batch may not be shared out evenly
                optimizer.step()
            scheduler.step()
            print(f"epoch {epoch}  step {run.step}  loss {loss.item():.4f}", flush=True)

    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    print(f"test accuracy: {accuracy(inner):.2%}")
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
