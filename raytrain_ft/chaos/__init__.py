"""Failures on demand: exact ones (`FailAt`), several nodes on one machine (`LocalCluster`), campaigns."""

from raytrain_ft.chaos.faults import FailAt

__all__ = ["FailAt"]
