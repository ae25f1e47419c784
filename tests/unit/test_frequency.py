"""Algorithm 1 of CheckFreq, and the feedback that corrects it, against a simulated machine."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytrain_ft.errors import ConfigError
from raytrain_ft.policy.frequency import MOST_OFF, Foresight, Profile, Seen, choose, profile_steps
from raytrain_ft.policy.tuner import Costs, Decision, Tuner

# ---------------------------------------------------------------- Algorithm 1


def profile(copy: float, largest: float) -> Profile:
    """T_i=1, T_w=.1, T_g=.05, T_s=3, m=1, M=10 with M_max=`largest`; in whole bytes of a tenth."""
    free = round((largest - 10) * 10)
    return Profile(iteration=1.0, update=0.1, copy=copy, persist=3.0, device_copy=0.05, size=10, free=free)


@pytest.mark.parametrize(
    ("copy", "largest", "k", "mode", "overhead"),
    [(0.5, 16.0, 4, "cpu", 0.0), (2.0, 16.0, 5, "gpu", 0.05), (2.0, 10.5, 32, "cpu", 1.1)],
)
def test_golden_vectors(copy: float, largest: float, k: int, mode: str, overhead: float) -> None:
    interval = choose(profile(copy, largest), 0.035)
    assert (interval.k, interval.mode) == (k, mode)
    assert interval.overhead == pytest.approx(overhead)


def test_worked_example_of_the_paper() -> None:
    """A checkpoint that costs as much as an iteration, at 5 %: every 20 iterations."""
    interval = choose(Profile(iteration=1.0, update=1.0, copy=1.0, persist=0.0), 0.05)
    assert interval.k == 20


times = st.floats(0, 1000, allow_nan=False)


@given(st.floats(0.001, 100), times, times, times, st.floats(0.001, 0.999), st.one_of(st.none(), st.floats(1, 1e6)))
def test_what_is_promised_holds(
    iteration: float, update: float, copy: float, persist: float, budget: float, failure_s: float | None
) -> None:
    measured = Profile(iteration=iteration, update=min(update, iteration), copy=copy, persist=persist)
    interval = choose(measured, budget, failure_s=failure_s)
    k = interval.k
    assert k >= 1
    assert interval.overhead <= budget * k * iteration * (1 + 1e-6) + 1e-6 * iteration
    assert copy + persist <= k * iteration + interval.overhead + 1e-6 * max(iteration, persist, copy)
    if failure_s is not None:
        assert k * iteration >= math.sqrt(2 * interval.overhead * failure_s) - 1e-6 * k * iteration
    bounds = (interval.k_persist, interval.k_overhead, interval.k_failures, 1)
    assert k == max(bounds), "and no larger than one of the bounds asks for"
    assert choose(measured, min(0.999, budget * 1.5), failure_s=failure_s).k <= k
    assert interval.reason


def test_failure_rate_joins_in() -> None:
    measured = Profile(iteration=1.0, update=0.5, copy=1.5, persist=3.0)
    assert choose(measured, 0.5).k == 4
    rare = choose(measured, 0.5, failure_s=10_000.0)
    assert rare.k == math.ceil(math.sqrt(2 * 1.0 * 10_000)) == 142
    assert "failures are rare" in rare.reason
    assert choose(measured, 0.5, failure_s=1.0).k == 4, "frequent failures do not break the other bounds"


@pytest.mark.parametrize("budget", [0, 1, -0.1, 1.5, float("nan"), "0.1", True, None])
def test_bad_budgets_are_refused(budget: float) -> None:
    with pytest.raises(ConfigError, match="between 0 and 1"):
        choose(profile(0.5, 16.0), budget)


@pytest.mark.parametrize("change", [{"iteration": 0.0}, {"iteration": math.inf}, {"copy": -1.0}, {"persist": -1.0}])
def test_bad_times_are_refused(change: dict[str, float]) -> None:
    values = {"iteration": 1.0, "update": 0.1, "copy": 1.0, "persist": 1.0} | change
    with pytest.raises(ConfigError):
        choose(Profile(**values), 0.05)  # pyright: ignore[reportArgumentType]


def test_steps_to_measure() -> None:
    assert [profile_steps(n) for n in (1, 400, 401, 2_000, 5_000, 10**6)] == [4, 4, 5, 20, 50, 50]


# ---------------------------------------------------------------- a simulated machine


@dataclass
class Machine:
    """One worker with checkpoints in two phases, in simulated time: what `Checkpointer` does, without memory and disks.

    Attributes:
        iteration, update, copy, persist: seconds, as in `Profile`; slowed: how much slower a step is while a persister works.
        look: seconds that it takes in every step to see whether a checkpoint is due; pause: what every 500th step takes longer.
        stuck: what the second step after a checkpoint has begun takes longer.
        broken: no checkpoint becomes durable.
    """

    tuner: Tuner
    iteration: float = 1.0
    update: float = 0.1
    copy: float = 0.5
    persist: float = 3.0
    slowed: float = 0.0
    look: float = 0.0
    pause: float = 0.0
    stuck: float = 0.0
    broken: bool = False
    now: float = 0.0
    step: int = 0
    decisions: list[Decision] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)
    _copied: float = 0.0
    _durable: float = 0.0
    _stall: float = 0.0
    _told: bool = True
    _began: float = 0.0

    def run(self, steps: int) -> float:
        """So many steps; returns the seconds they took."""
        begun = self.now
        for _ in range(steps):
            self._one()
        return self.now - begun

    def _one(self) -> None:
        busy = self.now < self._durable
        until = self.now + (self.iteration - self.update) * (1 + (self.slowed if busy else 0.0))
        self._stall += max(0.0, self._copied - until)
        self.now = max(until, self._copied) + self.update + self.look
        self.step += 1
        self.now += self.pause if self.step % 500 == 0 else 0.0
        self.now += self.stuck if self.taken and self.step == self.taken[-1] + 2 else 0.0
        self._settle()
        seconds, self._began = self.now - self._began, self.now
        if self.step > 1:
            self.tuner.stepped(seconds, self.update, self.look, busy=self.now < self._durable)
        self._note(self.tuner.settle(self.step))
        if self.tuner.due(self.step, busy=self.now < self._durable):
            self._take()

    def _take(self) -> None:
        waited = max(0.0, self._durable - self.now)
        self.now += waited
        self._settle()
        self._note(self.tuner.began(self.step))
        self.tuner.waited(waited)
        self.taken.append(self.step)
        self._copied = self.now + self.copy
        self._durable = self._copied + self.persist
        self._stall, self._told = 0.0, False

    def _settle(self) -> None:
        if not self._told and self.now >= self._durable:
            self._told = True
            if not self.broken:
                self.tuner.persisted(Costs(copy=self.copy, persist=self.persist, stall=self._stall))

    def _note(self, decision: Decision | None) -> None:
        if decision is not None:
            self.decisions.append(decision)


def machine(budget: float = 0.05, **times: float) -> Machine:
    return Machine(Tuner(budget=budget, window=5), **times)  # pyright: ignore[reportArgumentType]


def overhead(simulated: Machine, steps: int, iteration: float = 1.0) -> float:
    return simulated.run(steps) / (steps * iteration) - 1


@pytest.mark.parametrize("look", [0.0, 0.005, 0.02])
def test_to_see_whether_a_checkpoint_is_due_is_part_of_what_they_cost(look: float) -> None:
    simulated = machine(copy=3.0, look=look)
    simulated.run(3000)
    assert overhead(simulated, 3000) == pytest.approx(0.05, abs=0.002)


def test_where_a_look_takes_more_than_the_budget_half_of_that_is_left_to_checkpoints() -> None:
    simulated = machine(copy=3.0, look=0.2)
    simulated.run(3000)
    assert overhead(simulated, 3000) == pytest.approx(0.2 + 0.05 / 2, abs=0.002)


def test_an_evaluation_in_the_midst_of_training_is_not_charged_to_the_checkpoint_beside_it() -> None:
    """Most steps have a checkpoint under way, and an evaluation that takes as long as training is nothing that it costs."""
    simulated = machine(copy=1.9, persist=15.0, pause=500.0)
    simulated.run(20_000)
    undisturbed = machine(copy=1.9, persist=15.0)
    undisturbed.run(20_000)
    assert simulated.tuner.k <= 1.5 * undisturbed.tuner.k


def test_a_pause_that_comes_with_every_checkpoint_is_charged_to_them() -> None:
    """The loop blocks on the disk that the persister writes to, say, and nobody counts that as a wait."""
    simulated = machine(copy=0.1, persist=2.5, stuck=30.0)
    simulated.run(20_000)
    assert simulated.tuner.k > 400
    assert overhead(simulated, 10_000) <= 0.07


def test_a_wait_for_a_checkpoint_is_charged_however_long_it_is() -> None:
    tuner = Tuner(budget=0.05, window=5, k=20, profile=Profile(iteration=1.0, update=0.1, copy=0.5, persist=3.0))
    tuner.persisted(Costs(copy=0.5, persist=3.0, stall=0.0))
    tuner.began(0)
    for number in range(40):
        tuner.stepped(101.0 if number == 5 else 1.0, 0.1, busy=number < 10)
    tuner.persisted(Costs(copy=0.5, persist=103.0, stall=100.0))
    decision = tuner.began(40)
    assert decision is not None
    assert decision.observed == pytest.approx(100.0 / 40)


def test_where_every_step_has_a_checkpoint_under_way_one_is_put_off_now_and_then_to_see_what_a_step_takes() -> None:
    """Steps were slow while they were measured: what checkpoints cost would never be seen, for nobody waits for them."""
    simulated = machine(copy=0.1, persist=0.3, iteration=1.5)
    simulated.run(20)
    assert simulated.tuner.k == 1
    simulated.iteration, simulated.slowed = 1.0, 0.2
    simulated.run(1000)
    assert overhead(simulated, 1000) <= 0.06
    gaps = [b - a for a, b in pairwise(simulated.taken)]
    assert max(gaps[3:]) <= 2 * 5 + 20


def test_steps_that_take_no_time_say_nothing_and_are_checkpointed() -> None:
    """All of them is in what a loop says is no training."""
    tuner, taken = Tuner(budget=0.05, window=5), []
    for step in range(1, 101):
        tuner.stepped(0.0, 0.0, 1e-6, busy=False)
        assert tuner.settle(step) is None
        if tuner.due(step, busy=False):
            taken.append(step)
            tuner.began(step)
            tuner.persisted(Costs(copy=0.1, persist=0.1, stall=0.0))
    assert taken == list(range(10, 101, 10))


def test_nothing_is_written_while_measuring_and_then_the_interval_is_algorithm_1s() -> None:
    simulated = machine()
    simulated.run(100)
    assert simulated.taken[0] == 6, "one step to warm up, and five to measure"
    first = simulated.decisions[0]
    assert first.interval.k == choose(first.profile, 0.05).k == 4
    gaps = [b - a for a, b in pairwise(simulated.taken[1:])]
    assert set(gaps) == {4}
    assert len(simulated.decisions) == 1, "nothing changed, so nothing was decided again"


def test_a_first_checkpoint_that_fails_is_tried_again_later_each_time_until_one_succeeds() -> None:
    """A disk that is full is not made fuller with every step."""
    simulated = machine(copy=0.1, persist=0.2, broken=True)
    simulated.run(1000)
    assert [b - a for a, b in pairwise(simulated.taken[:6])] == [11, 21, 41, 81, 81], "and the step in which one fails"
    simulated.broken = False
    simulated.run(200)
    assert simulated.decisions[0].reason.startswith("profiled")
    assert simulated.taken[-1] - simulated.taken[-2] == simulated.tuner.k == 1


def test_a_first_checkpoint_that_is_broken_off_with_its_world_has_not_failed() -> None:
    simulated = machine()
    simulated.run(7)
    simulated.tuner.disturbed(simulated.step, resized=False)
    simulated._durable, simulated._told = 0.0, True
    simulated.run(10)
    assert simulated.taken[:2] == [6, 13]


@pytest.mark.parametrize("resized", [False, True])
def test_losses_that_come_sooner_than_enough_is_measured_keep_no_checkpoint_away(resized: bool) -> None:
    """Each makes the window begin anew: nothing would be written for days, and the loss of all would cost them."""
    tuner, taken = Tuner(budget=0.035, window=50), []
    for step in range(1, 1001):
        tuner.stepped(0.1, 0.01, busy=False)
        assert tuner.earliest(step - 1) <= step or not tuner.due(step, busy=False)
        if tuner.due(step, busy=False):
            taken.append(step)
            tuner.began(step)  # and it is broken off, too
        if step % 40 == 0:
            tuner.disturbed(step, resized=resized)
    assert taken == list(range(100, 1001, 100))


def test_how_far_training_got_without_a_checkpoint_counts_from_the_one_that_it_resumed_from() -> None:
    tuner = Tuner(budget=0.035, window=50, last=1000)
    tuner.disturbed(1040, resized=False)
    assert not tuner.due(1099, busy=False)
    assert tuner.earliest(1099) == 1100
    assert tuner.due(1100, busy=False)
    assert not tuner.due(1100, busy=True)


@pytest.mark.parametrize(("iteration", "first"), [(0.1, 51), (7.0, 9), (100.0, 5)])
def test_slow_steps_are_not_measured_for_long_before_the_first_checkpoint(iteration: float, first: int) -> None:
    """Who is stopped sooner each time, and is alone, would never get further."""
    simulated = Machine(Tuner(budget=0.05, window=50), iteration=iteration, update=0.01, copy=0.01, persist=0.01)
    assert simulated.tuner.earliest(0, warm_up=1) == 5, "before that, nothing is known of them"
    simulated.run(60)
    assert simulated.taken[0] == first
    assert simulated.decisions[0].step == first + 1


def test_a_resize_while_a_checkpoint_is_told_to_be_durable() -> None:
    """That is two things that another thread notes, one after the other; the resize forgets the first before the second."""
    simulated = machine()
    simulated.run(100)
    tuner = simulated.tuner
    assert tuner.profile is not None
    tuner.disturbed(100, resized=True)
    tuner._stretch.costs.append(Costs(copy=0.5, persist=3.0, stall=0.0))
    simulated.run(100)
    assert simulated.taken[-1] > 100


@pytest.mark.parametrize(("fixed", "recalled"), [(None, 0), (7, 0), (None, 7)])
def test_what_is_measured_while_checkpoints_fail_is_bounded(fixed: int | None, recalled: int) -> None:
    simulated = Machine(Tuner(budget=0.05, window=50, fixed=fixed), copy=0.1, persist=0.2, broken=True)
    simulated.tuner.begin_from({"k": recalled, "profile": TIMES})
    simulated.run(10_000)
    assert simulated.tuner._stretch.steps <= 1_000


def test_what_is_measured_while_nothing_becomes_durable_is_bounded() -> None:
    simulated = machine(persist=math.inf)
    simulated.run(10_000)
    assert len(simulated.taken) == 1
    simulated.tuner.disturbed(simulated.step, resized=False)
    for _ in range(10_000):
        simulated.tuner.stepped(1.0, 0.1, busy=False)
    assert len(simulated.tuner._stretch.free) <= 1_000


def test_a_decision_says_what_was_measured_of_the_device() -> None:
    tuner = Tuner(budget=0.05, window=4)
    for _ in range(4):
        tuner.stepped(1.0, 0.1, busy=False)
    tuner.began(5)
    tuner.persisted(Costs(copy=2.0, persist=3.0, stall=0.0, device_copy=0.05, size=10, free=60))
    decision = tuner.settle(6)
    assert decision is not None
    assert (decision.profile.device_copy, decision.profile.size, decision.profile.free) == (0.05, 10, 60)
    assert decision.interval.mode == "gpu"


def profiled(copy: float) -> Tuner:
    """After a first checkpoint through the device's memory, measured as in the golden vectors, with room for it."""
    tuner = Tuner(budget=0.035, window=4)
    for _ in range(4):
        tuner.stepped(1.0, 0.1, busy=False)
    assert tuner.mode == "gpu", "how long a copy takes there has to be measured"
    tuner.began(5)
    tuner.persisted(Costs(copy=copy, persist=3.0, stall=0.0, device_copy=0.05, size=10, free=60))
    tuner.settle(5)
    return tuner


