"""What going on without redoing does to a model: lossy forward and rollback against an undisturbed mini-batch.

Nicolae et al., III-C and IV: a mini-batch is cut at a share of its back-propagation, once for each strategy, all from the same
weights. A group of data-parallel workers is emulated in one process, worker after worker, so that everything but the strategy
is equal to the bit. `study_file` reads what is to be studied, `study_views` shows what came out.
"""

from raytrain_ft.study.cuts import Cut
from raytrain_ft.study.emulate import Group, Worker, lossy_mean
from raytrain_ft.study.protocol import ModelStudy, Outcome, Plan, run
from raytrain_ft.study.summary import Estimate, estimate, summarize

__all__ = ["Cut", "Estimate", "Group", "ModelStudy", "Outcome", "Plan", "Worker", "estimate", "lossy_mean", "run", "summarize"]
