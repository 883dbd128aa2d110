"""``ds_report``: what is installed, and which of DeepSpeed's optimizers and devices there are."""

from __future__ import annotations

import shutil
import sys
from importlib.metadata import version as installed
from pathlib import Path

import torch

from onecopy.deepspeed.accelerator import get_accelerator
from onecopy.deepspeed.ops import __compatible_ops__
from onecopy.deepspeed.version import version

__all__ = ["main"]


def main() -> None:
    """Print it."""
    print("op name ................ installed .. compatible")
    for name, there in __compatible_ops__.items():
        print(f"{name} {'.' * (22 - len(name))} {'[YES]' if there else '[NO] '} ...... {'[OKAY]' if there else '[NO]'}")
    accelerator = get_accelerator()
    lines = {
        "torch install path": str(Path(torch.__file__).parent),
        "torch version": torch.__version__,
        "onecopy version": installed("onecopy"),
        "deepspeed install path": str(Path(__file__).parent),
        "deepspeed info": f"{version} (onecopy under the name of DeepSpeed)",
        "python": sys.version.split()[0],
        "accelerator": f"{accelerator.device_name()}, backend {accelerator.communication_backend_name()}",
    }
    if Path("/dev/shm").is_dir():
        lines["shared memory (/dev/shm) size"] = f"{shutil.disk_usage('/dev/shm').total / 2**30:.2f} GB"
    print("DeepSpeed general environment info:")
    for name, value in lines.items():
        print(f"{name} {'.' * (30 - len(name))} {value}")


if __name__ == "__main__":
    main()
