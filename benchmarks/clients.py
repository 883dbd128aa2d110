"""The same script of Transformers' Trainer on DeepSpeed and on onecopy, taking turns; time and memory side by side.

    python benchmarks/clients.py --deepspeed-python ~/deepspeed/bin/python --dtype fp32 --rounds 6 --steps 4

Both interpreters need torch, transformers and accelerate, the named one DeepSpeed as well. It measures as ``peers.py`` does,
with a trainer's own step in the place of a bare loop.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from _common import CONTEXT
from _ranks import Job, Ranks
from onecopy.deepspeed.alias import search_path
from peers import measure, report

MODES = ("deepspeed2", "deepspeed3", "onecopy2", "onecopy3")
_RANK = str(Path(__file__).with_name("_client_rank.py"))


def start(job: Job, args: argparse.Namespace) -> Ranks:
    if job.mode.startswith("deepspeed"):
        return Ranks(job, str(args.deepspeed_python), _RANK)
    return Ranks(job, sys.executable, _RANK, [search_path()])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("10m", "25m"), default="25m", help="parameters of the Llama")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=4, help="timed steps per mode and round")
    parser.add_argument("--rows", type=int, default=1, help="sequences per rank and step")
    parser.add_argument("--context", type=int, default=CONTEXT, help="bytes in a sequence")
    parser.add_argument("--modes", type=lambda text: text.split(","), default=list(MODES), help=f"of: {', '.join(MODES)}")
    parser.add_argument("--deepspeed-python", default=sys.executable, help="interpreter that can import deepspeed")
    parser.add_argument("--apart", action="store_true", help="start the ranks anew for each turn")
    parser.add_argument("--account", action="store_true", help="also count the allocator's bytes, in a run of its own")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> None:
    args = parse()
    report(args, lambda: measure(args, start), "Llama under Trainer")


if __name__ == "__main__":
    main()
