"""Is logging worth doing? How much a pipeline logs, and whether its idle time suffices for it (SWIFT, section 5.4)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from raytrain_ft.errors import ConfigError

FAR = 100.0
"""Times the model's state. The paper says "far exceeds" and no number; its own logs reach 94 times (ViT-128/32: 24.66 GB per
step, about 50 steps as the limits of Table 7 imply, 8 bytes of state per parameter), and it calls those worth doing."""

FAR_PER_STEP = 10.0
"""Times the model's state that a run may log in one step; the paper's largest is about twice (ViT-128/32, see `FAR`)."""
SMALL_LOG = 16 * 2**20
"""Bytes per step that are never too many, however small the model: what a disk writes in a few hundredths of a second."""


@dataclass(frozen=True, slots=True)
class Worth:
    """A decision, and the reason in words."""

    worth: bool
    reason: str


def transformer_log_bytes(batch: int, tokens: int, hidden: int, itemsize: int, boundaries: int) -> int:
    """Bytes that a transformer logs per step: activations forward, gradients backward, over each logged boundary.

    Args:
        batch: samples of a step, all micro-batches together.
        tokens: of a sample. hidden: width of the model. itemsize: bytes of an element.
        boundaries: logged ones; one less than there are groups.

    Raises:
        ConfigError: a number that is negative.
    """
    given = {"batch": batch, "tokens": tokens, "hidden": hidden, "itemsize": itemsize, "boundaries": boundaries}
    for name, value in given.items():
        _whole(name, value, 0)
    return 2 * batch * tokens * hidden * itemsize * boundaries


def bubble_share(p: int, m: int) -> float:
    """Share of a step that a stage is idle, with p stages and m micro-batches, for GPipe and 1F1B (section 2.1).

    Raises:
        ConfigError: p or m is less than 1.
    """
    _whole("p", p, 1)
    _whole("m", m, 1)
    return (p - 1) / (m + p - 1)


def in_proportion(log_bytes: float, state_bytes: float) -> Worth:
    """Whether the log of a step is in proportion to the model (section 5.4: activations of CNNs mostly are not). This much of
    the test needs sizes alone, so it can be done before a run.

    Args:
        log_bytes: per step, of all workers together. state_bytes: of the model and its optimizer.
    """
    times = log_bytes / state_bytes if state_bytes else math.inf
    found = f"a step logs {log_bytes / 1e6:.3g} MB, {times:.2g} times the model's state of {state_bytes / 1e6:.3g} MB"
    if log_bytes <= SMALL_LOG:
        return Worth(True, f"{found}, and this is little")
    if times > FAR_PER_STEP:
        return Worth(False, f"{found} (more than {FAR_PER_STEP:g}): to checkpoint often costs less than to log")
    return Worth(True, f"{found} (no more than {FAR_PER_STEP:g})")


def worth_logging(
    *,
    log_bytes: float,
    step_seconds: float,
    copy_bandwidth: float,
    stages: int,
    micro_batches: int,
    state_bytes: float,
    total_log_bytes: float,
    interval: int,
    far: float = FAR,
) -> Worth:
    """Whether to log (section 5.4): the copies must fit the idle time, and the log must not dwarf the model.

    Args:
        log_bytes: per step, of the device that logs most: devices copy side by side.
        step_seconds: of a step without logging. copy_bandwidth: from a device to its host, bytes per second.
        stages, micro_batches: of the pipeline.
        state_bytes: what a checkpoint holds. total_log_bytes: per step, of all devices together.
        interval: steps between checkpoints. 1 compares the state with the log of a single step.
        far: how many times the state the log between two checkpoints may be.

    Raises:
        ConfigError: a value that cannot be used.
    """
    sizes = {"log_bytes": log_bytes, "total_log_bytes": total_log_bytes}
    positive = {"step_seconds": step_seconds, "copy_bandwidth": copy_bandwidth, "state_bytes": state_bytes, "far": far}
    for name, value in (sizes | positive).items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not (0 <= value < math.inf):
            raise ConfigError(f"worth_logging({name}={value!r}): use a finite number that is not negative")
        if value == 0 and name in positive:
            raise ConfigError(f"worth_logging({name}={value!r}): use a number greater than 0")
    _whole("interval", interval, 1)
    idle = bubble_share(stages, micro_batches) * step_seconds
    copying = log_bytes / copy_bandwidth
    if copying > idle:
        return Worth(
            False,
            f"copying {log_bytes / 1e9:.3g} GB of log takes {1e3 * copying:.3g} ms per step, and a stage is idle for "
            f"{1e3 * idle:.3g} ms: log fewer boundaries, or rely on checkpoints",
        )
    times = total_log_bytes * interval / state_bytes
    if times > far:
        return Worth(
            False,
            f"the log between two checkpoints is {times:.3g} times the model's state (more than {far:g}): checkpoint more "
            "often instead, or log fewer boundaries",
        )
    return Worth(
        True,
        f"copying the log takes {1e3 * copying:.3g} of the {1e3 * idle:.3g} ms per step that a stage is idle, and the log "
        f"between two checkpoints is {times:.3g} times the model's state",
    )


def _whole(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name}={value!r}: use a whole number of at least {least}")
