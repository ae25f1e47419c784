"""What a study came to, as tables, JSON, and plots like Nicolae et al.'s Figures 2 to 4."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from raytrain_ft.cli.simulation_views import COLOURS, finite
from raytrain_ft.study.protocol import Arm, ModelStudy, Results, epoch_of
from raytrain_ft.study.summary import Estimate, Summary, estimate, over_points, summarize, trends

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = ("accuracy, pp", "loss", "weights off, %", "loss later", "twice", "time")
"""Of a table. Accuracy and loss are Baseline's own in its row, and off Baseline's in the others; time is in Baseline's."""
BLACK, GREY = COLOURS[6], COLOURS[7]
ROLLBACK, LOSSY = COLOURS[1], (COLOURS[4], COLOURS[0], COLOURS[2], COLOURS[3])


def tables(results: Results) -> list[Table]:
    """For each model and point one of all arms; what the points have in common; at last the optimizers."""
    found = []
    summaries = summarize(results.outcomes)
    for what in results.plan.models:
        for step in what.at:
            epoch, before = epoch_of(what, step)
            title = f"{what.model}, mini-batch {step} (epoch {epoch}); {results.plan.seeds} trainings, ± 95 %"
            shown = Table(title=title, title_justify="left")
            shown.add_column("", no_wrap=True)
            for name in COLUMNS:
                shown.add_column(name, justify="right", no_wrap=True)
            for one in summaries:
                if (one.model, one.step) == (what.model, step):
                    shown.add_row(one.arm.label, *_cells(one))
            shown.add_section()
            shown.add_row("restart from epoch", *[""] * 5, f"{before + 2}")
            found.append(shown)
    found += [distance_table(results, what) for what in results.plan.models]
    found.append(trend_table(results))
    if results.contrasts:
        found.append(contrast_table(results))
    return found


def _cells(one: Summary) -> list[str]:
    if one.arm.kind == "baseline":
        return [_shown(one.accuracy, 100, ".1f"), _shown(one.loss, 1, ".4f"), *[""] * 3, "1"]
    return [
        _shown(one.accuracy_off, 100, "+.2f"),
        _shown(one.loss_off, 1, "+.4f"),
        _shown(one.distance, 100, ".3f"),
        _shown(one.later_loss_off, 1, "+.4f"),
        f"{one.updated_twice:,}",
        _shown(one.slowdown, 1, ".2f"),
    ]


def distance_table(results: Results, what: ModelStudy) -> Table:
    """How far each arm's weights are off Baseline's, over all points of the training."""
    title = f"{what.model}: weights off Baseline's over all points, in steps of an undisturbed mini-batch"
    shown = Table(title=title, title_justify="left")
    shown.add_column("", no_wrap=True)
    for cut in what.cuts:
        shown.add_column(cut.label, justify="right", no_wrap=True)
    for kind, left in (("rollback", 0), *(("lossy", left) for left in results.plan.survivors)):
        arms = [Arm(kind, cut.label, left) for cut in what.cuts]
        some = [[o for o in results.outcomes if (o.model, o.arm) == (what.model, arm)] for arm in arms]
        values = [over_points(of_arm, lambda o: o.of_a_step) for of_arm in some]
        shown.add_row(f"lossy, {left} left" if left else kind, *(_shown(value, 1, ".2f") for value in values))
    return shown


def trend_table(results: Results) -> Table:
    """In how many cases each trend held."""
    shown = Table(title="trends: in how many cases they held", title_justify="left")
    for name in ("model", "what", "held"):
        shown.add_column(name, justify="right" if name == "held" else "left", no_wrap=True)
    for trend in trends(results.outcomes):
        shown.add_row(trend.model, trend.what, str(trend.count))
    return shown


