"""Jobs that start side by side find ports of their own; a port that is asked for is used or refused by name."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.ranks

# w = 1, loss = w x, SGD with rate 0.1; two ranks, two micro-batches: gradient (1 + 3 + 2 + 4) / 4, w = 0.75.
PLAIN = """
    import json, os, sys
    import torch
    import onecopy

    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    plan = onecopy.stage(3, accumulation=2)
    engine = onecopy.initialize(model, plan, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    rank = int(os.environ["RANK"])
    for x in ([1.0, 3.0], [2.0, 4.0])[rank]:
        engine(torch.tensor([[x]])).sum().backward()
        engine.step()
    told = [onecopy.full_param(model.weight).item(), os.environ["MASTER_PORT"]]
    with open(f"{sys.argv[1]}{rank}.json", "w") as file:
        json.dump(told, file)
"""

JSON = """
    import json, os, sys
    import torch
    import onecopy.deepspeed as deepspeed

    deepspeed.init_distributed(distributed_port=29500)  # where the launcher has chosen a port, that one counts
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    config = {"train_batch_size": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 0,
              "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 2}}
    engine, *_ = deepspeed.initialize(model=model, config=config, distributed_port=29500)
    rank = engine.global_rank
    for x in ([1.0, 3.0], [2.0, 4.0])[rank]:
        engine.backward(engine(torch.tensor([[x]])).sum())
        engine.step()
    told = [deepspeed.utils.safe_get_full_fp32_param(model.weight).item(), os.environ["MASTER_PORT"]]
    with open(f"{sys.argv[1]}{rank}.json", "w") as file:
        json.dump(told, file)
"""


def started(folder: Path, name: str, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "onecopy.cli", "launch", *options, f"{name}.py", f"{folder}/{name}-"]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def write(folder: Path, **bodies: str) -> None:
    for name, body in bodies.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(body))


def told(folder: Path, name: str, ranks: int = 2) -> list[Any]:
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(ranks)]


def test_two_jobs_at_once_both_train(tmp_path: Path) -> None:
    """Two jobs of two ranks start at the same time with default settings, one of them asking for DeepSpeed's fixed
    29500, while somebody else holds that port: both train (0.75), each on a port of its own that its ranks share. (row 74)"""
    write(tmp_path, plain=PLAIN, js=JSON)
    with socket.socket() as held:
        try:
            held.bind(("127.0.0.1", 29500))
            held.listen()
        except OSError:
            pass  # somebody else does hold it
        jobs = [started(tmp_path, name, "--nproc", "2") for name in ("plain", "js")]
        ends = [job.communicate(timeout=100) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], ends
    found = {name: told(tmp_path, name) for name in ("plain", "js")}
    for name, ranks in found.items():
        assert [weight for weight, _ in ranks] == pytest.approx([0.75, 0.75]), name
        assert len({port for _, port in ranks}) == 1, name
    assert found["plain"][0][1] != found["js"][0][1]
    assert "29500" not in (found["plain"][0][1], found["js"][0][1])


@pytest.mark.long
def test_a_port_that_is_asked_for_is_the_one(tmp_path: Path) -> None:
    """``--master_port`` on one machine with two ranks is obeyed; taken, the error names it and its owner; 0, which
    cannot be shared, says how to get a free one. (row 74)"""
    write(tmp_path, plain=PLAIN)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = str(held.getsockname()[1])
        jobs = [started(tmp_path, "plain", "--nproc", "2", "--master_port", number) for number in (port, "0")]
        taken, zero = (job.communicate(timeout=100)[1] for job in jobs)
    assert all(job.returncode not in (0, None) for job in jobs)
    assert port in taken and f"pid {os.getpid()}" in taken, taken
    assert "port" in zero and "free" in zero, zero
    assert not list(tmp_path.glob("*.json")), "something trained"
    job = started(tmp_path, "plain", "--nproc", "2", "--master_port", port)
    _, err = job.communicate(timeout=100)
    assert job.returncode == 0, err
    assert told(tmp_path, "plain") == [[pytest.approx(0.75), port]] * 2
