"""Scenario files: what can be said, and that everything that cannot be is refused with line, value and what is allowed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from pydantic import ValidationError

from raytrain_ft.cli.main import main
from raytrain_ft.drill import drill, faults
from raytrain_ft.drill.measure import violations
from raytrain_ft.drill.played import Played
from raytrain_ft.drill.schedule import Schedule, View, spares_one
from raytrain_ft.errors import AbortedError, ScenarioError
from raytrain_ft.result import Result
from raytrain_ft.scenario import Event, Point, Scenario, When, Who

HEAD = "name: test\nworkers: 4\nsteps: 50\nbatch: 32\nbucket_bytes: 32768\nfirst_bucket_bytes: 8192\nevents:\n"  # 7 lines


def load(directory: Path, text: str) -> Scenario:
    path = directory / "scenario.yaml"
    path.write_text(text)
    return Scenario.load(path)


def event(action: str = "kill", who: str = "{rank: 1}", when: str = "{step: 8}", **more: str) -> str:
    """An event in four lines or more, each field on its own: action is on line 8 of a scenario that begins with HEAD."""
    fields = {"action": action, "who": who, "when": when, **more}
    lines = [f"{name}: {value}" for name, value in fields.items() if value]
    return HEAD + "  - " + "\n    ".join(lines) + "\n"


BAD = {
    "unknown field": (HEAD.replace("batch", "bacth") + "  []\n", 4, "bacth", "did you mean 'batch'?"),
    "unknown field of an event": (event(whom="{rank: 1}"), 11, "whom", "Allowed here: action, who, when"),
    "unknown field deep inside": (event(who="{rnak: 1}"), 9, "rnak", "did you mean 'rank'?"),
    "missing field": (HEAD.replace("steps: 50\n", "") + "  []\n", 1, "steps", "required"),
    "unknown action": (event(action="kil"), 8, "'kil'", "'kill', 'kill_node'"),
    "more casualties than workers": (event(who="{count: 5}"), 9, "5", "use 1 to 4"),
    "more survivors than workers": (event(who="{survivors: 4}"), 9, "4", "at most 3 can survive"),
    "a share above all": (event(who="{share: 120%}"), 9, "120%", "less than or equal to 1"),
    "a rank that is not there": (event(who="{rank: 4}"), 9, "4", "ranks go from 0 to 3"),
    "a rank twice": (event(who="{ranks: [1, 1]}"), 9, "who", "twice"),
    "nobody": (event(who=""), 8, "kill", "needs who"),
    "two ways to say who": (event(who="{rank: 1, count: 2}"), 9, "rank and count", "exactly one of"),
    "a step beyond the end": (event(when="{step: 50}"), 10, "50", "use 0 to 49"),
    "a rate of zero": (event(when="{mtbf: 0}"), 10, "0", "greater than 0"),
    "a negative rate": (event(when="{mtbf: -3}"), 10, "-3", "greater than 0"),
    "an infinite rate": (event(when="{mtbf: .inf}"), 10, "inf", "less than or equal to 1000000000"),
    "a rate that is no number": (event(when="{mtbf: .nan}"), 10, "nan", "greater than 0"),
    "no duration": (event(when="{mtbf: often}"), 10, "'often'", "30s, 5min, 17h"),
    "no time": (event(when=""), 8, "kill", "say when"),
    "two times": (event(when="{step: 3, mtbf: 5}"), 10, "step and mtbf", "exclude each other"),
    "an unknown phase": (event(at="{phase: backwards}"), 11, "'backwards'", "data, forward"),
    "a phase of a pipeline": (event(at="{phase: send}"), 11, "'send'", "first_step, in a run without stages"),
    "a phase of a schedule that cannot be chosen": (
        event(at="{phase: weight_pass}").replace("events", "stages: 2\nevents"),
        *(12, "'weight_pass'", "backward_pass, send, backward"),
    ),
    "a phase of the supervisor": (event(at="{phase: FENCE}"), 11, "'FENCE'", "a worker has the phases"),
    "a bucket where there are none": (event(at="{phase: commit, bucket: 1}"), 11, "1", "commit has no buckets"),
    "a bucket under barrier": (event(at="{phase: update, bucket: 1}"), 11, "1", "updated at once"),
    "two places": (event(at="{bucket: 1, share: 25%}"), 11, "0.25", "exclude each other"),
    "a micro-batch beyond": (event(at="{phase: forward, micro_batch: 1}"), 11, "1", "use 0 to 0"),
    "a point without a step": (event(when="{mtbf: 5s}", at="{share: 25%}"), 11, "at", "a point goes with a step"),
    "a point from outside": (event("slow_down", factor="2", lasts="1s", at="{share: 25%}"), 13, "at", "comes from outside"),
    "a node that cannot be": (event("kill_node", who="{node: 4}"), 9, "4", "use 0 to 3"),
    "no factor": (event("slow_down", lasts="1s"), 8, "slow_down", "needs factor"),
    "no notice": (event("drain"), 8, "drain", "needs notice"),
    "silence at any time": (event("silence", when="{seconds: 3}"), 10, "when", "give a step"),
    "silence in the forward pass": (event("silence", at="{phase: forward}"), 11, "'forward'", "falls silent in phase backward"),
    "silence of all": (event("silence", who="{survivors: 0}"), 9, "who", "nothing to go on with"),
    "silence of a node": (event("silence", who="{node: 1}"), 9, "1", "name it by its rank"),
    "silence with wait-free updates": (
        event("silence").replace("events", "update: wait_free\nevents"),
        *(9, "'silence'", "goes with update: barrier"),
    ),
    "a notice of a kill": (event(notice="30s"), 11, "30.0", "goes with drain only"),
    "an exception at any time": (event("exception", when="{seconds: 3}"), 10, "when", "give a step"),
    "a supervisor that hangs": (event("hang", who="{role: supervisor}"), 8, "hang", "killed or frozen"),
    "no spares": (event(who="{role: spare}").replace("events", "spares: 0\nevents"), 10, "spare", "spares: 0"),
    "an unknown strategy": (HEAD.replace("events", "strategy: luck\nevents") + "  []\n", 7, "'luck'", "use one of auto"),
    "nothing to go back to": (
        HEAD.replace("events", "strategy: checkpoint\ncheckpoint_every: null\nevents") + "  []\n",
        *(8, "checkpoint", 'use every="auto"'),
    ),
    "no snapshots": (
        HEAD.replace("events", "checkpoint_every: null\nstrategy: snapshot\nevents") + "  []\n",
        *(7, "snapshot", "takes none"),
    ),
    "a batch that is too small": (HEAD.replace("32\n", "3\n", 1) + "  []\n", 4, "3", "at least 4 samples"),
    "workers that the stages do not divide": (
        HEAD.replace("workers: 4", "workers: 5") + "  []\nstages: 2\n",
        *(2, "5", "2 stages need a multiple of 2 workers"),
    ),
    "a batch that the stages do not divide": (
        HEAD.replace("batch: 32", "batch: 33") + "  []\nstages: 2\n",
        *(4, "33", "need a multiple of 8"),
    ),
    "too many micro-batches": (HEAD + "  []\nstages: 2\nmicro_batches: 9999\n", 10, "9999", "use 4096 at most"),
    "a strategy that no pipeline has": (HEAD + "  []\nstages: 2\nstrategy: lossy\n", 10, "'lossy'", "not go with a pipeline"),
    "an update that no pipeline has": (HEAD + "  []\nstages: 2\nupdate: wait_free\n", 10, "'wait_free'", "with a pipeline"),
    "a log without a pipeline": (HEAD + "  []\nstrategy: logging\n", 9, "'logging'", "only a pipeline logs anything"),
    "a number that shrinks": (HEAD + "  []\nreplacement: shrink\n", 9, "'shrink'", "give a range"),
    "a time that no clock knows": (HEAD + "  []\nhang_timeout: 1.0e+20\n", 9, "1e+20", "less than or equal to 1000000000"),
    "a time that is hardly one": (HEAD + "  []\nhang_timeout: 1.0e-9\n", 9, "1e-09", "longer than zero"),
    "a name that is a path": (HEAD.replace("test", "../up") + "  []\n", 1, "'../up'", "pattern"),
    "a truth value": (HEAD.replace("steps: 50", "steps: yes") + "  []\n", 3, "True", "valid integer"),
    "a cost that there is not": (HEAD + "  []\nassumed: {step_s: 1, costs: {lunch_s: 3}}\n", 9, "3", "no such cost"),
    "an update longer than a step": (
        HEAD + "  []\nassumed:\n  step_s: 1\n  costs:\n    update_s: 2\n",
        12,
        "2",
        "use less than step_s, which is 1",
    ),
    "a cost that cannot be": (HEAD + "  []\nassumed:\n  step_s: 1\n  costs:\n    bandwidth: 0\n", 12, "0", "greater than 0"),
    "a field twice": (HEAD + "  []\nsteps: 3\n", 9, "steps", "twice"),
    "a reference": ("name: &n test\nabout: *n\n", 2, "n", "not supported"),
    "a name that is a truth value": (HEAD + "  []\non: 3\n", 9, "on", "a field's name is text: write it in quotes"),
    "a name that is a number": (HEAD.replace("events", "job: {1: 2}\nevents") + "  []\n", 7, "1", "a field's name is text"),
    "a list": ("- 1\n", 1, "scenario", "mapping"),
    "no YAML": ("name: [\n", 2, "scenario", "expected"),
    "an empty file": ("", 1, "scenario", "mapping"),
    "an escape": (HEAD + "  []\nabout: a\x1b[31m\n", 9, r"'\x1b'", "take it out"),
    "a null byte": (HEAD.replace("events", "about: a\0\nevents") + "  []\n", 7, r"'\x00'", "take it out"),
    "a form feed": ("\f" + HEAD + "  []\n", 1, r"'\x0c'", "take it out"),
    "a character that was deleted": (HEAD + "  []\nabout: \x7f\n", 9, r"'\x7f'", "take it out"),
    "a character that no code has": (HEAD + '  []\nabout: "\\UFFFFFFFF"\n', 9, "too large", "int"),
    "a day that there is not": (HEAD + "  []\nabout: 2026-02-30\n", 9, "'2026-02-30'", "no such timestamp; if it is text"),
    "a number that is none": (HEAD + "  []\nabout: !!int x\n", 9, "'x'", "no such int"),
    "a time that is none": (HEAD + "  []\nabout: !!timestamp x\n", 9, "'x'", "no such timestamp"),
    "a truth value that is none": (HEAD + "  []\nabout: !!bool x\n", 9, "'x'", "no such bool"),
    "an empty number": (HEAD + "  []\nabout: !!int ''\n", 9, "''", "no such int"),
    "a number of too many digits": (HEAD + f"  []\nseed: {'9' * 5000}\n", 9, f"{'9' * 79}…: ", "no such int"),
    "too many brackets": (HEAD + "  []\nabout:\n  " + "[" * 3000 + "\n", 10, "", "recursion"),
    "an object": ("name: !!python/object/apply:os.system ['true']\n", 1, "os.system", "could not determine a constructor"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_is_refused_with_line_value_and_what_is_allowed(case: str, tmp_path: Path) -> None:
    text, line, value, allowed = BAD[case]
    with pytest.raises(ScenarioError) as refused:
        load(tmp_path, text)
    message = str(refused.value)
    assert f"scenario.yaml, line {line}: " in message
    assert value in message
    assert allowed in message


PYTHON = "from raytrain_ft.scenario import *\n\n"
BAD_PYTHON = {
    "nobody": (PYTHON + "Who()\n", ", line 3: nothing is given: give exactly one of rank, ranks, node"),
    "a rank that cannot be": (PYTHON + "who = [\n    Who(rank=-1),\n]\n", ", line 4: rank: -1: Input should be greater than"),
    "an unknown action": (PYTHON + "Event(action='kil')\n", ", line 3: action: 'kil': Input should be 'kill', 'kill_node'"),
    "an unknown field": (PYTHON + "Who(rnak=1)\n", ", line 3: rnak: there is no such field; did you mean 'rank'? Allowed here"),
    "a missing field": (PYTHON + "Scenario(name='x', workers=2, batch=8)\n", ", line 3: steps: this field is required"),
    "more casualties than workers": (
        PYTHON + "e = Event(action='kill', who=Who(count=3), when=When(step=1))\n"
        "scenario = Scenario(name='x', workers=2, steps=9, batch=8, events=(e,))\n",
        ", line 3: events.0.who.count: 3: more casualties than there are workers: use 1 to 2",
    ),
    "a batch that is too small": (
        PYTHON + "scenario = Scenario(\n    name='x',\n    workers=4,\n    steps=9,\n    batch=3,\n)\n",
        ", line 3: batch: 3: ",
    ),
    "two events, in the order of the file": (
        PYTHON + "second = Event(action='kill', who=Who(rank=7), when=When(step=1))\n"
        "first = Event(\n    action='kill',\n    who=Who(rank=0),\n    when=When(step=99),\n)\n"
        "scenario = Scenario(name='x', workers=2, steps=9, batch=8, events=(first, second))\n",
        ", line 3: events.1.who.rank: 7: there are 2 workers: ranks go from 0 to 1\n",
    ),
    "an error": ("def f():\n    raise KeyError('a')\n\n\nf()\n", ", line 2: cannot be imported: KeyError: 'a'"),
    "an error elsewhere": ("import json\n\njson.loads('[')\n", ", line 3: cannot be imported: JSONDecodeError"),
    "no Python": ("x = 1\nname: [\n", ", line 2: cannot be imported: SyntaxError: '[' was never closed"),
    "an end": ("import sys\nsys.exit(0)\n", ", line 2: cannot be imported: SystemExit: 0"),
    "no scenario": ("x = 1\n", ": it has no `scenario`: write scenario = Scenario(...)"),
    "another scenario": ("scenario = {'workers': 2}\n", ": its `scenario` is a dict: write scenario = Scenario(...)"),
}


@pytest.mark.parametrize("case", BAD_PYTHON)
def test_a_python_file_that_makes_no_scenario_is_refused_with_its_line(case: str, tmp_path: Path) -> None:
    text, words = BAD_PYTHON[case]
    path = tmp_path / "a_scenario.py"
    path.write_text(text)
    with pytest.raises(ScenarioError) as refused:
        Scenario.load(path)
    assert str(refused.value).startswith(f"{path}{words}")


def test_a_python_file_makes_a_scenario_as_any_other(tmp_path: Path) -> None:
    path = tmp_path / "a_scenario.py"
    path.write_text(
        "from raytrain_ft.scenario import *\n"
        "events = [Event(action='kill', who=Who(rank=rank), when=When(step=5 + rank)) for rank in range(4)]\n"
        "scenario = Scenario(name='test', job='job.py:Task', workers=4, steps=50, batch=32, events=tuple(events))\n"
        "assert __name__ != '__main__'\n"
    )
    scenario = Scenario.load(str(path))
    assert [(event.who.rank, event.when.step) for event in scenario.events if event.who and event.when] == [
        *((0, 5), (1, 6), (2, 7), (3, 8))
    ]
    assert scenario.relative("job.py") == tmp_path / "job.py"
    assert str(scenario.error(("events", 0), "no")) == f"{path}, line 2: events.0: no"
    with pytest.raises(ScenarioError, match=r"a_scenario\.py, line 3: job\.task: there is no file"):
        faults.task_of(scenario)


def test_a_python_file_may_read_another_file(tmp_path: Path) -> None:
    read = load(tmp_path, HEAD + "  []\n")
    path = tmp_path / "a_scenario.py"
    path.write_text(
        f"from raytrain_ft.scenario import Scenario\n\nscenario = Scenario.load({str(tmp_path / 'scenario.yaml')!r})\n"
    )
    assert Scenario.load(path) == read
    assert str(Scenario.load(path).error(("steps",), "no")) == str(read.error(("steps",), "no"))
    with pytest.raises(ScenarioError, match=r"there is no file .*none\.py"):
        Scenario.load(tmp_path / "none.py")


@pytest.mark.parametrize(("name", "text"), [("bad.yaml", "name: \x1b\n"), ("bad.py", "raise SystemExit\n")])
def test_nothing_is_struck_for_a_file_that_is_refused(name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    answer = CliRunner().invoke(main, ["drill", str(path)])
    assert answer.exit_code == 2
    assert f"Error: {path}, line 1: " in answer.output


def test_every_fault_is_told_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = event(who="{count: 9}", when="{step: 99}")
    with pytest.raises(ScenarioError) as refused:
        load(tmp_path, text)
    assert [line.split(": ")[0].rsplit(" ", 1)[1] for line in str(refused.value).splitlines()] == ["9", "10"]


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"none\.yaml cannot be read"):
        Scenario.load(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("field", "value", "has"),
    [("bucket", 200, "the model has 2 buckets"), ("layer", 200, "the model has 4 layers"), ("name", "9.bias", "the model has")],
)
def test_what_the_model_does_not_have_is_refused_before_anything_starts(
    field: str, value: int | str, has: str, tmp_path: Path
) -> None:
    scenario = load(tmp_path, event(at=f"{{{field}: {value}}}"))
    with pytest.raises(ScenarioError) as refused:
        drill(scenario, storage_path=tmp_path)
    assert f"scenario.yaml, line 11: events.0.at.{field}: {value}: {has}" in str(refused.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scenario.yaml"]


IN_PYTHON = """from raytrain_ft.scenario import Event, Point, Scenario, When, Who

