"""Ways of training that others had trouble with under offloading, as far as no other file has them."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ssdtrain.storage import HostStore
from ssdtrain.testing import RecordingStore

from .helpers import KIB, assert_nothing_left, assert_same_bits, assert_transparent, leaf, mlp, run_python

STEPS = 4


class TestTraining:
    """Whole steps: every loss, the gradients that the update leaves, and the weights at the end."""

    def train(self, context, model, batches, update, *, autocast=None):
        results = []
        for batch in batches:
            with (
                context or torch.enable_grad(),
                torch.autocast("cpu", autocast, enabled=autocast is not None),
            ):
                loss = model(batch).float().square().mean()
            if context:
                context.synchronize()
            update(loss)
            results.append(loss.detach())
            results += [None if weight.grad is None else weight.grad.clone() for weight in model.parameters()]
        return [*results, *model.parameters()]

    @pytest.mark.parametrize("set_to_none", [True, False])
    @pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
    def test_optimizers(self, make_offload, kind, set_to_none):
        def run(offloading):
            torch.manual_seed(0)
            model = mlp()
            context = make_offload(model) if offloading else None
            optimizer = kind(model.parameters(), 0.01)

            def update(loss):
                optimizer.zero_grad(set_to_none=set_to_none)
                loss.backward()
                nn.utils.clip_grad_value_(model.parameters(), 0.01)
                optimizer.step()

            results = self.train(context, model, torch.randn(STEPS, 16, 64), update)
            if offloading:
                assert context.stats.bytes_read == context.stats.bytes_written > 0
                assert_nothing_left(context)
            return results

        assert_same_bits(run(True), run(False))

    def test_scaled_gradients_with_a_step_that_overflows(self, make_offload):
        """The scaler skips that step and halves its factor, with offloading as without."""

        def run(offloading):
            torch.manual_seed(0)
            model = mlp()
            context = make_offload(model) if offloading else None
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
            scales = []

            def update(loss):
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                scales.append(scaler.get_scale())

            batches = torch.randn(STEPS, 16, 64)
            batches[1, 0, 0] = float("inf")
            results = self.train(context, model, batches, update, autocast=torch.float16)
            if offloading:
                assert context.stats.bytes_read > 0
            return scales, results

        scales, got = run(True)
        wanted_scales, wanted = run(False)
        assert scales == wanted_scales == [2.0**10, *[2.0**9] * (STEPS - 1)]
        assert_same_bits(got, wanted)

    def test_an_optimizer_that_gives_parameters_other_memory(self, make_offload):
        """As those do that keep all weights in one flat tensor: none of them is written, in any step."""
        written = []

        def run(offloading):
            torch.manual_seed(0)
            model = mlp()
            context = make_offload(model) if offloading else None

            def update(loss):
                loss.backward()
                flat = torch.cat([(one.data - 0.1 * one.grad).flatten() for one in model.parameters()])
                parts = flat.split([weight.numel() for weight in model.parameters()])
                for weight, part in zip(model.parameters(), parts, strict=True):
                    weight.data, weight.grad = part.view_as(weight), None
                if offloading:
                    written.append(context.stats.bytes_written)

            return self.train(context, model, torch.randn(STEPS, 16, 64), update)

        assert_same_bits(run(True), run(False))
        assert written[0] > 0
        assert written == [written[0] * (step + 1) for step in range(STEPS)]

    def test_tied_weights(self, make_offload):
        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.table, self.middle = nn.Embedding(100, 64), nn.Linear(64, 64)
                self.head = nn.Linear(64, 100, bias=False)
                self.head.weight = self.table.weight

            def forward(self, tokens):
                return self.head(functional.gelu(self.middle(self.table(tokens)))).log_softmax(-1)

        def run(offloading):
            torch.manual_seed(0)
            model = Tied()
            context = make_offload(model) if offloading else None
            optimizer = torch.optim.SGD(model.parameters(), 0.1)

            def update(loss):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

            results = self.train(context, model, torch.randint(0, 100, (STEPS, 4, 8)), update)
            if offloading:
                assert context.stats.bytes_read > 0
            return results

        assert_same_bits(run(True), run(False))


def test_only_the_layers_inside_the_context_are_written(make_offload):
    """Two of five, told apart by their sizes."""
    recording = RecordingStore(HostStore())
    offload = make_offload(store=recording)
    inputs = [leaf(rows, 256) for rows in (1, 2, 3, 4, 5)]
    total = 0
    for at, x in enumerate(inputs):
        with offload if at in {1, 3} else torch.enable_grad():
            total = total + x.sin().sum()
    offload.synchronize()
    total.backward()
    assert_same_bits([x.grad for x in inputs], [x.cos() for x in inputs])
    for kind in ("write", "read"):
        assert sorted(operation.nbytes for operation in recording.of_kind(kind)) == [2 * KIB, 4 * KIB]


class TestCheckpointPolicies:
    """What a policy has torch keep, torch keeps in a place of its own: ssdtrain gets the inputs, whatever it says.

    "CPU_OFFLOAD" is torch's own matter: torch 2.13 declares it, and recomputes.
    """

    @pytest.mark.parametrize("policy", CheckpointPolicy)
    def test_every_policy(self, make_offload, policy):
        def choose(_context, operation, *_args, **_kwargs):
            matrices = operation is torch.ops.aten.addmm.default
            return policy if matrices else CheckpointPolicy.PREFER_RECOMPUTE

        def run(context):
            torch.manual_seed(0)
            blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, 64))
                for _ in range(3)
            )
            x = y = leaf(16, 64)
            with context or torch.enable_grad():
                for block in blocks:
                    y = y + checkpoint(
                        block,
                        y,
                        use_reentrant=False,
                        context_fn=lambda: create_selective_checkpoint_contexts(choose),
                    )
                loss = y.square().mean()
            if context:
                context.synchronize()
            loss.backward()
            return [loss.detach(), x.grad, *(weight.grad for weight in blocks.parameters())]

        offload = make_offload()
        assert_same_bits(run(offload), run(None))
        # Three inputs, and the last sum for `square`.
        assert offload.stats.bytes_written == offload.stats.bytes_read == 4 * 16 * 64 * 4
        assert_nothing_left(offload)


class TestCompiler:
    """The context around a compiled model, over batches of three sizes."""

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

        def forward(self, x):
            return self.down(functional.gelu(self.up(x))).tanh()

    class Broken(Whole):
        def forward(self, x):
            y = functional.gelu(self.up(x))
            torch._dynamo.graph_break()
            return self.down(y).tanh()

    @pytest.fixture(autouse=True)
    def fresh_compiler(self):
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    # Dynamo looks at `.grad` of what it carries over a break.
    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
    @pytest.mark.parametrize(
        ("kind", "options"),
        [
            (Whole, {"fullgraph": True}),
            (Whole, {"fullgraph": True, "dynamic": True}),
            (Broken, {}),
            (Broken, {"dynamic": True}),
        ],
        ids=["whole", "dynamic", "broken", "broken and dynamic"],
    )
    def test_compiled_models(self, make_offload, kind, options):
        def run(offloading):
            torch.manual_seed(0)
            model = kind()
            compiled = torch.compile(model, backend="aot_eager", **options)
            context, results = make_offload(model) if offloading else None, []
            for rows in (16, 24, 40):
                x = leaf(rows, 64)
                with context or torch.enable_grad():
                    loss = compiled(x).square().mean()
                if context:
                    context.synchronize()
                loss.backward()
                results += [loss.detach(), x.grad]
            if offloading:
                assert context.stats.bytes_read == context.stats.bytes_written > 0
                del loss
                assert_nothing_left(context)
            return [*results, *(weight.grad for weight in model.parameters())]

        assert_same_bits(run(True), run(False))


class Saves(torch.autograd.Function):
    """Saves a tensor of any kind, and calls `look` with what comes back."""

    @staticmethod
    def forward(ctx, x, saved, look):
        ctx.save_for_backward(saved)
        ctx.look = look
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.look(ctx.saved_tensors[0])
        return grad, None, None


class TestUnusualTensors:
    def restored(self, context, saved):
        seen = []
        with context or torch.enable_grad():
            y = Saves.apply(torch.ones(1, requires_grad=True), saved, seen.append)
        if context is not None and hasattr(context, "synchronize"):
            context.synchronize()
        y.backward()
        return seen.pop()

    @pytest.mark.parametrize(
        "dtype",
        [
            torch.float8_e4m3fn,
            torch.float8_e4m3fnuz,
            torch.float8_e5m2,
            torch.float8_e5m2fnuz,
            torch.float8_e8m0fnu,
            torch.bool,
            torch.uint16,
            torch.int8,
        ],
        ids=str,
    )
    def test_every_byte_of_rare_types(self, offload, dtype):
        """Also those that stand for no number."""
        values = torch.arange(2 if dtype is torch.bool else 256, dtype=torch.uint8).repeat(1024).view(dtype)
        got = self.restored(offload, values)
        assert (got.dtype, got.shape) == (dtype, values.shape)
        assert_same_bits(got, values)
        assert offload.stats.bytes_read == values.nbytes

    def test_a_scalar_of_its_own(self, offload):
        value = torch.tensor(3.5)
        got = self.restored(offload, value)
        assert (got.shape, got.stride(), got.item()) == ((), (), 3.5)
        assert offload.stats.bytes_read == 4

    def test_attributes_of_a_saved_tensor_are_treated_as_by_any_hooks(self, offload):
        """Torch makes a new tensor of what hooks return: attributes are gone, and mark nothing."""
        values = torch.randn(64, 64)
        values.offloading, values.ssdtrain_keep = False, True
        others = torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x)
        for context in (offload, others):
            got = self.restored(context, values)
            assert_same_bits(got, values)
            assert not hasattr(got, "offloading")
        assert values.ssdtrain_keep is True
        assert offload.stats.bytes_read == values.nbytes

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    @pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
    def test_nested_tensors_in_a_model(self, make_offload, layout):
        """They stay in memory; what is computed of their values is offloaded."""

        def run(offloading):
            torch.manual_seed(0)
            model, parts = nn.Linear(64, 64), [leaf(rows, 64) for rows in (8, 5, 3)]
            context = make_offload(model) if offloading else None
            with context or torch.enable_grad():
                nested = torch.nested.as_nested_tensor(parts, layout=layout)
                y = functional.gelu(model(nested)).to_padded_tensor(0.0)
                loss = y.sin().square().mean()
            if offloading:
                context.synchronize()
                assert context.stats.bytes_written > 0
            loss.backward()
            return [loss.detach(), *(part.grad for part in parts), *(one.grad for one in model.parameters())]

        assert_same_bits(run(True), run(False))

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    def test_attention_over_jagged_tensors(self, make_offload):
        """On a CPU torch makes nested tensors of the other layout inside."""

        def run(offloading):
            torch.manual_seed(0)
            model, parts = nn.Linear(64, 64), [leaf(rows, 64) for rows in (8, 5, 3)]
            with make_offload(model) if offloading else torch.enable_grad():
                nested = model(torch.nested.as_nested_tensor(parts, layout=torch.jagged))
                heads = nested.unflatten(-1, (4, 16)).transpose(1, 2)
                y = functional.scaled_dot_product_attention(heads, heads, heads)
                loss = y.transpose(1, 2).flatten(-2).values().square().mean()
            loss.backward()
            return [loss.detach(), *(part.grad for part in parts), *(one.grad for one in model.parameters())]

        assert_same_bits(run(True), run(False))

    def test_overlapping_parts_that_are_saved_together(self, offload):
        """Each a view of one storage, and none within another."""

        def build():
            def forward(x):
                base = x * 1
                return sum(base[start : start + 40].sin().square().sum() for start in (0, 8, 16, 24))

            return [leaf(64, 64)], forward

        assert_transparent(build, offload)


# One process of a group of one. Prints "right", and what was written.
SHARDED = """
    import sys, torch, ssdtrain
    import torch.distributed as dist
    from torch import nn
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))

    def whole(tensor):
        return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

    def run(shard, offloading):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)) for _ in range(3)])
        shard(model)
        if offloading:
            context = ssdtrain.OffloadActivations(
                model, spill_dir=sys.argv[1], min_tensor_bytes=1, min_free_bytes=0
            )
        optimizer, results = torch.optim.SGD(model.parameters(), 0.1), []
        for step in range(3):
            x = torch.randn(16, 64, requires_grad=True)
            with context if offloading else torch.enable_grad():
                loss = model(x * 1).square().mean()
            if offloading and step != 1:
                context.synchronize()
            loss.backward()
            results += [loss.detach(), x.grad, *(whole(one.grad) for one in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
        if offloading:
            assert context.stats.bytes_read > 0
            context.close()
        return results

    def check(shard):
        got, wanted = run(shard, True), run(shard, False)
        assert len(got) == len(wanted)
        assert all(torch.equal(*pair) for pair in zip(got, wanted))
        print("right")
"""


class TestSharding:
    def run(self, code, directory):
        lines = SHARDED + "\n".join("    " + line for line in code.strip("\n").splitlines())
        return run_python(lines, directory).stdout.split()

    def test_weights_that_are_gathered_and_freed(self, tmp_path):
        """FSDP gives a weight's memory back after forward, whatever autograd has saved of it."""
        code = """
from torch.distributed.fsdp import fully_shard
for again in (True, False):
    def shard(model):
        for part in (*model, model):
            fully_shard(part, mesh=mesh, reshard_after_forward=again)
    check(shard)
"""
        assert self.run(code, tmp_path) == ["right", "right"]

    def test_distributed_tensors(self, tmp_path):
        """They are a subclass and stay in memory; the plain tensors beside them are offloaded."""
        code = """
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
def shard(model):
    parallelize_module(model, mesh, {"0.0": ColwiseParallel(), "1.0": RowwiseParallel()})
check(shard)
"""
        assert self.run(code, tmp_path) == ["right"]

    def test_memory_that_is_freed_while_its_write_is_queued(self, tmp_path):
        """And filled again before backward, as gathered tensors are: an error or the right gradient."""
        code = """
from ssdtrain.storage import DirectStore
from ssdtrain.testing import GatedStore, OffloadOver
store = GatedStore(DirectStore(sys.argv[1]), hold=("write",))
offload = OffloadOver(store, min_tensor_bytes=1)
x, factor = torch.randn(256, 256, requires_grad=True), torch.randn(256, 256)
copy = factor.clone()
with offload:
    loss = (x * factor).sum()
store.wait_for("write")
factor.untyped_storage().resize_(0)
others = [torch.full((256, 256), 7.0) for _ in range(8)]
store.open("write")
offload.synchronize()
factor.untyped_storage().resize_(copy.nbytes)
with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(factor):
    factor.copy_(copy)
try:
    loss.backward()
    print("right" if torch.equal(x.grad, copy) else "wrong")
except ssdtrain.SSDTrainError:
    print("error")
"""
        assert self.run(code, tmp_path) in (["right"], ["error"])
