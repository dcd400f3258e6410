"""Records on the CPU: what a CUDA graph would repeat is computed anew by every replay."""

from weightsym_fast import graphs


class Repeated:
    """The results of one run, which every replay renews in place."""

    is_replayed = True

    def __init__(self, compute, reads):
        self.compute, self.results, self.calls = compute, None, 0

    def __call__(self):
        self.calls += 1
        if self.calls < 3:
            self.results = self.compute()
        else:
            self.replay()
        return self.results

    def replay(self):
        for old, new in zip(self.results, self.compute(), strict=True):
            old.copy_(new)


def pretend_a_gpu(monkeypatch):
    """Take tensors of the CPU for those of a GPU, until the test ends."""
    monkeypatch.setattr(graphs, "Recorded", Repeated)
    monkeypatch.setattr(graphs, "_are_on_gpu", lambda _: True)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
