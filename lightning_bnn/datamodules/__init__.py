"""Data sets with what is out of distribution for them."""

from typing import TYPE_CHECKING

from lightning_bnn._lazy import lazy_package

if TYPE_CHECKING:
    from lightning_bnn.datamodules.base import DataModule, MissingData, Splits
    from lightning_bnn.datamodules.cifar import CIFAR10, CIFAR100
    from lightning_bnn.datamodules.digits import Digits
    from lightning_bnn.datamodules.embedded import (
        Airfoil,
        Concrete,
        Diabetes,
        EmbeddedTable,
        Energy,
        Yacht,
    )
    from lightning_bnn.datamodules.mnist import MNIST
    from lightning_bnn.datamodules.tiny_imagenet import TinyImageNet
    from lightning_bnn.datamodules.toy import NoisySine, TractableReLU, TwoGaussians
    from lightning_bnn.datamodules.uci import UCI

__all__ = [
    "Airfoil",
    "CIFAR10",
    "CIFAR100",
    "Concrete",
    "DataModule",
    "Diabetes",
    "Digits",
    "EmbeddedTable",
    "Energy",
    "MNIST",
    "MissingData",
    "NoisySine",
    "Splits",
    "TinyImageNet",
    "TractableReLU",
    "TwoGaussians",
    "UCI",
    "Yacht",
]

lazy_package(__name__)
