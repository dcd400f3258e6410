"""The small networks of the papers, built on torch's and torchvision's blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from lightning_bnn.extras import needed
from weightsym.params import check_count

__all__ = ["mlp", "optunet", "resnet18", "two_relus"]


def mlp(
    inputs: int, hidden: Sequence[int], outputs: int, activation: Callable[[], nn.Module] = nn.ReLU
) -> nn.Sequential:
    r"""A multilayer perceptron that flattens its input.

    .. math:: h_{l + 1} = \phi(W_l h_l + b_l)

    Args:
        inputs: number of features.
        hidden: width of each hidden layer.
        outputs: number of outputs.
        activation: class of the nonlinearity.

    >>> net = mlp(4, [8, 6], 2)
    >>> net(torch.randn(5, 2, 2)).shape  # inputs are flattened
    torch.Size([5, 2])
    >>> sum(p.numel() for p in net.parameters())  # 4 * 8 + 8 + 8 * 6 + 6 + 6 * 2 + 2
    108
    """
    if not isinstance(hidden, Iterable) or isinstance(hidden, str):
        raise ValueError(f"`hidden` must be a list of widths, got {hidden!r}.")
    named = {f"hidden[{k}]": width for k, width in enumerate(hidden)}
    for name, width in {"inputs": inputs, **named, "outputs": outputs}.items():
        check_count(name, width)
    widths = [inputs, *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(before, after), activation()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], outputs))


class TwoReLUs(nn.Module):
    r"""Two ReLU units of one input, without biases: :math:`\sum_k \mathrm{relu}(w_k x)`.

    Exchanging the units does not change the function, so that its posterior is symmetric (P2,
    section 5.1).
    """

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(1, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.hidden(x)).sum(-1, keepdim=True)


def two_relus() -> TwoReLUs:
    r"""Create the network of P2's tractable posterior.

    .. math:: f(x) = \mathrm{relu}(w_1 x) + \mathrm{relu}(w_2 x)

    >>> two_relus()(torch.ones(3, 1)).shape
    torch.Size([3, 1])
    """
    return TwoReLUs()


def optunet(classes: int = 10) -> nn.Sequential:
    """Create OptuNet (P1): 392 parameters for 28x28 grey images.

    >>> sum(p.numel() for p in optunet().parameters())
    392
    """
    check_count("classes", classes)
    return nn.Sequential(
        nn.Conv2d(1, 2, 4, bias=False),
        nn.ReLU(),
        nn.MaxPool2d(3),
        nn.Conv2d(2, 10, 5, groups=2, bias=False),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(10, classes),
    )


def resnet18(classes: int = 10, image_size: int = 32) -> nn.Module:
    """Create ResNet-18 of torchvision, for up to 64 pixels with a 3x3 stem and no max pooling.

    Args:
        classes: number of outputs.
        image_size: side of the images, 32 for CIFAR, 64 for TinyImageNet, 224 for ImageNet.

    >>> net = resnet18(classes=100)
    >>> tuple(net.conv1.weight.shape), net.fc.out_features, type(net.maxpool).__name__
    ((64, 3, 3, 3), 100, 'Identity')
    """
    with needed("`resnet18`"):
        from torchvision.models import resnet

    check_count("classes", classes)
    check_count("image_size", image_size)
    network = resnet.resnet18(num_classes=classes)
    if image_size <= 64:
        network.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")
        network.maxpool = nn.Identity()
    network._init_weights = _draw_convolution  # of further members
    return network


def _draw_convolution(module: nn.Module) -> None:
    """Draw weights as torchvision does for residual networks."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
