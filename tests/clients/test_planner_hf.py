"""Plans for Hugging Face configurations, without weights."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

import onecopy
from onecopy.cluster import Cluster, gpu
from onecopy.planner.activations import layer_bytes
from onecopy.planner.estimate import Work
from onecopy.planner.search import Question, fastest
from onecopy.planner.sources import activations_of, load_subject
from onecopy.planner.subject import Shape

pytestmark = pytest.mark.clients
pytest.importorskip("transformers")

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip
SMALL = {
    "gpt2": {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257},
    "mixtral": {
        "model_type": "mixtral", "num_hidden_layers": 4, "hidden_size": 512, "intermediate_size": 1024,
        "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 32000, "num_local_experts": 4,
    },
    "bert": {"model_type": "bert", "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4},
}  # fmt: skip


def folder(tmp_path: Path, config: dict[str, Any]) -> str:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_seventy_billion_on_1024_ranks(tmp_path: Path) -> None:
    """Llama-3.1-70B's shapes: every parameter, a traced forward and a search in seconds."""
    load_subject(folder(tmp_path, SMALL["gpt2"]))  # what transformers imports once
    before = time.process_time()
    subject = load_subject(folder(tmp_path, LLAMA))
    plan, work = onecopy.stage(3, dtype="bf16"), Work(1, 4096)
    found, said = activations_of(subject, plan, work)
    assert subject.parameters == 70_553_706_496
    assert found is not None and found.how == "traced" and not said
    # 32 s h of a block whose MLP is 4 h wide without gate; this one is gated and 3.5 h wide, so between 1 and 2 of it.
    assert 1 < found.saved(1, False).kept["model.layers.7"] / layer_bytes(Shape(80, 8192, 64), 4096, dropout=False) < 2
    chosen, _ = fastest(Question(subject, Cluster(gpu("h100"), 8, 128), plan, work, found))
    assert chosen.costs.fits
    assert time.process_time() - before < 5


@pytest.mark.parametrize("name", SMALL)
def test_other_kinds(tmp_path: Path, name: str) -> None:
    subject = load_subject(str(Path(folder(tmp_path, SMALL[name])) / "config.json"))
    assert subject.shape is not None and subject.shape.layers == SMALL[name].get("n_layer", 12 if name == "gpt2" else 4)
    plan = onecopy.stage(2, dtype="bf16")
    found, said = activations_of(subject, plan, Work(1, 64))
    assert found is not None and found.how == "traced", said
    eager, _ = activations_of(load_subject(folder(tmp_path, SMALL[name]), "eager"), plan, Work(1, 64, attention="eager"))
    assert eager is not None
    kept = [sum(saved.kept.values()) for saved in (eager.saved(1, False), found.saved(1, False), found.saved(1, True))]
    assert kept[0] > kept[1] > kept[2]


def test_a_configuration_nobody_knows(tmp_path: Path) -> None:
    with pytest.raises(onecopy.errors.ConfigError, match="no configuration that transformers knows"):
        load_subject(folder(tmp_path, {"model_type": "no-such-model"}))
    with pytest.raises(onecopy.errors.ConfigError, match="expected int, got str"):
        load_subject(folder(tmp_path, {"model_type": "llama", "hidden_size": "4096"}))
