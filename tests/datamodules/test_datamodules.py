"""Data modules on tiny files of the real formats: shapes, splits, preprocessing, missing files."""

from functools import partial

import fake_files
import numpy as np
import pytest
import torch
from sklearn.svm import SVC
from torchvision import datasets

from lightning_bnn.datamodules import (
    CIFAR10,
    CIFAR100,
    MNIST,
    UCI,
    Airfoil,
    Concrete,
    Diabetes,
    Digits,
    Energy,
    MissingData,
    NoisySine,
    TinyImageNet,
    TractableReLU,
    TwoGaussians,
    Yacht,
    toy,
)
from lightning_bnn.datamodules.toy import separation


@pytest.fixture
def root(tmp_path, monkeypatch):
    fake_files.everything(tmp_path, monkeypatch)
    return str(tmp_path)


TABLE = ["test", "shuffled", "far"]
MODULES = {
    "digits": (lambda root: Digits(), (1, 8, 8),
               ["test", "scrambled", "inverted", "noise", "noisy", "moved"]),
    "mnist": (lambda root: MNIST(root, val_size=5), (1, 28, 28), ["test", "fashion"]),
    "cifar10": (lambda root: CIFAR10(root, val_size=5), (3, 32, 32), ["test", "svhn"]),
    "cifar100": (lambda root: CIFAR100(root, val_size=5), (3, 32, 32), ["test", "svhn"]),
    "tiny imagenet": (lambda root: TinyImageNet(root, val_size=2), (3, 64, 64),
                      ["test", "textures"]),
    "two gaussians": (lambda root: TwoGaussians(), (2,), ["test", "ring"]),
    "tractable": (lambda root: TractableReLU(), (1,), ["test"]),
    "uci energy": (lambda root: UCI("energy", root, val_size=4), (8,), TABLE),
    "uci airfoil": (lambda root: UCI("airfoil", root, val_size=4), (5,), TABLE),
    "diabetes": (lambda root: Diabetes(val_size=20), (10,), TABLE),
    "sine": (lambda root: NoisySine(), (1,), ["test", "outside"]),
    "airfoil": (lambda root: Airfoil(val_size=20), (5,), TABLE),
    "yacht": (lambda root: Yacht(val_size=20), (6,), TABLE),
    "concrete": (lambda root: Concrete(val_size=20), (8,), TABLE),
    "energy": (lambda root: Energy(val_size=20), (8,), TABLE),
}  # fmt: skip
"""By name, with the shape of an example and the sets to test on."""


def batches(data, loader):
    return [data.on_after_batch_transfer(batch, 0) for batch in loader]


