"""Is logging worth doing? How much a pipeline logs, and whether its idle time suffices for it (SWIFT, section 5.4)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from raytrain_ft.checks import is_number, is_whole
from raytrain_ft.errors import ConfigError
from raytrain_ft.policy.units import in_bytes, in_seconds

FAR_PER_STEP = 10.0
"""Times the model's state that a run may log in one step. The paper says "far exceeds" and no number; its own largest is about
twice (ViT-128/32: 24.66 GB, with 8 bytes of state per parameter), and it calls that worth doing."""
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


def fits_idle_time(*, log_bytes: float, bandwidth: float, step_seconds: float, stages: int, micro_batches: int) -> Worth:
    """Whether the log of a step is written while its writer is idle anyway (section 5.4, whose devices copy to their hosts
    meanwhile).

    Args:
        log_bytes: per step, of the worker that logs most: they write side by side.
        bandwidth: bytes per second that a log takes. step_seconds: of a step without logging.
        stages, micro_batches: of the pipeline.

    Raises:
        ConfigError: a value that cannot be used.
    """
    for name, value in {"log_bytes": log_bytes, "bandwidth": bandwidth, "step_seconds": step_seconds}.items():
        if not is_number(value) or not 0 <= value < math.inf:
            raise ConfigError(f"{name}={value!r}: use a finite number that is not negative")
    if not bandwidth:
        raise ConfigError(f"bandwidth={bandwidth!r}: use a number greater than 0")
    idle = bubble_share(stages, micro_batches) * step_seconds
    writing = log_bytes / bandwidth
    found = f"a stage writes up to {in_bytes(log_bytes)} of log per step in {in_seconds(writing)} ({in_bytes(bandwidth)}/s)"
    found = f"{found} and is idle for {in_seconds(idle)}"
    if writing > idle:
        return Worth(False, f"{found}, which is less: log fewer boundaries, or rely on checkpoints")
    return Worth(True, found)


def _whole(name: str, value: int, least: int) -> None:
    if not is_whole(value, least):
        raise ConfigError(f"{name}={value!r}: use a whole number of at least {least}")
