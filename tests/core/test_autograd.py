"""What autograd lets one do with a graph works as without offloading, bit for bit."""

import gc
import threading

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ssdtrain.storage import HostStore
from ssdtrain.testing import GatedStore

from .helpers import (
    Identity,
    assert_nothing_left,
    assert_same_bits,
    assert_transparent,
    backward,
    leaf,
    mlp,
    model_program,
)


class TestBackward:
    def test_a_deep_model(self, offload):
        assert_transparent(model_program(lambda: mlp(depth=6), 32, 64), offload)

    def test_a_transformer_layer(self, offload):
        def layer():
            return nn.TransformerEncoderLayer(32, 4, dim_feedforward=64, dropout=0.1, batch_first=True)

        assert_transparent(model_program(layer, 4, 16, 32), offload)

    def test_a_recurrent_model(self, offload):
        class Last(nn.LSTM):
            def forward(self, x):
                return super().forward(x)[0]

        assert_transparent(model_program(lambda: Last(16, 16, num_layers=2), 8, 4, 16), offload)

    def test_values_that_are_not_numbers(self, offload):
        def build():
            x = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -1.0]).repeat(100).requires_grad_()
            return [x], lambda x: (x.sqrt() * x.log() / x).sum()

        assert_transparent(build, offload)

    def test_backward_inside_the_context(self, make_offload):
        def run(offload):
            torch.manual_seed(0)
            x = leaf(64, 64)
            if offload is None:
                x.exp().sin().sum().backward()
            else:
                with offload:
                    loss = x.exp().sin().sum()
                    offload.synchronize()
                    loss.backward()
            return x.grad

        offload = make_offload()
        assert_same_bits(run(offload), run(None))
        assert offload.stats.bytes_read > 0

    def test_backward_with_writes_still_under_way(self, offload):
        assert_transparent(model_program(lambda: mlp(depth=6), 32, 64), offload, settle=False)
        offload.synchronize()

    def test_retain_graph_twice(self, offload):
        def run(context):
            torch.manual_seed(0)
            x = leaf(64, 64)
            with context or torch.enable_grad():
                loss = x.exp().sin().sum()
            if context:
                context.synchronize()
            grads = []
            for retain in (True, True, False):
                x.grad = None
                loss.backward(retain_graph=retain)
                grads.append(x.grad)
            return grads

        assert_same_bits(run(offload), run(None))
        assert offload.stats.bytes_read > offload.stats.bytes_written

    def test_a_second_backward_without_retain_graph_gives_torch_s_own_error(self, offload):
        x = leaf(64)
        with offload:
            loss = x.exp().sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()

    def test_gradients_of_some_inputs(self, offload):
        def run(context):
            torch.manual_seed(0)
            a, b, c = leaf(64, 64), leaf(64, 64), leaf(64, 64)
            with context or torch.enable_grad():
                loss = ((a @ b).sin() * c).sum()
            if context:
                context.synchronize()
            (first,) = torch.autograd.grad(loss, [c], retain_graph=True)
            (second,) = torch.autograd.grad(loss, [a], retain_graph=True)
            return [first, second, *torch.autograd.grad(loss, [b, c])]

        assert_same_bits(run(offload), run(None))

    def test_several_losses_of_one_shared_trunk(self, offload):
        def run(context):
            torch.manual_seed(0)
            x = leaf(64, 64)
            with context or torch.enable_grad():
                trunk = x.exp().sin()
                losses = [trunk.cos().sum(), trunk.tanh().sum(), (trunk * trunk).sum()]
            if context:
                context.synchronize()
            for loss in losses:
                loss.backward(retain_graph=True)
            return x.grad

        assert_same_bits(run(offload), run(None))
        assert offload.stats.bytes_written > 0

    def test_gradients_are_added_up_over_micro_batches(self, offload):
        def run(context):
            torch.manual_seed(0)
            model, batches = mlp(), torch.randn(4, 16, 64)
            for batch in batches:
                with context or torch.enable_grad():
                    loss = model(batch).square().mean()
                loss.backward()
            return [weight.grad for weight in model.parameters()]

        assert_same_bits(run(offload), run(None))

    def test_a_gradient_that_is_not_used_for_anything(self, offload):
        """Three steps with a branch that backward never reaches: no error, nothing left."""
        for _ in range(3):
            x = leaf(64, 64)
            with offload:
                used, unused = x.sin().sum(), x.exp().cos()
            used.backward()
            del used, unused
            assert_nothing_left(offload)


