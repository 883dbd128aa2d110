"""``deepspeed.ops``: the optimizers that scripts name. They are torch's, whose kernels come built with it, and Lion."""

from onecopy.deepspeed.ops import adagrad, adam, lion, op_builder

__all__ = ["adagrad", "adam", "lion", "op_builder"]

# What DeepSpeed compiles and loads by these names is there: by torch's kernels, and by threads that read and write disks.
__compatible_ops__ = {
    "async_io": True,
    "cpu_adagrad": True,
    "cpu_adam": True,
    "cpu_lion": True,
    "fused_adam": True,
    "fused_lion": True,
    "pin_memory": True,
}
