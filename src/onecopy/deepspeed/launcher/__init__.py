"""``deepspeed.launcher``: the command that starts ranks."""
