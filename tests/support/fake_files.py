"""Tiny data sets on the disk, in the formats of the real ones."""

import hashlib
import pickle
import struct

import numpy as np
from PIL import Image
from scipy.io import savemat
from torchvision import datasets


def everything(root, monkeypatch):
    """All sets in one folder."""
    mnist(root)
    cifar(root, monkeypatch)
    cifar(root, monkeypatch, datasets.CIFAR100)
    svhn(root, monkeypatch)
    tiny_imagenet(root)
    textures(root)
    uci(root)
    uci_csv(root)


def mnist(root, n=40, seed=0):
    """Big-endian idx files of MNIST and FashionMNIST."""
    rng = np.random.default_rng(seed)
    for name in ("MNIST", "FashionMNIST"):
        folder = root / name / "raw"
        folder.mkdir(parents=True)
        for part in ("train", "t10k"):
            images = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8)
            labels = (np.arange(n) % 10).astype(np.uint8)
            head = struct.pack(">IIII", 0x803, n, 28, 28)
            (folder / f"{part}-images-idx3-ubyte").write_bytes(head + images.tobytes())
            head = struct.pack(">II", 0x801, n)
            (folder / f"{part}-labels-idx1-ubyte").write_bytes(head + labels.tobytes())


def cifar(root, monkeypatch, kind=datasets.CIFAR10, n=20, seed=0):
    """Pickled batches; torchvision's checksums are replaced by those of these files."""
    rng = np.random.default_rng(seed)
    folder = root / kind.base_folder
    folder.mkdir(parents=True)
    classes = 100 if kind is datasets.CIFAR100 else 10
    key = "fine_labels" if kind is datasets.CIFAR100 else "labels"
    for attribute in ("train_list", "test_list"):
        listed = []
        for name, _ in getattr(kind, attribute):
            data = rng.integers(0, 256, (n, 3072), dtype=np.uint8)
            labels = [int(k) % classes for k in range(n)]
            listed.append([name, _write(folder / name, {"data": data, key: labels})])
        monkeypatch.setattr(kind, attribute, listed)
    names = {kind.meta["key"]: [str(k) for k in range(classes)]}
    meta = {**kind.meta, "md5": _write(folder / kind.meta["filename"], names)}
    monkeypatch.setattr(kind, "meta", meta)


def svhn(root, monkeypatch, n=12, seed=0):
    """A MATLAB file with images in the last dimension, and the digit 0 labelled 10."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (32, 32, 3, n), dtype=np.uint8)
    labels = (np.arange(n) % 10 + 1).astype(np.uint8)[:, None]
    savemat(root / "test_32x32.mat", {"X": images, "y": labels})
    url, name, _ = datasets.SVHN.split_list["test"]
    digest = hashlib.md5((root / name).read_bytes()).hexdigest()
    monkeypatch.setitem(datasets.SVHN.split_list, "test", [url, name, digest])


def tiny_imagenet(root, classes=4, per_class=3, seed=0):
    """Folders of JPEG files; one photograph is grey, as some of the real ones are."""
    rng = np.random.default_rng(seed)
    folder = root / "tiny-imagenet-200"
    names = [f"n{k:08d}" for k in range(classes)]
    for name in names:
        images = folder / "train" / name / "images"
        images.mkdir(parents=True)
        for k in range(per_class):
            _photo(rng, 64, grey=k == 0).save(images / f"{name}_{k}.JPEG")
    (folder / "wnids.txt").write_text("\n".join(reversed(names)) + "\n")
    (folder / "val" / "images").mkdir(parents=True)
    rows = []
    for k, name in enumerate(names):
        _photo(rng, 64).save(folder / "val" / "images" / f"val_{k}.JPEG")
        rows.append(f"val_{k}.JPEG\t{name}\t0\t0\t63\t63")
    (folder / "val" / "val_annotations.txt").write_text("\n".join(rows) + "\n")


def textures(root, seed=0):
    """The Describable Textures: photographs of any size, and lists of the ten splits."""
    rng = np.random.default_rng(seed)
    base = root / "dtd" / "dtd"
    (base / "labels").mkdir(parents=True)
    for k, part in enumerate(("train", "val", "test")):
        folder = base / "images" / f"kind{k}"
        folder.mkdir(parents=True)
        _photo(rng, 90).save(folder / f"kind{k}_0.jpg")
        (base / "labels" / f"{part}1.txt").write_text(f"kind{k}/kind{k}_0.jpg\n")


def uci_csv(root, table="airfoil", n=40, features=5, seed=0):
    """A line of names, then one example per line, the target last."""
    data = np.random.default_rng(seed).normal(3, 2, (n, features + 1))
    names = ",".join([*(f"x{k}" for k in range(features)), "target"])
    np.savetxt(root / f"{table}.csv", data, delimiter=",", header=names, comments="")
    return data


def uci(root, table="energy", n=40, features=8, splits=2, seed=0):
    """A table, the columns, and published splits."""
    rng = np.random.default_rng(seed)
    folder = root / "UCI_Datasets" / table / "data"
    folder.mkdir(parents=True)
    data = rng.normal(3, 2, (n, features + 1))
    data[:, 2] = 7
    np.savetxt(folder / "data.txt", data)
    np.savetxt(folder / "index_features.txt", np.arange(features, dtype=float))
    np.savetxt(folder / "index_target.txt", [float(features)])
    for k in range(splits):
        order = rng.permutation(n)
        np.savetxt(folder / f"index_train_{k}.txt", order[4:].astype(float))
        np.savetxt(folder / f"index_test_{k}.txt", order[:4].astype(float))
    return data


def _write(path, content):
    path.write_bytes(pickle.dumps(content))
    return hashlib.md5(path.read_bytes()).hexdigest()


def _photo(rng, side, grey=False):
    shape = (side, side + 10) if side != 64 else (side, side)
    pixels = rng.integers(0, 256, shape if grey else (*shape, 3), dtype=np.uint8)
    return Image.fromarray(pixels)
