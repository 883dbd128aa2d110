"""Start the ranks of a job on this machine: torchrun's agent underneath, a free port, one clear error at the end.

``onecopy train`` and ``onecopy launch`` both go through :func:`run_ranks`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from onecopy.errors import ConfigError

__all__ = [
    "Failure",
    "Host",
    "Nodes",
    "Outcome",
    "default_ranks",
    "place",
    "read_hostfile",
    "require_free",
    "run_ranks",
]

_RANK_MAIN = Path(__file__).with_name("rank_main.py")
_LOCAL = "127.0.0.1"
# Seconds after another rank's error from which on a killed rank was killed for not reacting to it.
_LATE = 5


@dataclass(frozen=True)
class Host:
    """One line of a hostfile: ``name slots=N``."""

    name: str
    slots: int


@dataclass(frozen=True)
class Nodes:
    """The machines of a job and which of them this is. ``port`` is on the first; None: a free one, on one machine."""

    count: int = 1
    rank: int = 0
    address: str = _LOCAL
    port: int | None = None


@dataclass(frozen=True)
class Failure:
    """The rank that failed first. ``traceback`` is empty for a signal, a plain ``sys.exit`` and a module that is not
    there. ``classes``: qualified names of the exception's class and its bases. ``others``: ranks that failed after it,
    earliest first."""

    rank: int
    pid: int
    exit_code: int
    message: str
    traceback: str = ""
    classes: tuple[str, ...] = ()
    others: tuple[int, ...] = ()

    @property
    def nothing_to_run(self) -> bool:
        """Did the rank not even find the module it was to run?"""
        return not self.traceback and "builtins.ImportError" in self.classes

    def describe(self) -> str:
        """Several lines, the traceback last."""
        others = ", ".join(map(str, self.others))
        head = f"rank {self.rank} (pid {self.pid}) failed first" + (f", then {others}" if others else "")
        return f"{head}:\n{self.traceback.rstrip()}" if self.traceback else f"{head}: {self.message}"


@dataclass(frozen=True)
class Outcome:
    """How a job ended on this machine. ``exit_code`` 0: well. ``failure`` is None when it was interrupted."""

    exit_code: int
    seconds: float
    failure: Failure | None = None
    interrupted: bool = False


def default_ranks() -> int:
    """One rank per accelerator; without any, 2 on the CPU, or 1 where there is a single core."""
    accelerators = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    return accelerators or min(2, _cores())


def _cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_ranks(
    command: Sequence[str], ranks: int, nodes: Nodes | None = None, variables: Mapping[str, str] | None = None
) -> Outcome:
    """Run ``command`` (``script.py ARGS...`` or ``-m module ARGS...``) once per rank and wait for all.

    Each rank gets torchrun's environment (``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT``,
    ...), ``variables`` and, where ``OMP_NUM_THREADS`` is not set, an equal part of the cores. When one fails the others
    are ended.
    Raises :class:`ConfigError` for fewer than 1 rank and for a port that is taken.
    """
    if ranks < 1:
        raise ConfigError(f"--nproc {ranks}: the number of ranks on this machine is 1 or more")
    nodes = nodes or Nodes()
    if nodes.port is not None and nodes.rank == 0:
        require_free(nodes.port)
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, _cores() // ranks)))
    logs = tempfile.mkdtemp(prefix="onecopy_")
    start = time.monotonic()
    try:
        # The agent logs every failure and signal in lines of its own; the outcome says it once.
        with _environment(OMP_NUM_THREADS=threads, **(variables or {})), _no_logs(), _ending_stopped(Path(logs)):
            elastic_launch(_config(ranks, nodes, logs), sys.executable)("-u", str(_RANK_MAIN), *command)
    except ChildFailedError as error:
        failure = _first(error.failures)
        code = failure.exit_code if failure.exit_code > 0 else 128 - failure.exit_code
        return Outcome(code, time.monotonic() - start, failure)
    except SignalException as error:
        return Outcome(128 + error.sigval, time.monotonic() - start, interrupted=True)
    finally:
        shutil.rmtree(logs)
    return Outcome(0, time.monotonic() - start)


def _config(ranks: int, nodes: Nodes, logs: str) -> LaunchConfig:
    common: dict[str, Any] = {
        "min_nodes": nodes.count,
        "max_nodes": nodes.count,
        "nproc_per_node": ranks,
        "max_restarts": 0,
        "monitor_interval": 0.1,
        "logs_specs": DefaultLogsSpecs(log_dir=logs),
        "run_id": "onecopy",
    }
    if nodes.port is None:
        # Port 0: the agent's store binds whatever is free, so two jobs never race for a number.
        return LaunchConfig(rdzv_backend="c10d", rdzv_endpoint=f"{_LOCAL}:0", local_addr=_LOCAL, **common)
    return LaunchConfig(
        rdzv_backend="static",
        rdzv_endpoint=f"{nodes.address}:{nodes.port}",
        rdzv_configs={"rank": nodes.rank, "timeout": 900},
        **common,
    )


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Set environment variables, which the ranks inherit, for the time of the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _ending_stopped(logs: Path) -> Iterator[None]:
    """Once a rank has written an error to ``logs``, kill stopped ranks (SIGSTOP): a stopped process does not take the signal
    that ends the others, and the agent would wait 30 seconds before it kills it."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.5):
            if not any(time.time() - file.stat().st_mtime > _LATE + 2 for file in logs.rglob("error.json")):
                continue
            for child in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if child.status() == psutil.STATUS_STOPPED:
                        child.kill()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def _no_logs() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _first(failures: dict[int, ProcessFailure]) -> Failure:
    """The failure that caused the others: not that of a rank which the agent ended, nor, if there is another, of one that
    waited for a lost one; then the earliest with an error file, then one without."""

    told = [extra["nanoseconds"] for failure in failures.values() if "nanoseconds" in (extra := _extra(failure))]

    def order(rank: int) -> tuple[bool, bool, bool, int]:
        extra = _extra(failures[rank])
        ended = failures[rank].exitcode == -signal.SIGTERM or _ended_late(failures[rank], told)
        time_ns = extra.get("nanoseconds", failures[rank].timestamp)
        return ended, _is_victim(extra), "nanoseconds" not in extra, time_ns

    rank, *after = sorted(failures, key=order)
    found, extra = failures[rank], _extra(failures[rank])
    if extra:
        message = extra.get("text", "")
    elif found.exitcode < 0:
        message = f"ended by signal {-found.exitcode} ({signal.Signals(-found.exitcode).name})"
        if found.exitcode == -signal.SIGKILL:
            total = psutil.virtual_memory().total / 2**30
            message += f"; if nobody killed it, this host ran out of memory (it has {total:.0f} GiB)"
    else:
        message = f"ended itself with exit code {found.exitcode}"
    own = tuple(r for r in after if failures[r].exitcode != -signal.SIGTERM)
    classes = tuple(extra.get("classes", ()))
    return Failure(rank, found.pid, found.exitcode, message, extra.get("py_callstack", ""), classes, own)


