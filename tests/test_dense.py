"""Float32 products on tensor cores: about as exact as torch's, finite or not, and only where they are asked for."""

import copy
import json

import compiling
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg_nn
import typer
from test_kernels import GPU, INTERPRETER
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from typer.testing import CliRunner

import pyg_fullgraph as pfg
from benchmarks import dense as benchmark
from benchmarks.table import markdown
from oracle import error
from pyg_fullgraph import columns, debug, dense
from triton_kernels import dense as kernels

#: Of a product of two numbers: twice 22 bits with what is left out; float32 itself.
RESOLUTION = {"y": 5e-7, "grad_x": 5e-7, "grad_weight": 2.5e-7, "grad_bias": 2.5e-7}
SMALL = kernels.Tile(32, 32, 32, 4)
INFINITY, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def exact():
    """On after each test, and torch's own products in float32 as it is."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    yield
    pfg.use_tensor_cores()
    torch.backends.cuda.matmul.fp32_precision = before


def tile_for(device):
    return SMALL if device == "cpu" else None


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def three(g, x, weight, bias, tile):
    """Result, gradients of features, weight and bias."""
    first = len(g) // 3
    earlier = kernels.weight_gradient(g[:first], x[:first], True, tile)
    grad_weight, grad_bias = kernels.weight_gradient(g[first:], x[first:], True, tile, earlier)
    assert grad_weight is earlier[0] and grad_bias is earlier[1]
    y, grad_x = kernels.product(x, weight, bias, tile=tile), kernels.product(g, weight.t(), tile=tile)
    return {"y": y, "grad_x": grad_x, "grad_weight": grad_weight, "grad_bias": grad_bias}


def by_torch(g, x, weight, bias):
    return {"y": F.linear(x, weight, bias), "grad_x": g @ weight, "grad_weight": g.t() @ x, "grad_bias": g.sum(0)}


def check(g, x, weight, bias, device, tile=None):
    """Errors relative to the sum of the sizes of what is added up: twice torch's, or what parts of numbers resolve."""
    given = [t.to(device) for t in (g, x, weight, bias)]
    wide = [t.double() for t in given]
    want, size = by_torch(*wide), by_torch(*(t.abs() for t in wide))
    got, torchs = three(*given, tile or tile_for(device)), by_torch(*given)
    for name, value in got.items():
        scale = size[name].clamp(min=torch.finfo(torch.float32).tiny)
        off, limit = ((t[name].double() - want[name]).abs().div(scale).amax().item() for t in (got, torchs))
        assert value.dtype == torch.float32 and value.shape == want[name].shape
        assert off <= max(2 * limit, RESOLUTION[name]), (name, off, limit)


@pytest.mark.parametrize("shape", [(1, 1, 1), (37, 41, 50), (70, 96, 64), (45, 100, 17)], ids=str)
@pytest.mark.interpreter
def test_products_interpreted(shape):
    rows, out, width = shape
    check(normal(rows, out), normal(rows, width, seed=1), normal(out, width, seed=2), normal(out, seed=3), "cpu")


@pytest.mark.parametrize("shape", [(100_003, 256, 256), (1, 1, 1), (129, 128, 64), (50_001, 512, 602),
                                   (30_001, 41, 100), (20_000, 1000, 33), (20_000, 130, 300), (10_001, 64, 1000)],
                         ids=str)
@pytest.mark.parametrize("tile", [None, kernels.Tile(64, 64, 32, 4)], ids=["gluon", "triton"])
@pytest.mark.gpu
def test_products_on_a_gpu(tile, shape):
    rows, out, width = shape
    check(normal(rows, out), normal(rows, width, seed=1), normal(out, width, seed=2), normal(out, seed=3), "cuda", tile)