@pytest.mark.parametrize("name", MODULES)
def test_batches_of_all_loaders(name, root):
    make, shape, sets = MODULES[name]
    data, again = make(root), make(root)
    data.prepare_data()
    data.setup("fit")
    assert [each for each, _ in data.test_sets] == sets
    loaders = [data.train_dataloader(), data.predict_dataloader(), *data.test_dataloader()]
    assert len(data.test_dataloader()) == len(data.test_sets)
    if data.splits.val is not None:
        loaders.append(data.val_dataloader())
    for loader in loaders:
        for x, y in batches(data, loader):
            assert x.shape[1:] == shape
            assert x.dtype == torch.float32
            assert len(x) == len(y)
    assert sum(len(b.inputs) for b in data.train_dataloader()) == data.num_data
    pairs = zip(*(batches(d, d.train_dataloader()) for d in (data, again)), strict=True)
    assert all(torch.equal(a, b) for one, two in pairs for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("name", ["mnist", "cifar10", "tiny imagenet", "uci energy", "digits"])
def test_held_out_examples_are_not_trained_on(name, root):
    data = MODULES[name][0](root)
    data.setup()
    rows = {row.numpy().tobytes() for row in data.splits.train[0]}
    held = {row.numpy().tobytes() for row in data.splits.val[0]}
    test = {row.numpy().tobytes() for row in data.splits.test[0]}
    assert not rows & held
    assert not (rows | held) & test


def test_images_are_normalised_as_torchvision_does(root):
    from torchvision.transforms import v2

    for data in (MNIST(root, augment=False, val_size=0), CIFAR10(root, augment=False, val_size=0)):
        images = data.load().test[0]
        reference = v2.Compose(
            [v2.ToDtype(torch.float32, scale=True), v2.Normalize(data.mean, data.std)]
        )
        torch.testing.assert_close(data.normalise(images), reference(images))


def test_files_are_read_as_torchvision_reads_them(root):
    data = CIFAR10(root, val_size=0)
    reference = datasets.CIFAR10(root)
    for k, (image, label) in enumerate(zip(*data.load().train, strict=True)):
        assert label == reference[k][1]
        assert np.array_equal(image.movedim(0, -1), np.asarray(reference[k][0]))
    svhn = datasets.SVHN(root, split="test")
    assert np.array_equal(data.load().ood["svhn"][0], svhn.data)


def test_tiny_imagenet_decodes_every_photograph(root):
    data = TinyImageNet(root, val_size=0)
    splits = data.load()
    assert splits.train[0].shape == (12, 3, 64, 64)
    assert splits.train[1].tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert splits.test[1].tolist() == [0, 1, 2, 3]
    grey = splits.train[0][0]
    assert torch.equal(grey[0], grey[1])
    assert splits.ood["textures"][0].shape == (3, 3, 64, 64)


def test_uci_is_standardised_by_the_training_rows(tmp_path):
    raw = fake_files.uci(tmp_path)
    data = UCI("energy", str(tmp_path), split=1)
    splits = data.load()
    rows = np.loadtxt(tmp_path / "UCI_Datasets/energy/data/index_test_1.txt").astype(int)
    train = np.delete(raw, rows, 0)
    wanted = (raw[rows, 8:] - train[:, 8:].mean(0)) / train[:, 8:].std(0)
    np.testing.assert_allclose(splits.test[1], wanted, rtol=1e-5)
    np.testing.assert_allclose(splits.train[0].mean(0), 0, atol=1e-6)
    assert splits.test[0][:, 2].eq(0).all()  # a column that does not vary
    np.testing.assert_allclose(data.target_std, train[:, 8:].std(0), rtol=1e-6)


def test_uci_without_published_splits(tmp_path):
    raw = fake_files.uci(tmp_path, "yacht", splits=0, features=6)
    one, two = (UCI("yacht", str(tmp_path), split=k).load() for k in (0, 1))
    assert len(one.test[0]) == len(raw) // 10
    assert not torch.equal(one.test[0], two.test[0])


def test_a_csv_table_has_its_target_in_the_last_column(tmp_path):
    raw = fake_files.uci_csv(tmp_path, "concrete", features=8)
    data = UCI("concrete", str(tmp_path))
    splits = data.load()
    train, test = splits.train[1] * data.target_std, splits.test[1] * data.target_std
    every = torch.cat([train, test])[:, 0].sort().values.double()
    wanted = torch.from_numpy(np.sort(raw[:, -1]))
    torch.testing.assert_close(every - every[0], wanted - wanted[0], rtol=1e-4, atol=1e-4)
    assert splits.train[0].shape == (36, 8)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be a table of finite numbers"),
        ("a,b\n1,2\n", "at least three rows"),
        ("a,b\n1,2\n3,x\n5,6\n", "is not a table of numbers"),
        ("a,b\n1,2\n3\n5,6\n", "is not a table of numbers"),
        ("a,b\n1,2\n3,nan\n5,6\n", "some of which are not finite"),
    ],
)
def test_damaged_tables_are_refused(tmp_path, text, message):
    (tmp_path / "yacht.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        UCI("yacht", str(tmp_path)).load()


def test_digits_keep_the_shares_of_all_classes():
    splits = Digits(val_share=0.2, test_share=0.2).load()
    counts = torch.stack([part[1].bincount() for part in (splits.train, splits.val, splits.test)])
    shares = counts / counts.sum(0)
    torch.testing.assert_close(shares[0], torch.full((10,), 0.6), atol=0.01, rtol=0)
    assert counts.sum() == 1797
    assert Digits(val_share=0.0).val_dataloader() == []


@pytest.mark.parametrize("seed", range(3))
def test_the_gap_between_two_gaussians_is_that_of_a_hard_margin(seed):
    points, labels = TwoGaussians(seed=seed).load().train
    machine = SVC(kernel="linear", C=1e8, tol=1e-6).fit(points.numpy(), labels.numpy())
    assert separation(points, labels) == pytest.approx(2 / np.linalg.norm(machine.coef_), rel=2e-3)
    assert separation(points, labels) >= 1
    points[0] = torch.tensor([2.0, 2.0])
    assert separation(points, labels) == pytest.approx(0, abs=1e-6)


def test_the_tractable_targets():
    x, y = TractableReLU(alpha=0.15).load().train
    torch.testing.assert_close(y, 0.15 * x.abs())
    assert x.abs().max() <= 10
    assert len(x) == 100


@pytest.mark.bad_input
@pytest.mark.parametrize("kind", [MNIST, CIFAR10, CIFAR100, TinyImageNet, partial(UCI, "energy")])
def test_missing_files_say_how_to_get_them(kind, tmp_path):
    with pytest.raises(MissingData, match=r"not found in .*LIGHTNING_BNN_DATA"):
        kind(str(tmp_path)).setup()


def test_the_root_comes_from_the_environment(root, monkeypatch):
    monkeypatch.setenv("LIGHTNING_BNN_DATA", root)
    assert MNIST(val_size=0).num_data == 40


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: MNIST(root, batch_size=0), "`batch_size` must be at least 1"),
        (lambda root: MNIST(root, val_size=40).setup(), "`val_size` must be at least 0 and below"),
        (lambda root: Digits(test_share=0.0), "`val_share` and `test_share`"),
        (lambda root: TwoGaussians(gap=4), "`gap` must be"),
        (lambda root: TwoGaussians(size=1000, gap=1.5).load(), "None of 10 draws of 1000"),
        (lambda root: NoisySine(noise=float("nan")), "`noise` must not be negative"),
        (lambda root: Diabetes(test_share=1.0), "`test_share` must be between 0 and 1"),
        (lambda root: UCI(3, root), "`table` must be the name of a table"),
        (lambda root: UCI("", root), "`table` must be the name of a table"),
        (lambda root: UCI("..", root), "`table` must be the name of a table"),
        (lambda root: UCI("/etc/passwd", root), "`table` must be the name of a table"),
        (lambda root: UCI("energy", root, split=9).setup(), "`split` must be between 0 and 1"),
    ],
)
def test_bad_arguments(make, message, root, monkeypatch):
    monkeypatch.setattr(toy, "_DRAWS", 10)
    with pytest.raises(ValueError, match=message):
        make(root)


def test_the_noise_of_the_sine_is_as_large_as_asked_for():
    x, y = NoisySine(size=20_000, noise=0.3).load().train
    assert abs(float((y - (2 * x).sin()).std()) - 0.3) < 5e-3
    assert float(x.abs().max()) <= 2
    outside, _ = NoisySine().load().ood["outside"]
    assert float(outside.abs().min()) >= 2


@pytest.mark.parametrize(
    ("table", "rows", "least", "largest"),
    [
        (Yacht, 308, 0.01, 62.42),
        (Airfoil, 1503, 103.38, 140.987),
        (Concrete, 1030, 2.331807832, 82.5992248),
        (Energy, 768, 6.01, 43.1),
    ],
)
def test_tables_of_the_package_are_standardised_by_training_rows(table, rows, least, largest):
    data = table(test_share=0.2)
    splits = data.load()
    assert len(splits.test[0]) == round(0.2 * rows) == rows - len(splits.train[0])
    inputs, targets = splits.train
    assert float(inputs.mean(0).abs().max()) < 1e-5
    unit = torch.cat([splits.train[1], splits.test[1]]) * data.target_std
    assert abs(float(unit.max() - unit.min()) - (largest - least)) < 1e-3
