"""DistributedModel: one model on all processes of a sharded graph, trained as one model on the whole graph."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor
from torch.nn import Module, Parameter
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils.weak import WeakIdKeyDictionary
from torch_geometric.data.data import BaseData

from pyg_fullgraph._version import __version__
from pyg_fullgraph.activation import activation_dropout, apply
from pyg_fullgraph.distributed.graph import ShardedGraph
from pyg_fullgraph.distributed.group import Group
from pyg_fullgraph.distributed.refusals import check_modules, describe_modules
from pyg_fullgraph.errors import InputError
from pyg_fullgraph.graph import Graph
from triton_kernels.reference import Activation

__all__ = ["DistributedModel"]


class DistributedModel(Module):
    """A replicated model whose processes each hold a part of the graph.

    The wrapped model is called with this rank's rows and a :class:`ShardedGraph`; what it computes is what it computes
    on the whole graph. While it runs,

    - batch norms use statistics of all rows of all ranks; in ``torch.utils.checkpoint`` they are refused,
    - dropout masks are functions of a seed, which rank 0 draws, and of vertex or edge ids, so that they do not depend
      on how the graph is divided. They equal those of this class on a whole :class:`Graph`, not torch's own.

    After ``backward`` every gradient is the sum over all ranks, which is right for a loss that is a sum over rows;
    :meth:`mean` makes a mean one. Gradients are then equal on all ranks, so ``clip_grad_norm_`` and optimizers are used
    as always, whatever became of results and parameters outside of ``forward``. ``backward`` has to be called on all
    ranks, where it comes to some parameter; a term of the loss that is no sum over rows, such as a norm
    of weights, has to be divided by the number of ranks.

    Args:
        module: the model, the same on every rank; parameters and buffers become those of rank 0.
        group: a process group, None for the default one, or for one process alone.

    ``state_dict`` and ``load_state_dict`` are the model's. Deep copies share the processes.

    What a ``forward`` of one's own does with all its rows (``x.mean(0)``, ``global_mean_pool``, ``x.size(0)``) is not
    noticed and sees the rows of this rank only. ``torch.autograd.grad`` gives this rank's part of the gradient of a
    parameter, which has to be summed by the caller.

    Raises: GroupError (RuntimeError) on every rank if modules (parameters, what they print, options of layers) or
        versions differ; InputError from ``forward`` for a graph of other processes, and for modules that reduce
        over all nodes in other ways: norms, pools, attention, aggregations outside of layers.
    Source: MG-GCN 4.1 replicates the weights and sums their gradients.
    """

    def __init__(self, module: Module, group: Any = None) -> None:
        super().__init__()
        if not isinstance(module, Module):
            raise InputError("module", "to be a torch.nn.Module", type(module).__name__)
        self.module = module
        self.group = Group(group)
        self._is_synced = True
        self._has_parts = False  # whether gradients hold parts of this rank that were not summed yet
        self._earlier: list[Tensor | None] | None = None  # gradients from before the backward that runs
        ranks = self.group
        ranks.check_equal("versions", {"pyg_fullgraph": __version__, "torch": torch.__version__})
        state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        ranks.check_equal("module", [(k, tuple(t.shape), str(t.dtype), t.requires_grad) for k, t in state.items()])
        ranks.check_equal_lines("module", describe_modules(module))
        if ranks.size > 1:
            check_modules(module)
        with torch.no_grad():
            for name, value in state.items():
                ranks.check_device(name, value.device)
                value.copy_(ranks.broadcast(value.contiguous(), 0).wait())
        self._follow()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's result on this rank's rows."""
        graph = _graph_in((*args, *kwargs.values()))
        if isinstance(graph, ShardedGraph) and graph.group.members != self.group.members:
            raise InputError("graph", f"to be divided over the processes of the model, {list(self.group.members)}",
                             list(graph.group.members))
        if torch.is_grad_enabled():
            self._follow()
        with _WholeGraph(self.group, graph):
            return self.module(*args, **kwargs)

    def mean(self, value: Tensor, count: int | Tensor) -> Tensor:
        """The mean over all ranks from the means over each rank's rows, differentiable: a loss, or a metric.

        Args:
            value: [] mean over this rank's rows; anything where it has none. Integers become torch's default dtype.
            count: how many rows those are.
        Returns: [] the mean over all rows, NaN without any; the same on every rank.
        """
        value = value if value.is_floating_point() else value.to(torch.get_default_dtype())
        return _Mean.apply(value, torch.as_tensor(count, device=value.device), self.group)

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """``torch.nn.utils.clip_grad_norm_`` of the parameters, after ``backward``; the norm is that of the whole."""
        return torch.nn.utils.clip_grad_norm_(self.module.parameters(), max_norm, norm_type)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave what a ``backward`` within the block adds as this rank's part; the next one outside sums it as well.

        Of gradients that are sums already each rank then keeps an equal share. Where forward ran makes no difference.
        """
        before, self._is_synced = self._is_synced, False
        try:
            yield
        finally:
            self._is_synced = before

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """As a part of another module, which gives this one's names, as of :meth:`state_dict`."""
        for name in [name for name in state_dict if name.startswith(prefix)]:
            state_dict[f"{prefix}module.{name.removeprefix(prefix)}"] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *args)

    # Gradients

    def _follow(self) -> None:
        """Let every parameter tell this model, and no other one that has it as well, that backward has come to it.

        So it does not matter what parameters were used for, in ``forward`` or apart from it, and how results left it.
        """
        if self.group.size == 1:
            return
        for p in self.module.parameters():
            told, handle = _followed.get(p, (None, None))
            if p.requires_grad and (told is None or told.model() is not self):
                if handle is not None:
                    handle.remove()
                told = _Arrival(self)
                _followed[p] = told, p.register_hook(told)

    def _start_backward(self) -> None:
        """Called before the first gradient of a parameter is added: sum what this backward adds, once it is done, or
        note that it adds parts.
        """
        if self._earlier is not None:
            return
        parts = [p for p in self.module.parameters() if p in _followed and _followed[p][0].model() is self]
        earlier, end_backward = [p.grad for p in parts], self._end_synced if self._is_synced else self._end_apart
        self._earlier = earlier
        for p in parts:
            p.grad = None

        def end() -> None:
            end_backward(parts, earlier)

        # The engine drops `end` when backward is over, also where it fails and never calls it.
        weakref.finalize(end, self._put_back, parts, earlier).atexit = False
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def _end_apart(self, parts: list[Parameter], earlier: list[Tensor | None]) -> None:
        if not self._has_parts:
            for grad in earlier:
                if grad is not None:
                    grad.div_(self.group.size)
        _add(parts, earlier)
        self._has_parts, self._earlier = True, None

    def _end_synced(self, parts: list[Parameter], earlier: list[Tensor | None]) -> None:
        try:
            if self._has_parts:
                _add(parts, earlier)
            sum_gradients(parts, self.group)
        except BaseException:
            self._put_back(parts, earlier)
            raise
        if not self._has_parts:  # gradients of earlier steps are sums already
            _add(parts, earlier)
        self._has_parts, self._earlier = False, None

    def _put_back(self, parts: list[Parameter], earlier: list[Tensor | None]) -> None:
        """Undo a backward that failed, so that the next one begins anew."""
        if self._earlier is earlier:
            self._earlier = None
            for p, grad in zip(parts, earlier, strict=True):
                p.grad = grad


