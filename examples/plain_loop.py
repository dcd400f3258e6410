"""A method without Lightning: three mean-field posteriors side by side, in a loop of one's own."""

import torch

from lightning_bnn import methods, params
from lightning_bnn.models import mlp

torch.manual_seed(0)
x = torch.rand(400, 2) * 2 - 1
y = (x[:, 0] * x[:, 1] > 0).long()
network = mlp(2, [32], 2)
method = methods.MFVI(prior_std=1.0)
state = method.init(network, params.populate(network, members=3))
run = methods.Run(network, num_data=len(x))
optimizer = torch.optim.Adam(state.parameters(), 1e-2)
for _ in range(300):
    rows = torch.randint(len(x), (100,))
    loss = method.losses(state, methods.Batch((x[rows],), y[rows]), run)["loss"].sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
probabilities = method.posterior(state, run).predict(network, x, n=30).softmax(-1).mean(0)
print(f"accuracy {(probabilities.argmax(-1) == y).float().mean():.2f}")
