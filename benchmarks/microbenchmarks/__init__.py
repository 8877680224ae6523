"""What only a device can tell about the cost model."""
