"""Datasets: the generated graph, the .npz layout, names, and every refusal."""

import dataclasses
import pickle
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from pyg_fullgraph.config import TrainConfig
from pyg_fullgraph.data import Dataset, generate, load_dataset, load_npz, save_npz
from pyg_fullgraph.errors import DatasetError, InputError, UnknownDatasetError, UnwritableFolderError


def tiny_arrays() -> dict[str, np.ndarray]:
    """Five nodes on a path, two classes, three features."""
    mask = np.zeros((3, 5), dtype=bool)
    mask[0, :2] = mask[1, 2:3] = mask[2, 3:] = True
    return {
        "edge_index": np.array([[0, 1, 1, 2, 2, 3, 3, 4], [1, 0, 2, 1, 3, 2, 4, 3]], dtype=np.int32),
        "x": np.arange(15, dtype=np.float16).reshape(5, 3),
        "y": np.array([0, 0, 1, 1, 1]),
        "train_mask": mask[0],
        "val_mask": mask[1],
        "test_mask": mask[2],
    }


def write(path: Path, **changes) -> Path:
    """A file with the tiny arrays, changed; None leaves one out."""
    arrays = {key: value for key, value in (tiny_arrays() | changes).items() if value is not None}
    np.savez(path, **arrays)
    return path


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "tiny.npz"


# generated


def test_generate_is_a_function_of_its_options():
    first, second, other = generate(nodes=300), generate(nodes=300), generate(nodes=300, seed=1)
    for name in ("x", "edge_index", "y", "train_mask", "val_mask", "test_mask"):
        assert torch.equal(getattr(first, name), getattr(second, name))
    assert not torch.equal(first.x, other.x)


def test_generate_draws_a_simple_undirected_graph_with_hubs_and_communities():
    data = generate(nodes=3000, degree=16, classes=5).validate()
    src, dst = data.edge_index
    key = src * data.num_nodes + dst
    assert len(key.unique()) == len(key)
    assert torch.equal(key.sort().values, (dst * data.num_nodes + src).sort().values)
    assert (src != dst).all()
    degree = torch.bincount(dst, minlength=data.num_nodes)
    assert 12 < degree.float().mean() <= 16
    assert degree.max() > 8 * degree.median()
    # Half of the edges stay inside a class, and of the others one in five does so by chance.
    assert 0.5 < (data.y[src] == data.y[dst]).float().mean() < 0.7
    assert (data.train_mask.int() + data.val_mask.int() + data.test_mask.int() == 1).all()


def test_generated_classes_need_the_graph():
    """A graph layer has to gain clearly over the same network without edges, and neither may be perfect."""
    from pyg_fullgraph.training import train_seed

    data = generate(nodes=2000, degree=12)
    alone = torch.arange(data.num_nodes).expand(2, -1)
    config = TrainConfig.preset(model="gcn", epochs=80)
    with_graph = train_seed(config, data, 0, "pyg")["test_accuracy"]
    without = train_seed(config, Dataset(**(vars(data) | {"edge_index": alone})), 0, "pyg")["test_accuracy"]
    assert 1 / data.num_classes + 0.1 < without < with_graph - 0.2
    assert with_graph < 0.98


def test_generated_options_are_read_from_the_name():
    data = load_dataset("generated:nodes=50, degree=4,classes=3,features=7")
    assert (data.num_nodes, data.num_features, data.num_classes) == (50, 7, 3)
    assert load_dataset("generated:nodes=50,degree=0").num_edges == 0


@pytest.mark.parametrize(
    "spec, message",
    [
        ("generated:node=5", "'node' .* an option of the generated graph, one of nodes, .* \\(got node=5\\)"),
        ("generated:nodes=many", "'nodes' .* a number of type int \\(got 'many'\\)"),
        ("generated:nodes", "'nodes' .* a number of type int \\(got ''\\)"),
        ("generated:nodes=5", "'nodes' .* at least 10 \\(got 5\\)"),
        ("generated:exponent=1.5", "'exponent' .* above 2 \\(got 1.5\\)"),
        ("generated:seed=-1", "'seed' .* at least 0 \\(got -1\\)"),
        ("generated:homophily=nan", "'homophily' .* between 0 and 1 \\(got nan\\)"),
    ],
)
def test_bad_generated_option_is_named(spec, message):
    with pytest.raises(DatasetError, match=message):
        load_dataset(spec)


