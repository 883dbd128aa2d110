"""One thing that happens to one buffer, as a frozen record that knows its bytes and reads back from its own token."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from onecopy.plan.layout import Tier, itemsize

Kind = Literal["gather", "free", "fill", "reduce", "sum", "spread", "vote", "step", "encode", "fetch", "evict"]
Event = Literal["pre_forward", "post_forward", "pre_backward", "grads_arrive", "grads_ready", "boundary", "step"]
Group = Literal["within", "across", "world", "none"]

EVENTS: tuple[Event, ...] = get_args(Event)

_TOKEN = re.compile(
    r"(?P<kind>[a-z]+) (?P<state>[a-z]+) (?P<buffer>\S+) (?P<elements>\d+) x (?P<codec>\w+) sends (?P<sent>\d+) "
    r"to (?P<group>[a-z]+) on (?P<tier>[a-z]+)"
)


@dataclass(frozen=True)
class Op:
    """``kind`` done to ``elements`` (padding included) of ``state`` in ``buffer``, held or sent in ``codec``.

    ========  =======================================================================================
    gather    all-gather the shards of a group into the full buffer (parameters)
    spread    all-gather in place: every rank's updated piece of a replicated state, to all of a group
    free      give the gathered buffer back
    fill      make the buffer that this micro-batch's gradients are written into
    reduce    reduce-scatter the filled gradients inside a group
    sum       all-reduce a shard across groups
    vote      one small all-reduce: norm, overflow, which parameters were used
    step      the optimizer on this rank's piece
    encode    write the master weights back in the parameter's dtype
    fetch     bring what rests on ``tier``: from the disk to the host, or from the host to the device
    evict     put it there: from the device to the host, or from the host to the disk
    ========  =======================================================================================

    ``sent``: elements this rank puts on the wire to peers of ``group``.
    """

    kind: Kind
    state: str
    buffer: str
    elements: int
    codec: str
    sent: int = 0
    group: Group = "none"
    tier: Tier = "device"

    @property
    def bytes(self) -> int:
        """Bytes of the whole buffer the op touches."""
        return self.elements * itemsize(self.codec)

    @property
    def wire_bytes(self) -> int:
        """Bytes this rank sends."""
        return self.sent * itemsize(self.codec)

    def __str__(self) -> str:
        return (
            f"{self.kind} {self.state} {self.buffer} {self.elements} x {self.codec} sends {self.sent} "
            f"to {self.group} on {self.tier}"
        )

    @classmethod
    def parse(cls, token: str) -> Op:
        """The op whose ``str`` is ``token``. Raises ``ValueError`` for anything else."""
        match = _TOKEN.fullmatch(token.strip())
        if match is None or match["kind"] not in get_args(Kind) or match["group"] not in get_args(Group):
            raise ValueError(f"{token!r} is not an op; an op reads like 'gather parameter blocks.0/0 64 x float32 ...'")
        numbers = {name: int(match[name]) for name in ("elements", "sent")}
        words = {name: match[name] for name in ("kind", "state", "buffer", "codec", "group", "tier")}
        return cls(**words, **numbers)  # type: ignore[arg-type]
