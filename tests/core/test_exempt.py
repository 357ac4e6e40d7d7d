"""What is never offloaded: weights, by their memory, and what is not plain memory. And torch's own errors."""

import pytest
import torch
from torch import nn

from ssdtrain import InplaceModificationError

from .helpers import KIB, assert_same_bits, backward, leaf, mlp


def written(offload, forward):
    """Bytes that a forward pass writes; backward runs as well."""
    before = offload.stats.bytes_written
    with offload:
        loss = forward()
    offload.synchronize()
    loss.backward()
    return offload.stats.bytes_written - before


class TestWeights:
    """Each forward saves the input (16 x 64) and the weights; a weight is 64 x 64 or larger."""

    INPUT = 16 * 64 * 4

    @pytest.fixture
    def model(self):
        return nn.Linear(64, 256)

    @pytest.fixture
    def offload(self, make_offload, model):
        return make_offload(model)

    @pytest.fixture
    def assert_only_the_input_is_written(self, offload, model):
        def check(forward=None, inputs=1):
            x = leaf(16, 64)
            amount = written(offload, lambda: (forward or model)(x).sum())
            assert amount == inputs * self.INPUT

        return check

    def test_of_a_linear_layer(self, assert_only_the_input_is_written):
        """It saves the transpose, a plain tensor."""
        assert_only_the_input_is_written()

    def test_without_a_model(self, make_offload, model):
        assert written(make_offload(), lambda: model(leaf(16, 64)).sum()) == self.INPUT

    def test_frozen(self, assert_only_the_input_is_written, model, offload):
        model.requires_grad_(False)
        x = leaf(16, 64)
        assert written(offload, lambda: model(x).sum()) == 0

    def test_after_an_optimizer_step(self, assert_only_the_input_is_written, model):
        assert_only_the_input_is_written()
        torch.optim.AdamW(model.parameters()).step()
        assert_only_the_input_is_written()

    def test_after_a_conversion(self, offload, model):
        model.to(torch.float64)
        x = leaf(16, 64, dtype=torch.float64)
        assert written(offload, lambda: model(x).sum()) == 2 * self.INPUT

    def test_after_loading_a_state(self, assert_only_the_input_is_written, model):
        model.load_state_dict({name: torch.randn_like(value) for name, value in model.state_dict().items()})
        assert_only_the_input_is_written()
        state = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        assert_only_the_input_is_written()

    def test_after_its_data_was_swapped(self, assert_only_the_input_is_written, model):
        model.weight.data = torch.randn(256, 64)
        assert_only_the_input_is_written()

    def test_of_a_parameter_put_in_between_two_steps(self, assert_only_the_input_is_written, model):
        assert_only_the_input_is_written()
        model.weight = nn.Parameter(torch.randn(256, 64))
        assert_only_the_input_is_written()

    def test_tied(self, make_offload):
        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.table = nn.Embedding(100, 64)
                self.head = nn.Linear(64, 100, bias=False)
                self.head.weight = self.table.weight

            def forward(self, tokens):
                return self.head(self.table(tokens))

        model, tokens = Tied(), torch.randint(0, 100, (4, 4))
        amount = written(make_offload(model), lambda: model(tokens).sum())
        assert amount == tokens.nbytes + 16 * 64 * 4

    def test_views_of_all_kinds(self, assert_only_the_input_is_written, model):
        assert_only_the_input_is_written(lambda x: x @ model.weight.t()[:, :100])
        assert_only_the_input_is_written(lambda x: x @ model.weight.view(4, 64, 64)[2])

    def test_buffers_also_new_ones(self, make_offload):
        class Scaled(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("scale", torch.randn(16, 64))

            def forward(self, x):
                return x * self.scale

        model = Scaled()
        offload = make_offload(model)
        assert written(offload, lambda: model(leaf(16, 64)).sum()) == 0
        model.scale = torch.randn(16, 64)
        assert written(offload, lambda: model(leaf(16, 64)).sum()) == 0

    def test_running_statistics(self, make_offload):
        model = nn.BatchNorm1d(64)
        amount = written(make_offload(model), lambda: model(leaf(16, 64)).sum())
        # The input, and mean and inverse deviation of the batch.
        assert self.INPUT <= amount <= self.INPUT + 2 * 64 * 4

    def test_a_tensor_where_a_weight_used_to_be_is_no_weight(self, make_offload):
        """The memory of a dead weight, perhaps at the same address, is nothing special."""
        model = nn.Linear(64, 64, bias=False)
        offload = make_offload(model)
        model.weight = nn.Parameter(torch.randn(64, 64))
        for _ in range(20):
            x = leaf(64, 64)
            assert written(offload, lambda x=x: x.sin().sum()) == x.nbytes


class TestAutocast:
    """Autocast makes a low-precision copy of each weight: offloading it would write the weights again."""

    @pytest.mark.parametrize("trained", [True, False])
    def test_copies_of_weights_are_not_written(self, make_offload, trained):
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).requires_grad_(trained)
        offload = make_offload(model)
        x = leaf(16, 64)

        def forward():
            with torch.autocast("cpu", torch.bfloat16):
                return model(x).float().sum()

        activations = 2 * (16 * 64 + 16 * 256)
        assert 0 < written(offload, forward) <= activations

    def test_gradients_are_the_same(self, make_offload):
        def run(offloading):
            torch.manual_seed(0)
            model, x = mlp(), leaf(16, 64)
            context = make_offload(model) if offloading else torch.enable_grad()
            with context, torch.autocast("cpu", torch.bfloat16):
                loss = model(x).float().square().mean()
            if offloading:
                context.synchronize()
                assert context.stats.bytes_written > 0
            loss.backward()
            return [x.grad, *(weight.grad for weight in model.parameters())]

        assert_same_bits(run(True), run(False))

    def test_adapters_on_frozen_weights(self, make_offload):
        class Adapted(nn.Module):
            def __init__(self):
                super().__init__()
                self.base = nn.Linear(64, 64).requires_grad_(False)
                self.down, self.up = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)

            def forward(self, x):
                return self.base(x) + self.up(self.down(x))

        def run(offloading):
            torch.manual_seed(0)
            model, x = nn.Sequential(Adapted(), nn.GELU(), Adapted()), leaf(16, 64)
            context = make_offload(model) if offloading else torch.enable_grad()
            with context, torch.autocast("cpu", torch.bfloat16):
                loss = model(x).float().square().mean()
            if offloading:
                context.synchronize()
                # Of each layer the input and the low-rank middle, GELU's input, the loss's.
                assert 0 < context.stats.bytes_written <= 2 * (4 * 16 * 64 + 2 * 16 * 4) + 4 * 16 * 64
            loss.backward()
            return [x.grad, *(weight.grad for weight in model.parameters() if weight.requires_grad)]

        assert_same_bits(run(True), run(False))