def _is_checkpointed() -> bool:
    """Whether the model, which runs, has ``torch.utils.checkpoint`` run what asks this."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not DistributedModel.forward.__code__:
        if frame.f_code.co_filename == checkpoint.__file__:
            return True
        frame = frame.f_back
    return False


def _graph_in(given: Sequence[Any]) -> Graph | None:
    """The first graph among arguments, in containers and PyG's data as well."""
    if not all(isinstance(v, Tensor) for v in given):
        given = pytree.tree_leaves(given)
    for value in given:
        if isinstance(value, BaseData):
            value = _graph_in([list(store.values()) for store in value.stores])
        if isinstance(value, Graph):
            return value
    return None


def _add(parameters: list[Parameter], earlier: list[Tensor | None]) -> None:
    for p, grad in zip(parameters, earlier, strict=True):
        if grad is not None:
            p.grad = grad if p.grad is None else p.grad.add_(grad)


def sum_gradients(parameters: Iterable[Parameter], group: Group) -> None:
    """Replace each gradient by its sum over the ranks; one transfer per dtype.

    A gradient that is missing on some ranks counts as zero there, one that is missing on all stays missing. Half
    precision is summed in float32.
    """
    by_dtype: dict[torch.dtype, list[Parameter]] = {}
    for p in parameters:
        by_dtype.setdefault(p.dtype, []).append(p)
    for same in by_dtype.values() if group.size > 1 else ():
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in same]
        wide = torch.float32 if same[0].dtype.itemsize < 4 else same[0].dtype
        is_missing = [p.grad is None for p in same]
        there = torch.ones(len(same), dtype=wide, device=same[0].device)
        if any(is_missing):
            there *= there.new_tensor([not m for m in is_missing])
        total = group.reduce(torch.cat([there, *(g.reshape(-1).to(wide) for g in grads)]))
        # Where this rank has a gradient there is a sum, and nothing has to wait for the others to say so.
        counts = total[:len(same)].tolist() if any(is_missing) else [1] * len(same)
        for p, count, part in zip(same, counts, total[len(same):].split([g.numel() for g in grads]), strict=True):
            p.grad = part.view(p.shape).to(p.dtype, copy=True) if count else None


