"""Node-classification datasets: a generated graph, `.npz` files, and the public sets that PyG and OGB download.

Shape letters: N nodes, E directed edges, F features, C classes.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_fullgraph.checkpoint import prepare_folder, write_atomically
from pyg_fullgraph.errors import DatasetError, InputError, UnknownDatasetError
from pyg_fullgraph.transforms import Reorder

PLANETOID = {"cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"}
OGB = ("ogbn-arxiv", "ogbn-products")
_MASKS = ("train_mask", "val_mask", "test_mask")
#: Kinds of NumPy's dtypes; its own class of integers has lengths of time as well.
_INTEGERS, _REAL = "iu", "iuf"


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """One graph whose nodes are to be classified.

    Args:
        name: what tables and plots call it.
        x: features [N, F], floating.
        edge_index: [2, E] int64, row 0 source and row 1 target, any order.
        y: class of each node [N] int64; may be negative (unlabelled) only outside the masks.
        train_mask, val_mask, test_mask: bool [N], each selecting at least one node.
        num_classes: C, labels are 0..C-1.
    """

    name: str
    x: Tensor
    edge_index: Tensor
    y: Tensor
    train_mask: Tensor
    val_mask: Tensor
    test_mask: Tensor
    num_classes: int

    @property
    def num_nodes(self) -> int:
        return self.y.size(0)

    @property
    def num_edges(self) -> int:
        return self.edge_index.size(1)

    @property
    def num_features(self) -> int:
        return self.x.size(1)

    @functools.cached_property
    def fingerprint(self) -> str:
        """What tells datasets apart: sizes, and a checksum of edges, classes, masks and where features are largest.

        It reads every array once. Features that are rounded or scaled in another way have the same.
        """
        largest = [self.x.argmax(dim=1)] if self.x.numel() else []
        checksum = 0
        for part in (self.edge_index, self.y, *(getattr(self, mask) for mask in _MASKS), *largest):
            checksum = zlib.crc32(part.contiguous().numpy(force=True).data, checksum)
        sizes = f"{self.num_nodes} nodes, {self.num_edges} edges, {self.num_features} features"
        return f"{sizes}, {self.num_classes} classes, checksum {checksum:08x}"

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Dataset:
        """The same dataset on `device`, features in `dtype` (default: unchanged)."""
        moved: dict[str, Any] = {
            field.name: value.to(device)
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        moved["x"] = moved["x"].to(dtype or self.x.dtype)
        return dataclasses.replace(self, **moved)

    def normalize_features(self) -> Dataset:
        """Divides each feature row by the sum of its absolute values; rows of zeros stay zero."""
        return dataclasses.replace(self, x=torch.nn.functional.normalize(self.x, p=1.0, dim=1))

    def reorder(self, method: str) -> Dataset:
        """The same dataset with its nodes renumbered by :class:`pyg_fullgraph.transforms.Reorder`, edges by target."""
        names = ("x", "y", *_MASKS)
        rows = {name: getattr(self, name) for name in names}
        moved = Reorder(method)(Data(edge_index=self.edge_index, num_nodes=self.num_nodes, **rows))
        return dataclasses.replace(self, edge_index=moved.edge_index, **{name: moved[name] for name in names})

    def validate(self) -> Dataset:
        """Returns itself if everything fits together.

        Raises: DatasetError naming the array, what was expected and what came.
        """
        self._check_shapes()
        self._check_labels()
        if self.num_edges:
            low, high = (int(v) for v in self.edge_index.aminmax())
            if low < 0 or high >= self.num_nodes:
                bad = low if low < 0 else high
                raise DatasetError(self.name, "edge_index", f"node ids between 0 and {self.num_nodes - 1}", bad)
        if not torch.isfinite(self.x).all():
            row = int((~torch.isfinite(self.x)).any(dim=1).nonzero()[0])
            raise DatasetError(self.name, "x", "finite features", f"NaN or infinity in row {row}")
        return self

    def _check_shapes(self) -> None:
        if self.y.dim() != 1:
            raise DatasetError(self.name, "y", "shape [N], one class per node", list(self.y.shape))
        num_nodes = self.num_nodes
        if self.x.dim() != 2 or self.x.size(0) != num_nodes:
            raise DatasetError(self.name, "x", f"{num_nodes} rows, one per label in 'y'", list(self.x.shape))
        if not self.x.is_floating_point():
            raise DatasetError(self.name, "x", "floating features", self.x.dtype)
        if self.edge_index.dim() != 2 or self.edge_index.size(0) != 2:
            raise DatasetError(self.name, "edge_index", "shape [2, E]", list(self.edge_index.shape))
        if self.edge_index.dtype != torch.int64:
            raise DatasetError(self.name, "edge_index", "integer node ids (int64)", self.edge_index.dtype)
        for mask_name in _MASKS:
            mask = getattr(self, mask_name)
            if mask.dtype != torch.bool or mask.shape != (num_nodes,):
                raise DatasetError(
                    self.name, mask_name, f"bool of shape [{num_nodes}]", f"{mask.dtype} {list(mask.shape)}"
                )
            if not mask.any():
                raise DatasetError(self.name, mask_name, "at least one selected node", "a mask that selects nothing")

    def _check_labels(self) -> None:
        if self.y.dtype != torch.int64:
            raise DatasetError(self.name, "y", "integer classes (int64)", self.y.dtype)
        used = self.y[self.train_mask | self.val_mask | self.test_mask]
        low, high = int(used.min()), int(used.max())
        if low < 0 or high >= self.num_classes:
            expected = f"classes between 0 and {self.num_classes - 1} where a mask selects"
            raise DatasetError(self.name, "y", expected, low if low < 0 else high)


def load_dataset(name_or_path: str | os.PathLike = "generated", split: int = 0) -> Dataset:
    """Loads a dataset by name or from a file and checks it.

    Args:
        name_or_path: `generated`, optionally with options (`generated:nodes=20000,degree=20`, see `generate`);
            a path ending in `.npz` (layout: docs/datasets.md); `cora`, `citeseer`, `pubmed` (downloaded by PyG) or
            `ogbn-arxiv`, `ogbn-products` (downloaded by the package `ogb`). A download is kept as `.npz` under
            `$PFG_DATA` (default: `~/.cache/pyg_fullgraph`) and read from there the next time; a file `NAME.npz`
            put there by hand is found by its name as well.
        split: which column of masks of shape [N, S]; 0 where there is one split.
    Returns: the validated dataset on the CPU.
    Raises: UnknownDatasetError (lists what exists); DatasetError (unreadable file, missing array, failed download,
        anything `Dataset.validate` refuses); InputError (no folder to look names up in).
    """
    name = os.fspath(name_or_path)
    if name.partition(":")[0] == "generated":
        if split != 0:
            raise DatasetError(name, "split", "0, as the generated graph has one split", split)
        dataset = generate(**_parse_options(name))
    elif name.endswith(".npz"):
        dataset = load_npz(Path(name).expanduser(), split)
    else:
        dataset = _load_named(name, split)
    return dataset.validate()


def generate(
    nodes: int = 10_000,
    degree: float = 20.0,
    classes: int = 8,
    features: int = 64,
    seed: int = 0,
    homophily: float = 0.5,
    exponent: float = 2.5,
    signal: float = 0.2,
) -> Dataset:
    """Draws a planted-partition graph with power-law degrees, so that a real task exists where no file does.

    Every node has a class and an attractiveness drawn from a Pareto law; an edge takes its first end in proportion to
    attractiveness and its second end likewise, from the same class with probability `homophily` and from all nodes
    otherwise. Features are a class centre of length `signal * sqrt(features)` plus unit Gaussian noise: weak for one
    node, clear for the average over its neighbors, which is what a graph layer gains over a plain network.

    Args:
        nodes: N. degree: mean number of neighbors aimed at (self-loops and duplicates are dropped afterwards).
        classes: C. features: F. seed: everything is a function of it and of the other options.
        homophily: probability that an edge is kept inside a class, 0..1.
        exponent: of the degree distribution, above 2 (2.1: extreme hubs; 4: nearly even).
        signal: length of a class centre relative to the noise.
    Returns: undirected dataset (both directions stored), 10 % of the nodes for training, 10 % validation, 80 % test.
    Raises: DatasetError for values out of range.
    Source: the planted-partition model with degree correction; parameters chosen here.
    """
    _check_generate_options(nodes, degree, classes, features, seed, homophily, exponent, signal)
    rng = np.random.default_rng(seed)
    # Sorting nodes by class makes "from the same class, by weight" one searchsorted into a single cumulative sum.
    label = np.sort(rng.integers(classes, size=nodes))
    weight = rng.pareto(exponent - 1.0, size=nodes) + 1.0
    # A hub beyond sqrt(N * degree) would mostly produce duplicates of the same edges.
    weight = np.minimum(weight, weight.mean() * np.sqrt(nodes / max(degree, 1.0)))
    cumulative = np.concatenate([[0.0], np.cumsum(weight)])
    class_start = np.searchsorted(label, np.arange(classes + 1))

    num_draws = int(nodes * degree / 2)
    first = _pick(cumulative, rng.random(num_draws) * cumulative[-1])
    is_inside = rng.random(num_draws) < homophily
    low = np.where(is_inside, cumulative[class_start[label[first]]], 0.0)
    high = np.where(is_inside, cumulative[class_start[label[first] + 1]], cumulative[-1])
    second = _pick(cumulative, low + rng.random(num_draws) * (high - low))

    # Node ids in class order would hand any kernel an unrealistically local graph, so ids are shuffled.
    new_id = rng.permutation(nodes)
    y = np.empty(nodes, dtype=np.int64)
    y[new_id] = label
    key = np.unique(_undirected_keys(new_id[first], new_id[second], nodes))
    edge_index = torch.from_numpy(np.stack([key // nodes, key % nodes]))

    centre = rng.standard_normal((classes, features))
    x = signal * centre[y] + rng.standard_normal((nodes, features))
    part = np.empty(nodes, dtype=np.int64)
    part[rng.permutation(nodes)] = np.arange(nodes)
    num_train = max(1, nodes // 10)
    return Dataset(
        name=f"generated ({nodes} nodes)",
        x=torch.from_numpy(x.astype(np.float32)),
        edge_index=edge_index,
        y=torch.from_numpy(y),
        train_mask=torch.from_numpy(part < num_train),
        val_mask=torch.from_numpy((part >= num_train) & (part < 2 * num_train)),
        test_mask=torch.from_numpy(part >= 2 * num_train),
        num_classes=classes,
    )


def _pick(cumulative: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Index i with cumulative[i] <= value < cumulative[i + 1]; the clip catches values rounded up to the end."""
    return np.clip(np.searchsorted(cumulative, value, side="right") - 1, 0, len(cumulative) - 2)


