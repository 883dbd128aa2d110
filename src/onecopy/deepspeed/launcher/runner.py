"""The ``deepspeed`` command: DeepSpeed's flags, :mod:`onecopy.launch` underneath.

A job of several machines is started by this command on each of them, with ``--no_ssh --node_rank N``: nothing here logs in
elsewhere.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch

from onecopy.deepspeed.alias import environment
from onecopy.errors import ConfigError, OneCopyError
from onecopy.launch import Host, default_ranks, place, read_hostfile, run_ranks

__all__ = ["main", "parse_args", "parse_resource_filter"]

DLTS_HOSTFILE = "/job/hostfile"
DEEPSPEED_ENVIRONMENT_NAME = os.getenv("DS_ENV_FILE", ".deepspeed_env")
_LAUNCH = "onecopy.deepspeed.launcher.launch"
# Flags that ask for something that is not done, and what to do instead.
_REFUSED = {
    "autotuning": "`onecopy plan --search` finds a plan that fits",
    "no_python": "start the program with torchrun --no-python",
    "enable_each_rank_log": "ranks write to the terminal; redirect inside the script, by RANK",
    "save_pid": "the shell knows the process it starts",
    "venv_script": "start the command inside the environment",
    "force_multi": "run the command on each host with --no_ssh --node_rank N",
}


def parse_args(args: list[str] | None = None) -> argparse.Namespace:
    """The command line, by DeepSpeed's names."""
    parser = argparse.ArgumentParser(prog="deepspeed", description="Run a script on several ranks.")
    parser.add_argument("-H", "--hostfile", default=None, help="lines 'name slots=N' (default: /job/hostfile if it is there)")
    parser.add_argument("-i", "--include", default="", help="devices to use: localhost:0,2 or host:0@host2:1,3")
    parser.add_argument("-e", "--exclude", default="", help="devices not to use, in the same form")
    parser.add_argument("--num_nodes", type=int, default=-1, help="the first N hosts of the hostfile")
    parser.add_argument("--num_gpus", "--num_accelerators", type=int, default=-1, help="ranks on each machine")
    parser.add_argument("--master_port", type=int, default=None, help="port on the first host (default: a free one)")
    parser.add_argument("--master_addr", default=None, help="address of the first host (default: its name)")
    parser.add_argument("--node_rank", type=int, default=-1, help="which host of the hostfile this is, from 0")
    parser.add_argument("--no_ssh", action="store_true", help="the command is run on each host; always so")
    parser.add_argument("--no_ssh_check", action="store_true", help="no effect: there is no ssh")
    parser.add_argument("--module", action="store_true", help="the script is a module, as with python -m")
    parser.add_argument("--no_local_rank", action="store_true", help="do not pass --local_rank=N to the script")
    parser.add_argument("--bind_cores_to_rank", action="store_true", help="no effect: ranks share the cores evenly")
    parser.add_argument("--bind_core_list", default=None, help="no effect")
    parser.add_argument("--log_level", default="info", help="no effect on what the script logs")
    parser.add_argument("-q", "--quiet", action="store_true", help="no effect: the command prints errors only")
    for name in ("launcher", "launcher_args", "ssh_port"):
        parser.add_argument(f"--{name}", default=None, help="no effect: the command is run on each host")
    for name in ("no_python", "save_pid", "force_multi"):
        parser.add_argument(f"--{name}", action="store_true", help=argparse.SUPPRESS)
    for name in ("autotuning", "enable_each_rank_log", "venv_script"):
        parser.add_argument(f"--{name}", default=None, help=argparse.SUPPRESS)
    parser.add_argument("user_script")
    parser.add_argument("user_args", nargs=argparse.REMAINDER)
    return parser.parse_args(args)


