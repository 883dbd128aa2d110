"""A sharded parameter tells the truth about itself, takes initialisers, and refuses every other read by name."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import onecopy
from onecopy.errors import ShardedReadError
from tests.ranks.harness import run_ranks
from tests.ranks.oracle import every_plan, sgd

pytestmark = pytest.mark.ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(7, 5)
        self.conv = nn.Conv2d(3, 4, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return (self.lin(x) * self.scale).square().mean() + self.conv.weight.square().sum() + self.conv.bias.sum()


def stage3(**options: Any) -> Any:
    return onecopy.stage(3, **{"units": onecopy.Units(min_numel=0), **options})


def net_engine(plan: Any = None) -> tuple[Net, Any]:
    torch.manual_seed(0)
    model = Net()
    return model, onecopy.initialize(model, plan or stage3(), optimizer=sgd)


def dumped(value: Any) -> Any:
    torch.save(value, io.BytesIO())


READS: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda p: p + 1,
    "radd": lambda p: 1 + p,
    "matmul": lambda p: torch.ones(1, 5) @ p,
    "linear": lambda p: F.linear(torch.ones(1, 7), p),
    "mul_ out": lambda p: torch.mul(p, 2, out=torch.empty(5, 7)),
    "sum": lambda p: p.sum(),
    "mean of data": lambda p: p.data.mean(),
    "norm": lambda p: torch.linalg.vector_norm(p),
    "max": lambda p: p.max(),
    "equal": lambda p: torch.equal(p, torch.zeros(5, 7)),
    "allclose": lambda p: torch.allclose(p, p),
    "eq": lambda p: p == 0,
    "bool": lambda p: bool((p > 0).all()),
    "numpy": lambda p: p.detach().numpy(),
    "numpy of data": lambda p: p.data.numpy(),
    "asarray": lambda p: np.asarray(p.detach()),
    "array of parameter": lambda p: np.array(p),
    "tolist": lambda p: p.tolist(),
    "item": lambda p: p[0, 0].item(),
    "index": lambda p: p[0] + 0,
    "slice": lambda p: p[:, 1:3].clone(),
    "mask": lambda p: p[torch.ones(5, 7, dtype=torch.bool)],
    "iterate": lambda p: [row.sum() for row in p],
    "clone": lambda p: p.clone(),
    "clone of data": lambda p: p.data.clone(),
    "detach add": lambda p: p.detach() + 1,
    "view add": lambda p: p.view(-1) + 1,
    "transpose add": lambda p: p.t() + 1,
    "to": lambda p: p.to(torch.float64),
    "double": lambda p: p.double(),
    "cat": lambda p: torch.cat([p, p]),
    "stack": lambda p: torch.stack([torch.zeros(5, 7), p]),
    "copy into another": lambda p: torch.empty(5, 7).copy_(p),
    "copy data into another": lambda p: torch.empty(5, 7).copy_(p.data),
    "vector": lambda p: nn.utils.parameters_to_vector([p]),
    "where": lambda p: torch.where(p > 0, p, -p),
    "einsum": lambda p: torch.einsum("ij->i", p),
    "torch.save": dumped,
    "torch.save of data": lambda p: dumped(p.data),
    "torch.save of a dict": lambda p: dumped({"weight": p}),
    "pickle": lambda p: pickle.dumps(p),
    "data_ptr read": lambda p: torch.frombuffer(p.data.numpy(), dtype=torch.float32),
    "isnan": lambda p: torch.isnan(p).any(),
    "add_ of itself": lambda p: p.data.add_(p.data),
}

TRUTHS: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda p: tuple(p.shape),
    "size": lambda p: tuple(p.size()),
    "size of data": lambda p: tuple(p.data.size()),
    "size 0": lambda p: p.size(0),
    "numel": lambda p: p.numel(),
    "nelement": lambda p: p.nelement(),
    "torch.numel": lambda p: torch.numel(p),
    "dim": lambda p: (p.dim(), p.ndim),
    "len": lambda p: len(p),
    "dtype": lambda p: p.dtype,
    "device": lambda p: p.device.type,
    "leaf": lambda p: (p.is_leaf, p.requires_grad),
    "element_size": lambda p: p.element_size(),
    "floating": lambda p: (p.is_floating_point(), torch.is_floating_point(p)),
    "is parameter": lambda p: isinstance(p, nn.Parameter),
    "fans": lambda p: nn.init._calculate_fan_in_and_fan_out(p),
    "stride": lambda p: p.stride(),
}


def read_everything(rank: int, world: int, names: list[str]) -> dict[str, str]:
    said = {}
    model, engine = net_engine()
    for name in names:
        try:
            got = READS[name](model.lin.weight)
            said[name] = f"no error, {type(got).__name__}"
        except ShardedReadError as error:
            said[name] = str(error)
        except Exception as error:  # any other error is a finding, reported with its text
            said[name] = f"{type(error).__name__}: {error}"
    engine(torch.ones(2, 7)).backward()
    engine.step()
    engine.close()
    return said


def test_every_read_names_the_parameter_and_the_cure() -> None:
    said = run_ranks(read_everything, 2, list(READS))[0]
    wrong = {k: v for k, v in said.items() if "lin.weight" not in v or "onecopy.gathered" not in v}
    assert not wrong, wrong


def shown(rank: int, world: int) -> list[str]:
    model, engine = net_engine()
    texts = [str(model.lin.weight), repr(model.lin.weight.data), f"{model.scale}", str([model.lin.bias])]
    engine.close()
    return texts


def test_printing_says_what_it_is() -> None:
    """A debugger or a log line must not end the run: text shows the name and that it is sharded, and no values."""
    for text, name in zip(run_ranks(shown, 2)[0], ("lin.weight", "lin.weight", "scale", "lin.bias"), strict=True):
        assert name in text
        assert "sharded" in text
        assert "tensor(" not in text


def test_metadata_is_the_whole_parameters() -> None:
    said = run_ranks(tell_truth, 2)
    assert said == [{k: str(f(Net().lin.weight)) for k, f in TRUTHS.items()}] * 2


def tell_truth(rank: int, world: int) -> dict[str, str]:
    model, engine = net_engine()
    said = {k: str(f(model.lin.weight)) for k, f in TRUTHS.items()}
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in Net().parameters())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in Net().named_parameters()]
    assert str(model) == str(Net())
    engine.close()
    return said


def transformed(rank: int, world: int) -> list[str]:
    """Function transforms unwrap their inputs: an error, or NaN, never a number."""
    model, engine = net_engine()
    said = []
    for transform in (
        lambda p: torch.func.grad(lambda q: (q * q).sum())(p),
        lambda p: torch.func.vmap(lambda row: row * 2)(p),
        lambda p: torch.func.functional_call(nn.Linear(7, 5, bias=False), {"weight": p}, (torch.ones(1, 7),)),
        lambda p: torch.func.jvp(lambda q: q * 2, (p.detach(),), (torch.ones(5, 7),))[0],
    ):
        try:
            value = transform(model.lin.weight)
            said.append("NaN" if bool(torch.isnan(value.detach()).all()) else f"number {value}")
        except Exception as error:
            said.append(f"error {type(error).__name__}")
    engine.close()
    return said


def test_function_transforms_give_no_numbers() -> None:
    assert not [text for text in run_ranks(transformed, 2)[0] if text.startswith("number")]


def scalar_reads(rank: int, world: int) -> list[str]:
    """A 0-d parameter: ``item``, ``float`` and comparisons."""
    model, engine = net_engine()
    said = []
    reads: list[Callable[[Tensor], Any]] = [
        lambda p: p.item(),
        lambda p: float(p),
        lambda p: bool(p > 0),
        lambda p: 2 * p,
    ]
    for read in reads:
        with pytest.raises(ShardedReadError, match=r"scale.*onecopy\.gathered"):
            read(model.scale)
    engine.close()
    return said


def test_scalar_reads() -> None:
    run_ranks(scalar_reads, 2)


def save_all(rank: int, world: int, folder: str) -> dict[str, str]:
    """Writers people use on a module: they raise, or what they wrote is the whole truth."""
    model, engine = net_engine()
    with onecopy.gathered(model):
        truth = {k: v.detach().clone() for k, v in model.state_dict().items()}

    def by_torch() -> dict[str, Tensor]:
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        return torch.load(file)

    def by_safetensors() -> dict[str, Tensor]:
        from safetensors.torch import load_file

        save_file(model.state_dict(), Path(folder) / f"{rank}.safetensors")
        return load_file(Path(folder) / f"{rank}.safetensors")

    writers: dict[str, Callable[[], dict[str, Tensor]]] = {
        "torch.save": by_torch,
        "safetensors": by_safetensors,
        "deepcopy of state dict": lambda: copy.deepcopy(model.state_dict()),
        "pickled module": lambda: pickle.loads(pickle.dumps(model)).state_dict(),
        "cpu copies": lambda: {k: v.detach().cpu().clone() for k, v in model.state_dict().items()},
        "load into fresh": lambda: (fresh := Net(), fresh.load_state_dict(model.state_dict()))[0].state_dict(),
        "numpy": lambda: {k: torch.tensor(v.numpy()) for k, v in model.state_dict().items()},
    }
    said = {}
    for name, write in writers.items():
        try:
            got = write()
            whole = got.keys() == truth.keys() and all(torch.equal(got[k], v) for k, v in truth.items())
            said[name] = "whole" if whole else f"wrong values in silence: {[tuple(v.shape) for v in got.values()]}"
        except Exception as error:  # load_state_dict wraps errors of copy_ in its own RuntimeError
            said[name] = "error" if "onecopy.gathered" in str(error) else f"{type(error).__name__}: {error}"
    engine.close()
    return said


def test_no_writer_saves_stand_ins(tmp_path: Path) -> None:
    for said in run_ranks(save_all, 2, str(tmp_path)):
        assert not {k: v for k, v in said.items() if v not in ("whole", "error")}, said


# ---------------------------------------------------------------------------------------------------------- writing

INITIALISERS: dict[str, Callable[[Tensor], Any]] = {
    "normal_": lambda p: nn.init.normal_(p, std=0.02),
    "uniform_": lambda p: nn.init.uniform_(p, -2, 3),
    "kaiming_uniform_": lambda p: nn.init.kaiming_uniform_(p, a=5**0.5),
    "kaiming_normal_": lambda p: nn.init.kaiming_normal_(p),
    "xavier_uniform_": lambda p: nn.init.xavier_uniform_(p),
    "xavier_normal_": lambda p: nn.init.xavier_normal_(p, gain=0.5),
    "trunc_normal_": lambda p: nn.init.trunc_normal_(p, std=0.3, a=-0.5, b=0.4),
    "zeros_": lambda p: nn.init.zeros_(p),
    "ones_": lambda p: nn.init.ones_(p),
    "constant_": lambda p: nn.init.constant_(p, 0.3),
    "data.normal_": lambda p: p.data.normal_(1.0, 2.0),
    "data.fill_": lambda p: p.data.fill_(2.5),
    "data.zero_": lambda p: p.data.zero_(),
    "detach uniform_": lambda p: p.detach().uniform_(-1, 1),
    "exponential_": lambda p: p.data.exponential_(2.0),
    "copy_": lambda p: p.data.copy_(torch.arange(float(p.numel())).reshape(p.shape)),
    "copy_ broadcast": lambda p: p.data.copy_(torch.tensor(3.0)),
    "copy_ converting": lambda p: p.data.copy_(torch.arange(p.numel()).reshape(p.shape)),
    "generator": lambda p: p.data.normal_(generator=torch.Generator().manual_seed(3)),
}
# These need values or views: right or refused, never silently wrong.
MAYBE: dict[str, Callable[[Tensor], Any]] = {
    "orthogonal_": lambda p: nn.init.orthogonal_(p),
    "eye_": lambda p: nn.init.eye_(p),
    "row zero_": lambda p: p.data[0].zero_(),
    "slice normal_": lambda p: p.data[:, 1:4].normal_(),
    "setitem": lambda p: p.data.__setitem__(0, 4.0),
    "view fill_": lambda p: p.data.view(-1)[3:9].fill_(1.0),
    "transposed normal_": lambda p: p.data.t().normal_(),
    "mul_": lambda p: p.data.mul_(2.0),
    "clamp_": lambda p: p.data.clamp_(-0.1, 0.1),
    "erfinv_": lambda p: p.data.uniform_(-0.5, 0.5).erfinv_(),
    "add_": lambda p: p.data.add_(1.0),
    "lerp_": lambda p: p.data.lerp_(torch.ones(p.shape), 0.5),
    "assign data": lambda p: setattr(p, "data", torch.full(p.shape, 4.0)),
    "masked_fill_": lambda p: p.data.masked_fill_(torch.eye(p.shape[0], p.shape[1]).bool(), 7.0),
    "bernoulli_": lambda p: p.data.bernoulli_(0.5),
    "geometric_": lambda p: p.data.geometric_(0.5),
    "index_fill_": lambda p: p.data.index_fill_(0, torch.tensor([1]), 9.0),
    "swap": lambda p: p.data.copy_(p.data.flip(0)),
}


def initialise(rank: int, world: int, table: str, number: int) -> dict[str, str]:
    """Each initialiser on a sharded weight and on a whole one from the same random state."""
    out = {}
    for name, init in {"sure": INITIALISERS, "maybe": MAYBE}[table].items():
        model, engine = net_engine(onecopy.stage(number, units=onecopy.Units(min_numel=0)))
        whole = nn.Parameter(onecopy.full_param(model.lin.weight).clone())
        bias = onecopy.full_param(model.lin.bias).clone()
        try:
            for target in (model.lin.weight, whole):
                torch.manual_seed(11)
                with torch.no_grad():
                    init(target)
                after = torch.rand(1).item()
                if target is model.lin.weight:
                    sharded_after = after
            right = torch.equal(onecopy.full_param(model.lin.weight), whole.detach())
            same = torch.equal(onecopy.full_param(model.lin.bias), bias)
            out[name] = "right" if right and same else f"wrong (neighbour kept: {same})"
            if sharded_after != after:
                out[name] += ", random state differs"
            # The edit survives a step: parameter, master and optimizer agree.
            before = onecopy.full_param(model.lin.weight).clone()
            engine(torch.zeros(2, 7)).backward()
            engine.step()
            kept = torch.allclose(onecopy.full_param(model.lin.weight), before * (1 - 0.1 * 0.01), rtol=1e-6)
            out[name] += "" if kept else ", lost at the next step"
        except ShardedReadError as error:
            out[name] = "refused" if "lin.weight" in str(error) else str(error)
        except Exception as error:  # reported as it is
            out[name] = f"{type(error).__name__}: {error}"
        engine.close()
    return out


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_initialisers_give_what_they_give_on_the_whole_tensor(number: int) -> None:
    for run in run_ranks(initialise, 2, "sure", number):
        assert run == dict.fromkeys(run, "right"), {k: v for k, v in run.items() if v != "right"}


@pytest.mark.parametrize("number", [1, 3])
def test_other_in_place_writes_are_right_or_refused(number: int) -> None:
    for run in run_ranks(initialise, 2, "maybe", number):
        wrong = {k: v for k, v in run.items() if v not in (("right", "refused") if number == 3 else ("right",))}
        assert not wrong, wrong


def initialise_apply(rank: int, world: int) -> None:
    """``model.apply(init)`` on a sharded model, as user code does it."""
    model, engine = net_engine()

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)

    model.apply(init)
    std = onecopy.full_param(model.conv.weight).std().item()
    assert 0.015 < std < 0.025, std
    assert onecopy.full_param(model.lin.bias).abs().sum() == 0
    engine(torch.ones(2, 7)).backward()
    assert engine.step()
    engine.close()


def test_model_apply() -> None:
    run_ranks(initialise_apply, 2)


def load_into(rank: int, world: int) -> None:
    """``model.load_state_dict(full)`` after sharding sets every rank's shard; a wrong shape is refused."""
    for name, plan in every_plan().items():
        model, engine = net_engine(plan)
        torch.manual_seed(5)
        other = Net()
        model.load_state_dict(other.state_dict())
        for (n, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
            assert torch.equal(onecopy.full_param(p), q.detach()), f"{name} {n}"
        wrong = {**other.state_dict(), "lin.weight": torch.zeros(5, 6)}
        with pytest.raises(RuntimeError):
            model.load_state_dict(wrong)
        engine(torch.ones(2, 7)).backward()
        assert engine.step()
        assert (onecopy.full_param(model.lin.weight) - other.lin.weight.detach()).abs().max() < 0.5, name
        engine.close()


def test_load_state_dict_into_a_sharded_model() -> None:
    run_ranks(load_into, 2)
