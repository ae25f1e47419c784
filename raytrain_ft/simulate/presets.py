"""The models of the three papers as numbers: what they printed, each with the table or section that it comes from.

Nothing here is fitted. What a paper does not say (the time to save Wide-ResNet-50, the time to join a replacement) is not here
either: who simulates it has to say what it takes for it. Times are seconds, sizes bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from raytrain_ft.simulate.model import Costs, Job

HOUR = 3600.0
IMAGENET = 1_281_167
"""Training images of ImageNet-1k."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwiftModel:
    """A workload of SWIFT's simulation study (section 7.3).

    Attributes:
        steps, interval: iterations in all, and from one global checkpoint to the next [Table 4].
        hours: without failures [Table 4]. failures: that were injected [Table 5].
        global_hours, swift_hours: with failures, under global checkpoints and under SWIFT [Table 5].
        speedup: the ratio of the two as printed [Table 5].
        batch: samples of a step; parameters: in billions, as printed [Table 2].
        gpus, nodes: [section 7]; a pipeline has a stage on each GPU.
        micro_batch: samples of a micro-batch. The text of section 7 calls it their number; the published scripts pass it as
            a size, and only so the step fits its time.
        saved: share of the time of a recovery by global checkpoints that logging saves with 16 groups, and with helpers
            [section 7.1]; (0, 0) where replicas are used.
        tokens, hidden: of a sample at the boundary of two stages; 49 patches of 32 x 32 pixels for ViT, and the sequence of
            128 tokens for BERT [section 7].
    """

    name: str
    steps: int
    interval: int
    hours: float
    failures: int
    global_hours: str
    swift_hours: str
    speedup: str
    batch: int
    parameters: str
    gpus: int
    nodes: int
    micro_batch: int = 0
    saved: tuple[float, float] = (0.0, 0.0)
    tokens: int = 0
    hidden: int = 0

    @property
    def step_s(self) -> float:
        """Seconds of one step: the time without failures is the time of a step times their number (section 7.3)."""
        return self.hours * HOUR / self.steps

    @property
    def interval_s(self) -> float:
        """Seconds from one global checkpoint to the next."""
        return self.interval * self.step_s

    @property
    def micro_batches(self) -> int:
        """Of a step; 0 if there is no pipeline."""
        return self.batch // self.micro_batch if self.micro_batch else 0

    def job(self, costs: Costs | None = None) -> Job:
        """As the simulator takes it; without costs, failures cost the lost work alone. The GPUs of a machine fail together, so
        one worker stands for all of them."""
        return Job(
            name=self.name,
            steps=self.steps,
            step_s=self.step_s,
            workers=self.nodes,
            stages=self.nodes if self.micro_batch else 1,
            micro_batches=max(1, self.micro_batches),
            batch=self.batch,
            costs=costs or Costs(),
        )


WIDE_RESNET = SwiftModel(
    name="Wide-ResNet-50",
    steps=450_360,
    interval=5_004,
    hours=479.4,
    failures=28,
    global_hours="557.4",
    swift_hours="480.7",
    speedup="1.16",
    batch=256,
    parameters="1.23",
    gpus=8,
    nodes=2,
)
VIT = SwiftModel(
    name="ViT-128/32",
    steps=93_600,
    interval=312,
    hours=85.6,
    failures=5,
    global_hours="86.4",
    swift_hours="86.0",
    speedup="1.01",
    batch=4096,
    parameters="1.64",
    gpus=128,
    nodes=16,
    micro_batch=16,
    saved=(0.360, 0.573),
    tokens=49,
    hidden=1024,
)
BERT = SwiftModel(
    name="BERT-128",
    steps=500_000,
    interval=5_000,
    hours=461.1,
    failures=27,
    global_hours="524.2",
    swift_hours="476.1",
    speedup="1.10",
    batch=512,
    parameters="1.11",
    gpus=128,
    nodes=16,
    micro_batch=4,
    saved=(0.585, 0.763),
    tokens=128,
    hidden=1024,
)
SWIFT = (WIDE_RESNET, VIT, BERT)

