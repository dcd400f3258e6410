"""Networks as dicts of tensors: stacks, predictions, files."""
