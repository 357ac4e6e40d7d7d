"""Models of plain torch: convolutions, recurrent networks, skips, nn.Transformer."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .helpers import DROPOUT, assert_trains_the_same

# nn.Transformer has no option to spare itself this one with norm_first.
pytestmark = pytest.mark.filterwarnings(
    "ignore:enable_nested_tensor is True, but self.use_nested_tensor is False"
)


class Checkpointing(nn.Module):
    """What the models here have in common.

    Args:
        use_reentrant: Of the checkpoints around blocks; None: no checkpoints.
    """

    def __init__(self, use_reentrant):
        super().__init__()
        self._use_reentrant = use_reentrant

    def run(self, block, *inputs):
        if self._use_reentrant is None:
            return block(*inputs)
        return checkpoint(block, *inputs, use_reentrant=self._use_reentrant)


def convolution(channels_in, channels_out, **options):
    """With batch normalisation and a ReLU that changes its input."""
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False, **options),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
    )


class Residual(nn.Module):
    """The sum is in place, and so is the ReLU on it."""

    def __init__(self, channels):
        super().__init__()
        self.first = convolution(channels, channels)
        self.second = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        )

    def forward(self, x):
        y = self.second(self.first(x))
        y += x
        return functional.relu_(y)


class ResNet(Checkpointing):
    def __init__(self, use_reentrant):
        super().__init__(use_reentrant)
        self.stem = nn.Sequential(convolution(3, 8, stride=2), nn.MaxPool2d(2))
        self.blocks = nn.ModuleList(Residual(8) for _ in range(2))
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(DROPOUT, inplace=True), nn.Linear(8, 4)
        )

    def loss(self):
        y = self.stem(torch.randn(4, 3, 16, 16))
        for block in self.blocks:
            y = self.run(block, y)
        return functional.cross_entropy(self.head(y), torch.randint(4, (4,)))


class MobileNet(Checkpointing):
    """Depthwise convolutions, in-place activations and a gate on the channels."""

    def __init__(self, use_reentrant):
        super().__init__(use_reentrant)
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.Hardswish(inplace=True))
        self.depthwise = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1, groups=8),
            nn.GroupNorm(2, 8),
            nn.ReLU6(inplace=True),
            nn.Conv2d(8, 8, 1),
        )
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(8, 4, 1),
            nn.SiLU(inplace=True),
            nn.Conv2d(4, 8, 1),
            nn.Sigmoid(),
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(8 * 7 * 7, 4), nn.LeakyReLU(inplace=True))

    def loss(self):
        y = self.run(self.depthwise, self.stem(torch.randn(4, 3, 16, 16)))
        y = y * self.run(self.gate, y)
        return functional.cross_entropy(self.head(y), torch.randint(4, (4,)))


class UNet(Checkpointing):
    """Skips keep activations of the way down until the way up has used them."""

    def __init__(self, use_reentrant):
        super().__init__(use_reentrant)
        self.stem = convolution(3, 4)
        self.down = nn.ModuleList([convolution(4, 8), convolution(8, 16)])
        self.widen = nn.ModuleList(
            [nn.ConvTranspose2d(16, 8, 2, stride=2), nn.ConvTranspose2d(8, 4, 2, stride=2)]
        )
        self.up = nn.ModuleList([convolution(16, 8), convolution(8, 4)])
        self.head = nn.Sequential(nn.Dropout2d(DROPOUT), nn.Conv2d(4, 2, 1))

    def loss(self):
        y = self.stem(torch.randn(2, 3, 16, 16))
        skips = []
        for block in self.down:
            skips.append(y)
            y = self.run(block, functional.max_pool2d(y, 2))
        for widen, block in zip(self.widen, self.up, strict=True):
            y = self.run(block, torch.cat([widen(y), skips.pop()], dim=1))
        return functional.cross_entropy(self.head(y), torch.randint(2, (2, 16, 16)))


class Recurrent(Checkpointing):
    """Predicts the next token, with hidden states that are carried from one part of the text to the next."""

    def __init__(self, use_reentrant, make_cells):
        super().__init__(use_reentrant)
        self.embedding = nn.Embedding(32, 16)
        self.cells = make_cells(16, 16, num_layers=2, dropout=DROPOUT, bidirectional=True, batch_first=True)
        self.head = nn.Linear(32, 32)

    def loss(self):
        tokens = torch.randint(32, (3, 16))
        state, loss = None, 0
        for part in tokens.split(8, dim=1):
            y, state = self.run(self.cells, self.embedding(part), state)
            loss = loss + functional.cross_entropy(self.head(y).flatten(0, 1), part.flatten())
        return loss


class PackedLSTM(Checkpointing):
    """Sequences of several lengths, and a loss over all alignments."""

    def __init__(self, use_reentrant):
        super().__init__(use_reentrant)
        self.project = nn.Linear(4, 16)
        self.cells = nn.LSTM(16, 16, num_layers=2, dropout=DROPOUT, proj_size=8)
        self.head = nn.Linear(8, 6)

    def loss(self):
        lengths = torch.tensor([12, 9, 5])

        def padded(frames):
            packed = nn.utils.rnn.pack_padded_sequence(frames, lengths)
            return nn.utils.rnn.pad_packed_sequence(self.cells(packed)[0])[0]

        y = self.head(self.run(padded, self.project(torch.randn(12, 3, 4))))
        targets = torch.randint(1, 6, (3, 3))
        return functional.ctc_loss(y.float().log_softmax(-1), targets, lengths, torch.tensor([3, 2, 1]))


class UnrolledGRU(Checkpointing):
    """One cell many times: its weights get their gradients in many parts."""

    def __init__(self, use_reentrant):
        super().__init__(use_reentrant)
        self.project = nn.Linear(4, 16)
        self.cell = nn.GRUCell(16, 16)

    def loss(self):
        frames = self.project(torch.randn(8, 3, 4))
        state = frames.new_zeros(3, 16)
        for frame in frames.unbind():
            state = self.run(self.cell, frame, state)
        return state.square().mean()


class Translator(Checkpointing):
    """nn.Transformer, with its default dropout, masks and norms."""

    def __init__(self, use_reentrant, **options):
        super().__init__(use_reentrant)
        self.embedding = nn.Embedding(32, 16, padding_idx=0)
        self.transformer = nn.Transformer(
            16,
            nhead=4,
            num_encoder_layers=2,
            num_decoder_layers=2,
            dim_feedforward=32,
            batch_first=True,
            **options,
        )

    def loss(self):
        source, target = torch.randint(1, 32, (2, 3, 10)).unbind()
        source[2, -4:] = 0
        padding = torch.zeros(source.shape).masked_fill(source == 0, -torch.inf)
        causal = nn.Transformer.generate_square_subsequent_mask(10)

        def translate(source, target):
            return self.transformer(
                source,
                target,
                tgt_mask=causal,
                src_key_padding_mask=padding,
                memory_key_padding_mask=padding,
                tgt_is_causal=True,
            )

        y = self.run(translate, self.embedding(source), self.embedding(target))
        logits = functional.linear(y, self.embedding.weight)
        return functional.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=0)


class Adversarial(Checkpointing):
    """Weights that are normalised in each forward pass, the spectral ones with buffers that change in it."""

    def __init__(self, use_reentrant):
        super().__init__(use_reentrant)
        self.stem = nn.utils.parametrizations.weight_norm(nn.Conv1d(2, 8, 3))
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.utils.parametrizations.spectral_norm(nn.Conv1d(8, 8, 3, padding=1)),
                nn.InstanceNorm1d(8, affine=True),
                nn.ELU(inplace=True),
                nn.AlphaDropout(DROPOUT),
            )
            for _ in range(2)
        )

    def loss(self):
        y = self.stem(torch.randn(4, 2, 18))
        for block in self.blocks:
            y = self.run(block, y)
        return functional.softplus(y.mean(dim=(1, 2))).mean()


MODELS = {
    "resnet": ResNet,
    "mobilenet": MobileNet,
    "unet": UNet,
    "rnn": lambda use_reentrant: Recurrent(use_reentrant, nn.RNN),
    "lstm": lambda use_reentrant: Recurrent(use_reentrant, nn.LSTM),
    "gru": lambda use_reentrant: Recurrent(use_reentrant, nn.GRU),
    "packed_lstm": PackedLSTM,
    "unrolled_gru": UnrolledGRU,
    "transformer": Translator,
    "transformer_norm_first": lambda use_reentrant: Translator(
        use_reentrant, norm_first=True, activation="gelu"
    ),
    "adversarial": Adversarial,
}

every_model = pytest.mark.parametrize("name", MODELS)


def program(name, *, use_reentrant=None):
    """For `train`."""

    def build():
        model = MODELS[name](use_reentrant)
        return model, model.loss

    return build


@every_model
def test_plain(make_offload, name):
    assert_trains_the_same(program(name), make_offload)


@every_model
def test_autocast(make_offload, name):
    assert_trains_the_same(program(name), make_offload, autocast=True)


@every_model
def test_checkpointing(make_offload, name):
    assert_trains_the_same(program(name, use_reentrant=False), make_offload)


@pytest.mark.slow
@every_model
def test_reentrant_checkpointing(make_offload, name):
    assert_trains_the_same(program(name, use_reentrant=True), make_offload)


@pytest.mark.slow
@every_model
def test_checkpointing_under_autocast(make_offload, name):
    assert_trains_the_same(program(name, use_reentrant=False), make_offload, autocast=True)


@pytest.mark.slow
@every_model
def test_backward_begins_while_writes_run(make_tight_offload, name):
    assert_trains_the_same(program(name), make_tight_offload, settle=False)
