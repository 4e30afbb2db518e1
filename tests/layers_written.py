"""Makes each layer of the tests once: PyG then writes the `propagate` of its class, which takes longer than most tests.

Imported by the server that processes of `ranks` are forked from.
"""

from layers import LAYERS

import pyg_fullgraph.nn as fused_nn

for layer in LAYERS.values():
    layer.build(fused_nn)
