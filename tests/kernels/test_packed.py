"""Linear layers over packed bfloat16 weights against float64, on every instruction set."""

import functools
from dataclasses import dataclass, replace

import pytest
import torch
from paged_kernels import _native
from paged_kernels.cpu import packed
from paged_kernels.cpu.extension import load_extension
from paged_kernels.cpu.packed import PackedWeight
from paged_kernels.cpu.threads import threads_kept, use_threads
from torch import Tensor

from tests.kernels.packed import by_hand, multiply, panels_of

# Outputs and inputs: whole panels, tails of both, odd inputs, less than a panel, one of each, a model's layer.
SHAPES = [(64, 256), (33, 144), (100, 71), (3, 8), (1, 1), (16, 64), (48, 896), (70, 1100), (1152, 896)]
ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 13, 16, 17, 31, 32, 33, 49, 64, 70, 200]
MOST_ROWS = 200


@dataclass(frozen=True, slots=True)
class Product:
    """A product in float64. The error that is `allowed` is measured on the scale of what was summed."""

    expected: Tensor
    allowed: Tensor

    def check(self, actual: Tensor) -> None:
        """Compares `actual` with the first rows, of which it may have fewer."""
        num_rows = actual.shape[0]
        assert actual.dtype == torch.bfloat16 and actual.shape == (num_rows, self.expected.shape[1])
        assert ((actual.double() - self.expected[:num_rows]).abs() <= self.allowed[:num_rows]).all()


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Product:
    wide = None if bias is None else bias.double()
    expected = torch.nn.functional.linear(x.double(), weight.double(), wide)
    terms = torch.nn.functional.linear(x.double().abs(), weight.double().abs(), None if wide is None else wide.abs())
    return Product(expected, 2.0**-8 * expected.abs() + 2.0**-20 * terms + 1e-30)


@dataclass(frozen=True, slots=True)
class Layer:
    """Inputs `x` and what comes of them: as many rows as any test takes of it."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    packed: PackedWeight
    product: Product


@functools.cache
def random_layer(shape: tuple[int, int], with_bias: bool) -> Layer:
    """Makes a layer once for all instruction sets, because computing its product in float64 takes long."""
    weight, x = torch.randn(shape).bfloat16(), torch.randn(MOST_ROWS, shape[1]).bfloat16()
    bias = torch.randn(shape[0]).bfloat16() if with_bias else None
    return Layer(x, weight, bias, by_hand(weight), product(x, weight, bias))


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_our_kernel(shape: tuple[int, int], with_bias: bool, instruction_set: str, num_threads: int) -> None:
    layer = random_layer(shape, with_bias)
    for num_rows in ROWS:
        layer.product.check(multiply(layer.x[:num_rows], layer.packed, layer.bias))


def test_more_rows_than_a_cache_holds(instruction_set: str, num_threads: int) -> None:
    """They are multiplied in blocks, with several panels together, and their inputs in parts."""
    layer = random_layer((100, 5300), True)
    x = torch.cat([layer.x, layer.x, layer.x[:130]])
    many = multiply(x, layer.packed, layer.bias)
    for begin in range(0, len(x), MOST_ROWS):
        layer.product.check(many[begin : begin + MOST_ROWS])


@pytest.mark.parametrize("num_inputs", [320, 331])
@pytest.mark.parametrize("num_rows", [1, 3, 16, 32, 70])
def test_strided_rows(num_rows: int, num_inputs: int, instruction_set: str) -> None:
    weight = torch.randn(96, num_inputs).bfloat16()
    x = torch.randn(num_rows, 640).bfloat16()[:, 100 : 100 + num_inputs]
    product(x, weight, None).check(multiply(x, by_hand(weight)))


def test_a_row_is_the_same_with_any_others_and_on_any_number_of_threads(instruction_set: str) -> None:
    layer = by_hand(torch.randn(3000, 256).bfloat16())
    x = torch.randn(32, 256).bfloat16()
    with threads_kept():
        use_threads(1)
        three, many = multiply(x[:3], layer), multiply(x, layer)
        use_threads(2)
        assert torch.equal(multiply(x[:3], layer), three) and torch.equal(multiply(x, layer), many)
    assert torch.equal(multiply(x[2:3], layer), three[2:3])
    assert torch.equal(multiply(x[9:26], layer), many[9:26])


@pytest.mark.parametrize("shape", [(200, 96), (70, 1100), (100, 5300)])
def test_a_row_is_the_same_among_few_and_many(shape: tuple[int, int], instruction_set: str, num_threads: int) -> None:
    """What a prompt's token gives does not depend on the chunk that it comes in, unless that is smaller than a matrix
    unit's."""
    layer = random_layer(shape, True)
    x = torch.cat([layer.x, layer.x, layer.x[:130]])
    many = multiply(x, layer.packed, layer.bias)
    few = [] if instruction_set.startswith("amx") else [(0, 1), (5, 7), (100, 103)]
    for begin, end in (*few, (0, 4), (7, 23), (100, 133), (20, 120), (1, 529)):
        assert torch.equal(multiply(x[begin:end], layer.packed, layer.bias), many[begin:end])


