"""Thousands of runs: the garbage from before is not looked at after each of them, and nobody reads their logs."""

import gc
import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    logging.disable()
    yield
    logging.disable(logging.NOTSET)
    gc.unfreeze()
