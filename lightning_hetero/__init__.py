"""Train one transformer across unequal GPUs inside PyTorch Lightning."""
