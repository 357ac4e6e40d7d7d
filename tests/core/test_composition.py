"""Together with torch's checkpointing, compiler, transforms and other hooks."""

import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from ssdtrain.storage import HostStore
from ssdtrain.testing import RecordingStore

from .helpers import KIB, assert_nothing_left, assert_same_bits, assert_transparent, backward, leaf, mlp

reentrant_or_not = pytest.mark.parametrize("use_reentrant", [False, True])


def block_with_dropout():
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, 64))


class TestCheckpointing:
    def run(self, context, forward, *, blocks=3):
        """Gradients of a stack of blocks with dropout, each of which `forward` runs."""
        torch.manual_seed(0)
        stack = nn.ModuleList(block_with_dropout() for _ in range(blocks))
        x = leaf(16, 64)
        with context or torch.enable_grad():
            y = x * 1
            for block in stack:
                y = y + forward(block, y)
            loss = y.square().mean()
        if context:
            context.synchronize()
        loss.backward()
        return [loss.detach(), x.grad, *(weight.grad for weight in stack.parameters())]

    @reentrant_or_not
    def test_of_every_block(self, offload, use_reentrant):
        def forward(block, y):
            return checkpoint(block, y, use_reentrant=use_reentrant)

        assert_same_bits(self.run(offload, forward), self.run(None, forward))
        assert offload.stats.bytes_written > 0
        assert_nothing_left(offload)

    def test_only_the_inputs_of_checkpointed_blocks_are_offloaded(self, make_offload):
        recording = RecordingStore(HostStore())
        offload = make_offload(store=recording)
        self.run(offload, lambda block, y: checkpoint(block, y, use_reentrant=False))
        # Three inputs, and the last sum for `square`; random states and whatever else is tiny.
        large = [write for write in recording.of_kind("write") if write.nbytes == 4 * KIB]
        assert len(large) == 4

    @reentrant_or_not
    def test_with_the_offloader_inside(self, offload, use_reentrant):
        """The inner context wins: what the block saves is offloaded."""

        def forward(block, y):
            def inside(y):
                with offload:
                    return block(y)

            return checkpoint(inside, y, use_reentrant=use_reentrant)

        assert_same_bits(self.run(None, forward), self.run(None, self.plain(use_reentrant)))
        offload.synchronize()

    @staticmethod
    def plain(use_reentrant):
        return lambda block, y: checkpoint(block, y, use_reentrant=use_reentrant)

    # The inner ones of reentrant checkpoints run without gradients the first time.
    @pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
    @reentrant_or_not
    def test_nested(self, offload, use_reentrant):
        def forward(block, y):
            def outer(y):
                return checkpoint(block, y.sin(), use_reentrant=use_reentrant).cos()

            return checkpoint(outer, y, use_reentrant=use_reentrant)

        assert_same_bits(self.run(offload, forward), self.run(None, forward))

    @reentrant_or_not
    def test_mixed_with_blocks_that_are_not(self, offload, use_reentrant):
        def forward(block, y):
            return checkpoint(block[:2], block[2:](y), use_reentrant=use_reentrant)

        assert_same_bits(self.run(offload, forward), self.run(None, forward))

    @reentrant_or_not
    def test_a_second_differentiable_input(self, offload, use_reentrant):
        def forward(block, y):
            return checkpoint(lambda a, b: block(a) * b, y, y.sin(), use_reentrant=use_reentrant)

        assert_same_bits(self.run(offload, forward), self.run(None, forward))

    @reentrant_or_not
    def test_backward_inside_the_context_does_not_offload_what_is_recomputed(self, offload, use_reentrant):
        """It is needed at once."""
        block, x = block_with_dropout(), leaf(16, 64)
        with offload:
            loss = checkpoint(block, x, use_reentrant=use_reentrant).sum()
            offload.synchronize()
            before = offload.stats
            loss.backward()
        offload.synchronize()
        after = offload.stats
        assert after.bytes_written == before.bytes_written
        assert after.tensors_packed - before.tensors_packed == after.tensors_exempt - before.tensors_exempt

    def test_sequential(self, offload):
        def run(context):
            torch.manual_seed(0)
            model, x = mlp(depth=6), leaf(16, 64)
            with context or torch.enable_grad():
                loss = checkpoint_sequential(model, 3, x, use_reentrant=False).square().mean()
            loss.backward()
            return [x.grad, *(weight.grad for weight in model.parameters())]

        assert_same_bits(run(offload), run(None))

    def test_selective(self, offload):
        from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

        def policy(_context, op, *_args, **_kwargs):
            keep = op is torch.ops.aten.addmm.default
            return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

        def forward(block, y):
            return checkpoint(
                block, y, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
            )

        assert_same_bits(self.run(offload, forward), self.run(None, forward))


