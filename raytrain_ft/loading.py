"""What Python files and modules make: tasks by name, as `raytrain-ft plan` and scenarios give them; scenarios themselves."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from typing import Any

from raytrain_ft.errors import ConfigError
from raytrain_ft.task import TrainTask, check_task


def load_task(job: str, arguments: dict[str, Any] | None = None) -> TrainTask:
    """The task that `JOB:TASK` names.

    Args:
        arguments: of its class, besides those in `JOB:TASK(...)`.

    Raises:
        ConfigError: there is no such file, module or task, or it cannot be made.
    """
    place, colon, expression = job.partition(":")
    if not (place and colon and expression):
        raise ConfigError(f"{job!r}: give JOB:TASK, as in jobs/train_lm.py:'PythonLM(100)' or my_package.job:Task")
    try:
        call = ast.parse(expression, mode="eval").body
        name, positional, keywords = call, [], {}
        if isinstance(call, ast.Call):
            name = call.func
            positional = [ast.literal_eval(argument) for argument in call.args]
            keywords = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{expression!r}: give the name of a task, or Name(...) with plain values: {error}") from error
    if not isinstance(name, ast.Name):
        raise ConfigError(f"{expression!r}: give the name of a task, or Name(...) with plain values")
    module = load_module(place)
    found: Any = getattr(module, name.id, None)
    made: Any = found
    if found is None:
        tasks = sorted(key for key, value in vars(module).items() if _is_task(value, module.__name__))
        raise ConfigError(f"{place} has no {name.id!r}" + (f"; its tasks: {', '.join(tasks)}" if tasks else ""))
    if isinstance(found, type) and issubclass(found, TrainTask):  # nothing else is called: a scenario may name anything
        try:
            made = found(*positional, **{**keywords, **(arguments or {})})
        except Exception as error:  # the job's own code may raise anything
            raise ConfigError(
                f"{expression} cannot be made: {type(error).__name__}: {error}. Give its arguments, as in '{name.id}(...)'"
            ) from error
    check_task(made)
    return made


def load_module(place: str) -> Any:
    """A module by its name, or what a Python file defines, which is executed.

    Raises:
        ConfigError: there is no such file or module, or it raises; the message has the line of the file.
    """
    if place.endswith(".py") and not Path(place).is_file():
        raise ConfigError(f"there is no file {place}")
    try:
        return _executed(Path(place).resolve()) if place.endswith(".py") else _imported(place)
    except (Exception, SystemExit) as error:  # the job's own code may raise anything
        line = line_of(error, place)
        where = f"{place}, line {line}" if line is not None else place
        raise ConfigError(f"{where}: cannot be imported: {type(error).__name__}: {error}") from error


def line_of(error: BaseException, place: str) -> int | None:
    """The line of a Python file in which an error was raised, as far as it is known."""
    path = str(Path(place).resolve())
    if isinstance(error, SyntaxError) and error.filename == path:
        return error.lineno
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == path]
    return lines[-1] if lines else None


def _executed(path: Path) -> Any:
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickle look their module up
    spec.loader.exec_module(module)
    return module


def _imported(name: str) -> Any:
    if "" not in sys.path:
        sys.path.insert(0, "")
    return importlib.import_module(name)


def _is_task(value: Any, module: str) -> bool:
    return isinstance(value, TrainTask) or (
        isinstance(value, type) and issubclass(value, TrainTask) and value.__module__ == module
    )
