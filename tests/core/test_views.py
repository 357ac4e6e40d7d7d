"""Whatever part of a storage a saved tensor views, and however: it comes back the same."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from .helpers import KIB, Identity, assert_same_bits, assert_transparent, backward, bits, leaf, model_program

BASE = 64


def matrix(dtype=torch.float32):
    return torch.randn(BASE, BASE, dtype=torch.complex64 if dtype.is_complex else torch.float32).to(dtype)


VIEWS = {
    "whole": lambda base: base,
    "offset": lambda base: base[2:],
    "columns": lambda base: base[:, 3:],
    "strided": lambda base: base[:, ::2],
    "strided in both": lambda base: base[1::3, 1::2],
    "transposed": lambda base: base.t(),
    "part of the transposed": lambda base: base.t()[5:40, 2:],
    "scalar": lambda base: base[7, 9],
    "row": lambda base: base[7],
    "column": lambda base: base[:, 7],
    "diagonal": lambda base: base.diagonal(),
    "expanded row": lambda base: base[3].expand(5, BASE),
    "expanded scalar": lambda base: base[3, 4].expand(6, 7),
    "unsqueezed": lambda base: base[None, :, None, :],
    "overlapping": lambda base: base.as_strided((10, 8), (4, 1), 3),
    "windows": lambda base: base.unfold(0, 8, 4),
    "other shape": lambda base: base.view(4, 16, 8, 8).permute(3, 0, 2, 1),
    "size one": lambda base: base[:1, :1],
}


@pytest.fixture(autouse=True)
def nothing_seen():
    Identity.seen.clear()
    yield
    Identity.seen.clear()


def restored(offload, tensor):
    """What comes back for a tensor that was saved, from the store."""
    before = offload.stats.bytes_read
    with offload:
        loss = Identity.apply(tensor.detach().requires_grad_())
    offload.synchronize()
    loss.backward()
    assert offload.stats.bytes_read > before
    return Identity.seen.pop()


def assert_same_geometry(got, wanted):
    for what in ("dtype", "shape", "device", "layout"):
        assert getattr(got, what) == getattr(wanted, what)
    for what in ("stride", "storage_offset", "is_conj", "is_neg", "is_contiguous"):
        assert getattr(got, what)() == getattr(wanted, what)()


class TestGeometry:
    @pytest.mark.parametrize("name", VIEWS)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
    def test_a_view_comes_back_the_same(self, offload, name, dtype):
        view = VIEWS[name](matrix(dtype))
        got = restored(offload, view)
        assert_same_geometry(got, view)
        assert_same_bits(got, view)

    @pytest.mark.parametrize("name", VIEWS)
    def test_gradients_through_a_view(self, offload, name):
        assert_transparent(lambda: ([leaf(BASE, BASE)], lambda x: VIEWS[name](x * 2).sin().sum()), offload)

    @pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format], ids=str)
    def test_images_keep_their_memory_format(self, offload, memory_format):
        image = torch.randn(2, 3, 8, 8).to(memory_format=memory_format)
        got = restored(offload, image)
        assert_same_geometry(got, image)
        assert got.is_contiguous(memory_format=memory_format)

    def test_volumes_keep_their_memory_format(self, offload):
        volume = torch.randn(2, 3, 4, 4, 4).to(memory_format=torch.channels_last_3d)
        assert_same_geometry(restored(offload, volume), volume)

    @pytest.mark.parametrize(
        "dtype",
        [
            torch.float64,
            torch.float16,
            torch.bfloat16,
            torch.complex128,
            torch.float8_e4m3fn,
            torch.float8_e5m2,
        ],
        ids=str,
    )
    def test_types(self, offload, dtype):
        values = torch.randn(64, 64).to(dtype)
        with offload:
            loss = Holder.apply(torch.ones(1, requires_grad=True), values)
        offload.synchronize()
        loss.sum().backward()
        got = Identity.seen.pop()
        assert got.dtype == dtype
        assert_same_bits(got, values)
        assert offload.stats.bytes_read == values.nbytes

    @pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64], ids=str)
    def test_masks_and_indices(self, offload, dtype):
        values = torch.randint(0, 2, (64, 64)).to(dtype)
        with offload:
            loss = Holder.apply(torch.ones(1, requires_grad=True), values)
        offload.synchronize()
        loss.sum().backward()
        assert_same_bits(Identity.seen.pop(), values)

    def test_odd_sizes(self, offload):
        for size in (1, 2, 127, 128, 129, 1023, 1024, 1025, 4097, 100_003):
            values = torch.randn(size)
            assert_same_bits(restored(offload, values), values)

    def test_a_tensor_at_any_place_within_a_page(self, offload):
        memory = torch.randn(8192)
        for start in (0, 1, 16, 17, 128, 1000, 1024):
            values = torch.frombuffer(memory.numpy(), dtype=torch.float32, offset=4 * start, count=2000)
            got = restored(offload, values)
            assert_same_bits(got, values)
            assert got.data_ptr() % 4096 == values.data_ptr() % 4096


class Holder(torch.autograd.Function):
    """Saves a tensor of any type, and shows what comes back."""

    @staticmethod
    def forward(ctx, x, values):
        ctx.save_for_backward(values)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        Identity.seen.append(ctx.saved_tensors[0])
        return grad, None


class TestLazyBits:
    def test_conjugate(self, offload):
        view = matrix(torch.complex64).conj()
        got = restored(offload, view)
        assert got.is_conj()
        assert_same_bits(got, view)

    def test_negative(self, offload):
        values = torch._neg_view(matrix())
        with offload:
            loss = Holder.apply(torch.ones(1, requires_grad=True), values)
        offload.synchronize()
        loss.sum().backward()
        got = Identity.seen.pop()
        assert got.is_neg()
        assert_same_bits(got, values)

    def test_conjugate_and_plain_share_a_write(self, offload):
        def build():
            return [leaf(64, 64, dtype=torch.complex64)], lambda x: (x.sin() * x.conj()).abs().sum()

        assert_transparent(build, offload)

    def test_imaginary_part_of_a_conjugate(self, offload):
        def build():
            z = torch.randn(64, 64, dtype=torch.complex64)
            return [leaf(64, 64)], lambda x: (x * z.conj().imag).sum()

        assert_transparent(build, offload)

    def test_view_as_real(self, offload):
        def build():
            return [leaf(64, 64, dtype=torch.complex64)], lambda x: torch.view_as_real(x * 2).sin().sum()

        assert_transparent(build, offload)


class TestSharing:
    def written(self, offload, forward, *arguments):
        before = offload.stats.bytes_written
        with offload:
            loss = forward(*arguments)
        offload.synchronize()
        loss.backward()
        return offload.stats.bytes_written - before

    def test_an_expanded_row_is_written_once(self, offload):
        row, other = torch.randn(1000), leaf(4, 1000)
        assert self.written(offload, lambda: other.mul(row.expand(4, 1000)).sum()) == row.nbytes
        assert_same_bits(other.grad, row.expand(4, 1000))

    def test_a_tensor_saved_by_several_nodes_is_written_once(self, offload):
        x = leaf(64, 64)
        assert (
            self.written(offload, lambda: x.sin().sum() + x.exp().sum().detach() + x.cos().sum())
            <= 2 * 4 * 64 * 64
        )
        assert offload.stats.blocks_deduplicated >= 1

    def test_square_matrix_its_transpose_and_its_rows(self, offload):
        """Same address, same number of dimensions: three different tensors."""
        for dtype in (torch.float32, torch.bfloat16):
            assert_transparent(
                lambda dtype=dtype: (
                    [leaf(64, 64, dtype=dtype)],
                    lambda x: (
                        (x @ x.t()).float().sum() + x[:2].sin().float().sum() + x.t().cos().float().sum()
                    ),
                ),
                offload,
            )

    def test_query_key_and_value_are_one_write_and_share_memory_again(self, offload):
        seen = []

        class Attention(torch.autograd.Function):
            @staticmethod
            def forward(ctx, query, key, value):
                ctx.save_for_backward(query, key, value)
                return query + key + value

            @staticmethod
            def backward(ctx, grad):
                seen.extend(ctx.saved_tensors)
                return grad, grad, grad

        base = torch.randn(16, 3 * 64, requires_grad=True)
        written = self.written(offload, lambda: Attention.apply(*base.split(64, dim=1)).sum())
        assert written == base.nbytes
        assert offload.stats.blocks_deduplicated == 2
        assert len({tensor.untyped_storage().data_ptr() for tensor in seen}) == 1
        for got, wanted in zip(seen, base.split(64, dim=1), strict=True):
            assert_same_bits(got, wanted)
            assert got.storage_offset() == wanted.storage_offset()

    def test_restored_views_of_different_nodes_share_memory_while_both_live(self, offload):
        x = leaf(64, 64)
        with offload:
            one, two = x.sin(), x.t().cos()
        offload.synchronize()
        first, second = one.grad_fn._saved_self, two.grad_fn._saved_self
        assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        assert_same_bits(second, x.t())
        assert offload.stats.bytes_read == x.nbytes

    def test_halves_of_a_chunk(self, offload):
        def build():
            def gated(x):
                gate, value = (x * 1).chunk(2, dim=-1)
                return (functional.silu(gate) * value).sum()

            return [leaf(64, 128)], gated

        assert_transparent(build, offload)

    def test_overlapping_windows(self, offload):
        assert_transparent(lambda: ([leaf(4096)], lambda x: (x * 1).unfold(0, 64, 16).sin().sum()), offload)

    def test_a_small_slice_of_a_large_storage_is_written_as_the_slice(self, offload):
        large = torch.randn(1024, 256)
        small = large[500:508].detach().requires_grad_()
        assert self.written(offload, lambda: small.sin().sum()) == small.nbytes
        assert_same_bits(small.grad, small.cos())

    def test_slices_here_and_there(self, offload):
        def build():
            x = leaf(1024, 64)
            return [x], lambda x: sum(part.sin().sum() for part in (x * 1).split(64))

        assert_transparent(build, offload)

    def test_a_slice_inside_a_slice_joins_it(self, offload):
        large, one, other = torch.randn(1024, 256), leaf(40, 256), leaf(10, 256)
        outer, inner = large[500:540], large[510:520]
        assert self.written(offload, lambda: (one * outer).sum() + (other * inner).sum()) == outer.nbytes
        assert_same_bits([one.grad, other.grad], [outer, inner])

    def test_the_same_bytes_as_another_type(self, offload):
        def build():
            bytes_ = torch.randn(64, 64)
            return [leaf(64, 64)], lambda x: (x * bytes_).sum() + (x * bytes_.view(torch.int32)).sum()

        assert_transparent(build, offload)


class TestModels:
    def test_shifted_labels(self, offload):
        """`labels[1:]` has an offset of one element."""

        def build():
            labels = torch.randint(0, 50, (129,))
            return [leaf(128, 50)], lambda logits: functional.cross_entropy(logits * 1, labels[1:])

        assert_transparent(build, offload)

    def test_channels_last_convolutions(self, offload):
        def make():
            model = nn.Sequential(
                nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.GroupNorm(2, 8), nn.Conv2d(8, 4, 3)
            )
            return model.to(memory_format=torch.channels_last)

        def build():
            leaves, forward = model_program(make, 2, 4, 16, 16)()
            return leaves, lambda x, *rest: forward(x.to(memory_format=torch.channels_last), *rest)

        assert_transparent(build, offload)

    @pytest.mark.parametrize("causal", [True, False])
    def test_attention(self, offload, causal):
        def build():
            projection = nn.Linear(32, 96)

            def attend(x, *_):
                query, key, value = projection(x).view(4, 16, 3, 4, 8).permute(2, 0, 3, 1, 4)
                result = functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
                return result.transpose(1, 2).reshape(4, 16, 32).square().mean()

            return [leaf(4, 16, 32), *projection.parameters()], attend

        assert_transparent(build, offload)

    def test_embeddings_masks_and_gathers(self, offload):
        def build():
            table, tokens = leaf(100, 32), torch.randint(0, 100, (8, 16))

            def forward(table):
                x = functional.embedding(tokens, table)
                x = x.masked_fill(tokens[..., None] % 3 == 0, 0.5).softmax(-1)
                return x.gather(2, tokens[..., None] % 32).log().sum() + x.sort(dim=1)[0].square().sum()

            return [table], forward

        assert_transparent(build, offload)


def test_bits_see_what_equal_does_not():
    """The measure itself."""
    assert not torch.equal(bits(torch.tensor(0.0)), bits(torch.tensor(-0.0)))
    assert torch.equal(bits(torch.tensor(float("nan"))), bits(torch.tensor(float("nan"))))


def test_a_view_needs_no_more_than_its_bytes_on_disk(offload):
    with offload:
        loss = torch.randn(256, 256)[3:5].detach().requires_grad_().sin().sum()
    offload.synchronize()
    assert offload.stats.live_bytes_on_disk <= 4 * KIB
    loss.backward()


def test_backward_helper_is_deterministic():
    program = model_program(lambda: nn.Linear(8, 8), 4, 8)
    assert_same_bits(backward(program), backward(program))
