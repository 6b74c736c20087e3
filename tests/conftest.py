"""Puts the five files on the path, fixes the seed of every test, and keeps the slow tests for `pytest -m slow`.

A test that takes `tried` counts what it tried, `tried["kills survived"] += 1`; the end of the run shows the sums.
"""
import collections
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")      # matrices as small as here: a second thread waits more than it works
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
TRIED = collections.Counter()


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: long fuzz and kill runs; run them with `pytest -m slow`")
    if not config.option.markexpr:
        config.option.markexpr = "not slow"


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


@pytest.fixture
def tried():
    return TRIED


def pytest_terminal_summary(terminalreporter):
    if TRIED:
        terminalreporter.section("what was tried")
        for what, count in sorted(TRIED.items()):
            terminalreporter.write_line(f"{count:>9,}  {what}")
