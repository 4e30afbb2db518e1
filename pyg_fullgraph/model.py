"""Whole models: swap their layers for fused ones and back."""

from __future__ import annotations

from typing import Any, TypeVar

import torch_geometric.nn as pyg_nn
from torch.nn import Module

import pyg_fullgraph.nn as fused_nn
from pyg_fullgraph.errors import InputError, NotFusedError
from pyg_fullgraph.nn.classes import fused_class
from pyg_fullgraph.nn.propagation import FusedMixin, is_layer, refusals

__all__ = ["check_model", "convert", "revert"]

AnyModule = TypeVar("AnyModule", bound=Module)

_DROP_IN = {getattr(pyg_nn, name): getattr(fused_nn, name) for name in fused_nn.__all__}
_BASES = {ours: pygs for pygs, ours in _DROP_IN.items()} | {fused_nn.DirGNNConv: pyg_nn.DirGNNConv}


def convert(model: AnyModule, strict: bool = False) -> AnyModule:
    """Fuse every message-passing layer of ``model``, in place.

    Args:
        model: any module. Parameters, buffers, hooks and optimizers that hold them are untouched: only the class of
            each layer changes, to a subclass with the same name, state dict and forward. Layers without a class of
            ours get one made from their own, the user's included.
        strict: refuse a model with a layer that can never run fused, and have layers raise NotFusedError where they
            would run plain because of their inputs or what their methods do.
    Returns: ``model``.
    Raises: InputError (ValueError) for what is no module; NotFusedError (ValueError), with ``strict``: names every such
        layer with its reasons; nothing was changed.
        What depends on inputs or on ``message`` shows when the model runs: see :func:`pyg_fullgraph.explain`.
    """
    check_model(model)
    if strict:
        refused = {name or type(m).__name__: why for name, m in model.named_modules()
                   if is_layer(m) and (why := refusals(m))}
        if refused:
            raise NotFusedError(refused)
    for layer in model.modules():
        if type(layer) is pyg_nn.DirGNNConv:
            layer.__class__ = fused_nn.DirGNNConv
        if not isinstance(layer, pyg_nn.MessagePassing):
            continue
        if not isinstance(layer, FusedMixin):
            kind = type(layer)
            _change_class(layer, _DROP_IN.get(kind) or fused_class(kind, FusedMixin))
        vars(layer).pop("_fullgraph_strict", None)
        if strict:
            layer._fullgraph_strict = True
    return model


def revert(model: AnyModule) -> AnyModule:
    """Undo :func:`convert`, in place; our drop-in layers become PyG's as well.

    A layer whose class was written as a subclass of ``pyg_fullgraph.nn`` stays what it is.

    Raises:
        InputError: ``model`` is no module.
    """
    check_model(model)
    for layer in model.modules():
        kind = type(layer)
        base = _BASES.get(kind) or vars(kind).get("_fullgraph_base")
        if base is pyg_nn.DirGNNConv:
            layer.__class__ = base
        elif base is not None:
            _change_class(layer, base)
        vars(layer).pop("_fullgraph_strict", None)
    return model


def check_model(model: object) -> None:
    """Raise an InputError unless it is a module."""
    if not isinstance(model, Module):
        raise InputError("model", "to be a torch.nn.Module", type(model).__name__)


def _change_class(layer: Any, kind: type) -> None:
    # explain and decomposed_layers put functions of the class on the instance, where PyG's preparation of the class
    # must not find them: it would take them for the class's.
    bound = {name: vars(layer).pop(name) for name in ("propagate", "edge_updater") if name in vars(layer)}
    vars(layer).pop("_fullgraph_handle", None)  # PyG's classes have none
    layer.__class__ = kind
    layer._set_jittable_templates()
    for name, function in bound.items():
        if not getattr(function, "__module__", "").endswith((f"_{name}", ".message_passing")):
            setattr(layer, name, function)  # the user's doing
        elif layer.explain or layer.decomposed_layers > 1:
            setattr(layer, name, getattr(kind, f"_orig_{name}").__get__(layer))
