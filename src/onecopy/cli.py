"""The ``onecopy`` command."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from onecopy import gpt
from onecopy.checkpoint import cli as checkpoints
from onecopy.choose import choose
from onecopy.cluster import quantity
from onecopy.config_command import check_config, key_values, show_config
from onecopy.errors import ConfigError, OneCopyError
from onecopy.launch import Outcome, default_ranks, place, run_ranks
from onecopy.place import STATES, Place
from onecopy.planner.command import Asked, Machine, Wanted, run_plan
from onecopy.planner.command import Method as Planned
from onecopy.report.doctor import examine, notes, table
from onecopy.templates import NAMES
from onecopy.train import SAVE_EVERY, Method, Run, Settings, Task, show_report, what_is_kept
from onecopy.train import train as run_training

__all__ = ["app", "main"]

app = typer.Typer(
    name="onecopy",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="ZeRO training for PyTorch: every training state kept once across the ranks.",
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout at the end; the rest goes to stderr.")]
Ranks = Annotated[
    int | None,
    typer.Option("--nproc", "--num_gpus", "--num-gpus", help="Ranks on this machine (default: one per accelerator, else 2)"),
]
Config = Annotated[
    str | None, typer.Option(help="DeepSpeed JSON, or a template of onecopy config show; excludes the options it decides.")
]
Set = Annotated[
    list[str] | None, typer.Option("--set", help="KEY=VALUE in place of what the file says, repeatable: fp16.enabled=true")
]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"onecopy {version('onecopy')}")
        raise typer.Exit()


@app.callback()
def _root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options that stand before a command."""


@app.command()
def train(
    out: Annotated[Path, typer.Option(help="Folder for checkpoints, log and report; the same one resumes.")] = Path(
        "runs/train"
    ),
    model: Annotated[str, typer.Option(help=f"Size of the GPT: {', '.join(gpt.SIZES)}.")] = "small",
    context: Annotated[int | None, typer.Option(help="Bytes the model sees at once (default: the size's own)")] = None,
    data: Annotated[
        list[str] | None, typer.Option(help="File or folder of text, repeatable (default: Python's standard library)")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the weights and of the order of the data.")] = 0,
    config: Config = None,
    stage: Annotated[int | None, typer.Option(help="ZeRO stage, 0 to 3 (default: 2)")] = None,
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16 (default: bf16 on an accelerator, else fp32)")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows of one micro-batch on one rank (default: 16)")] = None,
    accumulation: Annotated[int | None, typer.Option(help="Micro-batches per optimizer step (default: 1)")] = None,
    lr: Annotated[float | None, typer.Option(help="Highest learning rate of AdamW (default: by the width)")] = None,
    recompute: Annotated[bool, typer.Option(help="Recompute activations in backward.")] = False,
    auto: Annotated[bool, typer.Option("--auto", help="Search the fastest plan that fits this machine, and use it.")] = False,
    changes: Set = None,
    offload: Annotated[str | None, typer.Option(help="Optimizer states on the host or on disk: host or disk.")] = None,
    offload_parameters: Annotated[str | None, typer.Option(help="At stage 3, parameters there too: host or disk.")] = None,
    offload_gradients: Annotated[
        str | None, typer.Option(help="At stages 2 and 3, host or disk (default: host, with --offload)")
    ] = None,
    offload_ratio: Annotated[float | None, typer.Option(help="Share of the elements that are offloaded (default: 1)")] = None,
    scratch: Annotated[str | None, typer.Option(help="Folder for what is on disk; emptied at the end.")] = None,
    states: Annotated[str, typer.Option(help=f"Format of the optimizer's moments: {', '.join(STATES)}.")] = "fp32",
    device_memory: Annotated[str | None, typer.Option(help="Most that a rank's states may take there, as 12G.")] = None,
    host_memory: Annotated[str | None, typer.Option(help="The same for the host.")] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps in all, earlier runs included.")] = 300,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = SAVE_EVERY,
    keep: Annotated[int, typer.Option(help="Newest checkpoints to keep.")] = 2,
    nproc: Ranks = None,
    as_json: Json = False,
) -> None:
    """Train a byte-level GPT on text; run again to resume."""
    task = Task(model, context, tuple(data or ()), seed)
    caps = _bytes("--device-memory", device_memory), _bytes("--host-memory", host_memory)
    placed = Place(offload, offload_parameters, offload_ratio, scratch, states, *caps, offload_gradients)
    method = Method(config, stage, dtype, batch_size, accumulation, lr, recompute, placed, key_values(changes or ()))
    job, ranks = Settings(task, method, Run(str(out), steps, save_every, keep)), default_ranks() if nproc is None else nproc
    if auto:
        job, chosen = choose(job, ranks)
        typer.echo(chosen, err=True)
    outcome, report = run_training(job, ranks)
    if outcome.exit_code:
        _fail(outcome, as_json, f"; {what_is_kept(job)}")
    if as_json:
        typer.echo(json.dumps(report))
    else:
        show_report(report, Console())


