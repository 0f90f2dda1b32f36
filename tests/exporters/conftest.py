"""What tests of exports share."""

from pathlib import Path

import pytest
from exported import llama


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("source") / "tiny")
