"""What only a real GPU can show: order between streams, memory that is reused too early, and running out of it."""

import math
from contextlib import nullcontext, suppress

import pytest
import torch
from core.helpers import Identity, assert_nothing_left, assert_same_bits, run_python

import ssdtrain
from ssdtrain.testing.engine_suite import EngineSuite

pytestmark = pytest.mark.gpu

MIB = 1 << 20
LAST = torch.device("cuda", torch.cuda.device_count() - 1)

# In clock cycles, some tens of milliseconds: a copy or a write that does not wait for it is long done.
A_WHILE = 50_000_000

MANY = 24
ELEMENTS = 2 * MIB  # of float32, 8 MiB


def opens(backend):
    """Whether this machine lets a backend be used; scripts/gpu_check says why not."""
    try:
        ssdtrain.OffloadActivations(backend=backend).close()
    except ssdtrain.ConfigError:
        return False
    return True


BACKENDS = [name for name in ("direct", "gds", "host") if opens(name)]


@pytest.fixture(autouse=True, scope="module")
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=BACKENDS)
def make(request):
    """Makes offloaders of tensors of every size."""
    made = []

    def make(model=None, **options):
        options = {"backend": request.param, "min_tensor_bytes": 1, "min_free_bytes": 0} | options
        made.append(ssdtrain.OffloadActivations(model, **options))
        return made[-1]

    yield make
    for offload in made:
        offload.close()


@pytest.fixture
def offload(make):
    offload = make()
    yield offload
    assert_nothing_left(offload)


class TestContract(EngineSuite):
    device = "cuda"

    @pytest.fixture
    def offload(self, make):
        return make()


class Save(torch.autograd.Function):
    """Saves tensors of any kind beside what carries the gradient."""

    @staticmethod
    def forward(ctx, carry, *tensors):
        ctx.save_for_backward(*tensors)
        return carry.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, *(None for _ in ctx.saved_tensors)


def save(*tensors):
    """The node that has saved them."""
    return Save.apply(torch.ones(1, device="cuda", requires_grad=True), *tensors).grad_fn


def random(*shape, device="cuda"):
    return torch.randn(shape, device=device)


def random_bytes(nbytes, device="cuda"):
    return torch.randint(256, (nbytes,), dtype=torch.uint8, device=device)


def assert_comes_back(offload, *tensors):
    """From the store, with bits, strides and device."""
    wanted = [tensor.clone() for tensor in tensors]
    with offload:
        node = save(*tensors)
    offload.synchronize()
    read = offload.stats.bytes_read
    got = node.saved_tensors
    assert offload.stats.bytes_read > read
    assert_same_bits(got, wanted)
    assert [one.stride() for one in got] == [one.stride() for one in tensors]
    assert [one.device for one in got] == [one.device for one in tensors]


BORDERS = [4 << 10, 1 * MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB, 64 * MIB]


class TestSizesAndShapes:
    @pytest.mark.parametrize(
        "nbytes", [1, 511, *(border + more for border in BORDERS for more in (-1, 0, 1))]
    )
    def test_size(self, offload, nbytes):
        assert_comes_back(offload, random_bytes(nbytes))

    @pytest.mark.parametrize(
        ("start", "stop"), [(12345, 12345 + 777), (4096, 8192), (1, 5 * MIB + 1), (-4097, None), (None, 3)]
    )
    def test_slice_of_a_large_storage(self, offload, start, stop):
        assert_comes_back(offload, random_bytes(96 * MIB)[start:stop])

    @pytest.mark.parametrize(
        "view",
        [
            lambda a: a.t(),
            lambda a: a[::2, 1::3],
            lambda a: a[:, 5],
            lambda a: a[7].expand(40, -1),
            lambda a: a.view(16, 64, 8, 128).contiguous(memory_format=torch.channels_last),
            lambda a: a.as_strided((100, 100), (3, 5), 11),
        ],
        ids=["transposed", "strided", "column", "expanded", "channels last", "overlapping"],
    )
    def test_view(self, offload, view):
        assert_comes_back(offload, view(random(1024, 1024)))

    def test_views_of_one_storage_share_memory_again(self, offload):
        base = random(3, ELEMENTS)
        with offload:
            node = save(*base.unbind())
        offload.synchronize()
        got = node.saved_tensors
        assert len({one.untyped_storage().data_ptr() for one in got}) == 1
        assert offload.stats.bytes_written == base.nbytes
        assert_same_bits(got, base.unbind())

    def test_tensors_of_host_and_device_in_one_pass(self, offload):
        assert_comes_back(offload, random(1000, 1000), random(1000, 1000, device="cpu"))

    def test_the_last_device_beside_the_first(self, offload):
        assert_comes_back(offload, random(1000, 1000), random(1000, 1000, device=LAST))


