"""Rows that a forward picks and writes kind by kind: all at once where that is the same, and never where it is not."""

import weakref

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg_nn
from layers_own import EDGES, NUM_CALLS, Layer, features
from torch import nn

import pyg_fullgraph as pfg
import pyg_fullgraph.nn as fused_nn
from pyg_fullgraph.nn import joined

NUM_KINDS = 3
#: The kind of each of 12 vertices.
TYPES = torch.tensor([0, 2, 1, 1, 0, 2, 2, 0, 1, 0, 2, 0])


class Typed(Layer):
    """A map per kind of vertex, with masks."""

    def __init__(self):
        super().__init__()
        self.maps = nn.ModuleList([nn.Linear(6, 4) for _ in range(NUM_KINDS)]).double()

    def forward(self, x, edge_index, types):
        h = self.propagate(edge_index, x=x)
        out = h.new_empty(h.size(0), 4)
        for k in range(NUM_KINDS):
            out[types == k] = self.maps[k](h[types == k]) + x[types == k][:, :4]
        return out


class ByPosition(Typed):
    """The same with positions, into zeros."""

    def forward(self, x, edge_index, types):
        h = self.propagate(edge_index, x=x)
        out = torch.zeros(x.size(0), 4, dtype=x.dtype, device=x.device)
        for k in range(NUM_KINDS):
            ids = (types == k).nonzero().view(-1)
            out.index_copy_(0, ids, self.maps[k](torch.index_select(h, 0, ids)).relu())
        return out


class OfCubes(Typed):
    """Rows of three dimensions; what is picked goes through dropout."""

    def forward(self, x, edge_index, types):
        h = self.propagate(edge_index, x=x).view(-1, 2, 3)
        out = torch.zeros_like(h)
        for k in range(NUM_KINDS):
            ids = torch.where(types == k)[0]
            out[ids] = F.dropout(h[ids], 0.5, self.training) * (k + self.scale[:3])
        return out.flatten(1)


class Twice(Typed):
    """The same rows are picked twice, and nothing is written."""

    def forward(self, x, edge_index, types):
        parts = []
        for k in range(NUM_KINDS):
            ids = (types == k).nonzero().view(-1)
            parts.append(self.maps[k](x[ids]) * x.index_select(0, ids)[:, :4])
        return self.propagate(edge_index, x=torch.cat(parts))


