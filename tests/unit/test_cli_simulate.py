"""`raytrain-ft simulate`: tables, plots and JSON from a file; what cannot be is refused with its line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from raytrain_ft.cli.main import main

FILE = """\
job:
  name: small
  steps: 5_000
  step_s: 1.0
  workers: 4
  costs:
    load_s: 20
    restart_s: 30
    copy_s: 2
    persist_s: 8
strategies:
  - {kind: global_checkpoint, every: 100}
  - {kind: replication}
failures: {kind: weibull, mtbf_s: 1e3, shape: 0.8}
"""


HUGE = 10**309
"""More than any float."""


def invoke(*arguments: object):
    return CliRunner().invoke(main, ["simulate", *map(str, arguments)], env={"COLUMNS": "120"})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(FILE)
    return path


def test_a_file_is_simulated(file: Path, tmp_path: Path) -> None:
    out, plots = tmp_path / "out.json", tmp_path / "plots"
    result = invoke(file, "--seeds", 3, "--sweep", "interval", "--sweep", "mtbf", "--plots", plots, "--json", out)
    assert result.exit_code == 0, result.output
    assert "global_checkpoint" in result.output
    found = json.loads(out.read_text())
    theirs, ours = found["strategies"]
    assert theirs["seconds"] > ours["seconds"] > 5000
    assert theirs["lost_s"]["redone"] > 0
    assert [sweep["variable"] for sweep in found["sweeps"]] == ["interval", "mtbf_s"]
    assert sorted(path.name for path in plots.iterdir()) == ["interval.png", "losses.png", "mtbf.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in plots.iterdir())


def test_what_takes_less_than_the_undisturbed_steps_is_plotted_too(file: Path, tmp_path: Path) -> None:
    """A step that is skipped costs nothing."""
    file.write_text(FILE.replace("step_s: 1.0", "step_s: 60.0").replace("{kind: replication}", "{kind: skip}"))
    out, plots = tmp_path / "out.json", tmp_path / "plots"
    result = invoke(file, "--strategy", "skip", "--seeds", 3, "--sweep", "mtbf", "--plots", plots, "--json", out)
    assert (result.exit_code, result.exception) == (0, None), result.output
    assert (plots / "mtbf.png").read_bytes().startswith(b"\x89PNG")
    (sweep,) = json.loads(out.read_text())["sweeps"]
    assert min(point["seconds"] for point in sweep["strategies"]["skip"]) < 5000 * 60.0, "else this shows nothing"


def test_a_mean_of_the_runs_that_finished_says_how_many_they_were(file: Path, tmp_path: Path) -> None:
    """Those that had bad luck are not in it."""
    file.write_text(
        "job: {name: two, steps: 3000, step_s: 1.0, workers: 2, costs: {load_s: 20, start_s: 60}}\n"
        "strategies: [{kind: replication}, {kind: global_checkpoint, every: 50}]\n"
        "failures: {kind: exponential, mtbf_s: 3000, together: [0.5, 0.5]}\n"
    )
    plots = tmp_path / "plots"
    result = invoke(file, "--seeds", 6, "--sweep", "mtbf", "--plots", plots)
    assert (result.exit_code, result.exception) == (0, None), result.output
    assert re.search(r"\([1-5] of 6\)", result.output), result.output
    assert (plots / "mtbf.png").exists()


def test_names_are_printed_as_they_are(file: Path) -> None:
    file.write_text(
        FILE.replace("name: small", "name: 'bert [/data]'").replace("{kind: repl", "{label: 'ours [a100]', kind: repl")
    )
    result = invoke(file, "--seeds", 2)
    assert (result.exit_code, result.exception) == (0, None)
    assert "bert [/data]" in result.output
    assert "ours [a100]" in result.output


def test_a_trace_with_half_a_quote_is_told(file: Path, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text('seconds,change\n5,"' + "-1\n" * 100_000)
    file.write_text(FILE.replace("kind: weibull, mtbf_s: 1e3, shape: 0.8", "kind: trace, path: t.csv"))
    result = invoke(file)
    assert isinstance(result.exception, SystemExit)
    assert "t.csv cannot be read" in result.output


@pytest.mark.parametrize(
    ("failures", "mean_s"),
    [("exponential, mtbf_s: 2000", 2000), ("weibull, mtbf_s: 2000, per: node", 500), ("uniform, number: 5", 1000)],
)
def test_a_sweep_over_failures_is_around_those_of_the_whole_cluster(
    failures: str, mean_s: float, file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    file.write_text(FILE.replace("weibull, mtbf_s: 1e3, shape: 0.8", failures))
    result = invoke(file, "--seeds", 1, "--strategy", "replication", "--sweep", "mtbf", "--json", out)
    assert result.exit_code == 0, result.output
    assert "by the time between failures of the whole cluster" in result.output
    (sweep,) = json.loads(out.read_text())["sweeps"]
    assert sweep["points"][len(sweep["points"]) // 2] == pytest.approx(mean_s)
    often, rarely = (sweep["strategies"]["replication"][number]["failures"] for number in (0, -1))
    assert often > 10
    assert rarely < 5


@pytest.mark.parametrize("failures", ["uniform, number: 0", "list"])
def test_a_sweep_over_failures_needs_some_and_says_so_first(failures: str, file: Path) -> None:
    file.write_text(FILE.replace("weibull, mtbf_s: 1e3, shape: 0.8", failures))
    result = invoke(file, "--sweep", "mtbf")
    assert result.exit_code == 1
    assert result.output.startswith("Error: a sweep over mtbf needs failures of a distribution")


def test_a_model_of_the_papers_is_simulated_by_its_name(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    chosen = ["--strategy", "global_checkpoint", "--every", 5004, "--seeds", 2, "--json", out]
    result = invoke("--preset", "swift-wide-resnet-50", "--mtbf", 17, *chosen)
    assert result.exit_code == 0, result.output
    (found,) = json.loads(out.read_text())["strategies"]
    assert found["seconds"] / 3600 == pytest.approx(557.4, rel=0.05)  # SWIFT, Table 5
    assert invoke("--preset", "swift-bert-128", "--mtbf", 17, "--seeds", 1).exit_code == 0
    refused = invoke("--preset", "swift-bert-128", "--mtbf", 17, "--strategy", "lossy")
    assert (refused.exit_code, "does not go with Job(stages=" in refused.output) == (1, True)
    assert "give --mtbf" in invoke("--preset", "nicolae-nt3").output
    assert "give one of" in invoke("--preset", "nicolae-nt3", "--from-run", tmp_path).output


def test_strategies_intervals_and_failures_can_be_given_instead(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    chosen = ["--strategy", "elastic_horovod", "--strategy", "lossy", "--every", 50, "--mtbf", 1, "--best-interval"]
    result = invoke(file, "--seeds", 2, *chosen, "--json", out)
    assert result.exit_code == 0, result.output
    horovod, lossy = json.loads(out.read_text())["strategies"]
    assert (horovod["strategy"], lossy["strategy"]) == ("elastic_horovod", "lossy")
    assert horovod["interval"] != 50


@pytest.mark.parametrize("option", ["--best-interval", "--sweep=interval"])
def test_who_has_no_interval_that_could_be_varied_is_named(option: str, file: Path) -> None:
    said = "replication saves nothing: give it `every`, or --every"
    result = invoke(file, "--seeds", 1, option)
    assert result.exit_code == 0, result.output
    assert said in result.stderr
    assert "global_checkpoint saves" not in result.stderr
    assert "saves nothing" not in invoke(file, "--seeds", 1, option, "--every", 50).output
    result = invoke(file, "--seeds", 1, option, "--strategy", "replication", "--strategy", "lossy")
    assert result.exit_code == 1
    assert said in result.stderr
    assert "lossy saves nothing" in result.stderr
    assert result.stdout == ""


def test_a_kind_is_simulated_as_the_file_has_it_and_lent_an_interval_only_if_it_needs_one(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    file.write_text(FILE.replace("kind: replication", "kind: replication, every: 40"))
    kinds = ("replication", "torchft", "checkfreq", "elastic_horovod")
    result = invoke(file, "--seeds", 1, *(word for kind in kinds for word in ("--strategy", kind)), "--json", out)
    assert result.exit_code == 0, result.output
    found = {strategy["strategy"]: strategy["interval"] for strategy in json.loads(out.read_text())["strategies"]}
    assert found.pop("checkfreq") not in (None, 40, 100)  # by Algorithm 1
    assert found == {"replication": 40, "torchft": None, "elastic_horovod": 100}


def test_text_that_looks_like_a_number_stays_text(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    file.with_name("1e2").write_text("seconds,change\n100,-1\n")
    trace = "kind: trace, path: 1e2, cycle: 1e3"
    file.write_text(
        FILE.replace("kind: weibull, mtbf_s: 1e3, shape: 0.8", trace)
        .replace("kind: replication", 'kind: replication, label: "500"')
        .replace("name: small", 'name: "1e5"')
    )
    result = invoke(file, "--seeds", 1, "--sweep", "interval", "--json", out)
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    assert found["job"]["name"] == "1e5"
    assert [strategy["strategy"] for strategy in found["strategies"]] == ["global_checkpoint", "500"]


def test_a_strategy_that_is_asked_for_twice_is_simulated_once(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert invoke(file, "--seeds", 1, "--strategy", "lossy", "--strategy", "lossy", "--json", out).exit_code == 0
    assert len(json.loads(out.read_text())["strategies"]) == 1


def test_json_is_yaml_too(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps({"job": {"steps": 10, "step_s": 1.0, "workers": 2}, "failures": {"kind": "list"}}))
    assert invoke(path, "--seeds", 1).exit_code == 0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("step_s: 1.0", "step_s: .inf", "line 4: Job(step_s=inf): use a finite number greater than 0"),
        ("step_s: 1.0", "steps_s: 1.0", "line 4: there is no field steps_s; did you mean 'step_s'? Allowed: "),
        ("  step_s: 1.0\n", "", "line 1: step_s is missing"),
        ("load_s: 20", "load_s: -1", "line 7: Costs(load_s=-1): use a finite number that is not negative"),
        ("load_s: 20", "laod_s: 20", "line 7: there is no field laod_s; did you mean 'load_s'?"),
        ("kind: replication", "kind: magic", "line 13: Strategy(kind='magic'): use one of"),
        ("kind: replication", "kind: logging", 'line 13: Strategy(kind="logging") does not go with Job(stages=1): use one of'),
        ("load_s: 20", f"load_s: {HUGE}", f"line 7: Costs(load_s={HUGE}): use a finite number that is not negative"),
        ("5_000", f"{HUGE}", f"line 3: Job(steps={HUGE}): use a whole number of at least 1, at most 1.8e+308"),
        ("mtbf_s: 1e3", "mtbf_s: 0", "line 14: Weibull(mtbf_s=0): use a finite number greater than 0"),
        ("mtbf_s: 1e3", "mtbf_s: .nan", "line 14: Weibull(mtbf_s=nan)"),
        ("shape: 0.8", "shape: 0.005", "line 14: Weibull(shape=0.005): use a finite number of at least 0.01"),
        (
            "kind: weibull, mtbf_s: 1e3, shape: 0.8",
            "kind: trace, path: t.csv, cycle: .nan",
            "line 14: SpotTrace(cycle=nan): use",
        ),
        (
            "kind: weibull, mtbf_s: 1e3, shape: 0.8",
            "kind: trace, path: t.csv, cycle: .inf",
            "line 14: SpotTrace(cycle=inf): use",
        ),
        (
            "kind: weibull, mtbf_s: 1e3, shape: 0.8",
            "kind: trace, path: t.csv, cycle: ",
            "line 14: SpotTrace(cycle=None): use",
        ),
        ("kind: weibull", "kind: sometimes", "line 14: kind='sometimes': failures are of a kind: exponential, weibull"),
        ("shape: 0.8", "together: 1", "line 14: Weibull(together=1): use a list of probabilities"),
        (
            "shape: 0.8",
            "together: [0, 0, 0, 0, 1]",
            "line 14: Weibull(together=(0, 0, 0, 0, 1)): 5 nodes cannot be lost at once",
        ),
        ("kind: weibull, mtbf_s: 1e3, shape: 0.8", "kind: list, failures: 3", "line 14: 3: use a list, such as [{at: 3600"),
        (
            "kind: weibull, mtbf_s: 1e3, shape: 0.8",
            "kind: list, failures: [{at: 5, workers: 1}]",
            "line 14: Failure(workers=1): use a list of ranks",
        ),
        (
            "kind: weibull, mtbf_s: 1e3, shape: 0.8",
            "kind: list, failures: [{at: 5, lost: 1, of: 3}]",
            "line 14: Failure(of=3): use a list of ranks",
        ),
        (
            "kind: weibull, mtbf_s: 1e3, shape: 0.8",
            "kind: list, failures: [{at: 5, lost: 1, of: [99]}]",
            "worker 99 is lost, and the job has workers 0 to 3",
        ),
        (
            "kind: weibull, mtbf_s: 1e3, shape: 0.8",
            "kind: list, failures: [{at: 5, lost: 1, event: {a: 1}}]",
            "line 14: Failure(event={'a': 1}): use the number of an event",
        ),
        ("steps: 5_000", "steps: 5_000\n  on: 5", "line 4: on: a field's name is text: write it in quotes"),
        ("job:", "1: 2\njob:", "line 1: 1: a field's name is text"),
        ("load_s: 20", "load_s: 20\n    1.5: 3", "line 8: 1.5: a field's name is text"),
        ("steps: 5_000", "steps: 5_000\n  steps: 6_000", "line 4: steps is given twice"),
        (
            "  - {kind: replication}",
            "  - {kind: replication}\n  - {kind: replication, every: 9}",
            "line 14: replication is the name",
        ),
        ("kind: replication", "kind: replication, label: global_checkpoint", "line 13: global_checkpoint is the name"),
        ("kind: replication", "kind: replication, label: 500", "line 13: Strategy(label=500): use text"),
        ("name: small", "name: 5", "line 2: Job(name=5): use text"),
        ("steps: 5_000", "steps: [", "line "),
        (
            "failures: {kind: weibull, mtbf_s: 1e3, shape: 0.8}",
            "failures:\n  kind: list\n  failures:\n    - {at: 5, lost: 1}\n    - {at: 9, lost: 5}",
            "line 18: 5 nodes are lost at once, and the job has 4",
        ),
        (
            "failures: {kind: weibull, mtbf_s: 1e3, shape: 0.8}",
            "failures:\n  kind: list\n  failures:\n    - {at: 5, lost: 1}\n    - {at: 4, lost: 1}",
            "line 18: 4 comes after 5",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_its_line(file: Path, old: str, new: str, message: str) -> None:
    assert old in FILE
    file.with_name("t.csv").write_text("seconds,change\n10,-1\n")
    file.write_text(FILE.replace(old, new))
    result = invoke(file)
    assert result.exit_code == 1
    assert message in result.output.replace("\n", " ").replace("  ", " ")


def test_a_trace_is_found_beside_its_file_and_refused_with_its_line(file: Path) -> None:
    file.with_name("trace.csv").write_text("seconds,change\n100,-1\n50,1\n")
    file.write_text(FILE.replace("kind: weibull, mtbf_s: 1e3, shape: 0.8", "kind: trace, path: trace.csv"))
    result = invoke(file)
    assert result.exit_code == 1
    assert "trace.csv, line 3: 50 comes after 100" in result.output
    file.with_name("trace.csv").write_text("seconds,change\n100,-1\n500,1\n")
    assert invoke(file, "--seeds", 1).exit_code == 0


@pytest.mark.parametrize("hours", ["0", "-1", "inf", "nan", "soon"])
def test_failures_without_a_time_between_them_are_refused_for_a_file_and_for_a_run(hours: str, file: Path) -> None:
    run = Path(__file__).parent / "recorded" / "replication"
    for what in ([file], ["--from-run", run]):
        result = invoke(*what, "--mtbf", hours)
        assert result.exit_code == 2
        assert "Invalid value for '--mtbf'" in result.output
        assert "predicted" not in result.output


def test_one_of_a_file_and_a_run(file: Path, tmp_path: Path) -> None:
    assert invoke().exit_code == 2
    assert invoke(file, "--from-run", tmp_path).exit_code == 2
    result = invoke("--from-run", tmp_path)
    assert result.exit_code == 1
    assert "has no events.jsonl" in result.output