def judged(tuner: Tuner, costs: Costs) -> Decision | None:
    """After 30 steps of which one waited for the copy of a checkpoint with these costs."""
    tuner.persisted(costs)
    for number in range(30):
        tuner.stepped(1.0 + (costs.stall if number == 0 else 0.0), 0.1, busy=number < 5)
    return tuner.began(tuner.last + 30)


def test_a_device_that_runs_out_of_memory_is_left_when_the_interval_is_looked_at() -> None:
    """From the second golden vector to the third."""
    tuner = profiled(copy=2.0)
    assert (tuner.k, tuner.mode) == (5, "gpu")
    full = Costs(copy=2.0, persist=3.0, stall=1.1, size=10, free=5)
    first = judged(tuner, full)
    assert first is not None
    assert (first.interval.mode, first.profile.free, tuner.mode) == ("cpu", 5, "cpu")
    for _ in range(60):
        judged(tuner, full)
    assert (tuner.k, tuner.mode) == (32, "cpu")


def test_copies_move_to_the_device_when_those_to_the_host_begin_to_be_waited_for() -> None:
    """From the first golden vector, in which a copy to the host is hidden, to a memory that others use as well."""
    tuner = profiled(copy=0.5)
    assert (tuner.k, tuner.mode) == (4, "cpu")
    decision = judged(tuner, Costs(copy=2.0, persist=3.0, stall=1.1, size=10, free=60))
    assert decision is not None
    assert decision.interval.k == tuner.k > 4
    assert (decision.interval.mode, tuner.mode) == ("gpu", "gpu")
    assert decision.profile.device_copy == 0.05, "as it was measured in the beginning"


