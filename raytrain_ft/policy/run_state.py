"""The state of one run: everything that the supervisor's decisions depend on. Plain data, which the events fold into."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from raytrain_ft.policy import commands as c
from raytrain_ft.policy import messages as m
from raytrain_ft.policy.lineage import Return, stands
from raytrain_ft.policy.log_cover import LogCover
from raytrain_ft.policy.reconcile import Marks, Plan
from raytrain_ft.policy.roster import Leave, MemberState, Roster, Rules
from raytrain_ft.policy.states import ENDED, TRAINING, State
from raytrain_ft.policy.strategy import Recoveries, Recovery
from raytrain_ft.policy.topology import Groups, members_of

MOST_REASONS = 4
"""Checkpoints that could not be loaded of which an error says why: the newest, since there may be one of every epoch."""
BELATED = "when it was stored, everybody had gone back to before it"
PATIENCE = 3
"""Times the longest one so far that a step, a replayed step, or building a model may take."""
MOST_HELPED = 2
"""Replays of a recovery in which survivors help: if one of them is lost, another takes its place, once. What a helper needs may
be what brings it down, and one worker alone goes on where it stood."""


@dataclass(slots=True)
class RunState:
    """The state of one run. Two that took in the same events are equal.

    Attributes:
        state: where the run stands.
        incarnation: the number of the present world; 0 before the first.
        world: who trains, in rank order; during a recovery, who trained before it.
        joining: the world of this incarnation; empty until it is told to join.
        newcomers: who was to train for the first time beside others who had trained before, until a step is committed.
        seated: the world that came together last, whether or not it came to train.
        survivors: who holds state in this incarnation, and where it stood when it was fenced.
        replaying: stages that nobody holds, or that go back with such a one: they are replayed.
        source: the checkpoint that they replay from.
        log: what is logged of what crosses between stages, and how far back that reaches.
        groups: of stages, if only what crosses between them is logged; () while that is not decided, and if all is.
        timed: of who trains now, seconds of a step's passes.
        plan: what the survivors do to become consistent; None if nobody holds state.
        stored: checkpoints to go back to, newest first.
        persist_s: how long the last one was written, seconds. unstored: how many since then could not be written; unstored_at:
            incarnation and step of the latest of all that could not.
        load: the checkpoint that everybody loads if nobody holds state; None: the run begins anew.
        seeking: whether nobody holds state, and it is being looked what there is to load.
        void: who holds what is no use any more, for it has not joined another world since: everybody has gone back from it,
            there was no seat for its holder, or it is not what its holder was sent.
        rejected: checkpoints that could not be loaded, and why; unread: those of them that may be whole.
        going_back: why what the survivors hold is to be given up for a checkpoint; empty if it is not.
        spoilt: the step that begins with what is perhaps not finite, while everybody goes back because of that.
        rolled_back: steps whose loss was not finite, and that were therefore tried again from a checkpoint.
        leaving: members whose node will be taken away, and when.
        dozing: members that were told to sleep until they leave.
        secured: the incarnation, and the deadline before which a checkpoint was asked for in it because nobody could stay.
        givers: per stage, who hands over what nobody else holds.
        answers: to what was asked last.
        history: every recovery and planned resize so far.
        fruitless: recoveries in a row that neither completed a step nor led to one.
        help_left: in how many replays survivors may still help until a step is committed.
        slow_replays: replays that were too slow since a step was committed.
        unsaved: how often a stage was lost at the end of the run before its final state was saved.
        step: steps that somebody is known to have committed.
        returns: when everybody went back to a checkpoint or the beginning, in this run or an earlier one of its name.
        longest_step, long_step: the longest step for a long time, and of late, seconds. What happened once, as a stall of
            storage, is no measure for ever.
        longest_build: the longest time that a worker took to build its model, seconds.
        abort_reason: why the run is to end before its time, once somebody has asked for that.
        failure: (error class name, message) once ERRORED or ABORTED.
        result: what is to be told of a finished run.
        warnings: what whoever follows the run is to be told, each once.
        story: the last events, for the message of an error.
    """

    rules: Rules
    roster: Roster = field(init=False)
    state: State = State.INITIALIZING
    incarnation: int = 0
    world: tuple[str, ...] = ()
    joining: tuple[str, ...] = ()
    newcomers: frozenset[str] = frozenset()
    seated: tuple[str, ...] = ()
    survivors: dict[str, Marks] = field(default_factory=dict)
    replaying: frozenset[int] = frozenset()
    source: m.Stored | None = None
    log: LogCover = field(default_factory=LogCover)
    groups: Groups = ()
    timed: dict[str, float] = field(default_factory=dict)
    plan: Plan | None = None
    stored: list[m.Stored] = field(default_factory=list)
    persist_s: float = 0.0
    unstored: int = 0
    unstored_at: tuple[int, int] = (0, 0)
    load: m.Stored | None = None
    seeking: bool = False
    going_back: str = ""
    spoilt: int | None = None
    void: set[str] = field(default_factory=set)
    rejected: dict[str, str] = field(default_factory=dict)
    unread: set[str] = field(default_factory=set)
    rolled_back: set[int] = field(default_factory=set)
    leaving: dict[str, Leave] = field(default_factory=dict)
    dozing: set[str] = field(default_factory=set)
    secured: tuple[int, float] | None = None
    givers: dict[int, str] = field(default_factory=dict)
    answers: dict[str, m.Event] = field(default_factory=dict)
    history: Recoveries = field(default_factory=Recoveries)
    fruitless: int = 0
    help_left: int = MOST_HELPED
    slow_replays: int = 0
    unsaved: int = 0
    step: int = 0
    returns: list[Return] = field(default_factory=list)
    longest_step: float = 0.0
    long_step: float = 0.0
    longest_build: float = 0.0
    abort_reason: str = ""
    failure: tuple[str, str] | None = None
    result: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    story: deque[str] = field(default_factory=lambda: deque(maxlen=40))

    def __post_init__(self) -> None:
        self.roster = Roster(self.rules)

    @property
    def members(self) -> dict[str, MemberState]:
        """Every live member and what it is to the run."""
        return self.roster.members

    @property
    def recoveries(self) -> list[Recovery]:
        """Every recovery and planned resize so far, the last one perhaps still under way."""
        return self.history.all

    @property
    def wanted(self) -> int:
        """As many as trained last, if they still may be."""
        return min(len(self.world) or self.rules.max_workers, self.rules.max_workers)

    def all_answered(
        self, event: m.Fenced | m.Reconciled | m.Filled | m.Stopped | m.Completed | m.Saved, asked: Iterable[str]
    ) -> bool:
        """Takes an answer in; whether everybody who was asked has answered now."""
        self.answers[event.member] = event
        return all(member in self.answers for member in asked)

    def holders(self) -> list[str]:
        """Who is known to hold training state now. What a sleeper holds may be old."""
        if self.state in TRAINING:
            return [member for member in self.world if member in self.members and member not in self.history.sleepers]
        return [member for member in self.survivors if member in self.members]

    def casualties(self) -> list[str]:
        """Who of those that went on training last is lost since; who had notice and left is not."""
        gone = [member for member in self.world if member not in self.members]
        return [member for member in gone if member not in self.recoveries[-1].left]

    @property
    def counts_from(self) -> int:
        """The incarnation from which on steps count: everybody went back from what was committed before."""
        return self.returns[-1].incarnation if self.returns else 0

    def standing(self, found: Iterable[m.Stored]) -> list[m.Stored]:
        """The checkpoints among those found that are of the training that goes on. Others are rejected: they are nothing to
        fall back to either, so none is deleted for their sake."""
        standing = []
        for one in found:
            if stands(one.incarnation, one.step, self.returns):
                standing.append(one)
            else:
                self.rejected[one.name] = BELATED
        return standing

    @property
    def newest(self) -> m.Stored | None:
        """The newest checkpoint that nobody has rejected."""
        return next((stored for stored in self.stored if stored.name not in self.rejected), None)

    def begin_from_stored(self) -> list[c.Command]:
        """The next world begins from the newest checkpoint that nobody has rejected; if none was ever stored, from the
        beginning. If some are and all were rejected, the run ends: perhaps it is the storage that fails, and what a new
        beginning stores would in time take the place of checkpoints that are whole."""
        self.load = self.newest
        if self.stored and self.load is None:
            reasons = "; ".join(f"{one.name}: {self.rejected[one.name]}" for one in self.stored[:MOST_REASONS])
            return self.fail(
                "NoCheckpointError",
                f"none of the {len(self.stored)} checkpoints can be loaded ({reasons}). If the storage failed, run it again "
                'under the same name; if they are damaged, begin anew with CheckpointConfig(resume="never")',
            )
        self.step = self.load.step if self.load is not None else 0
        return []

    def savers(self) -> tuple[str, ...]:
        """Who writes the final state: of each stage, the lowest rank that is left, or that wrote it before it was lost."""
        saved = {member for member, answer in self.answers.items() if isinstance(answer, m.Saved)}
        stages = [members_of(self.world, stage, self.rules.stages) for stage in range(self.rules.stages)]
        able = [[member for member in members if member in self.members or member in saved] for members in stages]
        return tuple(members[0] for members in able if members)

    def may_go_back(self) -> bool:
        """Whether everybody may be taken back to a checkpoint, if there is one."""
        return self.rules.checkpoints and self.rules.strategy != "replication"

    def give_up(self, members: Iterable[str]) -> None:
        """What these hold is no use: they are spares. They hold it until they join another world, and may be asked before."""
        for member in members:
            del self.survivors[member]
            self.members[member] = MemberState.SPARE
            self.void.add(member)

    def provision(self) -> list[c.Command]:
        """Starts the workers that are missing, as far as there is room.

        Not while a world comes together that does without them: on a busy machine, a new worker's imports would hold it up, and
        its first step starts them anyway.
        """
        if self.state in ENDED | {State.STOPPING, State.SHUTTING_DOWN, State.FENCE, State.REBUILD, State.RESUME}:
            return []
        if self.state == State.REPLACE and self.joining:
            return []
        return self.roster.provision()

    def why_not_fewer(self) -> str:
        """Why the run cannot have a worker less from now on; empty if it can."""
        least, most, stages = self.rules.min_workers, self._lasting(), self.rules.stages
        if stages > 1:
            return f"it hosts one of {stages} stages, which the others need"
        return f"num_workers asks for at least {least}, and there are no more than {most}" if most <= least else ""

    def _lasting(self) -> int:
        """How many workers it would have from now on, if nobody else left for good and nobody joined."""
        most = self.rules.max_workers
        return min(most, len(self.world) - sum(self.leaves_for_good(member) for member in self.world)) if self.world else most

    def leaves_for_good(self, member: str) -> bool:
        """Whether this member was told to leave, and nobody is to take its place."""
        return member in self.leaving and self.leaving[member].fewer > 0

    def one_less(self) -> int:
        """From now on the run may have one worker less than it has; returns by how many less that is than it might have had."""
        fewer = self.rules.max_workers - self._lasting() + 1
        self.limit(-fewer)
        return fewer

    def limit(self, change: int) -> None:
        """The run may have so many workers more, or less, than before."""
        self.rules = self.roster.rules = replace(self.rules, max_workers=self.rules.max_workers + change)

    def lacking(self) -> int:
        """How many workers there is no room for."""
        return 0 if self.state in ENDED | {State.STOPPING, State.SHUTTING_DOWN} else self.roster.lacking()

    def warn(self, words: str) -> None:
        """Tells whoever follows the run, unless that was told before."""
        if words not in self.warnings:
            self.warnings.append(words)

    def fail(self, kind: str, message: str) -> list[c.Command]:
        """The run ends with this error."""
        self.failure = (kind, message)
        return self.end(State.ERRORED)

    def abort(self) -> list[c.Command]:
        """The run ends because somebody asked for it."""
        stays = self.newest if self.rules.leaves_checkpoint else None  # snapshots in memory go with the run
        words = "" if stays is None else f"; its newest checkpoint is {stays.name}"
        self.failure = ("AbortedError", f"{self.abort_reason}{words}")
        return self.end(State.ABORTED)

    def end(self, state: State) -> list[c.Command]:
        """The run ends, and with it its workers."""
        self.state = state
        return [*(c.Kill(member) for member in self.members), c.End()]