@app.command(context_settings={"allow_interspersed_args": False})
def launch(
    script: Annotated[str, typer.Argument(help="Script to run on every rank, or a module's name after --module.")],
    args: Annotated[list[str] | None, typer.Argument(help="Its arguments, passed on as they are.")] = None,
    nproc: Ranks = None,
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module, as with python -m.")] = False,
    hostfile: Annotated[Path | None, typer.Option(help="Lines 'name slots=N'; run this command on each host.")] = None,
    node_rank: Annotated[
        int | None, typer.Option("--node_rank", "--node-rank", help="Which host of the hostfile this is, from 0.")
    ] = None,
    master_addr: Annotated[
        str | None, typer.Option("--master_addr", "--master-addr", help="Address of host 0 (default: its name)")
    ] = None,
    master_port: Annotated[
        int | None, typer.Option("--master_port", "--master-port", help="Port on host 0 (default: a free one)")
    ] = None,
    as_deepspeed: Annotated[
        bool, typer.Option("--as-deepspeed", help="The name deepspeed means onecopy.deepspeed, in the script and below.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run a script of your own on several ranks, with torchrun underneath."""
    if not module and not Path(script).is_file():
        raise ConfigError(f"script {script!r} does not exist; a module is run with --module {script}")
    ranks, nodes = place(hostfile, node_rank, nproc, master_port, master_addr)
    variables: dict[str, str] = {}
    if as_deepspeed:
        from onecopy.deepspeed.alias import environment  # the other commands need none of it

        variables = environment()
    outcome = run_ranks([*(["-m"] if module else []), script, *(args or [])], ranks, nodes, variables)
    if outcome.failure is not None and outcome.failure.nothing_to_run:
        raise ConfigError(f"--module {script} cannot be run: {outcome.failure.message}")
    if outcome.exit_code:
        _fail(outcome, as_json)
    if as_json:
        typer.echo(json.dumps(_summary(outcome)))


@app.command()
def plan(
    model: Annotated[str | None, typer.Argument(help="config.json, its folder, hub name, or module:function.")] = None,
    params: Annotated[str | None, typer.Option(help="Number of parameters instead of a model: 7e9, 7B.")] = None,
    largest_unit: Annotated[str | None, typer.Option(help="Parameters of the largest unit, with --params.")] = None,
    layers: Annotated[int | None, typer.Option(help="With --params, as the next three (default: assumed)")] = None,
    hidden: Annotated[int | None, typer.Option(help="Width of the layers.")] = None,
    vocab: Annotated[int | None, typer.Option(help="Size of the vocabulary.")] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads of a layer.")] = None,
    gpu: Annotated[str | None, typer.Option(help="Kind, or memory as 24GB (default: a100-80g)")] = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs of a node.")] = None,
    nodes: Annotated[int | None, typer.Option(help="Machines.")] = None,
    ranks: Annotated[int | None, typer.Option(help="GPUs in all, instead of --gpus and --nodes (8 a node).")] = None,
    host_memory: Annotated[str | None, typer.Option(help="Of a node: 128GB (default: not checked)")] = None,
    nvme: Annotated[str | None, typer.Option(help="Disk of a node: 2TB (default: none)")] = None,
    link: Annotated[float | None, typer.Option(help="GB/s from a node to the others.")] = None,
    here: Annotated[bool, typer.Option("--here", help="This machine.")] = False,
    config: Config = None,
    changes: Set = None,
    stage: Annotated[int | None, typer.Option(help="ZeRO stage, 0 to 3 (default: 2)")] = None,
    offload: Annotated[str | None, typer.Option(help="Optimizer states on the host or on disk: host or disk.")] = None,
    offload_parameters: Annotated[str | None, typer.Option(help="At stage 3, parameters there too: host or disk.")] = None,
    states: Annotated[str, typer.Option(help=f"Format of the moments at rest: {', '.join(STATES)}.")] = "fp32",
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16 (default: bf16)")] = None,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", "--batch", help="Sequences of a micro-batch on one rank (default: 1)")
    ] = None,
    accumulation: Annotated[int | None, typer.Option(help="Micro-batches per optimizer step (default: 1)")] = None,
    seq: Annotated[int | None, typer.Option(help="Tokens of a sequence (default: 2048)")] = None,
    recompute: Annotated[bool, typer.Option("--recompute", help="Recompute activations in backward.")] = False,
    attention: Annotated[str, typer.Option(help="flash or eager.")] = "flash",
    compare: Annotated[bool, typer.Option("--compare", help="Stages and offloads side by side.")] = False,
    search: Annotated[bool, typer.Option("--search", help="The fastest plan that fits, and why.")] = False,
    write: Annotated[Path | None, typer.Option(help="File for the plan that --search chose, as DeepSpeed JSON.")] = None,
    html: Annotated[Path | None, typer.Option(help="File for what --compare found, as a page with plots.")] = None,
    simulate: Annotated[bool, typer.Option("--simulate", help="Run a rank's engine on it, and compare.")] = False,
    as_json: Json = False,
) -> None:
    """Say what a plan needs before it runs: memory, traffic, time, and whether it fits."""
    machine = Machine(gpu, gpus, nodes, ranks, host_memory, nvme, link, here)
    where = Place(offload, offload_parameters, states=states)
    told = key_values(changes or ())
    method = Planned(stage, where, config, dtype, batch_size, accumulation, seq, recompute, attention, told)
    numbers = {"params": params, "largest_unit": largest_unit}
    numbers |= {"layers": layers, "hidden": hidden, "vocab": vocab, "heads": heads}  # type: ignore[dict-item]
    wanted = Wanted(compare, search, simulate, write, html)
    report = run_plan(Asked(machine, method, model, numbers, wanted), Console(stderr=as_json))
    if as_json:
        typer.echo(json.dumps(report))


@app.command()
def doctor(
    memory: Annotated[bool, typer.Option("--memory", help="Measure memory (the default without --disk).")] = False,
    disk: Annotated[str | None, typer.Option(help="Measure the disk of this folder, with 512 MiB in it.")] = None,
    params: Annotated[str, typer.Option(help="Parameters of the model whose optimizer step is estimated.")] = "7B",
    as_json: Json = False,
) -> None:
    """Measure memory and disk, and say what an optimizer step with its states there costs."""
    if disk is not None and not disk.strip():
        raise ConfigError(f"--disk {disk!r} names no folder; name one on the disk, such as '.' for this one")
    found = examine(quantity(params, "--params"), memory or disk is None, None if disk is None else Path(disk))
    if as_json:
        typer.echo(json.dumps(found))
        return
    console = Console()
    console.print(table(found))
    for note in notes(found):
        console.print(note, highlight=False)


configs = typer.Typer(no_args_is_help=True, help="DeepSpeed JSON files: what one means here, and ready-made ones.")
app.add_typer(configs, name="config")


@configs.command()
def check(
    file: Annotated[str, typer.Argument(help="DeepSpeed JSON, or the name of a template.")],
    ranks: Annotated[int | None, typer.Option(help="Ranks the run has (default: WORLD_SIZE, else 1)")] = None,
    changes: Set = None,
    as_json: Json = False,
) -> None:
    """Say what every key of a file means here, and what is wrong; exit code 1 where something is."""
    found, ok = check_config(file, ranks, changes or (), Console(stderr=as_json))
    if as_json:
        typer.echo(json.dumps(found))
    raise typer.Exit(0 if ok else 1)


@configs.command()
def show(
    name: Annotated[str | None, typer.Argument(help=f"One of {', '.join(NAMES)}; without, a list.")] = None,
    auto: Annotated[bool, typer.Option("--auto", help="Say auto where a trainer with its own arguments fills in.")] = False,
    write: Annotated[Path | None, typer.Option(help="Write it to this file, too.")] = None,
) -> None:
    """Print a ready-made file; its _why keys say when to use it."""
    typer.echo(show_config(name, auto, write))
app.command()(checkpoints.export)
app.add_typer(checkpoints.app, name="checkpoint")


def _bytes(option: str, text: str | None) -> int | None:
    return None if text is None else quantity(text, option, size=True)


def _summary(outcome: Outcome) -> dict[str, Any]:
    return {"ok": outcome.exit_code == 0, **asdict(outcome)}


def _fail(outcome: Outcome, as_json: bool, note: str = "") -> None:
    """Say what went wrong, the traceback last, and leave with the failing rank's exit code."""
    Console(stderr=True).show_cursor()  # a rank that was ended under its progress bar left it hidden
    if as_json:
        typer.echo(json.dumps(_summary(outcome)))
    if outcome.failure is not None:
        typer.echo(f"error: {outcome.failure.describe()}", err=True)
    else:
        typer.echo(f"interrupted{note}", err=True)
    raise typer.Exit(outcome.exit_code)


def main() -> None:
    """Entry point: bad input ends in one line on stderr and exit code 2."""
    try:
        app()
    except OneCopyError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
