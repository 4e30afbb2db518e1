"""Compiling generated kernels for sm_90 without a GPU; run as a script, with TRITON_INTERPRET unset.

``python -m tests.aot [CASE[:DTYPE[:INDEX]] ...]`` compiles the kernels of ``tests.programs`` (all of them, fp32 and
i32 if not told otherwise) and prints one JSON object: kernel -> registers, spilled bytes, shared memory and more. With
``--narrow`` nothing is compiled: kernel -> lines of Triton's IR about float32, of which a kernel of float64 has none.
With ``--short`` neither: kernel -> lines that may not hold where tensors have more than 2**31 elements, and the same
without conversions of row ids. With ``--dense`` those of ``triton_kernels.dense`` for the widths N,K that follow,
with ``--dots`` those of ``triton_kernels.dots`` for heads and features H,C, with ``--columns`` that of
``triton_kernels.columns`` for widths, with ``--activation`` those of ``triton_kernels.activation`` for widths, with
``--row-products`` those of ``triton_kernels.row_products`` for I,K,J, and with ``--padding`` that of
``triton_kernels.padding``.
A process of its own, because Triton decides at import whether it interprets.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from triton._C.libtriton import ir as triton_ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource

from pyg_fullgraph.execution import row_kernels
from pyg_fullgraph.phases import EdgePhase
from pyg_fullgraph.saga.ir import Domain, EdgeProgram, Node
from pyg_fullgraph.saga.kernel_source import KernelSource, Pieces
from pyg_fullgraph.saga.passes import split
from pyg_fullgraph.saga.pipeline import Product
from pyg_fullgraph.saga.plans import KERNELS, Plan, Sweep, is_packed, is_staged
from pyg_fullgraph.saga.rows import RowsSource, generate
from pyg_fullgraph.selection import MIN_PIPELINE, SIDE_WORK, Piped, kernel_of, pipeline_on
from tests.programs import CASES, MORE_CASES, ROW_CASES, WIDE_CASES
from triton_kernels import activation, columns, dense, dense_hopper, dots, launch, padding, reference, row_products

TARGET = GPUTarget("cuda", 90, 32)


def plans_of(program: EdgeProgram, is_half: bool = False) -> list[Plan]:
    """The plans of a training step of ``program``, on graphs of few edges per vertex and of many, with rows multiplied
    before edges read them, without results, and of one in a first layer, whose features are given.

    Args:
        program: Of one stage.
        is_half: Whether results are stored in half precision.
    """
    stage = split(program).stages[0]
    found: list[Plan] = []
    ways: tuple[dict[str, Any], ...] = ({}, {"postpones": True}, {"max_scaled": 1 << 10}, {"recenters": True})
    for way in ways:
        phase = EdgePhase(stage.core, added=stage.added, **way)
        needs = tuple(not n.is_integer for n in phase.inputs)
        found += [phase.forward_plan(KERNELS, save, is_half) for save in (False, True)]
        found.append(phase.backward_plan(KERNELS, needs, is_half))
        of_first = tuple(n.domain == Domain.PARAM and need for n, need in zip(phase.inputs, needs, strict=True))
        if any(of_first) and not way:
            found.append(phase.backward_plan(KERNELS, of_first, is_half))
    return found


def sweeps_of(plans: list[Plan]) -> list[Sweep]:
    """Every sweep of ``plans``."""
    return list({s.digest: s for plan in plans for s in plan.sweeps}.values())


def rows_of(plans: list[Plan], is_narrow: bool) -> list[RowsSource]:
    """Every kernel of vertex steps of ``plans``."""
    batches, lanes = (b for p in plans for b, _ in p.batches if not isinstance(b, Sweep)), 8 if is_narrow else 4
    found = [k for b in batches for _, k in row_kernels(b, is_narrow, lanes)]
    return list({k.source: k for k in (*found, *(k for p in plans for _, k in row_kernels(p.last, False)))}.values())


def pipelines_of(plans: list[Plan], lanes: int) -> list[Piped]:
    """Every pipeline of ``plans``, over so many edges that there are some."""
    def piped(sweep: Sweep, across: Sweep | None = None) -> Piped | None:
        return pipeline_on(sweep, lanes, 1000, MIN_PIPELINE, across)

    steps = [(step, across) for plan in plans for step, across, _ in plan.together(
        lambda sweep: piped(sweep) is not None, lambda sweep, across: piped(sweep, across) is not None)]
    found = [piped(step, across) for step, across in steps if isinstance(step, Sweep)]
    return [p for p in found if p is not None]


#: Cases whose kernels are also compiled as they add to what tiles of edges before left, and as programs take several
#: pieces.
IN_TILES = ("gat", "many-outputs", "sage-max", "gat-edge", "gcn")


def compile_kernel(kernel: KernelSource, name: str, dtype: str = "fp32", index: str = "i32", adds: bool = False,
                   offset: tl.dtype = tl.int32, report: Callable[[ASTSource, int], Any] | None = None,
                   exact: Collection[Node] = ()) -> Any:
    """Registers, spilled bytes and shared memory of one kernel on sm_90, or what ``report`` says of it; inputs in
    ``exact`` are in the dtype of the arithmetic.
    """
    function = getattr(launch.load(kernel.source), name)
    signature: dict[str, str] = {}
    buffers = {b.name: b for b in (*kernel.inputs, *kernel.outputs, *kernel.added)}
    stat = "fp64" if dtype == "fp64" else "fp32"
    for arg in function.arg_names:
        buffer = buffers.get(arg.removesuffix("_ptr").removesuffix("_stride"))
        if arg.endswith(("_stride", "_edge", "_edges", "_short", "_piece")) or arg.startswith("num_"):
            signature[arg] = "i32"
        elif buffer is not None:
            is_seed = buffer.integer and not buffer.node.is_row
            is_made = is_staged(buffer.node) or is_packed(buffer.node) or buffer.node in exact
            kept = stat if is_made else dtype
            signature[arg] = "*i64" if is_seed else f"*{index}" if buffer.integer else f"*{kept}"
        elif arg.startswith(("ws", "old")):
            is_index = kernel.carries[int(arg.removeprefix("ws").removeprefix("old")[:-4])][1]
            signature[arg] = f"*{index}" if is_index else f"*{stat}"
        elif arg.endswith("_ptr"):
            signature[arg] = "*i32" if arg in ("piece_slot_ptr", "arrived_ptr") else f"*{index}"
    constants: dict[str, Any] = {
        "BLOCK_E": kernel.block_e, "OFFSET": offset, "HAS_EID": True, "HAS_IDS": True, "HAS_PLACES": True,
        "HAS_LOCALS": adds, "ADDS": adds, "MERGES": not adds,
        "FLOAT": tl.float64 if dtype == "fp64" else tl.float32,
        "ID": tl.int32 if index == "i32" else tl.int64, "UNSET": 2**31 - 1 if index == "i32" else 2**63 - 1}
    if report is None:  # what merges is told nothing
        report = partial(_compile, max_registers=kernel.max_registers if name == kernel.name else 0)
    return report(_source(function, signature, constants), kernel.num_warps(kernel.block_e))


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
            even: Sequence[str] = (), kind: type[ASTSource] = ASTSource) -> ASTSource:
    constants = {k: v for k, v in constants.items() if k in function.arg_names}
    names = function.arg_names
    varying = {p.name for p in function.params if p.do_not_specialize_on_alignment}
    return kind(fn=function, signature={a: "constexpr" if a in constants else signature[a] for a in names},
                constexprs={(names.index(k),): v for k, v in constants.items()},
                attrs={(names.index(a),): [["tt.divisibility", 16]] for a in names
                       if (a.endswith("_ptr") or a in even) and a not in constants and a not in varying})


def _compile(source: ASTSource, num_warps: int, num_stages: int = 3, max_registers: int = 0) -> dict[str, int]:
    knobs = triton.knobs
    with contextlib.redirect_stdout(io.StringIO()) as log, knobs.nvidia.scope(), knobs.compilation.scope():
        knobs.nvidia.dump_ptxas_log = knobs.compilation.always_compile = True
        made = triton.compile(source, target=TARGET, options={
            "num_warps": num_warps, "num_stages": num_stages, "maxnreg": max_registers or None, **launch.OPTIONS})

    def number(pattern: str) -> int:
        found = re.search(pattern, log.getvalue())
        assert found is not None, log.getvalue()
        return int(found[1])

    return {"registers": number(r"Used (\d+) registers"), "spill_bytes": number(r"(\d+) bytes spill stores"),
            "shared_bytes": made.metadata.shared, "wgmma": made.asm["ptx"].count("wgmma.mma_async"),
            "uneven_sums": _uneven_sums(made.asm["ptx"])}


def _uneven_sums(ptx: str) -> int:
    """Sums across lanes in which each lane fuses its own product with those of others, which were rounded."""
    found, made = 0, {}
    for name, operands in re.findall(r"^\s*(\w[\w.]*)\s+(%.*);$", ptx, re.MULTILINE):
        result, *given = (o.strip() for o in operands.split(","))
        if name.startswith("fma") and (other := made.get(given[2], ("", [])))[0].startswith("shfl"):
            product, factors = made.get(other[1][0], ("", []))
            found += product.startswith("mul") and set(factors) == set(given[:2])
        made[result] = name, given
    return found


def _made_ir(source: ASTSource, num_warps: int) -> str:
    """Triton's IR before any pass of Triton's, which may fold a constant, say, and hide that it was rounded."""
    backend = make_backend(TARGET)
    options, context = backend.parse_options({"num_warps": num_warps, **launch.OPTIONS}), triton_ir.context()
    triton_ir.load_dialects(context)
    backend.load_dialects(context)
    return str(source.make_ir(TARGET, options, backend.get_codegen_implementation(options), backend.get_module_map(),
                              context))


def _narrow_lines(source: ASTSource, num_warps: int) -> list[str]:
    """Lines about float32."""
    return re.findall(r"^.*\b(?:\d+x)*f32\b.*$", _made_ir(source, num_warps), re.MULTILINE)


def _short_lines(source: ASTSource, num_warps: int) -> list[str]:
    """Products in 32 bits of what comes from memory, such as ids, or of the distance of rows."""
    found: list[str] = []
    is_id: dict[str, bool] = {}

    def comes_from_memory(names: list[str]) -> bool:
        return any(is_id.get(n) or n.endswith("_stride") for n in names)

    for line in _made_ir(source, num_warps).splitlines():
        if re.search(r"= arith\.muli .*: (?:tensor<[\dx]*)?i32\b", line) and \
                comes_from_memory(re.findall(r"%\w+", line)[1:]):
            found.append(line.strip())
        # Of a loop: its counter, what is carried, and its results.
        for match in re.finditer(r"(%\w+)(?::\d+)? = (?=([^=]*))", line):
            is_id[match[1]] = "tt.load" in match[2] or comes_from_memory(re.findall(r"%\w+", match[2]))
    return found


def lines_of(names: list[str], report: Any, dtype: str, index: str) -> dict[str, list[str]]:
    """What ``report`` finds in the kernels of cases."""
    found: dict[str, list[str]] = {}
    for name in names or CASES | MORE_CASES:
        plans = plans_of((CASES | MORE_CASES)[name]())
        for kernel in rows_of(plans, False):
            found[f"{name}/{kernel.name}"] = compile_rows(kernel, dtype, index, report)
        for sweep in sweeps_of(plans):
            kernel = kernel_of(sweep, {"fp64": 2, "fp32": 4}[dtype])
            if isinstance(kernel, KernelSource):
                for part in (kernel.name, *([kernel.merge_name] if kernel.has_merge else [])):
                    found[f"{name}/{part}"] = compile_kernel(kernel, part, dtype, index, offset=tl.int64, report=report)
    return found


def without_conversions(name: str) -> list[list[str]]:
    """What :func:`_short_lines` finds in kernels of a case that leave ids as they are."""
    kernels = [kernel_of(sweep) for sweep in sweeps_of(plans_of(CASES[name]()))]
    sources = [dataclasses.replace(k, source=k.source.replace(".to(tl.int64)", "").replace(".to(OFFSET)", ""))
               for k in kernels if isinstance(k, KernelSource)]
    return [compile_kernel(k, k.name, report=_short_lines) for k in sources]


#: A kernel, its arguments, its constants and its warps.
_Taken = tuple[Any, Sequence[Any], Mapping[str, Any], int]


def compile_dense(num_out: int, num_in: int) -> dict[str, dict[str, int]]:
    """The kernels of products of features ``[M, num_in]`` and a weight ``[num_out, num_in]``, as a launch has them."""
    taken: list[_Taken] = []
    for module in (None, dense_hopper):
        with _taking(taken), mock.patch.object(dense, "_gluon", return_value=module):
            dense._product.cache_clear()
            dense._gradient.cache_clear()
            x, weight = torch.empty(1000, num_in), torch.empty(num_out, num_in)
            dense.product(x, weight, torch.empty(num_out))
            dense.product(x, weight, torch.empty(num_out), torch.empty(1000, num_out))
            dense.product(x, torch.empty(num_in, num_out).t(), torch.empty(num_out))
            dense.weight_gradient(torch.empty(1000, num_out), x, True)
    return _compile_taken(t for t in taken if t[0] is not columns.fold_kernel)


def compile_padding() -> dict[str, dict[str, int]]:
    """The kernel that puts zeros behind rows."""
    taken: list[_Taken] = []
    with _taking(taken):
        padding.pad(torch.empty(1000, 47), 48)
    return _compile_taken(taken)


def compile_row_products(*shape: int) -> dict[str, dict[str, int]]:
    """The kernel of products of matrices ``[I, K]`` and ``[K, J]``, and of both gradients."""
    num_rows, num_terms, num_columns = shape
    a, b, g = (torch.empty(1000, *size) for size in
               ((num_rows, num_terms), (num_terms, num_columns), (num_rows, num_columns)))
    found = {}
    for name, factors in {"product": (a, b), "gradient of a": (g, b.mT), "gradient of b": (a.mT, g)}.items():
        taken: list[_Taken] = []
        with _taking(taken):
            row_products.product(*factors)
        [found[name]] = _compile_taken(taken).values()
    return found


def compile_activation(num_features: int) -> dict[str, dict[str, int]]:
    """The kernels of each activation of features ``[N, num_features]`` with dropout, in float32 and float16."""
    found = {}
    for kind in reference.ACTIVATIONS:
        for dtype in (torch.float32, torch.float16):
            taken: list[_Taken] = []
            what, x, seed = reference.Activation(kind, 0.5, 0.5), torch.empty(1000, num_features, dtype=dtype), \
                torch.zeros(1, dtype=torch.int64)
            with _taking(taken):
                activation.activate(x, what, seed, None)
                activation.activate_backward(x, x, what, seed, None, dtype.itemsize == 2, True)
            compiled = _compile_taken(t for t in taken if t[0] is not columns.fold_kernel)
            found.update({f"{kind} {dtype} {name}": report for name, report in compiled.items()})
    return found


@contextlib.contextmanager
def _taking(taken: list[_Taken]) -> Iterator[None]:
    """Put what would be launched into ``taken``."""
    def record(start: launch.Launch, args: Sequence[Any], *kinds: Any) -> None:
        taken.append((start.kernel, [*start.fixed, *args, *start.last], start.constants, start.num_warps))

    with mock.patch.object(launch.Launch, "run", record):
        yield


def _compile_taken(taken: Iterable[_Taken]) -> dict[str, dict[str, int]]:
    found = {}
    for kernel, args, constants, num_warps in taken:
        names = [a for a in kernel.arg_names if a not in constants]
        given = dict(zip(names, args, strict=True))
        types = {torch.float32: "*fp32", torch.float16: "*fp16", torch.int64: "*i64"}
        signature = {a: types[v.dtype] if isinstance(v, torch.Tensor) else "i32" for a, v in given.items()}
        even = [a for a, v in given.items() if isinstance(v, int) and v % 16 == 0]
        fixed = {a: 1 for a, v in given.items() if isinstance(v, int) and v == 1}
        is_gluon = kernel.fn.__module__ == dense_hopper.__name__
        source = _source(kernel, signature, {**constants, **fixed}, even, GluonASTSource if is_gluon else ASTSource)
        name = "gluon " * is_gluon + kernel.__name__ + " added" * constants.get("HAS_ADD", False)
        name += " transposed" * constants.get("IS_TRANSPOSED", False)
        found[name] = _compile(source, num_warps, constants.get("num_stages", 3))
    return found


def compile_dots(num_heads: int, num_features: int) -> dict[str, dict[str, int]]:
    """The kernels of two scores of features ``[N, num_heads, num_features]``, as a launch has them."""
    found = {}
    for function, values in ((dots.row_dots_kernel, dots.FORWARD_VALUES),
                             (dots.row_dots_backward_kernel, dots.BACKWARD_VALUES)):
        tile = dots.tile_of(num_heads, num_features, values)
        constants = {"HEADS": num_heads, "FEATURES": num_features, "IS_PAIR": True, "BLOCK_R": tile.rows,
                     "BLOCK_H": tile.heads, "BLOCK_C": tile.features, "FLOAT": tl.float32, "HAS_G": True,
                     "NEEDS_X": True, "NEEDS_WEIGHT": True}
        constants = {k: v for k, v in constants.items() if k in function.arg_names}
        signature = {a: "*fp32" if a.endswith("_ptr") else "i32" for a in function.arg_names}
        even = ["x_stride", "g_stride"] if num_heads * num_features % 16 == 0 else []
        even = [a for a in even if a in function.arg_names]
        found[function.__name__] = _compile(_source(function, signature, constants, even), dots.NUM_WARPS)
    return found


def compile_columns(num_columns: int) -> dict[str, dict[str, int]]:
    """The kernel that sums the rows of ``[N, num_columns]``, as a launch has it, and that which adds up what programs
    leave; both in float32 and bfloat16.
    """
    tile, function = columns.tile_of(num_columns), columns.column_sum_kernel
    constants = {"COLUMNS": num_columns, "BLOCK_R": tile.rows, "BLOCK_C": tile.columns, "FLOAT": tl.float32}
    is_even, found = num_columns % 16 == 0, {}
    for dtype in ("fp32", "bf16"):
        signature = dict.fromkeys(function.arg_names, "i32") | {"x_ptr": f"*{dtype}", "part_ptr": "*fp32"}
        source = _source(function, signature, constants, ["x_stride"] * is_even)
        found[dtype] = _compile(source, columns.NUM_WARPS)
        kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
        signature = dict.fromkeys(columns.fold_kernel.arg_names, "i32") | {"part_ptr": "*fp32", "out_ptr": f"*{dtype}"}
        for adds in (False, True):
            folds = columns._fold(columns.MAX_WORKERS, num_columns, torch.float32, kind, torch.device("cpu"), adds)
            source = _source(columns.fold_kernel, signature, folds.constants, ["width"] * is_even)
            found[f"{dtype} {'added' if adds else 'folded'}"] = _compile(source, folds.num_warps)
    return found


def main(names: list[str]) -> None:
    if names[:1] == ["--columns"]:
        print(json.dumps({f"{c} {name}": report for c in names[1:]
                          for name, report in compile_columns(int(c)).items()}, indent=1))
        return
    if names[:1] == ["--dots"]:
        shapes = [tuple(map(int, name.split(","))) for name in names[1:]]
        print(json.dumps({f"{h},{c} {name}": report for h, c in shapes
                          for name, report in compile_dots(h, c).items()}, indent=1))
        return
    if names[:1] == ["--row-products"]:
        print(json.dumps({f"{shape} {name}": report for shape in names[1:]
                          for name, report in compile_row_products(*map(int, shape.split(","))).items()}, indent=1))
        return
    if names[:1] == ["--dense"]:
        widths = [tuple(map(int, name.split(","))) for name in names[1:]]
        print(json.dumps({f"{n},{k} {name}": report for n, k in widths
                          for name, report in compile_dense(n, k).items()}, indent=1))
        return
    if names[:1] == ["--activation"]:
        print(json.dumps({f"{k} {name}": report for k in names[1:]
                          for name, report in compile_activation(int(k)).items()}, indent=1))
        return
    if names[:1] == ["--padding"]:
        print(json.dumps(compile_padding()))
        return
    if names[:1] == ["--narrow"]:
        print(json.dumps(lines_of(names[1:], _narrow_lines, "fp64", "i64"), indent=1))
        return
    if names[:1] == ["--short"]:
        print(json.dumps([lines_of(names[1:], _short_lines, "fp32", "i32"), without_conversions("gat")], indent=1))
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
        plans = plans_of(cases[case](), lanes == 8)
        for kernel in rows_of(plans, lanes == 8):
            results[f"{name}/{kernel.name}"] = compile_rows(kernel, dtype, index)
        for k, sweep in enumerate(sweeps_of(plans)):
            kernel = kernel_of(sweep, lanes)
            kernels = [kernel] if isinstance(kernel, KernelSource) else []
            if isinstance(kernel, KernelSource) and kernel.has_short:
                kernels.append(kernel_of(sweep, lanes, pieces=Pieces.SHORT))
            if not isinstance(kernel, KernelSource):
                results[f"{name}/{k}"] = {"refused": kernel.reasons}
            if case in IN_TILES and isinstance(kernel, KernelSource) and kernel.is_light:
                ways = [Pieces.ROUNDS, *[Pieces.SIDE_BY_SIDE] * (kernel.work is not None and kernel.work <= SIDE_WORK)]
                others = [kernel_of(sweep, lanes, pieces=pieces) for pieces in ways]
                assert all(isinstance(other, KernelSource) for other in others), others
                kernels += others
            for kernel in kernels:
                for part in (kernel.name, *([kernel.merge_name] if kernel.has_merge else [])):
                    results[f"{name}/{k}/{part}"] = compile_kernel(kernel, part, dtype, index)
                if case in IN_TILES and kernel.has_merge:
                    results[f"{name}/{k}/{kernel.name}_adds"] = compile_kernel(kernel, kernel.name, dtype, index, True)
        for piped in pipelines_of(plans, lanes):
            exact = [s.result for s in piped.pipeline.steps if isinstance(s, Product)]
            for sweep, kernel in piped.kernels.items():
                for part in (kernel.name, *([kernel.merge_name] if kernel.has_merge else [])):
                    results[f"{name}/pipeline/{part}"] = compile_kernel(
                        kernel, part, dtype, index, sweep is piped.pipeline.across, exact=exact)
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    gc.disable()  # a tenth of the time
    main(sys.argv[1:])
