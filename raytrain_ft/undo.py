"""Undo of an optimizer's update in any PyTorch loop: what users import. The work is done in `raytrain_ft.training.undo`."""

from __future__ import annotations

from raytrain_ft.training.undo import Mode, Undo, refusals

__all__ = ["Mode", "Undo", "refusals"]