class TestSmallTensors:
    def test_below_the_threshold(self, make_offload):
        offload = make_offload(min_tensor_bytes="16KiB")
        assert written(offload, lambda: leaf(64, 63).sin().sum()) == 0
        assert written(offload, lambda: leaf(64, 64).sin().sum()) == 16 * KIB

    def test_a_step_in_which_every_tensor_is_small(self, make_offload):
        """Waiting with nothing queued."""
        offload = make_offload(min_tensor_bytes="1GiB")
        program = lambda: ([leaf(64, 64)], lambda x: x.sin().exp().sum())  # noqa: E731
        assert_same_bits(backward(program, offload), backward(program))
        assert offload.stats.tensors_exempt == offload.stats.tensors_packed > 0

    def test_tensors_of_no_elements(self, make_offload):
        offload = make_offload(min_tensor_bytes=0)
        program = lambda: ([leaf(0, 64)], lambda x: x.sin().sum())  # noqa: E731
        assert_same_bits(backward(program, offload), backward(program))
        assert offload.stats.bytes_written == 0

    def test_a_view_of_no_elements_of_a_large_storage(self, offload):
        def build():
            return [leaf(64, 64)], lambda x: (x * 1)[5:5].sin().sum()

        assert_same_bits(backward(build, offload), backward(build))
        assert offload.stats.bytes_written == 0

    def test_a_storage_that_was_emptied(self, make_offload):
        """As sharded training does with gathered weights."""
        offload = make_offload(min_tensor_bytes=0)
        x, values = leaf(64, 64), torch.randn(64, 64)
        copy = values.clone()
        values.untyped_storage().resize_(0)
        with offload:
            y = _SavesOnly.apply(x, values)
        offload.synchronize()
        values.untyped_storage().resize_(copy.nbytes)
        y.sum().backward()
        assert_same_bits(x.grad, torch.ones(64, 64))


class _SavesOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, values):
        ctx.save_for_backward(values)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.saved_tensors  # noqa: B018
        return grad, None


class Tagged(torch.Tensor):
    """A subclass that wraps nothing and is known to nobody."""