class Normed(Typed):
    """A normalization per kind, which counts on."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm1d(6) for _ in range(NUM_KINDS)]).double()

    def forward(self, x, edge_index, types):
        out = torch.empty_like(x)
        for k in range(NUM_KINDS):
            out[types == k] = self.norms[k](x[types == k])
        return self.propagate(edge_index, x=out)


class AfterTheSum(Typed):
    """In ``update``, by a last dimension that is given from the end, with a mask beside other indices."""

    def forward(self, x, edge_index, types):
        return self.propagate(edge_index, x=x, types=types)

    def update(self, out, types):
        new = out.new_zeros(out.size(0), 4)
        for k in range(NUM_KINDS):
            rows = self.maps[k](out[types == k, :]) + out[types == k, 1:5]
            new.index_copy_(-2, (types == k).nonzero().view(-1), rows)
        return new


# --- what may not be joined -------------------------------------------------------------------------------------


class WritesRows(Typed):
    """Rows that were picked are written to."""

    def forward(self, x, edge_index, types):
        h = self.propagate(edge_index, x=x)
        first, second, third = [h[types == k] for k in range(NUM_KINDS)]
        first.mul_(2)
        return torch.cat([first, second, F.relu(third, inplace=True)])


class WritesSource(Typed):
    """So is what they are picked from, before the last."""

    def forward(self, x, edge_index, types):
        h, total = self.propagate(edge_index, x=x), 0
        for k in range(NUM_KINDS):
            total = total + h[types == k].sum(0)
            h[:, 0] = total[0]
        return h * total


class WritesAlias(Typed):
    """Or through a view of it."""

    def forward(self, x, edge_index, types):
        h, total = self.propagate(edge_index, x=x) * 1.0, 0
        view = h.view(6, -1)
        for k in range(NUM_KINDS):
            total = total + h[types == k].sum(0)
            view.mul_(1.5)
        return h * total


class WritesLazily(Typed):
    """Or with values of edges that are computed when they are read; of three rows of edges."""

    def forward(self, x, edge_index, types):
        values = self.edge_updater(edge_index, x=x)
        ends = torch.cat([x[edge_index[0]], x[edge_index[1]]])
        ids = torch.arange(edge_index.size(1), device=x.device)
        first, second = ends[ids], ends[ids + edge_index.size(1)]
        first.add_(values)
        return self.propagate(edge_index, x=x) * (first * second).sum(0)

    def edge_update(self, x_i, x_j):
        return x_i * x_j


class WritesRunningMean(Typed):
    """Or through a normalization that keeps what is picked from."""

    def __init__(self):
        super().__init__()
        self.running = nn.BatchNorm1d(6).double()

    def forward(self, x, edge_index, types):
        kinds = types[:6].remainder(2)
        first = self.running.running_mean[kinds == 0].sum()
        y = self.running(x)
        return self.propagate(edge_index, x=y) * first + self.running.running_mean[kinds == 1].sum()


class Returned(Typed):
    """Rows are handed out."""

    def forward(self, x, edge_index, types):
        h = self.propagate(edge_index, x=x)
        parts = [h[types == k] for k in range(NUM_KINDS)]
        return h, parts[1], parts[0].view(-1)


class ReadsBetween(Typed):
    """What is written is read before all of it is."""

    def forward(self, x, edge_index, types):
        out = torch.zeros_like(x)
        for k in range(NUM_KINDS):
            out[types == k] = x[types == k] * self.scale + out.sum(0)
        return self.propagate(edge_index, x=out)


class ReadsAlias(Typed):
    """Or through a view of it."""

    def forward(self, x, edge_index, types):
        out = torch.zeros_like(x)
        view, totals = out.view(-1), []
        for k in range(NUM_KINDS):
            out[types == k] = x[types == k] * self.scale
            totals.append(view.sum())
        return self.propagate(edge_index, x=out) * totals[0] + totals[1]


class WritesWritten(Typed):
    """Rows are written to once they were copied."""

    def forward(self, x, edge_index, types):
        out, parts = torch.zeros_like(x), []
        for k in range(NUM_KINDS):
            rows = x[types == k] * self.scale
            out[types == k] = rows
            parts.append(rows.sub_(1).sum(0))
        return self.propagate(edge_index, x=out), torch.stack(parts)


class Some(Typed):
    """Not all kinds are there, and all others are zero."""

    def forward(self, x, edge_index, types):
        out = torch.ones_like(x)
        for k in range(NUM_KINDS - 1):
            out[types == k] = x[types == k] * self.scale
        return self.propagate(edge_index, x=out)


class Overlaps(Typed):
    """Rows that are written twice, and others never."""

    def forward(self, x, edge_index, types):
        out = torch.zeros_like(x)
        for k in range(NUM_KINDS):
            out[types <= k] = x[types <= k] * self.scale + k
        return self.propagate(edge_index, x=out)


class Overwrites(Typed):
    """All rows are written twice."""

    def forward(self, x, edge_index, types):
        out, ids = torch.zeros_like(x), [(types == k).nonzero().view(-1) for k in range(NUM_KINDS)]
        for k in range(2 * NUM_KINDS):
            out[ids[k % NUM_KINDS]] = x[ids[k % NUM_KINDS]] * self.scale + k
        return self.propagate(edge_index, x=out)


class FromTheEnd(Typed):
    """Positions from the end."""

    def forward(self, x, edge_index, types):
        out = torch.zeros_like(x)
        for k in range(NUM_KINDS):
            ids = (types == k).nonzero().view(-1) - types.size(0)
            out[ids] = x[ids] * self.scale + k
        return self.propagate(edge_index, x=out)


class Broadcasts(Typed):
    """One row, or one number, for all of a kind."""

    def forward(self, x, edge_index, types):
        out = torch.zeros_like(x)
        out[types == 0] = x.sum(0)
        out[types == 1] = 0.5
        out[types == 2, 1:] = x[types == 2, 1:] * self.scale[1:]
        out[:, 3] = x[:, 2]
        return self.propagate(edge_index, x=out)


class IntoGiven(Typed):
    """Rows of something that has more than these."""

    def forward(self, x, edge_index, types):
        out = x * 1.0
        for k in range(NUM_KINDS):
            out[types == k] = x[types == k] * self.scale
        return self.propagate(edge_index, x=out)


class Transposed(Typed):
    """Into what lies in another order: as torch does it, in that order."""

    def forward(self, x, edge_index, types):
        out = torch.zeros(6, x.size(0), dtype=x.dtype, device=x.device).t()
        for k in range(NUM_KINDS):
            out[types == k] = x[types == k] * self.scale
        return self.propagate(edge_index, x=out).view(-1, 6)


class OneWrite(Typed):
    """Of one pick and one write there is nothing to join."""

    def forward(self, x, edge_index, types):
        out = torch.zeros_like(x)
        out[types == 1] = x[types == 1] * self.scale
        return self.propagate(edge_index, x=out)


JOINED = {Typed: 3, ByPosition: 2, OfCubes: 2, Twice: 1, Normed: 1, AfterTheSum: 1, IntoGiven: 1, ReadsBetween: 1,
          ReadsAlias: 1, WritesWritten: 1, Transposed: 1, Overwrites: 1}
SEPARATE = [WritesRows, WritesSource, WritesAlias, WritesLazily, WritesRunningMean, Returned, Some, Overlaps,
            FromTheEnd, Broadcasts, OneWrite]


@pytest.fixture
def permuted(monkeypatch):
    """The shapes of what is permuted."""
    seen, permute = [], joined._apply_permute

    def noted(x, *orders):
        seen.append(x.shape)
        return permute(x, *orders)

    monkeypatch.setattr(joined, "_apply_permute", noted)
    return seen


def fused(kind):
    theirs, ours = kind(), pfg.convert(kind())
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def results(layer, seed, edges, *args):
    x = features(seed).requires_grad_()
    torch.manual_seed(seed)
    out = layer(x, edges, *args)
    outs = out if isinstance(out, tuple) else (out,)
    total = sum(one.square().sum() for one in outs if one.requires_grad)
    return [*outs, *layer.buffers(), *torch.autograd.grad(total, [x, *layer.parameters()], allow_unused=True)]


def same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("kind", [*JOINED, *SEPARATE])
def test_rows_by_kind(kind, is_training, permuted, hits):
    ours, theirs = (layer.train(is_training) for layer in fused(kind))
    for seed in range(NUM_CALLS):
        permuted.clear()
        same(results(ours, seed, EDGES, TYPES), results(theirs, seed, EDGES, TYPES))
    assert hits
    assert len(permuted) == JOINED.get(kind, 0)


@pytest.mark.parametrize("kind", [Typed, ByPosition, Twice])
def test_other_kinds(kind, permuted):
    """Other tensors, some written to, with kinds of which there are none."""
    ours, theirs = fused(kind)
    types, zeros = TYPES.clone(), torch.zeros_like(TYPES)
    for _ in range(2):
        for given in (types, TYPES.flip(0), zeros, types):
            for seed in range(NUM_CALLS):
                same(results(ours, seed, EDGES, given), results(theirs, seed, EDGES, given.clone()))
        types[:4] = 1
    assert permuted


def test_gradients_of_gradients_and_many_at_once():
    order = torch.randperm(12)
    inverse, x = order.argsort(), features().requires_grad_()

    def permuted(x):
        parts = joined._pick([5, 0, 7], x, order, inverse)
        return joined._put(order, inverse, [part * part for part in parts]), *parts

    assert torch.autograd.gradcheck(permuted, x, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(permuted, x)
    torch.testing.assert_close(permuted(x), (x * x, *x[order].split([5, 0, 7])))


def test_without_gradients_and_in_inference(permuted, hits):
    """One after another; what one keeps is of use to the others."""
    ours, theirs = fused(Typed)
    for context in (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode):
        for seed in range(NUM_CALLS):
            with context():
                torch.testing.assert_close(ours(features(seed), EDGES, TYPES), theirs(features(seed), EDGES, TYPES))
            if context is torch.enable_grad:
                same(results(ours, seed, EDGES, TYPES), results(theirs, seed, EDGES, TYPES))
    assert permuted and hits


@pytest.mark.parametrize("is_pair", [False, True])
def test_maps_per_degree(is_pair, permuted, hits):
    """PyG's MFConv; of a pair of features, destinations are picked by their own number."""
    edges = torch.stack([EDGES[0], EDGES[1] % 7]) if is_pair else EDGES
    theirs, ours = pyg_nn.MFConv(6, 4, 3).double(), fused_nn.MFConv(6, 4, 3).double()
    ours.load_state_dict(theirs.state_dict())
    for seed in range(NUM_CALLS):
        found = []
        permuted.clear()
        for layer in (ours, theirs):
            x = features(seed).requires_grad_()
            given = (x, x[:7] * 2) if is_pair else x
            out = layer(given, edges)
            found.append([out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])])
        same(*found)
    assert hits and len(permuted) == 3


