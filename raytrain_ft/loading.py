"""Tasks by name: from a Python file or a module, as `raytrain-ft plan` and scenarios give them."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
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
    module = _import(place)
    found: Any = getattr(module, name.id, None)
    if found is None:
        tasks = sorted(key for key, value in vars(module).items() if _is_task(value, module.__name__))
        raise ConfigError(f"{place} has no {name.id!r}" + (f"; its tasks: {', '.join(tasks)}" if tasks else ""))
    if callable(found) and not isinstance(found, TrainTask):
        try:
            found = found(*positional, **{**keywords, **(arguments or {})})
        except Exception as error:  # the job's own code may raise anything
            raise ConfigError(
                f"{expression} cannot be made: {type(error).__name__}: {error}. Give its arguments, as in '{name.id}(...)'"
            ) from error
    check_task(found)
    return found


def _import(place: str) -> Any:
    try:
        if not place.endswith(".py"):
            if "" not in sys.path:
                sys.path.insert(0, "")
            return importlib.import_module(place)
        path = Path(place).resolve()
        if not path.is_file():
            raise ConfigError(f"there is no file {place}")
        sys.path.insert(0, str(path.parent))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module  # dataclasses and pickle look their module up
        spec.loader.exec_module(module)
        return module
    except ConfigError:
        raise
    except Exception as error:  # the job's own code may raise anything
        raise ConfigError(f"{place} cannot be imported: {type(error).__name__}: {error}") from error


def _is_task(value: Any, module: str) -> bool:
    return isinstance(value, TrainTask) or (
        isinstance(value, type) and issubclass(value, TrainTask) and value.__module__ == module
    )
