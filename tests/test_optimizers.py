"""Optimizers in recorded steps: updates in pieces are the updates, who gets fused ones, and what options say."""

from __future__ import annotations

import copy
import functools
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from pyg_fullgraph import optimizers

_MAKE = {
    "adam": torch.optim.Adam,
    "adamw": functools.partial(torch.optim.AdamW, amsgrad=True, weight_decay=0.1),
    "adam-maximize": functools.partial(torch.optim.Adam, maximize=True, weight_decay=0.1),
    "sgd": torch.optim.SGD,
    "sgd-momentum": functools.partial(torch.optim.SGD, momentum=0.9, nesterov=True),
}


def parameters() -> list[nn.Parameter]:
    """Two that are cut, one with a shorter last piece, and four that are not, the last as it is not contiguous."""
    torch.manual_seed(0)
    shapes = [(9, 1001), (17,), (5000,), (), (4096,)]
    return [nn.Parameter(torch.randn(shape)) for shape in shapes] + [nn.Parameter(torch.randn(60, 90).t())]


def take_steps(optimizer: Optimizer, given: list[nn.Parameter], count: int = 3) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        for p in given:
            p.grad = torch.randn(p.t().shape, generator=generator).t() if p.dim() == 2 and not p.is_contiguous() else \
                torch.randn(p.shape, generator=generator)
        optimizer.step()


def state_of(optimizer: Optimizer, given: list[nn.Parameter]) -> list[Tensor]:
    return [*given, *(t for p in given for _, t in sorted(optimizer.state[p].items()) if t is not None)]


@pytest.mark.parametrize("name", _MAKE)
def test_pieces_make_the_same_bits(name, monkeypatch):
    counts = []
    for update in optimizers._UPDATES:
        whole = getattr(torch, update)
        monkeypatch.setattr(torch, update, lambda *a, whole=whole, **o: counts.append(len(a[0])) or whole(*a, **o))
    given = parameters()
    want, got = copy.deepcopy(given), copy.deepcopy(given)
    plain, cut = (_MAKE[name](ps, lr=0.1, fused=True) for ps in (want, got))
    take_steps(plain, want)
    with optimizers._updates_in_pieces():
        take_steps(cut, got)
    assert counts == [6] * 3 + [3 + 1 + 2 + 1 + 1 + 1] * 3
    for a, b in zip(state_of(plain, want), state_of(cut, got), strict=True):
        assert torch.equal(a, b)
    take_steps(cut, got, 1)
    assert counts[-1] == 6


def test_a_large_model_has_few_pieces():
    given = [torch.empty(1000, 1000), torch.empty(10, 10), torch.empty(1000)]
    made, steps = optimizers._cut((given, [torch.empty(()) for _ in given]))
    assert len(made) == len(steps) == 24 + 2 and sum(t.numel() for t in made) == 1_001_100
    assert all(t.data_ptr() % 16 == 0 for t in made) and steps[0] is steps[23] is not steps[24]


def test_subclasses_of_tensors_stay_whole():
    class Marked(Tensor):
        pass

    given = [torch.zeros(9000).as_subclass(Marked)]
    assert optimizers._cut((given, given, []))[0][0] is given[0]


@pytest.mark.parametrize("name", _MAKE)
def test_updates_count_as_writes(name):
    """Also those of a compiled step, and none to what has no gradient."""
    given, frozen = parameters(), nn.Parameter(torch.ones(3))
    optimizer = _MAKE[name]([*given, frozen], lr=0.1, fused=True)
    versions = [p._version for p in given]
    take_steps(optimizer, given, 1)
    assert all(p._version > version for p, version in zip(given, versions, strict=True))
    optimizer.step = torch.compile(optimizer.step, backend="eager")
    versions = [p._version for p in given]
    take_steps(optimizer, given, 1)
    assert all(p._version > version for p, version in zip(given, versions, strict=True))
    assert frozen._version == 0


