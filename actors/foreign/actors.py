"""The package of this name, for a Python that it is not installed in: actors/environments.py puts this folder, which holds
nothing else, on that Python's path."""

import importlib.util
import sys
from pathlib import Path

_folder = Path(__file__).absolute().parents[2] / __name__
_spec = importlib.util.spec_from_file_location(
    __name__, _folder / "__init__.py", submodule_search_locations=[str(_folder)])
# The import system hands out what it finds here once this file has run: the real package.
sys.modules[__name__] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sys.modules[__name__])
