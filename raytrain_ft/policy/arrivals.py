"""Workers come: the first world is formed of them, a recovery that waits for some goes on, a world that trains grows."""

from __future__ import annotations

from raytrain_ft.errors import TooFewWorkersError
from raytrain_ft.policy import commands as c
from raytrain_ft.policy import leaving, phases, replacing, stopping
from raytrain_ft.policy import messages as m
from raytrain_ft.policy.run_state import RunState
from raytrain_ft.policy.states import State

PAUSES_APART = 4
"""Times what it took everybody to take newcomers in: so long they train before it is done again. Nodes that come back one by
one would else hold all others up once for each of them."""


def on_run_started(run: RunState, event: m.RunStarted) -> list[c.Command]:
    # a log may have lost its last lines with the machine of the head, and a number is never used again
    run.incarnation = max([event.incarnation, *(one.incarnation for one in event.stored)])
    run.returns = list(event.returns)
    run.stored = run.standing(event.stored)
    if event.stored and not run.stored and run.returns[-1].step:
        run.rejected.clear()
        run.stored = list(event.stored)
        run.warn(
            f"begins from {run.stored[0].name}, for the checkpoint that an earlier run had gone back to is gone: what a "
            "recovery of that one cost before is part of it, and no longer of its record"
        )
    run.state = State.SCHEDULING
    return [c.SetTimer("schedule", run.rules.schedule_timeout, run.incarnation), *run.provision()]


def on_capacity_changed(run: RunState, event: m.CapacityChanged) -> list[c.Command]:
    run.roster.resized(event.slots, event.last_resort)
    return run.provision() + go_on_waiting(run)


def on_worker_started(run: RunState, event: m.WorkerStarted) -> list[c.Command]:
    run.roster.ready(event.member, event.node)
    run.longest_build = max(run.longest_build, event.build_s)
    return resize(run, event.at) if run.state == State.RUNNING else go_on_waiting(run)


def go_on_waiting(run: RunState) -> list[c.Command]:
    """There are other workers than before, ready or to be hoped for: whoever waits for some looks again."""
    if run.state == State.SCHEDULING:
        return begin(run)
    return replacing.replace(run) if run.state == State.REPLACE and not run.joining else []


def begin(run: RunState, *, waited: bool = False) -> list[c.Command]:
    """Forms the first world, of as many as the cluster has room for; after the deadline, of as many as there are."""
    spares, rules = replacing.to_seat(run), run.rules
    hoped_for = rules.whole(min(rules.max_workers, run.roster.slots or 0)) if run.roster.any_starting() and not waited else 0
    if len(spares) >= max(hoped_for, rules.min_workers):
        run.incarnation += 1
        run.begin_from_stored()  # nobody has tried to load any yet
        world = tuple(spares[: rules.whole(min(rules.max_workers, len(spares)))])
        return replacing.join(run, world)
    if not waited:
        return []
    remedy = replacing.too_slow(run, "schedule_timeout") or "Add nodes, lower num_workers or resources_per_worker."
    return run.fail(
        TooFewWorkersError.__name__,
        f"{len(spares)} workers could be placed within {rules.schedule_timeout:g} s, num_workers asks for at least "
        f"{rules.min_workers}. {remedy}",
    )


def resize(run: RunState, at: float) -> list[c.Command]:
    """Who had notice leaves, if there is a replacement now; or else the world grows; or else, and until it may grow, all stay
    for now."""
    commands = leaving.stop(run, at) or _grow(run, at)
    return commands if run.state == State.RESIZING else [*commands, *leaving.stay(run, at)]


def _grow(run: RunState, at: float) -> list[c.Command]:
    """A planned resize: everybody stops at a step boundary that all agree upon."""
    if not may_grow(run):
        return []
    if (wait := grows_at(run) - at) > 0:
        return [c.SetTimer("grow", wait, run.incarnation)]
    run.state = State.RESIZING
    run.history.begin(at, f"{len(run.roster.lasting())} more workers are ready", "supervisor", len(run.world))
    return [c.StopAtBoundary(run.world)]


def may_grow(run: RunState) -> bool:
    spares = len(run.roster.lasting())
    return len(run.world) < run.rules.max_workers and spares >= run.rules.stages and run.step < run.rules.max_steps


def grows_at(run: RunState) -> float:
    """From when on others may be taken in: right after a loss, but some time after others were."""
    last = run.recoveries[-1] if run.recoveries else None
    if last is None or last.resumed is None or last.lost or last.left or last.world_after <= last.world_before:
        return 0.0
    return last.resumed + PAUSES_APART * (last.resumed - last.detected)


def on_stopped(run: RunState, event: m.Stopped) -> list[c.Command]:
    """Some rank heard a call to stop, so all of them stop: the call of this resize, or a late one of a resize before."""
    if run.abort_reason:
        return stopping.on_stopped(run, event)
    if run.state != State.RESIZING:
        run.history.begin(event.at, "a call to stop came late", "supervisor", len(run.world))
    run.state = State.RESIZING
    return phases.fence(run, event.at) if run.all_answered(event, run.world) else []
