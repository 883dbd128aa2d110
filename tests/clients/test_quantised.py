"""Adapters over a base that bitsandbytes has quantised: cut and put on the host as it is, with the losses of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, distribute_tensor

import onecopy
import onecopy.deepspeed as deepspeed
from onecopy.engine import quantised
from onecopy.errors import PlanError, RankMismatchError
from tests.clients.support import needs
from tests.ranks.harness import run_ranks

pytestmark = [pytest.mark.clients, needs("bitsandbytes")]

WIDTH, BLOCKS, RANK, STEPS = 128, 3, 4, 2
# 4 bits with scales in 8 bits, with scales in fp32, and stored in a floating-point dtype; 8 bits; and no quantisation.
KINDS = {
    "nf4": {"compress_statistics": True},
    "nf4, plain scales": {"compress_statistics": False},
    "nf4 in bf16": {"compress_statistics": True, "quant_storage": torch.bfloat16},
    "int8": {},
    "bf16": {},
}
BITS = {"nf4": 4, "nf4, plain scales": 4, "nf4 in bf16": 4, "int8": 8, "bf16": 16}


class Adapted(nn.Module):
    """A frozen linear map with a low-rank one beside it."""

    def __init__(self, kind: str) -> None:
        from bitsandbytes.nn import Linear4bit, Linear8bitLt, Params4bit

        super().__init__()
        plain = nn.Linear(WIDTH, WIDTH, bias=False)
        self.base: nn.Module
        if kind.startswith("nf4"):
            storage = KINDS[kind].get("quant_storage", torch.uint8)
            self.base = Linear4bit(WIDTH, WIDTH, bias=False, compute_dtype=torch.float32, quant_storage=storage)
            self.base.weight = Params4bit(plain.weight.detach(), requires_grad=False, quant_type="nf4", **KINDS[kind])
        elif kind == "int8":
            self.base = Linear8bitLt(WIDTH, WIDTH, bias=False, has_fp16_weights=False)
            self.base.load_state_dict(plain.state_dict())
        else:
            self.base = plain.to(torch.bfloat16)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, RANK, bias=False), nn.Linear(RANK, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        base = self.base(x.to(torch.bfloat16)).to(x.dtype) if self.base.weight.dtype is torch.bfloat16 else self.base(x)
        return x + torch.tanh(base + self.up(self.down(x)))


class Net(nn.Module):
    """Blocks whose forward returns the loss."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Adapted(kind) for _ in range(BLOCKS))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(x, y)


def build(kind: str, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net(kind).to("cpu")  # which is when bitsandbytes quantises


def adapters(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, WIDTH, generator=generator), torch.randn(4, WIDTH, generator=generator)


def one_process(kind: str, world: int) -> list[list[float]]:
    """Losses of training on the whole batch, evaluation after every step among them."""
    model = build(kind)
    for module in model.modules():
        module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(adapters(model), lr=1e-2)
    said = []
    for step in range(STEPS):
        losses = [model(*batch(step, rank)) for rank in range(world)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            said.append([loss.item() for loss in losses] + [model.eval()(*batch(9, 0)).item()])
        model.train()
    return said


def train(rank: int, world: int, kind: str, config: dict[str, Any], seed: int) -> dict[str, Any]:
    model = build(kind, seed=rank * seed)  # what rank 0 has, counts
    optimizer = torch.optim.AdamW(adapters(model), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    buffers = [weights.full for unit in engine._core.run.units for weights in unit.weights]
    said = []
    for step in range(STEPS):
        loss = engine(*batch(step, rank))
        engine.backward(loss)
        engine.step()
        engine.eval()
        with torch.no_grad():
            said.append([loss.item(), engine(*batch(9, 0)).item()])
        engine.train()
    predicted, measured = engine.predicted(), engine.measured()
    assert {key: predicted[key] for key in ("resident", "collectives")} == {
        key: measured[key] for key in ("resident", "collectives")
    }
    after = [weights.full for unit in engine._core.run.units for weights in unit.weights]
    assert all(one is other for one, other in zip(buffers, after, strict=True)), "somebody kept gathered values"
    states = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert not [p for p in model.parameters() if not p.requires_grad and (p.grad is not None or id(p) in states)]
    found = {"losses": said, "resident": measured["resident"], "scales": sum(t.nbytes for t in quantised.scales(model))}
    engine.destroy()
    return found


def every_kind(rank: int, world: int) -> dict[Any, Any]:
    found = {}
    for kind in KINDS:
        for name, zero in (
            ("2", {"stage": 2}),
            ("3", {"stage": 3}),
            ("3 host", {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}),
        ):
            config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0, "zero_optimization": zero}
            found[kind, name] = train(rank, world, kind, config, seed=name != "2")
    return found


def test_adapters_over_a_base_in_few_bits() -> None:
    """Losses of one process, also where ranks began with other weights; a base in its own bits, with no state beside."""
    base, trained = BLOCKS * WIDTH * WIDTH, BLOCKS * 2 * WIDTH * RANK
    expected = {kind: one_process(kind, 2) for kind in KINDS}
    for rank, found in enumerate(run_ranks(every_kind, 2)):
        for (kind, name), run in found.items():
            whole = [[losses[rank], losses[2]] for losses in expected[kind]]
            assert torch.allclose(torch.tensor(run["losses"]), torch.tensor(whole), atol=1e-5), (kind, name)
            cut, at = (1, "device") if name == "2" else (2, "host" if name == "3 host" else "device")
            assert run["resident"][at]["parameter"] == (base * BITS[kind] // 8 + 4 * trained) // cut, (kind, name)
            states = run["resident"]["host" if name == "3 host" else "device"]
            assert states["moments"] == 2 * 4 * trained // 2, (kind, name)
            per_block = {"nf4": 1 / 64 + 4 / (64 * 256), "nf4, plain scales": 4 / 64, "int8": 4 / WIDTH}
            tables = {"nf4": BLOCKS * (16 + 256 + 1) * 4, "nf4, plain scales": BLOCKS * 16 * 4}
            if kind in per_block:
                assert run["scales"] == base * per_block[kind] + tables.get(kind, 0), (kind, name)


def wrong(rank: int, world: int) -> None:
    model = build("nf4")
    model.blocks[0].base.weight.quant_state = None
    with pytest.raises(PlanError, match=r"'blocks\.0\.base\.weight' is a Params4bit that is not quantised yet.*model\.to\("):
        onecopy.initialize(model, onecopy.stage(3))
    mesh = DeviceMesh("cpu", list(range(world)))
    model.blocks[0].base.weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Replicate()]), requires_grad=False)
    with pytest.raises(PlanError, match=r"'blocks\.0\.base\.weight' is a DTensor: .*Quantise the base with bitsandbytes"):
        onecopy.initialize(model, onecopy.stage(3))
    model = build("nf4" if rank else "nf4, plain scales")
    with pytest.raises(RankMismatchError, match=r"absmax of quantised parameter 'blocks\.0\.base\.weight' .*give every rank"):
        onecopy.initialize(model, onecopy.stage(3))


def test_what_cannot_be_sharded_is_refused_on_every_rank() -> None:
    run_ranks(wrong, 2)
