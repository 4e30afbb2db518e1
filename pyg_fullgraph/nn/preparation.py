"""What PyG's layers do to a graph on every forward - self-loops, normalization, degrees - done once per graph.

Each function here has the signature and the result of the PyG function of the same name and is put in its place inside
the ``forward`` of our classes only (:data:`REPLACEMENTS`). Structure is remembered with the user's ``edge_index`` or
:class:`Graph`; values that depend on edge weights are remembered only while the very same weights, unchanged and
without gradient, come back. Whatever PyG accepts and these functions do not know goes to PyG's own.

Legend: N nodes, E edges.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch_geometric.nn.conv.gcn_conv as pyg_gcn
import torch_geometric.nn.conv.rgcn_conv as pyg_rgcn
import torch_geometric.typing as pyg_typing
import torch_geometric.utils as pyg_utils
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch_geometric import EdgeIndex
from torch_geometric.utils.loop import compute_loop_attr
from torch_geometric.utils.num_nodes import maybe_num_nodes

from pyg_fullgraph.errors import DeviceError, DtypeError, IndexRangeError, InputError, RowCountError
from pyg_fullgraph.functions import is_recorded, lasting, unseen
from pyg_fullgraph.graph import Graph, graph_of, is_part, remembered
from pyg_fullgraph.memo import Memo, is_constant, is_unchanged, keep, state_of, taken
from pyg_fullgraph.nn.ends import EdgeValues, Ends
from pyg_fullgraph.nn.lazy import EdgeExpr, LazyTensor, run
from pyg_fullgraph.nn.rebinding import rebind
from pyg_fullgraph.nn.tape import step
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import Domain, EdgeProgram, Output

__all__ = ["REPLACEMENTS", "REPLACEMENTS_APART", "prepared_graph"]

Fill = float | Tensor | str | None

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_MAX_MASKS = 1024
_DERIVED = "derived"  # marks a graph made here, whose number of nodes was a guess and may be corrected
_REVERSE_OF = "reverse of"  # marks a tensor made here from another one
_COPIED = "copied"  # the copy of an edge_index for those who may write to it
_TYPE = "type"  # marks a mask by what it asks of which tensor


# --- what is remembered, and with what --------------------------------------------------------------------------

def _memo(edge_index: Tensor) -> dict[Any, Any]:
    return edge_index.memo if isinstance(edge_index, Graph) else remembered.of(edge_index)


def _once(memo: dict[Any, Any], key: Any, build: Callable[[], Any]) -> Any:
    if key in memo:
        return taken(memo[key])
    with lasting():
        return keep(memo, key, build())


def _of_values(memo: dict[Any, Any], key: Any, values: Tensor, build: Callable[[], Tensor]) -> Tensor:
    """``build()``, remembered in one slot of ``memo`` for as long as ``values`` and it are the same unchanged tensors.

    From values that require a gradient, and from a Parameter, it is built anew each time and stays differentiable.
    """
    if not is_constant(values):
        return build()
    slot = memo.get(key)
    if slot is None or slot[0]() is not values or not is_unchanged(values, slot[1]) or not is_unchanged(*slot[2:]):
        with lasting():
            made = build()
            slot = keep(memo, key, (weakref.ref(values), state_of(values), made, state_of(made)))
    return taken(slot[2])


class _Unchanged:
    """A tensor, for as long as it lives and nobody writes to it."""

    def __init__(self, tensor: Tensor) -> None:
        self._ref = weakref.ref(tensor)
        self._state = _state_of(tensor)

    @property
    def tensor(self) -> Tensor | None:
        tensor = self._ref()
        return tensor if tensor is not None and _is_unchanged(tensor, self._state) else None


def _once_unwritten(memo: dict[Any, Any], key: Any, build: Callable[[], Tensor]) -> Tensor:
    """As :func:`_once`, of a tensor that callers may write to: it is then built anew."""
    known = memo.get(key)
    if known is None or not _is_unchanged(*known):
        with lasting():
            made = build()
        known = keep(memo, key, (made, _state_of(made)))
    return taken(known[0])


def _state_of(tensor: Tensor) -> tuple[Any, ...]:
    return () if isinstance(tensor, Graph) else state_of(tensor)


def _is_unchanged(tensor: Tensor, state: tuple[Any, ...]) -> bool:
    return isinstance(tensor, Graph) or is_unchanged(tensor, state)


# --- self-loops -------------------------------------------------------------------------------------------------


def _others(edge_index: Tensor) -> Tensor:
    """Positions of the edges that are no self-loops."""
    src, dst = edge_index.ends() if type(edge_index) is Graph else _to_plain(edge_index)
    return (src - dst).nonzero().view(-1)  # torch loads a kernel when it first uses it, for a comparison 15 ms


class _Loops:
    """Which edges of an ``edge_index`` are self-loops; found once.

    Attributes:
        num_kept: number of the other edges.
        has_loops: whether there are self-loops, in any part of a graph.
    """

    def __init__(self, edge_index: Tensor) -> None:
        self.num_kept = _others(edge_index).numel()
        has_loops = self.num_kept < edge_index.size(1)
        self.has_loops = edge_index.holds_anywhere(has_loops) if is_part(edge_index) else has_loops
        self._cache: dict[str, Any] = {}
        if has_loops and not isinstance(edge_index, Graph) and int(_to_plain(edge_index).aminmax()[0]) < 0:
            self.places(edge_index)  # nobody else sees the ids of loops that are dropped

    def places(self, edge_index: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Positions and nodes of the self-loops, and which of them is the last one of its node; None if all are."""
        if "places" in self._cache:
            return taken(self._cache["places"])
        with lasting():
            return keep(self._cache, "places", _places_of_loops(_to_plain(edge_index)))

    def kept(self, edge_index: Tensor) -> Tensor | None:
        """Positions of the edges that are no self-loops, made anew: one per edge; None if there is no self-loop."""
        return _others(edge_index) if self.has_loops else None

    def drop(self, values: Tensor, edge_index: Tensor) -> Tensor:
        """``values`` [E, ...] of the edges that are no self-loops, whose positions are kept from then on."""
        if "kept" in self._cache:
            kept = taken(self._cache["kept"])
        else:
            with lasting():
                kept = keep(self._cache, "kept", self.kept(edge_index))
        return values if kept is None else values.index_select(0, kept)

    def others(self, edge_index: Tensor) -> Tensor:
        """The plain ``edge_index`` without the self-loops."""
        kept = self.kept(edge_index)
        return edge_index if kept is None else edge_index.index_select(1, kept)


