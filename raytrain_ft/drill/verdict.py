"""Whether a drill kept what its scenario asks."""

from __future__ import annotations

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
        Check(
            name="promises kept",
            wanted="no violation",
            found=report.violations[0] if report.violations else "no violation",
            kept=not report.violations,
        ),
        Check(
            name="struck as asked",
            wanted="all events",
            found=f"not carried out: {', '.join(f'events.{n}' for n in report.missed)}" if report.missed else "all events",
            kept=not report.missed,
        ),
        _most("samples lost", wanted.samples_lost, report.samples_lost, "{:g}"),
    ]
    if wanted.goodput is not None:
        checks.append(
            Check(
                name="goodput",
                wanted=f">= {wanted.goodput:.1%}",
                found=f"{report.goodput:.1%}",
                kept=report.goodput >= wanted.goodput,
            )
        )
    for name, limit, spread in (
        ("pause p95", wanted.pause_p95, report.pauses),
        ("detection p95", wanted.detection_p95, report.detection),
    ):
        if limit is not None:
            checks.append(_most(name, limit, spread.p95, "{:.3g} s"))
    if wanted.guarantee is not None:
        kept = weakest(report.guarantee, wanted.guarantee) == wanted.guarantee
        checks.append(Check(name="guarantee", wanted=f"{wanted.guarantee} or stronger", found=report.guarantee, kept=kept))
    return tuple(checks)


def _most(name: str, limit: float, found: float | None, form: str) -> Check:
    """At most so much; nothing measured is nothing exceeded."""
    shown = "none" if found is None else form.format(found)
    return Check(name=name, wanted=f"<= {form.format(limit)}", found=shown, kept=found is None or found <= limit)
