"""The edges: all-gather and reduce-scatter of one flat buffer, in place, over whichever backend serves it best.

NCCL and its like have good in-place collectives and are called as they are. Gloo's all-gather and reduce-scatter copy
their input and reduce the whole buffer on every rank; exchanging the pieces point to point moves exactly
``elements * (n - 1) / n`` each way, and the sum over ranks is then ours to order: by rank, in float32, so that every
layout that moves the same gradients gets the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from onecopy.comm.watch import waiting

__all__ = ["BACKENDS", "OVER_WIRE", "Edge", "Exchange", "Message", "Native", "Pending", "edge_for", "land", "sum_into"]

_ALL_REDUCES = {
    "norms": "the norms of the gradients",
    "sum": "the sum over the groups of ranks",
    "vote": "the vote of engine.step()",
}
_KINDS = ("gather", "spread", "reduce")
# Data that could not go the way its message announced is sent under the message's tag with this bit set.
OVER_WIRE = 1 << 11
_LOW = (torch.bfloat16, torch.float16)
Sent = Callable[[str, int, torch.dtype], None]
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending:
    """A collective under way: ``wait()`` until its result may be read on the current stream.

    ``what`` is printed when the wait is in vain.
    """

    __slots__ = ("_finish", "_keep", "_what", "_works")

    def __init__(self, works: list[Any], what: Any, finish: Callable[[], None] | None = None, keep: Any = None) -> None:
        self._works = works
        self._what = what
        self._finish = finish
        # Buffers the collective reads or writes, kept from being freed under it.
        self._keep = keep

    def wait(self) -> None:
        """Blocks the caller on gloo, the current stream on an accelerator. Calling it again does nothing.

        Raises :class:`~onecopy.errors.HangError` when the others do not come.
        """
        works, self._works = self._works, []
        if works:
            with waiting(self._what):
                for work in works:
                    work.wait()
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        self._keep = None


class Message:
    """Names what one buffer sends: the kind of op, the engine, the buffer's index, and how often it has been sent.

    All ranks count alike, so two ranks that disagree about what they are doing never pair two different things.
    ``kind`` is what the traffic is booked under; a buffer that spreads gradients beside parameters says ``second``.
    ``unit`` is for people.
    """

    __slots__ = ("_name", "_sent", "kind", "unit")

    def __init__(self, kind: str, engine: int, index: int, unit: str, second: bool = False) -> None:
        self.kind = kind
        self.unit = unit
        place = len(_KINDS) if second else _KINDS.index(kind)
        self._name = (place << 29) | ((engine & 0x1F) << 24) | ((index & 0xFFF) << 12)
        self._sent = 0

    def __str__(self) -> str:
        return f"the {self.kind} of unit {self.unit!r}"

    def tag(self) -> int:
        """The next message's number, below 2**31; the bit of :data:`OVER_WIRE` is not set."""
        self._sent += 1
        return self._name | (self._sent & 0x7FF)


