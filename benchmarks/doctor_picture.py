"""The page of `PosteriorDoctor` as a picture: four SGHMC chains that were stopped too early.

python benchmarks/doctor_picture.py docs/doctor.png     # needs chromium
"""

import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import lightning as L
import torch

from lightning_bnn import samplers
from lightning_bnn.callbacks import PosteriorDoctor
from lightning_bnn.datamodules import Digits
from lightning_bnn.models import mlp
from lightning_bnn.modules import SGHMC

QUIET = ("gpu", "quic", "background-networking", "component-update", "sync")


def main(out: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sampler = partial(samplers.SGHMC, lr=0.02)
    module = SGHMC(mlp(64, [16], 10), members=4, prior_std=1.0, optimizer=sampler)
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            max_epochs=40, callbacks=[PosteriorDoctor()], default_root_dir=folder, logger=False,
            enable_checkpointing=False, check_val_every_n_epoch=40, accelerator="cpu",
        )  # fmt: skip
        trainer.fit(module, Digits())
        screenshot(Path(folder) / "doctor.html", Path(out).resolve())


def screenshot(page: Path, picture: Path) -> None:
    """A page as a browser shows it."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("There is no chromium to draw the page with.")
    with tempfile.TemporaryDirectory() as profile:
        options = [f"--disable-{name}" for name in QUIET]
        subprocess.run(
            [browser, "--headless", "--no-sandbox", "--no-first-run", *options,
             f"--user-data-dir={profile}", "--window-size=1200,1500", "--hide-scrollbars",
             f"--screenshot={picture}", page.as_uri()],
            check=True, capture_output=True,
        )  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1])
