"""What several packages need: command lines and errors, files and the cache on disk, MXNet's import, NVIDIA's GPUs."""