@pytest.mark.parametrize("num_rows", [2, 8, 70])
def test_a_value_that_is_not_finite_stays_in_its_row(num_rows: int, instruction_set: str) -> None:
    layer = by_hand(torch.randn(40, 72).abs().bfloat16() + 0.1)
    x = torch.randn(num_rows, 72).bfloat16()
    clean = multiply(x, layer)
    for value in (float("nan"), float("inf"), float("-inf")):
        x[0, 70] = value
        spoilt = multiply(x, layer)
        assert not spoilt[0].isfinite().any()
        assert torch.equal(spoilt[1:], clean[1:])


def test_tensors_that_do_not_fit_are_refused() -> None:
    layer = by_hand(torch.randn(64, 256).bfloat16())
    x = torch.randn(1, 256).bfloat16()
    with pytest.raises(ValueError, match="another number of weights"):
        multiply(torch.randn(1, 300).bfloat16(), layer)
    with pytest.raises(ValueError, match="a panel for every 32 outputs"):
        multiply(x, replace(layer, num_outputs=80))
    with pytest.raises(ValueError, match="bias has another length"):
        multiply(x, layer, torch.randn(60).bfloat16())
    with pytest.raises(ValueError, match="element type"):
        multiply(x.float(), layer)


def test_huge_pages_change_nothing() -> None:
    native = load_extension()
    assert native is not None
    memory = torch.randn(2048, 2049)
    before = memory.clone()
    native.prefer_huge_pages(memory)
    native.prefer_huge_pages(memory[:1, :3])
    assert torch.equal(memory, before)


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_arrive_in_any_parts(shape: tuple[int, int], num_threads: int) -> None:
    weight = torch.randn(shape[0], shape[1] + 5).bfloat16()[:, 5:]  # rows that do not lie end to end
    target = packed.empty_weight(*shape)
    cut = shape[0] // 3
    packed.pack_rows(target, weight[cut:], cut)
    packed.pack_rows(target, weight[:cut], 0)
    assert torch.equal(target.panels, panels_of(weight))
    assert torch.equal(packed.pack(weight).panels, target.panels)


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_leave_as_they_came(shape: tuple[int, int], num_threads: int) -> None:
    weight = torch.randn(shape).bfloat16()
    outputs = torch.cat([torch.arange(shape[0]), torch.randint(0, shape[0], (300,))])
    assert torch.equal(packed.take_rows(packed.pack(weight), outputs), weight[outputs])
    assert packed.take_rows(packed.pack(weight), outputs[:0]).shape == (0, shape[1])


@pytest.mark.parametrize("output", [-1, 70])
def test_rows_that_are_not_there_are_refused(output: int) -> None:
    weight = packed.pack(torch.randn(70, 256).bfloat16())  # its last panel has room for more
    with pytest.raises(ValueError, match="no such output"):
        packed.take_rows(weight, torch.tensor([3, output]))


def test_rows_that_do_not_fit_are_refused() -> None:
    target = packed.empty_weight(96, 256)
    with pytest.raises(ValueError, match="do not fit"):
        packed.pack_rows(target, torch.zeros(64, 256, dtype=torch.bfloat16), 33)
    with pytest.raises(ValueError, match="another number of weights"):
        packed.pack_rows(target, torch.zeros(64, 300, dtype=torch.bfloat16), 0)


def test_a_layer() -> None:
    layer = random_layer((70, 1100), True)
    layer.product.check(packed.linear(layer.x, packed.pack(layer.weight), layer.bias))
    assert packed.linear(torch.empty(0, 1100).bfloat16(), layer.packed).shape == (0, 70)


def test_what_can_be_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert packed.can_pack(torch.bfloat16, cpu)
    assert not packed.can_pack(torch.float32, cpu)
    assert not packed.can_pack(torch.bfloat16, torch.device("meta"))
    with monkeypatch.context() as portable:
        portable.setattr(_native, "available_instruction_sets", lambda: ["portable"])
        assert not packed.can_pack(torch.bfloat16, cpu)
    monkeypatch.setattr(packed, "load_extension", lambda: None)
    assert not packed.can_pack(torch.bfloat16, cpu)