def _undirected_keys(src: np.ndarray, dst: np.ndarray, nodes: int) -> np.ndarray:
    is_edge = src != dst
    src, dst = src[is_edge].astype(np.int64), dst[is_edge].astype(np.int64)
    return np.concatenate([src * nodes + dst, dst * nodes + src])


def _check_generate_options(
    nodes: int, degree: float, classes: int, features: int, seed: int, homophily: float, exponent: float, signal: float
) -> None:
    requirements = (
        ("nodes", nodes >= 10, "at least 10", nodes),
        ("degree", 0 <= degree < nodes, f"at least 0 and below nodes={nodes}", degree),
        ("classes", 2 <= classes <= nodes, f"between 2 and nodes={nodes}", classes),
        ("features", features >= 1, "at least 1", features),
        ("seed", seed >= 0, "at least 0", seed),
        ("homophily", 0 <= homophily <= 1, "between 0 and 1", homophily),
        ("exponent", exponent > 2, "above 2", exponent),
        ("signal", signal >= 0, "at least 0", signal),
    )
    for option, is_met, expected, value in requirements:
        if not is_met:
            raise DatasetError("generated", option, expected, value)


_OPTION_TYPES: dict[str, type[int] | type[float]] = {
    **dict.fromkeys(("nodes", "classes", "features", "seed"), int),
    **dict.fromkeys(("degree", "homophily", "exponent", "signal"), float),
}


