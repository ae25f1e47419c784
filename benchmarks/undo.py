"""How fast, how small and how exact is the undo of an optimizer's update?    python -m benchmarks.undo [--quick]

Speed: steps and undos take turns in one process (step, undo, step, undo), so each undo is compared with the step that it
undoes; the A/A run compares the first steps with the second ones. The time of a step leaves out what `Undo` adds to it.
Memory: what the C heap and Python hold between steps, with and without `Undo`, while the gradients stay where they are; and
where the loop drops them after each step.
Exactness: error of the parameters and of each state, relative to the largest element of the tensor.
"""

from __future__ import annotations

import ctypes
import gc
import os
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, NAdam, Optimizer, RAdam, RMSprop

from benchmarks.harness import REPORT_ONLY, Goal, Options, Report, main, noise_floor, paired_ratio
from raytrain_ft.training.lamb import LAMB
from raytrain_ft.training.undo import Undo

GOALS = {
    "undo_ratio_sgd_momentum": Goal("<=", 1.0),
    "undo_ratio_adam": Goal("<=", 1.0),
    "undo_ratio_adamw": Goal("<=", 1.0),
    "undo_ratio_lamb": Goal("<=", 1.0),
    "undo_ratio_sgd_momentum_1m": Goal("<=", 1.0),
    "undo_ratio_adam_1m": Goal("<=", 1.0),
    "undo_ratio_adamw_1m": Goal("<=", 1.0),
    "undo_ratio_lamb_1m": Goal("<=", 1.0),
    "undo_ratio_sgd_momentum_50m": Goal("<=", 1.0),
    "undo_ratio_adam_50m": Goal("<=", 1.0),
    "undo_ratio_adamw_50m": Goal("<=", 1.0),
    "undo_ratio_lamb_50m": Goal("<=", 1.0),
    "undo_extra_bytes": Goal("<=", 65536),
    "undo_extra_bytes_dropped_gradients": REPORT_ONLY,
    "undo_max_relative_error_adamw": Goal("<=", 1e-6),
}
Make = Callable[[list[Parameter]], Optimizer]
TIMED: dict[str, Make] = {
    "sgd_momentum": lambda p: SGD(p, lr=1e-3, momentum=0.9, foreach=True),
    "adam": lambda p: Adam(p, foreach=True),
    "adamw": lambda p: AdamW(p, foreach=True),
    "lamb": lambda p: LAMB(p, foreach=True),
}
EXACT: dict[str, Make] = {
    "SGD": lambda p: SGD(p, lr=0.01, weight_decay=1e-4),
    "SGD momentum": lambda p: SGD(p, lr=0.01, momentum=0.9, weight_decay=1e-4),
    "SGD Nesterov": lambda p: SGD(p, lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-4),
    "Adam": lambda p: Adam(p, weight_decay=1e-4),
    "AdamW": lambda p: AdamW(p),
    "LAMB": lambda p: LAMB(p),
    "NAdam": lambda p: NAdam(p, weight_decay=1e-4),
    "RAdam": lambda p: RAdam(p, weight_decay=1e-4),
    "RMSprop": lambda p: RMSprop(p, lr=1e-3, weight_decay=1e-4),
    "RMSprop centered, momentum": lambda p: RMSprop(p, lr=1e-3, centered=True, momentum=0.9),
    "Adagrad": lambda p: Adagrad(p, weight_decay=1e-4),
    "Adafactor": lambda p: Adafactor(p),
}
WIDTHS = {1: 128, 10: 512, 50: 1024}  # million parameters: width of the transformer layers that they make up
SIZES = {1: "_1m", 10: "", 50: "_50m"}  # in the keys of the ratios


def layers(millions: int) -> list[Parameter]:
    """The parameters of about as many transformer layers as make up this many millions, with gradients."""
    d, params, total = WIDTHS[millions], [], 0
    shapes = [(3 * d, d), (3 * d,), (d, d), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,)]
    while total < millions * 10**6 - 6 * d * d:
        params += [Parameter(torch.randn(shape) * 0.02) for shape in shapes]
        total = sum(p.numel() for p in params)
    for p in params:
        p.grad = torch.randn_like(p) * 0.01
    return params


