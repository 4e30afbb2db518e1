"""Exceptions; each class owns the sentence it says: what was expected and what came.

Every class also derives from the builtin a caller would expect (ValueError, IndexError, ...), so code written for PyG
keeps catching it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class PygFullgraphError(Exception):
    """Base of all exceptions raised on purpose by this package."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Subclasses build their message in __init__, so unpickling must not call it again with the message.
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(cls: type[PygFullgraphError], args: tuple[Any, ...], state: dict[str, Any]) -> PygFullgraphError:
    error = cls.__new__(cls, *args)
    error.__dict__.update(state)
    return error


class InputError(PygFullgraphError, ValueError):
    """An argument has the wrong value; the base of the more exact ones below."""

    def __init__(self, name: str, expected: str, got: object) -> None:
        super().__init__(f"Expected '{name}' {expected} (got {got})")


class ShapeError(InputError):
    """An argument has the wrong shape."""

    def __init__(self, name: str, expected: str, shape: Sequence[int]) -> None:
        super().__init__(name, f"to have shape {expected}", list(shape))


class RowCountError(InputError):
    """A tensor does not have one row per node or edge."""

    def __init__(self, name: str, num_rows: int, per: str, got: int) -> None:
        super().__init__(name, f"to have {num_rows} rows, one per {per}", got)
        self.name, self.num_rows, self.per, self.got = name, num_rows, per, got


class DtypeError(InputError):
    """An argument has the wrong dtype."""

    def __init__(self, name: str, expected: str, dtype: object) -> None:
        super().__init__(name, f"to be of {expected}", dtype)


class DeviceError(InputError):
    """Arguments are on different devices."""

    def __init__(self, name: str, expected: object, got: object) -> None:
        super().__init__(name, f"on device {expected}", got)


class SizeMismatchError(InputError):
    """A prepared graph is used with another number of nodes than it was built for."""

    def __init__(self, expected: tuple[int | None, int | None], got: tuple[int | None, int | None]) -> None:
        super().__init__("size", f"to be (num_src, num_dst) = {expected}, the size of the graph", got)


class GraphTypeError(PygFullgraphError, TypeError):
    """An object is none of the forms of a graph."""

    def __init__(self, got: object) -> None:
        super().__init__(
            "Expected a Graph, an edge_index tensor, a torch_geometric EdgeIndex, a torch_sparse SparseTensor or a "
            f"torch sparse tensor (got {type(got).__module__}.{type(got).__qualname__})"
        )


class IndexRangeError(PygFullgraphError, IndexError):
    """A node id is negative or not below the number of nodes."""

    def __init__(self, name: str, role: str, num_nodes: int, index: int, position: int) -> None:
        super().__init__(
            f"Expected the {role} ids in '{name}' to be valid indices in [0, {num_nodes}) "
            f"(got {index} at edge {position})"
        )


class PackageConflictError(PygFullgraphError, ImportError):
    """Another distribution's package of the name triton_kernels was imported."""

    def __init__(self, found: str) -> None:
        super().__init__(
            "Expected package 'triton_kernels' to be the one installed with pyg-fullgraph; triton-lang has a package "
            f"of the same name. Uninstall it or put ours first on sys.path (got {found})"
        )


class MissingPackageError(PygFullgraphError, ImportError):
    """An option needs a package that is installed with an extra."""

    def __init__(self, package: str, option: str, extra: str) -> None:
        super().__init__(f"Expected package '{package}' to be installed for {option}: "
                         f"pip install 'pyg-fullgraph[{extra}]' (got no such package)")


class PartitionFileError(PygFullgraphError, RuntimeError):
    """A saved partition is missing, unreadable or of another kind."""

    def __init__(self, path: object, got: object) -> None:
        super().__init__(f"Expected '{path}' to be a partition saved by Partition.save (got {got})")


class GroupError(PygFullgraphError, RuntimeError):
    """Processes that share a graph disagree; raised by all of them."""

    def __init__(self, name: str, found: Sequence[object]) -> None:
        ranks = ", ".join(f"rank {k}: {v}" for k, v in enumerate(found))
        super().__init__(f"Expected '{name}' to be the same on every rank (got {ranks})")


class GroupPickleError(PygFullgraphError, TypeError):
    """What belongs to processes that run was to be pickled."""

    def __init__(self, group: object) -> None:
        super().__init__("Expected 'model.state_dict()' or 'model.module' to be saved in place of a DistributedModel, "
                         f"which belongs to the processes that run (got {group})")


class RankError(PygFullgraphError, RuntimeError):
    """Processes that share a graph failed or do not answer; raised by the others.

    Attributes:
        failed: rank -> its error.
        silent: ranks that neither take part nor say why.
    """

    def __init__(self, failed: Mapping[int, str], silent: Sequence[int], error: str) -> None:
        found = [f"rank {k} failed: {reason}" for k, reason in sorted(failed.items())]
        if silent:
            ranks = f"rank {silent[0]}" if len(silent) == 1 else f"ranks {', '.join(map(str, silent))}"
            found.append(f"no answer from {ranks}, which hangs or has ended")
        super().__init__(f"Expected every rank to take part (got {'; '.join(found) or error})")
        self.failed, self.silent = dict(failed), list(silent)


