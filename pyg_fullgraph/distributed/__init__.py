"""One graph over several processes, each with its part of the vertices, on CPUs (gloo) or GPUs (NCCL)."""

from pyg_fullgraph.distributed.graph import ShardedGraph, shard, shard_edges
from pyg_fullgraph.distributed.group import Group, under_torchrun
from pyg_fullgraph.distributed.model import DistributedModel
from pyg_fullgraph.distributed.recording import Timeline, timeline
from pyg_fullgraph.events import Event, Overlap, overlap

__all__ = ["DistributedModel", "Event", "Group", "Overlap", "ShardedGraph", "Timeline", "overlap", "shard",
           "shard_edges", "timeline", "under_torchrun"]
