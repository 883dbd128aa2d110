"""Checkpoints: safetensors and one JSON manifest per step, loaded by any number of ranks under any plan."""