def contrast_table(results: Results) -> Table:
    """What zeros do that no update does not, for each optimizer."""
    title = "rollback at 50 %: zeros against no update, in steps of an undisturbed mini-batch"
    shown = Table(title=title, title_justify="left")
    for name in ("model", "optimizer", "apart when cut", "apart when redone", "rollback off Baseline"):
        shown.add_column(name, justify="left" if name in ("model", "optimizer") else "right")
    for model, optimizer in dict.fromkeys((c.model, c.optimizer) for c in results.contrasts):
        some = [c for c in results.contrasts if (c.model, c.optimizer) == (model, optimizer)]
        values = [estimate([getattr(c, name) for c in some]) for name in ("interrupted", "replayed", "rollback")]
        shown.add_row(model, optimizer, *(_shown(value, 1, ".3g") for value in values))
    return shown


def _shown(value: Estimate, scale: float, how: str) -> str:
    half = "" if math.isnan(value.half) else f" ± {format(value.half * scale, how.lstrip('+'))}"
    return format(value.mean * scale, how) + half


def as_json(results: Results) -> str:
    """Everything, for machines: each outcome, the summaries and the trends. What is not known is null."""
    of_all = {"summaries": summarize(results.outcomes), "trends": trends(results.outcomes)}
    found = asdict(results) | {name: [asdict(one) for one in some] for name, some in of_all.items()}
    return json.dumps(finite(found), indent=1, allow_nan=False)


# ---------------------------------------------------------------- plots


def plot(results: Results, directory: Path) -> list[Path]:
    """Writes training.png (Figure 2) and, for each model, MODEL.png (Figures 3 and 4)."""
    directory.mkdir(parents=True, exist_ok=True)
    written = [directory / "training.png", *(directory / f"{what.model}.png" for what in results.plan.models)]
    _plot_training(results, written[0])
    summaries = summarize(results.outcomes)
    for what, path in zip(results.plan.models, written[1:], strict=True):
        _plot_model(results, what, [one for one in summaries if one.model == what.model], path)
    return written


def _plot_training(results: Results, path: Path) -> None:
    """Undisturbed training with the points of the study, and what a restart from the epoch's beginning would compute again."""
    from matplotlib.figure import Figure

    models = results.plan.models
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    grid = figure.add_gridspec(2, len(models) + 1, width_ratios=[*[1.25] * len(models), 1])
    for column, what in enumerate(models):
        curves = [curve for curve in results.curves if curve.model == what.model]
        of_accuracy, of_loss = (figure.add_subplot(grid[row, column]) for row in (0, 1))
        for axes, values, colour in (
            (of_accuracy, [[100 * value for value in c.accuracy] for c in curves], COLOURS[0]),
            (of_loss, [c.loss for c in curves], COLOURS[1]),
        ):
            at_a_time = [[_or_nan(value) for value in each] for each in zip(*values, strict=True)]
            axes.plot(curves[0].steps, [estimate(each).mean for each in at_a_time], color=colour)
            low, high = [min(each) for each in at_a_time], [max(each) for each in at_a_time]
            axes.fill_between(curves[0].steps, low, high, color=colour, alpha=0.2, linewidth=0)
            for step in what.at:
                axes.axvline(step, color=GREY, linewidth=1, linestyle=":")
            axes.set_ylim(bottom=0)
        of_accuracy.set_title(what.model, fontsize=10)
        of_accuracy.tick_params(labelbottom=False)
        of_loss.set_xlabel("mini-batch (dotted: points of the study)")
        if column == 0:
            of_accuracy.set_ylabel("held-out accuracy, %")
            of_loss.set_ylabel("held-out loss")
    axes = figure.add_subplot(grid[:, -1])
    bars = [(f"{what.model} {step}", epoch_of(what, step)[1] + 1) for what in models for step in what.at]
    axes.barh([name for name, _ in bars], [count for _, count in bars], color=GREY, label="restart at the epoch's beginning")
    for name, one, colour in (("rollback", 1, ROLLBACK), ("lossy", 0, LOSSY[1])):
        axes.plot([one] * len(bars), range(len(bars)), "o", color=colour, label=name, markersize=4, clip_on=False)
    axes.invert_yaxis()
    axes.set_xlabel("mini-batches computed again")
    axes.legend(frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.4, 1.0))
    for each in figure.axes:
        _dress(each)
    figure.savefig(path, dpi=130)


