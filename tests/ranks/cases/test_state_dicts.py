"""What leaves an engine as a state dict: whole, plain, with the names of the bare model; or an error, never a stub."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import onecopy
import onecopy.deepspeed as deepspeed
from onecopy.errors import CheckpointError, OneCopyError
from tests.ranks.cases.everywhere import everywhere, json_plans, said
from tests.ranks.checkpoints import SMALL
from tests.ranks.harness import run_ranks

pytestmark = pytest.mark.ranks


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


def feed(count: int, rank: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(100 * count + rank)
    return torch.randint(11, (4,), generator=source), torch.randint(11, (4,), generator=source)


def engines(world: int, build: Callable[[], nn.Module], groups: Callable[[nn.Module], Any], **options: Any) -> Any:
    """(name, engine) for each plan and JSON, one at a time; it is closed when the next is asked for."""
    for name, plan in everywhere(world, **options).items():
        torch.manual_seed(0)
        model = build()
        engine = onecopy.initialize(model, plan, optimizer=adam(groups(model)))
        yield name, engine
        engine.close()
    for name, setup in json_plans(world).items():
        torch.manual_seed(0)
        model = build()
        other, *_ = deepspeed.initialize(model=model, config=setup, optimizer=adam(groups(model)))
        yield name, other
        other.destroy()


def twin_of(world: int, build: Callable[[], nn.Module], groups: Callable[[nn.Module], Any], steps: int = 2) -> nn.Module:
    """The oracle: plain torch on what all ranks feed."""
    torch.manual_seed(0)
    model = build()
    optimizer = adam(groups(model))
    for count in range(steps):
        for rank in range(world):
            (model(*feed(count, rank)) / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


# ---------------------------------------------------------------------- row 58: ties, frozen weights, buffers, odd sizes


class Whole(nn.Module):
    """Tied head, frozen layer, a buffer that is saved and one that is not, a 5-element bias, a weight nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.mid = nn.Linear(5, 5)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.emb.weight
        self.spare = nn.Linear(3, 1)
        self.register_buffer("table", torch.linspace(0, 1, 5))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.mid(self.frozen(self.emb(x)) + self.table))
        return F.cross_entropy(self.head(h), y)


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for name, p in trained if "bias" in name], "weight_decay": 0.0, "lr": 1e-3},
        {"params": [p for name, p in trained if "bias" not in name]},
    ]


def whole_run(rank: int, world: int, folder: str) -> list[str]:
    wrong = []
    twin = twin_of(world, Whole, two_groups)
    truth = twin.state_dict()
    for name, engine in engines(world, Whole, two_groups):
        for count in range(2):
            engine.backward(engine(*feed(count, rank)))
            engine.step()
        state, first = engine.full_state_dict(), engine.full_state_dict(rank0_only=True)
        if set(state) != set(truth) or set(first) != (set(truth) if rank == 0 else set()):
            wrong.append(f"{name}: keys {list(state)}, on rank 0 only {list(first)}")
            continue
        off = max((state[key] - value).abs().max().item() for key, value in truth.items())
        if off > 1e-6:
            wrong.append(f"{name}: off by {off}")
        with onecopy.gathered(engine.module):
            live = {key: p.detach().clone() for key, p in engine.module.named_parameters()}
        wrong += [f"{name}: {key} is not what is gathered" for key in live if not torch.equal(live[key], state[key])]
        if type(state["emb.weight"]) is not torch.Tensor or state["emb.weight"].data_ptr() != state["head.weight"].data_ptr():
            wrong.append(f"{name}: tied weights are not one plain tensor")
        fresh = Whole()
        fresh.load_state_dict(state, strict=True)
        if fresh.head.weight is not fresh.emb.weight:
            wrong.append(f"{name}: the tie is gone")
        path = f"{folder}/{rank}.pt"
        torch.save(state, path)
        plain = io.BytesIO()
        torch.save(truth, plain)
        if Path(path).stat().st_size > plain.tell() + 256:
            wrong.append(f"{name}: {Path(path).stat().st_size} bytes on disk, plain torch writes {plain.tell()}")
        # A copy: what training does next must not show in what was handed over.
        kept = {key: value.clone() for key, value in state.items()}
        engine.backward(engine(*feed(7, rank)))
        engine.step()
        wrong += [f"{name}: {key} moved after it was handed over" for key in kept if not torch.equal(kept[key], state[key])]
    return wrong


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_full_state_dict_is_the_plain_models(tmp_path: Path, world: int) -> None:
    """Tied head, frozen layer, saved and unsaved buffers, two groups, a 5-element bias: the keys are those of the
    plain model, which loads it strictly with its ties; values are what is gathered, and plain torch's; one copy on disk.
    Merging files after the run is for later. (row 58)"""
    for wrong in run_ranks(whole_run, world, str(tmp_path)):
        assert not wrong, wrong


