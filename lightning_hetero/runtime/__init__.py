"""Execute plans: stages of the user's module, slices, pull and push, over torch.distributed."""