class TestCompiler:
    @pytest.fixture(autouse=True)
    def fresh_compiler(self):
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    @pytest.mark.parametrize("prefetch_bytes", [0, 1, "1MiB"])
    def test_compiled_graphs(self, make_offload, prefetch_bytes):
        """All saved tensors of a graph are asked for before its first gradient."""

        def run(context):
            torch.manual_seed(0)
            model, x = mlp(), leaf(16, 64)
            compiled = torch.compile(model, backend="aot_eager")
            results = []
            for _ in range(2):
                with context or torch.enable_grad():
                    loss = compiled(x).square().mean()
                if context:
                    context.synchronize()
                loss.backward()
                results.append(loss.detach())
            return [*results, x.grad, *(weight.grad for weight in model.parameters())]

        offload = make_offload(prefetch_bytes=prefetch_bytes, store_queue_bytes="64KiB")
        assert_same_bits(run(offload), run(None))
        stats = offload.stats
        assert stats.bytes_written > 0
        # One unpack for each pack: the hooks ran when the graph did, not when it was traced.
        assert stats.bytes_read <= stats.bytes_written

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
    def test_compiled_to_machine_code(self, make_offload):
        """By inductor; the comparison is with the compiled model too, since compiling changes bits by itself."""

        def run(context):
            torch.manual_seed(0)
            model, inputs = mlp(), [leaf(16, 64), leaf(12, 64)]
            compiled = torch.compile(model, fullgraph=True, dynamic=True)
            for x in inputs:
                with context or torch.enable_grad():
                    loss = compiled(x).square().mean()
                if context:
                    context.synchronize()
                loss.backward()
            return [loss.detach(), *(one.grad for one in (*inputs, *model.parameters()))]

        offload = make_offload()
        assert_same_bits(run(offload), run(None))
        assert offload.stats.bytes_read > 0

    # Dynamo warns that it cannot trace the hooks, and runs them eagerly.
    @pytest.mark.filterwarnings("default")
    def test_the_context_inside_a_compiled_function(self, offload):
        def step(x):
            with offload:
                return x.sin().exp().sum()

        def build():
            return [leaf(64, 64)], torch.compile(step, backend="eager")

        assert_same_bits(backward(build), backward(lambda: ([leaf(64, 64)], lambda x: x.sin().exp().sum())))


class TestOtherHooks:
    def test_tensor_hooks(self, offload):
        def build():
            def forward(x):
                y = x.sin()
                y.register_hook(lambda grad: grad * 2)
                return y.exp().sum()

            return [leaf(64, 64)], forward

        assert_transparent(build, offload)

    def test_module_backward_hooks(self, offload):
        def build():
            model = mlp()
            model[1].register_full_backward_hook(
                lambda _module, grads, _outputs: tuple(grad * 2 for grad in grads)
            )
            return [leaf(16, 64), *model.parameters()], lambda x, *_: model(x).square().mean()

        assert_transparent(build, offload)

    def test_dispatch_modes(self, offload):
        from torch.utils.flop_counter import FlopCounterMode

        def run(context):
            torch.manual_seed(0)
            model, x, counter = mlp(), leaf(16, 64), FlopCounterMode(display=False)
            with counter:
                with context or torch.enable_grad():
                    loss = model(x).square().mean()
                loss.backward()
            return counter.get_total_flops(), [x.grad, *(weight.grad for weight in model.parameters())]

        flops, grads = run(offload)
        wanted_flops, wanted = run(None)
        assert flops == wanted_flops
        assert_same_bits(grads, wanted)

    @pytest.mark.filterwarnings("ignore:Anomaly Detection")
    def test_anomaly_detection(self, offload):
        with torch.autograd.detect_anomaly(check_nan=True):
            assert_transparent(lambda: ([leaf(64, 64)], lambda x: x.sin().exp().sum()), offload)

    def test_default_device_and_dtype(self, offload):
        with torch.device("meta"):
            x = torch.randn(64, 64, device="cpu", requires_grad=True)
            with offload:
                loss = x.sin().sum()
            offload.synchronize()
            loss.backward()
        assert_same_bits(x.grad, x.cos())

    def test_optimizer_in_backward(self, offload):
        def run(context):
            torch.manual_seed(0)
            model, x = mlp(), torch.randn(16, 64)
            optimizers = {weight: torch.optim.SGD([weight], 0.1) for weight in model.parameters()}

            def step(weight):
                optimizers[weight].step()
                weight.grad = None

            for weight in model.parameters():
                weight.register_post_accumulate_grad_hook(step)
            for _ in range(3):
                with context or torch.enable_grad():
                    loss = model(x).square().mean()
                loss.backward()
            return list(model.parameters())

        assert_same_bits(run(offload), run(None))

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    def test_a_forward_on_a_thread_without_python(self, offload):
        """As TorchScript's, or those on which autograd runs the backward passes of accelerators."""
        function = torch.jit.CompilationUnit("""
            def inner(x):
                return x.sin().exp()

            def forked(x):
                return torch.jit.wait(torch.jit.fork(inner, x)).sum()
        """).forked
        assert_transparent(lambda: ([leaf(64, 64)], function), offload)

    def test_hooks_may_be_disabled(self, offload):
        disabled = torch.autograd.graph.disable_saved_tensors_hooks("not here")
        with disabled, pytest.raises(RuntimeError, match="not here"), offload:
            pass
        assert_transparent(lambda: ([leaf(64, 64)], lambda x: x.sin().sum()), offload)

    def test_multithreaded_data_parallel_style(self, make_offload):
        """Each thread with its own model and offloader."""
        results = {}

        def work(at, context):
            generator = torch.Generator().manual_seed(at)
            x = torch.randn(64, 64, generator=generator).requires_grad_()
            with context or torch.enable_grad():
                loss = x.sin().exp().tanh().sum()
            loss.backward()
            results[at, context is None] = x.grad

        offloads = [make_offload() for _ in range(3)]
        threads = [threading.Thread(target=work, args=(at, one)) for at, one in enumerate(offloads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        for at in range(3):
            work(at, None)
            assert_same_bits(results[at, False], results[at, True])


def test_training_with_an_optimizer_and_clipping(make_offload):
    """Ten whole steps, weights compared at the end."""

    def run(offloading):
        torch.manual_seed(0)
        model = mlp()
        context = make_offload(model) if offloading else torch.enable_grad()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        losses = []
        for _ in range(10):
            batch = torch.randn(16, 64)
            with context:
                loss = (model(batch) - batch).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses + list(model.parameters())

    assert_same_bits(run(True), run(False))