settled = pytest.mark.parametrize("settled", [True, False], ids=["settled", "at once"])


class TestStreams:
    @settled
    def test_a_value_that_is_computed_late_is_waited_for(self, offload, settled):
        x = random(ELEMENTS)
        wanted = x * 3
        torch.cuda.synchronize()
        a = torch.zeros_like(x)
        torch.cuda._sleep(A_WHILE)
        a.copy_(x).mul_(3)
        with offload:
            node = save(a)
        if settled:
            offload.synchronize()
        assert_same_bits(node.saved_tensors, [wanted])

    @settled
    def test_packed_in_one_stream_and_unpacked_in_another(self, offload, settled):
        packs, unpacks = torch.cuda.Stream(), torch.cuda.Stream()
        x = random(MANY, ELEMENTS)
        wanted = x * 3
        torch.cuda.synchronize()
        nodes = []
        with torch.cuda.stream(packs), offload:
            for row in x:
                torch.cuda._sleep(A_WHILE // 50)
                nodes.append(save(row * 3))
        if settled:
            offload.synchronize()
        with torch.cuda.stream(unpacks):
            unpacks.wait_stream(packs)  # as plain torch would need it
            got = [node.saved_tensors[0] * 1 for node in nodes]
        unpacks.synchronize()
        assert_same_bits(got, wanted.unbind())

    @settled
    def test_backward_in_the_stream_of_its_forward(self, offload, settled):
        def gradient(context):
            x = torch.linspace(-2, 2, ELEMENTS, device="cuda", requires_grad=True)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream), context:
                y = x
                for _ in range(8):
                    torch.cuda._sleep(A_WHILE // 50)
                    y = y.sin()
                loss = y.sum()
            if settled and context is offload:
                offload.synchronize()
            loss.backward()
            torch.cuda.synchronize()
            return x.grad

        wanted = gradient(nullcontext())
        for _ in range(3):
            assert_same_bits(gradient(offload), wanted)

    @pytest.mark.parametrize("recorded", [False, True], ids=["own stream", "record_stream"])
    def test_memory_is_not_reused_before_it_was_copied(self, offload, recorded):
        x = random(MANY, ELEMENTS)
        wanted = x * 3
        other = torch.cuda.Stream()
        nodes, junk = [], []
        with offload:
            for row in x:
                a = row * 3
                if recorded:
                    other.wait_stream(torch.cuda.current_stream())
                    with torch.cuda.stream(other):
                        junk.append(a.sum())
                    a.record_stream(other)
                nodes.append(save(a))
                del a
                junk.append(torch.full((ELEMENTS,), math.nan, device="cuda"))
                del junk[:-1]
        assert_same_bits([node.saved_tensors[0] for node in nodes], wanted.unbind())

    def test_restored_memory_is_not_reused_before_it_was_read(self, offload):
        x = random(MANY, ELEMENTS)
        wanted = x * 2
        with offload:
            nodes = [save(row * 1) for row in x]
        offload.synchronize()
        got = []
        for node in nodes:
            torch.cuda._sleep(A_WHILE // 50)
            restored = node.saved_tensors[0]
            got.append(restored * 2)
            del restored
            torch.full((ELEMENTS,), math.nan, device="cuda")
        assert_same_bits(got, wanted.unbind())

    def test_a_view_of_restored_memory_that_outlives_its_node(self, offload):
        class GivesWhatItSaved(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, tensor):
                ctx.save_for_backward(tensor)
                return x.sum()

            @staticmethod
            def backward(ctx, grad):
                return ctx.saved_tensors[0].view(-1), None

        x = torch.zeros(ELEMENTS, device="cuda", requires_grad=True)
        wanted = random(ELEMENTS)
        with offload:
            loss = GivesWhatItSaved.apply(x.view_as(x), wanted * 1)
        offload.synchronize()
        torch.cuda._sleep(A_WHILE)
        loss.backward()
        del loss
        junk = [torch.full((ELEMENTS,), math.nan, device="cuda") for _ in range(8)]
        assert_same_bits(x.grad, wanted)
        del junk

    def test_passes_of_several_steps_over_the_same_memory(self, offload):
        def gradient(context, seed):
            torch.manual_seed(seed)
            x = torch.randn(ELEMENTS, device="cuda", requires_grad=True)
            y = x
            with context:
                for _ in range(12):
                    y = y.sin()
            y.sum().backward()
            return x.grad

        wanted = [gradient(nullcontext(), seed) for seed in range(10)]
        assert_same_bits([gradient(offload, seed) for seed in range(10)], wanted)


class TestChangesInPlace:
    @pytest.mark.parametrize(
        "change",
        [
            lambda a: a.detach().add_(100),
            torch.no_grad()(lambda a: a[::2].neg_()),
            lambda a: a.detach().zero_(),
        ],
        ids=["added to", "half of it", "zeroed"],
    )
    def test_right_after_it_was_packed(self, offload, change):
        for _ in range(MANY):
            x = torch.randn(ELEMENTS, device="cuda", requires_grad=True)
            with offload:
                a = x * 1
                loss = a.sin().sum()
            change(a)
            try:
                loss.backward()
            except ssdtrain.InplaceModificationError:
                continue
            assert_same_bits(x.grad, x.detach().cos())


class TestMemory:
    def test_the_device_has_it_back_once_it_is_stored(self, offload):
        x = random(ELEMENTS)
        before = torch.cuda.memory_allocated()
        with offload:
            nodes = [save(x * number) for number in range(MANY)]
        offload.synchronize()
        assert torch.cuda.memory_allocated() - before < MANY * x.nbytes / 4
        assert_same_bits(nodes[-1].saved_tensors, [x * (MANY - 1)])

    def test_neither_device_nor_pinned_memory_grows_from_step_to_step(self, offload):
        def usage():
            pinned = torch.cuda.host_memory_stats()["num_host_alloc"]
            return pinned, torch.cuda.memory_allocated()

        x = torch.randn(ELEMENTS, device="cuda", requires_grad=True)
        seen = []
        for _ in range(30):
            y = x
            with offload:
                for _ in range(12):
                    y = y.sin()
            offload.synchronize()
            y.sum().backward()
            x.grad = None
            del y
            torch.cuda.synchronize()
            seen.append(usage())
        # How much is on its way at one time is a matter of luck, and so reaches its most at any time.
        assert len(set(seen[15:])) <= 2

    def test_out_of_memory_while_reading_ahead(self, make):
        # Room for the gradient and not much more, where the offloader would read 256 MiB ahead.
        offload = make(prefetch_bytes="256MiB")

        def build():
            x = torch.linspace(-2, 2, 4 * ELEMENTS, device="cuda", requires_grad=True)
            y = x
            with offload:
                for _ in range(10):
                    y = y.sin()
            offload.synchronize()
            return x, y.sum()

        x, loss = build()
        loss.backward()
        wanted = x.grad
        del loss
        x, loss = build()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties().total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 200 * MIB) / total)
        try:
            with suppress(torch.OutOfMemoryError, MemoryError):
                loss.backward()
                assert_same_bits(x.grad, wanted)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        # What a failed backward pass has not got to stays in the thread's queue, and alive, until the next one.
        torch.ones(1, requires_grad=True).sum().backward()
        del loss
        x, loss = build()
        loss.backward()
        assert_same_bits(x.grad, wanted)
        del loss
        assert_nothing_left(offload)

    def test_expandable_segments(self, make):
        backend = make().stats.backend
        backend = backend if backend in BACKENDS else "auto"
        code = """
            import sys
            import torch
            from core.helpers import assert_transparent, mlp, model_program
            import ssdtrain

            offload = ssdtrain.OffloadActivations(backend=sys.argv[1], min_tensor_bytes=1, min_free_bytes=0)
            torch.use_deterministic_algorithms(True)
            with torch.device("cuda"):
                for _ in range(2):
                    assert_transparent(model_program(lambda: mlp(512, 4), 4096, 512), offload)
        """
        run_python(code, backend, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True", timeout=120)


class TestWeights:
    def test_neither_they_nor_their_casts_are_moved(self, make):
        model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512)).cuda()
        offload = make(model)
        x = random(64, 512)
        with offload, torch.autocast("cuda", torch.bfloat16):
            loss = model(x).sum()
        offload.synchronize()
        assert offload.stats.bytes_written < 4 * x.nbytes < model[0].weight.nbytes
        loss.backward()

    def test_a_user_sees_the_saved_tensor_where_it_was(self, offload):
        x = random(1000, 1000).requires_grad_()
        with offload:
            loss = Identity.apply(x * 1)
        offload.synchronize()
        loss.backward()
        (seen,) = Identity.seen
        Identity.seen.clear()
        assert_same_bits(seen, x)
        assert seen.device == x.device
