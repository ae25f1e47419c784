"""SWIFT by arithmetic: sizes, logs, bubbles, epochs, recoveries at the physical limits."""

from __future__ import annotations

from benchmarks.papers.rows import OutOfReach, Row, claim, number
from raytrain_ft.policy.logging_cost import bubble_share, transformer_log_bytes
from raytrain_ft.simulate.presets import (
    BERT,
    CHECKFREQ_HOURS,
    HOROVOD_HOURS,
    IMAGENET,
    NETWORK,
    SNAPSHOT_EVERY,
    STAGES_PER_MACHINE,
    SWIFT,
    SWIFT_MTBF,
    VIT,
    WIDE_RESNET,
    SwiftModel,
)

MACHINES = VIT.nodes
STAGES = VIT.gpus
FP32 = 4
LOGGING_GPUS = 2 * MACHINES
"""Table 3 divides by the devices that have a neighbour on another machine, counting two for each machine."""
HOURS_SAVED = ((WIDE_RESNET, "77"), (BERT, "48"))
"""By SWIFT, as section 7.3 prints them."""
ITSELF = "the paper against itself: its printed times"
TABLE_3 = [(VIT, 16, "24.66", "0.23"), (VIT, 8, "11.51", "0.11"), (BERT, 16, "8.05", "0.075"), (BERT, 8, "3.76", "0.035")]


def wide_resnet_parameters(base: int) -> int:
    """Of a ResNet-50 whose 3 x 3 convolutions are base / 64 times as wide (Wide-ResNet-50-2: base = 128), 1000 classes."""
    total, before = 7 * 7 * 3 * 64 + 2 * 64, 64
    for planes, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        width = planes * base // 64
        for block in range(blocks):
            shortcut = before * 4 * planes + 8 * planes if block == 0 else 0
            total += before * width + 9 * width * width + 4 * width * planes + 4 * width + 8 * planes + shortcut
            before = 4 * planes
    return total + before * 1000 + 1000


def transformer_parameters(layers: int, hidden: int, embeddings: int, head: int = 0) -> int:
    """Of encoder layers with an inner width of 4 hidden, their biases and norms; `embeddings`: rows of width hidden."""
    return layers * (12 * hidden * hidden + 13 * hidden) + embeddings * hidden + head


def sizes() -> list[Row]:
    """Table 2 and what follows from it."""
    wide = wide_resnet_parameters(2 * 320)
    vit = transformer_parameters(128, VIT.hidden, 32 * 32 * 3 + 1 + 50, VIT.hidden * 1000 + 1000)
    bert = transformer_parameters(128, BERT.hidden, 30_522 + 512 + 2, BERT.hidden * BERT.hidden + BERT.hidden)
    table = "SWIFT, Table 2"
    return [
        number(
            table,
            "parameters of Wide-ResNet-50, 1e9",
            WIDE_RESNET.parameters,
            wide / 1e9,
            "arithmetic",
            note="the 3 x 3 convolutions five times as wide as in Wide-ResNet-50-2, all else as it was",
        ),
        number(table, "parameters of ViT-128/32, 1e9", VIT.parameters, vit / 1e9, "arithmetic", within=0.02),
        number(
            table,
            "parameters of BERT-128, 1e9",
            BERT.parameters,
            bert / 1e9,
            "arithmetic",
            note="128 layers of BERT-Large's width have 1.61e9 without the embeddings; the printed number fits no such model",
        ),
        number(
            "SWIFT, section 2.2",
            "state of Wide-ResNet-50, GB",
            "9.8",
            8 * wide / 1e9,
            "arithmetic",
            note=f"parameters and one momentum, fp32: SGD; Adam, which the text names, has {12 * wide / 1e9:.1f} GB",
        ),
    ]


def pipelines() -> list[Row]:
    """Bubbles and Table 3."""
    rows = [
        number("SWIFT, section 2.1", "bubbles of Figure 1a, sevenths", "3", 7 * bubble_share(4, 4), "policy"),
    ]
    for model in (VIT, BERT):
        count, size = bubble_share(STAGES, model.micro_batch), bubble_share(STAGES, model.micro_batches)
        rows.append(
            claim(
                "SWIFT, section 7",
                f"{model.name}: {model.micro_batch} is the number of micro-batches",
                str(model.micro_batch),
                f"{model.micro_batches}",
                "policy",
                holds=False,
                note=f"as a number it leaves {count:.0%} of a step idle; as a size, as in the published scripts, {size:.0%}",
            )
        )
    for model, groups, total, rate in TABLE_3:
        logged = transformer_log_bytes(model.batch, model.tokens, model.hidden, FP32, groups - 1)
        what = f"{model.name}, {groups} groups"
        rows.append(number("SWIFT, Table 3", f"{what}: log per step, GB", total, logged / 1e9, "policy"))
        per_device, own = (size / model.step_s / LOGGING_GPUS for size in (logged / 1e9, float(total)))
        note = ""
        if f"{own:.{len(rate.partition('.')[2])}f}" != rate:
            shares = f"its time of a step and {LOGGING_GPUS} devices"
            note = f"not consistent in the paper: its {total} GB, over {shares}, are {own:.4f}"
        rows.append(number("SWIFT, Table 3", f"{what}: of a device, GB/s", rate, per_device, "policy", note=note))
    return rows