def parse_resource_filter(
    host_info: dict[str, list[int]], include_str: str = "", exclude_str: str = ""
) -> dict[str, list[int]]:
    """Devices by host that are left of ``host_info``, in its order, after ``include_str`` or ``exclude_str``:
    ``host:0,2@other``; a host without numbers means all of it, and one named twice both. Raises :class:`ConfigError`, a
    ValueError, for both at once, and for hosts and devices that are not there."""
    if include_str and exclude_str:
        raise ConfigError(f"--include {include_str} and --exclude {exclude_str}: give one of them")
    if not (include_str or exclude_str):
        return host_info
    named: dict[str, list[int]] = {}
    for part in (include_str or exclude_str).split("@"):
        host, colon, numbers = part.partition(":")
        if host not in host_info:
            raise ConfigError(f"host {host!r} in {part!r} is not there; there are {', '.join(host_info)}")
        chosen = [_device(number, part) for number in numbers.split(",")] if colon else host_info[host]
        missing = sorted(set(chosen) - set(host_info[host]))
        if missing:
            raise ConfigError(f"{host} has no device {missing[0]}; it has {', '.join(map(str, host_info[host]))}")
        named[host] = sorted({*named.get(host, []), *chosen})
    if include_str:
        return {host: named[host] for host in host_info if host in named}
    left = {host: [each for each in devices if each not in named.get(host, [])] for host, devices in host_info.items()}
    return {host: devices for host, devices in left.items() if devices}


def _device(text: str, part: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"{part!r}: devices are whole numbers after the colon, as in localhost:0,2")
    return int(text)


def main(args: list[str] | None = None) -> None:
    """Run the job and leave with the exit code of the rank that failed first, 0 without."""
    asked = parse_args(args)
    try:
        code = _run(asked)
    except OneCopyError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    sys.exit(code)


def _run(asked: argparse.Namespace) -> int:
    for name, instead in _REFUSED.items():
        if getattr(asked, name):
            raise ConfigError(f"--{name} is not supported: {instead}")
    if not asked.module and not Path(asked.user_script).is_file():
        raise ConfigError(f"script {asked.user_script!r} does not exist; a module is run with --module")
    if (asked.include or asked.exclude) and (asked.num_gpus > 0 or asked.num_nodes > 0):
        raise ConfigError("--include and --exclude say which devices; leave --num_gpus and --num_nodes out")
    hostfile = _hostfile(asked)
    variables = environment()
    if hostfile is None:
        ranks = _chosen_here(asked, variables)
        ranks, nodes = place(None, None, ranks, asked.master_port)
    else:
        node = None if asked.node_rank < 0 else asked.node_rank
        wanted = asked.num_gpus if asked.num_gpus > 0 else None
        ranks, nodes = place(hostfile, node, wanted, asked.master_port, asked.master_addr)
    script = [*(["--no_local_rank"] if asked.no_local_rank else []), *(["-m"] if asked.module else []), asked.user_script]
    outcome = run_ranks(["-m", _LAUNCH, *script, *asked.user_args], ranks, nodes, variables)
    if outcome.failure is not None:
        print(f"error: {outcome.failure.describe()}", file=sys.stderr)
    return outcome.exit_code


def _hostfile(asked: argparse.Namespace) -> Path | None:
    """The hostfile, None where this machine is all there is."""
    default = Path(DLTS_HOSTFILE)
    path = Path(asked.hostfile) if asked.hostfile else default if default.is_file() else None
    if path is None:
        return None
    hosts: list[Host] = read_hostfile(path)
    if len(hosts) == 1 or asked.num_nodes == 1:
        return None
    if asked.include or asked.exclude or asked.num_nodes > 0:
        raise ConfigError(
            f"--include, --exclude and --num_nodes on {len(hosts)} hosts are not supported: leave hosts out of {str(path)!r}"
        )
    return path


def _chosen_here(asked: argparse.Namespace, variables: dict[str, str]) -> int | None:
    """Ranks on this machine, one for each device that is chosen; None for as many as there are."""
    if asked.num_gpus > 0 or not (asked.include or asked.exclude):
        return asked.num_gpus if asked.num_gpus > 0 else None
    there = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    devices = parse_resource_filter({"localhost": list(range(there or default_ranks()))}, asked.include, asked.exclude)
    chosen = devices.get("localhost", [])
    if not chosen:
        raise ConfigError(f"--exclude {asked.exclude} leaves no device")
    if there:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, chosen))
    return len(chosen)


if __name__ == "__main__":
    main()
