"""Pages as a browser shows them; needs chromium and `pip install playwright`.

python benchmarks/screenshots.py tensorboard FILE RUNS    TensorBoard on the runs of a folder
"""

import argparse
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path

CARDS = "tau|mass_excess|posterior/(marginals/0.weight|trajectories/(raw|scaled|sorted))"


def tensorboard(picture: Path, runs: Path, cards: str, tab: str) -> None:
    """TensorBoard's cards whose names match."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(runs)]
    command += ["--port", str(port), "--samples_per_plugin", "images=200", "--load_fast", "false"]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    page = f"http://127.0.0.1:{port}/"
    try:
        _wait_for(f"{page}data/runs")
        found = urllib.parse.quote(f"^({cards})$")
        address = f"{page}?tagFilter={found}&smoothing=0#{tab}"
        series = tab == "timeseries"
        part, clicks = ("metrics-main-view", ("Settings",)) if series else ("body", ())
        screenshot(address, picture, (1500, 1040), part, clicks)
    finally:
        server.terminate()
        server.wait()


def _wait_for(address: str, seconds: float = 90) -> None:
    """Until TensorBoard has read the runs."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(address, timeout=5) as answer:
                if answer.read().strip() != b"[]":
                    return
        except OSError:
            pass  # it is starting
        time.sleep(0.5)
    raise SystemExit(f"TensorBoard showed no runs within {seconds:g} seconds.")


def screenshot(
    address: str, picture: Path, size: tuple[int, int], part: str = "body", clicks: tuple = ()
) -> None:
    """A part of a page as a browser shows it once nothing is loaded any more."""
    from playwright.sync_api import sync_playwright

    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("There is no chromium to draw the page with.")
    with sync_playwright() as drivers:
        program = drivers.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = program.new_page(viewport={"width": size[0], "height": size[1]})
        page.goto(address)
        page.wait_for_load_state("networkidle")
        for name in clicks:
            page.get_by_role("button", name=name).first.click()
        page.wait_for_timeout(5000)  # charts are drawn after they are loaded
        page.locator(part).first.screenshot(path=picture)
        program.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["tensorboard"])
    parser.add_argument("picture", type=Path)
    parser.add_argument("runs", type=Path, help="folder of TensorBoard's files")
    parser.add_argument("--cards", default=CARDS, help="a pattern of names")
    parser.add_argument("--tab", default="timeseries", help="timeseries, text, images, ...")
    options = parser.parse_args()
    tensorboard(options.picture.resolve(), options.runs, options.cards, options.tab)


if __name__ == "__main__":
    main()