@pytest.mark.parametrize("budget", [0.02, 0.035, 0.1])
def test_overhead_comes_to_its_budget_where_that_binds(budget: float) -> None:
    simulated = machine(budget, copy=2.0)
    simulated.run(500)
    assert overhead(simulated, 40 * simulated.tuner.k) == pytest.approx(budget, abs=0.005)


@pytest.mark.parametrize("slowed", [0.1, 0.3])
def test_interference_that_algorithm_1_does_not_know_is_met(slowed: float) -> None:
    """The copy is hidden, but the persister slows training down."""
    simulated = machine(0.035, slowed=slowed)
    simulated.run(1_500)
    assert overhead(simulated, 30 * simulated.tuner.k) <= 0.035 + 0.005


def test_contention_raises_k_and_its_end_lowers_it() -> None:
    simulated = machine(0.05, copy=1.5, persist=5.0)
    simulated.run(300)
    before = simulated.tuner.k
    simulated.copy, simulated.persist = 3.0, 15.0  # another job shares the disk and the memory
    simulated.run(2_000)
    during = simulated.tuner.k
    assert during > before
    assert overhead(simulated, 20 * during) <= 0.055
    simulated.copy, simulated.persist = 1.5, 5.0
    simulated.run(6_000)
    assert before <= simulated.tuner.k <= before * 1.15
    assert overhead(simulated, 20 * simulated.tuner.k) <= 0.055


