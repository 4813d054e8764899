"""The cuda executor: a graph's training step on an NVIDIA GPU, through cuDNN and our own kernels, in CUDA graphs."""