class WritesGiven(Typed):
    """Something that is given, and may be what is picked from."""

    def forward(self, x, edge_index, types, other):
        first = x[types == 0]
        other.mul_(2)
        return self.propagate(edge_index, x=torch.cat([first, x[types == 1], x[types == 2]]))


class WritesGivenLater(Typed):
    """Or what was written."""

    def forward(self, x, edge_index, types, other):
        out = torch.zeros_like(x)
        for k in range(NUM_KINDS):
            out[types == k] = x[4 * k:4 * k + 4] if k else x[8:12]
            other.mul_(2)
        return self.propagate(edge_index, x=out)


@pytest.mark.parametrize("kind", [WritesGiven, WritesGivenLater])
def test_arguments_that_come_to_be_one(kind, hits):
    ours, theirs = fused(kind)
    types = torch.arange(12) % 3
    for seed in range(2 * NUM_CALLS):
        found = []
        for layer in (ours, theirs):
            x = features(seed)
            found.append([layer(x, EDGES, types, features(seed + 1) if seed < NUM_CALLS else x.view(-1))])
        same(*found)
    assert hits


def test_a_new_tensor_with_gradients(hits):
    """To which nobody may write but where there are none."""
    class Leaf(Typed):
        def forward(self, x, edge_index, types):
            out = torch.zeros(x.size(0), 6, dtype=x.dtype, device=x.device, requires_grad=True)
            for k in range(NUM_KINDS):
                out[types == k] = self.propagate(edge_index, x=x)[types == k]
            return out

    ours, theirs = fused(Leaf)
    for seed in range(NUM_CALLS):
        with torch.no_grad():
            found = [layer(features(seed), EDGES, TYPES) for layer in (ours, theirs)]
        torch.testing.assert_close(*found)
        assert all(out.requires_grad for out in found)
    assert hits


