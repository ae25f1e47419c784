"""What a process runs: other code than that of who started it is refused before anything else is looked at."""

from __future__ import annotations

import subprocess
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pages import ROOT
from ray.exceptions import ActorDiedError, RayTaskError

from raytrain_ft import follow, trainer
from raytrain_ft.errors import ConfigError, LockedError, refusal
from raytrain_ft.runtime.software import CODE, digest_of, unpack
from raytrain_ft.runtime.supervisor_actor import SupervisorActor
from raytrain_ft.runtime.worker import Worker


def package(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_digest_is_that_of_the_modules_wherever_they_are(tmp_path: Path) -> None:
    files = {"__init__.py": "", "policy/machine.py": "x = 1", "worker.py": "y = 2"}
    one = digest_of(package(tmp_path / "one", files))
    beside = {".ipynb_checkpoints/worker.py": "y = 3", ".#worker.py": "", "__pycache__/worker.pyc": "", "py.typed": ""}
    assert digest_of(package(tmp_path / "two", files | beside)) == one
    (tmp_path / "two" / "gone.py").symlink_to("nowhere")
    assert digest_of(tmp_path / "two") == one
    changed = [
        files | {"worker.py": "y = 3"},
        files | {"more.py": ""},
        {"__init__.py": "", "policy/machine.py": "x = 1", "works.py": "y = 2"},
        {"__init__.py": "", "policy/machine.py": "y = 2", "worker.py": "x = 1"},
        {"__init__.py": "x = 1", "policy/machine.py": "", "worker.py": "y = 2"},
    ]
    others = [digest_of(package(tmp_path / f"other{number}", files)) for number, files in enumerate(changed)]
    assert len({one, *others}) == 1 + len(changed)


def test_every_process_finds_the_same() -> None:
    code = "import raytrain_ft.runtime.software as software; print(software.CODE)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == [CODE] == [digest_of(ROOT / "raytrain_ft")]


@pytest.mark.parametrize(
    ("kind", "arguments", "whose", "name"),
    [
        (SupervisorActor, (), "the script that started the run", "a run's supervisor"),
        (Worker, ("w3", None, 1), "the supervisor of the run", "w3"),
    ],
)
def test_who_runs_other_code_begins_nothing(kind: type, arguments: tuple[Any, ...], whose: str, name: str) -> None:
    """It may not even be able to read what was sent. It has a name all the same: Ray asks for it first."""
    actor: Any = object.__new__(kind)
    with pytest.raises(ConfigError, match=rf"^node [0-9.]+ has other code of raytrain_ft \({CODE}\) than {whose} \(abc\): "):
        actor.__init__("abc", b"of classes that are not here", *arguments)
    assert repr(actor) == name


def test_a_supervisor_is_told_which_code_its_driver_has(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    actor = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *arguments: given.append(arguments)))
    monkeypatch.setattr(trainer.ray, "remote", lambda kind: actor)
    spec: Any = SimpleNamespace(supervisor_name="supervisor:digits")
    trainer._start(spec)
    ((code, packed),) = given
    assert (code, unpack(code, packed, "the script")) == (CODE, spec)


def not_begun(cause: Exception) -> ActorDiedError:
    """What Ray tells of a supervisor that it has started again and that raised this."""
    try:
        raise cause
    except Exception:
        raised = traceback.format_exc()
    return ActorDiedError(RayTaskError("SupervisorActor.__init__", raised, cause, actor_repr="a run's supervisor"))


def test_a_supervisor_that_comes_back_with_other_code_ends_the_run_with_its_reason() -> None:
    with pytest.raises(ConfigError) as other:
        unpack("abc", b"", "the script that started the run")
    with pytest.raises(ConfigError) as told:
        follow._last_account(not_begun(other.value), None)
    assert str(told.value) == str(other.value)
    with pytest.raises(LockedError, match=r"^another run writes there$"):
        follow._last_account(not_begun(LockedError("another run writes there")), None)


def test_what_is_no_refusal() -> None:
    assert refusal(ActorDiedError()) == refusal(ConfigError("a value")) == refusal(not_begun(OSError("no space"))) == ""