def strike(step):
    return Event(
        action="kill",
        who=Who(rank=1),
        when=When(step=step),
        at=Point({field}={value!r}),
    )

scenario = Scenario(
    name="test",
    workers=4,
    steps=50,
    batch=32,
    bucket_bytes=32768,
    first_bucket_bytes=8192,
    events=({events}),
)
"""


@pytest.mark.parametrize(
    ("events", "line"),
    [
        ("strike(8),", 8),
        ("Event(action='kill', who=Who(rank=1), when=When(step=8), at={{'{field}': {value!r}}}),", 18),
    ],
)
@pytest.mark.parametrize(("field", "value"), [("bucket", 200), ("layer", 200), ("name", "9.bias")])
def test_of_a_python_file_too_before_anything_starts_and_with_its_line(
    field: str, value: int | str, events: str, line: int, tmp_path: Path
) -> None:
    path = tmp_path / "a_scenario.py"
    path.write_text(IN_PYTHON.format(field=field, value=value, events=events.format(field=field, value=value)))
    with pytest.raises(ScenarioError, match="the model has") as refused:
        drill(Scenario.load(path), storage_path=tmp_path)
    assert str(refused.value).startswith(f"{path}, line {line}: events.0.at.{field}: {value}: the model has")
    assert {entry.name for entry in tmp_path.iterdir()} <= {path.name, "__pycache__"}


def test_of_a_scenario_in_a_script_the_line_of_the_script_is_told(tmp_path: Path) -> None:
    at = Point(layer=200)
    line = sys._getframe().f_lineno - 1
    event = Event(action="kill", who=Who(rank=1), when=When(step=1), at=at)
    scenario = Scenario(name="x", workers=2, steps=9, batch=8, events=(event,))
    with pytest.raises(ScenarioError) as refused:
        drill(scenario, storage_path=tmp_path)
    assert str(refused.value).startswith(f"{__file__}, line {line}: events.0.at.layer: 200: the model has 4 layers")


def test_parts_made_on_two_lines_are_the_same() -> None:
    first = Event(action="kill", who=Who(rank=1), when=When(step=1))
    second = Event(action="kill", who=Who(rank=1), when=When(step=1))
    assert first._made.line + 1 == second._made.line
    assert (first, hash(first), repr(first)) == (second, hash(second), repr(second))
    assert "_made" not in repr(first)
    assert first.model_dump() == second.model_dump()
    assert "_made" not in first.model_dump()


TRACES = {
    "out of order": ("seconds,change\n5,-1\n3,1\n", "line 3", "in order"),
    "no number": ("seconds,change\n5,minus\n", "line 2", "whole number"),
    "an infinite time": ("seconds,change\ninf,-1\n", "line 2", "finite"),
    "no header": ("5,-1\n", "line 1", "seconds,change"),
}


@pytest.mark.parametrize("case", TRACES)
def test_a_trace_that_cannot_be_is_refused_with_both_lines(case: str, tmp_path: Path) -> None:
    text, line, allowed = TRACES[case]
    (tmp_path / "spot.csv").write_text(text)
    scenario = load(tmp_path, event("kill_node", who="", when="{trace: spot.csv}"))
    with pytest.raises(ScenarioError) as refused:
        drill(scenario, storage_path=tmp_path)
    message = str(refused.value)
    assert "scenario.yaml, line 9: events.0.when.trace" in message
    assert f"spot.csv, {line}" in message
    assert allowed in message


def test_a_job_that_is_not_there_is_refused_with_its_line(tmp_path: Path) -> None:
    scenario = load(tmp_path, HEAD.replace("events", "job: nowhere.py:Task\nevents") + "  []\n")
    with pytest.raises(ScenarioError, match=r"line 7: job\.task: there is no file .*nowhere\.py"):
        faults.task_of(scenario)


def test_only_what_a_task_is_given_may_have_keys_that_are_no_text(tmp_path: Path) -> None:
    scenario = load(tmp_path, HEAD.replace("events", "job: {arguments: {table: {1: [{2: 0.5}]}}}\nevents") + "  []\n")
    assert scenario.job.arguments == {"table": {1: [{2: 0.5}]}}


def test_python_says_the_same() -> None:
    with pytest.raises(ValidationError, match="more casualties than there are workers"):
        Scenario(
            name="x",
            workers=2,
            steps=9,
            batch=8,
            events=(Event(action="kill", who=Who(count=3), when=When(step=1)),),
        )


# ---------------------------------------------------------------- what follows from a scenario


def test_shares_of_back_propagation_and_layers_become_buckets(tmp_path: Path) -> None:
    """Of the tiny model, gradients come in two buckets: 9,248 + 66,048 bytes and 17,408 bytes."""
    at = ["share: 0%", "share: 90%", "layer: 0", "layer: 3", "bucket: 1"]
    at += ["tensors: 25%", "tensors: 50%", "tensors: 99%", "name: 4.bias", "name: 1.bias"]
    kill = "  - {{action: kill, who: {{rank: 0}}, when: {{step: {}}}, at: {{{}}}}}\n"
    text = HEAD + "".join(kill.format(step, place) for step, place in enumerate(at))
    scenario = load(tmp_path, text)
    found = faults.planted(scenario, faults.task_of(scenario))
    assert [entry.fault.phase for entry in found] == ["backward"] * 10
    buckets, layers = faults._layout(scenario, faults.task_of(scenario).model(0))
    assert len(layers) == 4
    assert [entry.fault.bucket for entry in found] == [0, len(buckets) - 1, len(buckets) - 1, 0, 1, *(0, 1, 1, 0, 1)]


def test_casualties_are_drawn_from_the_seed(tmp_path: Path) -> None:
    for who, count in (("{count: 2}", 2), ("{share: 50%}", 2), ("{survivors: 1}", 3), ("{ranks: [3, 0]}", 2)):
        scenario = load(tmp_path, event(who=who))
        drawn = [[e.fault.rank for e in faults.planted(scenario, faults.task_of(scenario))] for _ in range(2)]
        assert drawn[0] == drawn[1]
        assert len(set(drawn[0])) == count
        assert set(drawn[0]) <= {0, 1, 2, 3}


def test_casualties_of_one_event_strike_together_where_each_gets_there(tmp_path: Path) -> None:
    """Else the first one's loss is noticed, and the others are fenced before they come to the point."""
    for who, count in (("{count: 2}", 2), ("{survivors: 1}", 3), ("{ranks: [3, 0]}", 2), ("{rank: 1}", 1)):
        scenario = load(tmp_path, event(who=who, at="{share: 50%}"))
        found = faults.planted(scenario, faults.task_of(scenario))
        assert [entry.fault.together for entry in found] == [count] * count