@given(
    st.floats(0.001, 100),
    st.floats(0, 10),
    st.lists(st.tuples(st.floats(0.0, 1000), st.floats(0.01, 1)), min_size=1, max_size=8),
    st.floats(0.01, 0.9),
)
def test_waits_count_and_k_is_no_larger_than_they_ask_for(
    iteration: float, overhead: float, latest: list[tuple[float, float]], budget: float
) -> None:
    measured = Profile(iteration=iteration, update=0.0, copy=0.0, persist=0.0)
    seen = [Seen(*one) for one in latest]

    def cost(k: int) -> float:
        waits = sum(one.weight * max(0.0, one.seconds - k * iteration) for one in seen)
        return (overhead + waits / sum(one.weight for one in seen)) / (k * iteration)

    interval = choose(measured, budget, overhead=overhead, latest=seen)
    assert cost(interval.k) <= budget * (1 + 1e-5)
    if interval.k > 1:
        assert cost(interval.k - 1) > budget * (1 - 1e-5)
        each = [(interval.k - 1, interval.shorter), (interval.k, 1 - interval.shorter)]
        spent, steps = (sum(share * f(k) for k, share in each) for f in (lambda k: cost(k) * k, lambda k: k))
        assert 0 <= interval.shorter < 1
        assert spent <= budget * steps * (1 + 1e-5), "nor do some intervals that are a step shorter"
    assert interval.k >= choose(measured, budget, overhead=overhead).k