@dataclass(slots=True)
class Timing:
    """Seconds per call, in blocks. `steps` without the hooks of `Undo`, which took `hooks` per step."""

    steps: list[list[float]] = field(default_factory=list)
    again: list[list[float]] = field(default_factory=list)
    undos: list[list[float]] = field(default_factory=list)
    hooks: list[float] = field(default_factory=list)


def time_turns(make: Make, millions: int, blocks: int, rounds: int) -> Timing:
    """Blocks of (step, undo, step, undo), `rounds` of them each."""
    params = layers(millions)
    optimizer = make(params)
    marks = [0.0, 0.0]
    # Hooks run in the order of their registration: these two are the innermost, so they time the step alone.
    optimizer.register_step_post_hook(lambda *_: marks.__setitem__(1, time.perf_counter()))
    undo = Undo(optimizer)
    optimizer.register_step_pre_hook(lambda *_: marks.__setitem__(0, time.perf_counter()))
    timing = Timing()

    def step() -> float:
        began = time.perf_counter()
        optimizer.step()
        seconds = marks[1] - marks[0]
        timing.hooks.append(time.perf_counter() - began - seconds)
        return seconds

    def undone() -> float:
        began = time.perf_counter()
        undo.undo()
        return time.perf_counter() - began

    for _ in range(3):  # so that there is state to restore, and everything is warm
        step()
    undone()
    for _ in range(blocks):
        turns = [(step(), undone(), step(), undone()) for _ in range(rounds)]
        timing.steps.append([turn[0] for turn in turns])
        timing.again.append([turn[2] for turn in turns])
        timing.undos.append([seconds for turn in turns for seconds in (turn[1], turn[3])])
    undo.close()
    return timing


def time_all(report: Report, quick: bool) -> None:
    """The ratios, and a table over sizes."""
    table = Table(title="undo and step, median ms")
    for title in ("optimizer", "parameters", "step", "hooks", "undo", "undo / step"):
        table.add_column(title, justify="left" if title == "optimizer" else "right", no_wrap=True)
    floors = []
    for millions, size in SIZES.items():
        for name, make in TIMED.items():
            key = f"undo_ratio_{name}{size}"
            if quick and millions == 50:
                report.absent(key, "--quick leaves 50 M parameters out")
                continue
            blocks = 9 if quick or millions == 50 else 25
            timing = time_turns(make, millions, blocks, 20 if millions == 1 else 3)
            both = [a + b for a, b in zip(timing.steps, timing.again, strict=True)]
            ratio = paired_ratio(timing.undos, both)
            report.add(key, ratio)
            if millions == 10:
                floors.append(noise_floor(timing.steps, timing.again))
            ms = [1e3 * float(np.median(times)) for times in (both, timing.hooks, timing.undos)]
            table.add_row(name, f"{millions} M", *(f"{value:.3g}" for value in ms), str(ratio))
            gc.collect()
    report.noise_floor = max(floors)
    Console(width=120).print(table)


class _Mallinfo2(ctypes.Structure):
    _fields_ = tuple(
        (f"{name}ks" if name.endswith("bl") else name, ctypes.c_size_t)
        for name in ("arena", "ordbl", "smbl", "hbl", "hblkhd", "usmbl", "fsmbl", "uordbl", "fordbl", "keepcost")
    )


