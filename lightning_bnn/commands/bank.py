"""`lightning-bnn bank`: show a bank, import networks into it, and export them."""

from __future__ import annotations

from pathlib import Path

from lightning_bnn.bank import CheckpointBank, export_files, import_files
from lightning_bnn.bank.shipped import bank_card, shipped_path
from lightning_bnn.tables import Cell, Table
from weightsym import Outcome


def bank(
    path: str,
    add: str | None = None,
    prefix: str | None = None,
    export: str | None = None,
    verify: bool = False,
) -> Outcome:
    """Show the content of a bank of networks, import or export networks, or check the files.

    Args:
        path: folder of the bank, or the name of a bank of lightning-bnn-data, such as
            mnist_optunets.
        add: another bank, a folder with checkpoints (.ckpt, .pt, .pth, .safetensors) or archives
            (.tgz), or one file. Its networks are appended to the bank, which is created if needed.
        prefix: prefix of the network's tensor names in the checkpoints, dot included, e.g. net.
        export: folder to which every network is written as .safetensors.
        verify: compare all files with their checksums.
    """
    if add is not None:
        with CheckpointBank(path) as target:
            before = len(target)
            if (Path(add) / "manifest.jsonl").is_file():
                target.absorb(CheckpointBank(add, "r"))
            else:
                import_files(target, add, prefix=prefix)
            print(f"added {len(target) - before} networks from {add}")
    folder = shipped_path(path)
    store = CheckpointBank(folder, "r")
    for key, text in bank_card(folder).items():
        print(f"{key + ':':<14}{text}")
    print(_report(store))
    if verify:
        store.verify()
        print("all files match their checksums")
    if export is not None:
        print(f"wrote {len(export_files(store, export))} files to {export}")
    shapes = {name: list(shape) for name, shape in store.shapes.items()}
    content = {"networks": len(store), "bytes": store.nbytes, "shapes": shapes}
    return Outcome({**content, "records": list(store.records)})


def _report(store: CheckpointBank) -> str:
    sizes = {name: shape.numel() for name, shape in store.shapes.items()}
    buffers = len(store.names) - len(sizes)
    count, weights = len(store), sum(sizes.values())
    tensors: list[list[Cell]] = [
        [n, " x ".join(map(str, store.shapes[n])) or "1", k] for n, k in sizes.items()
    ]
    tensors += [[f"and {buffers} buffers", "", ""]] if buffers else []
    keys = list(dict.fromkeys(key for record in store.records for key in record))
    ends = dict.fromkeys((0, 1, count - 2, count - 1)) if count > 3 else range(count)
    networks: list[list[Cell]] = [
        [str(k), *(str(store.records[k].get(key, "")) for key in keys)] for k in ends
    ]
    title = f"{store.path}: {count} networks of {weights} weights, {store.nbytes / 1e6:.3g} MB"
    tables = [Table("", ["tensor", "shape", "weights"], tensors)]
    tables += [Table("The first and the last", ["network", *keys], networks)] if keys else []
    return "\n\n".join([title, *(table.text() for table in tables)])