def play(seed: int, slow: float, tail: float, **times: float) -> float:
    """Overhead, in per cent, of a long time on a machine whose times vary; one checkpoint in thirty takes much longer."""
    draws, simulated = random.Random(seed), machine(0.035, **times)
    copy, persist = simulated.copy, simulated.persist
    plain = began = 0.0
    for step in range(15_000):
        if step == 3_000:
            plain, began = 0.0, simulated.now
        simulated.iteration = max(0.7, draws.gauss(1, 0.03))
        plain += simulated.iteration
        taken = len(simulated.taken)
        simulated.run(1)
        if len(simulated.taken) > taken:
            unlucky = draws.random() < 1 / 30
            simulated.copy = copy * draws.lognormvariate(0, 0.3) * (slow if unlucky else 1)
            simulated.persist = persist * draws.lognormvariate(0, 0.5) * (tail if unlucky else 1)
    return 100 * ((simulated.now - began) / plain - 1)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("slow", "times"), [(1, {"copy": 2.0}), (8, {"copy": 2.0}), (1, {"slowed": 0.2})])
def test_overhead_comes_to_its_budget_on_a_machine_that_varies(slow: float, times: dict[str, float], seed: int) -> None:
    assert play(seed, slow, 1, **times) == pytest.approx(3.5, abs=0.5)