# files


def test_npz_dense(path):
    data = load_dataset(write(path))
    arrays = tiny_arrays()
    assert data.name == "tiny"
    assert (data.num_nodes, data.num_edges, data.num_features, data.num_classes) == (5, 8, 3, 2)
    assert data.x.dtype == torch.float32
    assert data.edge_index.dtype == torch.int64
    assert data.x.tolist() == arrays["x"].tolist()
    assert data.edge_index.tolist() == arrays["edge_index"].tolist()
    assert data.test_mask.tolist() == arrays["test_mask"].tolist()


def test_npz_compressed_rows(path):
    x = np.array([[0, 2, 0], [0, 0, 0], [1, 0, 3], [0, 0, 0], [4, 5, 6]], dtype=np.float32)
    filled = x != 0
    data = load_dataset(
        write(
            path,
            x=None,
            x_data=x[filled].astype(np.float16),
            x_indices=filled.nonzero()[1].astype(np.int32),
            x_indptr=np.concatenate([[0], filled.sum(1).cumsum()]),
            x_shape=np.array([5, 3]),
        )
    )
    assert data.x.tolist() == x.tolist()


def test_npz_compressed_rows_with_one_place_twice(path):
    rows = {"x_data": np.array([1, 2, 4]), "x_indices": np.array([1, 1, 0]), "x_indptr": np.array([0, 2, 3, 3, 3, 3])}
    data = load_dataset(write(path, x=None, x_shape=np.array([5, 2]), **rows))
    assert data.x[:2].tolist() == [[0, 3], [4, 0]]


def test_npz_own_split_where_there_is_no_public_one(path):
    arrays = tiny_arrays()
    renamed = {f"gen_{key}": arrays[key] for key in arrays if key.endswith("mask")}
    data = load_dataset(write(path, train_mask=None, val_mask=None, test_mask=None, **renamed))
    assert data.train_mask.tolist() == arrays["train_mask"].tolist()


def test_npz_several_splits(path):
    arrays = tiny_arrays()
    both = {key: np.stack([arrays[key], arrays[key][::-1]], axis=1) for key in arrays if key.endswith("mask")}
    write(path, **both)
    assert load_dataset(path).train_mask.tolist() == arrays["train_mask"].tolist()
    assert load_dataset(path, split=1).train_mask.tolist() == arrays["train_mask"][::-1].tolist()
    with pytest.raises(DatasetError, match=r"'split' .* between 0 and 1 \(got 2\)"):
        load_dataset(path, split=2)


def test_save_then_load(path):
    data = dataclasses.replace(generate(nodes=40, degree=3), num_classes=12)
    save_npz(data, path)
    again = load_npz(path)
    for name in ("x", "edge_index", "y", "train_mask", "val_mask", "test_mask"):
        assert torch.equal(getattr(data, name), getattr(again, name))
    assert again.num_classes == data.num_classes
    assert list(path.parent.iterdir()) == [path]


def test_save_takes_features_with_gradients_and_names_a_folder_that_takes_no_files(path):
    data = generate(nodes=40, degree=3)
    save_npz(dataclasses.replace(data, x=data.x.clone().requires_grad_()), path)
    assert torch.equal(load_npz(path).x, data.x)
    for folder in ("/dev/null", path):
        with pytest.raises(UnwritableFolderError, match=f"Expected output folder '{folder}' to be writable"):
            save_npz(data, f"{folder}/data.npz")


def test_save_takes_features_of_a_type_that_numpy_has_not(path):
    data = generate(nodes=40, degree=3).to("cpu", torch.bfloat16)
    save_npz(data, path)
    assert torch.equal(load_npz(path).x, data.x.float())


def test_save_refuses_a_name_under_which_nothing_is_found(path):
    with pytest.raises(DatasetError, match=r"a file that ends in \.npz \(got .*tiny\)"):
        save_npz(generate(nodes=40, degree=3), path.with_suffix(""))


