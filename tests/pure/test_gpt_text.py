"""The model and the data of the main job, on one process."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onecopy import gpt
from onecopy.errors import ConfigError
from onecopy.text import Corpus, Piece, Rows, find_files, open_corpora, python_sources, shuffled

pytestmark = pytest.mark.pure

TINY = gpt.config("tiny")


def tokens(batch: int = 2, time: int = 32, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (batch, time), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ["tiny", "small", "25m"])
def test_sizes_count_their_parameters(name: str) -> None:
    shape = gpt.config(name)
    with torch.device("meta"):
        model = gpt.GPT(shape)
    assert sum(p.numel() for p in model.parameters()) == shape.parameters


def test_named_sizes_are_what_they_say() -> None:
    assert 24e6 < gpt.SIZES["25m"].parameters < 27e6
    assert 95e6 < gpt.SIZES["100m"].parameters < 105e6
    with pytest.raises(ConfigError, match=r"'huge'.*tiny, small, 25m, 100m"):
        gpt.config("huge")
    with pytest.raises(ConfigError, match="width 10 is not a multiple of heads 3"):
        gpt.GPTConfig(layers=1, heads=3, width=10, context=8)


def test_same_seed_same_weights_and_gpt2_scales() -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(gpt.GPT(gpt.config("small")))
    for (name, first), second in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(first, second), name
    block = models[0].blocks[0]
    assert block.up.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert block.down.weight.std().item() == pytest.approx(0.02 / math.sqrt(8), rel=0.02)
    assert not block.up.bias.any() and block.norm_mlp.weight.eq(1).all()
    assert models[0].head.weight is models[0].embed.weight


def test_untrained_model_knows_nothing_and_sees_no_future() -> None:
    torch.manual_seed(0)
    model = gpt.GPT(TINY)
    x = tokens(4, 64)
    assert model(x, x.roll(-1, 1)).item() == pytest.approx(math.log(256), abs=0.1)
    logits = model(x)
    assert logits.shape == (4, 64, 256)
    changed = x.clone()
    changed[:, 40:] = 7
    assert torch.allclose(model(changed)[:, :40], logits[:, :40], atol=1e-6)
    assert not torch.allclose(model(changed)[:, 40:], logits[:, 40:], atol=1e-3)


def test_recomputing_activations_changes_nothing() -> None:
    grads = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = gpt.GPT(gpt.config("tiny", recompute=recompute))
        x = tokens()
        model(x, x).backward()
        grads.append([p.grad for p in model.parameters()])
    for first, second in zip(*grads, strict=True):
        assert torch.equal(first, second)


def test_a_sequence_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match="65 tokens is longer than the model's context 64"):
        gpt.GPT(TINY)(tokens(1, 65))


@given(st.integers(1, 400), st.integers(0, 3))
def test_shuffled_is_a_permutation(size: int, key: int) -> None:
    assert sorted(shuffled(i, size, str(key)) for i in range(size)) == list(range(size))


def test_shuffled_has_no_pattern() -> None:
    images = torch.tensor([float(shuffled(i, 5000, "0")) for i in range(5000)])
    steps = images.diff().abs()
    assert steps.mean().item() == pytest.approx(5000 / 3, rel=0.05)  # of independent uniform numbers
    lagged = torch.corrcoef(torch.stack([images[:-1], images[1:]]))[0, 1].item()
    assert abs(lagged) < 0.05
    with pytest.raises(IndexError):
        shuffled(5, 5, "0")


def folder(root: Path, sizes: list[int]) -> Path:
    """Files of the given sizes whose bytes count up, each from its own number."""
    for number, size in enumerate(sizes):
        (root / f"{number:03}.txt").write_bytes(bytes((number + i) % 256 for i in range(size)))
    return root


def test_corpus_reads_across_files(tmp_path: Path) -> None:
    files = find_files([folder(tmp_path, [5, 1, 300, 7])])
    corpus = Corpus(tuple(Piece(path, 0, path.stat().st_size) for path in files))
    whole = b"".join(path.read_bytes() for path in files)
    assert len(corpus) == len(whole)
    for start in range(0, len(whole) - 20, 3):
        assert corpus.read(start, 20).tobytes() == whole[start : start + 20]
    with pytest.raises(IndexError):
        corpus.read(len(whole) - 3, 4)


def test_files_are_found_once_in_order_and_hidden_ones_left(tmp_path: Path) -> None:
    folder(tmp_path, [3, 3])
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x").write_text("no")
    assert [p.name for p in find_files([tmp_path, tmp_path / "001.txt"])] == ["000.txt", "001.txt"]
    with pytest.raises(ConfigError, match=r"nowhere.*neither a file nor a folder"):
        find_files([tmp_path / "nowhere"])


def test_held_out_text_is_whole_files(tmp_path: Path) -> None:
    train, held = open_corpora([folder(tmp_path, [100] * 60)], context=16)
    names = {p.path for p in train.pieces}, {p.path for p in held.pieces}
    assert not names[0] & names[1] and len(names[0] | names[1]) == 60
    assert len(held) == 300  # 5 %


def test_one_file_gives_its_end(tmp_path: Path) -> None:
    train, held = open_corpora([folder(tmp_path, [1000])], context=16)
    assert (len(train), len(held)) == (950, 50)
    assert held.read(0, 1)[0] == 950 % 256


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"held-out text of .* has 50 bytes, fewer than one row of 65"):
        open_corpora([folder(tmp_path, [1000])], context=64)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="has 0 bytes"):
        open_corpora([tmp_path / "empty"], context=64)


def test_a_file_cut_while_in_use_is_named(tmp_path: Path) -> None:
    corpus = Corpus((Piece(folder(tmp_path, [10]) / "000.txt", 0, 20),))
    with pytest.raises(ConfigError, match=r"000\.txt became shorter"):
        corpus.read(5, 10)


def test_default_text_is_the_standard_library() -> None:
    files = python_sources(limit=1 << 20)
    assert files == python_sources(limit=1 << 20) and files == sorted(files)
    assert 0 < sum(path.stat().st_size for path in files) <= 1 << 20
    assert all(path.suffix == ".py" for path in files)


def test_fingerprint_follows_the_files(tmp_path: Path) -> None:
    first, _ = open_corpora([folder(tmp_path, [100] * 40)], context=16)
    again, _ = open_corpora([tmp_path], context=16)
    (tmp_path / "zzz.txt").write_bytes(b"x" * 100)
    other, _ = open_corpora([tmp_path], context=16)
    assert first.fingerprint == again.fingerprint != other.fingerprint


def rows(root: Path, seed: int = 0) -> Rows:
    return Rows(open_corpora([folder(root, [200] * 40)], context=8)[0], context=8, seed=seed)


def test_a_pass_visits_every_window_once_and_passes_differ(tmp_path: Path) -> None:
    data = rows(tmp_path)
    turns = [[data.row(t * data.windows + i).tobytes() for i in range(data.windows)] for t in range(2)]
    whole = sorted(data.corpus.read(w * 8, 9).tobytes() for w in range(data.windows))
    assert sorted(turns[0]) == sorted(turns[1]) == whole
    assert turns[0] != turns[1] != whole


def test_global_batch_does_not_depend_on_how_it_is_split(tmp_path: Path) -> None:
    """4 ranks, 2 ranks x 2 micro-batches and 1 rank x 4 see the same rows in a step, no row twice."""
    data = rows(tmp_path)
    seen = []
    for world, accumulation in ((4, 1), (2, 2), (1, 4)):
        parts = [
            data.micro_batch(32, micro, rank, world, 3)[0] for micro in range(accumulation) for rank in range(world)
        ]
        seen.append(torch.cat(parts))
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])
    x, y = data.batch(32, 12)
    assert torch.equal(x, seen[0]) and x.dtype == y.dtype == torch.int64
    assert torch.equal(x[:, 1:], y[:, :-1])


def test_order_depends_on_the_seed(tmp_path: Path) -> None:
    assert not torch.equal(rows(tmp_path, 0).batch(0, 8)[0], rows(tmp_path, 1).batch(0, 8)[0])


def test_held_out_rows_cover_the_corpus_and_differ_by_rank(tmp_path: Path) -> None:
    data = rows(tmp_path)
    parts = [x for rank in range(2) for x, _ in data.spread(rank, 2, 4, 3)]
    assert len(parts) == 6 and all(part.shape == (4, 8) for part in parts)
    # 24 rows evenly over the windows: row r of the whole is window r * windows // 24
    first = torch.tensor(list(data.corpus.read(0, 8)), dtype=torch.int64)
    assert torch.equal(parts[0][0], first)
    assert len({tuple(row.tolist()) for part in parts for row in part}) > 20
