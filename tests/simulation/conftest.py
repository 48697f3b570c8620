"""Set-up for thousands of runs: garbage collection passes over older objects, and nothing is logged."""

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
