"""The edge phase of every layer: PyG's propagate and edge_updater, replaced on the class and nowhere else.

A class gets a generated ``propagate`` with PyG's explicit signature that calls :meth:`FusedMixin._fullgraph_propagate`.
That applies PyG's rules for arguments, sizes and hooks, has the layer's methods traced, and runs the program; whatever
cannot run that way goes to PyG's own function for that class, counted and with its reasons.

This module's names reach PyG's generated code through a star import, so names of ``typing`` stay out of it.
"""

from __future__ import annotations

import functools
import typing
import weakref

import torch
import torch_geometric.nn
from torch_geometric import EdgeIndex
from torch_geometric.nn import HANConv, MessagePassing, aggr
from torch_geometric.utils import is_sparse

from pyg_fullgraph import debug
from pyg_fullgraph.autograd import Ways
from pyg_fullgraph.errors import NotFusable, NotFusedError, ShardedGraphError
from pyg_fullgraph.functions import has_modes_of_others, has_transforms, is_recorded, unseen
from pyg_fullgraph.graph import is_part
from pyg_fullgraph.nn import classes, compiled, derived, dots, forwards, known, order, tape
from pyg_fullgraph.nn.arguments import Call
from pyg_fullgraph.nn.coverage import HAS_MODES, PLAIN, RECORDED, UNSEEN
from pyg_fullgraph.nn.lazy import EdgeExpr, as_plain, run, run_phase
from pyg_fullgraph.nn.preparation import has_numbers
from pyg_fullgraph.nn.rebinding import mark
from pyg_fullgraph.nn.surroundings import has_hooks_of_all, submodules
from pyg_fullgraph.nn.tracing import METHODS, mentioned

__all__ = ["FusedMixin", "is_layer", "refusals", "unseen_reasons"]

# A base for the type checker only: beside it in the MRO there is always a PyG layer.
_Layer: typing.Any = object

# Aggregations that read the edges of a node in an order, or all of them at once.
_ORDERED = (aggr.MedianAggregation, aggr.QuantileAggregation, aggr.LSTMAggregation, aggr.GRUAggregation,
            aggr.SortAggregation, aggr.Set2Set, aggr.SetTransformerAggregation, aggr.GraphMultisetTransformer,
            aggr.EquilibriumAggregation, aggr.MLPAggregation, aggr.PatchTransformerAggregation, aggr.LCMAggregation)


# Layers whose forward averages over all nodes, which a part of a graph does not have.
_OVER_ALL_NODES = (HANConv,)


# PyG's layers that pass messages without propagate -> why they cannot run fused.
_UNSEEN = {getattr(torch_geometric.nn, name): PLAIN[name] for name in UNSEEN}


def is_layer(module: torch.nn.Module) -> bool:
    """Whether a module is a layer over edges, that passes messages itself: fused or not."""
    return isinstance(module, (MessagePassing, *_UNSEEN))


def unseen_reasons(layer: torch.nn.Module) -> tuple[str, ...]:
    """Why a layer that calls no propagate, which nothing counts, cannot run fused; empty for all others."""
    return tuple(why for kind, why in _UNSEEN.items() if isinstance(layer, kind))


def refusals(conv: typing.Any) -> tuple[str, ...]:
    """Why a layer cannot run fused whatever its inputs are; empty if nothing speaks against it.

    What depends on the inputs, or on what its methods do, is only known when it runs.
    """
    if reasons_of_unseen := unseen_reasons(conv):
        return reasons_of_unseen
    kind, reasons = type(conv), []
    own, reaches_ours = classes.own_method(kind, "propagate")
    if own is not None and not reaches_ours:
        reasons.append("the class has a propagate of its own")
    for module in conv.aggr_module.modules() if conv.aggr_module is not None else ():
        if isinstance(module, _ORDERED):
            reasons.append(f"aggregation {conv.aggr!r} is not made of sums and extrema over the edges of a node")
            break
    reasons += [f"{method} was replaced on the instance" for method in METHODS["propagate"] if method in vars(conv)]
    return tuple(reasons)