class TestReadingSavedTensors:
    def test_saved_tensors_read_twice_in_one_backward(self, offload):
        class Square(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x * x

            @staticmethod
            def backward(ctx, grad):
                (first,), (second,) = ctx.saved_tensors, ctx.saved_tensors
                return grad * (first + second)

        assert_transparent(lambda: ([leaf(64, 64)], lambda x: Square.apply(x).sum()), offload)

    def test_a_saved_tensor_that_is_peeked_at(self, offload):
        def run(context):
            torch.manual_seed(0)
            x = leaf(64, 64)
            with context or torch.enable_grad():
                y = x.sin().exp()
            if context:
                context.synchronize()
            seen = [y.grad_fn._saved_result, y.grad_fn._saved_result]
            y.sum().backward()
            return [*seen, x.grad]

        assert_same_bits(run(offload), run(None))
        assert offload.stats.bytes_read > 0

    def test_a_restored_tensor_that_outlives_its_graph(self, offload):
        """Its memory is not reused while a view of it lives."""
        x = leaf(64, 64)
        with offload:
            y = x.exp()
        wanted = y.detach().clone()
        offload.synchronize()
        seen = y.grad_fn._saved_result[::2]
        y.sum().backward()
        del y
        for _ in range(3):
            other = leaf(64, 64)
            with offload:
                z = other.exp()
            offload.synchronize()
            z.sum().backward()
        assert_same_bits(seen, wanted[::2])

    def test_a_custom_function_that_returns_a_view_of_what_it_saved(self, offload):
        """The view escapes the node, and stays right while other memory is restored."""

        class Select(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, weight):
                ctx.save_for_backward(weight)
                return (x * weight[:, :32]).sum()

            @staticmethod
            def backward(ctx, grad):
                (weight,) = ctx.saved_tensors
                return weight[:, :32], None

        def build():
            return [
                leaf(64, 32)
            ], lambda x: Select.apply(x.sin().view_as(x), torch.randn(64, 64)) + x.exp().sum()

        assert_transparent(build, offload)

    def test_gradients_that_are_saved_tensors_add_up(self, offload):
        """A function that computes its gradient in forward returns it: it may become `.grad` and be added to."""

        class Precomputed(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, gradient):
                ctx.save_for_backward(gradient)
                return (x * gradient).sum()

            @staticmethod
            def backward(ctx, grad):
                return ctx.saved_tensors[0], None

        def run(context):
            x, gradient = torch.ones(64, 64, requires_grad=True), torch.full((64, 64), 3.0)
            with context or torch.enable_grad():
                loss = Precomputed.apply(x, gradient)
            if context:
                context.synchronize()
            grads = []
            for _ in range(3):
                loss.backward(retain_graph=True)
                grads.append(x.grad.clone())
            return grads

        assert_same_bits(run(offload), run(None))


class TestHigherDerivatives:
    def test_gradient_of_a_gradient(self, offload):
        def run(context):
            torch.manual_seed(0)
            x = leaf(64, 64)
            with context or torch.enable_grad():
                loss = (x.exp() * x.sin()).sum()
                if context:
                    context.synchronize()
                (first,) = torch.autograd.grad(loss, x, create_graph=True)
            if context:
                context.synchronize()
            first.square().sum().backward()
            return [first, x.grad]

        assert_same_bits(run(offload), run(None))
        assert offload.stats.bytes_read > 0

    def test_gradient_of_a_gradient_outside_the_context(self, offload):
        def run(context):
            torch.manual_seed(0)
            model, x = mlp(32, 2), leaf(8, 32)
            with context or torch.enable_grad():
                loss = model(x).square().sum()
            if context:
                context.synchronize()
            (first,) = torch.autograd.grad(loss, x, create_graph=True)
            first.square().sum().backward()
            return [first, x.grad, *(weight.grad for weight in model.parameters())]

        assert_same_bits(run(offload), run(None))

    def test_gradcheck_and_gradgradcheck(self, offload):
        def function(a, b):
            with offload:
                result = (a @ b).tanh() * a.exp()
            offload.synchronize()
            return result

        a, b = leaf(4, 4, dtype=torch.float64), leaf(4, 4, dtype=torch.float64)
        assert torch.autograd.gradcheck(function, (a, b))
        assert torch.autograd.gradgradcheck(function, (a, b))
        assert offload.stats.bytes_read > 0


class TestOrderOfForwardsAndBackwards:
    def test_backward_after_the_next_forward_has_begun(self, offload):
        def run(context):
            torch.manual_seed(0)
            model, first, second = mlp(), torch.randn(16, 64), torch.randn(16, 64)
            with context or torch.enable_grad():
                early = model(first).square().mean()
            with context or torch.enable_grad():
                half = model[:4](second)
                early.backward()
                late = model[4:](half).square().mean()
            late.backward()
            return [weight.grad for weight in model.parameters()]

        assert_same_bits(run(offload), run(None))

    @pytest.mark.parametrize("order", [(0, 1), (1, 0)])
    def test_two_forwards_before_the_backwards(self, offload, order):
        def run(context):
            torch.manual_seed(0)
            model, batches, losses = mlp(), torch.randn(2, 16, 64), []
            for batch in batches:
                with context or torch.enable_grad():
                    losses.append(model(batch).square().mean())
            for at in order:
                losses[at].backward()
            return [weight.grad for weight in model.parameters()]

        assert_same_bits(run(offload), run(None))
        assert_nothing_left(offload)

    def test_a_policy_and_a_frozen_reference(self, offload):
        def run(context):
            torch.manual_seed(0)
            policy, reference, batch = mlp(), mlp(), torch.randn(16, 64)
            with context or torch.enable_grad():
                with torch.no_grad():
                    wanted = reference(batch)
                chosen, rejected = policy(batch), policy(batch + 1)
                loss = (chosen - rejected - wanted).sigmoid().log().mean()
            loss.backward()
            return [weight.grad for weight in policy.parameters()]

        assert_same_bits(run(offload), run(None))

    def test_one_offloader_interleaved_over_two_models(self, offload):
        def run(context):
            torch.manual_seed(0)
            models, batch, grads = [mlp(), mlp(32)], torch.randn(16, 64), []
            for _ in range(3):
                with context or torch.enable_grad():
                    one = models[0](batch).square().mean()
                with context or torch.enable_grad():
                    two = models[1](batch[:, :32]).square().mean()
                two.backward()
                one.backward()
            for model in models:
                grads += [weight.grad for weight in model.parameters()]
            return grads

        assert_same_bits(run(offload), run(None))
        assert_nothing_left(offload)

    def test_two_offloaders_at_once(self, make_offload):
        one, two = make_offload(), make_offload()

        def run(first, second):
            torch.manual_seed(0)
            a, b, batch = mlp(), mlp(), torch.randn(16, 64)
            with first:
                left = a(batch)
            with second:
                right = b(batch)
            with first:
                loss = (left * right).square().mean()
            for context in (first, second):
                if context is one or context is two:
                    context.synchronize()
            loss.backward()
            return [weight.grad for weight in [*a.parameters(), *b.parameters()]]

        assert_same_bits(run(one, two), run(torch.enable_grad(), torch.enable_grad()))
        assert one.stats.bytes_written > 0
        assert two.stats.bytes_written > 0

    def test_of_nested_contexts_the_inner_one_wins(self, make_offload):
        outer, inner = make_offload(), make_offload()
        x = leaf(64, 64)
        with outer:
            y = x.exp()
            with inner:
                y = y.sin()
            y = y.tanh()
        outer.synchronize()
        inner.synchronize()
        y.sum().backward()
        assert (outer.stats.tensors_packed, inner.stats.tensors_packed) == (2, 1)
        assert_same_bits(x.grad, backward(lambda: ([x.detach().requires_grad_()], _chain))[1])

    def test_an_inner_save_on_cpu_wins(self, offload):
        x = leaf(64, 64)
        with offload, torch.autograd.graph.save_on_cpu():
            y = x.exp()
        y.sum().backward()
        assert offload.stats.tensors_packed == 0


def _chain(x):
    return x.exp().sin().tanh().sum()


class TestDroppedGraphs:
    def test_a_graph_that_is_dropped_gives_its_room_back(self, offload):
        x = leaf(64, 64)
        with offload:
            y = x.exp().sin()
        offload.synchronize()
        assert offload.stats.live_bytes_on_disk > 0
        del y
        assert_nothing_left(offload)

    @pytest.mark.parametrize("options", [{}, {"min_tensor_bytes": "1MiB"}, {"store_queue_bytes": 1}], ids=str)
    def test_an_output_that_its_own_node_saves_is_freed(self, make_offload, options):
        """`exp` saves its result: a hook that kept the tensor with its graph would keep it for ever."""
        gated = GatedStore(HostStore(), hold=("write",), timeout=30)
        offload = make_offload(store=gated, **options)
        gc.collect()
        gc.disable()
        try:
            with offload:
                other, y = leaf(64, 64).cos(), leaf(64, 64).exp()
            storage = StorageWeakRef(y.untyped_storage())
            del other, y
            gated.open("write")
            offload.synchronize()
            assert storage.expired()
            assert offload.stats.live_blocks == 0
        finally:
            gc.enable()

    def test_a_graph_dropped_while_its_writes_are_queued(self, make_offload, gated):
        offload = make_offload(store=gated)
        with offload:
            y = leaf(64, 64).exp().sin()
        gated.wait_for("write")
        del y
        gated.open("write")
        assert_nothing_left(offload)

    def test_a_block_that_is_joined_while_the_write_of_its_dead_graph_runs(self, make_offload, gated):
        offload = make_offload(store=gated)
        x, weight = leaf(64), torch.randn(64)
        with offload:
            y = x * weight
        gated.wait_for("write")
        del y
        with offload:
            y = x * weight
        gated.open("write")
        offload.synchronize()
        y.sum().backward()
        assert_same_bits(x.grad, weight)
        del y
        assert_nothing_left(offload)

    def test_a_forward_without_gradients_writes_nothing(self, offload):
        model = mlp()
        with offload, torch.no_grad():
            model(torch.randn(16, 64))
        offload.synchronize()
        stats = offload.stats
        assert (stats.tensors_packed, stats.bytes_written) == (0, 0)

    def test_a_pass_without_gradients_between_two_steps(self, offload):
        def run(context):
            torch.manual_seed(0)
            model, batch = mlp(), torch.randn(16, 64)
            for _ in range(2):
                with context or torch.enable_grad():
                    loss = model(batch).square().mean()
                    with torch.no_grad():
                        model(batch * 2)
                loss.backward()
            return [weight.grad for weight in model.parameters()]

        assert_same_bits(run(offload), run(None))


class TestThreads:
    def test_forward_passes_in_several_threads(self, offload):
        def run(context):
            torch.manual_seed(0)
            model, batches, results = mlp(), torch.randn(4, 16, 64), {}

            def work(at):
                with context or torch.enable_grad():
                    loss = model(batches[at]).square().mean()
                results[at] = torch.autograd.grad(loss, list(model.parameters()))

            threads = [threading.Thread(target=work, args=(at,)) for at in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            return [grad for at in range(4) for grad in results[at]]

        assert_same_bits(run(offload), run(None))
        assert offload.stats.tensors_packed > 0
        assert_nothing_left(offload)

    def test_forward_in_a_thread_that_has_ended(self, offload):
        x, results = leaf(64, 64), []

        def forward():
            with offload:
                results.append(x.exp().sin().sum())

        thread = threading.Thread(target=forward)
        thread.start()
        thread.join(30)
        offload.synchronize()
        results.pop().backward()
        wanted = backward(lambda: ([x.detach().requires_grad_()], lambda x: x.exp().sin().sum()))
        assert_same_bits(x.grad, wanted[1])
        assert_nothing_left(offload)

    def test_backward_of_one_shared_graph_in_two_threads(self, offload):
        x = leaf(64, 64)
        with offload:
            loss = x.exp().sin().sum()
        offload.synchronize()
        grads = []

        def work():
            grads.extend(torch.autograd.grad(loss, x, retain_graph=True))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        wanted = backward(lambda: ([x.detach().requires_grad_()], lambda x: x.exp().sin().sum()))[1]
        assert_same_bits(grads, [wanted] * 4)


class TestExceptions:
    """Whatever raises, the next step is clean."""

    @pytest.fixture
    def clean_step(self):
        def check(offload):
            assert_transparent(model_program(mlp, 16, 64), offload)
            assert_nothing_left(offload)

        return check

    def test_in_forward(self, offload, clean_step):
        def forward():
            with offload:
                y = leaf(64, 64).exp()
                y @ torch.randn(3, 3)

        with pytest.raises(RuntimeError, match="shapes"):
            forward()
        clean_step(offload)

    def test_in_backward(self, offload, clean_step):
        class Broken(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, grad):
                raise ZeroDivisionError

        with offload:
            loss = Broken.apply(leaf(64, 64).exp()).sin().sum()
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        del loss
        clean_step(offload)

    def test_in_a_module_s_hook(self, offload, clean_step):
        def broken(*_):
            raise ZeroDivisionError

        def forward():
            model = mlp()
            model[2].register_forward_hook(broken)
            with offload:
                model(torch.randn(16, 64))

        with pytest.raises(ZeroDivisionError):
            forward()
        clean_step(offload)

    def test_in_another_pack_hook(self, offload, clean_step):
        def broken(_):
            raise ZeroDivisionError

        def forward():
            with offload:
                y = leaf(64, 64).exp()
                with torch.autograd.graph.saved_tensors_hooks(broken, broken):
                    y.sin()

        with pytest.raises(ZeroDivisionError):
            forward()
        clean_step(offload)

    def test_in_pack(self, make_offload, faulty, clean_step):
        from ssdtrain.testing import Fault

        offload = make_offload(store=faulty, on_store_error="raise")
        faulty.faults = (Fault(operation="write", index=0),)
        x = leaf(64, 64)
        with offload:
            y = x.exp()
        with pytest.raises(OSError, match="injected"):
            offload.synchronize()
        y.sum().backward()
        del y
        clean_step(offload)

    def test_leaves_no_hook_behind(self, offload):
        def forward():
            with offload:
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            forward()
        packed = offload.stats.tensors_packed
        leaf(64).exp()
        assert offload.stats.tensors_packed == packed


class TestCustomFunctions:
    def test_a_custom_function(self, offload):
        Identity.seen.clear()
        assert_transparent(lambda: ([leaf(64, 64)], lambda x: Identity.apply(x * 2)), offload)
        assert_same_bits(Identity.seen[1], Identity.seen[0])
        Identity.seen.clear()

    def test_no_gradient_for_some_inputs(self, offload):
        class Scale(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, factor):
                ctx.save_for_backward(x, None, factor)
                return x * factor

            @staticmethod
            def backward(ctx, grad):
                x, nothing, factor = ctx.saved_tensors
                assert nothing is None
                return grad * factor, (grad * x).sum()

        assert_transparent(lambda: ([leaf(64, 64), leaf()], lambda x, f: Scale.apply(x, f).sum()), offload)