def _parse_options(spec: str) -> dict[str, Any]:
    """`generated:nodes=100,degree=5` -> {"nodes": 100, "degree": 5.0}, typed as `generate` declares them."""
    options = {}
    for item in filter(None, spec.partition(":")[2].split(",")):
        key, _, value = (part.strip() for part in item.partition("="))
        if key not in _OPTION_TYPES:
            raise DatasetError(spec, key, f"an option of the generated graph, one of {', '.join(_OPTION_TYPES)}", item)
        try:
            options[key] = _OPTION_TYPES[key](value)
        except ValueError as error:
            raise DatasetError(spec, key, f"a number of type {_OPTION_TYPES[key].__name__}", repr(value)) from error
    return options


def load_npz(path: str | os.PathLike, split: int = 0) -> Dataset:
    """Reads a dataset from a `.npz` file in the layout of docs/datasets.md; nothing in the file is executed.

    Args: path: the file. split: column of masks of shape [N, S].
    Returns: the dataset, features as float32, not yet validated.
    Raises: DatasetError (missing, unreadable or truncated file, missing array, split out of range, labels that are
        NaN or belong to whole graphs).
    """
    path = Path(path)
    name = path.stem
    if not path.is_file():
        raise DatasetError(name, "path", "an existing .npz file", str(path))
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, AttributeError) as error:
        # AttributeError: np.load hands a bare array back for a .npy file under another name.
        expected = "a complete .npz archive of plain arrays"
        raise DatasetError(name, str(path), expected, f"unreadable: {error}") from error
    return _from_arrays(name, arrays, split)