def _has_hooks(module: torch.nn.Module) -> bool:
    return any(m._forward_hooks or m._backward_hooks or m._backward_pre_hooks
               or any(getattr(h, "__name__", "") not in _INITIALIZERS for h in m._forward_pre_hooks.values())
               for _, m in submodules(module))


# Hooks of modules that wait for their first input, PyG's and torch's.
_INITIALIZERS = ("initialize_parameters", "_infer_parameters")


def _momentary_refusals(conv: typing.Any, function: str) -> list[str]:
    """Reasons that come and go: hooks and explain."""
    reasons = []
    if conv.explain:
        reasons.append("explain is on")
    for method in METHODS[function]:
        if getattr(conv, f"_{method}_forward_pre_hooks") or getattr(conv, f"_{method}_forward_hooks"):
            reasons.append(f"{method} has hooks")
    of_all = has_hooks_of_all()
    hooked = [name for name, module in conv._modules.items() if module is not None and (of_all or _has_hooks(module))]
    names = mentioned(type(conv), function) if hooked else frozenset()
    for name in hooked:
        if names is None or name in names:
            has = "has hooks, as all modules have" if of_all else "has hooks"
            reasons.append(f"submodule {name!r}, which {' or '.join(METHODS[function])} calls, {has}")
    return reasons


note_phase = tape.step(debug.record)


def _recorded(function: str) -> typing.Any:
    """What a tracer sees in the place of one of our functions: PyG's, which anybody can run."""
    def run_recorded(conv, edge_index, size, kwargs):
        return _plain(conv, function, edge_index, [RECORDED])(edge_index, size=size, **kwargs)
    return run_recorded


_recorded_propagate, _recorded_edge_updater = _recorded("propagate"), _recorded("edge_updater")


