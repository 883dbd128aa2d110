"""torchdata's StatefulDataLoader as the ``data`` of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import onecopy

pytestmark = pytest.mark.clients

loaders = pytest.importorskip("torchdata.stateful_dataloader")


class Squares(torch.utils.data.Dataset[torch.Tensor]):
    """Rows with a random part, as augmentation makes them, where no worker process has a random state of its own."""

    def __init__(self, random: bool) -> None:
        self.random = random

    def __len__(self) -> int:
        return 14

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), index**2, torch.rand(1).item() if self.random else 0.0])


class Run:
    def __init__(self, workers: int) -> None:
        torch.manual_seed(5)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
        self.engine = onecopy.initialize(model, onecopy.stage(2), optimizer=lambda p: torch.optim.AdamW(p, lr=0.01))
        # Its own generator: a new iterator would draw from the global one, which has been restored by then.
        options: dict[str, Any] = {"shuffle": True, "num_workers": workers, "generator": torch.Generator().manual_seed(3)}
        self.loader: Any = loaders.StatefulDataLoader(Squares(workers == 0), batch_size=3, **options)
        self.epoch: Any = None

    def steps(self, count: int) -> list[Any]:
        """Batches and losses."""
        seen = []
        self.epoch = iter(self.loader) if self.epoch is None else self.epoch
        for _ in range(count):
            batch = next(self.epoch)
            loss = self.engine(batch).square().mean()
            loss.backward()
            self.engine.step()
            seen.append((batch.tolist(), loss.item()))
        return seen


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stateful_loader_goes_on_where_it_was(tmp_path: Path, workers: int) -> None:
    straight = Run(workers)
    """The rest of an epoch of five batches: the same rows in the same order, the same random parts, the same dropout."""
    straight = Run(workers)
    straight.steps(2)
    straight.engine.save(tmp_path, data=straight.loader)
    expected = straight.steps(3)
    resumed = Run(workers)
    resumed.engine.load(tmp_path, data=resumed.loader)
    assert resumed.steps(3) == expected