def save_npz(dataset: Dataset, path: str | os.PathLike) -> None:
    """Writes `dataset` in the layout that `load_npz` reads; the file appears complete or not at all.

    Raises: DatasetError, if the name of the file does not end in `.npz`; UnwritableFolderError.
    """
    path = Path(path)
    if path.suffix != ".npz":
        raise DatasetError(dataset.name, "path", "the name of a file that ends in .npz", str(path))
    prepare_folder(path.parent)
    index_dtype = np.int32 if dataset.num_nodes < 2**31 else np.int64
    arrays = {key: getattr(dataset, key).numpy(force=True) for key in ("y", "edge_index", *_MASKS)}
    x = dataset.x.float() if dataset.x.dtype == torch.bfloat16 else dataset.x  # which NumPy does not have
    arrays.update(x=x.numpy(force=True), num_classes=np.array(dataset.num_classes))
    arrays["edge_index"] = arrays["edge_index"].astype(index_dtype)
    write_atomically(path, lambda file: np.savez_compressed(file, **arrays))


def _from_arrays(name: str, arrays: Mapping[str, np.ndarray], split: int) -> Dataset:
    for key in ("edge_index", "y"):
        if key not in arrays:
            raise DatasetError(name, key, "an array of that name in the file", f"only {', '.join(sorted(arrays))}")
    if "batch" in arrays:
        raise DatasetError(name, "y", "one class per node", "one per graph (the file has 'batch': many graphs in one)")
    if arrays["edge_index"].dtype.kind not in _INTEGERS:
        raise DatasetError(name, "edge_index", "integer node ids", arrays["edge_index"].dtype)
    y = _labels(name, arrays["y"])
    x = _features(name, arrays)
    num_nodes = y.size(0)
    if "x_known_mask" in arrays and not (known := arrays["x_known_mask"]).all():
        warnings.warn(
            f"{name}: features are known for {int(known.sum())} of {num_nodes} nodes; its accuracy says nothing",
            stacklevel=2,
        )
    masks = _masks(name, arrays, split)
    return Dataset(
        name=name,
        x=x,
        edge_index=torch.from_numpy(arrays["edge_index"].astype(np.int64)),
        y=y,
        num_classes=_num_classes(name, arrays, y),
        **masks,
    )


