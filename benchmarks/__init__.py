"""Speed and memory, measured: ``python -m benchmarks.run``. Result rows live in ``benchmarks/results``."""