SWIFT_MTBF = 17 * HOUR
"""Section 7.3 calls it the median; the printed numbers of failures are the time without failures over it, so it is the mean."""
SNAPSHOT_EVERY = 30
"""Iterations from one snapshot to the next, of CheckFreq and Elastic Horovod in SWIFT's experiments (section 7)."""
SNAPSHOT_BUDGET = 0.035
"""The share of the time that snapshots were allowed to cost when that interval was chosen (section 7)."""
CHECKFREQ_HOURS = "518.9"
HOROVOD_HOURS = "515.9"
"""Wide-ResNet-50 with failures (section 7.3)."""
BERT_CHECKPOINT = 0.93
"""Seconds that a checkpoint of BERT-128 takes (section 7.3, "Effects of Checkpoint Frequency")."""
STAGES_PER_MACHINE = 8
"""Of the pipelines (section 7)."""
NETWORK = 40e9 / 8
"""Bytes per second between machines: 40 Gbit/s Ethernet (section 7)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckFreqModel:
    """A model whose recovery CheckFreq's text tells (sections 5.4 and 5.5).

    Attributes:
        lost_hours: mean work lost per interruption with a checkpoint per epoch: half an epoch (formula 1).
        recovery_s: mean with CheckFreq; for ResNet-50 the text says "less than a minute".
        per_epoch: fewest and most checkpoints per epoch on its machine, over all models (Table 4, as the text has it).
        speedup: of the whole training at an interruption every five hours (Figure 8).
    """

    name: str
    lost_hours: float
    recovery_s: float
    per_epoch: tuple[int, int]
    speedup: str

    @property
    def epoch_s(self) -> float:
        """Seconds of an epoch: twice what is lost on average (formula 1)."""
        return 2 * self.lost_hours * HOUR

    def job(self, epochs: int) -> Job:
        """As the simulator takes it, on one GPU, with ImageNet in batches of 256; failures cost the lost work alone."""
        steps = IMAGENET // 256
        return Job(name=self.name, steps=steps * epochs, step_s=self.epoch_s / steps, workers=1)


RESNET50 = CheckFreqModel(name="ResNet-50", lost_hours=1.9, recovery_s=60.0, per_epoch=(83, 278), speedup="2")
RESNEXT101 = CheckFreqModel(name="ResNeXt-101", lost_hours=2.0, recovery_s=32.0, per_epoch=(25, 100), speedup="1.6")
CHECKFREQ = (RESNET50, RESNEXT101)
CHECKFREQ_EPOCHS = 40
"""Of the simulated training: as many as fit into the 150 hours that Figure 8 has for ResNet-50 with CheckFreq."""
CHECKFREQ_MTBF = 5 * HOUR
"""An interruption every five hours (section 5.5)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A mini-batch during which Nicolae et al. let workers fail: its number in the run, and the epoch as the text has it."""

    mini_batch: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NicolaeModel:
    """A model of Nicolae et al. (Table I and section IV-D).

    Attributes:
        size, layers: as printed; the two columns of these rows are swapped, see `docs/papers.md`.
        per_epoch: mini-batches of an epoch as printed; samples, batch, workers_share: what it follows from, the last being
            over how many workers the samples are shared out.
        step_s: of a mini-batch. init_s, checkpoint_s, restart_s: overheads of checkpoint-restart.
    """

    name: str
    size: str
    layers: str
    batch: int
    per_epoch: int
    epochs: int
    step_s: float
    init_s: float
    checkpoint_s: float
    restart_s: float
    samples: int
    workers_share: int
    scenarios: tuple[Scenario, ...]

    @property
    def whole_batches(self) -> int:
        """Mini-batches of an epoch by arithmetic."""
        return self.samples // (self.batch * self.workers_share)

    def job(self) -> Job:
        """As the simulator takes it. A restart costs what Table I has for starting and for loading."""
        return Job(
            name=self.name,
            steps=self.whole_batches * self.epochs,
            step_s=self.step_s,
            workers=8,
            batch=self.batch * self.workers_share,
            costs=Costs(persist_s=self.checkpoint_s, restart_s=self.init_s, load_s=self.restart_s),
        )


TINY_RESNET50 = NicolaeModel(
    name="ResNet-50",
    size="600",
    layers="10",
    batch=32,
    per_epoch=390,
    epochs=90,
    step_s=0.17,
    init_s=3.0,
    checkpoint_s=0.48,
    restart_s=4.09,
    samples=100_000,
    workers_share=8,
    scenarios=(
        Scenario(mini_batch=200, epoch=0),
        Scenario(mini_batch=4000, epoch=10),
        Scenario(mini_batch=10_000, epoch=25),
        Scenario(mini_batch=25_000, epoch=64),
    ),
)
NT3 = NicolaeModel(
    name="CANDLE-NT3",
    size="91",
    layers="50",
    batch=20,
    per_epoch=55,
    epochs=10,
    step_s=2.2,
    init_s=1.9,
    checkpoint_s=3.4,
    restart_s=2.5,
    samples=1120,
    workers_share=1,
    scenarios=(
        Scenario(mini_batch=10, epoch=0),
        Scenario(mini_batch=250, epoch=4),
        Scenario(mini_batch=500, epoch=8),
    ),
)
NICOLAE = (TINY_RESNET50, NT3)


def jobs() -> dict[str, Job]:
    """All of them as jobs, by name, with the costs that their papers print and no others."""
    bert = Costs(persist_s=BERT_CHECKPOINT, replay_ratio=1 - BERT.saved[1])
    return {
        "swift-wide-resnet-50": WIDE_RESNET.job(),
        "swift-vit-128-32": VIT.job(Costs(replay_ratio=1 - VIT.saved[1])),
        "swift-bert-128": BERT.job(bert),
        "checkfreq-resnet-50": RESNET50.job(CHECKFREQ_EPOCHS),
        "checkfreq-resnext-101": RESNEXT101.job(CHECKFREQ_EPOCHS),
        "nicolae-resnet-50": TINY_RESNET50.job(),
        "nicolae-nt3": NT3.job(),
    }
