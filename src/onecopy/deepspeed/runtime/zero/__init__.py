"""``deepspeed.runtime.zero``."""

from onecopy.deepspeed.runtime.zero import config, offload_config, partition_parameters, stage3, stage_1_and_2
from onecopy.deepspeed.zero import GatheredParameters, Init, register_external_parameter, unregister_external_parameter

__all__ = [
    "GatheredParameters", "Init", "config", "offload_config", "partition_parameters", "register_external_parameter",
    "stage3", "stage_1_and_2", "unregister_external_parameter",
]  # fmt: skip
