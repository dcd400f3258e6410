"""Forwards that are functions, and weights that are generic."""

from torch import nn


class Forward(nn.Module):
    """A module whose forward is a plain function of itself and the inputs."""

    def __init__(self, forward, **modules):
        super().__init__()
        self.function = forward
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, *x):
        return self.function(self, *x)


def randomise(model):
    """Random affine parameters and running statistics; no parameter is left at zero."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_(0, 0.2)
            module.running_var.uniform_(0.5, 2)
        norms = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
        if isinstance(module, norms) and module.weight is not None:
            module.weight.data.uniform_(0.5, 1.5)
            if getattr(module, "bias", None) is not None:
                module.bias.data.normal_(0, 0.2)
    for name, p in model.named_parameters():
        if not p.any() or any(part in name for part in ("layer_scale", "pos_embed", "class_token")):
            p.data.normal_(0, 0.3)
    return model
