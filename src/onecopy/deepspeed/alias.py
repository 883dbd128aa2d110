"""The name ``deepspeed`` for ``onecopy.deepspeed``: one set of modules under two names.

``import deepspeed.ops.adam`` gives the module ``onecopy.deepspeed.ops.adam`` itself, so that a class is the same whichever
name it was imported by. Two things bring the name: the distribution in ``deepspeed-shim``, and :func:`search_path`, a
folder for ``PYTHONPATH`` that needs no installation. Neither works beside the real DeepSpeed, whose name it is.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType

from onecopy.errors import ConfigError

__all__ = ["environment", "search_path", "take_over"]

_REAL = "onecopy.deepspeed"
_MARK = "+onecopy"
_SHIM = Path(__file__).parents[1] / "shim"


def search_path() -> str:
    """The folder that holds a package ``deepspeed`` and its metadata, for the front of ``PYTHONPATH``."""
    return str(_SHIM)


def environment() -> dict[str, str]:
    """What gives a process and its children the name: ``PYTHONPATH`` with :func:`search_path` in front.

    Raises :class:`ConfigError` where the real DeepSpeed is installed.
    """
    refuse_both()
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != search_path()]
    return {"PYTHONPATH": os.pathsep.join([search_path(), *paths])}


def refuse_both() -> None:
    """Raise :class:`ConfigError` where DeepSpeed itself is installed, or a folder ``deepspeed`` would be imported."""
    for found in distributions(name="deepspeed"):
        if _MARK not in found.version:
            raise ConfigError(
                f"DeepSpeed {found.version} is installed ({found.locate_file('')}), and only one package may be named "
                "deepspeed: `pip uninstall deepspeed` to have onecopy answer to the name; or leave --as-deepspeed out and "
                "write `import onecopy.deepspeed as deepspeed`, which works beside it"
            )
    loaded = sys.modules.get("deepspeed")
    spec = loaded.__spec__ if loaded is not None else importlib.util.find_spec("deepspeed")
    if spec is not None and spec.origin and not _is_ours(spec):  # a mere folder has no origin, and gives way
        raise ConfigError(
            f"a package named deepspeed is there already, {spec.origin}: rename or remove it, and onecopy answers to the name"
        )


def _is_ours(spec: ModuleSpec) -> bool:
    if spec.name == _REAL:
        return True
    text = Path(str(spec.origin)).read_text() if os.path.isfile(str(spec.origin)) else ""
    return f"from {__name__} import" in text


def take_over(name: str) -> None:
    """Make ``name`` another name of ``onecopy.deepspeed`` and of every module in it. For the package of that name.

    Raises :class:`ConfigError` where the real DeepSpeed is installed.
    """
    refuse_both()
    sys.meta_path.insert(0, _Aliases(name))
    sys.modules[name] = importlib.import_module(_REAL)


class _Aliases(MetaPathFinder):
    """Finds ``name.x`` as ``onecopy.deepspeed.x``."""

    def __init__(self, name: str) -> None:
        self._prefix = f"{name}."

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(self._prefix):
            return None
        real = f"{_REAL}.{fullname.removeprefix(self._prefix)}"
        spec = importlib.util.find_spec(real)
        if spec is None:
            return None
        return ModuleSpec(fullname, _Loader(real), origin=spec.origin, is_package=spec.submodule_search_locations is not None)


class _Loader(Loader):
    """Loads the module that there is already."""

    def __init__(self, real: str) -> None:
        self._real = real
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._real)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run; but the import has written the alias's spec into the module, whose own it keeps."""
        module.__spec__ = self._spec
