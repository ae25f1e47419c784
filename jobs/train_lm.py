"""A small language model that learns to write Python, byte by byte, from Python's own standard library.

    python jobs/train_lm.py
    ray job submit --working-dir . -- python jobs/train_lm.py --num-workers 4 --max-steps 2000

GPT with 0.9 million parameters; nothing is downloaded. All nodes must run the same Python version, since its source
is the data. The loss at the end is in bits per byte of modules that were not trained on: 8 is a guess at random, about
4.5 knows how often each byte occurs.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import raytrain_ft as ft

CONTEXT = 64  # bytes that the model sees at once
WIDTH, HEADS, LAYERS, DROPOUT = 128, 4, 4, 0.05

# ---------------------------------------------------------------- the model


class Block(nn.Module):
    """Causal self-attention, then a two-layer network, each added to its input: [n, t, WIDTH] -> the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(n, t, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [n, heads, t, WIDTH / heads]
        x = x + self.dropout(self.out(seen.transpose(1, 2).reshape(n, t, WIDTH)))
        return x + self.dropout(self.mlp(self.norm_2(x)))


class GPT(nn.Module):
    """uint8 [n, t] -> logits [n, t, 256] for the byte after each."""

    def __init__(self) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, WIDTH)
        self.place = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)
        for table in (self.byte, self.place):
            nn.init.normal_(table.weight, std=0.2)  # torch's default of 1 drowns what the first blocks have to say

    def forward(self, text: Tensor) -> Tensor:
        x = self.byte(text.long()) + self.place(torch.arange(text.shape[1], device=text.device))
        return self.head(self.norm(self.blocks(x)))


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
    def __init__(self, max_steps: int) -> None:
        self.max_steps = max_steps

    def model(self, stage: int) -> nn.Module:
        return GPT()

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


@torch.no_grad()
def bits_per_byte(model: nn.Module, windows: int = 256) -> float:
    """Loss over windows of the held-out modules, evenly spread."""
    text, following = library("held out").tensors
    chosen = torch.linspace(0, len(text) - 1, min(windows, len(text))).long()
    logits = model.eval()(text[chosen])
    return F.cross_entropy(logits.flatten(0, 1), following[chosen].long().flatten()).item() / math.log(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-workers", type=int, default=2, help="copies of the model, each on its own worker")
    parser.add_argument("--max-steps", type=int, default=150, help="updates of 32 windows each")
    parser.add_argument("--storage-path", default=None, help="where runs are kept: a path that every node sees")
    parser.add_argument("--name", default="lm", help="the name of the run")
    args = parser.parse_args()

    task = PythonLM(args.max_steps)
    result = ft.Trainer(
        task,
        max_steps=args.max_steps,
        global_batch_size=32,
        seed=0,
        max_grad_norm=1.0,
        scaling_config=ft.ScalingConfig(num_workers=args.num_workers),
        recovery_config=ft.RecoveryConfig(),
        run_config=ft.RunConfig(name=args.name, storage_path=args.storage_path),
    ).fit()
    before, after = bits_per_byte(GPT()), bits_per_byte(ft.load_model(task, result))
    print(f"held-out modules: {after:.2f} bits per byte (untrained: {before:.2f})")


if __name__ == "__main__":
    main()
