"""What a rank of the ``deepspeed`` command runs: the script, with ``--local_rank=N`` as its first argument.

Arguments: ``[--no_local_rank] script.py ARGS...`` or ``[--no_local_rank] -m module ARGS...``.
"""

from __future__ import annotations

import os
import runpy
import sys

__all__ = ["main"]


def main() -> None:
    """Run what the arguments name as ``__main__``, in the environment that DeepSpeed's launcher gives."""
    arguments = sys.argv[1:]
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    os.environ["LOCAL_SIZE"] = str(ranks)
    os.environ["CROSS_RANK"], os.environ["CROSS_SIZE"] = str(rank // ranks), str(int(os.environ["WORLD_SIZE"]) // ranks)
    said = [f"--local_rank={local}"]
    if arguments[0] == "--no_local_rank":
        said, arguments = [], arguments[1:]
    if arguments[0] == "-m":
        sys.argv[:] = [arguments[1], *said, *arguments[2:]]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = [arguments[0], *said, *arguments[1:]]
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
