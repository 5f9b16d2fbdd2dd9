"""C kernels of the CPU path: sources, their build on first use, and the calls into them."""
