"""Any elementwise torch optimizer over flat shards: found out about by trying, stepped one unit or one tile at a time."""

from onecopy.optim.elementwise import Factory, States, build, prefer_fused, probe
from onecopy.optim.tiles import Borrowed, Moments, Piece, Tiles

__all__ = ["Borrowed", "Factory", "Moments", "Piece", "States", "Tiles", "build", "prefer_fused", "probe"]
