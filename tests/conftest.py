import logging
from collections.abc import Iterator

import pytest

from tests.processes import ProcessPool

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


@pytest.fixture(scope="session")
def pool() -> Iterator[ProcessPool]:
    """Gloo processes, started once for all tests."""
    processes = ProcessPool()
    yield processes
    processes.close()
