"""The run's report: one HTML file with pictures, made from the event log. It needs no network and runs no script.

Whatever comes from the log is escaped, and the page forbids scripts and everything that is not in it (its security policy).
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

from raytrain_ft.policy.units import counted
from raytrain_ft.runtime.event_log import each_record
from raytrain_ft.runtime.report_data import Account, Checkpoint, Decision, Facts, gather
from raytrain_ft.runtime.report_figures import MOST_BARS, MOST_SPANS, draw, one_in
from raytrain_ft.runtime.report_style import COLOURS
from raytrain_ft.storage.draft import draft_of

MOST_ROWS = 200
"""Rows of a table; the event log has them all."""
MOST_OPEN = 15
"""A longer table is folded."""

STEPS = "Steps committed since the run began. A number is a recovery: its row in the table below says all about it."
RECOVERY = (
    "fence: find out who is lost, stop the others. replace: get workers, make the survivors consistent."
    " rebuild: fill the new ones with state. resume: until the first step is committed."
)
CHECKPOINT = "What each of them cost, at the time it was done. Shaded: a recovery. Dashed: a checkpoint that failed."
INTERVAL = "Steps from one checkpoint to the next, and the least that each bound asked for. A number is a row of the table."

STYLE = """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:14px/1.5 system-ui,"Segoe UI","DejaVu Sans",sans-serif}
main{max-width:1144px;margin:0 auto;padding:32px 20px 48px}
header{display:flex;flex-wrap:wrap;align-items:center;gap:4px 14px;margin:0 4px 18px}
h1{font-size:26px;line-height:1.2;margin:0;overflow-wrap:anywhere}
h2{font-size:16px;margin:0}
header p,.why,.none,footer{color:var(--muted);margin:0}
header p{flex-basis:100%}
.badge{border-radius:99px;padding:2px 12px;font-weight:600;font-size:13px;border:1.5px solid}
.good{color:var(--green)}.bad{color:var(--red)}.open{color:var(--muted)}
.error{flex-basis:100%;border-left:3px solid var(--red);padding:6px 12px;background:var(--card);overflow-wrap:anywhere}
dl{display:grid;grid-template-columns:repeat(auto-fit,minmax(148px,1fr));gap:12px;margin:0 0 14px}
dl div,section{background:var(--card);border:1px solid var(--grid);border-radius:10px}
dl div{padding:12px 16px}
dt{color:var(--muted);font-size:12.5px}
dd{margin:0;font-size:22px;line-height:1.35;font-weight:600;font-variant-numeric:tabular-nums;white-space:nowrap}
dd+dd{font-size:12.5px;font-weight:400;color:var(--muted);white-space:normal}
section{padding:16px 18px;margin:0 0 14px}
.why{font-size:13px;max-width:90ch;margin:2px 0 8px}
figure{margin:0;overflow-x:auto}
svg{display:block;width:100%;min-width:680px;height:auto}
svg *{stroke-linejoin:round;stroke-linecap:butt}
svg text{font-family:system-ui,"Segoe UI","DejaVu Sans",sans-serif!important}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:13px;font-variant-numeric:tabular-nums;margin-top:10px}
th{text-align:left;font-weight:600;color:var(--muted);font-size:12px;white-space:nowrap}
th,td{padding:6px 12px 6px 0;border-bottom:1px solid var(--grid);vertical-align:top}
tr:last-child td{border-bottom:0}
details{margin-top:10px}
summary{cursor:pointer;color:var(--blue);font-size:13px}
.n{text-align:right;white-space:nowrap}
.words{min-width:15em;white-space:pre-line;overflow-wrap:anywhere}
footer{font-size:12.5px;margin:18px 4px 0}
@media print{section{break-inside:avoid}}
"""


def write(directory: Path) -> Path:
    """Writes `report.html` beside the event log; a reader sees the old one or the new one, never half of it."""
    page = build(each_record(directory / "events.jsonl"), directory.name)
    path = directory / "report.html"
    with draft_of(path) as file:
        file.write(page)
    return path


def build(records: Iterable[dict], name: str = "") -> str:
    """The page. `name` is used for a run that does not say its own."""
    facts = gather(records, name)
    figures = draw(facts)
    cut = f" The {MOST_BARS} longest are drawn." if len(facts.recoveries) > MOST_BARS else ""
    many = len(facts.recoveries)
    marked = f" Of {many:,} recoveries, the {MOST_SPANS} longest are marked." if many > MOST_SPANS else ""
    some = f" Of {len(facts.failures):,} that failed, one in {one_in(facts)} is drawn." if one_in(facts) > 1 else ""
    parts = [
        _head(facts),
        _section("steps", "Steps over time", f"{STEPS}{marked}", figures),
        _section(
            "phases",
            "Recoveries, phase by phase",
            f"{RECOVERY}{cut}",
            figures,
            _recoveries(facts),
        ),
        _section("loss", "Loss over steps", f"Mean over the global batch, as it was reported.{marked}", figures),
        _section("checkpoints", "Checkpoints", f"{CHECKPOINT}{marked}{some}", figures, _checkpoints(facts)),
        _section("interval", "Checkpoint interval k", INTERVAL, figures, _decisions(facts)),
    ]
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(facts.name or 'run')} · raytrain_ft</title>\n<style>{_palette()}{STYLE}</style></head>\n"
        f"<body><main>\n{''.join(parts)}<footer>Made by raytrain_ft from events.jsonl, which has every event of the run."
        " Times are seconds since the run began.</footer>\n</main></body></html>\n"
    )


def _palette() -> str:
    light, dark = (";".join(f"--{name}:{pair[side]}" for name, pair in COLOURS.items()) for side in (0, 1))
    return f":root{{--page:#f4f6f8;{light}}}@media(prefers-color-scheme:dark){{:root{{--page:#11161d;{dark}}}}}"


def _head(facts: Facts) -> str:
    kind, outcome = {"finished": ("good", "finished"), "failed": ("bad", "failed")}.get(facts.outcome, ("open", "not ended"))
    about = [f"run {facts.run_id}" if facts.run_id else "", f"update: {facts.update}" if facts.update else ""]
    error = f'<div class="error">{escape(facts.error)}</div>' if facts.error else ""
    tiles = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd><dd>{escape(more)}</dd></div>"
        for name, value, more in _tiles(facts)
    )
    return (
        f'<header><h1>{escape(facts.name or "run")}</h1><span class="badge {kind}">{outcome}</span>'
        f"<p>{escape(' · '.join(part for part in about if part))}</p>{error}</header>\n<dl>{tiles}</dl>\n"
    )


def _tiles(facts: Facts) -> list[tuple[str, str, str]]:
    """The numbers at the top: name, value, and what there is to say about it."""
    sizes = [f"{size:g}" for size in dict.fromkeys(size for _, size in facts.worlds)]
    lost = len(facts.gone)
    spent = sum(account.seconds or 0.0 for account in facts.recoveries)
    stalled = sum(checkpoint.stall_s or 0.0 for checkpoint in facts.checkpoints)
    made = max(0.0, facts.steps - (facts.begun or 0.0))  # the steps before were another run's
    rate = made / facts.seconds if facts.seconds else 0.0
    loss = facts.losses[-1][1] if facts.losses else None
    return [
        ("Steps committed", f"{facts.steps:,.0f}", f"of {facts.max_steps:,.0f}" if facts.max_steps else ""),
        ("Time", _seconds(facts.seconds), f"{rate:,.1f} steps/s overall" if rate else ""),
        ("Workers", (", ".join(sizes) or "–") if len(sizes) <= 4 else f"{len(sizes)} sizes", f"{counted(lost, 'worker')} lost"),
        ("Recoveries", f"{len(facts.recoveries):,}", f"{_seconds(spent)} in all" if facts.recoveries else ""),
        (
            "Checkpoints",
            f"{len(facts.checkpoints):,}",
            f"{_seconds(stalled)} stall · {len(facts.failures)} failed" if facts.checkpoints or facts.failures else "",
        ),
        ("Last loss", "–" if loss is None else f"{loss:.4g}", f"at step {facts.losses[-1][0]:,.0f}" if facts.losses else ""),
    ]


def _section(name: str, title: str, why: str, figures: dict[str, str], table: str = "") -> str:
    figure = f"<figure>{figures[name]}</figure>" if name in figures else ""
    body = f'<p class="why">{escape(why)}</p>{figure}{table}' if figure or table else '<p class="none">None in this run.</p>'
    return f'<section><h2 id="title-{name}">{escape(title)}</h2>{body}</section>\n'


# ---------------------------------------------------------------- tables


def _recoveries(facts: Facts) -> str:
    def row(account: Account) -> list[str]:
        words = "\n→ ".join(part for part in (account.cause, account.reason) if part)
        return [
            *(f"{account.number}", f"{account.at:,.2f}", _plain(account.step), words, account.noticed_by),
            *(", ".join(account.lost) or "–", account.world, account.strategy, account.guarantee, _seconds(account.seconds)),
        ]

    heads = [
        "#",
        "at [s]",
        "step",
        "~cause → what was done",
        "noticed by",
        "lost",
        "~~workers",
        "strategy",
        "guarantee",
        "time",
    ]
    return _table(heads, [row(account) for account in facts.recoveries[:MOST_ROWS]], len(facts.recoveries))


def _checkpoints(facts: Facts) -> str:
    def row(checkpoint: Checkpoint) -> list[str]:
        if checkpoint.failure:
            return ["failed", f"{checkpoint.at:,.2f}", _plain(checkpoint.step), "–", "–", "–", "–", checkpoint.failure]
        size = "–" if checkpoint.size is None else f"{checkpoint.size / 1e6:,.3f}"
        costs = (_per(checkpoint.snapshot_s, 1000), _per(checkpoint.stall_s, 1000), _per(checkpoint.persist_s, 1))
        return [checkpoint.name or "–", f"{checkpoint.at:,.2f}", _plain(checkpoint.step), size, *costs, ""]

    heads = ["~name", "at [s]", "step", "size [MB]", "snapshot [ms]", "stall [ms]", "persist [s]"]
    every = sorted([*facts.checkpoints, *facts.failures], key=lambda checkpoint: checkpoint.at)
    rows = [row(checkpoint) for checkpoint in every[:MOST_ROWS]]
    if facts.failures:
        return _table([*heads, "~why it failed"], rows, len(every))
    return _table(heads, [row[:-1] for row in rows], len(every))


def _decisions(facts: Facts) -> str:
    def row(index: int, decision: Decision) -> list[str]:
        bounds = [_plain(decision.bounds.get(name)) for name in ("k_persist", "k_overhead", "k_failures")]
        observed = "–" if decision.observed is None else f"{decision.observed:.1%}"
        return [
            *(f"{index}", f"{decision.at:,.2f}", _plain(decision.step), f"{decision.k:g}", *bounds, observed),
            *(decision.mode or "–", decision.reason),
        ]

    heads = ["#", "at [s]", "step", "k", "k durable", "k overhead", "k failures", "overhead seen", "~~snapshot in", "~reason"]
    rows = [row(index, decision) for index, decision in enumerate(facts.decisions[:MOST_ROWS], 1)]
    return _table(heads, rows, len(facts.decisions))


NUMBERS = {"#", "at [s]", "step", "time", "k", "size [MB]", "snapshot [ms]", "stall [ms]", "persist [s]", "overhead seen"}
NUMBERS |= {"k durable", "k overhead", "k failures"}


def _table(heads: list[str], rows: list[list[str]], total: int) -> str:
    """A table, or nothing. A head that begins with ~ is of words, and of ones that want room unless it is ~~."""
    if not rows:
        return ""
    kinds = [
        "n" if head in NUMBERS else "words" if head.startswith("~") and not head.startswith("~~") else "" for head in heads
    ]

    def cells(tag: str, values: Iterable[str]) -> str:
        return "".join(f'<{tag} class="{kind}">{escape(value)}</{tag}>' for kind, value in zip(kinds, values, strict=True))

    body = "".join(f"<tr>{cells('td', row)}</tr>\n" for row in rows)
    head = cells("th", (head.lstrip("~") for head in heads))
    more = f'<p class="none">… and {total - len(rows):,} more, in events.jsonl.</p>' if total > len(rows) else ""
    table = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>{more}'
    return table if len(rows) <= MOST_OPEN else f"<details><summary>Table of all {total:,}</summary>{table}</details>"


def _plain(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _per(value: float | None, factor: float) -> str:
    return "–" if value is None else f"{value * factor:,.3g}"


def _seconds(value: float | None) -> str:
    """A time in the unit that suits it."""
    if value is None:
        return "–"
    if value < 1:
        return f"{value * 1000:,.0f} ms"
    if value < 600:
        return f"{value:,.1f} s"
    return f"{value / 3600:,.1f} h" if value >= 3600 else f"{value / 60:,.1f} min"