@pytest.mark.parametrize(("tail", "persist"), [(1, 4.0), (20, 1.0)])
def test_what_is_foreseen_of_waits_is_corrected_by_what_they_were(tail: float, persist: float) -> None:
    """Without that it would be half a point less, and half a point more."""
    assert mean(play(seed, 1, tail, copy=0.1, persist=persist) for seed in range(4)) == pytest.approx(3.5, abs=0.25)


def test_waits_are_foreseen_to_be_as_many_times_longer_as_they_were_of_late() -> None:
    foresight = Foresight()
    foresight.take(30, 60.0)
    assert foresight.off(little=0.0001) == 1.0, "nothing was foreseen yet"
    foresight.next = 0.1
    for _ in range(2000):
        foresight.take(1, 0.2)
    assert foresight.off(little=0.0) == pytest.approx(2.0, rel=0.01)
    assert foresight.off(little=10.0) == pytest.approx(1.0, rel=0.01), "a tenth of a second more is nothing there"
    foresight.take(1, 0.0)
    assert 1.9 < foresight.off(little=0.0) < 2.0
    for _ in range(2000):
        foresight.take(1, 60.0)
    assert foresight.off(little=0.0) == MOST_OFF


@pytest.mark.parametrize(("overhead_s", "k"), [(0.101, 3), (0.15, 5), (0.34, 10)])
def test_a_part_of_a_step_is_not_left_of_the_budget(overhead_s: float, k: int) -> None:
    """Of a k of three, one step is a third of it: on average, intervals are as long as the budget asks for."""
    simulated = machine(0.035, iteration=1.0, copy=0.0, persist=0.1, slowed=overhead_s / 0.9)
    simulated.run(5_000)
    before = len(simulated.taken)
    assert overhead(simulated, 20_000) == pytest.approx(0.035, abs=0.0005)
    gaps = [b - a for a, b in pairwise(simulated.taken[before:])]
    assert set(gaps) == {k - 1, k}


@pytest.mark.parametrize(("seconds", "shorter"), [((6.1, 6.1), 0.0), ((5.6, 6.6), 0.73), ((5.3, 6.9), 0.5), ((6.0, 6.0), 0.0)])
def test_where_persisting_asks_for_a_part_of_a_step_more_the_budget_is_used_up_if_it_binds(
    seconds: tuple[float, float], shorter: float
) -> None:
    """Persisting takes 6.1 steps: 7 are more than it asks for. Only where with 6.1, too, training would wait
    for longer than it may is it the budget that counts."""
    profile = Profile(iteration=1.0, update=0.1, copy=0.0, persist=mean(seconds))
    interval = choose(profile, 0.035, overhead=0.0, latest=[Seen(one) for one in seconds])
    assert interval.k == (7 if mean(seconds) > 6 else 6)
    assert interval.shorter == pytest.approx(shorter, abs=0.01)


@pytest.mark.parametrize("seed", range(3))
def test_waiting_for_the_slowest_checkpoints_stays_within_the_budget(seed: int) -> None:
    """The mean of what persisting takes would have a checkpoint taken after every step."""
    assert play(seed, 1, 20, copy=0.1, persist=0.3) <= 4.0


def test_steps_that_were_measured_while_they_were_slow_do_not_count_for_ever() -> None:
    """With the k that comes of them a checkpoint is under way in every step, so that none says what one takes by itself."""
    simulated = Machine(Tuner(budget=0.035, window=4), iteration=0.15, update=0.01, copy=0.05, persist=3.0)
    simulated.run(6)
    simulated.iteration = 0.1
    simulated.run(120)
    assert [decision.interval.k for decision in simulated.decisions] == [21, 31]
    assert overhead(simulated, 310, 0.1) <= 0.035, "and not 0.45: of 21 steps, for the checkpoint of 31"
    assert simulated.tuner.profile is not None
    assert simulated.tuner.profile.iteration == pytest.approx(0.1), "which a later run begins with"


def budget_binds() -> Machine:
    """Of the 60 steps from one checkpoint to the next, half have none under way."""
    simulated = Machine(Tuner(budget=0.01, window=4), iteration=0.1, update=0.01, copy=0.15, persist=3.0)
    simulated.run(600)
    assert simulated.tuner.k == 60
    return simulated


def test_a_pause_between_checkpoints_says_nothing_of_steps() -> None:
    simulated = budget_binds()
    simulated.run(simulated.taken[-1] + 50 - simulated.step)
    simulated.iteration = 60.0
    simulated.run(1)
    simulated.iteration = 0.1
    assert overhead(simulated, 600, 0.1) <= 0.011
    assert 55 <= simulated.tuner.k <= 60


