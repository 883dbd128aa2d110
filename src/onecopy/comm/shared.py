"""The edges between ranks of one host that compute on the CPU: pieces go through memory that they all map.

:class:`Shared` sends messages. Each rank owns an arena of a few slots. A message is copied into a slot, a token of two
numbers is sent over gloo, and the peers read the slot in place: a gather copies it into the full buffer, a reduce sums
from it. Sockets carry nothing but tokens, so waiting and timing out stay gloo's, and the kernel copies no parameters.

:class:`Shelf` holds what rests cut: every rank's shards, readable by all. To gather is then to read, and the others
need not be there: ranks may run different parts of a model, or a model different numbers of times, between two writes.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from onecopy.comm.collectives import OVER_WIRE, Exchange, Message, Pending, Sent, sum_into
from onecopy.comm.watch import patience, waiting
from onecopy.errors import HangError
from onecopy.schedule.messages import WORD

__all__ = ["Shared", "Shelf", "open_shared", "open_shelf"]

_FOLDER = Path("/dev/shm")
_ALIGN = 64
# Cells in a shelf's head, and the seconds between looks at a peer's: ranks that compute leave the cores to those behind.
_ARRIVED, _WRITTEN, _PID = 0, 1, 2
_FIRST_PAUSE, _LAST_PAUSE = 2e-5, 1e-3


@dataclass(frozen=True)
class Arena:
    """One rank's memory: ``read[sender * slots + slot]`` numbers of messages this rank has read, ``wired[sender]`` how many
    it has received over the wire, then the slots."""

    read: memoryview
    wired: memoryview
    slots: tuple[torch.Tensor, ...]


class Shared:
    """See the module. A message for which no slot is free (a caller gathers a whole model at once) takes the wire."""

    staging = False

    def __init__(self, group: dist.ProcessGroup, sent: Sent, arenas: list[Arena]) -> None:
        self._group = group
        self._sent = sent
        self._wire = Exchange(group, sent)
        self._index = group.rank()
        self._peers = [peer for peer in range(group.size()) if peer != self._index]
        self._arenas = arenas
        self._slots = len(arenas[0].slots)
        self.bytes = sum(slot.numel() for slot in arenas[self._index].slots)
        self._last = [0] * self._slots
        self._count = 0
        # What went over the wire and not every peer has yet: a rank that is ahead does not wait for those behind, which
        # may be waiting for what it sends next.
        self._outgoing: list[tuple[list[dist.Work], list[torch.Tensor]]] = []
        self._wired = 0

    def gather(self, full: torch.Tensor, shard: torch.Tensor, message: Message) -> Pending:
        """See :class:`~onecopy.comm.collectives.Edge`."""
        if full.device.type != "cpu":
            return self._wire.gather(full, shard, message)
        tag = message.tag()
        self._sent(message.kind, shard.numel() * len(self._peers), shard.dtype)
        pieces = full.view(len(self._peers) + 1, -1)
        own = pieces[self._index]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        slot = self._claim()
        if slot is not None:
            self._view(self._index, slot, 0, own).copy_(own)
        works, tokens = self._announce(slot, tag, dict.fromkeys(self._peers, own))

        def finish() -> None:
            for peer, token in tokens.items():
                self._take(peer, token, tag, pieces[peer], 0)

        return Pending(works, message, finish, keep=(full, shard))

    def reduce(self, full: torch.Tensor, out: torch.Tensor, message: Message, add: bool = False) -> Pending:
        """See :class:`~onecopy.comm.collectives.Edge`."""
        if full.device.type != "cpu":
            return self._wire.reduce(full, out, message, add)
        tag = message.tag()
        pieces = full.view(len(self._peers) + 1, -1)
        self._sent(message.kind, pieces.shape[1] * len(self._peers), full.dtype)
        slot = self._claim()
        if slot is not None:
            for peer in self._peers:
                self._view(self._index, slot, self._place(self._index, peer), pieces[peer]).copy_(pieces[peer])
        works, tokens = self._announce(slot, tag, {peer: pieces[peer] for peer in self._peers})

        def finish() -> None:
            own = pieces[self._index]
            terms = {self._index: own}
            for peer, token in tokens.items():
                slot, _ = token.tolist()
                if slot < 0:
                    terms[peer] = torch.empty_like(own)
                    self._receive(peer, tag, terms[peer])
                else:
                    terms[peer] = self._view(peer, slot, self._place(peer, self._index), own)
            sum_into(out, [terms[rank] for rank in range(len(terms))], add)
            for peer, token in tokens.items():
                self._mark_read(peer, token)

        return Pending(works, message, finish, keep=(full, out, tokens))

    def all_reduce(self, tensor: torch.Tensor, kind: str, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """See :class:`~onecopy.comm.collectives.Edge`."""
        self._wire.all_reduce(tensor, kind, op)

    def flush(self) -> None:
        """See :class:`~onecopy.comm.collectives.Edge`. What went over the wire is lost when this process leaves the group
        before a rank that is behind has asked for it."""
        if not self._outgoing:
            return
        with waiting("the others to take what this rank has sent beside shared memory"):
            limit, pause = time.monotonic() + patience(), _FIRST_PAUSE
            while not self._all_taken():
                time.sleep(pause)
                pause = min(1.5 * pause, _LAST_PAUSE)
                if time.monotonic() > limit:
                    raise RuntimeError("time is up")
        self._outgoing.clear()

    def _all_taken(self) -> bool:
        return all(self._arenas[peer].wired[self._index] == self._wired for peer in self._peers)

    # Slots

    def _claim(self) -> int | None:
        """A slot whose last message every peer has read."""
        for step in range(self._slots):
            slot = (self._count + step) % self._slots
            cell = self._index * self._slots + slot
            if all(self._arenas[peer].read[cell] >= self._last[slot] for peer in self._peers):
                self._count += 1
                self._last[slot] = self._count
                return slot
        return None

    def _view(self, rank: int, slot: int, place: int, like: torch.Tensor) -> torch.Tensor:
        """Part ``place`` of a slot of ``rank``, as a tensor of the size and dtype of ``like``."""
        size = like.numel() * like.element_size()
        return self._arenas[rank].slots[slot][place * size : (place + 1) * size].view(like.dtype)

    @staticmethod
    def _place(sender: int, receiver: int) -> int:
        """Which part of a reduce message of ``sender`` is for ``receiver``; its own piece is not in it."""
        return receiver - (receiver > sender)

    def _announce(
        self, slot: int | None, tag: int, data: dict[int, torch.Tensor]
    ) -> tuple[list[dist.Work], dict[int, torch.Tensor]]:
        """Tell the peers where the message is, and listen for theirs.

        Returns the tokens under way and where the peers' tokens arrive.
        """
        token = torch.tensor([-1, 0] if slot is None else [slot, self._last[slot]], device="cpu")
        works = [self._group.send([token], peer, tag) for peer in self._peers]
        if slot is None:
            self._send(tag, data)
        tokens = {peer: torch.empty(2, dtype=torch.int64, device="cpu") for peer in self._peers}
        works += [self._group.recv([tokens[peer]], peer, tag) for peer in self._peers]
        return works, tokens

    def _send(self, tag: int, data: dict[int, torch.Tensor]) -> None:
        """Send copies over the wire, kept until every peer says that it has them."""
        if self._all_taken():
            self._outgoing.clear()  # they may take what was sent in another order, so only all of it is known to be there
        copies = {piece.data_ptr(): piece.clone() for piece in data.values()}
        kept = [copies[piece.data_ptr()] for piece in data.values()]
        works = [self._group.send([copy], peer, tag | OVER_WIRE) for peer, copy in zip(data, kept, strict=True)]
        self._wired += 1
        self._outgoing.append((works, kept))

    def _receive(self, peer: int, tag: int, into: torch.Tensor) -> None:
        with waiting(f"what rank {dist.get_global_rank(self._group, peer)} sends beside shared memory"):
            self._group.recv([into], peer, tag | OVER_WIRE).wait()
        self._arenas[self._index].wired[peer] += 1

    def _take(self, peer: int, token: torch.Tensor, tag: int, into: torch.Tensor, place: int) -> None:
        slot, _ = token.tolist()
        if slot < 0:
            self._receive(peer, tag, into)
            return
        into.copy_(self._view(peer, slot, place, into))
        self._mark_read(peer, token)

    def _mark_read(self, peer: int, token: torch.Tensor) -> None:
        slot, number = token.tolist()
        if slot >= 0:
            self._arenas[self._index].read[peer * self._slots + slot] = number


class Shelf:
    """The shards of one engine, on the ranks of ``group``.

    ============  ======================================================================================
    ``shards``    this rank's, by buffer
    arrived       how many writes this rank has come to: in its order of events, everything before that
                  write is done, reading others' shards included
    written       how many writes this rank has completed
    ============  ======================================================================================

    Writes happen in the same order on every rank. A writer waits until all ranks have come to the same write, a reader
    until all ranks have completed the last write that it completed itself; so a rank reads what it would in a run where
    everybody is in step. Both find that true without a wait unless a rank is behind.
    """

    def __init__(
        self, group: dist.ProcessGroup, sent: Sent, heads: list[memoryview], shards: list[list[torch.Tensor]]
    ) -> None:
        self._sent = sent
        self._index = group.rank()
        self._peers = [peer for peer in range(group.size()) if peer != self._index]
        self._heads = heads
        self._all = shards
        self.shards = shards[self._index]
        self._depth = 0
        self._lost: HangError | None = None
        self._fence = threading.Lock()
        # Peers whose process numbers mean something here: not in another container's PID namespace.
        self._visible = {peer for peer in self._peers if os.path.exists(f"/proc/{heads[peer][_PID]}")}

    def gather(self, full: torch.Tensor, shard: torch.Tensor, message: Message, index: int) -> Pending:
        """Read every rank's shard of buffer ``index`` into ``full``; it is there after ``wait()``."""
        self._sent(message.kind, shard.numel() * len(self._peers), shard.dtype)

        def finish() -> None:
            self._await(_WRITTEN, self._heads[self._index][_WRITTEN], message)
            for rank, piece in enumerate(full.view(len(self._all), -1).unbind()):
                piece.copy_(self._all[rank][index])

        return Pending([], message, finish, keep=(full, shard))

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around a change of this rank's shards that every rank makes to its own. Nested uses are one write."""
        self._depth += 1
        mine = self._heads[self._index]
        try:
            if self._depth == 1:
                mine[_ARRIVED] += 1
                self._await(_ARRIVED, mine[_ARRIVED], "the others to change their shards of the parameters too")
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                with self._fence:  # what was written is seen before the count
                    mine[_WRITTEN] = mine[_ARRIVED]

    def _await(self, cell: int, number: int, what: object) -> None:
        """Wait until every peer's count in ``cell`` is ``number`` or more."""
        behind = [peer for peer in self._peers if self._heads[peer][cell] < number]
        if not behind:
            return
        if self._lost is not None:
            raise self._lost  # a caller that caught it and goes on waits no second time
        try:
            self._wait(cell, number, what, behind)
        except HangError as error:
            self._lost = error
            raise

    def _wait(self, cell: int, number: int, what: object, behind: list[int]) -> None:
        with waiting(what):
            limit, pause = time.monotonic() + patience(), _FIRST_PAUSE
            while behind:
                time.sleep(pause)
                pause = min(1.5 * pause, _LAST_PAUSE)
                behind = [peer for peer in behind if self._heads[peer][cell] < number]
                gone = [peer for peer in behind if not self._alive(peer)]
                if gone or time.monotonic() > limit:
                    raise RuntimeError("a process is gone" if gone else "time is up")

    def _alive(self, peer: int) -> bool:
        """Does the process of ``peer`` run, as far as it can be seen?"""
        return peer not in self._visible or os.path.exists(f"/proc/{self._heads[peer][_PID]}")


