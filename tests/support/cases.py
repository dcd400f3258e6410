"""Networks with the groups they are known to have: every law is tested on all of them."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import modern_networks
import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.resnet import BasicBlock

from lightning_bnn import models
from weightsym import discover


class Forward(nn.Module):
    """A module whose forward is a plain function of itself and the inputs."""

    def __init__(self, forward, **modules):
        super().__init__()
        self.function = forward
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, *x):
        return self.function(self, *x)


class GroupedCNN(nn.Module):
    """Grouped and depthwise convolutions, concatenation, a flatten that repeats every channel."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 32, 3, padding=1)
        self.grouped = nn.Conv2d(32, 48, 3, padding=1, groups=4)
        self.norm = nn.BatchNorm2d(48)
        self.depthwise = nn.Conv2d(48, 48, 3, padding=1, groups=48)
        self.branches = nn.ModuleList([nn.Conv2d(48, 16, 1), nn.Conv2d(48, 24, 3, padding=1)])
        self.down = nn.Conv2d(40, 20, 3, stride=2, padding=1)
        self.hidden = nn.Linear(20 * 4 * 4, 64)
        self.last = nn.Linear(64, 10)

    def forward(self, x):
        x = torch.relu(self.norm(self.grouped(torch.relu(self.first(x)))))
        x = torch.relu(self.depthwise(x))
        x = torch.cat([torch.relu(branch(x)) for branch in self.branches], 1)
        x = F.max_pool2d(torch.relu(self.down(x)), 2)
        return self.last(torch.relu(self.hidden(x.flatten(1))))


class UNet(nn.Module):
    """Skips by concatenation, GroupNorm, transposed convolution."""

    def __init__(self):
        super().__init__()

        def block(a, b):
            return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(2, b), nn.SiLU())

        self.down1, self.down2, self.middle = block(3, 8), block(8, 12), block(12, 12)
        self.up = nn.ConvTranspose2d(12, 10, 2, stride=2)
        self.merge, self.last = block(22, 8), nn.Conv2d(16, 2, 1)

    def forward(self, x):
        one = self.down1(x)
        two = self.down2(F.max_pool2d(one, 2))
        three = self.middle(F.max_pool2d(two, 2))
        x = self.merge(torch.cat([self.up(three), two], 1))
        return self.last(torch.cat([F.interpolate(x, scale_factor=2.0), one], 1))


