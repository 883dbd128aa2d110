"""``onecopy export`` and ``onecopy checkpoint``: what the command line does with checkpoints."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from onecopy.checkpoint.export import Options, dtype_of, export_checkpoint
from onecopy.checkpoint.sources import open_source
from onecopy.checkpoint.store import human
from onecopy.cluster import quantity

__all__ = ["app", "export"]

app = typer.Typer(no_args_is_help=True, help="Look at checkpoints, check them, and turn those of other libraries into ours.")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Tag = Annotated[str | None, typer.Option("--tag", "-t", help="Which checkpoint of the directory (default: its latest)")]
Checkpoint = Annotated[Path, typer.Argument(help="Directory of checkpoints, or one of them; DeepSpeed's and DCP's too.")]


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
    options = Options(dtype_of(dtype), quantity(max_shard_size, "--max-shard-size", size=True), model_dir)
    done = export_checkpoint(open_source(checkpoint, tag, optimizer_states=False), out, options)
    if as_json:
        typer.echo(json.dumps(asdict(done)))
        return
    console = Console()
    console.print(f"{done.tensors} tensors, {human(done.bytes)}, in {done.folder}:", highlight=False)
    for file in done.files:
        console.print(f"  {file}", highlight=False)
    for note in done.notes:
        console.print(f"note: {note}", highlight=False)
