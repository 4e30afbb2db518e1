"""Every conv layer of PyG: which have a fused class here and what it computes, and why the others have none.

The classes of :mod:`pyg_fullgraph.nn` are made from :data:`FUSED`; the coverage page is written from these tables.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["FUSED", "HAS_MODES", "IN_TRANSFORM", "OPTIONS", "PARTS", "PLAIN", "RECORDED", "UNSEEN"]

#: Why calls of any layer are PyG's, for a time.
RECORDED, HAS_MODES, IN_TRANSFORM = \
    "operations are recorded", "a TorchFunctionMode is at work", "a transform of torch.func is at work"

#: Name of a layer -> what it computes for node i. Sums and other reductions are over the edges j -> i.
FUSED: Mapping[str, str] = {
    "AGNNConv": "sum_j softmax_j(beta cos(x_i, x_j)) x_j",
    "APPNP": "K times: (1 - alpha) sum_j w_ji x_j + alpha h_i",
    "ARMAConv": "T times for each of K stacks: act(W sum_j w_ji x_j + V x0_i)",
    "CGConv": "x_i + sum_j sigmoid(W_f z) softplus(W_s z) with z = [x_i, x_j, e_ji]",
    "ChebConv": "sum_k W_k T_k(L) x, one pass over the edges for each power of the Laplacian",
    "ClusterGCNConv": "W_1 sum_j w_ji x_j + W_2 x_i with mean weights and a scaled diagonal",
    "DNAConv": "sum_j w_ji attention over the earlier layers of j, asked by i",
    "DynamicEdgeConv": "max_j nn(x_i, x_j - x_i) over the k nearest neighbours in feature space",
    "EGConv": "sum_h sum_aggr w_i[h, aggr] aggr_j W_h x_j",
    "EdgeConv": "max_j nn(x_i, x_j - x_i); the first layer of nn runs once per vertex",
    "FAConv": "eps x0_i + sum_j w_ji tanh(a_j + a_i) x_j",
    "FastRGCNConv": "W x_i + sum_j W_r x_j / |N_r(i)| over all relations r at once",
    "FeaStConv": "mean_j sum_h softmax_h(u_h (x_j - x_i) + c_h) W_h x_j",
    "FiLMConv": "sum_r mean_j act(gamma_i W_r x_j + beta_i)",
    "GATConv": "sum_j softmax_j(leaky_relu(a_j + a_i)) W x_j for all heads",
    "GATv2Conv": "sum_j softmax_j(a . leaky_relu(W_l x_j + W_r x_i)) W_l x_j for all heads",
    "GCN2Conv": "the mix of sum_j w_ji x_j and x0_i, times (1 - beta) I + beta W",
    "GCNConv": "sum_j deg_j^-1/2 w_ji deg_i^-1/2 W x_j",
    "GENConv": "mlp(x_i + softmax-weighted sum_j of relu(x_j + e_ji) + eps, per feature)",
    "GINConv": "nn((1 + eps) x_i + sum_j x_j)",
    "GINEConv": "nn((1 + eps) x_i + sum_j relu(x_j + e_ji))",
    "GMMConv": "W x_i + mean_j of a mixture of Gaussians over pseudo-coordinates times W_k x_j",
    "GatedGraphConv": "L times: gru(sum_j w_ji W x_j, x_i)",
    "GeneralConv": "W_s x_i + sum_j W_m x_j, with edge features and attention where asked for",
    "GraphConv": "W_1 x_i + W_2 sum_j w_ji x_j",
    "GravNetConv": "[mean_j, max_j] exp(-10 d_ji^2) h_j over the k nearest neighbours in a learned space",
    "HANConv": "attention within each metapath, then over metapaths",
    "HEATConv": "sum_j softmax_j(leaky_relu(att [x_i, x_j, e_ji])) W [x_j, e_ji] with node and edge types",
    "HGTConv": "sum_j softmax_j(q_i . k_j p_r / sqrt d) v_j over all relations of a heterogeneous graph",
    "HypergraphConv": "two products: from nodes to hyperedges and back",
    "LEConv": "W_3 x_i + sum_j w_ji (W_1 x_j - W_2 x_i)",
    "LGConv": "sum_j deg_j^-1/2 w_ji deg_i^-1/2 x_j",
    "MFConv": "W_1^(deg i) sum_j x_j + W_2^(deg i) x_i",
    "MixHopConv": "powers of the normalized adjacency, concatenated",
    "NNConv": "W x_i + sum_j x_j nn(e_ji) with a matrix nn(e_ji) per edge",
    "PANConv": "a learned polynomial of the adjacency, given as a sparse matrix",
    "PDNConv": "sum_j w_ji W x_j with weights from an MLP of edge features",
    "PNAConv": "W [x_i, mean_j, max_j, min_j, std_j ... with degree scalers] of pre_nn(x_i, x_j)",
    "PPFConv": "max_j local_nn(x_j, lengths and angles between two points with normals)",
    "PointGNNConv": "x_i + mlp_g(max_j mlp_f(p_j - p_i + mlp_h(x_i), x_j))",
    "PointNetConv": "global_nn(max_j local_nn(x_j, p_j - p_i))",
    "PointTransformerConv": "sum_j softmax_j(a_i - a_j + d_ji) (W x_j + d_ji), d_ji = pos_nn(p_i - p_j), per feature",
    "RGATConv": "attention with W_r x_i and W_r x_j of the edge's relation r",
    "RGCNConv": "W x_i + sum_r mean_j W_r x_j",
    "ResGatedGraphConv": "W x_i + sum_j sigmoid(k_i + q_j) v_j",
    "SAGEConv": "W_1 x_i + W_2 mean_j x_j, or another aggregation",
    "SGConv": "W times the K-th power of the normalized adjacency times x",
    "SSGConv": "W times the mean of the first K powers of the normalized adjacency times x",
    "SignedConv": "means over the positive and the negative neighbours",
    "SimpleConv": "sum_j w_ji x_j or another aggregation, without parameters",
    "SuperGATConv": "sum_j softmax_j of supervised attention times W x_j",
    "TAGConv": "sum_k W_k A^k x",
    "TransformerConv": "W x_i + sum_j softmax_j(q_i . k_j / sqrt d) v_j for all heads",
    "WLConvContinuous": "(x_i + sum_j w_ji x_j / deg_i) / 2",
}

#: Layers that pass no messages themselves -> where theirs are passed. ``convert`` fuses those parts.
PARTS: Mapping[str, str] = {
    "AntiSymmetricConv": "its phi is any conv",
    "DirGNNConv": "a conv for each direction of the edges",
    "GPSConv": "its local part is any conv; global attention has no edges",
    "HeteroConv": "a conv for each edge type",
}

#: Layers without a fused class -> why.
PLAIN: Mapping[str, str] = {
    "CuGraphGATConv": "runs NVIDIA's pylibcugraphops",
    "CuGraphRGCNConv": "runs NVIDIA's pylibcugraphops",
    "CuGraphSAGEConv": "runs NVIDIA's pylibcugraphops",
    "FusedGATConv": "runs the kernels of dgNN, and takes a graph prepared for them",
    "MeshCNNConv": "reads four edges in a row at once, so that no edge is computed by itself",
    "SplineConv": "calls pyg-lib's spline_weighting, whose formula cannot be seen",
    "WLConv": "hashes the colours of neighbours on the host",
    "XConv": "has no edge phase: dense layers on the k nearest neighbours of each point",
}

#: Those of :data:`PLAIN` that call no ``propagate``, so that nothing counts them when they run.
UNSEEN = ("CuGraphGATConv", "CuGraphRGCNConv", "CuGraphSAGEConv", "FusedGATConv", "WLConv", "XConv")

#: What makes a layer of :data:`FUSED` run plain all the same -> why.
OPTIONS: Mapping[str, str] = {
    "RGATConv(attention_mechanism='within-relation')": "picks the edges of each relation by a mask, inside message",
    "aggr='median', 'quantile', 'lstm', 'gru', 'sort' and other aggregations that read the edges of a node in an order":
        "not made of sums and extrema",
    "BatchNorm in a network that message applies, while training": "one edge depends on all others",
    "hooks on message, aggregate, edge_update or a module that they call": "a hook wants the values of all edges",
    "explain": "PyG's generic propagate does it",
    "EGConv on a sparse matrix": "PyG's product with the matrix is not what its message and aggregate compute",
    "GINConv, MFConv, RGCNConv, SAGEConv, SignedConv on a torch.sparse matrix":
        "PyG multiplies by the matrix's values there, which message does not see",
    "flow='target_to_source' with pairs of different sizes": "PyG indexes either side by the other's ids",
}
