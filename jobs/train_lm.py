"""A small language model that learns to write Python, byte by byte, from Python's own standard library.

    python jobs/train_lm.py
    python jobs/train_lm.py --stages 3 --lose-stage 1     # a pipeline that loses a stage, rehearsed on this machine
    ray job submit --working-dir . -- python jobs/train_lm.py --num-workers 4 --max-steps 2000 --storage-path /shared/runs

GPT with 0.9 million parameters, or with `--masked` a BERT of the same size; nothing is downloaded. All nodes must run the
same Python version, since its source is the data. The loss at the end is in bits per byte of modules that were not trained
on: 8 is a guess at random, about 4.5 knows how often each byte occurs.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import raytrain_ft as ft
from raytrain_ft.chaos.cluster import LocalCluster

CONTEXT = 64  # bytes that the model sees at once
WIDTH, HEADS, LAYERS, DROPOUT = 128, 4, 4, 0.05
MASK, SEEN = 256, -1  # the token that hides a byte; in place of a byte that need not be guessed
HIDDEN = round(0.15 * CONTEXT)  # bytes of each window that a masked model has to guess

# ---------------------------------------------------------------- the model


class Embed(nn.Module):
    """Tokens [n, t], any integers -> [n, t, WIDTH]."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(tokens, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        for table in (self.token, self.place):
            nn.init.normal_(table.weight, std=0.2)  # torch's default of 1 drowns what the first blocks have to say

    def forward(self, text: Tensor) -> Tensor:
        return self.token(text.long()) + self.place(torch.arange(text.shape[1], device=text.device))


