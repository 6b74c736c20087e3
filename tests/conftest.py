"""Puts the five files on the path, fixes the seed of every test, and keeps the slow tests for `pytest -m slow`."""
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: long fuzz and kill runs; run them with `pytest -m slow`")
    if not config.option.markexpr:
        config.option.markexpr = "not slow"


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)