# --------------------------------------------------------------------------------------------- row 59: adapters on disk


class Adapted(nn.Module):
    """Two frozen layers with adapters of rank 4, B of zeros as adapters begin."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 8).requires_grad_(False)
        self.base = nn.ModuleList(nn.Linear(8, 8).requires_grad_(False) for _ in range(2))
        self.lora_A = nn.ModuleList(nn.Linear(8, 4, bias=False) for _ in range(2))
        self.lora_B = nn.ModuleList(nn.Linear(4, 8, bias=False) for _ in range(2))
        for layer in self.lora_B:
            nn.init.zeros_(layer.weight)
        self.head = nn.Linear(8, 11).requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.emb(x)
        for base, down, up in zip(self.base, self.lora_A, self.lora_B, strict=True):
            h = torch.tanh(base(h) + up(down(h)))
        return F.cross_entropy(self.head(h), y)


def adapters(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def only_lora(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if "lora" in key}


def by_torch_save(model: nn.Module, path: str) -> dict[str, Any]:
    torch.save(only_lora(model.state_dict()), path)
    return torch.load(path)


def by_safetensors(model: nn.Module, path: str) -> dict[str, Any]:
    from safetensors.torch import load_file, save_file

    save_file(only_lora(model.state_dict()), path)
    return load_file(path)


def by_pickle(model: nn.Module, path: str) -> dict[str, Any]:
    return pickle.loads(pickle.dumps(only_lora(model.state_dict())))


def by_parameter(model: nn.Module, path: str) -> dict[str, Any]:
    torch.save({key: p for key, p in model.named_parameters() if "lora" in key}, path)
    return torch.load(path)


def by_data(model: nn.Module, path: str) -> dict[str, Any]:
    torch.save({key: p.data for key, p in model.named_parameters() if "lora" in key}, path)
    return torch.load(path)


def by_cpu(model: nn.Module, path: str) -> dict[str, Any]:
    return {key: value.cpu() for key, value in only_lora(model.state_dict()).items()}


def by_clone(model: nn.Module, path: str) -> dict[str, Any]:
    return {key: value.detach().clone() for key, value in only_lora(model.state_dict()).items()}


def by_contiguous(model: nn.Module, path: str) -> dict[str, Any]:
    return {key: value.to("cpu", torch.float32).contiguous() for key, value in only_lora(model.state_dict()).items()}


def by_numpy(model: nn.Module, path: str) -> dict[str, Any]:
    return {key: torch.from_numpy(value.numpy().copy()) for key, value in only_lora(model.state_dict()).items()}


def by_copy_into(model: nn.Module, path: str) -> dict[str, Any]:
    out = {}
    for key, value in only_lora(model.state_dict()).items():
        out[key] = torch.empty(value.shape, dtype=value.dtype)
        out[key].copy_(value)
    return out


def by_whole_model(model: nn.Module, path: str) -> dict[str, Any]:
    torch.save(model, path)
    return only_lora(torch.load(path, weights_only=False).state_dict())


def by_deepcopy(model: nn.Module, path: str) -> dict[str, Any]:
    return only_lora(copy.deepcopy(model).state_dict())


WRITERS = [by_torch_save, by_safetensors, by_pickle, by_parameter, by_data, by_cpu, by_clone, by_contiguous, by_numpy,
           by_copy_into, by_whole_model, by_deepcopy]  # fmt: skip


def compare(found: dict[str, Any], truth: dict[str, Tensor]) -> str:
    if found.keys() != truth.keys():
        return f"keys {list(found)}"
    for key, value in truth.items():
        got = found[key]
        if got.shape != value.shape or got.device.type == "meta":
            return f"{key} has shape {tuple(got.shape)} on {got.device}"
        if type(got) is not torch.Tensor and type(got) is not nn.Parameter:
            return f"{key} is a {type(got).__name__}"
        if not (got.detach() - value).abs().max() <= 1e-6:
            return f"{key} has other values"
    return "real"


# These pickle the parameter objects themselves, on which the engine keeps its own things.
OBJECTS = ("by_parameter", "by_whole_model", "by_deepcopy")


def verdict(writer: Callable[[nn.Module, str], dict[str, Any]], model: nn.Module, path: str, truth: dict[str, Tensor]) -> str:
    try:
        return compare(writer(model, path), truth)
    except Exception as error:
        return f"raised {type(error).__name__}: {error}"


def adapter_run(rank: int, world: int, folder: str) -> dict[str, str]:
    out = {}
    truth = only_lora(twin_of(world, Adapted, adapters).state_dict())
    assert all(value.abs().max() > 0 for value in truth.values()), "B did not move in the oracle"
    for name, engine in engines(world, Adapted, adapters):
        for count in range(2):
            engine.backward(engine(*feed(count, rank)))
            engine.step()
        if rank == 0:  # as people write it: no other rank takes part
            for writer in WRITERS:
                out[f"{name}, {writer.__name__}, alone"] = verdict(writer, engine.module, f"{folder}/x", truth)
        dist.barrier()
        out[f"{name}, full_state_dict"] = compare(only_lora(engine.full_state_dict()), truth)
        with onecopy.gathered(engine.module):
            for writer in WRITERS:
                if writer is by_numpy:
                    continue  # below
                out[f"{name}, {writer.__name__}, gathered"] = verdict(writer, engine.module, f"{folder}/{rank}", truth)
        with deepspeed.zero.GatheredParameters(adapters(engine.module)):
            out[f"{name}, adapters, gathered"] = compare(by_torch_save(engine.module, f"{folder}/{rank}"), truth)
    return out


def test_adapters_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """Adapters of rank 4, two steps, then ``model.state_dict()`` and any way to write it, on rank 0 alone: real
    tensors with B as plain torch has it, or an exception; a sharded one never becomes a file of stubs. Gathered, every
    way gives the real ones on every rank. (row 59)"""
    wrong = []
    for run in run_ranks(adapter_run, 2, str(tmp_path)):
        for name, told in run.items():
            sharded = ("stage 3" in name or "json 3" in name) and name.endswith("alone")
            may_raise = sharded or any(writer in name for writer in OBJECTS)
            if not (told == "real" or (may_raise and told.startswith("raised"))):
                wrong.append(f"{name}: {told}")
    assert not wrong, wrong


def numpy_run(rank: int, world: int) -> dict[str, str]:
    """A gathered weight seen as a numpy array, as loggers and writers do, and a training step after it."""
    out = {}
    truth = only_lora(twin_of(world, Adapted, adapters).state_dict())
    for name, engine in engines(world, Adapted, adapters):
        engine.backward(engine(*feed(0, rank)))
        engine.step()
        try:
            with onecopy.gathered(engine.module):
                sums = {key: float(p.detach().numpy().sum()) for key, p in engine.module.named_parameters()}
            assert all(value == value for value in sums.values())
            engine.backward(engine(*feed(1, rank)))
            engine.step()
            out[name] = compare(only_lora(engine.full_state_dict()), truth)
        except RuntimeError as error:
            out[name] = f"raised {error}"
    return out


def test_gathered_weights_may_be_seen_as_numpy_arrays() -> None:
    """``with gathered(model): p.numpy()`` on every rank: the real values, and training goes on after it. (row 59)"""
    for run in run_ranks(numpy_run, 2):
        assert run == dict.fromkeys(run, "real"), run


# --------------------------------------------------------------------------------------------- row 60: names of wrappers


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 5)) for _ in range(2))
        self.head = nn.Linear(5, 11)
        self.register_buffer("table", torch.ones(5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.emb(x) * self.table
        for block in self.blocks:
            h = h + block(h)
        return F.cross_entropy(self.head(h), y)


def compiled(module: Any) -> Any:
    return torch.compile(module, backend="eager")


def compile_blocks() -> nn.Module:
    model = Plain()
    for at in range(2):
        model.blocks[at] = compiled(model.blocks[at])
    return model


def checkpoint_blocks() -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = Plain()
    for at in range(2):
        model.blocks[at] = checkpoint_wrapper(model.blocks[at])
    return model


WRAPPED: dict[str, Callable[[], Any]] = {
    "compiled": lambda: compiled(Plain()),
    "compiled blocks": compile_blocks,
    "compiled around compiled blocks": lambda: compiled(compile_blocks()),
    "checkpointed blocks": checkpoint_blocks,
    "DataParallel": lambda: nn.DataParallel(Plain()),
    "compiled around DataParallel around compiled": lambda: compiled(nn.DataParallel(compiled(Plain()))),
}


def wrapped_run(rank: int, world: int, folder: str, kind: str) -> list[str]:
    """Train wrapped, save; names and values must be those of the bare model, in every artefact and in both directions."""
    wrong = []
    build = WRAPPED[kind]
    truth = twin_of(world, Plain, adam_params).state_dict()
    for number in (0, 2, 3):
        name, plan = f"stage {number}", onecopy.stage(number, units=SMALL)
        torch._dynamo.reset()
        torch.manual_seed(0)
        wrapped = build()
        engine = onecopy.initialize(wrapped, plan, optimizer=adam)
        for count in range(2):
            engine.backward(engine(*feed(count, rank)))
            engine.step()
        state = engine.full_state_dict()
        if set(state) != set(truth):
            wrong.append(f"{name}: full_state_dict has {sorted(set(state) - set(truth))[:3]}")
        elif max((state[key] - value).abs().max().item() for key, value in truth.items()) > 1e-6:
            wrong.append(f"{name}: other values")
        place = f"{folder}/{name}"
        engine.save(place)
        engine.close()
        text = (next(Path(place).glob("step*")) / "manifest.json").read_text()
        prefixes = ("_orig_mod", "_checkpoint_wrapped", '"module.')
        wrong += [f"{name}: the checkpoint has {prefix}" for prefix in prefixes if prefix in text]
        for other, make in (("bare", Plain), ("wrapped", build)):
            second = onecopy.initialize(make(), plan, optimizer=adam)
            try:
                second.load(place)
                full = {key.removeprefix("module."): value for key, value in second.full_state_dict().items()}
                mine = {key.removeprefix("module."): value for key, value in state.items()}
                wrong += [f"{name} -> {other}: {key}" for key in mine if not torch.equal(mine[key], full[key])]
            except OneCopyError as error:
                wrong.append(f"{name} -> {other}: {str(error)[:150]}")
            second.close()
    return wrong


def adam_params(model: nn.Module) -> Any:
    return list(model.parameters())


@pytest.mark.parametrize("kind", WRAPPED)
def test_wrappers_leave_no_trace_in_names(tmp_path: Path, kind: str) -> None:
    """A model that is compiled, checkpointed or wrapped by DataParallel, in any nesting: state dict and checkpoint
    have the bare model's names and load into it, and the other way round. (row 60)"""
    for wrong in run_ranks(wrapped_run, 2, str(tmp_path), kind):
        assert not wrong, wrong


def no_match(rank: int, world: int, folder: str) -> list[str]:
    """A checkpoint of which no name is in the model, loaded with strict and without."""

    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Plain()

        def forward(self, *args: Any) -> Tensor:
            return self.inner(*args)

    texts = []
    for name, plan in everywhere(world).items():
        first = onecopy.initialize(Plain(), plan, optimizer=adam)
        first.save(f"{folder}/{name}")
        second = onecopy.initialize(Other(), plan, optimizer=adam)
        before = {key: value.clone() for key, value in second.full_state_dict().items()}
        for strict in (True, False):
            load = lambda strict=strict, second=second, name=name: second.load(f"{folder}/{name}", strict=strict)  # noqa: E731
            texts.append(said(load, CheckpointError))
        assert all(torch.equal(value, before[key]) for key, value in second.full_state_dict().items()), name
        first.close(), second.close()
    return texts


def test_a_checkpoint_of_which_nothing_matches_is_an_error(tmp_path: Path) -> None:
    """0 names of the checkpoint are in the model: an error that shows names of both, also with strict=False. (row 60)"""
    for texts in run_ranks(no_match, 2, str(tmp_path)):
        assert all("'inner.emb.weight'" in text and "'emb.weight'" in text for text in texts), texts
