"""The network whose average is kept: found in the first batch, then brought to its running mean."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map, tree_structure

from lightning_bnn import params as P
from lightning_bnn.batch_norms import batch_norms
from lightning_bnn.callbacks.network import Capture, candidates, plain, stack_of
from lightning_bnn.params import Params
from lightning_bnn.symmetry import RunningFrame, Symmetries, discover
from lightning_bnn.symmetry.forward import structural_copy
from lightning_bnn.symmetry.matching.repair import reestimated_on_calls

__all__ = ["AveragingFrame", "all_finite", "averaged_tensors", "sharing_of", "wide"]


def sharing_of(trainer: Any, pl_module: nn.Module) -> str:
    """Why no process has all weights; nothing where every one has."""
    kinds = {c.__name__ for c in type(trainer.strategy).__mro__}
    if any(isinstance(p, DTensor) for p in pl_module.parameters()):
        return "its weights are sharded over processes"
    if kinds & {"FSDPStrategy", "DeepSpeedStrategy"}:
        return f"{type(trainer.strategy).__name__} shards weights over processes"
    if hasattr(trainer.strategy, "gather_members") and trainer.world_size > 1:
        return "each process trains members of its own"
    return ""


class AveragingFrame:
    """Where the network stands in a module, its symmetries, and the inputs that it was trained on.

    Args:
        name: of the network in the module, if the user has named it.
        batch_norm: as for `discover`.
        examples: how many inputs are kept for batch norms.
        options: of `RunningFrame`.
    """

    def __init__(
        self,
        name: str | None,
        batch_norm: Literal["carrier", "eval"],
        examples: int,
        options: Mapping[str, Any],
    ) -> None:
        self.name, self.batch_norm, self.options = name, batch_norm, dict(options)
        self.kept = _RecentCalls(examples)
        self.running: RunningFrame | None = None
        self._capture: Capture | None = None
        self._network: nn.Module | None = None
        self._found = False
        self._root: Any = None
        self._restored: dict[str, Any] | None = None
        self._places: dict[str, str] = {}
        self._others: Params = {}

    def __getstate__(self) -> dict[str, Any]:
        """The state for a spawned process, which finds the network itself."""
        nothing = dict.fromkeys(("_capture", "_network", "_root", "running"))
        kept = _RecentCalls(self.kept.examples)
        return {**self.__dict__, **nothing, "kept": kept, "_found": False, "_others": {}}

    # -------------------------------------------------------- finding
    def begin(self, root: nn.Module) -> None:
        """Refuse a wrong name before anything is trained."""
        self._root, self._found = root, False
        if stack_of(root) is None and not any(nn.parameter.is_lazy(p) for p in root.parameters()):
            candidates(root, self.name)

    def before_batch(self, root: nn.Module) -> None:
        """Listen to the first batch, where the network is not known yet."""
        if not self._found and self._capture is None and stack_of(root) is None:
            self._capture = Capture(root, self.name)

    def after_batch(self, root: nn.Module) -> None:
        """Find the network and its symmetries, where they are not known yet."""
        if self._found:
            return
        self._found = True
        stack = stack_of(root)
        if stack is not None:
            self._find_stack(root, stack)
        elif self._capture is not None:
            self._find_called(root, self._capture)
        self._capture = None

    def _find_called(self, root: nn.Module, capture: Capture) -> None:
        try:
            found = capture.network(self.batch_norm)
        except ValueError as error:
            self._plainly(str(error))
            name = next((n for n, _ in candidates(root, self.name) if n in capture.calls), None)
            symmetries = None
        else:
            name, symmetries = found.name, found.symmetries
        if name is not None:
            called = root.get_submodule(name) if name else root
            self._network = plain(called)
            if batch_norms(self._network):
                self.kept.add(capture.calls[name])
                self.kept.listen(called, capture.calls[name])
        self._follow(symmetries)

    def _find_stack(self, root: Any, stack: Any) -> None:
        """Several networks side by side, if they are all that is trained."""
        self._network = None
        ours = {t.data_ptr() for t in stack.weights.values()}
        if any(p.data_ptr() not in ours for p in root.parameters() if p.numel()):
            self._plainly(f"{type(root).__name__} trains more than the weights of its networks")
            return
        example = stack.example
        if not example:
            self._plainly(f"{type(root).__name__} knows no example of its inputs")
            return
        try:
            symmetries = discover(stack.template, *example, batch_norm=self.batch_norm)
        except ValueError as error:
            self._plainly(str(error))
            return
        self._follow(symmetries)

    def _plainly(self, reason: str) -> None:
        rank_zero_warn(f"SymmetricAverage averages plainly: {reason}")

    def _follow(self, symmetries: Symmetries | None) -> None:
        state = self.state()["frame"]  # of the checkpoint, or of an earlier fit
        self.running = None if symmetries is None else RunningFrame(symmetries, **self.options)
        if self.running is not None and state is not None:
            self.running.load_state_dict(state)
        self._restored = None
        if self.running is not None:
            own = self._live()
            self._places = _places_of(own, averaged_tensors(self._root))
            self._others = {n: t for n, t in own.items() if n not in self._places}

    def _live(self) -> Params:
        """All tensors of the network, or of several."""
        stack = stack_of(self._root)
        if stack is not None:
            return stack.weights
        assert self._network is not None
        return P.of(self._network)

    # -------------------------------------------------------- averaging
    def first(self, live: Params) -> Params:
        """The tensors with which the average begins."""
        if self.running is None:
            return live
        return self._put(live, self.running.begin(self._network_in(live)))

    def bring(self, live: Params, mean: Params, weight: int | float) -> Params:
        """The tensors of a module with its network in the frame of the mean.

        Args:
            live: the tensors that are averaged.
            mean: their average so far.
            weight: with what share they enter it.
        """
        if self.running is None:
            return live
        goal = self._network_in(mean)
        return self._put(live, self.running.bring(self._network_in(live), goal, weight))

    def _network_in(self, tensors: Params) -> Params:
        """The network with those of its tensors that are averaged taken from others."""
        return {**self._others, **{name: tensors[p] for name, p in self._places.items()}}

    def _put(self, live: Params, network: Params) -> Params:
        return {**live, **{place: network[name] for name, place in self._places.items()}}

    def close(self) -> None:
        """Listen to no more batches from now on."""
        self.kept.close()
        if self._capture is not None:
            self._capture.close()
        self._capture = None

    # -------------------------------------------------------- statistics
    @torch.no_grad()
    def statistics(self, root: nn.Module, mean: Params) -> Params:
        """The statistics of batch norms in the network, estimated with the average in it.

        Args:
            root: the module, whose tensors give names and types.
            mean: the average.
        """
        network = self._network
        if network is None or not self.kept.calls or not batch_norms(network):
            return {}
        own, tensors = P.of(network), averaged_tensors(root)
        places = _places_of(own, tensors)
        averaged = {**own, **{name: mean[place] for name, place in places.items()}}
        device = next(iter(tensors.values())).device
        copy = structural_copy(network).eval()
        new = reestimated_on_calls(copy, averaged, self.kept.to(device))
        names = {t.data_ptr(): name for name, t in root.state_dict().items() if _is_tensor(t)}
        return {
            names[own[name].data_ptr()]: t
            for name, t in new.items()
            if name.rpartition(".")[2] in _STATISTICS and own[name].data_ptr() in names
        }

    # -------------------------------------------------------- state
    def state(self) -> dict[str, Any]:
        """What a checkpoint needs so that the average goes on."""
        frame = self._restored
        if frame is None and self.running is not None:
            frame = self.running.state_dict()
        return {"frame": frame, "calls": self.kept.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint, as soon as the network is found."""
        self._restored = state["frame"]
        self.kept.restore(state["calls"])

    def forget(self) -> None:
        """Begin anew, since another module is trained."""
        self.close()
        self.running, self._network, self._restored = None, None, None
        self.kept = _RecentCalls(self.kept.examples)


