"""Every error that raytrain_ft raises. Each message says what happened, where, the value found, and what to do.

::

    FTError
    ├── ConfigError (ValueError)      a value that the user gave; raised before any worker starts wherever possible
    │   ├── UndoRefusedError          an optimizer whose update cannot be undone
    │   ├── RunActiveError            another run of this name is alive
    │   ├── TooFewWorkersError        too few workers became ready in time for the run to begin
    │   ├── ScenarioError             a scenario that cannot be: every fault with its file and line
    │   └── MismatchError             a checkpoint of another model, optimizer, scheduler or dataset: every difference listed
    ├── TrainingFailedError           a run that has begun and could not be finished
    │   ├── TaskError                 the user's own code raised: its traceback, rank and step
    │   ├── AbortedError              somebody asked for the end of the run
    │   ├── NonFiniteLossError        the loss became NaN or infinite and the policy is "raise"
    │   └── RecoveryError             a recovery that could not be carried out
    │       ├── ReplayDivergedError   a replay did not compute what was computed before
    │       ├── NoSurvivorError       every replica is gone, and nothing durable covers the loss
    │       └── RetryBudgetError      the budget for failures is used up, or recoveries make no progress
    ├── StorageError                  a file that is damaged, missing or of another format
    │   ├── UnreachableError          storage did not answer as it should; what is there may be whole
    │   ├── AbsentError               a file that is not there, where this process looks
    │   ├── UnknownFormatError        a whole file of another version of raytrain_ft
    │   ├── LockedError               another run writes to the same place
    │   ├── LogGapError               a tensor log lacks a record, or holds it damaged
    │   └── NoCheckpointError         there is no valid checkpoint, and one is required
    ├── FencedError                   internal: this worker's incarnation is over; whoever sees it leaves its wait
    ├── MetadataError                 internal: a cloud's metadata service gave no answer that can be believed
    └── IllegalEventError             internal: an event that the state machine does not allow; carries the story
"""

from __future__ import annotations

import re
from itertools import dropwhile


class FTError(Exception):
    """Base of all errors of raytrain_ft."""


class ConfigError(FTError, ValueError):
    """A value that the user gave cannot be used."""


class UndoRefusedError(ConfigError):
    """The optimizer's update cannot be undone in the mode asked for."""


class RunActiveError(ConfigError):
    """Another run with this name is alive on the cluster."""


class TooFewWorkersError(ConfigError):
    """Too few workers became ready in time for a run to begin."""


class ScenarioError(ConfigError):
    """A scenario that cannot be, or cannot be carried out here. Every fault comes with its file and line, the value found and
    what is allowed; nothing was started."""


class MismatchError(ConfigError):
    """A checkpoint is of another model, optimizer, scheduler or dataset. Nothing was loaded; every difference is listed."""


class TrainingFailedError(FTError):
    """A run that has begun and could not be finished."""


class TaskError(TrainingFailedError):
    """The user's own code raised; the message carries its traceback, rank and step."""


class NonFiniteLossError(TrainingFailedError):
    """The loss of a step, or the norm of its gradients where they are clipped by it, is NaN or infinite, and the policy is to
    raise."""


class AbortedError(TrainingFailedError):
    """Somebody asked for the end of the run."""


class RecoveryError(TrainingFailedError):
    """A recovery that could not be carried out."""


class ReplayDivergedError(RecoveryError):
    """A replay did not compute what was computed before: the model is not deterministic. Nothing of it is used."""


class NoSurvivorError(RecoveryError):
    """Every replica is gone, and nothing durable covers the loss."""


class RetryBudgetError(RecoveryError):
    """The budget for failures is used up, or recoveries make no progress."""


class StorageError(FTError):
    """A file is damaged, missing, or of another format."""


class UnreachableError(StorageError):
    """Storage did not answer as it should. What is there may be whole, and another attempt may succeed."""


class AbsentError(StorageError):
    """A file is not there, where this process looks: perhaps its node alone lacks the mount of what others see."""


class UnknownFormatError(StorageError):
    """A file is whole, but says what this version does not know: another one has written it, which can read it."""


MAY_BE_WHOLE = (UnreachableError, UnknownFormatError)
"""What is said of a checkpoint that cannot be read, and need not be damaged: it is not deleted for that."""
MAY_BE_WHOLE_ELSEWHERE = (*MAY_BE_WHOLE, AbsentError)
"""The same, where it is one worker of several that says so."""


class LockedError(StorageError):
    """Another run writes to the same place."""


class LogGapError(StorageError):
    """A tensor log lacks a record that a replay needs, or holds it damaged."""


class NoCheckpointError(StorageError):
    """There is no valid checkpoint, and one is required."""


class FencedError(FTError):
    """This worker's incarnation is over. Raised inside a worker only, to leave a wait."""


class IllegalEventError(FTError):
    """The state machine does not allow this event in its present state. A bug: please report it with its story."""


class MetadataError(FTError):
    """A cloud's metadata service gave no answer in time, or none that can be believed. Training goes on."""


def plain(words: str) -> str:
    """What an error says, without the colours that it has for a terminal."""
    return re.sub(r"\x1b\[[0-9;]*m", "", words)


def refusal(error: BaseException) -> str:
    """Why an actor would not begin: the `ConfigError` that it raised, of which Ray keeps the text alone. Empty if it died
    otherwise."""
    kind, _, words = last_words(str(error)).partition(": ")
    began = not getattr(error, "actor_init_failed", False)
    return "" if began or kind.rpartition(".")[2] != ConfigError.__name__ else words


def last_words(text: str) -> str:
    """What an error says for itself, in a line: the end of a text that may begin with where it was raised."""
    lines = plain(text).strip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    own = dropwhile(lambda line: line[:1].isspace(), lines[frames[-1] + 1 :]) if frames else lines[-1:]
    return " ".join(" ".join(own).split())