@pytest.mark.parametrize("steps", [300, 2000])
def test_a_slow_stretch_is_made_good_once_it_is_over(steps: int) -> None:
    """In which k comes down so far that no step is free any more; however many slow ones were."""
    simulated = budget_binds()
    simulated.iteration = 2.0
    simulated.run(steps)
    assert simulated.tuner.k <= 5
    simulated.iteration = 0.1
    simulated.run(150)
    assert overhead(simulated, 600, 0.1) <= 0.02


def test_steps_that_vary_are_waited_beside_for_as_long_as_the_budget_allows() -> None:
    """The few that are free now and then may have been slow ones; nor do all the others wear down what a step takes."""
    found = []
    for seed in range(4):
        draws, simulated, plain = random.Random(seed), machine(0.035, copy=0.5, persist=6.4), 0.0
        for _ in range(10_000):
            simulated.iteration = max(0.3, draws.gauss(1, 0.4))
            simulated.run(1)
            plain += simulated.iteration
        found.append(simulated.now / plain - 1)
        assert len(simulated.taken) >= 10_000 / 9, "each takes seven steps"
    assert mean(found) == pytest.approx(0.035, abs=0.005)
    assert max(found) <= 0.04


@settings(max_examples=60)
@given(st.lists(st.tuples(st.floats(0.0, 4.0), st.floats(0.0, 20.0)), min_size=2, max_size=6), st.floats(0.02, 0.3))
def test_never_lowered_right_after_a_raise(loads: list[tuple[float, float]], budget: float) -> None:
    simulated = machine(budget)
    for copy, persist in loads:
        simulated.copy, simulated.persist = copy, persist
        simulated.run(300)
    changes = [(decision.step, decision.interval.k, decision.reason) for decision in simulated.decisions]
    for (step, _, reason), (later, _, then) in pairwise(changes):
        if reason.startswith("raised") and then.startswith("lowered"):
            between = [taken for taken in simulated.taken if step < taken <= later]
            assert len(between) >= 2, "two intervals in a row must say so"
    for before, after in pairwise(simulated.taken):
        assert after > before


def test_what_checkpoints_cost_a_world_of_another_size_is_forgotten() -> None:
    """Four workers write a quarter each of what one wrote alone."""
    machine = Machine(Tuner(budget=0.035, window=4), persist=30.0)
    machine.run(2000)
    assert machine.tuner.k == pytest.approx(31, abs=2)
    machine.persist = 7.5
    machine.tuner.disturbed(machine.step, resized=True)
    machine.run(150)
    assert machine.tuner.k <= 10


def test_a_fixed_interval_is_taken_as_it_is() -> None:
    simulated = Machine(Tuner(budget=0.05, window=5, fixed=7))
    simulated.run(50)
    assert simulated.taken == [7, 14, 21, 28, 35, 42, 49]
    assert simulated.decisions == []
    decision = simulated.tuner.known(50)
    assert decision is not None
    assert (decision.step, decision.interval.k, decision.profile) == (50, 7, None), "nothing that it comes of was measured"
    assert decision.reason.startswith("fixed")


def test_a_profile_is_taken_over() -> None:
    simulated = machine(copy=2.0)
    simulated.run(500)
    again = Machine(Tuner(budget=0.05, window=5))
    assert again.tuner.known(0) is None, "nothing is known yet"
    assert again.tuner.begin_from(simulated.tuner.to_json())
    assert again.tuner.k == simulated.tuner.k
    decision = again.tuner.known(500)
    assert decision is not None
    assert (decision.interval.k, decision.profile) == (simulated.tuner.k, simulated.tuner.profile)
    assert decision.interval.k_overhead == choose(simulated.tuner.profile, 0.05).k_overhead
    assert decision.reason.startswith("recalled")
    again.copy = 2.0
    again.run(again.tuner.k + 1)
    assert len(again.taken) == 1, "nothing is measured again"


@pytest.mark.parametrize("copy", [0.5, 2.0])
def test_where_copies_go_is_taken_over_with_the_profile(copy: float) -> None:
    tuner, again = profiled(copy), Tuner(budget=0.035, window=4)
    assert again.begin_from(json.loads(json.dumps(tuner.to_json(), allow_nan=False)))
    assert (again.k, again.mode) == (tuner.k, tuner.mode)
    assert again.profile is not None
    assert (again.profile.device_copy, again.profile.size, again.profile.free) == (0.05, 10, 60)
    for _ in range(2):  # the first time up to fourfold
        judged(again, Costs(copy=2.0, persist=3.0, stall=1.1, size=10, free=60))
    assert (again.k, again.mode) == (32, "gpu")


