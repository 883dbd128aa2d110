"""What every rank process starts as: runs a script or a module as ``__main__`` and writes down how it failed.

Run by its path, before any import, so that a user's script meets the interpreter ``python script.py`` would give it:
its folder first on ``sys.path``, nothing imported that it did not ask for. Therefore the standard library only.

Arguments: ``script.py ARGS...`` or ``-m module ARGS...``.
"""

import sys

# This file's folder came first on the path; its modules must not shadow the standard library's of the same names.
del sys.path[0]

import atexit  # noqa: E402
import faulthandler  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import runpy  # noqa: E402
import signal  # noqa: E402
import threading  # noqa: E402
import time  # noqa: E402
import traceback  # noqa: E402


def main() -> None:
    """Run what the arguments name; a failure goes into the agent's error file instead of onto the terminal."""
    del sys.argv[0]
    faulthandler.enable()  # a crash in native code shows where Python was
    try:
        if sys.argv[0] == "-m":
            del sys.argv[0]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    except KeyboardInterrupt:
        # Ctrl-C reaches every process of the terminal, and once more through the launcher, which says it for all.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        path = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if not path:
            raise
        _write_failure(path, error)
        _tell_others(error)
        sys.stdout.flush()
        sys.exit(1)
    _leave()


def _leave() -> None:
    """End well: everything that a Python program does at its end, except taking the interpreter down.

    A thread of torch.distributed may still be letting go of the last collective's tensors. When it needs the interpreter
    for that while the interpreter goes down, the process aborts, and a job whose work is all done would count as failed.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons, ends idle pools
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _write_failure(path: str, error: Exception) -> None:
    """The error file torchrun's agent reads, with two more fields: when, to the nanosecond, because ranks fail within
    the same second, and the classes of the error, so that the launcher can tell bad input from a crash."""
    nanoseconds = time.time_ns()
    frames = error.__traceback__
    while frames is not None and _is_machinery(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    shown = "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))
    if frames is None and isinstance(error, ImportError):
        shown = ""  # no line of the user's has run: there is no such module
    extra = {
        "py_callstack": shown,
        "timestamp": str(int(time.time())),
        "nanoseconds": nanoseconds,
        "classes": [f"{cls.__module__}.{cls.__qualname__}" for cls in type(error).__mro__],
        "text": str(error),
    }
    # Whole or not there: the agent may look at any time.
    with open(path + ".partial", "w") as file:
        json.dump({"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}, file)
    os.replace(path + ".partial", path)


def _tell_others(error: Exception) -> None:
    """Ranks that wait for this one shall hear why it does not come, if the script got as far as using onecopy."""
    watch = sys.modules.get("onecopy.comm.watch")
    if watch is not None:
        watch.tell_failure(error)


def _is_machinery(filename: str) -> bool:
    return filename == __file__ or filename.startswith("<frozen runpy") or os.path.basename(filename) == "runpy.py"


if __name__ == "__main__":
    main()