def test_unlabelled_nodes_outside_the_masks_are_fine(path):
    arrays = tiny_arrays()
    test_mask = np.array([0, 0, 0, 1, 0], dtype=bool)
    data = load_dataset(write(path, y=np.array([0, 0, 1, 1, -1]), test_mask=test_mask))
    assert data.num_classes == 2
    assert data.train_mask.tolist() == arrays["train_mask"].tolist()


NONE = np.zeros(5, dtype=bool)
BAD_ARRAYS = [
    (
        {"y": np.array([0, 0, 1, np.nan, 1])},
        r"'y' of dataset 'tiny' to be a class for every node \(got NaN at node 3\)",
    ),
    ({"y": np.array([0, 0.5, 1, 1, 1])}, "'y' .* whole numbers"),
    ({"y": np.array(["a"] * 5)}, "'y' .* whole numbers as classes .*<U1"),
    ({"y": np.array([0, -1, 1, 1, 1])}, r"'y' .* classes between 0 and 1 where a mask selects \(got -1\)"),
    ({"y": np.array([0, 0, 1, 1, 10**12])}, r"'y' .* fewer than the 5 nodes \(got 1000000000000\)"),
    ({"y": np.zeros((5, 2), dtype=int)}, r"'y' .* shape \[N\]"),
    ({"y": None}, "'y' .* an array of that name .*only edge_index"),
    ({"train_mask": NONE}, r"'train_mask' .* at least one selected node \(got a mask that selects nothing\)"),
    ({"val_mask": NONE}, "'val_mask' .* selects nothing"),
    ({"test_mask": NONE}, "'test_mask' .* selects nothing"),
    ({"test_mask": None}, r"'test_mask' .* an array 'test_mask' in the file \(got train_mask, val_mask\)"),
    ({"train_mask": None, "gen_train_mask": ~NONE}, r"an array 'train_mask' in the file \(got gen_train_mask, test"),
    (dict.fromkeys(("train_mask", "val_mask", "test_mask")), r"'train_mask' or 'gen_train_mask' in .* \(got no mask"),
    ({"num_classes": np.array([3])}, r"'num_classes' .* a single number above 0 \(got int64 \[3\]\)"),
    ({"num_classes": np.array(1)}, r"'y' .* classes between 0 and 0 where a mask selects \(got 1\)"),
    ({"train_mask": np.zeros(5)}, r"'train_mask' .* to be bool \(got float64\)"),
    ({"train_mask": np.zeros(5, "U1")}, r"'train_mask' .* to be bool \(got <U1\)"),
    ({"val_mask": np.zeros(5, "M8[s]")}, r"'val_mask' .* to be bool \(got datetime64\[s\]\)"),
    ({"test_mask": np.zeros(5, [("a", "i4")])}, r"'test_mask' .* to be bool \(got \[\('a', '<i4'\)\]\)"),
    ({"test_mask": np.ones(5, ">i4")}, r"'test_mask' .* to be bool \(got >i4\)"),
    ({"y": np.array(1)}, r"'y' .* shape \[N\], one class per node \(got \[\]\)"),
    ({"y": np.zeros(5, "m8[s]")}, r"'y' .* whole numbers as classes \(got timedelta64\[s\]\)"),
    ({"x": np.zeros((5, 3), "m8[s]")}, r"'x' .* real numbers \(got timedelta64\[s\]\)"),
    ({"edge_index": np.zeros((2, 2), "m8[s]")}, r"'edge_index' .* integer node ids \(got timedelta64\[s\]\)"),
    ({"train_mask": np.ones(4, dtype=bool)}, r"'train_mask' .* bool of shape \[5\] .*\[4\]"),
    ({"x": np.zeros((4, 3))}, r"'x' .* 5 rows, one per label in 'y' \(got \[4, 3\]\)"),
    ({"x": np.zeros(5)}, r"'x' .* 5 rows"),
    ({"x": np.full((5, 3), np.inf)}, r"'x' .* finite features \(got NaN or infinity in row 0\)"),
    ({"x": np.array([["a"]] * 5)}, "'x' .* real numbers"),
    ({"x": None}, "'x' .* no x_data, x_indices, x_indptr, x_shape"),
    ({"edge_index": np.array([[0, 5], [1, 0]])}, r"'edge_index' .* node ids between 0 and 4 \(got 5\)"),
    ({"edge_index": np.array([[0, -1], [1, 0]])}, r"'edge_index' .* node ids between 0 and 4 \(got -1\)"),
    ({"edge_index": np.array([[0.0, 1.0], [1.0, 0.0]])}, "'edge_index' .* integer node ids .*float64"),
    ({"edge_index": np.zeros((3, 2), dtype=int)}, r"'edge_index' .* shape \[2, E\] \(got \[3, 2\]\)"),
    ({"edge_index": None}, "'edge_index' .* an array of that name"),
    ({"batch": np.zeros(5, dtype=int)}, "one class per node .*one per graph"),
]


