"""Which weights are held in few bits, and how: read from a checkpoint's quantization_config or from the settings."""
