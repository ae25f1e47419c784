"""What the supervisor's machine asks for. Frozen data, nothing else; `messages` has what it is told."""

from __future__ import annotations

from dataclasses import dataclass

from raytrain_ft.policy.reconcile import Copy, Plan


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start a worker that becomes a spare when it is ready. `anywhere`: also on a node that is said to go, if no other has
    room."""

    member: str
    anywhere: bool = False


@dataclass(frozen=True, slots=True)
class Fence:
    """End all earlier incarnations on these members; each answers with Fenced."""

    members: tuple[str, ...]
    incarnation: int


@dataclass(frozen=True, slots=True)
class Forsake:
    """These compute on for their own gradients, and nobody can use what they compute, unless it is of step `worth`: they leave
    it, and answer the fence of this incarnation."""

    members: tuple[str, ...]
    incarnation: int
    worth: int | None


@dataclass(frozen=True, slots=True)
class Reconcile:
    """All of `world` (in rank order) join the group of this incarnation; `holders` carry out `plan`, whatever others hold is
    void. Without a plan nobody holds the state: all load the checkpoint `load`, or begin anew if there is none.

    Attributes:
        logged: the boundaries between stages that are logged from now on, each named by the stage before it.
        since: the incarnation from which on the log counts: everybody's begins anew with it.
    """

    world: tuple[str, ...]
    incarnation: int
    plan: Plan | None
    load: str = ""
    holders: tuple[str, ...] = ()
    logged: tuple[int, ...] = ()
    since: int = 0


@dataclass(frozen=True, slots=True)
class FindCheckpoints:
    """Look for checkpoints in storage: it knows better than the events, which a lost worker could not send."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class Fill:
    """Copy state, bucket by bucket.

    Attributes:
        members: who takes part.
        whole: who receives everything, the step number and the schedules too, and from whom.
        handed: the same from members that leave and are not of `world` any more.
    """

    world: tuple[str, ...]
    incarnation: int
    members: tuple[str, ...]
    copies: tuple[Copy, ...]
    whole: tuple[tuple[str, str], ...]
    handed: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Replay:
    """Load a checkpoint (without one, begin anew) and compute again from the log what was committed since then.

    Attributes:
        teams: who does this: each who hosts one of `stages`, followed by those who help it with its micro-batches.
        load: the checkpoint.
        until: the number of steps that are committed afterwards.
        since: the incarnation from which on what was logged counts.
        exact: whether what is computed must be what was logged before, to the bit.
        nodes: of the members of `world`, in their order.
    """

    world: tuple[str, ...]
    incarnation: int
    teams: tuple[tuple[str, ...], ...]
    stages: tuple[int, ...]
    load: str
    until: int
    since: int
    exact: bool
    nodes: tuple[str, ...] = ()

    def team_of(self, member: str) -> tuple[str, ...]:
        """Whom this member replays a stage with, itself included; the first of them hosts it."""
        return next(team for team in self.teams if member in team)

    def helpers_beside(self, member: str) -> int:
        """How many helpers are on the node of this one, itself included: they need memory at the same time."""
        node = dict(zip(self.world, self.nodes, strict=False))
        return sum(node.get(helper) == node.get(member) for team in self.teams for helper in team[1:])


@dataclass(frozen=True, slots=True)
class Trim:
    """A checkpoint of this step is durable: what was logged before it, since this incarnation, is not needed any more."""

    members: tuple[str, ...]
    step: int
    since: int


@dataclass(frozen=True, slots=True)
class LogOnly:
    """Of the boundaries that are logged, these are enough from now on, each named by the stage before it.

    Attributes:
        groups: of stages, between which they are. seconds: of each stage per step, by which they were chosen.
        reason: in words.
    """

    members: tuple[str, ...]
    incarnation: int
    boundaries: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    seconds: tuple[float, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Run:
    """Go on training.

    Attributes:
        failure_s: mean time between failures so far, seconds, if that is to be regarded.
        rejected: checkpoints that are damaged, or of a training that was given up: they are nothing to fall back to.
        unread: those that could not be read, and may be whole.
        rounded: since a checkpoint of an earlier step than this, a stage was replayed with sums in another order: what follows
            is not, to the bit, what was logged of it before.
    """

    world: tuple[str, ...]
    incarnation: int
    failure_s: float | None = None
    rejected: tuple[str, ...] = ()
    rounded: int = 0
    unread: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StopAtBoundary:
    """Ask for a stop at a step boundary that all ranks agree upon; each answers with Stopped."""

    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Secure:
    """Ask for a checkpoint at the next step boundary that all ranks agree upon, and go on."""

    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sleep:
    """These replicas sleep from the next step on, or take part again."""

    members: tuple[str, ...]
    asleep: bool


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """These, who have stopped at a boundary, take a checkpoint of it and wait for that; each answers with Checkpointed."""

    members: tuple[str, ...]
    incarnation: int


@dataclass(frozen=True, slots=True)
class Save:
    """These write the final state, each that of its stage: all stages that nobody has written yet.

    Attributes:
        world: in rank order, which tells their stages.
    """

    members: tuple[str, ...]
    world: tuple[str, ...]
    incarnation: int


@dataclass(frozen=True, slots=True)
class Kill:
    """Make sure that this worker is gone. `avoid`: for some time, start others where it was only if no other node
    has room."""

    member: str
    avoid: bool = False


@dataclass(frozen=True, slots=True)
class Watch:
    """Watch this worker again, after the supervisor's own restart. `node`: where it is, if it had become ready."""

    member: str
    node: str = ""


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Tell me when this much time has passed. Without an incarnation, it is a deadline of the run."""

    timer: str
    seconds: float
    incarnation: int | None


@dataclass(frozen=True, slots=True)
class End:
    """The run is over; nothing more will be asked for."""


Command = (
    StartWorker
    | Fence
    | Forsake
    | FindCheckpoints
    | Reconcile
    | Fill
    | Replay
    | Trim
    | LogOnly
    | Run
    | StopAtBoundary
    | Secure
    | Sleep
    | Checkpoint
    | Save
    | Kill
    | Watch
    | SetTimer
    | End
)
