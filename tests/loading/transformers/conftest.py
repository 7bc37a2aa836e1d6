"""One checkpoint for the tests that do not depend on the architecture."""

from typing import Any

import pytest
import transformers

from tests.loading.transformers.made import GROUPED, Made, save


@pytest.fixture(scope="module", autouse=True)
def silent() -> Any:
    """transformers warns of token ids outside of the tiny vocabularies, and draws bars."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """One of them, for what does not depend on the architecture."""
    return save(tmp_path_factory.mktemp("stablelm"), "stablelm", GROUPED)