def test_after_one_checkpoint_that_takes_minutes_others_follow_soon() -> None:
    """It may be among the first, where one counts much: a run of hours would write none any more."""
    simulated = machine(copy=0.1)
    simulated.run(30)
    before = simulated.tuner.k
    simulated.persist = 900.0
    simulated.run(before)
    simulated.persist = 3.0
    slow = len(simulated.taken)
    simulated.run(1000)
    gaps = [b - a for a, b in pairwise(simulated.taken[slow:])]
    assert gaps[0] <= 4 * before
    assert all(after <= 4 * gap for gap, after in pairwise(gaps))
    assert len(gaps) >= 4


TIMES = {"iteration": 1.0, "update": 0.1, "copy": 0.5, "persist": 3.0}


@pytest.mark.parametrize(
    "stored",
    [
        {},
        {"k": 0},
        {"k": 3, "profile": {}},
        {"k": "x", "profile": None},
        {"k": 2, "profile": 3},
        {"k": 3, "profile": TIMES, "mode": "tape"},
        {"k": math.inf, "profile": TIMES},
        {"k": 3, "profile": TIMES | {"iteration": 0.0}},
        {"k": 3, "profile": TIMES | {"iteration": 5e-324}},
        {"k": 3, "profile": TIMES | {"update": math.nan}},
        {"k": 3, "profile": TIMES | {"copy": -1.0}},
        {"k": 3, "profile": TIMES | {"persist": math.inf}},
        {"k": 3, "profile": TIMES | {"size": "x"}},
    ],
)
def test_a_foreign_profile_is_left_alone(stored: dict[str, object]) -> None:
    tuner = Tuner(budget=0.05, window=5)
    assert not tuner.begin_from(stored)
    assert tuner.k == 0


def recalled(k: int, **changed: float) -> Machine:
    """A launch that begins with this k, and a profile in which only this is changed."""
    simulated = Machine(Tuner(budget=0.05, window=5))
    assert simulated.tuner.begin_from({"k": k, "profile": TIMES | changed})
    return simulated


def test_a_launch_that_is_stopped_sooner_than_k_steps_gets_further() -> None:
    simulated = recalled(16)
    simulated.run(40)
    assert simulated.taken[:3] == [6, 22, 38], "the first as soon as one that measures has its own"


@pytest.mark.parametrize("changed", [{}, {"iteration": 1e-6}, {"persist": 1e9}])
def test_a_recalled_interval_beyond_reason_is_not_waited_for(changed: dict[str, float]) -> None:
    """Whatever stands in a file: after the first checkpoint it is compared with what was measured now."""
    simulated = recalled(10**12, **changed)
    simulated.run(100)
    assert choose(Profile(**TIMES), 0.05).k == 4  # pyright: ignore[reportArgumentType]
    assert simulated.tuner.k <= 4 * 4
    assert len(simulated.taken) > 5


def test_a_recalled_interval_that_first_fails_is_tried_again_later_each_time() -> None:
    simulated = recalled(16)
    simulated.broken, simulated.persist = True, 0.1
    simulated.run(100)
    assert [b - a for a, b in pairwise(simulated.taken)][:3] == [11, 16, 16], "but no later than is known to be affordable"


def test_an_interval_of_a_world_of_another_size_is_looked_at_with_its_first_checkpoint() -> None:
    simulated = machine(persist=200.0)
    simulated.run(2000)
    assert simulated.tuner.k == 201
    simulated.persist = 3.0
    simulated.tuner.disturbed(simulated.step, resized=True)
    simulated.run(50)
    assert simulated.tuner.k <= 16


@pytest.mark.parametrize("simulated", [machine(copy=1.5), recalled(16), recalled(2)])
def test_rank_0_speaks_in_time(simulated: Machine) -> None:
    """What other ranks rely on: between the steps at which rank 0 speaks, hardly a checkpoint becomes due."""
    tuner = simulated.tuner
    speaks, delays = tuner.earliest(1), []
    for _ in range(400):
        taken = len(simulated.taken)
        simulated.run(1)
        if len(simulated.taken) > taken:
            delays.append(speaks - simulated.step)
        if simulated.step >= speaks:
            speaks = tuner.earliest(simulated.step)
            assert simulated.step < speaks <= simulated.step + max(tuner.k, tuner.window)
    assert max(delays) <= 1
