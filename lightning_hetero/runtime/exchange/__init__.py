"""Pull and push: weights to the stages, gradients to the owners."""