def open_shelf(group: dist.ProcessGroup, sent: Sent, shards: list[tuple[int, torch.dtype]]) -> Shelf | None:
    """A :class:`Shelf` with shards of (elements, dtype), or None when not all ranks can map each other's memory.

    Collective over ``group``; see :func:`open_shared`.
    """
    starts, size = [], _ALIGN
    for elements, dtype in shards:
        starts.append(size)
        size += -(-elements * dtype.itemsize // _ALIGN) * _ALIGN
    maps = _map_all(group, size)
    if maps is None:
        return None
    heads = [memoryview(mapped)[:_ALIGN].cast("q") for mapped in maps]
    heads[group.rank()][_PID] = os.getpid()
    with waiting("shared memory between the ranks"):
        dist.barrier(group)  # everybody's process number is there
    whole = [torch.frombuffer(mapped, dtype=torch.uint8) for mapped in maps]
    cut = [
        [
            bytes_[start : start + elements * dtype.itemsize].view(dtype)
            for start, (elements, dtype) in zip(starts, shards, strict=True)
        ]
        for bytes_ in whole
    ]
    return Shelf(group, sent, heads, cut)


def open_shared(group: dist.ProcessGroup, sent: Sent, slot_bytes: int, slots: int) -> Shared | None:
    """A :class:`Shared` edge over ``group``, or None when not all its ranks can map each other's memory.

    ``slot_bytes``: the largest message. Collective over ``group``.
    """
    slot_bytes = -(-slot_bytes // WORD) * WORD
    head = -(-group.size() * (slots + 1) * WORD // _ALIGN) * _ALIGN
    maps = _map_all(group, head + slots * slot_bytes)
    if maps is None:
        return None
    return Shared(group, sent, [_arena(found, head, slot_bytes, group.size()) for found in maps])


def _map_all(group: dist.ProcessGroup, size: int) -> list[mmap.mmap] | None:
    """``size`` bytes of every rank of ``group``, mapped by all of them; None when one of them cannot. Collective.

    The memory is reserved before it is used, so a full shared-memory filesystem is noticed here and not by a fault later,
    and its name is gone before this returns.
    """
    path = _FOLDER / f"onecopy-{uuid.uuid4().hex}"
    made = _make(path, size)
    try:
        paths: list[str | None] = [None] * group.size()
        reached: list[bool] = [False] * group.size()
        with waiting("shared memory between the ranks"):
            dist.all_gather_object(paths, str(path) if made is not None else None, group=group)
            maps = [made if rank == group.rank() else _map(name, size) for rank, name in enumerate(paths)]
            dist.all_gather_object(reached, all(found is not None for found in maps), group=group)
    finally:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
    return [found for found in maps if found is not None] if all(reached) else None


def _make(path: Path, size: int) -> mmap.mmap | None:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError:  # no shared-memory filesystem here, or no right to use it
        return None
    try:
        os.posix_fallocate(descriptor, 0, size)
        return mmap.mmap(descriptor, size)
    except OSError:  # full
        return None
    finally:
        os.close(descriptor)


def _map(name: str | None, size: int) -> mmap.mmap | None:
    if name is None:
        return None
    try:
        descriptor = os.open(name, os.O_RDWR)
    except OSError:  # the peer is on another host, or sees another filesystem
        return None
    try:
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


def _arena(mapped: mmap.mmap, head: int, slot_bytes: int, ranks: int) -> Arena:
    whole = torch.frombuffer(mapped, dtype=torch.uint8)
    slots = (whole.numel() - head) // slot_bytes
    cut = tuple(whole[head + slot * slot_bytes : head + (slot + 1) * slot_bytes] for slot in range(slots))
    numbers = memoryview(mapped)[:head].cast("q")
    return Arena(numbers[: ranks * slots], numbers[ranks * slots : ranks * (slots + 1)], cut)