class FusedMixin(_Layer):
    """Put before a PyG layer class, runs its edge phase as one fused program where that is possible.

    Constructor, parameters, state dict, repr, forward and hooks stay the layer's.
    """

    _plain_propagate = classes.GENERIC["propagate"]
    _plain_edge_updater = classes.GENERIC["edge_updater"]
    # For the base class, for which nothing is generated: PyG's own has functions of these names from its instances.
    _orig_propagate = _jinja_propagate = classes.on_instance("propagate")
    _orig_edge_updater = _jinja_edge_updater = classes.on_instance("edge_updater")

    def _set_jittable_templates(self, raise_on_error: bool = False) -> None:
        classes.install(self, lambda: super(FusedMixin, self)._set_jittable_templates(raise_on_error))
        object.__setattr__(self, "_fullgraph_handle", compiled.register(self))

    def __setstate__(self, data):
        super().__setstate__({k: v for k, v in data.items() if k != "_fullgraph_handle"})

    def _apply(self, *args, **kwargs):
        forwards.forget(self)  # torch swaps no tensor that a weak reference is to
        return super()._apply(*args, **kwargs)

    def _load_from_state_dict(self, *args, **kwargs):
        if torch.__future__.get_swap_module_params_on_conversion():
            forwards.forget(self)
        super()._load_from_state_dict(*args, **kwargs)

    def propagate(self, edge_index, size=None, **kwargs):
        """PyG's propagate, for classes that call it through ``super()``."""
        return self._fullgraph_propagate(edge_index, size, kwargs)

    def edge_updater(self, edge_index, size=None, **kwargs):
        """PyG's edge_updater, for classes that call it through ``super()``."""
        return self._fullgraph_edge_updater(edge_index, size, kwargs)

    mark(propagate)
    mark(edge_updater)

    def _fullgraph_refusals(self, now=None):
        """Why this layer is PyG's; ``now``, a function of it, asks for reasons that come and go as well. Asked where a
        compiler chooses between this layer's operator and PyG's code, and where transforms are at work.
        """
        return (*_own_refusals(self), *([] if now is None else _momentary_refusals(self, now)))

    @functools.partial(compiled.apart, exported=_recorded_propagate)
    @derived.paused
    def _fullgraph_propagate(self, edge_index, size, kwargs):
        if is_recorded() or not has_numbers(edge_index):
            return _recorded_propagate(self, edge_index, size, kwargs)
        if has_modes_of_others():
            return _run_plain(self, "propagate", edge_index, size, kwargs, [HAS_MODES])
        kwargs, _ = dots.computed(self, kwargs)
        look = known.look_of(self, "propagate", edge_index, size, kwargs)
        bound = known.find(self, look, edge_index, kwargs)
        if bound is not None:
            with unseen():
                later = None if bound.side else \
                    order.sum_later(self, bound.program, bound.graph, bound.tensors, bound.ways)
            if later is not None:
                return later
            (out,) = run_phase(self, bound.program, bound.graph, bound.tensors, bound.ways)
            bound.leave_behind(self)
            return out
        if isinstance(self, _OVER_ALL_NODES) and is_part(edge_index):
            raise ShardedGraphError("it averages over all nodes", type(self).__name__)
        reasons = [*_own_refusals(self), *_momentary_refusals(self, "propagate")]
        if reasons:
            return _run_plain(self, "propagate", edge_index, size, kwargs, reasons)
        has_run_hooks = bool(self._propagate_forward_pre_hooks)
        for hook in self._propagate_forward_pre_hooks.values():
            changed = hook(self, (edge_index, size, kwargs))
            if changed is not None:
                edge_index, size, kwargs = changed
        parts, fields = _feature_parts(self, kwargs), dict(vars(self))
        try:
            calls = [Call(self, "propagate", edge_index, size, part) for part in parts]
        except NotFusable as error:
            return _run_plain(self, "propagate", edge_index, size, kwargs, error.reasons, has_run_hooks)
        if len(calls) == 1 and not calls[0].side and calls[0].is_plain:
            later = order.sum_later(self, calls[0].program, calls[0].graph, calls[0].tensors, _new_ways())
            if later is not None:
                known.remember(self, look, edge_index, kwargs, calls[0], fields)
                return later
        try:
            results = [self._fullgraph_edge_phase(call, edge_index) for call in calls]
        except NotFusable as error:  # of derivatives, which are made before anything is computed
            return _run_plain(self, "propagate", edge_index, size, kwargs, error.reasons, has_run_hooks)
        if len(calls) == 1:
            known.remember(self, look, edge_index, kwargs, calls[0], fields)
        out = results[0] if len(results) == 1 else torch.cat(results, dim=-1)
        for hook in self._propagate_forward_hooks.values():
            changed = hook(self, (edge_index, calls[0].size, kwargs), out)
            out = out if changed is None else changed
        return out

    def _fullgraph_edge_phase(self, call, edge_index):
        (out,) = run_phase(self, call.program, call.graph, call.tensors, _new_ways())
        for name, value in call.side_results().items():
            # Sparse matrices take coefficients as their values, so they get a tensor.
            setattr(self, name, as_plain(value) if is_sparse(edge_index) else value)
        result = call.result(out)
        return derived.watched(self.update, result, **call.update_arguments()) if order.has_update(self) else result

    @functools.partial(compiled.apart, exported=_recorded_edge_updater)
    @derived.paused
    def _fullgraph_edge_updater(self, edge_index, size, kwargs):
        if is_recorded() or not has_numbers(edge_index):
            return _recorded_edge_updater(self, edge_index, size, kwargs)
        if has_modes_of_others():
            return _run_plain(self, "edge_updater", edge_index, size, kwargs, [HAS_MODES])
        if has_transforms() and (reasons := self._fullgraph_refusals("propagate")):  # as forward is PyG's
            return _run_plain(self, "edge_updater", edge_index, size, kwargs, [*reasons])
        kwargs, features = dots.computed(self, kwargs)
        look = known.look_of(self, "edge_updater", edge_index, size, kwargs)
        bound = known.find(self, look, edge_index, kwargs)
        if bound is not None:
            note_phase(self, "edge_updater", bound.program, bound.graph)
            bound.leave_behind(self)
            is_ours = order.is_seen_by_nobody(self)
            return EdgeExpr(bound.program.outputs[0].value, bound.tensors, bound.graph, features, is_ours)
        fields = dict(vars(self))
        try:
            reasons = _momentary_refusals(self, "edge_updater")
            if "edge_update" in vars(self):
                reasons.append("edge_update was replaced on the instance")
            if reasons:
                raise NotFusable(reasons)
            call = Call(self, "edge_updater", edge_index, size, kwargs)
        except NotFusable as error:
            return _run_plain(self, "edge_updater", edge_index, size, kwargs, error.reasons)
        note_phase(self, "edge_updater", call.program, call.graph)
        for name, value in call.side_results().items():
            setattr(self, name, value)
        if call.dim or call.dtype != call.computed:  # of which an expression of the values knows nothing
            (out,) = run(call.program, call.graph, call.tensors)
            return call.result(out)
        is_ours = order.is_seen_by_nobody(self)
        out = EdgeExpr(call.program.outputs[0].value, call.tensors, call.graph, features, is_ours)
        known.remember(self, look, edge_index, kwargs, call, fields)
        return out.materialize() if is_sparse(edge_index) else out


