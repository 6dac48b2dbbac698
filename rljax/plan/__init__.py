"""What a run will need and do, known before a device is touched."""
