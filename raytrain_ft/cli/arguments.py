"""Numbers on a command line. click's own ranges let "inf" and "nan" through, which no duration, rate or size is."""

from __future__ import annotations

import math
from typing import Any

import click


class Finite(click.FloatRange):
    """A finite number of a range: click's `FloatRange`, without infinity and what is no number."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number.

        Raises:
            click.BadParameter: it is none, is not finite or not in the range.
        """
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = 0.0  # what click itself has to say of it
        if not math.isfinite(number):
            self.fail(f"{value} is not finite: use a number in the range {self._describe_range()}.", param, ctx)
        return super().convert(value, param, ctx)


WHOLE = click.IntRange(min=1)
NOT_NEGATIVE = Finite(min=0)
POSITIVE = Finite(min=0, min_open=True)
