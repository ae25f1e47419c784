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
from raytrain_ft.runtime import software
from raytrain_ft.runtime.software import CODE, LIBRARIES, digest_of, same_bits, unpack, versions
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


def test_what_results_depend_on_is_known_without_being_loaded() -> None:
    code = "import sys; from raytrain_ft.runtime.software import versions; print(*versions(), sep='\\n'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    *names, loaded = done.stdout.splitlines()
    assert {"raytrain_ft", "python", "torch", "ray", "numpy", "pyarrow"} <= set(names)
    assert not {"torch", "pyarrow", "nvidia"} & set(loaded.split()), "the supervisor does without them"


def test_what_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """DALI, say, where nothing but a checkpoint is looked at."""
    monkeypatch.setattr(software, "LIBRARIES", (*LIBRARIES, "no-such-thing"))
    assert "no-such-thing" not in versions()


def test_workers_are_compared_by_what_their_bits_depend_on_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another numpy or Ray is recorded, and refused by nobody here."""
    before = same_bits()
    others = versions() | {"numpy": "3.0.0", "pyarrow": "99.0.0", "ray": "3.0.0"}
    monkeypatch.setattr(software, "versions", lambda: others)
    assert same_bits() == before
    monkeypatch.setattr(software, "versions", lambda: others | {"torch": "2.12.0"})
    assert same_bits() != before
