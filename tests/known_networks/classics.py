"""Whole networks, small ones of this package and narrow ones of torchvision."""

from functools import partial

import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.resnet import BasicBlock

from known_networks.table import add, network, parameter
from lightning_bnn import models

conv = partial(partial, nn.Conv2d)
SMALL = ("mlp", "tanh mlp", "optunet", "grouped cnn", "u-net", "sdpa", "self-feeding",
         "tied transformer", "recurrent")  # fmt: skip
"""Those that a test may solve, match and train in tenths of a second."""

add("mlp", lambda: models.mlp(20, [16, 12], 4), (4, 20), "16 12", 28, 0)
add("tanh mlp", lambda: models.mlp(20, [16, 12], 4, nn.Tanh), (4, 20), "16 12", 0, 28)
add("optunet", models.optunet, (4, 1, 28, 28), "5*2 2b", 12, 0)


@network("8*4 12*4 16 24 64 20 4b", 252, 48, name="grouped cnn", inputs=(4, 3, 16, 16),
         first=conv(3, 32, 3, padding=1), inside=conv(32, 48, 3, padding=1, groups=4),
         norm=partial(nn.BatchNorm2d, 48), depthwise=conv(48, 48, 3, padding=1, groups=48),
         one=conv(48, 16, 1), two=conv(48, 24, 3, padding=1),
         down=conv(40, 20, 3, stride=2, padding=1), hidden=(320, 64), last=(64, 10))  # fmt: skip
def convolutions(s, x):
    """Grouped and depthwise convolutions, concatenation, a flatten that repeats every channel."""
    x = torch.relu(s.norm(s.inside(torch.relu(s.first(x)))))
    x = torch.relu(s.depthwise(x))
    x = torch.cat([torch.relu(s.one(x)), torch.relu(s.two(x))], 1)
    x = F.max_pool2d(torch.relu(s.down(x)), 2)
    return s.last(torch.relu(s.hidden(x.flatten(1))))


def block(a, b):
    return lambda: nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(2, b), nn.SiLU())


@network("4*4 6*4 10 2b*4", 10, 18, name="u-net", inputs=(2, 3, 16, 16), matrices="general 10",
         down1=block(3, 8), down2=block(8, 12), middle=block(12, 12), merge=block(22, 8),
         up=partial(nn.ConvTranspose2d, 12, 10, 2, stride=2), last=conv(16, 2, 1))  # fmt: skip
def unet(s, x):
    """Skips by concatenation, GroupNorm, transposed convolution."""
    one = s.down1(x)
    two = s.down2(F.max_pool2d(one, 2))
    three = s.middle(F.max_pool2d(two, 2))
    x = s.merge(torch.cat([s.up(three), two], 1))
    return s.last(torch.cat([F.interpolate(x, scale_factor=2.0), one], 1))


@network("16 4*8 4b", 64, 65, matrices="general 4*8", embed=(8, 16), last=(16, 5),
         norm=partial(nn.LayerNorm, 16), gamma=parameter(16), inputs=(2, 6, 8),
         others=[(3, 9, 8)], **dict.fromkeys("qkvo", (16, 16)))  # fmt: skip
def sdpa(s, x):
    """Fused attention and LayerScale."""
    x = s.embed(x)
    q, k, v = (m(s.norm(x)).unflatten(-1, (4, -1)).transpose(1, 2) for m in (s.q, s.k, s.v))
    y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    return s.last((x + s.gamma * s.o(y)).mean(1))


@network("12", 12, 0, name="self-feeding", first=(5, 12), one=(12, 12), two=(12, 12), last=(12, 3))
def self_feeding(s, x):
    """A ReLU stream whose weights have both ends in it."""
    x = torch.relu(s.first(x))
    x = torch.relu(x + s.one(x))
    return s.last(torch.relu(x + s.two(x)))


@network("8 4*4 12 2b", 28, 36, matrices="orthogonal 8, general 4*4",
         inputs=[torch.randint(11, (2, 6), generator=torch.Generator().manual_seed(0))],
         embed=partial(nn.Embedding, 11, 8), position=parameter(1, 6, 8), up=(8, 12), gate=(8, 12),
         down=(12, 8), attention=partial(nn.MultiheadAttention, 8, 2, batch_first=True),
         )  # fmt: skip
def tied_transformer(s, tokens):
    """Embedding tied with the last layer, learned positions, SwiGLU."""
    x = s.embed(tokens) + s.position
    x = x + s.attention(x, x, x, need_weights=False)[0]
    x = x + s.down(s.up(x) * F.silu(s.gate(x)))
    return x @ s.embed.weight.t()


@network("6*4 7", 0, 31, inputs=(2, 4, 5), last=(7, 3),
         lstm=partial(nn.LSTM, 5, 6, 2, batch_first=True, bidirectional=True),
         gru=partial(nn.GRU, 12, 7, batch_first=True))  # fmt: skip
def recurrent(s, x):
    """Two directions of LSTM, then GRU."""
    return s.last(s.gru(s.lstm(x)[0])[0][:, -1])


# channels in convolution groups, four of which are a normalisation group
@network("2*16 4b*2 2b", 0, 34, name="three levels", inputs=(2, 3, 7),
         a=partial(nn.Conv1d, 3, 16, 1), g=partial(nn.Conv1d, 16, 16, 1, groups=8),
         norm=partial(nn.GroupNorm, 2, 16), o=partial(nn.Conv1d, 16, 2, 1))  # fmt: skip
def nested(s, x):
    return s.o(torch.tanh(s.norm(s.g(torch.tanh(s.a(x))))))


# ------------------------------------------------------------ torchvision's
class NarrowResNet(torchvision.models.ResNet):
    """torchvision's ResNet with one block a stage and an eighth of the channels."""

    def __init__(self):
        super().__init__(BasicBlock, [1, 1, 1, 1])
        self.conv1 = nn.Conv2d(3, 8, 7, stride=2, padding=3, bias=False)
        self.bn1, self.fc = nn.BatchNorm2d(8), nn.Linear(64, 10)

    def _make_layer(self, block, planes, *args, **kwargs):
        self.inplanes = max(planes // 16, 8)  # channels of the stage before
        return super()._make_layer(block, planes // 8, *args, **kwargs)


def narrow_convnext():
    """torchvision's ConvNeXt with three blocks in two stages."""
    stages = [CNBlockConfig(8, 16, 2), CNBlockConfig(16, None, 1)]
    return torchvision.models.ConvNeXt(stages, stochastic_depth_prob=0.1, num_classes=10)


def narrow_mobilenet():
    """torchvision's MobileNetV2 with four blocks: expansion, channels, repetitions, stride."""
    blocks = [[1, 64, 1, 1], [6, 24, 1, 2], [6, 32, 2, 2]]
    return torchvision.models.MobileNetV2(10, width_mult=0.25, inverted_residual_setting=blocks)


# 4 streams and 4 blocks of 8, 16, 32, 64 channels; signs of every channel with a norm
add("resnet", NarrowResNet, (2, 3, 32, 32), "8*2 16*2 32*2 64*2", 2 * 120,
    8 + 2 * 8 + 3 * (16 + 32 + 64))  # fmt: skip
# 2 streams and 3 blocks; two gains in every block, those before the second stage and the end
add("convnext", narrow_convnext, (1, 3, 32, 32), "8 32*2 16 64", 2 * (8 + 8 + 16) + 8 + 16)
# streams of 16, 8 and 8 channels, the stem, an expansion in 3 blocks, the last convolution
add("mobilenet", narrow_mobilenet, (2, 3, 32, 32), "8*3 16 96 48*2 1280", 16 + 8 + 8)
