"""Processes of their own, without the seconds that importing torch and Lightning anew would take.

They are forked from a server that has imported everything and computed nothing, so that each is as
good as a fresh interpreter. What is run must be a function of a module: it is found by its name.
"""

import contextlib
import multiprocessing
import os
import pickle
import socket
import tempfile
import traceback
from pathlib import Path

__all__ = ["on_devices", "on_ranks", "result", "start"]

PRELOADED = ("lightning.pytorch", "torchvision", "tensorboard", "lightning_bnn.modules")
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(list(PRELOADED))


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
