"""This machine: how many cores a CPU engine takes."""

from pathlib import Path

import pytest

from paceline.plan import machine
from paceline.plan.machine import busy_cpus, cpu_facts, cpu_quota, free_cores


@pytest.mark.parametrize(
    ("line", "busy"),
    [
        ("0.00 0.01 0.05 1/389 13203\n", 0),
        ("3.40 1.00 0.50 4/389 13203\n", 3),
        ("7.00 1.00 0.50 3/389 13203\n", 2),  # a run that has ended left its average
        ("0.20 1.00 0.50 9/389 13203\n", 0),  # a moment's peak
        ("2.00 2.00 2.00 0/389 13203\n", 0),
    ],
)
def test_others_are_busy_when_they_run_now_and_did_so_for_a_minute(
    line: str, busy: int, tmp_path: Path
) -> None:
    (tmp_path / "loadavg").write_text(line)
    assert busy_cpus(tmp_path / "loadavg") == busy


def test_a_machine_without_a_load_average_counts_as_idle(tmp_path: Path) -> None:
    assert busy_cpus(tmp_path / "absent") == 0


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "250000 100000\n"}, 2.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.5),
    ],
)
def test_the_quota_of_a_control_group_is_read_in_both_versions(
    files: dict[str, str], quota: float | None, tmp_path: Path
) -> None:
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert cpu_quota(tmp_path) == quota


@pytest.mark.parametrize(
    ("usable", "busy", "quota", "free"),
    [(8, 0, None, 8), (8, 3, None, 5), (8, 0, 2.5, 2), (2, 9, None, 1), (4, 0, 0.5, 1)],
)
def test_an_engine_takes_the_cores_that_are_free_and_at_least_one(
    usable: int, busy: int, quota: float | None, free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: usable)
    monkeypatch.setattr(machine, "busy_cpus", lambda: busy)
    monkeypatch.setattr(machine, "cpu_quota", lambda: quota)
    assert free_cores() == free
    assert cpu_facts().cores == free