def scaled(name, x):
    """Features that are hard to multiply."""
    rows, width = x.shape
    if name == "positive":
        return x.abs()
    if name == "rows":
        return x * 10.0 ** (6 * normal(rows, 1, seed=7).clamp(-2, 2))
    if name == "columns":
        return x * 10.0 ** (2 * normal(1, width, seed=7).clamp(-2, 2))
    if name == "cancelling":
        return torch.cat([1e4 * x[:, :width // 2], -1e4 * x[:, :width // 2] + x[:, width // 2:2 * (width // 2)]], 1)
    if name == "small":
        return x * 1e-30
    assert name == "large"
    return x * 1e34


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("name", ["positive", "rows", "columns", "cancelling", "small", "large"])
def test_numbers_of_all_sizes(name, device):
    rows, out, width = (50, 40, 64) if device == "cpu" else (20_000, 256, 256)
    weight = normal(out, width, seed=2)
    if name == "cancelling":
        weight[:, width // 2:2 * (width // 2)] = weight[:, :width // 2]
    check(normal(rows, out), scaled(name, normal(rows, width, seed=1)), weight, normal(out, seed=3), device)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_what_is_lost(device):
    """Of features those far below the largest beside them, down to 2**-40 of it; in gradients of weights nothing."""
    x = torch.zeros(20, 32, device=device)
    x[:, 0], x[:, 1] = 2.0**20, 1.0 + 2.0**-22
    weight = torch.zeros(16, 32, device=device)
    weight[:, 1] = 1.0
    off = (kernels.product(x, weight, tile=tile_for(device)) - x[:, 1:2]).abs().max()
    assert 0 < off <= 2.0**-20
    made = kernels.weight_gradient(x.t().contiguous(), weight.new_ones(32, 16), False, tile_for(device))[0]
    assert torch.equal(made, (2.0**20 + x[0, 1].double()).float().expand(20, 16))


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_what_is_not_finite(device):
    """As torch has it: by row for results, by column for gradients of weights; and the largest number is finite."""
    g, x, weight, bias = (t.to(device) for t in (normal(40, 33), normal(40, 50, seed=1), normal(33, 50, seed=2),
                                                 normal(33, seed=3)))
    x[3, 4], x[5, 6], x[7, 1], x[9, 2] = INFINITY, NAN, -INFINITY, torch.finfo(torch.float32).max
    g[3, 7], g[11, 0] = 0, INFINITY
    weight[2, 4], weight[:, 0], weight[:, 2], weight[30, 30] = 0, 0, 0.25, INFINITY
    got, want = three(g, x, weight, bias, tile_for(device)), by_torch(g, x, weight, bias)
    assert torch.isfinite(want["y"][9, :30]).all()
    for name, value in got.items():
        torch.testing.assert_close(value, want[name], rtol=1e-4, atol=1e-4, equal_nan=True, msg=name)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("is_finite", [True, False], ids=["finite", "not_finite"])
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no_bias"])
def test_added(with_bias, is_finite, device):
    """A matrix, of any strides, is added to a product, also where that is computed again."""
    rows, out, width = (70, 33, 50) if device == "cpu" else (20_000, 200, 256)
    x, weight, bias, wide = (t.to(device) for t in (normal(rows, width), normal(out, width, seed=1),
                                                    normal(out, seed=2), normal(rows, 2 * out, seed=3)))
    if not is_finite:
        x[3, 4], x[35, 1], wide[40, 7], wide[3, :5], weight[2] = INFINITY, NAN, INFINITY, -INFINITY, 0
    bias = bias if with_bias else None
    for add in (wide[:, :out], wide[:, ::2], wide[:, :out].contiguous(), wide[:1, :out].expand(rows, out)):
        want = F.linear(x, weight, bias) + add if not is_finite else \
            F.linear(x.double(), weight.double(), bias if bias is None else bias.double()) + add.double()
        got = kernels.product(x, weight, bias, add, tile_for(device))
        if is_finite:
            assert error(got, want) < 1e-6
        else:
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3, equal_nan=True)
    for shape in ((0, 3, 4), (3, 0, 4), (3, 4, 0)):
        x, weight, add = (torch.ones(*s, device=device) for s in ((shape[0], shape[2]), (shape[1], shape[2]),
                                                                 (shape[0], shape[1])))
        assert torch.equal(kernels.product(x, weight, None, add), x @ weight.t() + add)


@pytest.mark.gpu
def test_what_is_not_finite_among_many_rows():
    """Of a program's many blocks of rows those that need it are computed again."""
    g, x, weight, bias = (t.cuda() for t in (normal(70_000, 256), normal(70_000, 200, seed=1), normal(256, 200, seed=2),
                                             normal(256, seed=3)))
    x[69_999, 4], x[30_000, 6], g[20_000, 7], weight[2, 4] = INFINITY, NAN, -INFINITY, 0
    want = by_torch(g, x, weight, bias)
    for name, value in three(g, x, weight, bias, None).items():
        torch.testing.assert_close(value, want[name], rtol=1e-4, atol=2e-3, equal_nan=True, msg=name)


@pytest.mark.gpu
def test_captured():
    """The kernels in a CUDA graph, with other numbers at its replay."""
    g, x, weight, bias = (t.cuda() for t in (normal(9000, 256), normal(9000, 256, seed=1), normal(256, 256, seed=2),
                                             normal(256, seed=3)))
    three(g, x, weight, bias, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = three(g, x, weight, bias, None)
    x.mul_(3), weight.neg_()
    graph.replay()
    for name, value in three(g, x, weight, bias, None).items():
        assert torch.equal(made[name], value), name


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_layouts(device):
    """Every second feature, a transposed matrix, one row for all, rows that start off a boundary of 16 bytes."""
    g, weight, bias, wide, other, last = (t.to(device) for t in (  # a copy to a device would have strides of its own
        normal(64, 30), normal(30, 40, seed=1), normal(30, seed=2), normal(64, 81, seed=3), normal(40, 64, seed=4),
        normal(30, 41, seed=5)))
    for x in (wide[:, :80:2], other.t(), wide[:1, :40].expand(64, 40), wide[:, 3:43], wide[:, :40]):
        check(g, x, weight.t().contiguous().t(), bias, device)
    check(g.t().contiguous().t(), x, last[:, 1:], bias, device)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_empty(device):
    for rows, out, width in [(0, 3, 4), (3, 0, 4), (3, 4, 0)]:
        g, x, weight = (torch.ones(*s, device=device) for s in ((rows, out), (rows, width), (out, width)))
        bias = torch.ones(out, device=device)
        for name, value in three(g, x, weight, bias, None).items():
            assert torch.equal(value, by_torch(g, x, weight, bias)[name]), name


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_same_bits_whatever_is_cut(device, monkeypatch):
    """Rows of a contraction are shared by programs; their sums come in a fixed order."""
    monkeypatch.setattr(kernels, "_MIN_ROWS", 32)
    g, x = normal(300, 20).to(device), normal(300, 24, seed=1).to(device)
    runs = [kernels.weight_gradient(g, x, True, tile_for(device)) for _ in range(2)]
    assert torch.equal(runs[0][0], runs[1][0]) and torch.equal(runs[0][1], runs[1][1])
    assert error(runs[0][0], g.t().double() @ x.double()) < 1e-6


@pytest.mark.gpu
def test_more_than_two_billion_elements():
    """Offsets are 64 bits wide: 2.3e9 elements each of x, y and g."""
    rows, width = 9_000_000, 256
    if torch.cuda.mem_get_info()[0] < 6 * rows * width * 4:
        pytest.skip("needs 55 GB of GPU memory")
    x = torch.zeros(rows, width, device="cuda")
    x[-1000:], x[:1000] = normal(1000, width).cuda(), normal(1000, width, seed=1).cuda()
    weight = normal(width, width, seed=2).cuda()
    y = kernels.product(x, weight)
    for part in (slice(0, 1000), slice(-1000, None)):
        assert error(y[part], x[part].double() @ weight.double().t()) < 1e-6
    assert not y[1000:-1000].any()
    made, sums = kernels.weight_gradient(y, x, True)
    ends = torch.cat([x[:1000], x[-1000:]]).double(), torch.cat([y[:1000], y[-1000:]]).double()
    assert error(made, ends[1].t() @ ends[0]) < 1e-6
    assert error(sums, ends[1].sum(0)) < 1e-6


# --- the switch -------------------------------------------------------------------------------------------------


@pytest.fixture
def taken(monkeypatch):
    """Shapes of products that came to the kernels; small ones are taken as well."""
    seen = []
    product, gradient = kernels.product, kernels.weight_gradient
    monkeypatch.setattr(dense, "MIN_PRODUCTS", 1)
    monkeypatch.setattr(dense, "MIN_WIDTH", 0)

    def recorded(x, weight, bias=None, add=None, tile=None):
        if x.device.type != "meta":  # of what is compiled ahead
            seen.append(("product" if add is None else "added", *x.shape, weight.shape[0]))
        return product(x, weight, bias, add, tile_for(x.device.type))

    def recorded_gradient(g, x, with_bias=False, tile=None, into=(None, None)):
        if x.device.type != "meta":
            seen.append(("gradient", *g.shape, x.shape[1]))
        return gradient(g, x, with_bias, tile_for(x.device.type), into)

    monkeypatch.setattr(kernels, "product", recorded)
    monkeypatch.setattr(kernels, "weight_gradient", recorded_gradient)
    return seen


LAYERS = {
    "gcn": lambda: pfg.nn.GCNConv(12, 8),
    "gat": lambda: pfg.nn.GATConv(12, 4, heads=2),
    "sage": lambda: pfg.nn.SAGEConv(12, 8),
    "sage_wide": lambda: pfg.nn.SAGEConv(12, 12),
    "transformer": lambda: pfg.nn.TransformerConv(12, 4, heads=2),
    "gatv2": lambda: pfg.nn.GATv2Conv(12, 4, heads=2, residual=True),
    "res_gated": lambda: pfg.nn.ResGatedGraphConv(12, 8),
    "gat_res": lambda: pfg.nn.GATConv(12, 4, heads=2, residual=True),
    "gin": lambda: pfg.nn.GINConv(torch.nn.Linear(12, 8)),
}


def step(layer, x, edge_index):
    out = layer(x, edge_index)
    cotangent = normal(*out.shape, seed=5).to(out)
    return [out, *torch.autograd.grad((out * cotangent).sum(), [x, *layer.parameters()])]


def layer_case(name, device):
    torch.manual_seed(0)
    edge_index = torch.randint(30, (2, 200), generator=torch.Generator().manual_seed(1)).to(device)
    return LAYERS[name]().to(device), normal(30, 12).to(device).requires_grad_(), edge_index


def gru_gates(by_input, by_state, hidden, input_bias=None, state_bias=None):
    """What torch's kernel on a GPU makes of the products of a cell."""
    (r, z, n), (hr, hz, hn) = (
        (t if b is None else t + b).chunk(3, 1) for t, b in ((by_input, input_bias), (by_state, state_bias)))
    update = (z + hz).sigmoid()
    return update * hidden + (1 - update) * (n + (r + hr).sigmoid() * hn).tanh(), None


def lstm_gates(by_input, by_state, memory, input_bias=None, state_bias=None):
    total = by_input + by_state
    for bias in (input_bias, state_bias):
        total = total if bias is None else total + bias
    i, f, g, o = total.chunk(4, 1)
    memory = f.sigmoid() * memory + i.sigmoid() * g.tanh()
    return o.sigmoid() * memory.tanh(), memory, None


@pytest.fixture
def cells(monkeypatch):
    """Torch's kernels for cells, and on the CPU, where it has none, what they compute."""
    own, gates = dense._CELLS, {torch.gru_cell: gru_gates, torch.lstm_cell: lstm_gates}
    fused = {cell: lambda by_input, *rest, cell=cell: (own if by_input.is_cuda else gates)[cell](by_input, *rest)
             for cell in own}
    monkeypatch.setattr(dense, "_CELLS", fused)
    monkeypatch.setattr(dense, "_has_cells", lambda device: True)


class Recurrent(pfg.nn.MessagePassing):
    """A layer with a cell after its sum, as GatedGraphConv has one."""

    def __init__(self, cell):
        super().__init__(aggr="sum")
        self.cell = cell

    def forward(self, x, state, edge_index):
        return self.cell(self.propagate(edge_index, x=x), state)


def cell_step(layer, x, hidden, memory, edge_index):
    is_gru = isinstance(layer.cell, torch.nn.GRUCell)
    out = layer(x, hidden if is_gru else (hidden, memory), edge_index)
    out, leaves = ((out,), (x, hidden)) if is_gru else (out, (x, hidden, memory))
    cotangents = [normal(*o.shape, seed=k).to(o) for k, o in enumerate(out)]
    return [*out, *torch.autograd.grad(out, [*leaves, *layer.parameters()], cotangents)]


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("kind", [torch.nn.GRUCell, torch.nn.LSTMCell])
def test_products_of_cells(kind, has_bias, device, taken, cells):
    """Both products of a cell and their gradients are by the kernels; results and gradients are those of float64."""
    torch.manual_seed(0)
    layer = Recurrent(kind(12, 8, bias=has_bias)).to(device)
    edge_index = torch.randint(30, (2, 200)).to(device)
    given = [normal(30, width, seed=k).to(device).requires_grad_() for k, width in enumerate((12, 8, 8))]
    exact = [t.detach().double().requires_grad_() for t in given]
    want = cell_step(copy.deepcopy(layer).double(), *exact, edge_index)
    for _ in range(4):  # from the third call on by its steps
        taken.clear()
        got = cell_step(layer, *given, edge_index)
        assert max(error(g, w) for g, w in zip(got, want, strict=True)) < 1e-5
        assert [name for name, *_ in taken].count("gradient") == 2
        assert sum(name in ("product", "added") for name, *_ in taken) == 4


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("states", [[(30, 8)], [(30, 8)] * 3, [(29, 8)] * 2, [(30, 8), (8, 30)], [(30, 7)] * 2],
                         ids=str)
def test_what_torch_refuses_of_a_cell_is_refused(states, device, taken, cells):
    layer = Recurrent(torch.nn.LSTMCell(12, 8)).to(device)
    edge_index = torch.randint(30, (2, 200)).to(device)
    given = [normal(*shape).to(device) for shape in states]
    with pytest.raises((RuntimeError, TypeError), match="hidden"):
        layer(normal(30, 12).to(device), given, edge_index)


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return torch.zeros(g.shape, device=g.device)  # one, of however many


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("how", ["batched", "vmap", "tangents"])
@pytest.mark.parametrize("makes", ["product", "chain", "chain with one gradient", "sum"])
def test_many_gradients_at_once_and_their_tangents_are_torchs(makes, how, device, taken, monkeypatch):
    for name in ("MIN_NUMBERS", "MIN_COLUMNS"):
        monkeypatch.setattr(columns, name, 1)
    x, weight, bias = (normal(*shape).to(device).requires_grad_() for shape in ((30, 12), (8, 12), (8,)))
    if makes == "sum":
        out = columns.add(x @ weight.t(), bias)
    else:
        with dense.Products(makes != "product"):
            first = F.linear(x, weight, bias)
            out = (NoGradient.apply(first) if makes == "chain with one gradient" else first) + F.linear(x, weight)

    def gradients(g):
        return torch.autograd.grad(out, [x, weight, bias], g, retain_graph=True)

    batch = normal(3, 30, 8, seed=1).to(device)
    each = [*zip(*map(gradients, batch), strict=True)]
    taken.clear()
    if how == "tangents":
        with forward_ad.dual_level():
            duals = [map(forward_ad.unpack_dual, gradients(forward_ad.make_dual(g.clone(), g))) for g in batch]
            tangents = [[torch.zeros_like(p) if t is None else t for p, t in made] for made in duals]
            found = [*map(torch.stack, zip(*tangents, strict=True))]
    else:
        found = torch.vmap(gradients)(batch) if how == "vmap" else \
            torch.autograd.grad(out, [x, weight, bias], batch, is_grads_batched=True)
    assert not taken
    for got, want in zip(found, each, strict=True):
        assert error(got, torch.stack(want).double()) < 1e-5


@pytest.fixture
def seen_cells(monkeypatch):
    """What came to torch's kernels for cells."""
    seen = []
    monkeypatch.setattr(dense, "_CELLS", {cell: lambda *given, fused=fused: seen.append(given) or fused(*given)
                                          for cell, fused in dense._CELLS.items()})
    return seen


@pytest.mark.gpu
@pytest.mark.parametrize("change", ["nothing", "double", "half", "autocast", "off", "few"])
def test_cells_that_are_torchs(change, seen_cells, monkeypatch):
    """Where no product of a cell pays."""
    layer = pfg.nn.GatedGraphConv(64, num_layers=2).cuda()
    rows = 100 if change == "few" else 200_000
    x, edge_index = normal(rows, 64).cuda(), torch.randint(rows, (2, 2 * rows), device="cuda")
    monkeypatch.setattr(dense, "_is_on", change != "off")
    if change in ("double", "half"):
        layer, x = (getattr(t, change)() for t in (layer, x))
    with torch.autocast("cuda", torch.bfloat16, enabled=change == "autocast"), torch.no_grad():
        assert layer(x, edge_index).isfinite().all()
    assert len(seen_cells) == 2 * (change == "nothing")


@pytest.mark.gpu
def test_gated_graph_conv_takes_the_products_of_its_cell(seen_cells):
    """As a user has it: results and gradients of a large graph are those of PyG's in float64, about as exact as its."""
    torch.manual_seed(0)
    plain = pyg_nn.GatedGraphConv(96, num_layers=2).cuda()
    layer = pfg.nn.GatedGraphConv(96, num_layers=2).cuda()
    layer.load_state_dict(plain.state_dict())
    x, edge_index = normal(150_000, 96).cuda(), torch.randint(150_000, (2, 600_000), device="cuda")
    found = [step(module, x.to(module.weight.dtype).requires_grad_(), edge_index)
             for module in (layer, plain, copy.deepcopy(plain).double())]
    assert len(seen_cells) == 2
    for ours, theirs, exact in zip(*found, strict=True):
        assert error(ours, exact) < max(3 * error(theirs, exact), 2e-6)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("summed", [None, 0, 1])
def test_sums_of_outer_products(summed, dtype, device, taken):
    """Of two parts of the rows, by our kernel and by torch, with the sum of one factor."""
    a, b = normal(70, 24).to(device, dtype), normal(70, 40, seed=1).to(device, dtype)
    made = None, None
    for rows in (slice(0, 30), slice(30, 30), slice(30, 70)):
        made = dense.outer(a[rows], b[rows], summed, made)
    exact, limit = (torch.float64, 1e-12) if dtype == torch.float64 else (torch.float32, 1e-5)
    assert made[0].dtype == exact and error(made[0], a.double().t() @ b.double()) < limit
    assert len(taken) == 3 * (dtype == torch.float32)
    if summed is None:
        assert made[1] is None
    else:
        assert made[1].dtype == exact and error(made[1], (a, b)[summed].double().sum(0)) < limit


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name, device, taken):
    """Every product of a step goes through the kernels: results and gradients are those of float64."""
    layer, x, edge_index = layer_case(name, device)
    exact_layer, exact_x, _ = layer_case(name, device)
    want = step(exact_layer.double(), exact_x.detach().double().requires_grad_(), edge_index)
    for _ in range(4 if name == "gcn" else 1):  # lazy at first, as it is when nothing came of that
        taken.clear()
        got = step(layer, x, edge_index)
        assert max(error(g, w) for g, w in zip(got, want, strict=True)) < 1e-5
        kinds = [kind for kind, *_ in taken]
        num_linear = {"sage": 2, "sage_wide": 2, "transformer": 4, "gatv2": 3, "res_gated": 4, "gat_res": 2}
        # One result in layers with several maps, and all but one of the gradients of the same features; the wide layer
        # sums first.
        num_added = num_linear.get(name, 1) - 1 if name != "sage_wide" else 0
        num_added += name in num_linear
        assert kinds.count("gradient") == num_linear.get(name, 1)
        assert kinds.count("added") == num_added
        assert kinds.count("product") == 2 * num_linear.get(name, 1) - num_added


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("is_large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("name", ["sage", "sage_wide", "transformer", "gatv2", "gat_res", "res_gated", "beta"])
def test_a_map_that_is_added_is_one_kernel(name, is_large, device, taken, monkeypatch):
    """Where no sweep adds it, and nobody else asks for it or looks at it."""
    if is_large:  # enough numbers for sums that wait for what is added to them
        monkeypatch.setattr(columns, "MIN_NUMBERS", 1)
    monkeypatch.setitem(LAYERS, "beta", lambda: pfg.nn.TransformerConv(12, 4, heads=2, beta=True))
    layer, x, edge_index = layer_case(name, device)
    wide, wide_x, _ = layer_case(name, device)
    with torch.no_grad():
        want = wide.double()(wide_x.detach().double(), edge_index)
        for _ in range(5):
            taken.clear()
            assert error(layer(x, edge_index), want) < 1e-5
            kinds = [kind for kind, *_ in taken]
            assert kinds.count("added") == (0 if name == "beta" or (name == "res_gated" and is_large) else 1)
        names = {"sage": "lin_r", "sage_wide": "lin_r", "gatv2": "res", "gat_res": "res"}
        seen = []
        getattr(layer, names.get(name, "lin_skip")).register_forward_hook(lambda module, args, out: seen.append(out))
        taken.clear()
        assert error(layer(x, edge_index), want) < 1e-5
    assert [type(out) for out in seen] == [torch.Tensor] and "added" not in [kind for kind, *_ in taken]


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_a_map_of_what_attention_sums_up_of_edges_is_added_by_its_kernel(device, taken):
    """As the skip after it is."""

    def case(dtype):
        torch.manual_seed(0)
        layer = pfg.nn.TransformerConv(12, 8, heads=2, edge_dim=3).to(device, dtype)
        given = [normal(30, 12).to(device, dtype).requires_grad_(), normal(200, 3).to(device, dtype).requires_grad_()]
        return layer, given, torch.randint(30, (2, 200), generator=torch.Generator().manual_seed(1)).to(device)

    def run(layer, given, edge_index):
        out = layer(given[0], edge_index, given[1])
        forward = list(taken)
        cotangent = normal(*out.shape, seed=5).to(out)
        return [out, *torch.autograd.grad((out * cotangent).sum(), [*given, *layer.parameters()])], forward

    want, _ = run(*case(torch.float64))
    taken.clear()
    got, forward = run(*case(torch.float32))
    assert max(error(g, w) for g, w in zip(got, want, strict=True)) < 1e-5
    maps = [("product", 30, 12, 16)] * 3 + [("product", 30, 16, 6)]
    assert sorted(forward) == sorted([*maps, ("added", 30, 6, 16), ("added", 30, 12, 16)])


#: Layers that add a map, and its name.
ADDED = [("SAGEConv", "lin_r"), ("GraphConv", "lin_root"), ("TransformerConv", "lin_skip"),
         ("ResGatedGraphConv", "lin_skip")]


class Thinned(torch.nn.Module):
    """Other numbers each time that a weight is asked for."""

    def forward(self, weight):
        return weight * (torch.rand_like(weight) > 0.5)


@pytest.mark.parametrize("device", [INTERPRETER, "cpu", GPU])
@pytest.mark.parametrize("kind, name", ADDED)
def test_a_map_whose_weight_is_computed_is_asked_once(kind, name, device, taken):
    made = []
    for layers in (pyg_nn, pfg.nn):
        torch.manual_seed(0)
        layer = getattr(layers, kind)(12, 12).to(device)
        torch.nn.utils.parametrize.register_parametrization(getattr(layer, name), "weight", Thinned())
        x, edge_index = layer_case("gcn", device)[1:]
        torch.manual_seed(2)
        made.append([layer(x, edge_index) for _ in range(5)])
    assert all(error(got, want.double()) < 1e-5 for want, got in zip(*made, strict=True))


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("kind, name", ADDED)
def test_a_map_that_is_added_is_seen_by_hooks_of_all_modules(kind, name, device, taken):
    layer, (_, x, edge_index) = getattr(pfg.nn, kind)(12, 12).to(device), layer_case("gcn", device)
    seen = []
    handle = torch.nn.modules.module.register_module_full_backward_hook(lambda module, *grads: seen.append(module))
    try:
        layer(x, edge_index).sum().backward()
    finally:
        handle.remove()
    assert getattr(layer, name) in seen


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_what_is_added_to_has_its_gradient_whatever_became_of_the_map(device, taken):
    """Its weight written to, or its gradient taken before."""
    layer, (_, x, edge_index) = pfg.nn.SAGEConv(12, 12).to(device), layer_case("gcn", device)
    wide = pyg_nn.SAGEConv(12, 12).to(device).double()
    wide.load_state_dict(layer.state_dict())
    want = torch.autograd.grad(wide(x.detach().double(), edge_index).sum(), wide.lin_l.weight)[0]
    for _ in range(5):
        out = layer(x, edge_index)
    with torch.no_grad():
        layer.lin_r.weight.mul_(1)
    assert error(torch.autograd.grad(out.sum(), layer.lin_l.weight)[0], want) < 1e-5
    for first, second in (("lin_r", "lin_l"), ("lin_l", "lin_r")):
        out, exact = layer(x, edge_index), wide(x.detach().double(), edge_index)
        for name in (first, second):
            got, want = (torch.autograd.grad(o.sum(), getattr(model, name).weight)[0]
                         for o, model in ((out, layer), (exact, wide)))
            assert error(got, want) < 1e-5
    relu = torch.nn.ReLU(inplace=True)
    got, want = (torch.autograd.grad(relu(model(x.to(p), edge_index)).square().sum(), [*model.parameters()])
                 for model, p in ((layer, torch.float32), (wide, torch.float64)))
    assert all(error(g, w) < 1e-5 for g, w in zip(got, want, strict=True))


PER_EDGE = {
    "edge_conv": lambda: pfg.nn.EdgeConv(torch.nn.Linear(24, 8)),
    "cg": lambda: pfg.nn.CGConv(12),
    "pna": lambda: pfg.nn.PNAConv(12, 8, ["mean", "max"], ["identity"], torch.ones(5)),
}


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("name", PER_EDGE)
def test_layers_with_products_in_message(name, device, monkeypatch):
    """What decides about a product, its size as well, is no part of a trace."""
    monkeypatch.setattr(dense, "_is_tall", lambda value: isinstance(value, torch.Tensor))
    layer, (_, x, edge_index) = PER_EDGE[name]().to(device), layer_case("gcn", device)
    layer(x, edge_index)
    assert debug.counters() == {"fused": 1, "plain": 0}


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_what_torch_keeps(device, taken):
    """Other dtypes, what may be rounded to TF32, autocast, small products, and everything when it is off."""
    layer, x, edge_index = layer_case("gcn", device)
    pfg.use_tensor_cores(False)
    step(layer, x, edge_index)
    pfg.use_tensor_cores(True)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    step(layer, x, edge_index)
    dense.linear(x, layer.lin.weight)
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    with torch.autocast(device, dtype=torch.bfloat16):
        dense.linear(x, layer.lin.weight)
    step(layer.double(), x.detach().double().requires_grad_(), edge_index)
    dense.linear(x.half(), layer.lin.weight.half())
    layer.float()
    dense.MIN_PRODUCTS = 1 << 31  # put back by the fixture
    step(layer, x, edge_index)
    dense.MIN_PRODUCTS = 1
    x.sum() + x @ x.new_ones(12)
    assert not taken
    step(layer, x, edge_index)
    assert taken


class Checkpointed(pyg_nn.MessagePassing):
    """A linear map that backward computes again, in ``forward`` or in ``update``."""

    def __init__(self, width, is_update):
        super().__init__(aggr="add")
        self.up, self.is_update = torch.nn.Linear(12, width), is_update

    def forward(self, x, edge_index):
        out = self.propagate(edge_index, x=x)
        return out if self.is_update else checkpoint(self.up, out, use_reentrant=False)

    def message(self, x_j):
        return x_j

    def update(self, out):
        return checkpoint(self.up, out, use_reentrant=False) if self.is_update else out


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("width", [12, 8])
@pytest.mark.parametrize("is_update", [False, True])
def test_a_checkpoint_in_a_layer(device, width, is_update, taken):
    """What it saves is counted, and comes back, in the order in which torch's functions save."""
    layer = pfg.convert(Checkpointed(width, is_update)).to(device)
    x, edge_index = normal(20, 12).to(device).requires_grad_(), torch.randint(20, (2, 60), device=device)
    found = torch.autograd.grad(layer(x, edge_index).square().sum(), [x, layer.up.weight, layer.up.bias])
    ends = [t.detach().double().requires_grad_() for t in (x, layer.up.weight, layer.up.bias)]
    h = torch.zeros_like(ends[0]).index_add(0, edge_index[1], ends[0][edge_index[0]])
    expected = torch.autograd.grad((h @ ends[1].t() + ends[2]).square().sum(), ends)
    assert max(error(a, b) for a, b in zip(found, expected, strict=True)) < 1e-5
    assert not taken


def test_tensors_of_a_cpu_stay_with_torch(taken):
    if kernels.is_interpreted():
        pytest.skip("kernels run on CPU tensors in the interpreter's session")
    layer, x, edge_index = layer_case("gcn", "cpu")
    step(layer, x, edge_index)
    assert not taken


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_forms_of_a_product(device, taken):
    """In a layer torch's functions are seen through, with three dimensions and a weight on either side."""
    x, weight, bias = (t.to(device) for t in (normal(20, 12), normal(12, 8, seed=1), normal(8, seed=2)))
    wide = x.view(4, 5, 12)
    with dense.in_layer(torch.nn.Module(), [x], lambda layer: False):
        forms = {"F.linear": F.linear(x, weight.t(), bias), "keyword": F.linear(x, weight.t(), bias=bias),
                 "matmul": torch.matmul(x, weight), "@": x @ weight, "mm": torch.mm(x, weight), "method": x.mm(weight),
                 "addmm": torch.addmm(bias, x, weight), "three": F.linear(wide, weight.t()), "wide @": wide @ weight}
        assert len(taken) == len(forms)
        other = x.t() @ x.new_ones(20), torch.addmm(bias, x, weight, beta=2.0), weight.t() @ wide.transpose(1, 2)
    assert len(taken) == len(forms)
    assert [t.shape for t in other] == [(12,), (20, 8), (4, 8, 5)]
    for name, value in forms.items():
        want = (wide if value.dim() == 3 else x).double() @ weight.double()
        assert error(value, want + bias if name in ("F.linear", "keyword", "addmm") else want) < 1e-6, name


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_gradients_that_are_asked_for(device, taken):
    """No more are computed; gradients of gradients are torch's."""
    x, weight, bias = (t.to(device) for t in (normal(20, 12), normal(8, 12, seed=1), normal(8, seed=2)))
    with torch.no_grad():
        assert not dense.linear(x, weight, bias).requires_grad
    dense.linear(x, weight.requires_grad_(), bias).sum().backward()
    assert [kind for kind, *_ in taken] == ["product", "product", "gradient"]
    x.requires_grad_(), bias.requires_grad_()
    grads = torch.autograd.grad(dense.linear(x, weight, bias).square().sum(), [x, weight, bias], create_graph=True)
    twice = torch.autograd.grad(sum(g.square().sum() for g in grads), [x, weight, bias])
    wide = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    grads = torch.autograd.grad(F.linear(*wide).square().sum(), wide, create_graph=True)
    for g, w in zip(twice, torch.autograd.grad(sum(g.square().sum() for g in grads), wide), strict=True):
        assert error(g, w) < 1e-5


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("is_ours", [True, False], ids=["ours", "torchs"])
def test_what_no_gradient_reads_may_be_written_to(is_ours, device, taken, monkeypatch):
    """Features under a frozen weight, a weight over features without gradient: as with torch's products."""
    pfg.use_tensor_cores(is_ours)
    monkeypatch.setattr(columns, "MIN_NUMBERS", 1)
    monkeypatch.setattr(columns, "MIN_COLUMNS", 1)
    x, weight, bias = (t.to(device) for t in (normal(20, 12), normal(8, 12, seed=1), normal(8, seed=2)))
    bias.requires_grad_()
    for needs_x, needs_weight in ((False, False), (True, False), (False, True)):
        x.requires_grad_(needs_x), weight.requires_grad_(needs_weight)
        out = dense.linear(x, weight, bias)
        assert type(out.grad_fn).__name__ == "_LinearBackward"
        with torch.no_grad():
            if not needs_weight:
                x.add_(1)
            if not needs_x:
                weight.add_(1)
        grads = torch.autograd.grad(out.sum(), [t for t in (x, weight, bias) if t.requires_grad])
        assert error(grads[-1], bias.new_full((8,), 20)) < 1e-6


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_operators(device, taken):
    """What compilers see; and a compiled function has no graph break."""
    x, weight, bias = (t.to(device).requires_grad_() for t in (normal(20, 12), normal(8, 12, seed=1), normal(8)))
    torch.library.opcheck(dense.linear_operator, (x, weight, bias))
    torch.library.opcheck(dense.linear_operator, (x, weight.detach(), None))
    with torch.no_grad():
        given = normal(20, 8).to(device), x.detach(), weight.detach(), [True, True, True]
        torch.library.opcheck(dense.linear_backward, given)
    torch._dynamo.reset()
    out = torch.compile(dense.linear, fullgraph=True, backend="aot_eager")(x, weight, bias)
    taken.clear()
    got = torch.autograd.grad(out.square().sum(), [x, weight, bias])
    assert [kind for kind, *_ in taken] == ["product", "gradient"]
    for g, w in zip(got, torch.autograd.grad(F.linear(x, weight, bias).square().sum(), [x, weight, bias]), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-5)


@pytest.mark.interpreter
def test_benchmark(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "TILES", dict.fromkeys(benchmark.TILES, (SMALL, kernels.Tile(16, 32, 32, 4))))
    file, app = tmp_path / "rows.jsonl", typer.Typer()
    app.command()(benchmark.main)
    options = ["--device", "cpu", "--shapes", "40x20x24", "--no-save", "--budget-s", "0.001", "--also", str(file)]
    shown = CliRunner().invoke(app, options)
    assert shown.exit_code == 0, shown.output
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 3 * 4
    assert all(r["check"]["error"] < 1e-6 and r["kind"] == "dense" and r["p50_ms"] > 0 for r in rows)
    assert markdown(rows).count("| grad_weight-40x20x24 |") == 4


@pytest.mark.slow(25)
def test_compiles_for_tensor_cores(tmp_path):
    """The shapes that are launched by default use tensor cores, spill next to nothing and fit into shared memory."""
    report = compiling.report(tmp_path, "--dense", "256,256", "512,602")
    assert len(report) == 2 * 8
    report = {name: r for name, r in report.items() if "split" not in name}
    assert all(r["wgmma"] and r["shared_bytes"] <= 227 * 1024 for r in report.values()), report
    assert not any(r["spill_bytes"] for name, r in report.items() if "gluon" not in name), report
    assert all(r["spill_bytes"] <= 160 for name, r in report.items() if name.startswith("256,256 gluon")), report


# --- torch's products -----------------------------------------------------------------------------------------------


def gradients_and_turned(x, weight, bias, g, monkeypatch):
    """Gradients of a product, and how often a weight was turned for them."""
    turned, plain = [], F.linear
    monkeypatch.setattr(dense.F, "linear", lambda x, w, b=None: (turned.append(w.is_contiguous()), plain(x, w, b))[1])
    y = dense.linear(x, weight, bias)
    del turned[:]
    made = torch.autograd.grad(y, [t for t in (x, weight, bias) if t is not None and t.requires_grad], g)
    assert all(turned)
    return made, len(turned)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", [(50, 6), (5, 10, 6)])
def test_gradients_of_features_by_a_turned_weight(shape, has_bias, monkeypatch):
    monkeypatch.setattr(dense, "_has_tf32", lambda device: True)
    monkeypatch.setattr(dense, "MIN_TURNED_ROWS", 50)
    monkeypatch.setattr(dense, "MIN_TURNED_WIDTH", 4)
    x, weight = normal(*shape).requires_grad_(), normal(4, 6, seed=1).requires_grad_()
    g = normal(*shape[:-1], 4, seed=2)
    bias = normal(4, seed=3).requires_grad_() if has_bias else None
    made, turned = gradients_and_turned(x, weight, bias, g, monkeypatch)
    want = torch.autograd.grad(F.linear(x, weight, bias), [t for t in (x, weight, bias) if t is not None], g)
    assert turned == 1 and all(error(m, w) < 1e-6 for m, w in zip(made, want, strict=True))
    # Gradients of gradients are torch's.
    grads = [torch.autograd.grad(product(x, weight, bias).square().sum(), x, create_graph=True)[0]
             for product in (dense.linear, F.linear)]
    made, want = (torch.autograd.grad(grad.square().sum(), (x, weight)) for grad in grads)
    assert all(error(m, w) < 1e-6 for m, w in zip(made, want, strict=True))


@pytest.mark.parametrize("least, width, given", [
    (51, 4, {}), (50, 5, {}), (50, 4, {"x": torch.Tensor.detach}), (50, 4, {"weight": lambda w: w[:, :5]}),
    (50, 4, {"x": torch.Tensor.double, "weight": torch.Tensor.double})])
def test_which_weights_are_not_turned(least, width, given, monkeypatch):
    monkeypatch.setattr(dense, "_has_tf32", lambda device: True)
    monkeypatch.setattr(dense, "MIN_TURNED_ROWS", least)
    monkeypatch.setattr(dense, "MIN_TURNED_WIDTH", width)
    x, weight = normal(50, 6).requires_grad_(), normal(4, 6).requires_grad_()
    change = {"x": lambda t: t, "weight": lambda t: t} | given
    assert not dense._has_own_gradient(change["x"](x), change["weight"](weight), None)


def test_compilers_are_not_asked_what_torch_multiplies_in(monkeypatch):
    """They cannot trace the question."""
    monkeypatch.setattr(dense, "MIN_TURNED_ROWS", 1)
    monkeypatch.setattr(dense, "MIN_TURNED_WIDTH", 1)
    monkeypatch.setattr(dense, "_has_tf32", lambda device: torch.backends.cuda.matmul.fp32_precision == "ieee")
    x, weight = normal(50, 6).requires_grad_(), normal(4, 6).requires_grad_()
    made = torch.compile(lambda x: dense.linear(x, weight) * 2, backend="eager", fullgraph=True)(x)
    assert torch.equal(made, F.linear(x, weight) * 2)


@pytest.mark.gpu
def test_gradients_of_features_in_tf32(monkeypatch):
    """As exact as torch's, with a weight that lies turned; torch's way for narrow ones, and in float32."""
    x, g = (normal(dense.MIN_TURNED_ROWS, 128, seed=k).cuda() for k in range(2))
    weight = normal(128, 128, seed=2).cuda().requires_grad_()
    wide = g.double() @ weight.double()
    for precision, own in (("ieee", False), ("tf32", True)):
        torch.backends.cuda.matmul.fp32_precision = precision
        assert dense._has_own_gradient(x.requires_grad_(), weight, None) == own
    assert not dense._has_own_gradient(x[:, :64].detach().requires_grad_(), weight[:, :64], None)
    (made, _), turned = gradients_and_turned(x, weight, None, g, monkeypatch)
    assert turned == 1 and error(made, wide) <= 1.1 * error(g @ weight, wide)
