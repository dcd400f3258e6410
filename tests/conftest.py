import pytest
import torch


@pytest.fixture(autouse=True)
def _reproducible():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def pytest_configure(config):
    torch.set_num_threads(1)
