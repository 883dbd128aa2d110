"""Ranks with different amounts of work: batches, validation rows, tokens to generate. Nobody waits for ever, and the mean
is over what there was.

Each is tried where ranks read each other's shards, and where they must gather together (as between hosts).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onecopy
from onecopy.comm import shared
from tests.ranks.harness import run_ranks
from tests.ranks.oracle import every_plan, largest_gap

pytestmark = pytest.mark.ranks


@contextmanager
def without_shared_memory(wire: bool) -> Iterator[None]:
    """Ranks of one host that behave as if they were on several."""
    before = shared._FOLDER
    shared._FOLDER = Path("/nowhere") if wire else before
    try:
        yield
    finally:
        shared._FOLDER = before


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 11, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).cumsum(1)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def tokens(rank: int, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + number)
    drawn = torch.randint(0, 11, (2, 5), generator=generator)
    return drawn[:, :-1], drawn[:, 1:]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.5, momentum=0.9)


@torch.no_grad()
def generate(model: nn.Module, start: int, count: int) -> list[int]:
    """Greedy, ``count`` tokens."""
    out = torch.tensor([[start]])
    for _ in range(count):
        out = torch.cat([out, model(out)[:, -1].argmax(-1, keepdim=True)], dim=1)
    return out[0].tolist()


def generate_and_train(rank: int, world: int, wire: bool, lengths: list[int]) -> dict[str, Any]:
    """Different numbers of tokens per rank, a training step, different ones again, a whole state dict."""
    out = {}
    plans = every_plan(units=onecopy.Units(min_numel=0))
    for name, plan in plans.items():
        torch.manual_seed(3)
        twin, model = Net(), Net()
        model.load_state_dict(twin.state_dict())
        with without_shared_memory(wire):
            engine = onecopy.initialize(model, plan, optimizer=sgd, patience=20)
        plain = sgd(twin.parameters())
        texts = []
        for count in range(2):
            engine.eval()
            mine = generate(engine, rank + 1, lengths[rank])
            texts.append(mine == generate(twin, rank + 1, lengths[rank]))
            engine.train()
            x, y = tokens(rank, count)
            loss_of(engine(x), y).backward()
            engine.step()
            for other in range(world):
                x, y = tokens(other, count)
                (loss_of(twin(x), y) / world).backward()
            plain.step()
            plain.zero_grad()
        # The module itself, without eval(): a rank that ran a pass knows that others may still run some.
        generate(model, 1, max(1, lengths[rank]))
        out[name] = (texts, len(engine.full_state_dict()), largest_gap(model, twin))
        engine.close()
    return out


@pytest.mark.parametrize("wire", [False, True], ids=["shared", "wire"])
@pytest.mark.parametrize("lengths", [[3, 7], [0, 4], [5, 1, 2]], ids=str)
def test_generation_of_different_lengths(lengths: list[int], wire: bool) -> None:
    """Rank 0 stops after 3 tokens and rank 1 after 7, then both train: texts and weights are those of one process."""
    for run in run_ranks(generate_and_train, len(lengths), wire, lengths):
        for name, (texts, size, gap) in run.items():
            assert texts == [True, True], name
            assert size == 5 + 3 and gap <= 1e-6, (name, gap)


def policy_and_reference(rank: int, world: int, wire: bool) -> float:
    """A policy that trains, and a frozen reference that each rank asks a different number of times, but at least once."""
    torch.manual_seed(5)
    twin, policy, reference = Net(), Net(), Net()
    policy.load_state_dict(twin.state_dict())
    plan = onecopy.stage(3, units=onecopy.Units(min_numel=0))
    with without_shared_memory(wire):
        engine = onecopy.initialize(policy, plan, optimizer=sgd, patience=20)
        frozen = onecopy.initialize(reference, plan)
    plain = sgd(twin.parameters())
    for count in range(3):
        x, y = tokens(rank, count)
        for _ in range(1 + (rank + count) % 3):
            with torch.no_grad():
                frozen(x)
        loss_of(engine(x), y).backward()
        engine.step()
        for other in range(world):
            x, y = tokens(other, count)
            (loss_of(twin(x), y) / world).backward()
        plain.step()
        plain.zero_grad()
    return largest_gap(policy, twin)


@pytest.mark.parametrize("wire", [False, True], ids=["shared", "wire"])
def test_a_reference_that_is_asked_at_different_times(wire: bool) -> None:
    gaps = run_ranks(policy_and_reference, 3, wire)
    assert all(gap <= 1e-6 for gap in gaps), gaps


class Tied(Net):
    """The head is the embedding: needed first in backward and complete last."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


