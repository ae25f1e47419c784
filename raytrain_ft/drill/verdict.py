"""Whether a drill kept what its scenario asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from raytrain_ft.drill.numbers import Check, Report
from raytrain_ft.policy.strategy import weakest
from raytrain_ft.scenario import Scenario


def verdict(report: Report, scenario: Scenario) -> tuple[Check, ...]:
    """Every threshold of a scenario, and what is always asked: that the run ends, keeps its promises and was struck."""
    wanted = scenario.pass_if
    checks = [
        Check(
            name="the run ends",
            wanted=f"{report.max_steps} steps",
            found=f"{report.steps} steps" + (f"; {report.failure.splitlines()[0][:160]}" if report.failure else ""),
            kept=not report.failure and report.steps == report.max_steps,
        ),
        _promises(report),
        _struck(report, scenario),
        _most("samples lost", wanted.samples_lost, report.samples_lost, "{:g}"),
    ]
    if wanted.goodput is not None:
        checks.append(
            Check(
                name="goodput",
                wanted=f">= {wanted.goodput:.1%}",
                found=f"not comparable: {report.incomparable}" if report.incomparable else f"{report.goodput:.1%}",
                kept=not report.incomparable and report.goodput >= wanted.goodput,
            )
        )
    if wanted.pause_p95 is not None:
        checks.append(_most("pause p95", wanted.pause_p95, report.pauses.p95, "{:.3g} s"))
    if wanted.detection_p95 is not None:
        detected = _most("detection p95", wanted.detection_p95, report.detection.p95, "{:.3g} s")
        if report.unnoticed:
            detected = replace(detected, found=f"{detected.found}; never noticed: {_names(report.unnoticed)}", kept=False)
        checks.append(detected)
    if wanted.guarantee is not None:
        kept = weakest(report.guarantee, wanted.guarantee) == wanted.guarantee
        checks.append(Check(name="guarantee", wanted=f"{wanted.guarantee} or stronger", found=report.guarantee, kept=kept))
    return tuple(checks)


def _promises(report: Report) -> Check:
    """As the records show."""
    if report.violations:
        found, kept = report.violations[0], False
    elif report.failure:
        found, kept = "not checked: the run failed", False
    elif report.unchecked:
        found, kept = f"not checked: {report.unchecked}", None
    else:
        found, kept = "no violation", True
    return Check(name="promises kept", wanted="no violation", found=found, kept=kept)


def _struck(report: Report, scenario: Scenario) -> Check:
    """Chance may leave an event at random out, but a run to which nothing was done says nothing."""
    nothing = bool(scenario.events) and len({*report.missed, *report.absent}) == len(scenario.events)
    amiss = [
        f"not carried out: {_names(report.missed)}" if report.missed else "",
        f"never came, at random: {_names(report.absent)}" if report.absent else "",
    ]
    found = "; ".join(part for part in amiss if part) or "all events"
    return Check(name="struck as asked", wanted="all events", found=found, kept=not report.missed and not nothing)


def _names(events: Sequence[int]) -> str:
    return ", ".join(f"events.{number}" for number in events)


def _most(name: str, limit: float, found: float | None, form: str) -> Check:
    """At most so much; nothing measured is nothing exceeded."""
    shown = "none" if found is None else form.format(found)
    return Check(name=name, wanted=f"<= {form.format(limit)}", found=shown, kept=found is None or found <= limit)