def _num_classes(name: str, arrays: Mapping[str, np.ndarray], y: Tensor) -> int:
    """What the file says, else one more than the largest label."""
    if "num_classes" in arrays:
        said = arrays["num_classes"]
        if said.shape != () or said.dtype.kind not in _INTEGERS or said < 1:
            raise DatasetError(name, "num_classes", "a single number above 0", f"{said.dtype} {said.tolist()}")
        return int(said)
    found = int(y.max()) + 1 if y.numel() else 0
    if found > y.size(0):
        raise DatasetError(name, "y", f"classes numbered from 0, fewer than the {y.size(0)} nodes", found - 1)
    return found


def _labels(name: str, y: np.ndarray) -> Tensor:
    if np.issubdtype(y.dtype, np.floating):
        # Some exports keep classes as floats; whole numbers are taken, anything else would be silently truncated.
        if np.isnan(y).any():
            raise DatasetError(name, "y", "a class for every node", f"NaN at node {int(np.isnan(y).argmax())}")
        if (y != np.floor(y)).any() or np.abs(y).max(initial=0) > 2**53:
            raise DatasetError(name, "y", "whole numbers as classes", f"{y.dtype} with fractions")
    elif y.dtype.kind not in _INTEGERS:
        raise DatasetError(name, "y", "whole numbers as classes", y.dtype)
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1:
        raise DatasetError(name, "y", "shape [N], one class per node", list(y.shape))
    return torch.from_numpy(y.astype(np.int64))


def _features(name: str, arrays: Mapping[str, np.ndarray]) -> Tensor:
    if "x" in arrays:
        x = arrays["x"]
        if x.dtype.kind not in _REAL:
            raise DatasetError(name, "x", "real numbers", x.dtype)
        return torch.from_numpy(x.astype(np.float32))
    parts = ("x_data", "x_indices", "x_indptr", "x_shape")
    if missing := [key for key in parts if key not in arrays]:
        raise DatasetError(name, "x", "an array 'x', or " + ", ".join(parts), f"no {', '.join(missing)}")
    data, indices, indptr, shape = (arrays[key] for key in parts)
    try:
        if data.dtype.kind not in _REAL or not all(a.dtype.kind in _INTEGERS for a in (indices, indptr, shape)):
            raise TypeError(", ".join(f"{key} of {arrays[key].dtype}" for key in parts))
        num_rows, num_features = (int(size) for size in shape)
        steps: Any = np.diff(indptr.astype(np.int64))
        if indptr.shape != (num_rows + 1,) or indptr[0] != 0 or steps.min(initial=0) < 0:
            raise ValueError(f"x_indptr has to ascend from 0, with {num_rows + 1} entries for {num_rows} rows; it has "
                             f"{indptr.size}, from {indptr.flat[0] if indptr.size else None}")
        row = np.repeat(np.arange(num_rows), steps)
        if not len(row) == len(indices) == len(data):
            raise ValueError(f"{len(row)} entries by x_indptr, {len(indices)} columns, {len(data)} values")
        if indices.min(initial=0) < 0:
            raise IndexError("a negative column")
        dense = torch.zeros(num_rows, num_features)
        position = (torch.from_numpy(row), torch.from_numpy(indices.astype(np.int64)))
        # Of one place that comes several times the sum, as in SciPy.
        dense.index_put_(position, torch.from_numpy(data.astype(np.float32)), accumulate=True)
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        raise DatasetError(name, "x_indptr", "compressed rows that fit together", error) from error
    return dense


def _masks(name: str, arrays: Mapping[str, np.ndarray], split: int) -> dict[str, Tensor]:
    """The public split, or where there is none of its masks the file's own; never some of both."""
    has_public = any(key in arrays for key in _MASKS)
    return {key: _mask(name, arrays, key, key if has_public else f"gen_{key}", split) for key in _MASKS}