_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() > 0


# ------------------------------------------------------------ tensors and inputs
def averaged_tensors(root: nn.Module) -> Params:
    """Parameters and statistics of batch norms by their names in the state dict, live.

    Other buffers (masks, tables, counts) are no weights: an average keeps those of the last
    network.

    >>> list(averaged_tensors(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, affine=False))))
    ['0.weight', '0.bias', '1.running_mean', '1.running_var']
    """
    statistics = {
        id(t) for m in batch_norms(root) for t in (m.running_mean, m.running_var) if t is not None
    }
    every = [
        *root.named_parameters(remove_duplicate=False),
        *((n, b) for n, b in root.named_buffers(remove_duplicate=False) if id(b) in statistics),
    ]
    return {name: t.detach() for name, t in every if t.is_floating_point()}


def _places_of(network: Params, tensors: Params) -> dict[str, str]:
    """Under which name every tensor of a network is among those of the whole module.

    Args:
        network: live tensors by their names in the network.
        tensors: live tensors by their names in the module.
    """
    names = {(t.data_ptr(), t.shape): name for name, t in reversed(tensors.items()) if t.numel()}
    found = ((name, names.get((t.data_ptr(), t.shape))) for name, t in network.items())
    return {name: place for name, place in found if place is not None}


def wide(tensor: Tensor) -> Tensor:
    """A tensor in which small steps are not rounded away: half precision becomes float32."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def all_finite(tensors: Params) -> bool:
    """Whether no tensor holds NaN or infinite values."""
    sums = [t.sum(dtype=torch.float64) for t in tensors.values()]
    return not sums or bool(torch.stack([s.cpu() for s in sums]).isfinite().all())


class _RecentCalls:
    """The last inputs that a network was trained on, so many examples and no more.

    Args:
        examples: how many.
    """

    def __init__(self, examples: int) -> None:
        self.examples = examples
        self.calls: deque[tuple[tuple[Any, ...], dict[str, Any]]] = deque()
        self._handle: Any = None

    def listen(self, module: nn.Module, example: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        """Keep what a module is called with from now on, in training and alike to an example."""
        structure = tree_structure(example)

        def keep(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call = (args, kwargs)  # of the module itself: copies of it have its hooks, too
            if called is module and module.training and tree_structure(call) == structure:
                self.add(call)

        self._handle = module.register_forward_pre_hook(keep, with_kwargs=True)

    def add(self, call: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        """Keep a call, and drop the oldest that are not needed."""
        self.calls.append(tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, call))
        total = sum(map(_rows, self.calls))
        while len(self.calls) > 1 and total - _rows(self.calls[0]) >= self.examples:
            total -= _rows(self.calls.popleft())

    def close(self) -> None:
        """Keep no more calls from now on."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def to(self, device: torch.device) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """All calls that are kept, on a device."""
        return [
            tree_map(lambda t: t.to(device) if isinstance(t, Tensor) else t, call)
            for call in self.calls
        ]

    def state(self) -> list[Any]:
        """All calls, for a checkpoint: only those that hold nothing but tensors and numbers."""
        plain = (Tensor, int, float, bool, str, type(None))
        return [c for c in self.calls if all(isinstance(x, plain) for x in tree_leaves(c))]

    def restore(self, state: list[Any]) -> None:
        """Go on with the calls of a checkpoint."""
        self.calls = deque((tuple(args), dict(kwargs)) for args, kwargs in state)


def _rows(call: tuple[tuple[Any, ...], Mapping[str, Any]]) -> int:
    return max((len(t) for t in tree_leaves(call) if isinstance(t, Tensor) and t.ndim), default=1)
