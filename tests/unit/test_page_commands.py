"""Command lines and files in the pages, which nobody types before a reader does: every `raytrain-ft` line is parsed by the
command itself, and every YAML block is read by its own loader.

Nothing is executed. Left out are the options of other programs (`aws`, `kubectl`, `ray`, `pip` and the shell's own), which are
not ours, but not the files of this repository that such lines name; the options of the jobs, which `test_job_options.py` has;
what a block without a language shows after a line with a prompt, which is output; and blocks in `diff`, `mermaid` and
`dockerfile`, which hold no commands of ours. Blocks in Python are in `test_docs.py`, but for the commands in their comments.
"""

from __future__ import annotations

import importlib.util
import itertools
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from pages import FENCED, PAGES, ROOT, Fenced, fenced

from raytrain_ft.cli import simulation_file
from raytrain_ft.cli.main import main
from raytrain_ft.cli.study_file import load_plan
from raytrain_ft.errors import ScenarioError
from raytrain_ft.scenario import Scenario

OURS = "raytrain-ft"
AS_ROOT = f'"$(command -v {OURS})"'
"""The same behind `sudo`, which searches a path of its own: no virtual environment is on it."""
SHELL = ("sh", "shell", "bash", "console")
WITH_OUTPUT = ("", "text")
"""In these, only what follows a prompt is a command."""
RUNS = {"RUN": "run", "/tmp/quickstart-.../struck": "run"}
FILES = ("job.yaml", "my.yaml", "cluster.yaml")
"""What the reader has: directories of runs, and files."""
OF_THE_REPOSITORY = re.compile(r"(?:jobs|docs|benchmarks)/[\w/.-]+")
COMMENT = re.compile(rf"^[^`\n]*?(?:^|# |: |sudo ) *({OURS} [a-z].*)$", re.MULTILINE)
INLINE = re.compile(rf"`{OURS}\s([^`]+)`")
LOADERS: dict[str, Callable[[Path], object]] = {
    "docs/simulator.md": simulation_file.load,
    "docs/study.md": load_plan,
    "docs/drills.md": Scenario.load,
}
"""What the YAML of a page is."""


def lines(text: str) -> list[str]:
    return text.replace("\\\n", " ").splitlines()


def commands(line: str) -> Iterator[list[str]]:
    """The commands of a line of shell, word by word, without what may stand before them."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    for marks, words in itertools.groupby(lexer, key=lambda word: set(word) <= set("();<>|&")):
        if not marks:
            yield list(itertools.dropwhile(lambda word: word in ("$", "sudo") or re.match(r"\w+=", word), words))


def shown() -> list[tuple[str, list[str]]]:
    """(block, words) of every command in the pages' blocks."""
    written = [(block.name, line) for block in fenced(*SHELL) for line in lines(block.text)]
    written += [(block.name, line) for block in fenced(*WITH_OUTPUT) for line in lines(block.text) if line.startswith("$ ")]
    return [(name, words) for name, line in written for words in commands(line) if words]


def with_comments() -> list[Path]:
    jobs = [path for path in (ROOT / "jobs").rglob("*") if path.suffix in (".py", ".yaml")]
    return [*sorted(jobs), ROOT / "cluster.yaml"]


def ours() -> list[tuple[str, list[str]]]:
    """Those that are `raytrain-ft`, with those in comments: of the pages' Python, of jobs/ and of cluster.yaml."""
    commented = [(block.name, block.text) for block in fenced("python")]
    commented += [(str(path.relative_to(ROOT)), path.read_text().replace(AS_ROOT, OURS)) for path in with_comments()]
    found = shown() + [(name, next(commands(line))) for name, text in commented for line in COMMENT.findall(text)]
    return [(name, words) for name, words in found if words[0] == OURS]


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the reader types: in the repository, beside files of their own."""
    for name in ("jobs", "docs", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in FILES:
        (tmp_path / name).touch()
    for name in RUNS.values():
        (tmp_path / name).mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def parse(words: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What the command complains of; "" if it would have begun."""
    reached: list[click.Command] = []
    monkeypatch.setattr(click.Command, "invoke", lambda self, ctx: reached.append(self))
    done = CliRunner().invoke(main, [RUNS.get(word, word) for word in words])
    begun = done.exit_code == 0 and reached and not isinstance(reached[-1], click.Group)
    return "" if begun else done.output or repr(done.exception)


def named(command: click.Command, words: list[str]) -> list[str]:
    """Of words that may be only part of a command line: the commands and options that there are not."""
    while isinstance(command, click.Group) and words:
        name, *words = words
        if name not in command.commands:
            return [name]
        command = command.commands[name]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
    return [word for word in words if word.startswith("-") and word.partition("=")[0] not in known]


