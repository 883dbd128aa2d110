"""Exports are read by the libraries they are for: ``from_pretrained`` gives the logits of the engine to the bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import onecopy
from tests.clients.support import take_the_name
from tests.ranks.checkpoints import adamw
from tests.ranks.harness import run_ranks

pytestmark = pytest.mark.clients
pytest.importorskip("transformers", reason="exports are checked with transformers")

SHAPE = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
TOKENS = torch.arange(24).reshape(2, 12)


def build(kind: str) -> Any:
    import transformers

    torch.manual_seed(0)
    if kind == "llama":
        llama = transformers.LlamaConfig(
            **SHAPE, intermediate_size=24, num_key_value_heads=1, tie_word_embeddings=False, max_position_embeddings=32
        )
        return transformers.LlamaForCausalLM(llama)
    gpt2 = transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    return transformers.GPT2LMHeadModel(gpt2)


def train(model: Any, rank: int) -> Any:
    """Two steps in bf16 at stage 3; dropout is off, so that the logits are a function of the weights."""
    engine = onecopy.initialize(model.eval(), onecopy.stage(3, dtype="bf16"), optimizer=adamw)
    for _ in range(2):
        engine(input_ids=TOKENS + rank, labels=TOKENS + rank).loss.backward()
        engine.step()
    return engine


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits.float()


def export_model(rank: int, world: int, kind: str, top: str) -> Tensor:
    take_the_name()
    engine = train(build(kind), rank)
    engine.export(f"{top}/{kind}")
    engine.export(f"{top}/{kind}-sharded", max_shard_size=4096)
    engine.save(f"{top}/{kind}-saved")
    return logits_of(engine)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_from_pretrained_gives_the_same_logits(kind: str, tmp_path: Path) -> None:
    import transformers

    expected = run_ranks(export_model, 2, kind, str(tmp_path))[0]
    tokenizer = tmp_path / "base"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    (tokenizer / "config.json").write_text(json.dumps(build(kind).config.to_dict() | {"dtype": "float32"}))
    (tokenizer / "pytorch_model.bin").write_text("old")
    command = [sys.executable, "-m", "onecopy.cli", "export", f"{tmp_path}/{kind}-saved"]
    subprocess.run([*command, f"{tmp_path}/offline"], check=True)
    tool = [*command, f"{tmp_path}/offline-with-base", "--model-dir", str(tokenizer), "--json", "--max-shard-size", "3KB"]
    said = json.loads(subprocess.run(tool, check=True, capture_output=True, text=True).stdout)
    assert "tokenizer.json" in said["files"] and "pytorch_model.bin" not in said["files"] and len(said["files"]) > 4
    for folder in (kind, f"{kind}-sharded", "offline", "offline-with-base"):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype="auto")
        assert model.dtype == torch.bfloat16 and type(model) is type(build(kind)), folder
        assert torch.equal(logits_of(model.eval()), expected), folder
    tied = "lm_head.weight" in load_file(tmp_path / kind / "model.safetensors")
    assert tied == (kind == "llama")  # GPT-2's head is its embedding, and is there once


def export_adapters(rank: int, world: int, top: str) -> tuple[Tensor, list[str]]:
    take_the_name()
    import peft

    torch.manual_seed(0)
    model: Any = peft.get_peft_model(
        build("llama"),
        peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"),
    )
    engine = train(model, rank)
    done = engine.export(f"{top}/adapter")
    engine.save(f"{top}/saved")
    return logits_of(engine), done.files


def test_adapters_alone_in_the_format_of_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="adapters are checked with peft")
    expected, files = run_ranks(export_adapters, 2, str(tmp_path))[0]
    assert sorted(files) == ["adapter_config.json", "adapter_model.safetensors"]
    subprocess.run([sys.executable, "-m", "onecopy.cli", "export", f"{tmp_path}/saved", f"{tmp_path}/offline"], check=True)
    for folder in ("adapter", "offline"):
        tensors = load_file(tmp_path / folder / "adapter_model.safetensors")
        assert len(tensors) == 9 and all("default" not in key for key in tensors)
        assert any(tensor.count_nonzero() for key, tensor in tensors.items() if "lora_B" in key)
        model = peft.PeftModel.from_pretrained(build("llama").bfloat16(), tmp_path / folder).bfloat16()
        assert torch.equal(logits_of(model.eval()), expected), folder
