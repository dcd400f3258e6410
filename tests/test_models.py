import numpy as np
import pytest
import torch
from torch import nn

from lightning_bnn import models


def size(model):
    return sum(p.numel() for p in model.parameters())


def test_optunet_is_the_papers():
    net = models.optunet()
    assert size(net) == 392
    assert [tuple(p.shape) for p in net.parameters()] == [
        (2, 1, 4, 4), (10, 1, 5, 5), (10, 10), (10,),
    ]  # fmt: skip
    assert net(torch.randn(3, 1, 28, 28)).shape == (3, 10)
    assert models.optunet(4)(torch.randn(1, 1, 28, 28)).shape == (1, 4)


def test_mlp():
    net = models.mlp(784, [512], 10, nn.Tanh)
    assert size(net) == 784 * 512 + 512 + 512 * 10 + 10
    assert net(torch.randn(2, 1, 28, 28)).shape == (2, 10)


def test_resnet18_keeps_the_resolution_of_small_images():
    small, large = models.resnet18(100), models.resnet18(1000, image_size=224)
    features = nn.Sequential(small.conv1, small.bn1, small.relu, small.maxpool)
    assert features(torch.randn(1, 3, 32, 32)).shape == (1, 64, 32, 32)
    assert size(small) == 11_220_132
    assert size(large) == 11_689_512
    assert models.resnet18(200, image_size=64)(torch.randn(2, 3, 64, 64)).shape == (2, 200)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: models.mlp(0, [3], 2), "`inputs` must be at least 1, got 0"),
        (lambda: models.mlp(4, [3, -1], 2), r"`hidden\[1\]` must be at least 1, got -1"),
        (lambda: models.mlp(4, 3, 2), "`hidden` must be a list of widths, got 3"),
        (lambda: models.mlp(4, [], 2.5), "`outputs` must be a whole number, got 2.5"),
        (lambda: models.optunet(0), "`classes` must be at least 1, got 0"),
        (lambda: models.resnet18(-1), "`classes` must be at least 1, got -1"),
        (lambda: models.resnet18(image_size=0), "`image_size` must be at least 1, got 0"),
    ],
)
def test_sizes_that_no_network_has(build, sentence):
    with pytest.raises(ValueError, match=sentence):
        build()


def test_no_hidden_layer_is_a_linear_model():
    assert size(models.mlp(4, (), 2)) == 4 * 2 + 2


@pytest.mark.bad_input  # for annotations these are no `int`
def test_widths_may_be_numbers_of_numpy():
    assert size(models.mlp(np.int64(4), np.array([3]), 2)) == 4 * 3 + 3 + 3 * 2 + 2
