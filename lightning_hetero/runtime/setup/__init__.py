"""What happens once before the first iteration: devices and layers are found and measured."""