@pytest.mark.parametrize("name", _MAKE)
def test_updates_count_where_a_hook_takes_the_gradients(name):
    given, untouched = parameters(), nn.Parameter(torch.ones(3))
    optimizer = _MAKE[name]([*given, untouched], lr=0.1, fused=True)
    optimizer.register_step_post_hook(lambda *args: optimizer.zero_grad())
    before = [p.detach().clone() for p in given]
    take_steps(optimizer, given, 1)
    assert all(p.grad is None and not torch.equal(p, old) for p, old in zip(given, before, strict=True))
    assert all(p._version > 0 for p in given) and untouched._version == 0


def test_parameters_that_count_nothing():
    with torch.inference_mode():
        given = parameters()
        take_steps(torch.optim.Adam(given, lr=0.1, fused=True), given, 1)
    assert all(p.is_inference() for p in given)


def test_what_torch_refuses_is_as_torch_says_it():
    """A momentum that one parameter has, and another has not yet."""
    first, second = nn.Parameter(torch.ones(5000)), nn.Parameter(torch.ones(5000))
    optimizer = torch.optim.SGD([first, second], momentum=0.9, fused=True)
    first.grad = torch.ones(5000)
    with optimizers._updates_in_pieces():
        optimizer.step()
        second.grad = torch.ones(5000)
        with pytest.raises(TypeError, match="expected Tensor"):
            optimizer.step()
    optimizer.param_groups[0]["fused"] = None
    assert not answers(optimizer, optimizer.step)
    assert answers(optimizer, optimizer.step)  # both have it now


def test_whoever_leaves_last_puts_them_back():
    before = torch._fused_adam_
    first, second = optimizers._updates_in_pieces(), optimizers._updates_in_pieces()
    first.__enter__()
    inside = torch._fused_adam_
    second.__enter__()
    assert torch._fused_adam_ is inside is not before
    first.__exit__(None, None, None)
    assert torch._fused_adam_ is inside
    second.__exit__(None, None, None)
    assert torch._fused_adam_ is before


def answers(optimizer: Optimizer, step) -> bool:
    """What a hook is told while ``step`` takes one."""
    found: list[bool] = []

    @torch.compiler.disable
    def ask(optimizer: Optimizer, args: object, kwargs: object) -> None:
        found.append(optimizers._may_be_fused(optimizer, optimizer.param_groups[0]))

    hook = register_optimizer_step_pre_hook(ask)
    try:
        step()
    finally:
        hook.remove()
    return found[0]


@pytest.mark.parametrize(("make", "wanted"), [
    (torch.optim.Adam, True),
    (torch.optim.AdamW, True),
    (torch.optim.SGD, True),
    (torch.optim.Adagrad, False),
    (type("MyAdam", (torch.optim.Adam,), {}), False),
    (functools.partial(torch.optim.Adam, foreach=False), False),
    (functools.partial(torch.optim.Adam, fused=False), False),
    (functools.partial(torch.optim.Adam, fused=True), True),
])
def test_who_leaves_the_choice_gets_fused_updates(make, wanted):
    given = parameters()
    optimizer = make(given, lr=0.1)
    assert answers(optimizer, lambda: take_steps(optimizer, given, 1)) == wanted


def test_doubles_are_updated_as_before():
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(3, dtype=torch.float64))])
    assert not answers(optimizer, optimizer.step)


@pytest.mark.parametrize("is_method", [True, False])
def test_a_compiled_step_stays_compiled(is_method):
    given = parameters()
    optimizer = torch.optim.Adam(given, lr=0.1)
    for p in given:
        p.grad = torch.ones_like(p)
    compiled = torch.compile(optimizer.step if is_method else lambda: optimizer.step(), backend="eager")
    for _ in range(2):
        assert not answers(optimizer, compiled)