class ShardedGraphError(PygFullgraphError, NotImplementedError):
    """Something was asked of a part of a graph that only the whole graph can tell."""

    def __init__(self, operation: str, layer: str = "") -> None:
        where = f"{layer}, whose forward needs more: {operation}" if layer else operation
        super().__init__("Expected a ShardedGraph to be used by fused layers only; 'join' gives whole results and the "
                         f"Graph it was made from has all edges (got {where})")
        self.operation, self.layer = operation, layer


class NotFusable(PygFullgraphError):
    """A message-passing method cannot become an edge program; carries every reason that was found."""

    def __init__(self, reasons: Sequence[str]) -> None:
        super().__init__("Cannot be fused: " + "; ".join(reasons))
        self.reasons = tuple(reasons)


class DatasetError(InputError):
    """A dataset cannot be read, or its arrays do not fit together."""

    def __init__(self, dataset: str, name: str, expected: str, got: object) -> None:
        super().__init__(name, f"of dataset '{dataset}' to be {expected}", got)


class UnknownDatasetError(InputError):
    """A dataset name that nothing answers to."""

    def __init__(self, name: str, known: Sequence[str], cached: Sequence[str], folder: object) -> None:
        found = ", ".join(cached) if cached else "no .npz file"
        super().__init__(
            "dataset",
            f"to be one of {', '.join(known)}, a path to a .npz file, or the name of one in {folder} ({found})",
            f"'{name}'",
        )


class UnwritableFolderError(PygFullgraphError, OSError):
    """Results could not be written where they were asked for; raised before any training if it can be seen then."""

    def __init__(self, folder: object, reason: object) -> None:
        super().__init__(f"Expected output folder '{folder}' to be writable (got {reason})")


class CheckpointError(PygFullgraphError, RuntimeError):
    """A checkpoint is missing, unreadable, truncated, or of another run."""

    def __init__(self, path: object, expected: str, got: object) -> None:
        super().__init__(f"Expected checkpoint '{path}' {expected} (got {got})")


class OutOfMemoryError(PygFullgraphError, MemoryError):
    """Training needed more memory than there is; says what to try, and which rank it was if there are several."""

    def __init__(self, device: object, suggestions: Sequence[str], reason: object, rank: int | None = None) -> None:
        where = device if rank is None else f"{device} of rank {rank}"
        super().__init__(f"Out of memory on {where}. Try: {'; '.join(suggestions)} ({reason})")


class DivergedError(PygFullgraphError, ArithmeticError):
    """The training loss is no longer a finite number."""

    def __init__(self, epoch: int, loss: float, suggestions: Sequence[str]) -> None:
        super().__init__(f"Expected a finite loss (got {loss} in epoch {epoch}). Try: {'; '.join(suggestions)}")


class GraphWriteError(PygFullgraphError, TypeError):
    """An operation would write into a Graph."""

    def __init__(self, operation: str) -> None:
        super().__init__(
            "Expected a Graph to be read only; 'graph.to_edge_index()' returns a tensor that may be changed "
            f"(got {operation})"
        )


class LayerInputError(InputError, RuntimeError):
    """An argument of a layer does not fit what the layer was made for; torch would say so about a matrix product."""


class NotFusedError(PygFullgraphError, ValueError):
    """Layers that were asked to run fused cannot; names every one with all its reasons."""

    def __init__(self, refused: Mapping[str, Sequence[str]]) -> None:
        lines = [f"{name}: {'; '.join(reasons)}" for name, reasons in refused.items()]
        super().__init__("Expected every message-passing layer to run fused (got\n  " + "\n  ".join(lines) + ")")
        self.refused = {name: tuple(reasons) for name, reasons in refused.items()}


class CompiledResultError(PygFullgraphError, NotImplementedError):
    """A layer under torch.compile returns what its operator cannot hand on."""

    def __init__(self, layer: object, expected: str, got: object) -> None:
        super().__init__(f"Expected {layer} under torch.compile {expected} (got {got})")


class TileRefusedError(PygFullgraphError, RuntimeError):
    """A device refused a kernel that had run on other edges of the same sweep, which runs in chunks from then on."""

    def __init__(self, kernel: str, tile: int, num_tiles: int) -> None:
        super().__init__(f"Expected kernel {kernel} to fit the device for all of {num_tiles} tiles (got a refusal at "
                         f"tile {tile}, when others were done); repeat the step, in which it runs in chunks")


class CaptureError(PygFullgraphError, RuntimeError):
    """A training step cannot be recorded into a CUDA graph."""

    def __init__(self, expected: str, got: str) -> None:
        super().__init__(f"Expected {expected} (got {got})")


class DoubleBackwardError(PygFullgraphError, NotImplementedError):
    """A gradient of a fused layer was to be differentiated."""

    def __init__(self) -> None:
        super().__init__("Fused layers have first derivatives only; revert(model) for derivatives of gradients")


class ForwardModeError(PygFullgraphError, NotImplementedError):
    """A tensor carries a forward-mode tangent."""

    def __init__(self) -> None:
        super().__init__("Fused layers have backward derivatives only; revert(model) for forward-mode differentiation")


class FunctionTransformError(PygFullgraphError, NotImplementedError):
    """A tensor is one of a transform of ``torch.func`` or a batch of gradients, or such a transform is at work."""

    def __init__(self) -> None:
        super().__init__("Fused layers take plain tensors, none of vmap, grad and the other transforms of torch.func, "
                         "within which they do not run, and one gradient at a time, without is_grads_batched and "
                         "vectorize=True; revert(model) for those")
