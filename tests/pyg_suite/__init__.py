"""PyG's own tests, run with this package's layers in the place of PyG's.

    python -m tests.pyg_suite --checkout PATH            # or: make test-pyg PYG=PATH
``PATH`` is a checkout of PyG of the installed version, or its ``test`` folder's parent; nothing of it is kept here.

PyG's tests hardly look at values, so every call that they make of one of our layers is made again on PyG's class with
the same weights, inputs, random numbers and mode, and results, gradients and buffers are compared.
"""
