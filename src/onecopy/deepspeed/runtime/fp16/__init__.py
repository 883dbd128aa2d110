"""``deepspeed.runtime.fp16``."""
