"""``deepspeed.ops.op_builder``: which kernels there are, asked as scripts ask DeepSpeed. Nothing is built."""

from __future__ import annotations

from typing import Any

from onecopy.errors import ConfigError

__all__ = [
    "AsyncIOBuilder", "CPUAdagradBuilder", "CPUAdamBuilder", "CPULionBuilder", "FusedAdamBuilder", "FusedLionBuilder",
    "OpBuilder",
]  # fmt: skip


class OpBuilder:
    """One kernel by its name in ``deepspeed.ops.__compatible_ops__``."""

    NAME = ""

    def is_compatible(self, verbose: bool = False) -> bool:
        """Is it there? Torch's kernels, and threads that read and write disks, are everywhere."""
        return True

    def load(self, verbose: bool = False) -> Any:
        """Raises :class:`ConfigError`: there is no extension to load."""
        raise ConfigError(
            f"{self.NAME} has no extension to load: its kernel is torch's; take the optimizer from deepspeed.ops, or offload "
            "by the configuration"
        )


class AsyncIOBuilder(OpBuilder):
    """Reads and writes of disks."""

    NAME = "async_io"


class CPUAdagradBuilder(OpBuilder):
    """Adagrad on the host."""

    NAME = "cpu_adagrad"


class CPUAdamBuilder(OpBuilder):
    """Adam on the host."""

    NAME = "cpu_adam"


class CPULionBuilder(OpBuilder):
    """Lion on the host."""

    NAME = "cpu_lion"


class FusedAdamBuilder(OpBuilder):
    """Adam on the device."""

    NAME = "fused_adam"


class FusedLionBuilder(OpBuilder):
    """Lion on the device."""

    NAME = "fused_lion"
