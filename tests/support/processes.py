"""Processes of their own, without the seconds that importing torch and Lightning anew would take.

They are forked from a server that has imported everything and computed nothing, so that each is as
good as a fresh interpreter. What is run must be a function of a module: it is found by its name.
"""

import contextlib
import json
import multiprocessing
import os
import pickle
import pkgutil
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import bnn_research
import lightning_bnn
import weightsym

__all__ = ["fresh", "on_devices", "on_ranks", "result", "serving", "start"]

OURS = [
    found.name
    for package in (bnn_research, lightning_bnn, weightsym)
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
]
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["pytest", "sklearn.metrics", "torchvision", "tensorboard", *OURS])


class Started:
    """A process that runs: its number, its end, and what it said and returned."""

    def __init__(self, function, arguments, environment, folder):
        handle, path = tempfile.mkstemp(suffix=".log")
        os.close(handle)
        self.output = Path(path)
        self._receiver, sender = SERVER.Pipe(duplex=False)
        call = (function, arguments, environment, folder, str(self.output), sender)
        self.process = SERVER.Process(target=_run, args=call)
        self.process.start()
        sender.close()

    def result(self, timeout=300):
        """What the function has returned; its error, with all that was printed, if it has not."""
        value, error = None, "it ended without a word"
        with contextlib.suppress(EOFError):
            if not self._receiver.poll(timeout):
                self.process.kill()
                error = f"no answer in {timeout} s"
            else:
                value, error = pickle.loads(self._receiver.recv_bytes())
        self.process.join()
        said = self.output.read_text(errors="replace")
        self.output.unlink()
        assert error is None, f"{error}\n{said[-3000:]}"
        return value


def start(function, *arguments, environment=None, folder=None):
    """Begin ``function(*arguments)`` in a process of its own."""
    return Started(function, arguments, environment or {}, folder and str(folder))


def result(function, *arguments, environment=None, folder=None, timeout=300):
    """What ``function(*arguments)`` returns in a process of its own."""
    return start(function, *arguments, environment=environment, folder=folder).result(timeout)


@contextlib.contextmanager
def serving(function, around):
    """Hand out a function that asks one process for ``function(argument)``, within ``around()``."""
    ours, theirs = SERVER.Pipe()
    process = SERVER.Process(target=_serve, args=(function, around, theirs), daemon=True)
    process.start()
    theirs.close()

    def ask(argument):
        ours.send(argument)
        return ours.recv()

    try:
        yield ask
    finally:
        process.kill()


def _serve(function, around, asked):
    import torch

    torch.set_num_threads(1)
    with around():
        while True:
            asked.send(function(asked.recv()))


def on_devices(count, function, *arguments):
    """Run ``function(*arguments)`` as ``torchrun`` would; what each of ``count`` processes returns.

    A Trainer with ``devices=count`` and a distributed strategy finds that they are there already.
    """
    if count == 1:
        return [result(function, *arguments)]
    return _together([start(function, *arguments, environment=p) for p in _places(count)])


def on_ranks(function, count=2):
    """What ``function(rank)`` returns in each of some processes that gloo connects."""
    return _together([start(_connected, function, environment=p) for p in _places(count)])


def _together(started):
    """The results of processes that wait for each other: none is left behind."""
    try:
        return [each.result() for each in started]
    finally:
        for each in started:
            each.process.kill()


def _connected(function):
    import torch.distributed as dist

    dist.init_process_group("gloo")
    value = function(dist.get_rank())
    dist.barrier()
    return value


def _places(count):
    """What a launcher tells its processes."""
    return [
        {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "NODE_RANK": "0",
            "WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }
        for port in [_free_port()] for rank in range(count)
    ]  # fmt: skip


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# ------------------------------------------------------------ interpreters
_BRANCHES = """
import json, os, sys
ends = []
for module, codes in json.loads(sys.argv[1]).items():
    __import__(module)
    for code, path in codes:
        if not (child := os.fork()):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), 1)
            os.dup2(1, 2)
            exec(code, {"__name__": "__main__"})
            sys.exit()
        ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(*ends)
"""


def fresh(**codes):
    """The exit codes and outputs of programs, each in an interpreter that has not imported us.

    ``codes`` has the programs that begin when ``torch``, and those when ``lightning`` is there:
    one interpreter imports both once, and each program is a copy of it.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: [f"{folder}/{name}{k}" for k in range(len(c))] for name, c in codes.items()}
        stages = {name: list(zip(codes[name], paths[name], strict=True)) for name in codes}
        stages = {name.replace("lightning", "lightning.pytorch"): s for name, s in stages.items()}
        done = subprocess.run(
            [sys.executable, "-c", _BRANCHES, json.dumps(stages)],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        outputs = [Path(path).read_text() for part in paths.values() for path in part]
    return list(zip(map(int, done.stdout.split()), outputs, strict=True))


def _run(function, arguments, environment, folder, output, sender):
    import torch

    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    if folder is not None:
        os.chdir(folder)
    torch.set_num_threads(1)
    try:
        answer = function(*arguments), None
    except BaseException:
        answer = None, traceback.format_exc()
    sender.send_bytes(pickle.dumps(answer))
    sender.close()
    os._exit(0)  # gloo's threads now and then abort a process that ends in the usual way
