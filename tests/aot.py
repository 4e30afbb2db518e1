"""Compiling generated kernels for sm_90 without a GPU; run as a script, with TRITON_INTERPRET unset.

``python -m tests.aot [CASE[:DTYPE[:INDEX]] ...]`` compiles the kernels of ``tests.programs`` (all of them, fp32 and
i32 if not told otherwise) and prints one JSON object: kernel -> registers, spilled bytes and shared memory. With
``--narrow`` nothing is compiled: kernel -> lines of Triton's IR about float32, of which a kernel of float64 has none. A
process of its own, because Triton decides at import whether it interprets.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import triton
import triton.language as tl
from triton._C.libtriton import ir as triton_ir
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.compiler import ASTSource, make_backend

from pyg_fullgraph.autograd import EdgePhase
from pyg_fullgraph.execution import MIN_BLOCK_WORK, kernel_of, row_kernels
from pyg_fullgraph.saga.codegen import KernelSource
from pyg_fullgraph.saga.ir import EdgeProgram
from pyg_fullgraph.saga.passes import split
from pyg_fullgraph.saga.plans import KERNELS, Plan, Sweep, is_staged
from pyg_fullgraph.saga.rows import RowsSource, generate
from tests.programs import CASES, MORE_CASES, ROW_CASES, WIDE_CASES
from triton_kernels import launch

TARGET = GPUTarget("cuda", 90, 32)


def plans_of(program: EdgeProgram) -> list[Plan]:
    """The plans of a training step of ``program``."""
    phase = EdgePhase(split(program).stages[0].core)
    needs = tuple(not n.is_integer for n in phase.inputs)
    return [phase.forward_plan(KERNELS, False), phase.forward_plan(KERNELS, True), phase.backward_plan(KERNELS, needs)]


def sweeps_of(plans: list[Plan]) -> list[Sweep]:
    """Every sweep of ``plans``."""
    return list({s.digest: s for plan in plans for s in plan.sweeps}.values())


def rows_of(plans: list[Plan], is_narrow: bool) -> list[RowsSource]:
    """Every kernel of vertex steps of ``plans``."""
    found = [k for p in plans for b, _ in p.batches if not isinstance(b, Sweep) for _, k in row_kernels(b, is_narrow)]
    return list({k.source: k for k in (*found, *(k for p in plans for _, k in row_kernels(p.last, False)))}.values())


#: Cases whose kernels are also compiled as they add to what tiles of edges before left.
IN_TILES = ("gat", "many-outputs", "sage-max", "gat-edge")


def compile_kernel(kernel: KernelSource, name: str, dtype: str = "fp32", index: str = "i32", adds: bool = False,
                   report: Callable[[ASTSource, int], Any] | None = None) -> Any:
    """Registers, spilled bytes and shared memory of one kernel on sm_90, or what ``report`` says of it."""
    function = getattr(launch.load(kernel.source), name)
    signature: dict[str, str] = {}
    buffers = {b.name: b for b in (*kernel.inputs, *kernel.outputs)}
    stat = "fp64" if dtype == "fp64" else "fp32"
    for arg in function.arg_names:
        buffer = buffers.get(arg.removesuffix("_ptr").removesuffix("_stride"))
        if arg.endswith("_stride") or arg in ("num_pieces", "num_split", "num_workers", "num_edges"):
            signature[arg] = "i32"
        elif buffer is not None:
            is_seed = buffer.integer and not buffer.node.is_row
            kept = stat if is_staged(buffer.node) else dtype
            signature[arg] = "*i64" if is_seed else f"*{index}" if buffer.integer else f"*{kept}"
        elif arg.startswith(("ws", "old")):
            is_index = kernel.carries[int(arg.removeprefix("ws").removeprefix("old")[:-4])][1]
            signature[arg] = f"*{index}" if is_index else f"*{stat}"
        elif arg == "piece_slot_ptr" or arg.endswith("_ptr"):
            signature[arg] = "*i32" if arg == "piece_slot_ptr" else f"*{index}"
    constants: dict[str, Any] = {
        "BLOCK_E": kernel.block_e, "HAS_EID": True, "HAS_IDS": True, "HAS_PLACES": True, "ADDS": adds,
        "FLOAT": tl.float64 if dtype == "fp64" else tl.float32,
        "ID": tl.int32 if index == "i32" else tl.int64, "UNSET": 2**31 - 1 if index == "i32" else 2**63 - 1}
    return (report or _compile)(_source(function, signature, constants), kernel.num_warps(kernel.block_e))


def compile_rows(kernel: RowsSource, dtype: str = "fp32", index: str = "i32",
                 report: Callable[[ASTSource, int], Any] | None = None) -> Any:
    """The same of a kernel of vertex steps, whose inputs are all stored in ``dtype``."""
    function = getattr(launch.load(kernel.source), kernel.name)
    stat = "fp64" if dtype == "fp64" else "fp32"
    signature = {"num_rows": "i32", "num_blocks": "i32", **{f"{b.name}_stride": "i32" for b in kernel.inputs},
                 **{f"{b.name}_ptr": f"*{index if b.integer else dtype}" for b in kernel.inputs},
                 **{f"{b.name}_ptr": f"*{stat}" for b in kernel.outputs}}
    floats = tl.float64 if dtype == "fp64" else tl.float32
    even = [f"{b.name}_stride" for b in kernel.inputs if b.node.numel % 16 == 0]  # Triton sees it at a launch
    source = _source(function, signature, {"BLOCK_E": kernel.block_r, "FLOAT": floats}, even)
    return (report or _compile)(source, kernel.num_warps)


def _source(function: Any, signature: dict[str, str], constants: dict[str, Any],
            even: Sequence[str] = ()) -> ASTSource:
    constants = {k: v for k, v in constants.items() if k in function.arg_names}
    names = function.arg_names
    return ASTSource(fn=function, signature={a: "constexpr" if a in constants else signature[a] for a in names},
                     constexprs={(names.index(k),): v for k, v in constants.items()},
                     attrs={(names.index(a),): [["tt.divisibility", 16]] for a in names
                            if a.endswith("_ptr") or a in even})


def _compile(source: ASTSource, num_warps: int) -> dict[str, int]:
    made = triton.compile(source, target=TARGET, options={"num_warps": num_warps})
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as ptx:
        ptx.write(made.asm["ptx"])
        ptx.flush()
        report = subprocess.run([nvidia.get_ptxas(90).path, "-v", "--gpu-name=sm_90a", ptx.name, "-o", "/dev/null"],
                                capture_output=True, text=True, check=True).stderr

    def number(pattern: str) -> int:
        found = re.search(pattern, report)
        assert found is not None, report
        return int(found[1])

    return {"registers": number(r"Used (\d+) registers"), "spill_bytes": number(r"(\d+) bytes spill stores"),
            "shared_bytes": made.metadata.shared}


def _narrow_lines(source: ASTSource, num_warps: int) -> list[str]:
    """Lines about float32, before any pass of Triton's folds a constant and hides that it was rounded."""
    backend = make_backend(TARGET)
    options, context = backend.parse_options({"num_warps": num_warps}), triton_ir.context()
    triton_ir.load_dialects(context)
    backend.load_dialects(context)
    made = source.make_ir(TARGET, options, backend.get_codegen_implementation(options), backend.get_module_map(),
                          context)
    return re.findall(r"^.*\b(?:\d+x)*f32\b.*$", str(made), re.MULTILINE)