def _places_of_loops(edge_index: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    loops = (edge_index[0] == edge_index[1]).nonzero().view(-1)
    nodes = edge_index[0].index_select(0, loops).long()
    if nodes.numel() == 0:
        return loops, nodes, None
    low, high = torch.stack(nodes.aminmax()).tolist()
    if low < 0:
        raise IndexRangeError("edge_index", "node", int(edge_index.max()) + 1, low, int(loops[int(nodes.argmin())]))
    order = torch.arange(loops.numel(), device=nodes.device)
    latest = order.new_full((high + 1,), -1).scatter_reduce(0, nodes, order, "amax")
    last = latest[nodes] == order
    return loops, nodes, None if bool(last.all()) else last


class WithoutLoops(LazyTensor):
    """The ``edge_index`` without self-loops [2, num_kept], between a removal and the addition that follows it; a copy,
    to which callers may write.
    """

    origin: Tensor
    found: _Loops

    @staticmethod
    def __new__(cls, origin: Tensor, found: _Loops) -> WithoutLoops:
        self = LazyTensor.__new__(cls, (2, found.num_kept), origin.dtype, origin.device)
        self.origin, self.found = origin, found
        return self

    def __init__(self, origin: Tensor, found: _Loops) -> None:
        """See the class."""

    def materialize(self) -> Tensor:
        if self._value is None:
            origin = self.origin
            if is_part(origin):
                return self.computed(_without_loops(origin, (None, None)))
            if self.found.has_loops:
                with torch.inference_mode(False):  # it counts who writes to it
                    return self.computed(self.found.others(_to_plain(origin)))
            copied = self.computed(_once_unwritten(_memo(origin), _COPIED, lambda: _to_plain(origin).clone()))
        else:
            copied = self._value
        if self.is_followed:
            _memo(self.origin).pop(_COPIED, None)  # the next call would find what was written
        return copied


def _to_plain(edge_index: Tensor) -> Tensor:
    if isinstance(edge_index, EdgeIndex):
        return edge_index.as_tensor()
    if isinstance(edge_index, LazyTensor):
        edge_index = edge_index.materialize()
    return edge_index.to_edge_index() if isinstance(edge_index, Graph) else edge_index


def _num_nodes(edge_index: Tensor, num_nodes: int | None) -> int:
    return edge_index.nodes_with_edges() if num_nodes is None and is_part(edge_index) else \
        maybe_num_nodes(edge_index, num_nodes)


def is_known(edge_index: Any, edge_attr: Any = None) -> bool:
    """Whether the functions here know what to do with these arguments, or PyG's own are to."""
    if torch.compiler.is_compiling() or is_recorded() or not isinstance(edge_index, Tensor):
        return False
    if type(edge_index) is Graph:
        return edge_attr is None or isinstance(edge_attr, Tensor)
    with unseen():
        if edge_index.layout == torch.strided and edge_index.is_floating_point():
            raise DtypeError("edge_index", "an integer dtype", edge_index.dtype)
        is_index = edge_index.layout == torch.strided and edge_index.dtype in _INTEGERS and edge_index.dim() == 2
        return is_index and edge_index.size(0) == 2 and has_numbers(edge_index) and \
            (edge_attr is None or isinstance(edge_attr, Tensor))


def has_numbers(edge_index: Any) -> bool:
    """Whether there are ids in ``edge_index``: tensors on the meta device and fake ones have shapes only."""
    return not (getattr(edge_index, "is_meta", False) or isinstance(edge_index, FakeTensor))


def check_edge_rows(name: str, value: Tensor, edge_index: Tensor) -> None:
    """Refuse edge data that does not belong to ``edge_index``, before anything is computed.

    Raises:
        RowCountError, DeviceError: both ValueError.
    """
    if value.dim() == 0 or value.size(0) != edge_index.size(1):
        raise RowCountError(name, edge_index.size(1), "edge", value.size(0) if value.dim() else 1)
    if value.device != edge_index.device:
        raise DeviceError(name, edge_index.device, value.device)


def remove_self_loops(edge_index: Tensor, edge_attr: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """PyG's function; the ``edge_index`` that it returns is computed only if something reads it."""
    if not is_known(edge_index, edge_attr) or isinstance(edge_index, WithoutLoops):
        return pyg_utils.remove_self_loops(edge_index, edge_attr)
    if edge_attr is not None:
        check_edge_rows("edge_attr", edge_attr, edge_index)
    memo = _memo(edge_index)
    found = _once(memo, "loops", lambda: _Loops(edge_index))
    if not found.has_loops:
        return edge_index, edge_attr
    if edge_attr is not None:
        values = edge_attr
        edge_attr = _of_values(memo, "kept", values, lambda: found.drop(values, edge_index))
    return WithoutLoops(edge_index, found), edge_attr


def _removed_apart(edge_index: Tensor, edge_attr: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """As :func:`remove_self_loops`, but that no result is an argument: callers may write to them."""
    removed, kept = remove_self_loops(edge_index, edge_attr)
    if type(removed) is Tensor and removed is edge_index:
        removed = WithoutLoops(edge_index, _once(_memo(edge_index), "loops", lambda: _Loops(edge_index)))
    if kept is not None and kept is edge_attr:
        kept = _of_values(_memo(edge_index), "copied values", kept, kept.clone)
    return removed, kept


def add_self_loops(edge_index: Tensor, edge_attr: Tensor | None = None, fill_value: Fill = None,
                   num_nodes: int | tuple[int, int] | None = None) -> tuple[Tensor, Tensor | None]:
    """PyG's function; returns a :class:`Graph`, the same one for the same ``edge_index``."""
    if not is_known(edge_index, edge_attr):
        return pyg_utils.add_self_loops(edge_index, edge_attr, fill_value, num_nodes)
    if edge_attr is not None:
        check_edge_rows("edge_attr", edge_attr, edge_index)
    if isinstance(edge_index, WithoutLoops) and edge_index.is_own:
        edge_index = edge_index.materialize()
    num_loops = min(num_nodes) if isinstance(num_nodes, (tuple, list)) else _num_nodes(edge_index, num_nodes)
    removed = isinstance(edge_index, WithoutLoops)
    origin = edge_index.origin if removed else edge_index
    key = _key_of_loops(origin, num_nodes, num_loops)
    full = _with_loops(origin, num_loops, removed, key)
    if edge_attr is None:
        return full, None

    def fill() -> Tensor:
        return torch.cat([edge_attr, _loop_attr(full, edge_index, edge_attr, num_loops, fill_value)])

    if isinstance(fill_value, Tensor):
        return full, fill()
    return full, _of_values(_memo(origin), ("filled", removed, key, fill_value), edge_attr, fill)


def add_remaining_self_loops(edge_index: Tensor, edge_attr: Tensor | None = None, fill_value: Fill = None,
                             num_nodes: int | None = None) -> tuple[Tensor, Tensor | None]:
    """PyG's function; returns a :class:`Graph`, the same one for the same ``edge_index``."""
    if not is_known(edge_index, edge_attr) or isinstance(edge_index, WithoutLoops):
        return pyg_utils.add_remaining_self_loops(edge_index, edge_attr, fill_value, num_nodes)
    if edge_attr is not None:
        check_edge_rows("edge_attr", edge_attr, edge_index)
    given, num_nodes = num_nodes, _num_nodes(edge_index, num_nodes)
    memo = _memo(edge_index)
    full = _with_loops(edge_index, num_nodes, True, _key_of_loops(edge_index, given, num_nodes))
    if edge_attr is None:
        return full, None
    found = memo["loops"] if "loops" in memo else _Loops(edge_index)

    def fill() -> Tensor:
        plain = _to_plain(edge_index) if isinstance(fill_value, str) else edge_index
        loop_attr = compute_loop_attr(plain, edge_attr, num_nodes, False, fill_value)
        if not found.has_loops:
            return torch.cat([edge_attr, loop_attr])
        # Out of place, because the gradient of a maximum needs what was there.
        loops, nodes, last = found.places(edge_index)
        values = edge_attr.index_select(0, loops)
        if last is not None:
            # PyG writes all loops of a node over one another, which on a GPU leaves any of them; on a CPU it is the
            # last. Its gradient goes to all of them, as if each had been the one.
            others, spare = nodes[~last], values[~last]
            loop_attr = loop_attr.index_put((nodes[last],), values[last])
            loop_attr = loop_attr.index_add(0, others, spare - spare.detach())
        else:
            loop_attr = loop_attr.index_put((nodes,), values)
        return torch.cat([found.drop(edge_attr, edge_index), loop_attr])

    if isinstance(fill_value, Tensor):
        return full, fill()
    return full, _of_values(memo, ("remaining", num_nodes, fill_value), edge_attr, fill)


def _key_of_loops(origin: Tensor, given: Any, num_loops: int) -> Any:
    """What ``origin`` with loops at ``num_loops`` nodes is known by, if ``given`` was the argument.

    Of a part also whether all vertices of the whole graph have one, so that ranks find it alike: those that own none of
    the vertices left out have as many loops either way.
    """
    if not is_part(origin):
        return num_loops
    if given is not None and num_loops != min(origin.num_src, origin.num_dst):
        raise InputError("num_nodes", f"to be {origin.num_dst}, the vertices of this rank", num_loops)
    return num_loops, given is not None or origin.ends_with_edge()


def _with_loops(origin: Tensor, num_loops: int, removed: bool, key: Any) -> Tensor:
    """``origin``, without its self-loops if ``removed``, and one loop at each of the first ``num_loops`` nodes."""
    memo = _memo(origin)

    def build() -> Tensor:
        found = _once(memo, "loops", lambda: _Loops(origin)) if removed else None
        if isinstance(origin, Graph):
            return origin.rewired(None if found is None else found.kept(origin), num_loops)
        plain = _to_plain(origin)
        if found is not None:
            plain = found.others(plain)
        loop = torch.arange(num_loops, device=plain.device, dtype=plain.dtype).expand(2, -1)
        full = torch.cat([plain, loop], dim=1)
        if plain.numel() > 0:
            low, high = torch.stack(plain.aminmax()).tolist()
            if low < 0 or high >= num_loops:
                return full  # bipartite, or a wrong id: only propagate knows
        graph = Graph.from_edge_index(full, (num_loops, num_loops))
        graph.memo[_DERIVED] = True
        return graph

    return _once(memo, ("with_loops", removed, key), build)


def _loop_attr(full: Tensor, edge_index: Tensor, edge_attr: Tensor, num_loops: int, fill_value: Fill) -> Tensor:
    """Attributes of the added loops [num_loops, ...]; sums and means as one fixed-order reduction over ``full``."""
    if fill_value not in ("add", "sum", "mean") or not isinstance(full, Graph) or not edge_attr.is_floating_point():
        plain = _to_plain(edge_index) if isinstance(fill_value, str) else edge_index
        return compute_loop_attr(plain, edge_attr, num_loops, False, fill_value)
    shape = tuple(edge_attr.shape[1:])
    value = ir.input("loop.attr", Domain.EDGE, shape)
    padded = torch.cat([edge_attr, edge_attr.new_zeros(num_loops, *shape)])
    total = run(EdgeProgram((Output("sum", value),)), full, {"loop.attr": padded})[0][:num_loops]
    if fill_value != "mean":
        return total
    count = (full.incoming.degree[:num_loops] - 1).clamp(min=1).to(total.dtype)
    return total / count.view(-1, *[1] * len(shape))


def prepared_graph(edge_index: Tensor, size: tuple[int | None, int | None]) -> Graph:
    """The graph of what reached propagate: a Graph, a plain ``edge_index``, or one with its loops removed.

    Raises:
        As :func:`pyg_fullgraph.graph.graph_of`.
    """
    if isinstance(edge_index, Graph) and size[0] in (None, edge_index.num_src) and \
            size[1] in (None, edge_index.num_dst):
        return edge_index
    if isinstance(edge_index, WithoutLoops):
        return prepared_graph(edge_index.materialize(), size) if edge_index.is_own else \
            _without_loops(edge_index.origin, size)
    if type(edge_index) is Tensor:
        known = remembered.of(edge_index)
        if size in known:  # in most calls
            return taken(known[size])
        origin = known.get(_REVERSE_OF)
        if origin is not None and origin.tensor is not None:
            return prepared_graph(origin.tensor, size[::-1]).reverse()
    if is_derived(edge_index):
        return _once(edge_index.memo, ("resized", size),
                     lambda: Graph.from_edge_index(edge_index.to_edge_index(), size))
    return graph_of(edge_index, size)


def _without_loops(origin: Tensor, size: tuple[int | None, int | None]) -> Graph:
    memo = _memo(origin)
    found = _once(memo, "loops", lambda: _Loops(origin))
    if not found.has_loops:
        return prepared_graph(origin, size)

    def build() -> Tensor:
        return origin.rewired(found.kept(origin), 0) if isinstance(origin, Graph) else \
            Graph.from_edge_index(found.others(_to_plain(origin)), size)

    return graph_of(_once(memo, ("without_loops", None if isinstance(origin, Graph) else size), build), size)


def is_derived(edge_index: Any) -> bool:
    """Whether an ``edge_index`` was made here, so that its number of nodes is not what the user said."""
    return isinstance(edge_index, Graph) and _DERIVED in edge_index.memo


# --- reversed and chosen edges ----------------------------------------------------------------------------------


def reversed_edges(edge_index: Tensor) -> Tensor:
    """``edge_index.flip(0)``, the same tensor while ``edge_index`` is the same unchanged one."""
    def build() -> Tensor:
        flipped = _to_plain(edge_index).flip(0)
        remembered.of(flipped)[_REVERSE_OF] = _Unchanged(edge_index)
        return flipped

    return _once_unwritten(_memo(edge_index), "reversed", build)


class TypeMask:
    """What a mask ``[E]`` asks, ``edge_type == number``, and whether edges were chosen by it."""

    def __init__(self, edge_type: Tensor, number: int) -> None:
        self.edge_type, self.number, self.has_chosen = _Unchanged(edge_type), number, False


def note_type(mask: Tensor, edge_type: Tensor, number: int) -> TypeMask:
    """Remember with ``mask`` ``[E]`` that it is ``edge_type == number``."""
    noted = remembered.of(mask)[_TYPE] = TypeMask(edge_type, number)
    return noted


def chosen_edges(edge_index: Tensor, mask: Tensor, build: Callable[[Tensor, Tensor], Tensor] | None = None) -> Tensor:
    """``edge_index[:, mask]``, the same tensor while ``edge_index`` and the mask, or what it asks of, are unchanged."""
    known: TypeMask | None = remembered.of(mask).get(_TYPE)
    if known is not None:
        known.has_chosen = True
    values = None if known is None else known.edge_type.tensor
    # Before ``mask`` dies what was derived from it does; edge types live on.
    memo = _memo(edge_index).setdefault("chosen", Memo()).of(mask if values is None else values)
    key = None if known is None or values is None else known.number
    return _once_unwritten(memo, key, lambda: (build or _choose)(edge_index, mask))


def _choose(edge_index: Tensor, mask: Tensor) -> Tensor:
    return edge_index.rewired(mask.nonzero().view(-1), 0) if is_part(edge_index) else _to_plain(edge_index)[:, mask]


def masked_edge_index(edge_index: Tensor, edge_mask: Tensor) -> Tensor:
    """RGCN's choice of the edges of one relation; the same tensor for the same edges, so that its graph is found."""
    if not is_known(edge_index, edge_mask) or edge_mask.dtype != torch.bool:
        return pyg_rgcn.masked_edge_index(edge_index, edge_mask)
    return chosen_edges(edge_index, edge_mask, _choose_by_value)


def _choose_by_value(edge_index: Tensor, edge_mask: Tensor) -> Tensor:
    # Masks come in the same order on every forward, so the next one is most likely the one after the last.
    known = _memo(edge_index).setdefault("masked", deque(maxlen=_MAX_MASKS))
    for _ in range(len(known)):
        mask, chosen = known[0]
        known.rotate(-1)
        is_same = mask.shape == edge_mask.shape and mask.device == edge_mask.device and torch.equal(mask, edge_mask)
        if edge_index.holds_everywhere(is_same) if is_part(edge_index) else is_same:
            return chosen
    known.append((edge_mask.clone(), _choose(edge_index, edge_mask)))
    return known[-1][1]


# --- normalization and degrees ----------------------------------------------------------------------------------

# deg_j^-1/2 * w * deg_i^-1/2, with the vertex factors under two names because an input has one domain.
_NORM_SRC, _NORM_DST = ir.input("norm.src", Domain.SRC, ()), ir.input("norm.dst", Domain.DST, ())
_WEIGHT = ir.input("norm.weight", Domain.EDGE, ())
_NORM = ir.pointwise("mul", _NORM_SRC, _NORM_DST)
_WEIGHTED_NORM = ir.pointwise("mul", ir.pointwise("mul", _NORM_SRC, _WEIGHT), _NORM_DST)
_WEIGHT_SUM = EdgeProgram((Output("sum", _WEIGHT),))


def gcn_norm(edge_index: Tensor, edge_weight: Tensor | None = None, num_nodes: int | None = None,
             improved: bool = False, add_self_loops: bool = True, flow: str = "source_to_target",
             dtype: torch.dtype | None = None) -> Any:
    """PyG's function: symmetric normalization with self-loops.

        norm_ij = deg_j^-1/2 * w_ij * deg_i^-1/2
    Returns: the graph with self-loops, and the coefficients as an :class:`EdgeExpr` over degrees [N]: no array of
        size E unless there are edge weights.
    Raises: RowCountError if ``edge_weight`` does not have one row per edge.
    """
    plain_weight = edge_weight is None or (isinstance(edge_weight, Tensor) and edge_weight.dim() == 1
                                           and edge_weight.is_floating_point())
    if pyg_typing.WITH_TORCH_SPARSE and isinstance(edge_index, pyg_typing.SparseTensor):
        return _gcn_norm_of_matrix(edge_index, (edge_weight, num_nodes, improved, add_self_loops, flow, dtype))
    is_real = dtype is None or dtype.is_floating_point
    if not is_known(edge_index, edge_weight) or not plain_weight or not is_real:
        return pyg_gcn.gcn_norm(edge_index, edge_weight, num_nodes, improved, add_self_loops, flow, dtype)
    if edge_weight is not None:
        check_edge_rows("edge_weight", edge_weight, edge_index)
    if isinstance(edge_index, Graph) and num_nodes is not None and num_nodes != edge_index.num_dst:
        raise RowCountError("x", edge_index.num_dst, "node", num_nodes)
    given, num_nodes = num_nodes, _num_nodes(edge_index, num_nodes)
    if add_self_loops:
        edge_index, edge_weight = add_remaining_self_loops(edge_index, edge_weight, 2.0 if improved else 1.0, given)
    num_nodes = given if isinstance(edge_index, Graph) else num_nodes  # which has vertices after the last edge's, too
    graph = prepared_graph(edge_index, (num_nodes, num_nodes))
    # Degrees are counted where messages arrive.
    work = graph if flow == "source_to_target" else graph.reverse()
    if edge_weight is None:
        dtype = dtype or torch.get_default_dtype()
        norm = _once(work.memo, ("gcn_norm", dtype), lambda: _inverse_sqrt(work.incoming.degree.to(dtype, copy=True)))
        return graph, EdgeExpr(_NORM, {"norm.src": norm, "norm.dst": norm}, work)
    norm = _of_values(work.memo, "gcn_norm_weighted", edge_weight,
                      lambda: _inverse_sqrt(run(_WEIGHT_SUM, work, {"norm.weight": edge_weight})[0]))
    return graph, EdgeExpr(_WEIGHTED_NORM, {"norm.src": norm, "norm.weight": edge_weight, "norm.dst": norm}, work)


def _gcn_norm_of_matrix(matrix: Any, options: tuple[Any, ...]) -> Any:
    """The normalized SparseTensor, the same one while the matrix and its values are the same."""
    ptr, col, value = matrix.storage.rowptr(), matrix.storage.col(), matrix.storage.value()
    parts = (ptr,) if value is None else (ptr, value)
    if value is not None and not is_constant(value):
        return pyg_gcn.gcn_norm(matrix, *options)
    memo, key = remembered.of(col), ("gcn_norm", matrix.sparse_sizes(), options[1:])
    slot = memo.get(key)
    if slot is not None and len(slot[0]) == len(parts) and \
            all(ref() is t and is_unchanged(t, state) for ref, state, t in zip(*slot[:2], parts, strict=True)):
        return taken(slot[2])
    with lasting():
        result = pyg_gcn.gcn_norm(matrix, *options)
    if result.storage.col() is not col:  # else its graph is found by its columns, and remembering it would keep them
        keep(memo, key, ([weakref.ref(t) for t in parts], [state_of(t) for t in parts], result))
    return result


def _inverse_sqrt(degree: Tensor) -> Tensor:
    out = degree.pow(-0.5)
    # Infinity; graphs that check their ids have loaded the comparison, which another would take 15 ms for.
    return out.masked_fill(out > torch.finfo(out.dtype).max, 0.0)


def degree(index: Tensor, num_nodes: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """PyG's function; remembered if ``index`` is a row of an ``edge_index``. The result is the caller's to change."""
    if isinstance(index, Ends):
        return index.degree(dtype or torch.get_default_dtype())
    base = index._base if isinstance(index, Tensor) and type(index) is Tensor and not index.is_inference() else None
    if base is None or not is_known(base) or index.dim() != 1 or index.shape != base.shape[1:] \
            or index.stride(0) != base.stride(1):
        return pyg_utils.degree(index, num_nodes, dtype)
    num_nodes = maybe_num_nodes(index, num_nodes)
    key = ("degree", index.storage_offset() - base.storage_offset(), num_nodes)
    count = _once(_memo(base), key, lambda: pyg_utils.degree(index, num_nodes, torch.int64))
    return count.to(dtype or torch.get_default_dtype(), copy=True)


def scatter(src: Tensor, index: Tensor, dim: int = 0, dim_size: int | None = None, reduce: str = "sum") -> Tensor:
    """PyG's function; a sum of one number per edge has a fixed order on a GPU as well."""
    if isinstance(index, Ends) and dim in (0, -src.dim()) and src.is_floating_point():
        return index.reduce(src, "sum" if reduce == "add" else reduce)
    is_sum = reduce in ("sum", "add") and src.is_floating_point() and src.dim() == 1 and src.shape == index.shape
    if is_sum and dim_size is not None and src.is_cuda:
        return ordered_sum(src, index, dim_size)
    return pyg_utils.scatter(src, index, dim, dim_size, reduce)


def ordered_sum(src: Tensor, index: Tensor, size: int) -> Tensor:
    """Sums ``[size]`` of ``src`` ``[E]`` by ``index`` ``[E]``, each in the order of the edges."""
    rows, order = index.sort(stable=True)
    offsets = torch.searchsorted(rows, torch.arange(size + 1, device=index.device, dtype=index.dtype))
    return torch.segment_reduce(src.index_select(0, order), "sum", offsets=offsets, axis=0, unsafe=True)


_laplacian = rebind(pyg_utils.get_laplacian, {
    pyg_utils.remove_self_loops: remove_self_loops, pyg_utils.add_self_loops: add_self_loops,
    pyg_utils.scatter: scatter})


def get_laplacian(edge_index: Tensor, edge_weight: Tensor | None = None, normalization: str | None = None,
                  dtype: torch.dtype | None = None, num_nodes: int | None = None) -> tuple[Tensor, Tensor]:
    """PyG's function over those above; of a part of a graph, the largest weight is that of the whole graph."""
    full, weight = _laplacian(edge_index, edge_weight, normalization, dtype, num_nodes)
    return full, EdgeValues(weight, full) if isinstance(full, Graph) and full.is_part else weight


#: PyG function -> what the forward of our classes calls in its place.
REPLACEMENTS: Mapping[Any, Callable[..., Any]] = {
    pyg_utils.remove_self_loops: step(remove_self_loops, finds=True),
    pyg_utils.add_self_loops: step(add_self_loops, finds=True),
    pyg_utils.add_remaining_self_loops: step(add_remaining_self_loops, finds=True),
    pyg_gcn.gcn_norm: step(gcn_norm, finds=True),
    pyg_utils.degree: step(degree, is_repeatable=True),
    pyg_utils.scatter: step(scatter, is_repeatable=True),
    pyg_utils.get_laplacian: step(get_laplacian, is_repeatable=True),
    pyg_rgcn.masked_edge_index: step(masked_edge_index, is_repeatable=True),
}
#: The same in forwards that PyG did not write, which may write to results.
REPLACEMENTS_APART = {**REPLACEMENTS, pyg_utils.remove_self_loops: _removed_apart}
