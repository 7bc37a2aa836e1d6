"""How a step runs on a device."""
