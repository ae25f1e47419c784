"""What a pipeline logs per step, and whether that is worth doing: the paper's own numbers, and bad input."""

from __future__ import annotations

from typing import Any

import pytest

from raytrain_ft.errors import ConfigError
from raytrain_ft.policy.logging_cost import bubble_share, fits_idle_time, transformer_log_bytes


@pytest.mark.parametrize(
    ("batch", "tokens", "groups", "gigabytes"),
    [(4096, 49, 16, "24.66"), (4096, 49, 8, "11.51"), (512, 128, 16, "8.05"), (512, 128, 8, "3.76")],
)
def test_table_3_to_the_printed_digit(batch: int, tokens: int, groups: int, gigabytes: str) -> None:
    found = transformer_log_bytes(batch, tokens, hidden=1024, itemsize=4, boundaries=groups - 1)
    assert f"{found / 1e9:.2f}" == gigabytes


def test_bubbles_of_the_paper() -> None:
    assert bubble_share(4, 4) == 3 / 7, "Figure 1a"
    assert bubble_share(1, 8) == 0
    assert [round(bubble_share(128, m), 2) for m in (4096 // 16, 512 // 4)] == [0.33, 0.5], "micro-batches of 16 and of 4"


VIT: dict[str, Any] = {
    "log_bytes": 24.66e9 / 32,
    "bandwidth": 12e9,
    "step_seconds": 3.3,
    "stages": 128,
    "micro_batches": 256,
}
"""Of a machine, by PCIe."""


def test_the_papers_own_case_is_worth_doing() -> None:
    decision = fits_idle_time(**VIT)
    assert decision.worth
    assert "up to 771 MB of log per step in 64.2 ms (12 GB/s) and is idle for 1.09 s" in decision.reason


@pytest.mark.parametrize(
    ("change", "words"), [({"bandwidth": 0.5e9}, "is idle for 1.09 s, which is less"), ({"stages": 1}, "is idle for 0 µs")]
)
def test_when_it_is_not(change: dict[str, Any], words: str) -> None:
    decision = fits_idle_time(**(VIT | change))
    assert not decision.worth
    assert words in decision.reason


def test_the_limit_itself_is_met() -> None:
    exact: dict[str, Any] = {"log_bytes": 3.0, "step_seconds": 7.0, "bandwidth": 1.0, "stages": 4, "micro_batches": 4}
    assert fits_idle_time(**exact).worth
    assert not fits_idle_time(**(exact | {"log_bytes": 3.01})).worth


@pytest.mark.parametrize("name", VIT)
@pytest.mark.parametrize("value", [-1, float("nan"), "8", True, None])
def test_bad_values_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match="use a"):
        fits_idle_time(**(VIT | {name: value}))


@pytest.mark.parametrize("name", ["bandwidth", "stages", "micro_batches"])
def test_zero_is_refused_where_it_means_nothing(name: str) -> None:
    with pytest.raises(ConfigError, match="use a"):
        fits_idle_time(**(VIT | {name: 0}))


def test_nothing_negative_is_logged() -> None:
    with pytest.raises(ConfigError, match="boundaries=-1"):
        transformer_log_bytes(1, 1, 1, 4, -1)