def _new_ways():
    """The ways of calls to come, if this one is noted."""
    return None if tape.running.recorder is None else Ways()


def _feature_parts(conv, kwargs):
    """The arguments of each layer that PyG's ``decomposed_layers`` makes of one: chunks of the features of sources."""
    if conv.decomposed_layers == 1:
        return [kwargs]
    names = {name[:-2] for name in conv._user_args if name.endswith("_j")}
    chunks = {name: kwargs[name].chunk(conv.decomposed_layers, -1) for name in names}
    return [{**kwargs, **{n: c[k] for n, c in chunks.items()}} for k in range(conv.decomposed_layers)]


_refused: weakref.WeakKeyDictionary[typing.Any, typing.Any] = weakref.WeakKeyDictionary()


def _own_refusals(conv):
    """``refusals``, remembered while what they look at is the same."""
    state = (type(conv), type(conv.aggr_module), "message" in vars(conv), "aggregate" in vars(conv))
    known = _refused.get(conv)
    if known is None or known[0] != state:
        _refused[conv] = known = (state, refusals(conv))
    return known[1]


def _plain(conv, function, edge_index, reasons):
    """PyG's own function for a layer and such edges; it needs the whole graph."""
    if is_part(edge_index):
        raise NotFusedError({type(conv).__name__: reasons})
    plain = getattr(conv, f"_plain_{function}")
    # What PyG generates for a class knows no decomposed layers, and calls message_and_aggregate only if the first layer
    # of the class had an aggregation that can use it. The generic one takes no gradients of a COO matrix.
    is_missing = conv.fuse and (is_sparse(edge_index) or isinstance(edge_index, EdgeIndex)) and \
        "message_and_aggregate" not in plain.__code__.co_names
    return functools.partial(classes.GENERIC[function], conv) if conv.decomposed_layers > 1 or is_missing else plain


def _run_plain(conv, function, edge_index, size, kwargs, reasons, has_run_hooks=False):
    """PyG's own function; its pre-hooks are kept from running twice."""
    plain = _plain(conv, function, edge_index, reasons)
    debug.record(conv, function, reasons=reasons)
    if isinstance(edge_index, torch.Tensor) and edge_index.layout == torch.sparse_coo:
        # PyG's generic propagate would mark the caller's matrix as coalesced, without coalescing it.
        edge_index = edge_index.coalesce()
    if not has_run_hooks:
        return plain(edge_index, size=size, **kwargs)
    hooks = conv._propagate_forward_pre_hooks
    conv._propagate_forward_pre_hooks = type(hooks)()
    try:
        return plain(edge_index, size=size, **kwargs)
    finally:
        conv._propagate_forward_pre_hooks = hooks
