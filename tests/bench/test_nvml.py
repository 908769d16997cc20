"""What the driver says of a card, with a driver that says what a test wants."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pynvml
import pytest
from nvml_fakes import FakeNvml

from autoprec.bench import nvml
from autoprec.bench.nvml import LEAST_SHARE_PERCENT, Card, driver_version

OTHER, THIRD = 2**22 + 11, 2**22 + 12  # above the largest number Linux gives a process


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    return FakeNvml(monkeypatch)


@pytest.mark.parametrize(
    ("reasons", "expected"), [(0x0, False), (0x1, False), (0x4, False), (0x40, True), (0x24, True), (0x80, True), (0x8, True)]
)
def test_heat_and_power_brakes_throttle_and_a_power_cap_does_not(driver: FakeNvml, reasons: int, expected: bool) -> None:
    driver.reasons = reasons
    assert Card("1234").is_throttled() is expected


def test_the_driver_is_opened_once_for_many_looks(driver: FakeNvml) -> None:
    card = Card("1234")
    for _ in range(50):
        card.is_throttled()
        card.others_at_work(0.0)
        card.others_present()
    assert driver.inits == 1


def test_another_process_at_work_is_seen_with_the_time_of_its_samples(driver: FakeNvml) -> None:
    driver.contexts = [os.getpid(), OTHER]
    driver.samples = [(os.getpid(), 10.0, 99), (OTHER, 10.0, 40), (OTHER, 12.5, 40), (OTHER, 8.0, 40)]
    assert Card("1234").others_at_work(9.0) == (10.0, 12.5)


def test_our_own_work_is_no_disturbance_whatever_it_takes(driver: FakeNvml) -> None:
    driver.samples = [(os.getpid(), 10.0, 100)]
    assert Card("1234").others_at_work(9.0) == ()


def test_a_process_with_a_context_that_does_nothing_is_no_disturbance(driver: FakeNvml) -> None:
    driver.contexts = [os.getpid(), OTHER]
    driver.samples = [(os.getpid(), 10.0, 100), (OTHER, 10.0, 0)]
    card = Card("1234")
    assert card.others_at_work(9.0) == ()
    assert card.others_present()


def test_the_few_percent_of_a_desktop_are_left_out(driver: FakeNvml) -> None:
    driver.samples = [(OTHER, 10.0, LEAST_SHARE_PERCENT - 1), (THIRD, 11.0, LEAST_SHARE_PERCENT)]
    assert Card("1234").others_at_work(9.0) == (11.0,)


def test_samples_that_the_driver_left_blank_are_none(driver: FakeNvml) -> None:
    driver.samples = [(0, 10.0, 50), (OTHER, 10.0, 4_000_000)]
    assert Card("1234").others_at_work(9.0) == ()


def test_a_process_that_the_training_started_belongs_to_it(driver: FakeNvml) -> None:
    program = "import time; time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", program]) as child:
        try:
            driver.contexts = [os.getpid(), child.pid]
            driver.samples = [(child.pid, 10.0, 80)]
            assert Card("1234").others_at_work(9.0) == ()
            assert not Card("1234").others_present()
        finally:
            child.kill()


def test_in_a_container_that_numbers_us_otherwise_one_process_may_be_ourselves_and_two_may_not(driver: FakeNvml) -> None:
    driver.contexts, driver.samples = [OTHER], [(OTHER, 10.0, 90)]
    assert Card("1234").others_at_work(9.0) == ()
    assert not Card("1234").others_present()
    driver.contexts, driver.samples = [OTHER, THIRD], [(OTHER, 10.0, 90), (THIRD, 10.0, 90)]
    assert Card("1234").others_at_work(9.0) == (10.0, 10.0)


def test_in_such_a_container_our_own_processes_with_the_card_open_are_allowed_for(
    driver: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml, "PROC", tmp_path)
    for pid, parent, opened in ((301, os.getpid(), "/dev/null"), (302, 301, "/dev/nvidia0"), (303, 1, "/dev/nvidia0")):
        (tmp_path / str(pid) / "fd").mkdir(parents=True)
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (python) S {parent} 1 1 0")
        (tmp_path / str(pid) / "fd" / "3").symlink_to(opened)
    driver.contexts, driver.samples = [OTHER, THIRD], [(OTHER, 10.0, 90), (THIRD, 10.0, 90)]
    assert Card("1234").others_at_work(9.0) == (), "a grandchild of ours may be one of the two"
    (tmp_path / "302" / "fd" / "3").unlink()
    assert Card("1234").others_at_work(9.0) == (10.0, 10.0)


def test_a_driver_that_does_not_say_who_computes_is_not_taken_for_a_quiet_card(driver: FakeNvml) -> None:
    driver.samples = None
    assert Card("1234").others_at_work(9.0) is None


def test_no_samples_since_then_is_a_quiet_card(driver: FakeNvml) -> None:
    assert Card("1234").others_at_work(9.0) == ()


def test_a_driver_that_lists_no_processes_flags_nobody(driver: FakeNvml) -> None:
    driver.contexts, driver.samples = None, [(OTHER, 10.0, 90)]
    assert Card("1234").others_at_work(9.0) == ()


def test_without_a_driver_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
    card = Card("1234")
    assert (card.is_throttled(), card.others_at_work(0.0), card.others_present()) == (False, None, False)
    assert driver_version() is None


def test_a_process_whose_name_holds_brackets_has_a_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "77").mkdir()
    (tmp_path / "77" / "stat").write_text(f"77 (a) b (c) S {os.getpid()} 1 1 0")
    monkeypatch.setattr(nvml, "PROC", tmp_path)
    assert nvml._is_ours(77)
    assert not nvml._is_ours(78)