def test_a_step_that_no_compiler_may_see_is_not_compiled():
    given = parameters()
    optimizer = torch.optim.Adam(given, lr=0.1)
    assert answers(optimizer, torch.compiler.disable(lambda: take_steps(optimizer, given, 1)))


# --- options around a step ------------------------------------------------------------------------------------------


class OnGpu(nn.Parameter):
    """Says that it is on a GPU."""

    is_cuda = True


class RateOnGpu(Tensor):
    is_cuda = True


def with_gradient(size: int = 5) -> OnGpu:
    parameter = OnGpu(torch.ones(size))
    parameter.grad = torch.ones(size)
    return parameter


@pytest.fixture
def seen(monkeypatch) -> list[tuple[object, object]]:
    """How SGD ran: `fused`, and the rate, which is on a GPU, too, where it is a tensor."""
    make = optimizers.Optimizers._rate
    monkeypatch.setattr(optimizers.Optimizers, "_rate", lambda *args: make(*args).as_subclass(RateOnGpu))
    found, module = [], sys.modules[torch.optim.SGD.__module__]
    run = module.sgd
    monkeypatch.setattr(module, "sgd", lambda *a, **o: found.append((o["fused"], o["lr"])) or run(*a, **o))
    return found


def is_as_before(optimizer: Optimizer, before: dict[str, object]) -> bool:
    group = optimizer.param_groups[0]  # a tensor equals the number that is in it
    return group == before and type(group["lr"]) is float


def test_options_are_as_they_were_after_a_step(seen):
    """With two of those who prepare at once, too, and with one optimizer in the step of another."""
    inner, outer = (torch.optim.SGD([with_gradient()], lr=rate) for rate in (0.1, 0.2))
    before = [copy.copy(o.param_groups[0]) for o in (inner, outer)]
    first, second = optimizers.Optimizers(), optimizers.Optimizers()
    plain = outer.step
    with first.prepared(), second.prepared():
        inner.step()
        assert is_as_before(inner, before[0])
        hook = outer.register_step_pre_hook(lambda *step: inner.step())
        plain()
        hook.remove()
    assert is_as_before(inner, before[0]) and is_as_before(outer, before[1])
    assert [fused for fused, _ in seen] == [True] * 3 and all(isinstance(rate, Tensor) for _, rate in seen)


def test_options_are_as_they_were_after_a_step_that_failed(seen):
    optimizer = torch.optim.SGD([with_gradient()], lr=0.1)
    before = copy.copy(optimizer.param_groups[0])

    def closure() -> Tensor:
        raise RuntimeError("broken")

    found = optimizers.Optimizers()
    with found.prepared():
        with pytest.raises(RuntimeError, match="broken"):
            optimizer.step(closure)
        optimizer.step()
        assert is_as_before(optimizer, before) and found._rates  # which are still read
        with pytest.raises(RuntimeError, match="broken"):
            optimizer.step(closure)
    assert is_as_before(optimizer, before)


def test_a_rate_that_is_not_read_any_more_is_a_part_of_the_fingerprint(seen):
    optimizer, found = torch.optim.SGD([with_gradient()], lr=0.1), optimizers.Optimizers()
    with found.prepared():
        optimizer.step()
    optimizer.param_groups[0]["foreach"] = False
    with found.prepared():
        optimizer.step()
    before = found.fingerprint()
    optimizer.param_groups[0]["lr"] = 0.2
    assert found.fingerprint() != before and [fused for fused, _ in seen] == [True, None]


def test_a_closure_may_give_another_parameter_its_first_gradient(seen):
    first, second = with_gradient(), OnGpu(torch.ones(5))
    optimizer, found = torch.optim.SGD([first, second], lr=0.1, momentum=0.9), optimizers.Optimizers()

    def closure() -> None:
        second.grad = torch.ones(5)

    with found.prepared():
        optimizer.step()
        optimizer.step(closure)
        optimizer.step()
    assert [bool(fused) for fused, _ in seen] == [True, False, True]