@pytest.mark.parametrize(
    ("who", "at", "together"),
    [
        ("{ranks: [0, 2]}", "{phase: backward_pass, micro_batch: 1}", 2),  # two replicas of one stage
        ("{ranks: [0, 1]}", "{phase: backward_pass, micro_batch: 1}", 1),  # one of them feeds the other
        ("{ranks: [0, 1]}", "{phase: data}", 2),
        ("{ranks: [0, 1]}", None, 2),
        ("{ranks: [0, 2]}", "{phase: transfer_source}", 1),  # perhaps only one of them sends
    ],
)
def test_casualties_in_a_pipeline_wait_only_for_whom_they_do_not_need(
    who: str, at: str | None, together: int, tmp_path: Path
) -> None:
    place = f", at: {at}" if at else ""
    text = HEAD.replace("events:\n", "stages: 2\nevents:\n") + f"  - {{action: kill, who: {who}, when: {{step: 5}}{place}}}\n"
    scenario = load(tmp_path, text)
    found = faults.planted(scenario, faults.task_of(scenario))
    assert [entry.fault.together for entry in found] == [together] * 2


def test_a_simulated_loss_is_planted_in_the_backward_pass(tmp_path: Path) -> None:
    """Without a place, from the first bucket on; nobody waits for others, for it is noticed by nobody."""
    for at, bucket in (("", None), ("{tensors: 50%}", 1)):
        scenario = load(tmp_path, event("silence", who="{ranks: [0, 1]}", at=at))
        found = [entry.fault for entry in faults.planted(scenario, faults.task_of(scenario))]
        assert [(one.action, one.phase, one.bucket, one.together) for one in found] == [("silence", "backward", bucket, 1)] * 2