def _ended_late(failure: ProcessFailure, told: list[int]) -> bool:
    """Was a killed rank killed by the agent, because it did not react when another one had failed (it was stopped)?"""
    return failure.exitcode == -signal.SIGKILL and bool(told) and failure.timestamp > min(told) / 1e9 + _LATE


def _is_victim(extra: dict[str, Any]) -> bool:
    """Did this rank only notice that another one was lost?"""
    lost = "Connection closed by peer", "Connection reset by peer"
    return "onecopy.errors.HangError" in extra.get("classes", ()) or any(word in extra.get("text", "") for word in lost)


def _extra(failure: ProcessFailure) -> dict[str, Any]:
    message = failure.error_file_data.get("message")
    return message.get("extraInfo", {}) if isinstance(message, dict) else {}


def require_free(port: int) -> None:
    """Raise :class:`ConfigError` naming ``port`` and, where the system tells, the process that has it."""
    if not 0 < port < 65536:
        raise ConfigError(f"--master_port {port}: a port is a number from 1 to 65535; leave it out for a free one")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except PermissionError:
            raise ConfigError(f"--master_port {port} needs privileges; ports from 1024 on do not") from None
        except OSError:
            owner = _owner(port)
            raise ConfigError(f"--master_port {port} is taken{owner}; leave it out for a free one") from None


def _owner(port: int) -> str:
    """by which process a port is held, or nothing where the system does not let us see."""
    try:
        found = [c for c in psutil.net_connections("tcp") if c.laddr and c.laddr.port == port and c.pid]
        listening = next((c for c in found if c.status == psutil.CONN_LISTEN), None)
        return f" by pid {listening.pid} ({psutil.Process(listening.pid).name()})" if listening else ""
    except (psutil.AccessDenied, psutil.NoSuchProcess):
        return ""


def read_hostfile(path: Path) -> list[Host]:
    """Lines ``name slots=N``; ``#`` starts a comment. Raises :class:`ConfigError` naming the line that is wrong."""
    if not path.is_file():
        raise ConfigError(f"hostfile {str(path)!r} does not exist")
    hosts: list[Host] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        text = line.split("#")[0].strip()
        if not text:
            continue
        match = re.fullmatch(r"(\S+)\s+slots\s*=\s*(\d+)", text)
        if match is None or int(match[2]) < 1:
            raise ConfigError(f"hostfile {str(path)!r} line {number} is {text!r}; a line is 'name slots=N', N from 1")
        if match[1] in {host.name for host in hosts}:
            raise ConfigError(f"hostfile {str(path)!r} line {number} names {match[1]!r} a second time")
        hosts.append(Host(match[1], int(match[2])))
    if not hosts:
        raise ConfigError(f"hostfile {str(path)!r} names no host; a line is 'name slots=N'")
    return hosts


def place(
    hostfile: Path | None, node_rank: int | None, ranks: int | None, port: int | None, address: str | None = None
) -> tuple[int, Nodes]:
    """(ranks on this machine, nodes) from the options of the command line.

    Raises :class:`ConfigError` when they contradict each other.
    """
    if hostfile is None:
        if node_rank not in (None, 0):
            raise ConfigError(f"--node_rank {node_rank} without --hostfile: one machine has node rank 0 only")
        if address is not None:
            raise ConfigError(f"--master_addr {address} without --hostfile: one machine needs no address")
        return ranks if ranks is not None else default_ranks(), Nodes(port=port)
    hosts = read_hostfile(hostfile)
    if len(hosts) == 1 and node_rank is None:
        node_rank = 0
    if node_rank is None or not 0 <= node_rank < len(hosts):
        raise ConfigError(
            f"--node_rank {node_rank}: {str(hostfile)!r} has {len(hosts)} hosts, numbered from 0; say which one this is"
        )
    here = hosts[node_rank]
    if ranks is not None and ranks > here.slots:
        raise ConfigError(f"--nproc {ranks} is more than the {here.slots} slots of {here.name!r} in {str(hostfile)!r}")
    ranks = ranks if ranks is not None else here.slots
    if len(hosts) == 1:
        return ranks, Nodes(port=port)
    if port is None:
        raise ConfigError(
            f"{len(hosts)} hosts without --master_port: they must agree; choose one that is free on {hosts[0].name!r}"
        )
    return ranks, Nodes(len(hosts), node_rank, address or hosts[0].name, port)
