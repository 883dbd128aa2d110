"""``deepspeed.ops``: the optimizers that scripts name. They are torch's, whose kernels come built with it."""

from onecopy.deepspeed.ops import adagrad, adam

__all__ = ["adagrad", "adam"]