@pytest.mark.parametrize("changes, message", BAD_ARRAYS, ids=[message[:40] for _, message in BAD_ARRAYS])
def test_bad_array_is_named_with_what_was_expected_and_what_came(path, changes, message):
    with pytest.raises(DatasetError, match=message):
        load_dataset(write(path, **changes))


@pytest.mark.parametrize("change", [
    "indptr", "indices", "negative", "fraction", "time", "data", "shape", "start", "short"])
def test_compressed_rows_that_do_not_fit(path, change):
    csr = {
        "x_data": np.ones(2),
        "x_indices": np.array([0, 2]),
        "x_indptr": np.array([0, 1, 1, 1, 1, 2]),
        "x_shape": np.array([5, 3]),
    }
    csr |= {
        "indptr": {"x_indptr": np.array([0, 2, 1, 1, 1, 2])},
        "indices": {"x_indices": np.array([0, 3])},
        "negative": {"x_indices": np.array([0, -1])},
        "fraction": {"x_indices": np.array([0, 1.7])},
        "time": {"x_data": np.ones(2, "m8[s]")},
        "data": {"x_data": np.ones(3)},
        "shape": {"x_shape": np.array([4, 3])},
        "start": {"x_indptr": np.array([1, 1, 1, 1, 2, 3])},
        "short": {"x_indptr": np.array([0, 1, 2])},
    }[change]
    with pytest.raises(DatasetError, match=r"'x_indptr' .* compressed rows that fit together"):
        load_dataset(write(path, x=None, **csr))


def test_missing_file(path):
    with pytest.raises(DatasetError, match=r"'path' of dataset 'tiny' to be an existing \.npz file"):
        load_dataset(path)


def test_truncated_file(path):
    whole = write(path).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DatasetError, match=r"a complete \.npz archive .* unreadable"):
        load_dataset(path)


def test_damaged_member(path):
    whole = bytearray(write(path).read_bytes())
    start = whole.index(b"x.npy") + 200
    whole[start : start + 8] = b"\xff" * 8
    path.write_bytes(whole)
    with pytest.raises(DatasetError, match="unreadable"):
        load_dataset(path)


@pytest.mark.parametrize("content", [b"", b"edge_index", pickle.dumps([1])])
def test_other_file_under_the_name(path, content):
    path.write_bytes(content)
    with pytest.raises(DatasetError, match="unreadable"):
        load_dataset(path)


class _Bomb:
    def __reduce__(self):
        return pytest.fail, ("the file was executed",)


def test_nothing_in_a_file_is_executed(path):
    np.savez(path, **tiny_arrays(), extra=np.array([_Bomb()], dtype=object))
    with pytest.raises(DatasetError, match="unreadable: Object arrays cannot be loaded"):
        load_dataset(path)