def test_a_mask_that_is_written_to_between_two_picks():
    """Torch takes no gradients of that."""
    class Masked(Typed):
        def forward(self, x, edge_index, types):
            mask = types == 0
            first = x[mask] * self.scale
            mask[0] = False
            return self.propagate(edge_index, x=torch.cat([first, x[mask], x])[:12])

    layer = pfg.convert(Masked())
    for seed in range(NUM_CALLS):
        x = features(seed).requires_grad_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            layer(x, EDGES, TYPES).sum().backward()


def test_tensors_without_numbers():
    class Apart(Typed):
        def forward(self, x, edge_index, types):
            return torch.cat([x[types] * 2, x[types + 3]])

    layer, theirs = fused(Apart)
    for _ in range(NUM_CALLS):
        x, types = torch.empty(6, 6, device="meta"), torch.empty(3, dtype=torch.int64, device="meta")
        assert layer(x, EDGES, types).shape == theirs(x, EDGES, types).shape


def test_layers_share_one_permutation():
    """Which is gone with the edges, and all else that was kept of them is what is read."""
    kept = []
    layers = [fused_nn.MFConv(6, 6, 3).double() for _ in range(2)]
    edges = EDGES.clone()
    permute = joined._apply_permute

    def noted(x, *orders):
        kept.append(orders)
        return permute(x, *orders)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joined, "_apply_permute", noted)
        for layer in layers:
            for seed in range(NUM_CALLS):
                kept.clear()
                layer(features(seed), edges)
            assert len(kept) == 3
        first = [t.data_ptr() for t in kept[0]]
        kept.clear()
        layers[0](features(), edges)
        assert [t.data_ptr() for t in kept[0]] == first
    refs = [weakref.ref(t) for t in kept.pop()]
    kept.clear()
    assert all(ref() is not None for ref in refs)
    del edges
    assert not any(ref() is not None for ref in refs)


@pytest.mark.gpu
def test_kinds_on_the_host(permuted, hits):
    """Torch takes masks of the host for rows on a GPU."""
    ours, theirs = (layer.to("cuda") for layer in fused(Typed))
    edges = EDGES.cuda()
    for seed in range(NUM_CALLS):
        x = features(seed).cuda()
        torch.testing.assert_close(ours(x, edges, TYPES), theirs(x, edges, TYPES))
    assert hits and permuted


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Typed, ByPosition, OfCubes])
def test_steps_are_captured(kind, dtype):
    """Though PyG's wait for the GPU at each mask."""
    ours, theirs = (layer.to("cuda", dtype).eval() for layer in fused(kind))
    types, edges = torch.randint(3, (3000,), device="cuda"), torch.randint(3000, (2, 9000), device="cuda")
    x = torch.randn(3000, 6, device="cuda", dtype=dtype)

    def step():
        ours.zero_grad()
        loss = ours(x, edges, types).square().mean()
        loss.backward()
        return loss

    run = pfg.capture(step)
    for _ in range(6):
        loss = run()
    assert run.is_recorded
    expected = theirs(x, edges, types).square().mean()
    expected.backward()
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 3e-2, "atol": 3e-2}
    torch.testing.assert_close(loss, expected, **close)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, **close)