class Block(nn.Module):
    """Self-attention, then a two-layer network, each added to its input: [n, t, WIDTH] -> the same shape."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(n, t, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)  # [n, heads, t, WIDTH / heads]
        x = x + self.dropout(self.out(seen.transpose(1, 2).reshape(n, t, WIDTH)))
        return x + self.dropout(self.mlp(self.norm_2(x)))


def transformer(*, causal: bool, tokens: int, tied: bool = False) -> nn.Sequential:
    """Tokens [n, t] -> logits [n, t, 256]. One layer after the other, so that it can be cut into stages anywhere.

    `tied`: the last layer has the weights of the first. If they are in two stages, these train them as one.
    """
    embed, head = Embed(tokens), nn.Linear(WIDTH, 256, bias=False)
    if tied:
        head.weight = embed.token.weight
    return nn.Sequential(embed, *(Block(causal) for _ in range(LAYERS)), nn.LayerNorm(WIDTH), head)


# ---------------------------------------------------------------- the data


def library(part: str, megabytes: float = 4.0) -> TensorDataset:
    """Windows of Python's own modules: bytes, and the bytes one further on; both uint8 [n, CONTEXT].

    The modules in alphabetical order up to `megabytes`; every 20th is held out.
    """
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [file.read_bytes() for number, file in enumerate(files) if (number % 20 == 19) == (part == "held out")]
    text = torch.frombuffer(bytearray(b"".join(texts)[: int(megabytes * 1e6)]), dtype=torch.uint8)
    rows = (len(text) - 1) // CONTEXT
    return TensorDataset(text[: rows * CONTEXT].view(rows, CONTEXT), text[1 : rows * CONTEXT + 1].view(rows, CONTEXT))


# ---------------------------------------------------------------- the task


class PythonLM(ft.TrainTask):
    """GPT: which byte comes next?"""

    def __init__(self, max_steps: int, tied: bool = False) -> None:
        self.max_steps = max_steps
        self.tied_weights = tied

    def model(self, stage: int) -> nn.Module:
        return transformer(causal=True, tokens=256, tied=self.tied_weights)

    def optimizer(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        matrices = [p for p in params if p.dim() >= 2]
        vectors = [p for p in params if p.dim() < 2]  # biases and norms are not decayed
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        """Up in a tenth of the run, then down along a cosine to a tenth of the peak."""
        warm_up = max(1, self.max_steps // 10)

        def factor(step: int) -> float:
            progress = min(1.0, (step - warm_up) / max(1, self.max_steps - warm_up))
            return (step + 1) / warm_up if step < warm_up else 0.55 + 0.45 * math.cos(math.pi * progress)

        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    def dataset(self) -> TensorDataset:
        return library("train")

    def loss(self, output: Tensor, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), batch[1].long().flatten())


class MaskedPythonLM(PythonLM):
    """BERT: which bytes are hidden? Each is seen in the light of all others, before and after it."""

    def model(self, stage: int) -> nn.Module:
        return transformer(causal=False, tokens=256 + 1)

    def augment(self, sample: tuple[Tensor, Tensor], generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """(what the model sees, the bytes that it does not see). `generator` is seeded from (seed, epoch, sample), so the same
        bytes are hidden whoever loads the sample, also when a replay reads it a second time."""
        text = sample[0].long()
        hidden = torch.randperm(CONTEXT, generator=generator)[:HIDDEN]
        return text.index_fill(0, hidden, MASK), torch.full_like(text, SEEN).index_copy_(0, hidden, text[hidden])

    def loss(self, output: Tensor, batch: list[Tensor]) -> Tensor:
        # as many bytes are hidden in every window, so the mean over bytes is a mean over samples
        return F.cross_entropy(output.flatten(0, 1), batch[1].flatten(), ignore_index=SEEN)


@torch.no_grad()
def bits_per_byte(task: PythonLM, model: nn.Module, windows: int = 256) -> float:
    """Loss over windows of the held-out modules, evenly spread."""
    text, following = library("held out").tensors
    chosen = torch.linspace(0, len(text) - 1, min(windows, len(text))).long()
    batch = [text[chosen], following[chosen]]
    if isinstance(task, MaskedPythonLM):
        generator = torch.Generator().manual_seed(0)
        samples = [task.augment(sample, generator) for sample in zip(*batch, strict=True)]
        batch = [torch.stack(column) for column in zip(*samples, strict=True)]
    return task.loss(model.eval()(batch[0]), batch).item() / math.log(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-workers", type=int, default=None, help="workers (2); with stages a multiple of them (one each)")
    parser.add_argument("--cpus-per-worker", type=int, default=1, help="CPUs of each; a node's whole number keeps them apart")
    parser.add_argument("--max-steps", "--steps", type=int, default=150, help="updates of 32 windows each")
    parser.add_argument("--masked", action="store_true", help="guess hidden bytes (BERT) instead of the next one (GPT)")
    parser.add_argument("--tied", action="store_true", help="one matrix of weights for embedding and output (GPT only)")
    parser.add_argument("--stages", type=int, default=1, help="cut the model into so many stages, each on its own worker")
    parser.add_argument("--micro-batches", type=int, default=None, help="of each pipeline's share of the 32 windows (8)")
    parser.add_argument("--chunks", type=int, default=1, help="parts of the model per stage: each goes round as often")
    parser.add_argument(
        "--schedule", choices=["1f1b", "gpipe", "zero_bubble"], default=None, help="the order of micro-batches (1f1b)"
    )
    parser.add_argument("--lose-stage", type=int, help="rehearse: a local cluster; kill this stage half way")
    parser.add_argument("--storage-path", default=None, help="where runs are kept: a path that every node sees")
    parser.add_argument("--node-minutes", type=float, default=1.0, help="how long the cluster may take to start a node")
    parser.add_argument("--name", default=None, help="the name of the run")
    args = parser.parse_args()
    if args.lose_stage is not None and not 0 <= args.lose_stage < args.stages:
        parser.error(f"--lose-stage {args.lose_stage}: stages are numbered from 0 to {args.stages - 1}")
    if args.stages == 1 and (args.micro_batches is not None or args.schedule is not None):
        parser.error("--micro-batches and --schedule are of a pipeline: give --stages, too")

    if args.masked and args.tied:
        parser.error("--tied: a masked model reads one token more than it writes, so its two ends are no one matrix")

    task = MaskedPythonLM(args.max_steps) if args.masked else PythonLM(args.max_steps, tied=args.tied)
    patience = timedelta(minutes=args.node_minutes)
    kind = "masked-lm" if args.masked else "tied-lm" if args.tied else "lm"
    name = kind if args.stages == 1 else f"{kind}-{args.stages}-stages"
    workers = args.num_workers if args.num_workers is not None else 2 if args.stages == 1 else args.stages
    if workers < 1 or args.stages < 1 or workers % args.stages:
        parser.error(f"--num-workers {workers}: {args.stages} stages need a multiple of {args.stages}")
    if args.lose_stage is not None and workers != args.stages:
        parser.error(f"--lose-stage: of {workers} workers, others have the same stage; use as many as stages ({args.stages})")
    cluster, faults, resume = nullcontext(), [], "auto"
    if args.lose_stage is not None:
        cluster = LocalCluster(workers + 1, cpus_per_node=args.cpus_per_worker)  # a node for each worker, and one for a spare
        faults = [ft.FailAt(rank=args.lose_stage, step=args.max_steps // 2, phase="forward")]
        # A rehearsal begins anew each time: under the name of a real run, it would in time delete the checkpoints of that one,
        # or that one would go on from those of the rehearsal.
        resume, name = "never", f"{name}-rehearsal"

    trainer = ft.Trainer(
        task,
        max_steps=args.max_steps,
        global_batch_size=32,
        seed=0,
        max_grad_norm=1.0,
        drop_last=args.stages > 1,  # all micro-batches of a pipeline are of one size
        scaling_config=ft.ScalingConfig(num_workers=workers, resources_per_worker={"CPU": args.cpus_per_worker}),
        parallelism_config=ft.ParallelismConfig(
            pipeline_parallel_degree=args.stages,
            num_pp_microbatches=8 if args.micro_batches is None else args.micro_batches,
            num_pp_chunks=args.chunks,
            schedule=args.schedule or "1f1b",
            split="auto",
        ),
        recovery_config=ft.RecoveryConfig(schedule_timeout=2 * patience, replacement_timeout=patience),
        run_config=ft.RunConfig(
            name=args.name or name, storage_path=args.storage_path, checkpoint_config=ft.CheckpointConfig(resume=resume)
        ),
        faults=faults,
    )
    with cluster:
        result = trainer.fit()
    before, after = bits_per_byte(task, task.model(0)), bits_per_byte(task, ft.load_model(task, result))
    print(f"held-out modules: {after:.2f} bits per byte (untrained: {before:.2f})")


if __name__ == "__main__":
    main()