# names


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("PFG_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_unknown_name_says_what_exists(cache):
    with pytest.raises(UnknownDatasetError, match=r"one of generated, cora, citeseer, pubmed, ogbn-arxiv.*no \.npz"):
        load_dataset("core")
    cache.mkdir()
    write(cache / "mine.npz")
    with pytest.raises(UnknownDatasetError, match=r"\(mine\) \(got '\.\./mine'\)"):
        load_dataset("../mine")
    assert load_dataset("mine").num_nodes == 5


def test_a_file_is_found_by_its_name_in_either_case(cache):
    cache.mkdir()
    write(cache / "Mine.npz")
    write(cache / "lower.npz", y=np.array([0, 0, 1, 1, 2]))
    assert load_dataset("Mine").name == "Mine"
    assert load_dataset("LOWER").name == "lower"


def test_a_user_without_a_home(monkeypatch, path):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("PFG_DATA", raising=False)
    monkeypatch.setattr(Path, "home", home)
    assert load_dataset(write(path)).num_nodes == 5
    with pytest.raises(InputError, match="'PFG_DATA' to name a folder, as there is no home"):
        load_dataset("cora")


def test_download_that_fails_says_where_to_put_the_file(cache, monkeypatch):
    def refuse(*args):
        raise OSError("no route to host")

    monkeypatch.setattr("torch_geometric.datasets.Planetoid", refuse)
    with pytest.raises(DatasetError, match=r"a reachable network, or the data in .*cora\.npz \(got OSError: no route"):
        load_dataset("Cora")


def test_ogb_without_its_package(cache, monkeypatch):
    monkeypatch.setitem(sys.modules, "ogb.nodeproppred", None)
    with pytest.raises(DatasetError, match=r"the package 'ogb' \(pip install ogb\)"):
        load_dataset("ogbn-arxiv")


def test_download_is_kept_in_our_layout(cache, monkeypatch):
    """A stand-in with the interface of ogb's NodePropPredDataset, which must be asked once only."""
    arrays, calls = tiny_arrays(), []

    class NodePropPredDataset:
        num_classes = 2

        def __init__(self, name, root):
            calls.append(name)

        def __getitem__(self, index):
            graph = {"num_nodes": 5, "node_feat": arrays["x"].astype(np.float32), "edge_index": arrays["edge_index"]}
            return graph, arrays["y"][:, None]

        def get_idx_split(self):
            return {"train": np.array([0, 1]), "valid": np.array([2]), "test": np.array([3, 4])}

    module = types.ModuleType("ogb.nodeproppred")
    module.NodePropPredDataset = NodePropPredDataset
    monkeypatch.setitem(sys.modules, "ogb", types.ModuleType("ogb"))
    monkeypatch.setitem(sys.modules, "ogb.nodeproppred", module)
    for _ in range(2):
        data = load_dataset("ogbn-arxiv")
        assert data.y.tolist() == arrays["y"].tolist()
        assert data.val_mask.tolist() == arrays["val_mask"].tolist()
    assert calls == ["ogbn-arxiv"]
    assert (cache / "ogbn-arxiv.npz").is_file()


# the object


def test_normalized_rows_sum_to_one_and_empty_rows_stay_empty(path):
    data = load_dataset(write(path, x=np.array([[1, 3], [0, 0], [2, 0], [1, 1], [0, 5]], dtype=np.float32)))
    assert data.normalize_features().x.tolist() == [[0.25, 0.75], [0, 0], [1, 0], [0.5, 0.5], [0, 1]]


def test_to_moves_everything_and_casts_features_only(path, device):
    data = load_dataset(write(path)).to(device, torch.float64)
    assert data.x.dtype == torch.float64
    assert data.y.dtype == torch.int64
    assert {t.device.type for t in vars(data).values() if isinstance(t, torch.Tensor)} == {device.type}


# the public graphs


@pytest.mark.parametrize(
    "name, counts, split_sizes",
    [
        ("cora", (2708, 10556, 1433, 7), (140, 500, 1000)),
        ("citeseer", (3327, 9104, 3703, 6), (120, 500, 1000)),
        ("chameleon_filtered_directed", (890, 13534, 2325, 5), None),
        ("tolokers", (11758, 1038000, 10, 2), None),
    ],
)
def test_public_graph(data_dir, name, counts, split_sizes):
    data = load_dataset(data_dir / f"{name}.npz")
    assert (data.num_nodes, data.num_edges, data.num_features, data.num_classes) == counts
    sizes = tuple(int(mask.sum()) for mask in (data.train_mask, data.val_mask, data.test_mask))
    assert sizes == split_sizes or (split_sizes is None and sum(sizes) == data.num_nodes)


def test_public_graph_with_missing_features_warns(data_dir):
    with pytest.warns(UserWarning, match="features are known for 1060 of 19717 nodes"):
        load_dataset(data_dir / "pubmed_partial_x.npz")


def test_public_graphs_with_one_label_each_are_refused(data_dir):
    with pytest.raises(DatasetError, match="one class per node"):
        load_dataset(data_dir / "proteins.npz")
