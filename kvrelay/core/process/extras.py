"""Optional dependencies: what an installation lacks is said before an import fails."""

import importlib.util
import sys
from collections.abc import Sequence

ENGINE_MODULES = ("torch", "safetensors", "tqdm")  # what pyproject.toml's extra `engine` installs


def require_extra(extra: str, modules: Sequence[str], *, purpose: str) -> None:
    """Ends the process with status 1 and the command that helps if one of `modules` is not installed."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        sys.stderr.write(f"{purpose} needs {' and '.join(missing)}: pip install 'kvrelay[{extra}]'\n")
        sys.exit(1)
