"""The last step is committed: the replicas are compared, and the final state of every stage is saved."""

from __future__ import annotations

from raytrain_ft.policy import commands as c
from raytrain_ft.policy import messages as m
from raytrain_ft.policy.run_state import RunState
from raytrain_ft.policy.states import State
from raytrain_ft.policy.world import differing_in_stages

MOST_UNSAVED = 3
"""How often the last steps are done again because the worker that was to save a stage is gone: saving may be what ends it."""


def on_completed(run: RunState, event: m.Completed) -> list[c.Command]:
    if run.state == State.SHUTTING_DOWN or not run.all_answered(event, run.world):
        return []
    digests = {e.member: (e.digest,) for e in run.answers.values() if isinstance(e, m.Completed)}
    if differing_in_stages(run.world, digests, run.rules.stages):
        return run.fail("RecoveryError", f"the replicas differ at the end of the run: {digests}")
    run.history.close(event.at, run.rules.max_steps)
    run.result["digest"] = ":".join(digests[member][0] for member in run.world[: run.rules.stages])
    run.step = run.rules.max_steps
    run.state = State.SHUTTING_DOWN
    return save(run)


def save(run: RunState, asked: tuple[str, ...] = ()) -> list[c.Command]:
    """A stage that has been saved is in storage, whatever becomes of who saved it. Who was `asked` before is still at it: asked
    again it would write twice, and the end of the run would break the second one off."""
    run.answers = {member: answer for member, answer in run.answers.items() if isinstance(answer, m.Saved)}
    savers = run.savers()
    others = tuple(member for member in savers if member not in run.answers and member not in asked)
    return [c.Save(others, run.world, run.incarnation), c.SetTimer(f"save {savers}", run.rules.phase_timeout, run.incarnation)]


def without(run: RunState, asked: tuple[str, ...], cause: str) -> list[c.Command] | None:
    """Somebody was lost while those who were `asked` save the final state. None: nobody who is left holds some stage, so that
    it must be had from elsewhere first."""
    savers = run.savers()
    if len(savers) == run.rules.stages:
        return save(run, asked) if savers != asked else []
    run.unsaved += 1
    if run.unsaved < MOST_UNSAVED:
        return None
    who = "every worker" if run.rules.stages == 1 else "every worker of a stage"
    why = f"{run.unsaved} times, {who} was lost before the final state was saved"
    return run.fail("NoSurvivorError", f"{why}; last cause: {cause}")


def on_saved(run: RunState, event: m.Saved) -> list[c.Command]:
    run.result["path"] = event.path
    return run.end(State.FINISHED) if run.all_answered(event, run.savers()) else []