class Attention(nn.Module):
    """Hand-written attention with RMSNorm, residual stream and tanh MLP."""

    def __init__(self, d=16, heads=4):
        super().__init__()
        self.heads, self.embed = heads, nn.Linear(8, d)
        self.norm1, self.norm2 = nn.RMSNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp1, self.mlp2, self.last = nn.Linear(d, 24), nn.Linear(24, d), nn.Linear(d, 5)

    def forward(self, x):
        x = self.embed(x)
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (y.reshape(b, t, self.heads, -1).transpose(1, 2) for y in (q, k, v))
        a = torch.softmax(q @ k.transpose(-2, -1) / (d // self.heads) ** 0.5, -1) @ v
        x = x + self.out(a.transpose(1, 2).reshape(b, t, d))
        x = x + self.mlp2(torch.tanh(self.mlp1(self.norm2(x))))
        return self.last(x.mean(1))


class SDPA(nn.Module):
    """Fused attention with grouped queries and LayerScale."""

    def __init__(self, d=16, heads=4):
        super().__init__()
        self.heads = heads
        self.embed, self.norm = nn.Linear(8, d), nn.LayerNorm(d)
        self.q, self.k, self.v, self.out = (nn.Linear(d, d) for _ in range(4))
        self.gamma, self.last = nn.Parameter(torch.ones(d)), nn.Linear(d, 5)

    def forward(self, x):
        x = self.embed(x)
        y = self.norm(x)
        q, k, v = (
            m(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.last((x + self.gamma * self.out(y)).mean(1))


class SelfFeeding(nn.Module):
    """A ReLU stream whose weights have both ends in it."""

    def __init__(self, d=12):
        super().__init__()
        self.first, self.one, self.two, self.last = (
            nn.Linear(5, d),
            nn.Linear(d, d),
            nn.Linear(d, d),
            nn.Linear(d, 3),
        )

    def forward(self, x):
        x = torch.relu(self.first(x))
        x = torch.relu(x + self.one(x))
        return self.last(torch.relu(x + self.two(x)))


class TiedTransformer(nn.Module):
    """Embedding tied with the last layer, learned positions, SwiGLU."""

    def __init__(self, d=8):
        super().__init__()
        self.embed, self.position = nn.Embedding(11, d), nn.Parameter(torch.randn(1, 6, d))
        self.attention = nn.MultiheadAttention(d, 2, batch_first=True)
        self.up, self.gate, self.down = nn.Linear(d, 12), nn.Linear(d, 12), nn.Linear(12, d)

    def forward(self, tokens):
        x = self.embed(tokens) + self.position
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.down(self.up(x) * F.silu(self.gate(x)))
        return x @ self.embed.weight.t()


def recurrent_network():
    """Two directions of LSTM, then GRU."""
    return Forward(
        lambda s, x: s.last(s.gru(s.lstm(x)[0])[0][:, -1]),
        lstm=nn.LSTM(5, 6, 2, batch_first=True, bidirectional=True),
        gru=nn.GRU(12, 7, batch_first=True),
        last=nn.Linear(7, 3),
    )


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


@dataclass(frozen=True)
class Case:
    """A network, its input, the number of its permutation groups and of its free scales."""

    name: str
    build: Callable[[], nn.Module]
    example: Callable[[], Any]
    groups: int
    scales: int
    signs: int | None = None

    def make(self):
        """The network with generic weights and statistics, in float64, and an input."""
        torch.manual_seed(0)
        model = randomise(self.build().double())
        x = self.example()
        return model.eval(), x.double() if x.is_floating_point() else x

    @functools.cache  # noqa: B019  (a handful of cases, used by hundreds of tests)
    def known(self):
        """The same, and its symmetries; read once, so that nobody may change any of them."""
        model, x = self.make()
        return model, x, discover(model, x)


def randomise(model):
    """Random affine parameters and running statistics; no parameter is left at zero."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_(0, 0.2)
            module.running_var.uniform_(0.5, 2)
        norms = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
        if isinstance(module, norms) and module.weight is not None:
            module.weight.data.uniform_(0.5, 1.5)
            if getattr(module, "bias", None) is not None:
                module.bias.data.normal_(0, 0.2)
    for name, p in model.named_parameters():
        if not p.any() or any(part in name for part in ("layer_scale", "pos_embed", "class_token")):
            p.data.normal_(0, 0.3)
    return model


def nested_network():
    """Channels in convolution groups, four of which are a normalisation group."""
    return Forward(
        lambda s, x: s.o(torch.tanh(s.norm(s.g(torch.tanh(s.a(x)))))),
        a=nn.Conv1d(3, 16, 1),
        o=nn.Conv1d(16, 2, 1),
        g=nn.Conv1d(16, 16, 1, groups=8),
        norm=nn.GroupNorm(2, 16),
    )


def vector(n):
    return lambda: torch.randn(4, n)


def image(size, batch=2):
    return lambda: torch.randn(batch, 3, size, size)


def rows():
    return torch.randn(2, 5, 10)


def torchvision_model(name):
    return lambda: getattr(torchvision.models, name)(weights=None)


def tanh_mlp():
    return models.mlp(20, [16, 12], 4, nn.Tanh)


CASES = [
    Case("mlp", lambda: models.mlp(20, [16, 12], 4), vector(20), 2, 28, 0),
    Case("tanh mlp", tanh_mlp, vector(20), 2, 0, 28),
    Case("optunet", models.optunet, lambda: torch.randn(4, 1, 28, 28), 3, 12, 0),
    Case("grouped cnn", GroupedCNN, image(16, 4), 13, 252, 48),
    Case("u-net", UNet, image(16), 13, 10, 18),
    Case("attention", Attention, lambda: torch.randn(2, 6, 8), 11, 64),
    Case("sdpa", SDPA, lambda: torch.randn(2, 6, 8), 10, 64),
    Case("self-feeding", SelfFeeding, vector(5), 1, 12, 0),
    Case("tied transformer", TiedTransformer, lambda: torch.randint(11, (2, 6)), 7, 28),
    Case("recurrent", recurrent_network, lambda: torch.randn(2, 4, 5), 5, 0, 31),
    # 4 streams and 4 blocks of 8, 16, 32, 64 channels; signs of every channel with a norm
    Case("resnet", NarrowResNet, image(32), 8, 2 * 120, 8 + 2 * 8 + 3 * (16 + 32 + 64)),
    # 2 streams and 3 blocks; two gains in every block, those before the second stage and the end
    Case("convnext", narrow_convnext, image(32, 1), 5, 2 * (8 + 8 + 16) + 8 + 16),
    # streams of 16, 8 and 8 channels, the stem, an expansion in 3 blocks, the last convolution
    Case("mobilenet", narrow_mobilenet, image(32), 8, 16 + 8 + 8),
]


def nested(*args, **options):
    return lambda: modern_networks.Attention(*args, **options)


NESTED = [  # blocks inside blocks, as heads that share keys are
    Case("grouped", nested(10, heads=4, width=3, kv_heads=2), rows, 7, 12, 12),
    Case("rotary", nested(10, heads=6, width=4, kv_heads=2, rotary="half"), rows, 5, 12, 12),
    Case("one key", nested(10, heads=4, width=3, kv_heads=1), rows, 3, 6, 6),
    Case("three levels", nested_network, lambda: torch.randn(2, 3, 7), 19, 0, 34),
]

LARGE_CASES = [
    Case("resnet18", torchvision_model("resnet18"), image(48), 12, 2880, 4800),
    Case("convnext_tiny", torchvision_model("convnext_tiny"), image(32, 1), 22, 14688),
    Case("mobilenet_v2", torchvision_model("mobilenet_v2"), image(64), 25, 712),
    Case("resnet50", torchvision_model("resnet50"), image(64), 37, 11456),
    Case("resnext50", torchvision_model("resnext50_32x4d"), image(64), 1045, 19008),
    Case("vgg11_bn", torchvision_model("vgg11_bn"), image(64), 10, 10944),
    Case("densenet121", torchvision_model("densenet121"), image(64), 120, 41760),
    Case("vit_b_16", torchvision_model("vit_b_16"), image(224, 1), 313, 37632),
    # with the constant shift mask computed, every head of every block moves
    Case("swin_t", torchvision_model("swin_t"), image(224, 1), 304, 21120),
]