def heap_bytes() -> int | None:
    """Bytes that the C heap holds (glibc 2.33 and later) and Python has traced; None where that cannot be told."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return None
    mallinfo2.restype = _Mallinfo2
    gc.collect()
    info: Any = mallinfo2()
    return info.uordblks + info.hblkhd + tracemalloc.get_traced_memory()[0]


def extra_bytes(make: Make, *, dropped: bool) -> int | None:
    """What being able to undo adds between steps, at 10 M parameters.

    Args:
        dropped: the loop drops its gradients after each step, and never calls `forget()`; else their tensors persist.
    """
    params = layers(10)
    optimizer = make(params)

    def step() -> None:
        if dropped:
            for p in params:
                p.grad = torch.full_like(p, 0.01)  # as a backward pass makes them anew
        optimizer.step()
        if dropped:
            optimizer.zero_grad(set_to_none=True)

    tracemalloc.start()
    try:
        for _ in range(3):
            step()
        before = heap_bytes()
        undo = Undo(optimizer)
        for _ in range(3):
            step()
        after = heap_bytes()
        assert undo.updated()
        return None if before is None or after is None else after - before
    finally:
        tracemalloc.stop()


def measure_memory(report: Report) -> None:
    """The optimizer that needs most decides. A loop that drops its gradients and never calls `Undo.forget()` keeps one more set
    of them, until the next step."""
    optimizers: dict[str, Make] = {**TIMED, "nadam": NAdam, "adafactor": Adafactor}
    for key, dropped in (("undo_extra_bytes", False), ("undo_extra_bytes_dropped_gradients", True)):
        found = {name: extra_bytes(make, dropped=dropped) for name, make in optimizers.items()}
        sizes = [size for size in found.values() if size is not None]
        if not sizes:
            report.absent(key, "the C library has no mallinfo2")
            continue
        report.add(key, float(max(sizes)), n=len(sizes))
        report.note(f"{key}: " + ", ".join(f"{name} {size}" for name, size in found.items()))


def errors(make: Make, t: int, seed: int) -> dict[str, tuple[float, float]]:
    """After undoing step t, of x and each state: largest error / largest element, share of elements with equal bits."""
    generator = torch.Generator().manual_seed(seed)
    params = [Parameter(torch.randn(shape, generator=generator) * 0.05) for shape in ((300, 200), (5000,))]
    optimizer = make(params)
    undo = Undo(optimizer)
    drift = [torch.randn(p.shape, generator=generator) for p in params]
    saved: list[dict[str, Tensor]] = []
    for step in range(t):
        if step == t - 1:
            saved = [everything(optimizer, p) for p in params]
        for p, mean in zip(params, drift, strict=True):
            p.grad = (0.3 * mean + torch.randn(p.shape, generator=generator)) * 0.01
        optimizer.step()
    undo.undo()
    result: dict[str, tuple[float, float]] = {}
    for name in saved[0] | saved[1]:
        pairs = [(everything(optimizer, p)[name], s[name]) for p, s in zip(params, saved, strict=True) if name in s]
        off = [(a - b).abs().max().item() / (b.abs().max().item() or 1.0) for a, b in pairs]
        worst = float(np.max(off))  # Python's own max passes over a NaN
        same = sum((a == b).sum().item() for a, b in pairs) / sum(a.numel() for a, _ in pairs)
        result[name] = worst, same
    return result


def everything(optimizer: Optimizer, p: Tensor) -> dict[str, Tensor]:
    """The parameter and its state, copied, without counters."""
    state = {k: v.clone() for k, v in optimizer.state.get(p, {}).items() if k not in ("step", "mu_product")}
    return {"x": p.detach().clone()} | state


def measure_errors(report: Report, seeds: int) -> None:
    """The accuracy table, and AdamW's metric."""
    table = Table(title="after one undo, fp32: largest error / largest element (share of elements with equal bits)")
    for title in ("optimizer", "step 1", "step 2", "step 100"):
        table.add_column(title)
    for name, make in EXACT.items():
        cells = []
        for t in (1, 2, 100):
            found = errors(make, t, seed=0)
            cells.append("\n".join(f"{what} {worst:.1e} ({same:.2%})" for what, (worst, same) in found.items()))
        table.add_row(name, *cells, end_section=True)
    Console(width=120).print(table)
    worst = [errors(EXACT["AdamW"], 100, seed)["x"][0] for seed in range(seeds)]
    report.add("undo_max_relative_error_adamw", worst, statistic=np.max)


def run(options: Options) -> Report:
    """Measures everything, on as many threads as OMP_NUM_THREADS says."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.manual_seed(options.seed)
    report = Report("undo", metrics_from=GOALS)
    measure_errors(report, seeds=3 if options.quick else 10)
    measure_memory(report)
    time_all(report, options.quick)
    return report


if __name__ == "__main__":
    main(run, __doc__)
