"""Random streams as functions of where a computation stands, never of what was drawn before it.

A step that is redone, replayed from logs or moved to another worker draws the same numbers, because every generator is
seeded anew from (seed, epoch, sample), (seed, epoch, batch) or (seed, step, rank, micro-batch, stage). Nothing has to be
saved. CheckFreq (3.2, 4.3.1) asks this of augmentation; replay (SWIFT, section 5) needs it of dropout too.
"""

from __future__ import annotations

import random

import numpy as np
import torch

_MASK = 0xFFFF_FFFF_FFFF_FFFF
_GAMMA = 0x9E37_79B9_7F4A_7C15
_SAMPLE_DOMAIN = 0x73616D706C65  # "sample", "step", "batch": the families of seeds never meet
_STEP_DOMAIN = 0x73746570
_BATCH_DOMAIN = 0x6261746368


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """Seed for all that is random about sample `index` in `epoch`; 64 bits, whoever loads it."""
    return _mixed(_SAMPLE_DOMAIN, seed, epoch, index)


def batch_seed(seed: int, epoch: int, first: int) -> int:
    """Seed for all that is random in collating the batch that begins with sample `first` in `epoch`; 64 bits."""
    return _mixed(_BATCH_DOMAIN, seed, epoch, first)


NO_REPLICA = -1
"""In the place of a rank, for what all of them draw alike."""


def step_seed(seed: int, step: int, rank: int, micro_batch: int, stage: int = 0) -> int:
    """Seed for all that is random in one forward pass (dropout), 64 bits.

    It depends on the rank, as the micro-batch does: a step redone in the same world is the same to the bit.
    """
    return _mixed(_STEP_DOMAIN, seed, step, rank, micro_batch, stage)


def seed_all(value: int) -> None:
    """Seed the global generators that a user's model may draw from: torch, `random`, numpy's legacy one.

    Cheap enough for every micro-batch (tens of microseconds): unlike `torch.manual_seed` it does not touch devices
    that are not in use. torch's CPU generator keeps only the low 32 bits, numpy's accepts no more.
    """
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(value)
    random.seed(value)
    np.random.seed(value & 0xFFFF_FFFF)


def _mixed(*values: int) -> int:
    """A 64-bit hash of integers: splitmix64's finalizer (Steele et al., OOPSLA 2014) over a chain of the values."""
    state = 0
    for value in values:
        state = ((state + _GAMMA) ^ value) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58_476D_1CE4_E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D0_49BB_1331_11EB) & _MASK
        state ^= state >> 31
    return state
