"""``python -m onecopy.deepspeed script.py ARGS...``: run a script for which the name ``deepspeed`` means onecopy.

Its children inherit that. For several ranks there is ``onecopy launch --as-deepspeed script.py``.
"""

from __future__ import annotations

import os
import runpy
import sys

from onecopy.deepspeed.alias import environment, search_path
from onecopy.errors import OneCopyError

__all__ = ["main"]


def main() -> None:
    """Run ``script.py`` or ``-m module`` of the command line as ``__main__``."""
    arguments = sys.argv[1:]
    if not arguments or arguments == ["-m"]:
        sys.exit("error: nothing to run; python -m onecopy.deepspeed script.py ARGS..., or -m module ARGS...")
    try:
        os.environ.update(environment())
    except OneCopyError as error:
        sys.exit(f"error: {error}")
    sys.path.insert(0, search_path())
    if arguments[0] == "-m":
        sys.argv[:] = arguments[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = arguments
        sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
