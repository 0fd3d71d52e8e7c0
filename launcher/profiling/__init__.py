"""What each layer of a job costs on this device."""