def narrow(names: list[str]) -> dict[str, list[str]]:
    """Lines about float32 of the kernels of cases in float64."""
    found: dict[str, list[str]] = {}
    report: Any = _narrow_lines
    for name in names or CASES | MORE_CASES:
        plans = plans_of((CASES | MORE_CASES)[name]())
        for kernel in rows_of(plans, False):
            found[f"{name}/{kernel.name}"] = compile_rows(kernel, "fp64", "i64", report)
        for sweep in sweeps_of(plans):
            kernel = kernel_of(sweep, 2)
            if isinstance(kernel, KernelSource):
                for part in (kernel.name, *([kernel.merge_name] if kernel.has_merge else [])):
                    found[f"{name}/{part}"] = compile_kernel(kernel, part, "fp64", "i64", report=report)
    return found


def main(names: list[str]) -> None:
    if names[:1] == ["--narrow"]:
        print(json.dumps(narrow(names[1:]), indent=1))
        return
    results: dict[str, Any] = {}
    cases = CASES | MORE_CASES | WIDE_CASES
    for name in names or cases:
        case, dtype, index = [*name.split(":"), *("", "fp32", "i32")[name.count(":") + 1:]]
        lanes = {"fp64": 2, "fp32": 4}.get(dtype, 8)
        if case in ROW_CASES:
            kernel = generate(ROW_CASES[case]())
            results[f"{name}/{kernel.name}"] = compile_rows(kernel, dtype, index)
            continue
        plans = plans_of(cases[case]())
        for kernel in rows_of(plans, lanes == 8):
            results[f"{name}/{kernel.name}"] = compile_rows(kernel, dtype, index)
        for k, sweep in enumerate(sweeps_of(plans)):
            kernel = kernel_of(sweep, lanes)
            if not isinstance(kernel, KernelSource):
                results[f"{name}/{k}"] = {"refused": kernel.reasons}
                continue
            kernels = [kernel]
            if kernel.product_work >= MIN_BLOCK_WORK and not kernel.takes_blocks:
                in_blocks = kernel_of(sweep, lanes, takes_blocks=True)
                assert isinstance(in_blocks, KernelSource), in_blocks
                kernels.append(in_blocks)
            for kernel in kernels:
                for part in (kernel.name, *([kernel.merge_name] if kernel.has_merge else [])):
                    results[f"{name}/{k}/{part}"] = compile_kernel(kernel, part, dtype, index)
                if case in IN_TILES and kernel.takes_tiles:
                    results[f"{name}/{k}/{kernel.name}_adds"] = compile_kernel(kernel, kernel.name, dtype, index, True)
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
