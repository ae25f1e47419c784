"""The page about the study says what docs/study.json, which the command measured, comes to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from benchmarks.pages import table
from benchmarks.study_page import IMAGES, PAGE, TABLES, results, shown, slowdown
from raytrain_ft.study import Cut, Outcome, estimate, run, summarize
from raytrain_ft.study.cuts import backward_order, layers_of
from raytrain_ft.study.models import MODELS, data
from raytrain_ft.study.protocol import epoch_of
from raytrain_ft.study.summary import (
    Count,
    Summary,
    count,
    farther_with_cuts,
    lower_loss,
    nearer_than_rollback,
    nearer_with_cuts,
    nearer_with_survivors,
    over_points,
)

MEASURED = results()
OUTCOMES = MEASURED.outcomes
SUMMARIES = summarize(OUTCOMES)
CUT = [one for one in SUMMARIES if one.arm.cut]
RESNET, NT3 = MEASURED.plan.models


def page() -> str:
    """Without its line breaks."""
    return " ".join(PAGE.read_text().split())


def says(*words: str) -> None:
    text = page()
    missing = [each for each in words if each not in text]
    assert not missing, f"docs/study.md does not say {missing}"


def some(model: str = "", step: int | None = None, kind: str = "", cut: str = "") -> list[Outcome]:
    return [
        one
        for one in OUTCOMES
        if model in ("", one.model) and step in (None, one.step) and kind in ("", one.arm.kind) and cut in ("", one.arm.cut)
    ]


def rivals(outcomes: Iterable[Outcome], left: int) -> Count:
    """Of lossy forward with so many survivors and rollback."""
    return nearer_than_rollback(one for one in outcomes if one.arm.survivors in (0, left))


def only(known: Iterable[Summary]) -> list[str]:
    """What they are, in the order in which they came."""
    return [f"{one.model} {one.step}: {one.arm.label}" for one in known]


def points(value: Summary) -> str:
    return shown(value.accuracy_off, "+.1f", 100)


def test_all_that_the_plan_asks_for_was_measured() -> None:
    plan = MEASURED.plan
    assert len(OUTCOMES) + len(MEASURED.contrasts) == plan.count
    for what in plan.models:
        mine = some(what.model)
        assert {one.step for one in mine} == set(what.at)
        assert {one.arm.cut for one in mine} == {"", *(cut.label for cut in what.cuts)}
    assert {one.seed for one in OUTCOMES} == set(range(plan.seeds))
    assert {one.optimizer for one in MEASURED.contrasts} == set(plan.optimizers)
    assert {path.name for path in IMAGES.glob("study-*.png")} == {"study-training.png", "study-resnet.png", "study-nt3.png"}
    says(f"Everything is repeated with {plan.seeds} seeds", f"After {plan.after} more undisturbed mini-batches")


@pytest.mark.long  # another kind of CPU may have other bits, and they grow
def test_the_present_code_measures_the_same() -> None:
    """As far as a few seconds can tell: early, of the model whose trainings do not drift apart between machines that soon."""
    early = replace(MEASURED.plan, models=(replace(NT3, at=NT3.at[:1]),), seeds=1, after=0, optimizers=())
    now = run(early).outcomes
    then = [one for one in some("nt3", NT3.at[0]) if one.seed == 0]
    assert [one.arm for one in now] == [one.arm for one in then]
    for name in ("of_a_step", "loss", "distance"):
        assert [getattr(one, name) for one in now] == pytest.approx([getattr(one, name) for one in then], rel=0.02, abs=1e-4)


@pytest.mark.parametrize("name", list(TABLES))
def test_tables_are_of_the_code(name: str) -> None:
    assert table(PAGE, name) == TABLES[name](MEASURED)


def test_models_are_as_described() -> None:
    sizes, shares = [], []
    for model in (RESNET.model, NT3.model):
        built = MODELS[model]()
        numbers = [p.numel() for p in built.parameters()]
        sizes.append(f"{len(layers_of(built))}, {len(backward_order(built))}, {sum(numbers):,}")
        shares.append(f"{max(numbers) / sum(numbers):.0%}".replace("%", " %"))
    at = [", ".join(map(str, what.at)) for what in (RESNET, NT3)]
    epochs = [f"epochs {epoch_of(what, what.at[0])[0]} to {epoch_of(what, what.at[-1])[0]}" for what in (RESNET, NT3)]
    says(
        f"| layers with parameters, tensors, parameters | {sizes[0]} | {sizes[1]} |",
        f"| the largest tensor's share | {shares[0]} | {shares[1]} (NT3",
        f"| batch, over {MEASURED.plan.workers} workers | {RESNET.batch} | {NT3.batch} |",
        f"| plain SGD, learning rate | {RESNET.lr:g} | {NT3.lr:g} |",
        f"| mini-batches at which it is cut | {at[0]} ({epochs[0]}) | {at[1]} ({epochs[1]}) |",
        f"accuracy on {len(data('nt3').held_out_labels)} held-out samples",
    )
    again = [epoch_of(what, step)[1] + 1 for what in (RESNET, NT3) for step in what.at]
    says(f"compute {min(again)} to {max(again)} mini-batches again", f"{min(again)} to {max(again)} mini-batches against 1")
    assert [Cut(bytes=share).done(MODELS["nt3"]()) for share in (0.25, 0.5, 0.75)] == [6, 6, 6]
    twice = next(one.updated_twice for one in some("nt3", kind="rollback", cut="75%"))
    says(f"{twice / sum(p.numel() for p in MODELS['nt3']().parameters()):.1%} of the parameters twice".replace("%", " %"))


def test_distances_of_weights() -> None:
    halves = [rivals(some("resnet", cut=cut), 3) for cut in ("50%", "75%")]
    alone = rivals(some("resnet"), 1)
    says(
        f"in {sum(one.held for one in halves)} of {sum(one.cases for one in halves)} cases of the residual network",
        f"rollback was nearer in {alone.cases - alone.held} of {alone.cases}.",
        f"grew from each cut to the next in {farther_with_cuts(some('resnet')).held}, of "
        f"{farther_with_cuts(some('nt3')).cases} of `nt3` in {farther_with_cuts(some('nt3')).held}.",
        f"Of {farther_with_cuts(some('resnet')).cases} trainings and points",
        f"(nearer than rollback in {nearer_than_rollback(some('nt3', cut='75%'))})",
    )
    early = [[one for one in some("resnet", cut="25%") if one.arm.survivors == left] for left in (1, 2, 3)]
    one, *others = [over_points(each, lambda o: o.of_a_step).mean for each in early]
    noise = [math.sqrt(1 / left - 1 / 4) for left in (1, 2, 3)]
    says(
        f"so 1 : {noise[1] / noise[0]:.2f} : {noise[2] / noise[0]:.2f} for",
        f"it is 1 : {others[0] / one:.2f} : {others[1] / one:.2f}.",
    )


def test_what_the_arms_take() -> None:
    """Over models and cuts, from the least to the most."""
    ranges = {}
    for kind in ("lossy", "rollback"):
        means = [slowdown(MEASURED, what.model, kind, cut.label).mean for what in (RESNET, NT3) for cut in what.cuts]
        ranges[kind] = f"{min(means):.2f} to {max(means):.2f}"
    says(
        f"A lossy mini-batch takes {ranges['lossy']} of Baseline's time, a rolled-back one {ranges['rollback']}.",
        f"(Figures 3b, 4b) | {ranges['rollback']} and {ranges['lossy']}; see",
    )


def each_point(model: str, kind: str, of: Callable[[Outcome], float], how: str = ".2f", scale: float = 1) -> str:
    steps = next(what.at for what in MEASURED.plan.models if what.model == model)
    return ", ".join(shown(over_points(some(model, step, kind), of), how, scale) for step in steps)


def test_trends_of_the_paper() -> None:
    def accuracy(model: str, kind: str) -> str:
        return each_point(model, kind, lambda o: abs(o.accuracy_off), ".1f", 100)

    def distance(model: str) -> str:
        return each_point(model, "rollback", lambda o: o.of_a_step)

    nearer = {model: [rivals(some(model), left) for left in (1, 2, 3)] for model in ("resnet", "nt3")}
    left = over_points([o for o in some("resnet", cut="75%") if o.arm.survivors == 3], lambda o: o.of_a_step)
    late = some("nt3", NT3.at[-1])
    says(
        f"`resnet` {accuracy('resnet', 'before')} points, either way; `nt3` {accuracy('nt3', 'before')} |",
        *(
            f"| weights: {distance(model)} of a step; accuracy: {accuracy(model, 'rollback')} points |"
            for model in ("resnet", "nt3")
        ),
        f"`resnet` {', '.join(map(str, nearer['resnet']))} with 1, 2, 3 of 4 left",
        f"`nt3` {', '.join(str(one.held) for one in nearer['nt3'])} of {nearer['nt3'][0].cases} |",
        f"each more survivor nearer: `resnet` {nearer_with_survivors(some('resnet'))}, "
        f"`nt3` {nearer_with_survivors(some('nt3'))} |",
        f"each later cut nearer: {nearer_with_cuts(some('resnet'))}, but {shown(left)} of a step is left at 75 % with 3 of 4",
        f"weights, at mini-batch {NT3.at[-1]}: later cuts nearer in {nearer_with_cuts(late)}, "
        f"each more survivor in {nearer_with_survivors(late)} |",
    )
    for one in (nearer_with_survivors(some("resnet")), nearer_with_cuts(some("resnet"))):
        assert one.held == one.cases  # "in every training, at every point"


def test_accuracy_and_loss() -> None:
    assert not any(one.accuracy_off.differs for one in SUMMARIES if one.arm.kind == "before")
    off = [one for one in CUT if one.accuracy_off.differs]
    assert only(off) == only(one for one in CUT if one.loss_off.differs)
    assert only(off) == [
        *("resnet 50: rollback 25%", "resnet 50: rollback 50%"),
        *("resnet 150: lossy 25%, 1 left", "resnet 150: lossy 50%, 1 left"),
    ]
    says(
        f"that of {len(CUT) - len(off)} of the {len(CUT)} arms, in accuracy as in loss",
        f"cut at 25 and 50 % ({points(off[0])} and {points(off[1])} percentage points)",
        f"cut at 25 and 50 % ({points(off[2])} and {points(off[3])}).",
    )
    few = [one.accuracy_off for one in CUT if (one.model, one.step, one.arm.survivors) == ("resnet", 50, 1)]
    losses, halves = [-100 * one.mean for one in few], [100 * one.half for one in few]
    says(
        f"loses {min(losses):.0f} to {max(losses):.0f} points on average, with intervals of "
        f"± {min(halves):.0f} to {max(halves):.0f}."
    )
    of = {model: lower_loss(some(model, kind="rollback")) for model in ("resnet", "nt3")}
    says(
        f"after rollback in {lower_loss(some(kind='rollback'))} cases (`resnet` {of['resnet']}, `nt3` {of['nt3']})",
        f"after lossy forward in {lower_loss(some(kind='lossy'))}, but",
    )


def at_most(values: Iterable[float], digits: int) -> str:
    """Rounded up: a limit."""
    return f"{math.ceil(max(map(abs, values)) * 10**digits) / 10**digits:.{digits}f}"


def test_ten_mini_batches_later() -> None:
    accuracy = [one for one in CUT if one.later_accuracy_off.differs]
    loss = [one for one in CUT if one.later_loss_off.differs]
    assert only(accuracy) == ["nt3 300: lossy 50%, 2 left"]
    assert only(loss) == ["resnet 20: lossy 50%, 1 left"]
    says(
        f"{len(accuracy)} of {len(CUT)} differences in accuracy and {len(loss)} of {len(CUT)} in loss",
        f"loss {shown(loss[0].later_loss_off, '+.3f')} (`resnet`, mini-batch 20, lossy with 1 of 4 left, 50 %)",
        f"accuracy {shown(accuracy[0].later_accuracy_off, '+.1f', 100)} points (`nt3`, mini-batch 300, lossy with 2 of 4",
    )
    before = [one for one in SUMMARIES if one.arm.kind == "before"]
    assert not any(one.later_accuracy_off.differs for one in before)
    assert only(one for one in before if one.later_loss_off.differs) == ["resnet 300: before"]
    says(f"mini-batch 300: {shown(before[RESNET.at.index(300)].later_loss_off, '+.3f')})")
    late = [[one for one in SUMMARIES if one.model == model and one.step >= 100] for model in ("resnet", "nt3")]
    limits = [at_most((100 * one.later_accuracy_off.mean for one in some), 1) for some in late]
    losses = [at_most((one.later_loss_off.mean for one in some), 3) for some in late]
    early = [one for one in SUMMARIES if one.step < 100]
    assert not any(one.later_accuracy_off.differs for one in early)
    says(
        f"by more than {limits[0]} percentage points (`resnet`) or {limits[1]} (`nt3`), "
        f"nor its loss by more than {losses[0]} or {losses[1]}.",
        f"means are off by up to {max(abs(100 * one.later_accuracy_off.mean) for one in early):.1f} points",
    )
    mine = [one for one in CUT if one.model == "resnet"]
    assert count(one.later_distance.mean > one.distance.mean for one in mine) == Count(48, 48)
    far = [100 * one.later_distance.mean for one in mine]
    says(f"in all {len(mine)} arms of `resnet`", f"by {min(far):.1f} to {max(far):.1f} % of their norm")


def test_zeros_by_hand() -> None:
    moving = [one for one in MEASURED.contrasts if one.optimizer in ("momentum", "adam")]
    kinds = dict.fromkeys((one.model, one.optimizer) for one in moving)
    cells = [
        estimate([getattr(one, name) for one in moving if (one.model, one.optimizer) == kind]).mean
        for kind in kinds
        for name in ("interrupted", "replayed")
    ]
    steps = list(dict.fromkeys(one.step for one in MEASURED.contrasts))
    says(
        f"off by {min(cells):.1f} to {max(cells):.1f} of a step with momentum or Adam",
        f"for a cut at 50 %, at mini-batches {steps[0]} and {steps[1]}:",
    )