class _Arrival:
    """A hook of a parameter that tells the model when backward has come to it, before the gradient is added."""

    takes_none = True

    def __init__(self, model: DistributedModel) -> None:
        self.model = weakref.ref(model)

    def __call__(self, grad: Tensor | None) -> None:
        model = self.model()
        if model is not None:
            model._start_backward()


#: Parameter -> its hook, and what removes it.
_followed: Any = WeakIdKeyDictionary()


class _Mean(torch.autograd.Function):
    """See :meth:`DistributedModel.mean`: each rank's mean counts as much as it has rows."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, count: Tensor, group: Group) -> Tensor:
        wide = torch.float64 if value.device.type != "mps" else torch.float32
        own = torch.where(count > 0, value.to(wide) * count, 0.0)
        total = group.reduce(torch.stack([own, count.to(wide)]))
        ctx.share = (count / total[1]).nan_to_num(0.0)
        return (total[0] / total[1]).to(value.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (grads[0] * ctx.share).to(grads[0].dtype), None, None


class _Sum(torch.autograd.Function):
    """The sum over all ranks, of which every rank's loss is a function."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.reduce(value.clone())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.group.reduce(grads[0].clone()), None


class _WholeGraph(TorchFunctionMode):
    """While a model runs: batch norms over the rows of all ranks, dropout by the ids of vertices and edges."""

    def __init__(self, group: Group, graph: Graph | None) -> None:
        super().__init__()
        self.group, self.graph = group, graph

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout and self.graph is not None:
            return self._dropout(*args, **kwargs)
        if func is activation_dropout and self.graph is not None:
            return self._activation_dropout(*args, **kwargs)
        if func is F.batch_norm and self.group.size > 1:
            return self._batch_norm(*args, **kwargs)
        return func(*args, **kwargs)

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0.0 or not 0.0 <= p < 1.0 or input.dim() == 0:
            return F.dropout(input, p, training, inplace)
        made = self._activate(input, Activation("identity", 0.0, float(p)))
        return input.copy_(made) if inplace else made

    def _activation_dropout(self, x: Tensor, activation: str, p: float, training: bool, **more: float) -> Tensor:
        if not training or p == 0.0 or p == 1.0 or x.dim() == 0:
            return activation_dropout(x, activation, p, training, **more)
        return self._activate(x, Activation.of(activation, p, **more))

    def _activate(self, x: Tensor, activation: Activation) -> Tensor:
        assert self.graph is not None
        return apply(x, activation, self.graph.draw_seed().to(x.device), self._ids(x.shape[0], x.device))

    def _ids(self, count: int, device: torch.device) -> Tensor | None:
        """What rows are known by in the whole graph, None for their places; those that are neither vertices nor edges,
        by rank.
        """
        assert self.graph is not None
        if not self.graph.is_part:
            return None
        ids = self.graph.ids_of_rows(count)
        return torch.arange(count, device=device) + (self.group.rank << 40) if ids is None else ids.to(device)

    def _batch_norm(self, input: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
                    weight: Tensor | None = None, bias: Tensor | None = None, training: bool = False,
                    momentum: float = 0.1, eps: float = 1e-5) -> Tensor:
        if not training:
            return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
        if _is_checkpointed():
            raise InputError("module", "to run BatchNorm outside of torch.utils.checkpoint, which runs it again in "
                             "backward, with the rows of this rank only", "one inside of it")
        dims = [d for d in range(input.dim()) if d != 1]
        shape = [-1 if d == 1 else 1 for d in range(input.dim())]
        x = input if input.dtype == torch.float64 else input.float()
        num_own = input.numel() // max(input.shape[1], 1)
        count = self.group.reduce(x.new_tensor(num_own))
        # Only ranks that might have the one row ask; a step is run before it is captured.
        if num_own < 2 and not (x.is_cuda and torch.cuda.is_current_stream_capturing()) and count == 1:
            raise InputError("input", "to have more than one row on all ranks together when training", "1 row")
        mean = _Sum.apply(x.sum(dims), self.group) / count
        centred = x - mean.view(shape)
        var = _Sum.apply(centred.square().sum(dims), self.group) / count
        if running_mean is not None and running_var is not None:
            with torch.no_grad():
                running_mean.lerp_(mean.to(running_mean.dtype), momentum)
                running_var.lerp_((var * (count / (count - 1))).to(running_var.dtype), momentum)
        out = centred * (var + eps).rsqrt().view(shape)
        out = out if weight is None else out * weight.view(shape)
        out = out if bias is None else out + bias.view(shape)
        return out.to(input.dtype)
