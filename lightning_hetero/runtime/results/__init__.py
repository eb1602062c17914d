"""What the user's steps leave: losses, logs, metrics and outputs, as one device has them."""