def test_a_run_that_lost_samples_without_a_recovery_may_end_in_another_state(tmp_path: Path) -> None:
    aborted = AbortedError("it was")  # so that only the final states are looked at
    struck, calm = (Played(path=tmp_path, result=Result({}, "", [], digest, 1.0, None), error=aborted) for digest in ("a", "b"))
    assert [violation.split()[0] for violation in violations([], struck, calm)] == ["I3"]
    assert violations([{"event": "SamplesLost"}], struck, calm) == []


def view(**more: object) -> View:
    members = {f"w{n}": 100 + n for n in range(5)}
    nodes = {"w0": "B", "w1": "A", "w2": "A", "w3": "C", "w4": "D"}
    fields = {"state": "RUNNING", "world": ("w1", "w0", "w2", "w3"), "pids": members, "nodes": nodes, "holders": ("w0", "w1")}
    return View(**{**fields, **more})  # pyright: ignore[reportArgumentType]


def test_who_is_meant_is_found_by_rank_node_and_role(tmp_path: Path) -> None:
    schedule = Schedule(load(tmp_path, HEAD + "  []\n"))
    assert view().hosts() == ["A", "B", "C", "D"]
    assert schedule.members(Who(rank=1), view()) == ["w0"]
    assert schedule.members(Who(node=0), view()) == ["w1", "w2"]
    assert schedule.members(Who(role="spare"), view()) == ["w4"]
    assert schedule.members(Who(ranks=(0, 3)), view(pids={"w3": 1})) == []
    assert schedule.members(Who(count=2), view(pids={"w3": 1})) == []
    assert schedule.members(Who(share=0.5), view(pids={"w3": 1})) == []
    assert len(schedule.members(Who(survivors=1), view())) == 3
    assert schedule.members(Who(rank=3), view(world=("w1", "w0"))) == []