class TestUnusualTensors:
    """They are passed through untouched, with torch's check of in-place changes."""

    def check(self, offload, forward, *leaves):
        plain = [one.detach().clone().requires_grad_() for one in leaves]
        forward(*plain).backward()
        with offload:
            loss = forward(*leaves)
        offload.synchronize()
        loss.backward()
        return [one.grad for one in leaves], [one.grad for one in plain]

    def test_sparse(self, offload):
        matrix = torch.eye(64).to_sparse()
        got, wanted = self.check(offload, lambda x: torch.sparse.mm(matrix, x.sin()).sum(), leaf(64, 64))
        assert_same_bits(got, wanted)

    @pytest.mark.filterwarnings("ignore:Sparse CSR")
    def test_sparse_rows(self, offload):
        matrix = torch.eye(64).to_sparse_csr()
        got, wanted = self.check(offload, lambda x: (matrix @ x.sin()).sum(), leaf(64, 64))
        assert_same_bits(got, wanted)

    def test_nested(self, offload):
        def forward(a, b):
            nested = torch.nested.as_nested_tensor([a, b], layout=torch.jagged)
            return nested.sin().values().sum()

        got, wanted = self.check(offload, forward, leaf(8, 64), leaf(5, 64))
        assert_same_bits(got, wanted)

    def test_a_subclass(self, offload):
        values = torch.randn(64, 64).as_subclass(Tagged)
        with offload:
            y = _SavesOnly.apply(leaf(64, 64), values)
        y.sum().backward()
        assert (offload.stats.tensors_packed, offload.stats.tensors_exempt) == (1, 1)

    def test_arithmetic_of_a_subclass(self, offload):
        factor = torch.randn(64, 64).as_subclass(Tagged)

        def forward(x):
            return (x.as_subclass(Tagged) * factor).sum().as_subclass(torch.Tensor)

        got, wanted = self.check(offload, forward, leaf(64, 64))
        assert_same_bits(got, wanted)

    def test_meta(self, offload):
        with offload:
            loss = torch.randn(64, 64, device="meta", requires_grad=True).sin().sum()
        loss.backward()
        assert offload.stats.tensors_exempt == offload.stats.tensors_packed

    def test_fake(self, offload):
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode(), offload:
            torch.randn(64, 64, requires_grad=True).sin().sum().backward()
        assert offload.stats.bytes_written == 0

    @pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
    def test_quantised(self, offload):
        values = torch.quantize_per_tensor(torch.randn(64, 64), 0.1, 0, torch.qint8)
        with offload:
            y = _SavesOnly.apply(leaf(64, 64), values)
        offload.synchronize()
        y.sum().backward()
        assert offload.stats.bytes_written == 0

    def test_zero_tensors(self, offload):
        x = leaf(64, 64)
        with offload:
            y = _SavesOnly.apply(x, torch._efficientzerotensor(64, 64))
        y.sum().backward()
        assert offload.stats.bytes_written == 0

    def test_a_lazily_initialised_model(self, make_offload):
        model = nn.Sequential(nn.LazyLinear(64), nn.ReLU())
        offload = make_offload(model)
        assert written(offload, lambda: model(leaf(16, 32)).sum()) > 0
        assert written(offload, lambda: model(leaf(16, 32)).sum()) > 0

    def test_the_check_of_in_place_changes_stays(self, offload):
        values = torch.randn(64, 64).as_subclass(Tagged)
        with offload:
            y = _SavesOnly.apply(leaf(64, 64), values)
        values.add_(1)
        with pytest.raises(InplaceModificationError):
            y.sum().backward()


class TestErrorsOfTorch:
    """The same text with and without the offloader."""

    def error(self, context, function):
        try:
            with context:
                function()
        except RuntimeError as error:
            return str(error)
        raise AssertionError("no error")

    def test_inference_tensors(self, offload):
        with torch.inference_mode():
            x = torch.randn(64, 64)
        weight = leaf(64, 64)
        plain = self.error(torch.enable_grad(), lambda: x * weight)
        assert "Inference tensors cannot be saved for backward" in plain
        assert self.error(offload, lambda: x * weight) == plain

    def test_function_transforms_of_gradients(self, offload):
        def transform():
            return torch.func.grad(lambda x: x.sin().sum())(torch.randn(64, 64))

        other = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
        assert self.error(offload, transform) == self.error(other, transform)

    def test_vmap_works(self, offload):
        def build():
            weight = torch.randn(32, 32)
            return [leaf(8, 32)], lambda x: torch.vmap(lambda row: (weight @ row.sin()).exp())(x).sum()

        assert_same_bits(backward(build, offload), backward(build))

    def test_shapes(self, offload):
        def mismatch():
            return leaf(3, 4) @ leaf(3, 4)

        assert self.error(offload, mismatch) == self.error(torch.enable_grad(), mismatch)


def test_functional_calls_with_other_weights(make_offload):
    """Weights given from outside are not the model's: right, whatever is written."""
    model = nn.Linear(64, 64)
    offload = make_offload(model)

    def build():
        weights = {name: leaf(*value.shape) for name, value in model.named_parameters()}
        x = leaf(16, 64)
        return (
            [x, *weights.values()],
            lambda x, weight, bias: (
                torch.func.functional_call(model, {"weight": weight, "bias": bias}, (x,)).square().sum()
            ),
        )

    assert_same_bits(backward(build, offload), backward(build))
