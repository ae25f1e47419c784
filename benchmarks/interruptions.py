"""Figure 6 of CheckFreq in small: what interruptions cost in accuracy, with a loader that goes on, and with one that does not.

Digits, interrupted every two epochs, in the midst of one. Both interrupted arms take checkpoints of model and optimizer with
`raytrain_ft.checkfreq`, and go back to the newest: they differ in the loader alone.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness import Options, Report
from raytrain_ft import checkfreq

Arm = Literal["undisturbed", "resumed", "baseline"]
"""Never interrupted; with `checkfreq.Loader`, whose state is in the checkpoint; with torch's DataLoader, which has none."""
ARMS: tuple[Arm, ...] = ("undisturbed", "resumed", "baseline")
EPOCHS, BATCH, TRAINED_ON, EVERY = 8, 64, 1297, 8
PER_EPOCH = -(-TRAINED_ON // BATCH)
INTERRUPTED_AT = [int((epochs + 1.5) * PER_EPOCH) for epochs in range(0, EPOCHS, 2)]


class _LostError(Exception):
    """The job is gone."""


def measure_accuracy(report: Report, options: Options) -> None:
    """Test accuracy of the three arms, and whether the resumed runs ended with the bits of the undisturbed ones."""
    from sklearn.datasets import load_digits

    data = load_digits()
    inputs, labels = torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)
    train = TensorDataset(inputs[:TRAINED_ON], labels[:TRAINED_ON])
    seeds = range(1 if options.quick else 3)
    models = {arm: [_trained(train, arm, seed) for seed in seeds] for arm in ARMS}
    shown = []
    for arm, trained in models.items():
        right = [model(inputs[TRAINED_ON:]).argmax(1) == labels[TRAINED_ON:] for model in trained]
        shown.append(f"{arm} {', '.join(f'{float(found.float().mean()):.1%}' for found in right)}")
    pairs = zip(models["undisturbed"], models["resumed"], strict=True)
    same = sum(all(map(torch.equal, ours.parameters(), theirs.parameters())) for ours, theirs in pairs)
    about = f"digits, {EPOCHS} epochs, interrupted {len(INTERRUPTED_AT)} times, {len(seeds)} seeds, test accuracy"
    bits = f"resumed runs with the bits of the undisturbed ones: {same} of {len(seeds)}"
    report.note(f"Figure 6 in small ({about}): {'; '.join(shown)}; {bits}")


def _trained(train: TensorDataset, arm: Arm, seed: int) -> nn.Module:
    """A model after so many epochs' worth of updates, whatever comes between."""
    with tempfile.TemporaryDirectory(prefix="interruptions-") as directory:
        for step in INTERRUPTED_AT if arm != "undisturbed" else []:
            with suppress(_LostError):
                _launch(train, arm, seed, Path(directory), step)
        return _launch(train, arm, seed, Path(directory), None)


def _launch(train: TensorDataset, arm: Arm, seed: int, directory: Path, interrupted_at: int | None) -> nn.Module:
    """The job, from its beginning or from the newest checkpoint, to its end or until it is interrupted."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    objects: dict[str, Any] = {"model": model, "optimizer": optimizer}
    loader = checkfreq.Loader(train, global_batch_size=BATCH, seed=seed)
    if arm != "baseline":
        objects["loader"] = loader
    with checkfreq.open(directory, every=EVERY, **objects) as run:
        until = EPOCHS * PER_EPOCH
        batches = _anew(train, seed, run, until) if arm == "baseline" else run.batches(loader, until_step=until)
        for inputs, labels in batches:
            if run.step == interrupted_at:
                raise _LostError
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    return model


def _anew(train: TensorDataset, seed: int, run: checkfreq.Run, until: int) -> Iterator[list[Tensor]]:
    """The batches of a loader without a state: each launch begins an epoch, in an order of its own, so that some samples of the
    epoch before are read twice, and others not at all."""
    shuffled = torch.Generator().manual_seed(1_000 * seed + run.step)
    loader = DataLoader(train, batch_size=BATCH, shuffle=True, generator=shuffled)
    while run.step < until:
        for batch in loader:
            run.commit()
            yield batch
            if run.step >= until:
                return