def train_uneven(
    rank: int, world: int, wire: bool, batches: list[int], accumulation: int, kind: type[nn.Module], folder: str
) -> dict[str, Any]:
    out = {}
    plans = every_plan(units=onecopy.Units(min_numel=0), accumulation=accumulation)
    plans["on disk"] = onecopy.offload(plans["stage 3"], "disk", "disk", scratch=folder)
    for name, plan in plans.items():
        torch.manual_seed(3)
        twin, model = kind(), kind()
        model.load_state_dict(twin.state_dict())
        with without_shared_memory(wire):
            engine = onecopy.initialize(model, plan, optimizer=sgd, patience=20)
        seen = 0
        for x, y in engine.uneven(tokens(rank, number) for number in range(batches[rank])):
            loss_of(engine(x), y).backward()
            engine.step()
            seen += 1
        plain = sgd(twin.parameters())
        for first in range(0, max(batches), accumulation):
            window = [(r, n) for n in range(first, first + accumulation) for r in range(world) if n < batches[r]]
            for r, n in window:
                x, y = tokens(r, n)
                (loss_of(twin(x), y) / len(window)).backward()
            plain.step()
            plain.zero_grad()
        out[name] = (seen, engine.global_steps, largest_gap(model, twin))
        engine.close()
    return out


@pytest.mark.parametrize("wire", [False, True], ids=["shared", "wire"])
@pytest.mark.parametrize(("batches", "accumulation"), [([2, 4], 1), ([0, 3], 1), ([5, 3, 4], 2), ([3, 1], 4)], ids=str)
def test_ranks_with_different_numbers_of_batches(
    tmp_path: Path, batches: list[int], accumulation: int, wire: bool
) -> None:
    """Each step is that of one process on the batches there were: those of ranks that ran out count neither in the sum
    nor in its divisor."""
    kind = Tied if accumulation == 1 else Net
    args = (wire, batches, accumulation, kind, str(tmp_path))
    for rank, run in enumerate(run_ranks(train_uneven, len(batches), *args)):
        for name, (seen, steps, gap) in run.items():
            assert seen == batches[rank], name
            assert steps == -(-max(batches) // accumulation), name
            assert gap <= 1e-6, (name, gap)


def evaluate_on_one(rank: int, world: int, wire: bool) -> str:
    with without_shared_memory(wire):
        plan = onecopy.stage(3, units=onecopy.Units(min_numel=0))
        engine = onecopy.initialize(Net(), plan, optimizer=sgd, patience=3)
    x, y = tokens(rank, 0)
    try:
        if rank == 0:
            with torch.no_grad():
                engine(x)
        loss_of(engine(x), y).backward()
        engine.step()
    except onecopy.errors.HangError as error:
        return str(error)
    return "done"


def test_evaluation_on_one_rank_alone() -> None:
    """Where shards can be read it needs nobody; elsewhere it is an error that says who evaluates and who trains."""
    assert run_ranks(evaluate_on_one, 2, False) == ["done", "done"]
    for said in run_ranks(evaluate_on_one, 2, True):
        assert "rank 0: waits" in said and "in a forward pass without gradients" in said, said


def evaluate_and_step(rank: int, world: int) -> dict[str, Any]:
    """Validation between two steps is no part of either: the ledger of a step says what the step did."""
    plan = onecopy.stage(3, units=onecopy.Units(min_numel=0))
    engine = onecopy.initialize(Net(), plan, optimizer=sgd)
    x, y = tokens(rank, 0)
    for _ in range(2):
        engine.eval()
        generate(engine, 1, rank + 1)
        engine.train()
        loss_of(engine(x), y).backward()
        engine.step()
    return {"predicted": engine.predicted()["collectives"], "measured": engine.measured()["collectives"]}


def test_evaluation_is_not_counted_to_a_step() -> None:
    for ledgers in run_ranks(evaluate_and_step, 2):
        assert ledgers["predicted"] == ledgers["measured"]
