"""Writes what docs/study.md has from a study's JSON anew: its tables, docs/study.json, and the plots.

    raytrain-ft study jobs/studies/digits.yaml --json study.json
    python -m benchmarks.study_page study.json

What stands around the tables is written by hand; tests/unit/test_study_page.py checks its numbers against docs/study.json, too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.pages import fill
from raytrain_ft.cli.study_file import load_plan
from raytrain_ft.cli.study_views import plot
from raytrain_ft.study import Estimate, Outcome, estimate
from raytrain_ft.study.protocol import Arm, Contrast, Curve, Results
from raytrain_ft.study.summary import over_points

ROOT = Path(__file__).parents[1]
PAGE, KEPT, IMAGES = ROOT / "docs" / "study.md", ROOT / "docs" / "study.json", ROOT / "docs" / "images"
PLAN = ROOT / "jobs" / "studies" / "digits.yaml"
OPTIMIZERS = {"sgd": "SGD", "momentum": "SGD, momentum 0.9", "weight_decay": "SGD, weight decay 0.01", "adam": "Adam"}
MEASURED = ("outcomes", "contrasts", "curves")
"""What is kept of the command's JSON; the rest follows from it."""


def results(path: Path = KEPT) -> Results:
    """What was measured, of the plan of the page."""
    found = json.loads(path.read_text())
    outcomes = tuple(Outcome(**{**one, "arm": Arm(**one["arm"])}) for one in found["outcomes"])
    curves = tuple(
        Curve(one["model"], one["seed"], tuple(one["steps"]), tuple(one["accuracy"]), tuple(one["loss"]))
        for one in found["curves"]
    )
    return Results(load_plan(PLAN), outcomes, tuple(Contrast(**one) for one in found["contrasts"]), curves)


def shown(value: Estimate, how: str = ".2f", scale: float = 1) -> str:
    """With as many digits for the interval."""
    return f"{value.mean * scale:{how}} ± {value.half * scale:{how.lstrip('+')}}".replace("-", "−")


def weights(measured: Results) -> str:
    """How far the weights are off Baseline's, over all points of the training."""
    lines = ["| | left | 25 % | 50 % | 75 % |", "|---|---|---|---|---|"]
    for what in measured.plan.models:
        for left in (0, *measured.plan.survivors):
            arms = [Arm("lossy" if left else "rollback", cut.label, left) for cut in what.cuts]
            cells = [over_points(of(measured, what.model, arm), lambda o: o.of_a_step) for arm in arms]
            name = {0: f"`{what.model}` rollback", 1: f"`{what.model}` lossy"}.get(left, "")
            who = f"{left} of {measured.plan.workers}" if left else ""
            lines.append(f"| {name} | {who} | {' | '.join(map(shown, cells))} |")
    return _text(lines)


def times(measured: Results) -> str:
    """What each arm takes, in Baseline's time, over all points of the training, and lossy's over all numbers of survivors."""
    lines = ["| | 25 % | 50 % | 75 % |", "|---|---|---|---|"]
    for what in measured.plan.models:
        for kind in ("rollback", "lossy"):
            cells = [shown(slowdown(measured, what.model, kind, cut.label)) for cut in what.cuts]
            lines.append(f"| `{what.model}` {kind} | {' | '.join(cells)} |")
    return _text(lines)


def slowdown(measured: Results, model: str, kind: str, cut: str) -> Estimate:
    """Of all arms of a kind with this cut."""
    some = [one for one in measured.outcomes if (one.model, one.arm.kind, one.arm.cut) == (model, kind, cut)]
    return over_points(some, lambda o: o.slowdown)


def of(measured: Results, model: str, arm: Arm) -> list[Outcome]:
    """One arm, at all points and in all trainings."""
    return [one for one in measured.outcomes if (one.model, one.arm) == (model, arm)]


def zeros(measured: Results) -> str:
    """What zeros do that no update does not."""
    lines = ["| | optimizer | when cut | when redone | rollback off Baseline |", "|---|---|---|---|---|"]
    for model in dict.fromkeys(one.model for one in measured.contrasts):
        for optimizer, name in OPTIMIZERS.items():
            some = [one for one in measured.contrasts if (one.model, one.optimizer) == (model, optimizer)]
            cells = [_apart([getattr(one, value) for one in some]) for value in ("interrupted", "replayed", "rollback")]
            lines.append(f"| {f'`{model}`' if optimizer == 'sgd' else ''} | {name} | {' | '.join(cells)} |")
    return _text(lines)


def _text(lines: list[str]) -> str:
    return "\n".join(line.replace("|  |", "| |") for line in lines) + "\n"


def _apart(values: list[float]) -> str:
    found = estimate(values)
    return shown(found, ".3f" if found.mean < 0.1 else ".2f") if any(values) else "0"


TABLES: dict[str, Callable[[Results], str]] = {"weights": weights, "times": times, "zeros": zeros}


def kept(found: dict[str, Any]) -> str:
    """What was measured, a line for each."""

    def lines(some: Iterable[Any]) -> str:
        return ",\n".join(json.dumps(one) for one in some)

    return "{\n" + ",\n".join(f'"{name}": [\n{lines(found[name])}\n]' for name in MEASURED) + "\n}\n"


def main(path: Path) -> None:
    """Writes all of it."""
    KEPT.write_text(kept(json.loads(path.read_text())))
    measured = results()
    fill(PAGE, {name: text(measured) for name, text in TABLES.items()})
    with TemporaryDirectory() as directory:
        for image in plot(measured, Path(directory)):
            (IMAGES / f"study-{image.name}").write_bytes(image.read_bytes())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
