import numpy as np
import pytest
import torch
from refusals import refuses
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


@pytest.mark.bad_input  # for annotations, numbers of numpy are no `int`
@pytest.mark.parametrize("hidden", [[512], np.array([512]), ()])
def test_mlp(hidden):
    net = models.mlp(np.int64(784), hidden, 10, nn.Tanh)
    expected = 784 * 512 + 512 + 512 * 10 + 10 if len(hidden) else 784 * 10 + 10
    assert size(net) == expected
    assert net(torch.randn(2, 1, 28, 28)).shape == (2, 10)


def test_resnet18_keeps_the_resolution_of_small_images():
    with torch.device("meta"):
        small, large = models.resnet18(100), models.resnet18(1000, image_size=224)
        features = nn.Sequential(small.conv1, small.bn1, small.relu, small.maxpool)
        assert features(torch.randn(1, 3, 32, 32)).shape == (1, 64, 32, 32)
        assert small(torch.randn(2, 3, 64, 64)).shape == (2, 100)
    assert size(small) == 11_220_132
    assert size(large) == 11_689_512


test_sizes_that_no_network_has = refuses(
    (lambda: models.mlp(0, [3], 2), "`inputs` must be at least 1, got 0"),
    (lambda: models.mlp(4, [3, -1], 2), r"`hidden\[1\]` must be at least 1, got -1"),
    (lambda: models.mlp(4, 3, 2), "`hidden` must be a list of widths, got 3"),
    (lambda: models.mlp(4, [], 2.5), "`outputs` must be a whole number, got 2.5"),
    (lambda: models.optunet(0), "`classes` must be at least 1, got 0"),
    (lambda: models.resnet18(-1), "`classes` must be at least 1, got -1"),
    (lambda: models.resnet18(image_size=0), "`image_size` must be at least 1, got 0"),
)