class Edge(Protocol):
    """How a flat buffer of ``n`` equal pieces changes placement inside a group of ``n`` ranks."""

    staging: bool

    def gather(self, full: torch.Tensor, shard: torch.Tensor, message: Message) -> Pending:
        """All-gather: ``shard`` of every rank into ``full`` (``shard`` may be this rank's piece of ``full``)."""

    def reduce(self, full: torch.Tensor, out: torch.Tensor, message: Message, add: bool = False) -> Pending:
        """Reduce-scatter: the sum over ranks of this rank's piece of ``full`` into ``out`` (``add``: on top of it;
        ``out`` may be that piece itself). ``full`` is not to be read afterwards."""

    def all_reduce(self, tensor: torch.Tensor, kind: str, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Combine ``tensor`` over the group, in place and at once."""

    def flush(self) -> None:
        """Return when the others have all that this rank has sent, which they take without anything more from it."""


class Native:
    """The backend's own in-place collectives."""

    staging = False

    def __init__(self, group: dist.ProcessGroup, sent: Sent) -> None:
        self._group = group
        self._sent = sent

    def gather(self, full: torch.Tensor, shard: torch.Tensor, message: Message) -> Pending:
        self._sent(message.kind, shard.numel() * (self._group.size() - 1), shard.dtype)
        return Pending([_all_gather(full, shard, group=self._group, async_op=True)], message, keep=(full, shard))

    def reduce(self, full: torch.Tensor, out: torch.Tensor, message: Message, add: bool = False) -> Pending:
        index, count = self._group.rank(), self._group.size()
        self._sent(message.kind, full.numel() // count * (count - 1), full.dtype)
        own = full.view(count, -1)[index]
        direct = not add and out.dtype == full.dtype and out.device == full.device
        target = out if direct else own
        work = _reduce_scatter(target, full, group=self._group, async_op=True)

        def finish() -> None:
            if not direct:
                land(out, own, add)

        return Pending([work], message, finish, keep=(full, out))

    def all_reduce(self, tensor: torch.Tensor, kind: str, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        _all_reduce(self._group, self._sent, tensor, kind, op)

    def flush(self) -> None:
        """Whoever has waited for a collective has done its part of it."""


class Exchange:
    """Pieces sent point to point over gloo. Tensors on an accelerator are staged through host memory.

    Sends are posted before receives: a send that finds its peer ready is written by the calling thread, which then holds
    the connection's lock while gloo's own thread spins for it.
    """

    staging = True

    def __init__(self, group: dist.ProcessGroup, sent: Sent) -> None:
        self._group = group
        self._sent = sent
        self._index = group.rank()
        self._peers = [peer for peer in range(group.size()) if peer != self._index]

    def gather(self, full: torch.Tensor, shard: torch.Tensor, message: Message) -> Pending:
        tag = message.tag()
        self._sent(message.kind, shard.numel() * len(self._peers), shard.dtype)
        pieces = full.view(len(self._peers) + 1, -1)
        own = pieces[self._index]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        if full.device.type != "cpu":
            return self._staged_gather(pieces, shard, message, tag)
        works = [self._group.send([own], peer, tag) for peer in self._peers]
        works += [self._group.recv([pieces[peer]], peer, tag) for peer in self._peers]
        return Pending(works, message, keep=full)

    def reduce(self, full: torch.Tensor, out: torch.Tensor, message: Message, add: bool = False) -> Pending:
        tag = message.tag()
        source = full if full.device.type == "cpu" else full.cpu()
        pieces = source.view(len(self._peers) + 1, -1)
        self._sent(message.kind, pieces.shape[1] * len(self._peers), full.dtype)
        arrived = torch.empty((len(self._peers), pieces.shape[1]), dtype=full.dtype, device="cpu")
        works = [self._group.send([pieces[peer]], peer, tag) for peer in self._peers]
        works += [self._group.recv([arrived[at]], peer, tag) for at, peer in enumerate(self._peers)]

        def finish() -> None:
            terms = [arrived[at] for at in range(len(self._peers))]
            terms.insert(self._index, pieces[self._index])
            sum_into(out, [term.to(out.device) for term in terms], add)

        return Pending(works, message, finish, keep=(full, source, arrived, out))

    def all_reduce(self, tensor: torch.Tensor, kind: str, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        _all_reduce(self._group, self._sent, tensor, kind, op)

    def flush(self) -> None:
        """A wait is for sends too."""

    def _staged_gather(self, pieces: torch.Tensor, shard: torch.Tensor, message: Message, tag: int) -> Pending:
        sent = shard.cpu()
        arrived = {peer: torch.empty(shard.shape, dtype=shard.dtype, device="cpu") for peer in self._peers}
        works = [self._group.send([sent], peer, tag) for peer in self._peers]
        works += [self._group.recv([arrived[peer]], peer, tag) for peer in self._peers]

        def finish() -> None:
            for peer, piece in arrived.items():
                pieces[peer].copy_(piece)

        return Pending(works, message, finish, keep=(pieces, sent, arrived))


def land(out: torch.Tensor, value: torch.Tensor, add: bool) -> None:
    """``out (+)= value``, wherever the two are. From an accelerator to the host without waiting: what reads ``out`` there
    waits for the stream."""
    if not add:
        out.copy_(value, non_blocking=True)
    else:
        out.add_(value if value.device == out.device else value.to(out.device))


def sum_into(out: torch.Tensor, terms: list[torch.Tensor], add: bool) -> None:
    """``out (+)= sum(terms)`` in the order of ``terms``; low-precision terms are added in float32 and rounded once.

    ``out`` may be one of ``terms`` when ``add`` is False.
    """
    if add:
        for term in terms:
            out.add_(term)
    elif len(terms) == 2 and out.dtype == terms[0].dtype:
        torch.add(terms[0], terms[1], out=out)  # the kernel adds in float32 and rounds once
    elif out.dtype in _LOW or any(term is out or term.data_ptr() == out.data_ptr() for term in terms[1:]):
        total = terms[0].to(torch.float32, copy=True) if out.dtype in _LOW else terms[0].clone()
        for term in terms[1:]:
            total.add_(term)
        out.copy_(total)
    else:
        if terms[0].data_ptr() != out.data_ptr():
            out.copy_(terms[0])
        for term in terms[1:]:
            out.add_(term)


def _all_reduce(group: dist.ProcessGroup, sent: Sent, tensor: torch.Tensor, kind: str, op: dist.ReduceOp.RedOpType) -> None:
    # Ring or tree, an all-reduce sends each element about twice.
    sent(kind, 2 * tensor.numel() * (group.size() - 1) // group.size(), tensor.dtype)
    with waiting(_ALL_REDUCES[kind]):
        dist.all_reduce(tensor, op=op, group=group)


# Edges of backends whose own collectives are not the best there is.
BACKENDS: dict[str, Callable[[dist.ProcessGroup, Sent], Edge]] = {"gloo": Exchange}


def edge_for(group: dist.ProcessGroup | None, sent: Sent) -> Edge | None:
    """The edge for ``group``: point-to-point exchange on gloo, the backend's collectives otherwise.

    Ranks of one host that compute on the CPU can do better, see :mod:`onecopy.comm.shared`.

    ``sent(kind, elements, dtype)`` is called with what this rank puts on the wire.
    """
    if group is None:
        return None
    return BACKENDS.get(dist.get_backend(group), Native)(group, sent)
