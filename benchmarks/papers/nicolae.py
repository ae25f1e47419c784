"""Nicolae et al. by arithmetic: Table I, the replay of Figure 2c, and what the headlines come to."""

from __future__ import annotations

from benchmarks.papers.rows import OutOfReach, Row, claim, number
from raytrain_ft.simulate.presets import NICOLAE, NT3, TINY_RESNET50, NicolaeModel

MIB = 2**20
FP32 = 4
KERAS_RESNET50 = 25_636_712
"""Parameters and buffers of Keras's ResNet-50 with 1000 classes."""
WHERE = "Nicolae et al."


def nt3_parameters() -> int:
    """Two convolutions, pooling by 10, three dense layers (the CANDLE benchmark's own model file)."""
    features = (60_483 - 20 + 1 - 10 + 1) // 10 * 128
    convolutions = (20 * 1 * 128 + 128) + (10 * 128 * 128 + 128)
    return convolutions + (features * 200 + 200) + (200 * 20 + 20) + (20 * 2 + 2)


def tiny_resnet50_parameters() -> int:
    """With the 200 classes of TinyImageNet."""
    return KERAS_RESNET50 - 800 * (2048 + 1)


def replayed(model: NicolaeModel, mini_batch: int) -> int:
    """Mini-batches from the last epoch's end, where the last checkpoint was taken, up to this one (section IV-E)."""
    return mini_batch % model.whole_batches


def table_1() -> list[Row]:
    """Sizes and mini-batches of an epoch."""
    table = f"{WHERE}, Table I"
    swapped = "the printed rows of size and layers are swapped between the two models, as the text of section IV-B shows"
    return [
        number(table, "size of NT3, MiB", NT3.size, nt3_parameters() * FP32 / MIB, "arithmetic", note=swapped),
        number(table, "size of ResNet-50, MiB", TINY_RESNET50.size, tiny_resnet50_parameters() * FP32 / MIB, "arithmetic"),
        number(
            f"{table}, columns swapped",
            "size of NT3, MiB",
            TINY_RESNET50.size,
            nt3_parameters() * FP32 / MIB,
            "arithmetic",
            within=0.02,
        ),
        number(
            f"{table}, columns swapped",
            "size of ResNet-50, MiB",
            NT3.size,
            tiny_resnet50_parameters() * FP32 / MIB,
            "arithmetic",
            within=0.01,
        ),
        *(
            number(
                table,
                f"mini-batches of an epoch of {model.name}",
                str(model.per_epoch),
                model.whole_batches,
                "arithmetic",
                note=note,
            )
            for model, note in (
                (TINY_RESNET50, "100,000 samples over 8 workers"),
                (NT3, "1120 samples / 20, so not shared out over the workers; 55 would put mini-batch 500 into epoch 9"),
            )
        ),
    ]


def figure_2c() -> list[Row]:
    """Epoch of each scenario, as printed, and its replay, of which the paper has bars only."""
    rows = []
    for model in NICOLAE:
        for scenario in model.scenarios:
            what = f"{model.name}, mini-batch {scenario.mini_batch}"
            epoch = scenario.mini_batch // model.whole_batches
            lost = replayed(model, scenario.mini_batch)
            epoch_s = model.whole_batches * model.step_s
            note = f"Figure 2c: {lost} mini-batches are replayed, {lost * model.step_s:.1f} s of an epoch of {epoch_s:.1f} s"
            rows.append(number(f"{WHERE}, section IV-D", f"{what}: epoch", str(scenario.epoch), epoch, "arithmetic", note=note))
    return rows


def mean_replay(model: NicolaeModel) -> float:
    """Share of an epoch, over failures at every mini-batch."""
    count = model.whole_batches
    return sum(replayed(model, mini_batch) for mini_batch in range(count)) / count / count


def headlines() -> list[Row]:
    """Half an epoch, 400 times, two orders of magnitude, nearly twice."""
    rows = [
        number(
            f"{WHERE}, section IV-E",
            f"{model.name}: mean replay, of an epoch",
            "0.5",
            mean_replay(model),
            "arithmetic",
            within=0.02,
        )
        for model in NICOLAE
    ]
    most = max(model.whole_batches for model in NICOLAE)
    rows.append(
        number(
            f"{WHERE}, section V",
            "replay of checkpoint-restart over one of a mini-batch, at most",
            "400",
            most,
            "arithmetic",
            within=0.03,
            note="a whole epoch of ResNet-50 over one mini-batch",
        )
    )
    for model in NICOLAE:
        times = [replayed(model, scenario.mini_batch) for scenario in model.scenarios]
        fixed = model.init_s + model.restart_s
        whole = [(fixed + lost * model.step_s) / (fixed + model.step_s) for lost in times]
        rows.append(
            claim(
                f"{WHERE}, section IV-F",
                f"{model.name}: rollback costs two orders of magnitude less than checkpoint-restart",
                ">= 100",
                " ".join(str(lost) for lost in times),
                "arithmetic",
                holds=min(times) >= 100,
                note="mini-batches replayed, per scenario, over the one of rollback; with the overheads of Table I, which both "
                f"have: {' '.join(f'{ratio:.1f}' for ratio in whole)}",
            )
        )
    fast, slow = (1 + (1 + 2 * share) / 3 for share in (0.25, 0.75))
    rows.append(
        claim(
            f"{WHERE}, Figures 3b and 4b",
            "rollback takes nearly, but less than, two mini-batches",
            "< 2",
            f"{fast:.2f} to {slow:.2f}",
            "closed form",
            holds=slow < 2,
            note="for failures at 25 to 75 % of a backward pass that is twice as long as the forward pass; in the paper's runs "
            "the failed mini-batch goes on to its end",
        )
    )
    return rows


OUT_OF_REACH = (
    OutOfReach(
        where=f"{WHERE}, Figures 2a and 2b",
        what="accuracy and loss over the epochs",
        why="TinyImageNet for 90 epochs on 8 A100s; NT3's data is not to be had here",
    ),
    OutOfReach(
        where=f"{WHERE}, Figures 3a and 4a",
        what="accuracy after the failed mini-batch (gaps of 2.6 to 8.5 %, rollback off by up to 5.5 %)",
        why="the same; raytrain-ft study measures the trends on small models",
    ),
    OutOfReach(
        where=f"{WHERE}, Figures 3b and 4b",
        what="times of the mini-batches",
        why="wall clock of A100s, and the figures' numbers are not in the text; the closed form (rollback) and the simulation "
        "(lossy) above have their direction",
    ),
    OutOfReach(
        where=f"{WHERE}, Table I",
        what="times of mini-batches, initialisation, checkpoints and restarts",
        why="measured on A100s: inputs of the arithmetic above",
    ),
)


def rows() -> list[Row]:
    """All of them."""
    return [*table_1(), *figure_2c(), *headlines()]