def _mask(name: str, arrays: Mapping[str, np.ndarray], key: str, found: str, split: int) -> Tensor:
    if found not in arrays:
        there = ", ".join(sorted(k for k in arrays if k.endswith("_mask"))) or "no mask"
        either = f"'{key}'" if found == key else f"'{key}' or '{found}'"
        raise DatasetError(name, key, f"an array {either} in the file", there)
    if arrays[found].dtype != np.bool_:
        raise DatasetError(name, key, "bool", arrays[found].dtype)
    mask = torch.from_numpy(arrays[found])
    if mask.dim() == 2:
        if not 0 <= split < mask.size(1):
            raise DatasetError(name, "split", f"between 0 and {mask.size(1) - 1}", split)
        return mask[:, split].contiguous()
    if split != 0:
        raise DatasetError(name, "split", "0, as the file has one split", split)
    return mask


def cache_folder() -> Path:
    """Where named datasets are looked up and downloads kept: `$PFG_DATA` or `~/.cache/pyg_fullgraph`.

    Raises: InputError for a user without a home who sets no `$PFG_DATA`.
    """
    try:
        return Path(os.environ.get("PFG_DATA") or Path.home() / ".cache" / "pyg_fullgraph")
    except RuntimeError as error:
        raise InputError("PFG_DATA", "to name a folder, as there is no home to keep datasets in", "nothing") from error


def _load_named(name: str, split: int) -> Dataset:
    stem = name.lower()
    for file_name in (f"{name}.npz", f"{stem}.npz"):
        path = cache_folder() / file_name
        # Anything with a separator is a path that lacks its .npz, not a name.
        if path.name == file_name and path.is_file():
            return load_npz(path, split)
    if stem in PLANETOID:
        download = _download_planetoid
    elif stem in OGB:
        download = _download_ogb
    else:
        in_cache = sorted(file.stem for file in cache_folder().glob("*.npz")) if cache_folder().is_dir() else []
        raise UnknownDatasetError(name, ("generated", *PLANETOID, *OGB), in_cache, cache_folder())
    try:
        dataset = download(stem, cache_folder() / "downloads").validate()
    except (DatasetError, KeyboardInterrupt):
        raise
    except ImportError as error:
        raise DatasetError(name, "download", "the package 'ogb' (pip install ogb)", error) from error
    except Exception as error:  # the downloaders raise whatever urllib, requests, zipfile or pandas raise
        expected = f"a reachable network, or the data in {path}"
        raise DatasetError(name, "download", expected, f"{type(error).__name__}: {error}") from error
    # Kept in our own layout: read without pickle from now on, and independent of the downloaders' caches.
    save_npz(dataset, path)
    return load_npz(path, split)


def _download_planetoid(stem: str, root: Path) -> Dataset:
    from torch_geometric.datasets import Planetoid

    data = Planetoid(str(root), PLANETOID[stem])[0]
    return Dataset(
        name=stem,
        x=data.x,
        edge_index=data.edge_index,
        y=data.y,
        train_mask=data.train_mask,
        val_mask=data.val_mask,
        test_mask=data.test_mask,
        num_classes=int(data.y.max()) + 1,
    )


def _download_ogb(stem: str, root: Path) -> Dataset:
    from ogb.nodeproppred import NodePropPredDataset

    source = NodePropPredDataset(stem, root=str(root))
    graph, label = source[0]
    split = source.get_idx_split()
    masks = {}
    for part in ("train", "valid", "test"):
        masks[part] = torch.zeros(graph["num_nodes"], dtype=torch.bool)
        masks[part][torch.as_tensor(split[part])] = True
    return Dataset(
        name=stem,
        x=torch.as_tensor(graph["node_feat"], dtype=torch.float32),
        edge_index=torch.as_tensor(graph["edge_index"], dtype=torch.int64),
        y=_labels(stem, np.asarray(label)),
        train_mask=masks["train"],
        val_mask=masks["valid"],
        test_mask=masks["test"],
        num_classes=source.num_classes,
    )
