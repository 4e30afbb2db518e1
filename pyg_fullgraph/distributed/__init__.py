"""One graph over several processes, each with its part of the vertices, on CPUs (gloo) or GPUs (NCCL)."""

from pyg_fullgraph.distributed.graph import ShardedGraph, shard, shard_edges
from pyg_fullgraph.distributed.group import Group
from pyg_fullgraph.distributed.model import DistributedModel

__all__ = ["DistributedModel", "Group", "ShardedGraph", "shard", "shard_edges"]