def workloads() -> list[Row]:
    """Table 4, and the number of failures and ratios of Table 5."""
    rows = []
    for model in (WIDE_RESNET, VIT):
        steps = IMAGENET // model.batch
        rows.append(number("SWIFT, Table 4", f"{model.name}: steps of an epoch", str(model.interval), steps, "arithmetic"))
    rows.append(number("SWIFT, Table 4", "BERT-128: 1 % of the steps", str(BERT.interval), BERT.steps / 100, "arithmetic"))
    for model in SWIFT:
        found = round(model.hours * 3600 / SWIFT_MTBF)
        rows.append(number("SWIFT, Table 5", f"{model.name}: failures", str(model.failures), found, "arithmetic"))
        ratio = float(model.global_hours) / float(model.swift_hours)
        if model is not VIT:
            clock = float(model.global_hours) / (SWIFT_MTBF / 3600)
            rows.append(
                number(
                    "SWIFT, Table 5",
                    f"{model.name}: failures in the printed time, one every 17 h",
                    str(model.failures),
                    clock,
                    "arithmetic",
                    note="the count is of the time without failures: work that is done again never fails there",
                )
            )
        note = ITSELF + ("; they give less than the printed speed-up" if f"{ratio:.2f}" != model.speedup else "")
        rows.append(number("SWIFT, Table 5", f"{model.name}: speed-up", model.speedup, ratio, "arithmetic", note=note))
    for model, printed in HOURS_SAVED:
        saved = float(model.global_hours) - float(model.swift_hours)
        rows.append(number("SWIFT, section 7.3", f"{model.name}: hours saved", printed, saved, "arithmetic", note=ITSELF))
    for name, hours, printed in (("CheckFreq", CHECKFREQ_HOURS, "1.08"), ("Elastic Horovod", HOROVOD_HOURS, "1.07")):
        ratio = float(hours) / float(WIDE_RESNET.swift_hours)
        what = f"Wide-ResNet-50: speed-up over {name}"
        rows.append(number("SWIFT, section 7.3", what, printed, ratio, "arithmetic", note=ITSELF))
    return rows


def recoveries() -> list[Row]:
    """Figure 9 and 10 at the physical limits: an ideal network, an ideal replay, no loading."""
    state = 8 * wide_resnet_parameters(2 * 320) / NETWORK
    kept = "a broadcast of the state at 40 Gbit/s against computing anew; neither loading nor starting"
    rows = []
    for name, steps, printed in (("global checkpoints", 50, "98.9"), ("CheckFreq", SNAPSHOT_EVERY, "98.1")):
        saved = 100 * (1 - state / (steps * WIDE_RESNET.step_s))
        rows.append(
            number(
                "SWIFT, Figure 9a",
                f"recovery shorter than with {name}, %",
                printed,
                saved,
                "arithmetic",
                within=0.005,
                note=kept,
            )
        )
    rows.append(
        number("SWIFT, Figure 9a", "recovery shorter than with Elastic Horovod, %", "98.1", saved, "arithmetic", within=0.005)
    )
    for model in (VIT, BERT):
        rows += _replays(model)
    m = VIT.micro_batches
    bound = (m + STAGES - 1) / (m / 16 + STAGES_PER_MACHINE - 1)
    rows.append(
        claim(
            "SWIFT, Figure 10",
            "ViT-128/32: throughput of parallel recovery over that of global checkpoints",
            "12.5 to 15",
            f"<= {bound:.1f}",
            "closed form",
            holds=bound >= 15,
            note="turns of a step over turns of a replay by 16; the rest is moving files",
        )
    )
    return rows


def _replays(model: SwiftModel) -> list[Row]:
    m = model.micro_batches
    serial = 1 - (m + STAGES_PER_MACHINE - 1) / (m + STAGES - 1)
    helped = 1 - (m / 16 + STAGES_PER_MACHINE - 1) / (m + STAGES - 1)
    figure = "SWIFT, Figure 9b" if model is VIT else "SWIFT, Figure 9c"
    first, second = (f"{100 * share:.1f}" for share in model.saved)
    return [
        number(
            figure,
            f"{model.name}: recovery shorter with logging, %",
            first,
            100 * serial,
            "closed form",
            shape=True,
            note="replay without bubbles alone; the printed ones also save that everybody loads a checkpoint",
        ),
        number(
            figure,
            f"{model.name}: the same with 16 helpers, %",
            second,
            100 * helped,
            "closed form",
            shape=True,
            note="the limit without moving files, on which the measured one spends most of its time",
        ),
    ]


OUT_OF_REACH = (
    OutOfReach(
        where="SWIFT, Table 1 and Algorithms 1 to 8",
        what="which updates can be undone, and how",
        why="no numbers: undo.md has them, with the paper's errors, and tests for every optimizer",
    ),
    OutOfReach(
        where="SWIFT, Figure 2",
        what="which GPUs log in a plan of three kinds of parallelism",
        why="operator parallelism is not there",
    ),
    OutOfReach(
        where="SWIFT, Figure 3",
        what="times of iterations around snapshots",
        why="wall clock of V100s; the figure has no numbers. benchmarks.checkfreq measures the same shapes on this project",
    ),
    OutOfReach(
        where="SWIFT, Figure 9 (top)",
        what="throughput without failures",
        why="wall clock of 16 DGX-2; benchmarks.step_overhead and benchmarks.pipeline measure ours",
    ),
    OutOfReach(
        where="SWIFT, Figure 11",
        what="seconds of recovery over bytes of log",
        why="wall clock, and the groupings of Tables 6 and 7, which do not follow from the published formulas (see above)",
    ),
    OutOfReach(
        where="SWIFT, Figure 12",
        what="accuracy of ResNet-50, ViT-Base and BERT-Base",
        why="ImageNet and Wikipedia on 16 GPUs; the tests of this project compare bits instead, which says more",
    ),
    OutOfReach(
        where="SWIFT, section 2.2",
        what="a snapshot every 30 iterations",
        why="the times of copying and writing that the choice came from are not printed",
    ),
)


def rows() -> list[Row]:
    """All of them."""
    return [*sizes(), *pipelines(), *workloads(), *recoveries()]
