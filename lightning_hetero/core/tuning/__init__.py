"""What trains of a model whose own weights are frozen: adapters, and how the rest is stored."""
