"""Speed and memory, measured: ``python -m benchmarks.run``. Result rows live in ``benchmarks/results``."""

import os

# Threads that spin at a barrier while another program has their core turn 12 ms into 270 on a machine that is shared;
# read when torch loads, so it has to stand here.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
