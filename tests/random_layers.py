"""Random layers as a user would write them: the text of a ``MessagePassing`` subclass, and what it is called with.

Text, because a failure then prints a layer that can be copied into a regression test. Statements draw from a pool of
variables with known feature shapes; every statement keeps values bounded and away from what has no derivative.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
import torch.nn.functional as F
import torch_geometric
from hypothesis import strategies as st
from torch import Tensor, nn
from torch_geometric.typing import OptTensor

from zoo import Case

Shape = tuple[int, ...]

NUM_TYPES = 3
MAX_FEATURES = 24

UNARY = ("torch.tanh({a})", "torch.sigmoid({a})", "torch.sin({a})", "torch.cos({a})", "torch.relu({a})", "{a}.abs()",
         "-{a}", "torch.exp(torch.tanh({a}))", "torch.log({a}.abs() + 1.0)", "torch.sqrt({a}.abs() + 0.5)",
         "1.0 / ({a}.abs() + 0.5)", "({a}.abs() + 0.5).rsqrt()", "torch.tanh({a}) ** 2", "({a}.abs() + 0.5) ** 1.5",
         "2.0 ** torch.tanh({a})", "F.leaky_relu({a}, 0.2)", "F.elu({a})", "F.gelu({a})", "F.silu({a})",
         "F.softplus({a})", "F.mish({a})", "F.hardtanh({a})", "F.relu6({a} * 4)", "F.selu({a})", "F.logsigmoid({a})",
         "{a}.clamp(-0.6, 0.7)", "{a}.clamp(min=-0.3)", "torch.atan({a})", "torch.erf({a})",
         "torch.expm1(torch.tanh({a}))", "torch.log1p({a}.abs())", "torch.sinh(torch.tanh({a}))", "{a} * 0.5",
         "{a} + 1.0", "1.5 - {a}", "2 * {a}", "{a}.detach() * 0.7", "{a}.masked_fill({a} > 0.4, 0.25)",
         "torch.where({a} > 0.1, {a}, {a} * 0.3)", "torch.square(torch.tanh({a}))", "F.dropout({a}, 0.0)",
         "{a}.float().to({a}.dtype) * 0.0 + {a}", "F.celu({a}, 2.0)", "F.softsign({a})", "F.hardswish({a} * 2.1)")
BINARY = ("{a} + {b}", "{a} - {b}", "{a} * {b}", "{a} / ({b}.abs() + 0.5)", "torch.maximum({a}, {b})",
          "torch.minimum({a}, {b})", "torch.where({a} > {b}, {a}, {b} * 0.5)", "torch.atan2({a}, {b}.abs() + 0.5)",
          "torch.lerp({a}, {b}, 0.3)", "torch.addcmul({a}, {b}, {a}, value=0.3)", "{a} * ({b} <= 0.2)",
          "{a} - 0.5 * {b}.detach()", "torch.hypot({a}.abs() + 0.3, {b})", "({a} + {b}) / 2",
          "torch.where(({a} > 0) & ({b} < 0.5), {a}, -{b})", "{a}.sub({b}, alpha=0.5)")
#: Last dimension only; {w} is its width.
OVER_FEATURES = ("F.softmax({a}, dim=-1)", "F.log_softmax({a}, dim=-1)", "F.normalize({a} + 0.1, dim=-1)",
                 "F.layer_norm({a}, ({w},))", "{a} - {a}.mean(dim=-1, keepdim=True)", "{a} * {a}.sum(-1, keepdim=True)",
                 "{a} - {a}.amax(-1, keepdim=True)", "{a} / ({a}.norm(dim=-1, keepdim=True) + 0.5)",
                 "torch.cat([{a}[..., 1:], {a}[..., :1]], -1)", "{a}.flip(-1)", "F.rms_norm({a}, ({w},))",
                 "{a} * {a}.var(-1, unbiased=False, keepdim=True)", "{a}.cumsum(-1)", "torch.roll({a}, 1, -1)")
#: Drop the last dimension.
REDUCED = ("{a}.sum(-1)", "{a}.mean(dim=-1)", "{a}.amax(-1)", "{a}.max(dim=-1).values", "{a}.amin(dim=-1)",
           "torch.linalg.vector_norm({a}, dim=-1)", "{a}.norm(dim=-1)", "torch.logsumexp({a}, -1)",
           "{a}[..., 0]", "{a}.select(-1, {w} - 1)", "({a} * {a}).sum(dim=-1)")
AGGREGATIONS = ("'sum'", "'mean'", "'max'", "'min'", "'add'", "'mul'", "'var'", "'std'", "['sum', 'max']",
                "['mean', 'std', 'min']", "['mean', 'var', 'mul']", "aggr.SoftmaxAggregation(t=0.7)",
                "aggr.SoftmaxAggregation(learn=True)", "aggr.PowerMeanAggregation(p=2.0)",
                "aggr.MultiAggregation(['mean', 'max'], mode='sum')")
SIMPLE_AGGREGATIONS = AGGREGATIONS[:5]

AGGREGATES = (
    "return scatter(inputs, index, 0, dim_size, reduce='sum') * torch.sigmoid(scatter(inputs, index, 0, dim_size, "
    "reduce='mean'))",
    "mean = scatter(inputs, index, 0, dim_size, reduce='mean')\n"
    "        return scatter((inputs - mean.index_select(0, index)) ** 2, index, 0, dim_size, reduce='sum')",
    "best = scatter(inputs, index, 0, dim_size, reduce='max')\n"
    "        return best - self.aggr_module(inputs, index, ptr, dim_size, 0)",
    "count = degree(index, dim_size, dtype=inputs.dtype).view(-1, *[1] * (inputs.dim() - 1))\n"
    "        return self.aggr_module(inputs, index, ptr, dim_size, 0) / (count + 1.0)",
)


@dataclass
class Text:
    """A layer as text, with the parameters it has and the arguments it is called with.

    Attributes:
        statements: Lines of message().
        of_edge_update: How many of them are edge_update's; the last one's variable is the argument ``alpha``.
        takes: Arguments of the methods: name -> feature shape, with ``()`` for one number per row.
        parameters: name -> shape.
        modules: name -> constructor.
    """

    heads: int
    width: int
    aggr: str
    statements: list[str] = field(default_factory=list)
    of_edge_update: int = 0
    result: str = ""
    aggregate: str = ""
    keeps: str = ""
    flow: str = "source_to_target"
    parameters: dict[str, Shape] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = ["class Layer(MessagePassing):", "    def __init__(self):",
                 f"        super().__init__(aggr={self.aggr}, node_dim=0, flow={self.flow!r})"]
        lines += [f"        self.{n} = nn.Parameter(torch.randn({s}) * 0.7)" for n, s in self.parameters.items()]
        lines += [f"        self.{n} = {made}" for n, made in self.modules.items()]
        call = "x=x, z=z, k=k, e=e, w=w, t=t, size=size"
        lines += ["", "    def forward(self, edge_index, size, x, z, k, e, w, t):"]
        special = "index: Tensor, ptr: OptTensor, size_i: Optional[int]"
        passed = ""
        if self.of_edge_update:
            lines.append(f"        alpha = self.edge_updater(edge_index, {call})")
            passed = ", alpha=alpha"
        kept = ", self._kept" if self.keeps else ""
        lines.append(f"        return self.propagate(edge_index, {call}{passed}){kept}")
        if self.of_edge_update:
            first, alpha = self.statements[:self.of_edge_update], self.statements[self.of_edge_update - 1].split()[0]
            lines += ["", f"    def edge_update(self, {self._used(first)}{special}):", *self._body(first),
                      f"        return {alpha}"]
            rest = [f"{alpha} = alpha", *self.statements[self.of_edge_update:]]
            lines += ["", f"    def message(self, {self._used([*rest, self.result])}alpha, {special}):"]
        else:
            rest = self.statements
            lines += ["", f"    def message(self, {self._used([*rest, self.result])}{special}):"]
        lines += self._body(rest)
        if self.keeps:
            lines.append(f"        self._kept = {self.keeps}")
        lines.append(f"        return {self.result}")
        if self.aggregate:
            arguments = "inputs: Tensor, index: Tensor, ptr: OptTensor, dim_size: Optional[int]"
            lines += ["", f"    def aggregate(self, {arguments}):", f"        {self.aggregate}"]
        return "\n".join(lines) + "\n"

    @staticmethod
    def _body(statements: list[str]) -> list[str]:
        return [f"        {s}" for s in statements]

    @staticmethod
    def _used(statements: list[str]) -> str:
        words = set("".join(c if c.isalnum() or c == "_" else " " for c in " ".join(statements)).split())
        return "".join(f"{n}, " for n in ARGUMENTS if n in words)


#: Arguments of message(): name -> feature shape by heads H and width C, or integer.
ARGUMENTS: dict[str, str] = {"x_i": "C", "x_j": "C", "z_i": "HC", "z_j": "HC", "e": "C", "w": "", "t": "int",
                             "k_j": "int", "k_i": "int"}


class Writer:
    """Draws a layer from hypothesis' data."""

    def __init__(self, data: st.DataObject, is_square: bool) -> None:
        self.draw = data.draw
        self.text = Text(self.pick((1, 2, 3)), self.pick((1, 2, 3, 4)), self.pick(AGGREGATIONS))
        if is_square and self.chance(8):
            self.text.flow = "target_to_source"
        h, c = self.text.heads, self.text.width
        by_name = {"C": (c,), "HC": (h, c), "": ()}
        self.pool: list[tuple[str, Shape]] = [(n, by_name[s]) for n, s in ARGUMENTS.items() if s != "int"]
        # What is read most should be what most layers read.
        self.recent: list[tuple[str, Shape]] = []

    def pick(self, options: Any) -> Any:
        return self.draw(st.sampled_from(options))

    def chance(self, one_in: int) -> bool:
        return self.draw(st.integers(1, one_in)) == one_in

    def add(self, expression: str, shape: Shape) -> None:
        name = f"v{len(self.text.statements)}"
        self.text.statements.append(f"{name} = {expression}")
        self.pool.append((name, shape))
        self.recent = [*self.recent[-2:], (name, shape)]

    def variable(self, fits: Callable[[Shape], bool] = lambda s: True) -> tuple[str, Shape] | None:
        """One of the latest variables, or any; None if none fits."""
        near = [v for v in self.recent if fits(v[1])]
        if near and not self.chance(3):
            return self.pick(near)
        found = [v for v in self.pool if fits(v[1])]
        return self.pick(found) if found else None

    def parameter(self, shape: Shape) -> str:
        name = f"p{len(self.text.parameters)}"
        self.text.parameters[name] = shape
        return f"self.{name}"

    # --- statements ---

    def unary(self) -> None:
        a, shape = self.variable()
        self.add(self.pick(UNARY).format(a=a), shape)

    def binary(self) -> None:
        a, shape = self.variable()
        b, other = self.variable(lambda s: _broadcast(s, shape) is not None)
        self.add(self.pick(BINARY).format(a=a, b=b), _broadcast(shape, other))

    def with_parameter(self) -> None:
        a, shape = self.variable()
        kept = shape[self.draw(st.integers(0, len(shape))):]
        lead = (1,) * self.draw(st.integers(0, 1)) if len(kept) == len(shape) else ()
        p = self.parameter((*lead, *(1 if self.chance(4) else s for s in kept)))
        self.add(self.pick(("{a} * {p}", "{a} + {p}", "{a} - {p}", "{a} / ({p}.abs() + 0.5)", "{p} * {a}",
                            "torch.maximum({a}, {p})")).format(a=a, p=p), shape)

    def over_features(self) -> None:
        found = self.variable(lambda s: len(s) > 0)
        a, shape = found
        self.add(self.pick(OVER_FEATURES).format(a=a, w=shape[-1]), shape)

    def reduced(self) -> None:
        a, shape = self.variable(lambda s: len(s) > 0)
        self.add(self.pick(REDUCED).format(a=a, w=shape[-1]), shape[:-1])

    def reduced_keeping(self) -> None:
        a, shape = self.variable(lambda s: len(s) > 0)
        dim = self.draw(st.integers(1, len(shape)))
        kept = tuple(1 if d == dim - 1 else s for d, s in enumerate(shape))
        self.add(self.pick(("{a}.sum(dim={d}, keepdim=True)", "{a}.mean({d}, keepdim=True)",
                            "{a}.amax(dim={d}, keepdim=True)")).format(a=a, d=dim), kept)

    def layout(self) -> None:
        a, shape = self.variable()
        numel = math.prod(shape)
        choices: list[tuple[str, Shape]] = [(f"{a}.unsqueeze(-1)", (*shape, 1))]
        if len(shape) > 1:
            choices += [(f"{a}.flatten(1)", (numel,)), (f"{a}.reshape(-1, {numel})", (numel,)),
                        (f"{a}.transpose(1, 2)", (shape[1], shape[0], *shape[2:])),
                        (f"{a}.squeeze(1)" if shape[0] == 1 else f"{a}[:, 0]", shape[1:])]
        if len(shape) == 1:
            h = self.text.heads
            choices += [(f"{a}.unsqueeze(1)", (1, *shape)), (f"{a}.unsqueeze(1).expand(-1, {h}, -1)", (h, *shape)),
                        (f"{a}.unsqueeze(1).repeat(1, {h}, 1)", (h, *shape))]
            if shape[0] % h == 0:
                choices.append((f"{a}.view(-1, {h}, {shape[0] // h})", (h, shape[0] // h)))
        if len(shape) and shape[-1] > 1:
            k = self.draw(st.integers(1, shape[-1] - 1))
            lead, rest = shape[:-1], shape[-1] - k
            choices += [(f"{a}[..., :{k}]", (*lead, k)), (f"{a}[..., {k}:]", (*lead, rest)),
                        (f"{a}.split([{k}, {rest}], -1)[1]", (*lead, rest)), (f"{a}.narrow(-1, {k}, 1)", (*lead, 1))]
        if len(shape) and shape[-1] % 2 == 0:
            choices.append((f"{a}.chunk(2, dim=-1)[1]", (*shape[:-1], shape[-1] // 2)))
        choices = [c for c in choices if len(c[1]) <= 3 and math.prod(c[1]) <= MAX_FEATURES]
        if not choices:
            return self.unary()
        return self.add(*self.pick(choices))

    def joined(self) -> None:
        found = self.variable(lambda s: len(s) > 0 and math.prod(s) * 2 <= MAX_FEATURES)
        if found is None:
            return self.unary()
        a, shape = found
        b, other = self.variable(lambda s: len(s) == len(shape) and s[:-1] == shape[:-1]
                                 and math.prod(s) + math.prod(shape) <= MAX_FEATURES)
        if other == shape and self.chance(3):
            return self.add(f"torch.stack([{a}, {b}], dim=1)", (2, *shape)) if len(shape) < 3 else self.unary()
        return self.add(f"torch.cat([{a}, {b}], dim=-1)", (*shape[:-1], shape[-1] + other[-1]))

    def linear(self) -> None:
        a, shape = self.variable(lambda s: len(s) > 0)
        out = self.pick((1, 2, 3))
        if self.chance(2):
            name = f"lin{len(self.text.modules)}"
            inner = f"nn.Linear({shape[-1]}, {out}, bias={self.chance(2)})"
            if self.chance(3):
                inner = f"nn.Sequential({inner}, nn.Tanh(), nn.Linear({out}, {out}))"
            self.text.modules[name] = inner
            text = f"self.{name}({a})"
        else:
            text = f"{a} @ {self.parameter((shape[-1], out))}"
        self.add(text, (*shape[:-1], out))

    def contracted(self) -> None:
        """A dot product with another variable or with a parameter."""
        found = self.variable(lambda s: len(s) == 2)
        if found is None:
            return self.linear()
        a, (h, c) = found
        b, _ = self.variable(lambda s: s == (h, c))
        form = self.pick(("({a} * {b}).sum(-1)", "torch.einsum('ehc,ehc->eh', {a}, {b})",
                          "torch.matmul({a}.unsqueeze(-2), {b}.unsqueeze(-1)).flatten(1)",
                          "F.cosine_similarity({a} + 0.2, {b}, dim=-1)"))
        return self.add(form.format(a=a, b=b), (h,))

    def per_head(self) -> None:
        found = self.variable(lambda s: len(s) == 2)
        if found is None:
            return self.linear()
        a, (h, c) = found
        out = self.pick((1, 2))
        return self.add(f"torch.einsum('ehc,hcd->ehd', {a}, {self.parameter((h, c, out))})", (h, out))

    def typed(self) -> None:
        """Something that depends on the type of the edge or of a node."""
        kind = self.pick(("t", "k_j", "k_i"))
        a, shape = self.variable()
        form = self.pick(("table", "embedding", "mask", "where", "number", "matrix"))
        ones = ", 1" * len(shape)
        if form == "matrix" and len(shape) == 1:
            p = self.parameter((NUM_TYPES, shape[0], 2))
            self.add(f"torch.bmm({a}.unsqueeze(1), {p}[{kind}]).squeeze(1)", (2,))
        elif form == "embedding" and len(shape) == 1:
            self.add(f"{a} * F.embedding({kind}, {self.parameter((NUM_TYPES, shape[0]))})", shape)
        elif form == "mask":
            self.add(f"{a} * ({kind} == 1).view(-1{ones})", shape)
        elif form == "where":
            self.add(f"torch.where(({kind} > 0).view(-1{ones}), {a}, {a} * 0.3)", shape)
        elif form == "number":
            self.add(f"{a} * (1.0 + {kind}.view(-1{ones}))", shape)
        else:
            self.add(f"{a} * {self.parameter((NUM_TYPES, *shape))}[{kind}]", shape)

    def softmax(self) -> None:
        a, shape = self.variable()
        nodes = self.pick(("index, ptr, size_i", "index, num_nodes=size_i"))
        self.add(f"softmax(torch.tanh({a}), {nodes})", shape)

    def write(self) -> Text:
        text = self.text
        forms = (self.unary, self.unary, self.binary, self.binary, self.binary, self.with_parameter,
                 self.over_features, self.reduced, self.reduced_keeping, self.layout, self.layout, self.joined,
                 self.linear, self.contracted, self.per_head, self.typed, self.softmax)
        for _ in range(self.draw(st.integers(1, 7))):
            self.pick(forms)()
        if self.chance(5):
            text.of_edge_update = self.draw(st.integers(1, len(text.statements)))
        name, shape = self.pick(self.recent) if self.recent else self.pool[1]
        text.result = name
        if text.of_edge_update and not self._is_visible(name):
            text.result = "alpha"
        if not shape:
            text.result = f"{text.result}.unsqueeze(-1)"
        if self.chance(6):
            text.aggregate, text.aggr = self.pick(AGGREGATES), self.pick(SIMPLE_AGGREGATIONS)
        if self.chance(8):
            text.keeps = name if self._is_visible(name) else "alpha"
        self._drop_invisible()
        return text

    def _is_visible(self, name: str) -> bool:
        """Whether message() knows a variable: not those that edge_update made, but its result."""
        number = int(name[1:]) if name[1:].isdigit() else -1
        return number < 0 or number >= self.text.of_edge_update - 1 or not self.text.of_edge_update

    def _drop_invisible(self) -> None:
        """Make statements of edge_update that message() needs part of both."""
        text = self.text
        if not text.of_edge_update:
            return
        hidden = {f"v{k}" for k in range(text.of_edge_update - 1)}
        words = set("".join(c if c.isalnum() else " " for c in " ".join(text.statements[text.of_edge_update:])).split())
        if words & hidden:
            text.of_edge_update = 0
            text.result = text.result.replace("alpha", f"v{len(text.statements) - 1}")
            text.keeps = text.keeps.replace("alpha", f"v{len(text.statements) - 1}")


def _broadcast(a: Shape, b: Shape) -> Shape | None:
    """The shape of an operation on two edge values, None where rows or too many features would meet."""
    if len(a) != len(b) or any(m != n and 1 not in (m, n) for m, n in zip(a, b, strict=True)):
        return None
    out = tuple(max(m, n) for m, n in zip(a, b, strict=True))
    return out if math.prod(out) <= MAX_FEATURES else None


def compile_layer(text: Text, base: type) -> nn.Module:
    """The layer over ``base``, in float64 with parameters that are the same for every base."""
    space: dict[str, Any] = {
        "MessagePassing": base, "torch": torch, "nn": nn, "F": F, "aggr": torch_geometric.nn.aggr,
        "softmax": torch_geometric.utils.softmax, "scatter": torch_geometric.utils.scatter,
        "degree": torch_geometric.utils.degree, "Tensor": Tensor, "OptTensor": OptTensor,
        "Optional": Optional, "__name__": __name__}
    exec(compile(str(text), "<random layer>", "exec", dont_inherit=True), space)
    torch.manual_seed(5)
    return space["Layer"]().double()


def make_inputs(text: Text, case: Case, seed: int) -> dict[str, Any]:
    """The arguments of forward; floating tensors require gradients."""
    generator = torch.Generator().manual_seed(seed)
    h, c = text.heads, text.width

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    def kinds(rows: int) -> Tensor:
        return torch.randint(NUM_TYPES, (rows,), generator=generator)

    def node(*shape: int) -> Any:
        sides = [draw(rows, *shape) for rows in case.size]
        return sides[0] if case.is_square else tuple(sides)

    k = kinds(case.num_src) if case.is_square else (kinds(case.num_src), kinds(case.num_dst))
    return dict(edge_index=case.edge_index, size=case.size, x=node(c), z=node(h, c), k=k, e=draw(case.num_edges, c),
                w=draw(case.num_edges), t=kinds(case.num_edges))


def answer(module: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Results and the gradient of everything for fixed cotangents, by name."""
    results = module(**inputs)
    results = results if isinstance(results, tuple) else (results,)
    leaves = {n: t for n, v in inputs.items() for n, t in ([(n, v)] if isinstance(v, Tensor) else
              [(f"{n}[{i}]", t) for i, t in enumerate(v)]) if isinstance(t, Tensor) and t.requires_grad}
    leaves.update(module.named_parameters())
    generator = torch.Generator().manual_seed(7)
    cotangents = [torch.randn(r.shape, generator=generator, dtype=r.dtype).to(r.device) for r in results]
    pairs = [(r, g) for r, g in zip(results, cotangents, strict=True) if r.requires_grad]
    found = torch.autograd.grad([r for r, _ in pairs], list(leaves.values()), [g for _, g in pairs],
                                allow_unused=True) if pairs else [None] * len(leaves)
    grads = {f"gradient of {n}": torch.zeros_like(t) if g is None else g
             for (n, t), g in zip(leaves.items(), found, strict=True)}
    return {**{f"result {i}": r.detach() for i, r in enumerate(results)}, **grads}
