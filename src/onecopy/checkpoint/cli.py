"""``onecopy export`` and ``onecopy checkpoint``: what the command line does with checkpoints."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from onecopy.checkpoint.convert import convert as write_ours
from onecopy.checkpoint.export import Options, export_checkpoint
from onecopy.checkpoint.facts import check_everything, facts_of
from onecopy.checkpoint.foreign import NeedsModelError
from onecopy.checkpoint.release import writing_to
from onecopy.checkpoint.sources import Source, open_source
from onecopy.checkpoint.store import human
from onecopy.errors import CheckpointError, ConfigError

__all__ = ["app", "export"]

app = typer.Typer(no_args_is_help=True, help="Look at checkpoints, check them, and turn them into another library's or ours.")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Tag = Annotated[str | None, typer.Option("--tag", "-t", help="Which checkpoint of the directory (default: its latest)")]
Checkpoint = Annotated[Path, typer.Argument(help="Directory of checkpoints, or one of them: ours, DeepSpeed's or DCP's.")]


def export(
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Argument(help="Folder for the weights.")],
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16 (default: what the model computes in)")] = None,
    max_shard_size: Annotated[str, typer.Option("--max-shard-size", "--max_shard_size", help="Of one file.")] = "5GB",
    model_dir: Annotated[
        str | None, typer.Option("--model-dir", "--model_dir", help="Folder whose configuration and tokenizer are copied.")
    ] = None,
    tag: Tag = None,
    as_json: Json = False,
) -> None:
    """Write plain weights, as from_pretrained reads them; of a PEFT model, its adapters."""
    options = Options.of(dtype, max_shard_size, model_dir=model_dir)
    done = export_checkpoint(open_source(checkpoint, tag, optimizer_states=False), out, options)
    if as_json:
        typer.echo(json.dumps(asdict(done)))
        return
    console = Console()
    head = f"{done.tensors} tensors, {human(done.bytes)}, in {done.folder}:"
    for line in [head] + [f"  {file}" for file in done.files] + [f"note: {note}" for note in done.notes]:
        console.print(line, highlight=False, markup=False)


@app.command()
def inspect(
    checkpoint: Checkpoint,
    tag: Tag = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="Every parameter and buffer as well.")] = False,
    as_json: Json = False,
) -> None:
    """Say what a checkpoint holds, without reading its tensors."""
    source, notes = _open(checkpoint, tag)
    facts = facts_of(source)
    facts["notes"] += notes
    if as_json:
        typer.echo(json.dumps(facts))
        return
    console = Console()
    console.print(_overview(facts))
    if tensors:
        console.print(_tensors(facts))


@app.command()
def verify(checkpoint: Checkpoint, tag: Tag = None, as_json: Json = False) -> None:
    """Read all of a checkpoint and name every file that is not as it was written; exit code 1 when there is one."""
    try:
        source, notes = _open(checkpoint, tag)
    except CheckpointError as error:  # nothing of it can be read
        found = {"folder": str(checkpoint), "files": 0, "problems": [str(error)]}
        typer.echo(json.dumps(found) if as_json else str(error), err=not as_json)
        raise typer.Exit(1) from error
    # A run would go on from an older one then, so the newest is what was asked about.
    problems = [*source.damaged, *check_everything(source)]
    if as_json:
        typer.echo(json.dumps({"folder": str(source.folder), "files": len(source.manifest.files), "problems": problems}))
    else:
        for problem in problems:
            typer.echo(problem, err=True)
        good = "every checksum is right" if source.checksums else "all of it can be read; it has no checksums"
        typer.echo(
            f"{source.folder}: {len(source.manifest.files)} files, " + (f"{len(problems)} problems" if problems else good)
        )
        for note in notes:
            typer.echo(f"note: {note}")
    if problems:
        raise typer.Exit(1)


@app.command()
def convert(
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Argument(help="Directory of our checkpoints to add it to; for --to dcp, a new folder.")],
    to: Annotated[str, typer.Option(help="onecopy, or dcp for torch.distributed.checkpoint.")] = "onecopy",
    tag: Tag = None,
    weights_only: Annotated[bool, typer.Option("--weights-only", help="Leave the optimizer's states out.")] = False,
    as_json: Json = False,
) -> None:
    """Write another library's checkpoint as one of ours, or any as DCP's. An engine loads them without it."""
    from onecopy.checkpoint.dcp_write import to_dcp  # torch's module takes a second to import

    if to not in ("onecopy", "dcp"):
        raise ConfigError(f"--to {to!r} is not a kind of checkpoint that is written; it is onecopy or dcp")
    source = open_source(checkpoint, tag, optimizer_states=not weights_only)
    with writing_to(out):
        written = to_dcp(source, out, not weights_only) if to == "dcp" else write_ours(source, out, None, not weights_only)
    notes = source.manifest.plan.get("notes", [])
    if as_json:
        typer.echo(json.dumps({"from": str(source.folder), "kind": source.kind, "folder": written, "notes": notes}))
        return
    typer.echo(f"{source.folder} ({source.kind}) is in {written} now")
    for note in notes:
        typer.echo(f"note: {note}")


def _open(checkpoint: Path, tag: str | None) -> tuple[Source, list[str]]:
    """The checkpoint with its optimizer's states or, where these need the model to be told apart, without, and a note."""
    try:
        return open_source(checkpoint, tag, complete=False), []
    except NeedsModelError as error:
        return open_source(checkpoint, tag, optimizer_states=False, complete=False), [f"without optimizer states: {error}"]


def _overview(facts: dict[str, Any]) -> Table:
    table = Table(show_header=False, title=facts["folder"], title_justify="left")
    for key in ("kind", "written by", "ranks", "dtype", "global_steps", "parameters", "trained", "weights", "optimizer"):
        if facts.get(key) is not None:
            value = facts[key]
            table.add_row(key, f"{value:,}" if isinstance(value, int) else escape(str(value)))
    for at, group in enumerate(facts["groups"]):
        options = ", ".join(f"{key} {value}" for key, value in group["options"].items())
        table.add_row(f"group {at}", f"{group['parameters']} parameters; {escape(options)}")
    for key in ("scheduler", "loss_scale", "client_state"):
        if facts[key]:
            table.add_row(key, escape(str(facts[key])))
    table.add_row("files", f"{len(facts['files'])}, {human(sum(facts['files'].values()))}")
    for note in facts["notes"]:
        table.add_row("note", escape(note))
    return table


def _tensors(facts: dict[str, Any]) -> Table:
    table = Table("name", "shape", "computes in", "kept in", "states", "spans")
    for each in facts["tensors"]:
        shape = "x".join(map(str, each["shape"])) or "scalar"
        states = ", ".join(each["states"]) or ("-" if each["trainable"] else "frozen" if each["spans"] else "buffer")
        table.add_row(escape(" = ".join(each["names"])), shape, each["dtype"], each["kept"], states, str(each["spans"]))
    return table