def test_whoever_holds_the_last_replica_is_spared() -> None:
    assert spares_one(["w0"], (), view())
    assert not spares_one(["w0", "w1"], (), view())
    assert not spares_one(["w1"], (), view(), {"w0"})  # it was frozen, and nobody has noticed yet
    assert spares_one((), ["A", "C"], view())
    assert not spares_one((), ["A", "B"], view())


def test_a_rate_comes_at_random_with_its_mean_and_no_more_often_than_allowed(tmp_path: Path) -> None:
    scenario = load(tmp_path, event(who="{role: any}", when="{mtbf: 2s, count: 3}"))
    schedule = Schedule(scenario)
    came = []
    for tick in range(1_000_000):
        for due in schedule.due(tick / 100, 0):
            came.append(tick / 100)
            if len(came) > 4_000:  # until then none was possible, so none counts
                schedule.struck(due.event)
    assert len(came) == 4_003
    assert came[4_000] / 4_000 == pytest.approx(2.0, rel=0.1)


def test_a_trace_takes_and_gives_nodes_in_its_order_at_its_speed(tmp_path: Path) -> None:
    (tmp_path / "spot.csv").write_text("seconds,change\n100,-1\n100,-1\n250,2\n")
    scenario = load(tmp_path, event("kill_node", who="", when="{trace: spot.csv, speed: 10}"))
    schedule = Schedule(scenario)
    assert schedule.due(9.9, 0) == []
    assert [(due.back, due.nodes) for due in schedule.due(10.0, 0)] == [(False, 1), (False, 1)]
    assert [(due.back, due.nodes) for due in schedule.due(99.0, 0)] == [(True, 2)]
    assert schedule.left == []


@pytest.mark.parametrize(
    "path",
    sorted(path for path in (Path(__file__).parents[2] / "jobs" / "scenarios").iterdir() if path.suffix in (".yaml", ".py")),
    ids=lambda p: p.stem,
)
def test_the_examples_can_be_carried_out(path: Path) -> None:
    scenario = Scenario.load(path)
    inside = {entry.event for entry in faults.planted(scenario, faults.task_of(scenario))}
    schedule = Schedule(scenario)
    outside = {due.event for due in schedule.due(1e9, scenario.steps)}
    assert inside | outside == set(range(len(scenario.events)))
    assert not inside & outside