@pytest.mark.parametrize(("name", "words"), ours(), ids=[f"{name} {' '.join(words[1:])}" for name, words in ours()])
def test_a_command_line_is_one(name: str, words: list[str], reader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse(words[1:], monkeypatch) == ""


def test_command_lines_are_found_wherever_there_are_some() -> None:
    found = {words[1] for _, words in ours()}
    assert found >= {"audit", "check-cluster", "checkpoints", "dashboard", "drill", "plan", "simulate", "study", "suspend"}
    pages = {name.partition(":")[0] for name, _ in ours()}
    assert pages >= {
        "docs/checkpoints.md",
        "docs/cluster.md",
        "docs/choose-a-strategy.md",
        "cluster.yaml",
        "jobs/simulations/bert.yaml",
        "jobs/scenarios/unplug.yaml",
    }
    missed = [f"{block.name}: {line}" for block in fenced(*WITH_OUTPUT) for line in lines(block.text) if line.startswith(OURS)]
    assert missed == [], "a block with commands says ```sh, and what each of them does as a comment"


def test_root_is_told_where_the_command_is() -> None:
    assert [str(path) for path in (*PAGES, *with_comments()) if f"sudo {OURS}" in path.read_text()] == []


@pytest.mark.parametrize(
    "line",
    [
        "simulate --form-run RUN",
        "simulate nowhere.yaml",
        "simulate job.yaml --strategy magic",
        "checkpoints export RUN",
        "checkpoints lst RUN",
        "checkpoints",
        "suspend digits one",
        "drill",
    ],
)
def test_what_is_none_is_found(line: str, reader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse(line.split(), monkeypatch)


def test_a_line_of_shell_may_hold_several_commands() -> None:
    line = "cd x && A=1 sudo raytrain-ft plan f.py:'T(1)' --stages 4 | tee log   # raytrain-ft none"
    assert [words[0] for words in commands(line)] == ["cd", OURS, "tee"]
    assert list(commands(line))[1][1:] == ["plan", "f.py:T(1)", "--stages", "4"]


def test_commands_and_options_that_the_text_names_exist() -> None:
    """There they may be without what they need, such as a run."""
    assert named(main, ["checkpoints", "list", "--verify"]) == []
    assert named(main, ["checkpoints", "lst"]) == ["lst"]
    assert named(main, ["leave", "--withing", "60"]) == ["--withing"]
    wrong, count = [], 0
    for page in PAGES:
        for words in INLINE.findall(FENCED.sub("", page.read_text())):
            count += 1
            wrong += [f"{page.relative_to(ROOT)}: {words}: {word}" for word in named(main, words.split())]
    assert count > 25
    assert wrong == []


def test_files_of_the_repository_that_commands_name_are_there() -> None:
    words = [(name, word) for name, command in shown() for word in command]
    paths = [(name, path) for name, word in words for path in OF_THE_REPOSITORY.findall(word.partition(":")[0])]
    assert {path for _, path in paths} >= {"jobs/train_digits.py", "jobs/scenarios/node_loss.yaml", "docs/kuberay/job.yaml"}
    assert [f"{name}: {path}" for name, path in paths if not (ROOT / path).exists()] == []


def test_modules_and_targets_that_commands_name_are_there() -> None:
    modules = [words[2] for _, words in shown() if words[:2] == ["python", "-m"]]
    assert "benchmarks.papers" in modules
    assert [module for module in modules if importlib.util.find_spec(module) is None] == []
    targets = {target for _, words in shown() if words[0] == "make" for target in words[1:] if "=" not in target}
    assert targets >= {"demo", "test"}
    assert targets <= set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("block", fenced("yaml"), ids=lambda block: block.name)
def test_a_file_in_a_page_is_read_by_its_own_loader(block: Fenced, reader: Path) -> None:
    assert block.page in LOADERS, "say there what the YAML of this page is"
    path = reader / "mine.yaml"
    path.write_text(block.text)
    LOADERS[block.page](path)


def test_the_fault_that_the_page_about_the_study_shows_is_told_so(reader: Path) -> None:
    (block,) = (block for block in fenced("yaml") if block.page == "docs/study.md")
    path = reader / "mine.yaml"
    path.write_text(block.text.replace("{layer: 12}", "{layer: 200}"))
    with pytest.raises(ScenarioError) as refused:
        load_plan(path)
    told = f"Error: {str(refused.value).replace(str(path), path.name)}\n"
    assert told in [block.text for block in fenced("") if block.page == "docs/study.md"]