def _plot_model(results: Results, what: ModelStudy, summaries: Sequence[Summary], path: Path) -> None:
    """How far accuracy, loss and weights are off Baseline, and the time, of each point and arm, with 95 % intervals."""
    from matplotlib.figure import Figure

    rows: tuple[tuple[str, Callable[[Summary], Estimate], float], ...] = (
        ("accuracy off Baseline,\npercentage points", lambda one: one.accuracy_off, 100),
        ("loss off Baseline", lambda one: one.loss_off, 1),
        ("weights off Baseline,\n% of their norm", lambda one: one.distance, 100),
        ("time, in Baseline's", lambda one: one.slowdown, 1),
    )
    figure = Figure(figsize=(2.9 * len(what.at) + 0.6, 9.6), layout="constrained")
    grid = figure.subplots(len(rows), len(what.at), squeeze=False, sharex=True)
    for column, step in enumerate(what.at):
        some = [one for one in summaries if one.step == step]
        for row, (name, of, scale) in enumerate(rows):
            axes = grid[row][column]
            _bars(axes, results, what, some, of, scale)
            if column == 0:
                axes.set_ylabel(name)
            if row >= 2:
                axes.set_ylim(bottom=0)  # neither a distance nor a time is below
            _dress(axes)
        baseline = next(one for one in some if one.arm.kind == "baseline")
        accuracy = f"Baseline {_shown(baseline.accuracy, 100, '.1f')} %"
        grid[-1][column].set_xlabel("cut in back-propagation")
        grid[0][column].set_title(f"mini-batch {step}, epoch {epoch_of(what, step)[0]}\n{accuracy}", fontsize=9.5)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside upper center", ncols=len(labels) if len(what.at) > 2 else 3, frameon=False, fontsize=9
    )
    figure.savefig(path, dpi=130)


def _bars(
    axes: Axes, results: Results, what: ModelStudy, some: Sequence[Summary], of: Callable[[Summary], Estimate], scale: float
) -> None:
    """Before, and for each cut a group of bars: rollback, lossy with ever more survivors."""
    kinds = [("rollback", 0, ROLLBACK), *(("lossy", left, LOSSY[i % 4]) for i, left in enumerate(results.plan.survivors))]
    width = 0.8 / len(kinds)
    before = next(one for one in some if one.arm.kind == "before")
    _bar(axes, 0, 2 * width, of(before), scale, GREY, "Before")
    for number, (kind, left, colour) in enumerate(kinds):
        for place, cut in enumerate(what.cuts, start=1):
            arms = [one for one in some if (one.arm.kind, one.arm.cut, one.arm.survivors) == (kind, cut.label, left)]
            label = f"lossy, {left} of {results.plan.workers} left" if left else kind
            x = place + (number - (len(kinds) - 1) / 2) * width
            _bar(axes, x, width, of(arms[0]), scale, colour, label if place == 1 else None)
    axes.axhline(0, color=BLACK, linewidth=0.8)
    axes.set_xticks(range(len(what.cuts) + 1), ["Before", *(cut.label for cut in what.cuts)])


def _bar(axes: Axes, x: float, width: float, value: Estimate, scale: float, colour: str, label: str | None) -> None:
    half, mean = (0.0 if math.isnan(value.half) else value.half * scale), _or_nan(value.mean * scale)
    axes.bar(x, mean, width * 0.92, color=colour, label=label)
    axes.errorbar(x, mean, yerr=half, color=BLACK, linewidth=0.8, capsize=1.5)


def _or_nan(value: float) -> float:
    """What a plot has no place for, it leaves out."""
    return value if math.isfinite(value) else math.nan


def _dress(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(color="#dddddd", linewidth=0.6, axis="y")
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8)
